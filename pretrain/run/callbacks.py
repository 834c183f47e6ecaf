"""The user's callbacks: functions and objects that are called during a run with copies of its records.

A function is called with the name of a hook and a record. An object has methods with the names of hooks, which are
called with the record. The setting `callbacks` names functions, and classes that are instantiated with the options in
their entries. `train` also accepts functions and objects, which are pickled for other processes. A callback runs on
rank 0 or, if its attribute `every_rank` is true, on every rank.
"""

from __future__ import annotations

import base64
import copy
import functools
import inspect
import logging
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.extensions import import_modules, load_custom
from pretrain.common.records import make_event
from pretrain.config.run import parse_callback

logger = logging.getLogger(__name__)

HOOKS = ("step_end", "evaluation", "checkpoint", "run_end")


class INTERFACE:
    """Checks the callbacks that the setting `callbacks` names, as `Contract` checks other kinds of extensions."""

    @staticmethod
    def check(callback: Any, name: str) -> None:
        """Raise `InputError` unless `callback` is a function (hook, record) or has a method with the name of a hook."""
        if _has_hooks(callback):
            return
        try:
            inspect.signature(callback).bind("step_end", {})
        except (TypeError, ValueError):
            raise InputError(
                f"{name}: is not a callback. Pass a function (hook, record), or a class or an object with some of the "
                f"methods {', '.join(f'{hook}(record)' for hook in HOOKS)}."
            ) from None


def check_options(entries: Sequence[Any]) -> None:
    """Raise `InputError` if the class of a callback does not accept the options of its entry."""
    for index, (name, _, options) in enumerate(map(parse_callback, entries)):
        callback: Any = load_custom(name)
        if not isinstance(callback, type) and options:
            raise InputError(f"callbacks.{index}: {name}: only a class accepts options. Remove them, or use a class.")
        try:
            if isinstance(callback, type):
                inspect.signature(callback).bind(**options)
        except TypeError as error:
            raise InputError(f"callbacks.{index}: {name}: {error}. Pass the options that the class accepts.") from None


def serialize_callbacks(objects: Sequence[Any], *, pickled: bool) -> tuple[Any, ...]:
    """Return the objects or, if `pickled`, strings from which another process restores them.

    Their classes may be defined in a notebook. Raises `InputError` for a callback that is invalid or cannot be pickled.
    """
    for index, callback in enumerate(objects):
        INTERFACE.check(callback, f"callbacks.{index}: {_qualified_name(callback)}")
    return tuple(map(_pickle, objects)) if pickled else tuple(objects)


def _pickle(callback: Any) -> str:
    """Return "MODULE DATA": the module to import first ("" for none), and the pickled callback in base64."""
    import cloudpickle

    function = callback
    while isinstance(function, functools.partial):
        function = function.func
    module = function.__module__ or "builtins"
    if module.partition(".")[0] in (*sys.stdlib_module_names, "__main__"):
        module = ""
    else:  # workers must be able to import the module, which may be in the program's folder
        import_modules([module], Path(sys.path[0]))
    try:
        return f"{module} {base64.b64encode(cloudpickle.dumps(callback)).decode()}"
    except Exception as error:
        raise InputError(
            f"callbacks: {_qualified_name(callback)} cannot be sent to the workers ({error}). Create objects that "
            "cannot be pickled in the callback's first hook call."
        ) from None


def _unpickle(serialized: str) -> Any:
    """Restore a callback that `_pickle` serialized in the launcher of this run; the string never comes from a file."""
    module, data = serialized.split(" ")
    if module:
        load_custom(module)
    return pickle.loads(base64.b64decode(data))


class Callbacks:
    """The callbacks of a run on this rank.

    Args:
        entries: the setting `callbacks`.
        objects: the result of `serialize_callbacks`.
        rank: rank of this worker.
        log: function that records an event.
        call_context: function that returns a context manager for a call, such as the watchdog's `awaiting`.

    Attributes:
        stop_reason: why the run must save a checkpoint and stop; "" if it may continue.
    """

    def __init__(
        self,
        entries: Sequence[Any] = (),
        objects: Sequence[Any] = (),
        rank: int = 0,
        log: Callable[[dict[str, Any]], None] = lambda _: None,
        call_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._log, self._call_context, self._rank, self.stop_reason = log, call_context, rank, ""
        self._reported_indices: set[int] = set()
        parsed = map(parse_callback, entries)
        targets = [(name, stop_on_error, load_custom(name), options) for name, stop_on_error, options in parsed]
        restored = [_unpickle(item) if isinstance(item, str) else item for item in objects]
        targets += [(_qualified_name(item), getattr(item, "on_error", "") == "stop", item, {}) for item in restored]
        self._callbacks = [
            (name, stop_on_error, _to_function(name, target, options))
            for name, stop_on_error, target, options in targets
            if rank == 0 or getattr(target, "every_rank", False)
        ]

    def call(self, hook: str, record: Mapping[str, Any]) -> None:
        """Call each callback with a copy of the record, and record its first error; `on_error: stop` stops the run."""
        for index, (name, stop_on_error, function) in enumerate(self._callbacks):
            try:
                with self._call_context():
                    function(hook, MappingProxyType(copy.deepcopy(dict(record))))
            except (Exception, SystemExit) as error:
                error_type, reason = type(error).__name__, next(iter(str(error).strip().splitlines()), "")
                message = f"the callback {name} raised {error_type} in {hook} of step {record['step']}: {reason}"
                self.stop_reason = self.stop_reason or (message if stop_on_error else "")
                if index not in self._reported_indices:
                    self._reported_indices.add(index)
                    logger.warning("%s", message, exc_info=error)
                    effect = (
                        "the run stops" if stop_on_error else "the run continues; its later errors are not reported"
                    )
                    message += f"; {effect}. logs/training-{self._rank}.log has the traceback"
                    self._log(make_event("callback", message, step=record["step"]))

    def call_for_each(self, hook: str, records: list[dict[str, Any]]) -> None:
        """Call `hook` for each of `records`, such as new checkpoints, and clear the list."""
        while records:
            self.call(hook, records.pop(0))


def _to_function(name: str, target: Any, options: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any]], Any]:
    """Return the callback `target`, a function, class or object, as a function (hook, record)."""
    try:
        instance = target(**options) if isinstance(target, type) else target
    except Exception as error:
        logger.warning("%s", name, exc_info=error)
        raise InputError(
            f"callbacks: {name} raises {type(error).__name__} when it is created ({error}). See logs/training-0.log."
        ) from None
    if not _has_hooks(instance):
        return instance
    return lambda hook, record: getattr(instance, hook, lambda _: None)(record)


def _has_hooks(target: Any) -> bool:
    return any(callable(getattr(target, hook, None)) for hook in HOOKS)


def _qualified_name(target: Any) -> str:
    kind = target if hasattr(target, "__qualname__") else type(target)
    return f"{kind.__module__}:{kind.__qualname__}"

"""The user's callbacks: functions and objects that are called during a run, with copies of its records.

A function is called with the name of a hook and a record. On an object, the method with the name of the hook is called
with the record. The setting `callbacks` names functions, and classes that are instantiated with the options of their
entries. `train` also takes functions and objects, which are pickled for other processes. Callbacks run on rank 0; with
a true attribute `every_rank`, on each rank.
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
from pretrain.common.records import event_of
from pretrain.config.run import callback_options

logger = logging.getLogger(__name__)

HOOKS = ("step_end", "evaluation", "checkpoint", "run_end")


class KIND:
    """Check of the objects that the setting `callbacks` names."""

    @staticmethod
    def check(found: Any, name: str) -> None:
        """Raise `InputError` unless it is a function of a hook and a record, or has a method for a hook."""
        if _has_hooks(found):
            return
        try:
            inspect.signature(found).bind("step_end", {})
        except (TypeError, ValueError):
            raise InputError(
                f"{name}: is not a callback. Pass a function (hook, record), or a class or an object with some of the "
                f"methods {', '.join(f'{hook}(record)' for hook in HOOKS)}."
            ) from None


def check_options(entries: Sequence[Any]) -> None:
    """Raise `InputError` if the class of a callback does not take the options of its entry."""
    for number, (name, _, options) in enumerate(map(callback_options, entries)):
        found: Any = load_custom(name)
        try:
            if isinstance(found, type):
                inspect.signature(found).bind(**options)
            elif options:
                raise TypeError("only a class takes options")
        except TypeError as error:
            raise InputError(f"callbacks.{number}: {name}: {error}. Give the options that it takes.") from None


def transferable(objects: Sequence[Any], *, pickled: bool) -> tuple[Any, ...]:
    """Return the objects, or strings from which another process restores them, with classes defined in a notebook.

    Raises `InputError` if one is not a callback, or cannot be pickled.
    """
    for number, one in enumerate(objects):
        KIND.check(one, f"callbacks.{number}: {_name(one)}")
    return tuple(map(_packed, objects)) if pickled else tuple(objects)


def _packed(callback: Any) -> str:
    import cloudpickle

    function = callback
    while isinstance(function, functools.partial):
        function = function.func
    module = function.__module__ or "builtins"
    if module.partition(".")[0] in (*sys.stdlib_module_names, "__main__"):
        module = ""
    else:  # it may be in the program's folder, where workers do not look
        import_modules([module], Path(sys.path[0]))
    try:
        return f"{module} {base64.b64encode(cloudpickle.dumps(callback)).decode()}"
    except Exception as error:
        raise InputError(
            f"callbacks: {_name(callback)} cannot be sent to the workers ({error}). Open them in its first hook."
        ) from None


def _unpacked(packed: str) -> Any:
    """Restore the argument of `_packed`. The string comes from this run's launcher, never from a file."""
    module, data = packed.split(" ")
    if module:
        load_custom(module)
    return pickle.loads(base64.b64decode(data))


class Callbacks:
    """The callbacks of a run on this rank.

    Args:
        entries: the setting.
        objects: the result of `transferable`.
        rank: of this worker.
        log: records an event.
        waiting: wraps each call, which may take long.

    Attributes:
        stop_reason: why the run is to stop after a checkpoint; "" if it continues.
    """

    def __init__(
        self,
        entries: Sequence[Any] = (),
        objects: Sequence[Any] = (),
        rank: int = 0,
        log: Callable[[dict[str, Any]], None] = lambda _: None,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._log, self._waiting, self._rank, self.stop_reason = log, waiting, rank, ""
        self._reported: set[int] = set()
        targets = [(name, stops, load_custom(name), options) for name, stops, options in map(callback_options, entries)]
        restored = [_unpacked(one) if isinstance(one, str) else one for one in objects]
        targets += [(_name(one), getattr(one, "on_error", "") == "stop", one, {}) for one in restored]
        self._callbacks = [
            (name, stops, _callable(name, target, options))
            for name, stops, target, options in targets
            if rank == 0 or getattr(target, "every_rank", False)
        ]

    def tell(self, hook: str, record: Mapping[str, Any]) -> None:
        """Call all with a copy of the record. A callback's first error is recorded; it may stop the run."""
        for number, (name, stops, function) in enumerate(self._callbacks):
            try:
                with self._waiting():
                    function(hook, MappingProxyType(copy.deepcopy(dict(record))))
            except (Exception, SystemExit) as error:
                reason = next(iter(str(error).strip().splitlines()), "")
                message = (
                    f"the callback {name} raised {type(error).__name__} in {hook} of step {record['step']}: {reason}"
                )
                self.stop_reason = self.stop_reason or (message if stops else "")
                if number not in self._reported:
                    self._reported.add(number)
                    logger.warning("%s", message, exc_info=error)
                    effect = "the run stops" if stops else "the run continues; its later errors are not reported"
                    message += f"; {effect}. logs/training-{self._rank}.log has the traceback"
                    self._log(event_of("callback", message, step=record["step"]))

    def tell_all(self, hook: str, records: list[dict[str, Any]]) -> None:
        """Call `hook` with each of `records`, such as checkpoints written in the background, and clear the list."""
        while records:
            self.tell(hook, records.pop(0))


def _callable(name: str, target: Any, options: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any]], Any]:
    """Return the callable `(hook, record)` of a function, class or instance."""
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


def _name(target: Any) -> str:
    kind = target if hasattr(target, "__qualname__") else type(target)
    return f"{kind.__module__}:{kind.__qualname__}"

"""The user's own functions and objects that are told what a run does. They get copies of records and change nothing.

A function is called with the name of a hook and a record; of an object, the method with the name of the hook is called
with the record. The setting `callbacks` names functions, and classes that are made with the options of their entries.
`train` also takes functions and objects, which are pickled on the way to another process. Rank 0 is told; with an
attribute `every_rank` that is true, each rank is.
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
from pretrain.common.extensions import import_modules, own
from pretrain.common.records import event_of
from pretrain.config.run import callback_options

logger = logging.getLogger(__name__)

HOOKS = ("step_end", "evaluation", "checkpoint", "run_end")


class KIND:
    """What the name of a callback has to be."""

    @staticmethod
    def check(found: Any, name: str) -> None:
        """Raise `InputError` unless it is a function of a hook and a record, or has a method for a hook."""
        if _has_hooks(found):
            return
        try:
            inspect.signature(found).bind("step_end", {})
        except (TypeError, ValueError):
            raise InputError(
                f"{name}: is no callback. Give a function (hook, record), or a class or an object with some of the "
                f"methods {', '.join(f'{hook}(record)' for hook in HOOKS)}."
            ) from None


def check_options(entries: Sequence[Any]) -> None:
    """Raise `InputError` if the class of a callback does not take the options of its entry."""
    for number, (name, _, options) in enumerate(map(callback_options, entries)):
        found: Any = own(name)
        try:
            if isinstance(found, type):
                inspect.signature(found).bind(**options)
            elif options:
                raise TypeError("only a class takes options")
        except TypeError as error:
            raise InputError(f"callbacks.{number}: {name}: {error}. Give the options that it takes.") from None


def carried(objects: Sequence[Any], *, elsewhere: bool) -> tuple[Any, ...]:
    """The objects themselves, or texts that another process makes them of: with their class, if a notebook defines it.

    Raises `InputError` if one is no callback, or cannot be pickled.
    """
    for number, one in enumerate(objects):
        KIND.check(one, f"callbacks.{number}: {_name(one)}")
    return tuple(map(_packed, objects)) if elsewhere else tuple(objects)


def _packed(given: Any) -> str:
    import cloudpickle

    function = given
    while isinstance(function, functools.partial):
        function = function.func
    module = function.__module__ or "builtins"
    if module.partition(".")[0] in (*sys.stdlib_module_names, "__main__"):
        module = ""
    else:  # it may lie beside the program, where workers do not look
        import_modules([module], Path(sys.path[0]))
    try:
        return f"{module} {base64.b64encode(cloudpickle.dumps(given)).decode()}"
    except Exception as error:
        raise InputError(
            f"callbacks: {_name(given)} cannot be sent to the workers ({error}). Open such things in its first hook."
        ) from None


def _unpacked(text: str) -> Any:
    """What `_packed` got. The text comes from the start of this run, not from a file that others may write."""
    module, data = text.split(" ")
    if module:
        own(module)
    return pickle.loads(base64.b64decode(data))


class Callbacks:
    """Those of a run, on this rank.

    Args:
        entries: the setting.
        objects: what `carried` returned.
        rank: of this worker.
        log: records an event.
        waiting: wraps a call, which may take long.

    Attributes:
        stop_reason: why the run is to stop after a checkpoint; "" if it is not.
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
        self._said: set[int] = set()
        given = [(name, stops, own(name), options) for name, stops, options in map(callback_options, entries)]
        made = [_unpacked(one) if isinstance(one, str) else one for one in objects]
        given += [(_name(one), getattr(one, "on_error", "") == "stop", one, {}) for one in made]
        self._made = [
            (name, stops, _made(name, found, options))
            for name, stops, found, options in given
            if rank == 0 or getattr(found, "every_rank", False)
        ]

    def tell(self, hook: str, record: Mapping[str, Any]) -> None:
        """Call all with a copy of the record. An error is recorded once; it may ask the run to stop."""
        for number, (name, stops, function) in enumerate(self._made):
            try:
                with self._waiting():
                    function(hook, MappingProxyType(copy.deepcopy(dict(record))))
            except (Exception, SystemExit) as error:
                reason = next(iter(str(error).strip().splitlines()), "")
                message = (
                    f"the callback {name} raised {type(error).__name__} in {hook} of step {record['step']}: {reason}"
                )
                self.stop_reason = self.stop_reason or (message if stops else "")
                if number not in self._said:
                    self._said.add(number)
                    logger.warning("%s", message, exc_info=error)
                    advice = "the run stops" if stops else "the run goes on, without a word about its later errors"
                    message += f"; {advice}. logs/training-{self._rank}.log has the traceback"
                    self._log(event_of("callback", message, step=record["step"]))

    def tell_all(self, hook: str, records: list[dict[str, Any]]) -> None:
        """Tell of `records`, which are cleared: those of the checkpoints that were written in the background."""
        while records:
            self.tell(hook, records.pop(0))


def _made(name: str, found: Any, options: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any]], Any]:
    """What is called with a hook and a record: of a function, a class or an object."""
    try:
        made = found(**options) if isinstance(found, type) else found
    except Exception as error:
        logger.warning("%s", name, exc_info=error)
        raise InputError(
            f"callbacks: {name} raises {type(error).__name__} when it is made ({error}). logs/training-0.log has the "
            "traceback."
        ) from None
    return (lambda hook, record: getattr(made, hook, lambda _: None)(record)) if _has_hooks(made) else made


def _has_hooks(found: Any) -> bool:
    return any(callable(getattr(found, hook, None)) for hook in HOOKS)


def _name(found: Any) -> str:
    kind = found if hasattr(found, "__qualname__") else type(found)
    return f"{kind.__module__}:{kind.__qualname__}"

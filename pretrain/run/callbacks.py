"""The user's own functions that are told what a run does (`callbacks`). They get copies of records and change nothing.

A function is called with the name of a hook and a record. A class is made with the options of its entry, and its
methods with the names of hooks are called with the record.
"""

from __future__ import annotations

import copy
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.extensions import own
from pretrain.config.run import callback_options

logger = logging.getLogger(__name__)

HOOKS = ("step_end", "evaluation", "checkpoint", "run_end")


class KIND:
    """What the name of a callback has to be."""

    @staticmethod
    def check(found: Any, name: str) -> None:
        """Raise `InputError` unless it is a function of a hook and a record, or a class with a method for a hook."""
        if isinstance(found, type) and any(callable(getattr(found, hook, None)) for hook in HOOKS):
            return
        try:
            inspect.signature(found).bind("step_end", {})
        except (TypeError, ValueError):
            raise InputError(
                f"{name}: is no callback. Give a function (hook, record), or a class with some of the methods "
                f"{', '.join(f'{hook}(record)' for hook in HOOKS)}."
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


class Callbacks:
    """Those of a run, on this rank.

    Args:
        entries: the setting.
        log: records an event.
        waiting: wraps a call, which may take long.

    Attributes:
        stop_reason: why the run is to stop after a checkpoint; "" if it is not.
    """

    def __init__(
        self,
        entries: Sequence[Any] = (),
        log: Callable[[dict[str, Any]], None] = lambda _: None,
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._log, self._waiting, self.stop_reason = log, waiting, ""
        self._said: set[int] = set()
        options = [callback_options(entry) for entry in entries]
        self._made = [(name, stops, _made(name, given)) for name, stops, given in options]

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
                    message += f"; {advice}. logs/training-0.log has the traceback"
                    self._log({"event": "callback", "step": record["step"], "time": time.time(), "message": message})

    def tell_all(self, hook: str, records: list[dict[str, Any]]) -> None:
        """Tell of `records`, which are cleared: those of the checkpoints that were written in the background."""
        while records:
            self.tell(hook, records.pop(0))


def _made(name: str, options: Mapping[str, Any]) -> Callable[[str, Mapping[str, Any]], Any]:
    """What is called with a hook and a record."""
    found: Any = own(name)
    if not isinstance(found, type):
        return found
    try:
        made = found(**options)
    except Exception as error:
        logger.warning("%s", name, exc_info=error)
        raise InputError(
            f"callbacks: {name} raises {type(error).__name__} when it is made ({error}). logs/training-0.log has the "
            "traceback."
        ) from None
    return lambda hook, record: getattr(made, hook, lambda _: None)(record)

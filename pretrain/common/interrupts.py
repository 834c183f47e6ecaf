"""Interrupts a long computation after a stop request, where no progress would be lost."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from pretrain.common.errors import RunError

POLL_SECONDS = 0.5
STUCK_SECONDS = 6.0  # time limit for the main thread to return from library code, such as a wait for another machine
_SIGNAL = signal.SIGUSR2  # signals also interrupt waits for locks and for child processes, such as a C++ compiler


class Interrupted(BaseException):
    """A stop was requested. Libraries that catch `Exception` do not catch it."""


class Interrupts:
    """A context for the main thread, in which `Interrupted` is raised `patience` seconds after a stop was requested.

    Attributes:
        patience: seconds from a stop request to the interrupt. 0 at entry, when nothing needs saving; inf means never.
        on_stuck: called in another thread if `patience` is 0 and the main thread does not return from library code.
    """

    def __init__(self, stop_requested: Callable[[], bool]) -> None:
        self.patience = math.inf
        self.on_stuck: Callable[[], None] = lambda: None
        self._stop_requested = stop_requested
        self._requested_at = math.inf  # time at which this process first saw the request
        self._exited = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="stop-watch")
        self._previous_handler: Any = None
        self._previous_hook, self._patience_before = sys.unraisablehook, math.inf

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self.patience = 0.0
            self._previous_handler = signal.signal(_SIGNAL, self._interrupt)
            self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
            self._watcher.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        patience, self.patience = self.patience, math.inf
        if self._watcher.is_alive():
            self._exited.set()
            self._watcher.join()  # so that it sends no further signal
            signal.signal(_SIGNAL, self._previous_handler)
            sys.unraisablehook = self._previous_hook
        self._raise_if_stopped(error, patience)

    @contextlib.contextmanager
    def after(self, seconds: float) -> Iterator[None]:
        """Allow interrupting the block `seconds` after a stop request, but not the code after the block."""
        self.patience = seconds
        try:
            yield
        except Exception as error:
            self._raise_if_stopped(error, seconds)
            raise
        finally:
            self.patience = math.inf

    def _raise_if_stopped(self, error: BaseException | None, patience: float) -> None:
        """Raise `Interrupted` if a library failed because the stop signal also killed its child, such as a compiler."""
        is_library_error = isinstance(error, Exception) and not isinstance(error, RunError)
        if is_library_error and patience < math.inf and self._stop_requested():
            raise Interrupted from error

    def _watch(self) -> None:
        while not self._exited.wait(POLL_SECONDS):
            if self.patience < math.inf and self._stop_requested():
                self._requested_at = min(self._requested_at, time.monotonic())
                if self._is_due():
                    signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
                if self.patience == 0 and time.monotonic() - self._requested_at > STUCK_SECONDS:
                    self.on_stuck()

    def _is_due(self) -> bool:
        return time.monotonic() - self._requested_at >= self.patience

    def _interrupt(self, *_: object) -> None:
        if self._is_due():
            self._patience_before, self.patience = self.patience, math.inf  # cleanup is not interrupted
            raise Interrupted

    def _on_unraisable(self, unraisable: Any) -> None:
        """Interrupt again if the signal arrived in a finalizer, whose exceptions Python only reports."""
        if unraisable.exc_type is Interrupted:
            self.patience = self._patience_before
        else:
            self._previous_hook(unraisable)

"""Sends the log output of libraries to the run's log file instead of the terminal."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from pretrain.common.files import disk_errors
from pretrain.common.worker import stop_signals


def quiet_logging(log_file: Path) -> None:
    """Send Python logging and warnings of every library to `log_file` instead of the terminal.

    Libraries such as DeepSpeed and torch add terminal handlers to their loggers when imported. These handlers are
    removed, and new ones are ignored. A second call replaces the log file of the first.
    """
    with disk_errors(log_file):
        log_file.parent.mkdir(parents=True, exist_ok=True)
        file_handler = _LogFile(log_file, encoding="utf-8")
    for handler in [h for h in logging.root.handlers if isinstance(h, _LogFile) or _writes_to_terminal(h)]:
        logging.root.removeHandler(handler)
        handler.close()
    logging.root.addHandler(file_handler)
    logging.root.setLevel(min(logging.root.level, logging.INFO))
    logging.setLoggerClass(_QuietLogger)
    for logger in [logging.getLogger(name) for name in list(logging.root.manager.loggerDict)]:
        for handler in [h for h in logger.handlers if _writes_to_terminal(h)]:
            logger.removeHandler(handler)
            logger.propagate = True
    logging.captureWarnings(True)


@contextlib.contextmanager
def restore_on_exit() -> Iterator[None]:
    """Restore logging and signal handlers on exit, for the program or notebook that started the training."""
    root, handlers = logging.root, logging.root.handlers[:]
    level, logger_class = root.level, logging.getLoggerClass()
    signal_handlers = {number: signal.getsignal(number) for number in stop_signals()}
    try:
        yield
    finally:
        for handler in set(root.handlers) - set(handlers):
            handler.close()
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.setLoggerClass(logger_class)
        logging.captureWarnings(False)
        if threading.current_thread() is threading.main_thread():
            for number, signal_handler in signal_handlers.items():
                signal.signal(number, signal_handler)


def _writes_to_terminal(handler: logging.Handler) -> bool:
    terminal = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in terminal


class _LogFile(logging.FileHandler):
    """Writes messages of level INFO and above, but only warnings and errors of W&B, which also writes a debug.log."""

    def __init__(self, path: Path, encoding: str) -> None:
        super().__init__(path, encoding=encoding)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self.setLevel(logging.INFO)
        self.addFilter(lambda record: record.levelno >= logging.WARNING or not record.name.startswith("wandb"))


class _QuietLogger(logging.Logger):
    """A logger that always propagates to the root logger and ignores terminal handlers."""

    @property
    def propagate(self) -> bool:
        return True

    @propagate.setter
    def propagate(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        pass

    def addHandler(self, hdlr: logging.Handler) -> None:
        if not _writes_to_terminal(hdlr):
            super().addHandler(hdlr)

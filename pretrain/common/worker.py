"""The rank of this process among the workers of a run, and stop requests. Uses neither Ray nor torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.files import disk_errors
from pretrain.common.interrupts import Interrupts

# File in the run folder that makes the run save a checkpoint and exit.
STOP_FILE = "stop"
# Environment variable with the folder of the scheduler's job that started this process, if any. The folder's file
# `started` was written when the job started. A STOP_FILE in the folder stops everything that the job runs.
JOB_VARIABLE = "BERTRAIN_JOB"
# File in the logs folder that describes a hang which a watchdog detected, for the driver that restarts the workers.
HANG_FILE = "hang.json"
# File that exists in the logs folder while the run waits for nodes: {"time", "message"}.
WAITING_FILE = "waiting.json"

_OWNER_PREFIX = "for "
_MAX_OWNER_BYTES = 200
# Variables that torchrun always sets, and variables with which processes of one machine choose GPUs and threads.
_TORCHRUN, _LOCAL = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SET_AT = 10**18  # mtime, in ns (in 2001), that `Flag.set` gives a file, so that touching the file is detected


@dataclass(frozen=True)
class Flag:
    """A file that tells the workers of one attempt (a start or restart of the run) to save a checkpoint and exit.

    Shared storage may show a file for a minute after its removal, and a process of an earlier attempt may create one
    late. So a file is honored only if it belongs to this attempt.

    Attributes:
        path: the file.
        owner: name of the attempt, which `set` writes to the file. Files of other owners are ignored unless touched.
        since: time in nanoseconds of the file system's clock. A file that was touched, or has no owner, is honored
            only if it is not older than this; None means never.
    """

    path: Path
    owner: str = ""
    since: int | None = 0

    def is_set(self) -> bool:
        """Return whether the file exists and belongs to this attempt. Without a file this costs one stat."""
        try:
            self.path.stat()
            # A network file system answers stat from a cache; opening the file asks the server.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                modified = os.fstat(descriptor).st_mtime_ns
                text = file.read(_MAX_OWNER_BYTES).decode("utf-8", "replace")
        except OSError:
            return False
        if text.startswith(_OWNER_PREFIX):
            if text.removeprefix(_OWNER_PREFIX).strip() == self.owner:
                return True
            if modified == _SET_AT:
                return False
        return self.since is not None and modified >= self.since

    def set(self) -> None:
        """Write the file. It is renamed into place, so a link with its name is replaced, not followed."""
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
        try:
            temporary.touch()
            try:
                temporary.write_text(f"{_OWNER_PREFIX}{self.owner}\n", encoding="utf-8")
            except OSError:  # disk full: the file stays empty, as if it had been touched
                if self.since is None:
                    raise
            else:
                with contextlib.suppress(OSError):  # storage without modification times: the file looks touched
                    os.utime(temporary, ns=(_SET_AT, _SET_AT))
            temporary.replace(self.path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()


def clear_stop(run_dir: Path, *, remove: bool = True) -> int:
    """Create the run folder, remove an old stop file, and return the time in ns from which stop files are honored.

    That is now, or the start of the scheduler's job, since a request may arrive while the job starts. It is a time of
    the file system's clock, which may differ from this machine's.
    """
    with disk_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        stop, since = run_dir / STOP_FILE, None
        if job := os.environ.get(JOB_VARIABLE):
            since = (Path(job) / "started").stat().st_mtime_ns
        if remove and not (since is not None and Flag(stop, since=since).is_set()):
            stop.unlink(missing_ok=True)
        if since is not None:
            return since
        with tempfile.NamedTemporaryFile(dir=run_dir, prefix=".clock-") as file:
            return os.fstat(file.fileno()).st_mtime_ns


# All signals that may request a stop.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that request a stop, including SIGHUP unless it is ignored, as under nohup."""
    hangup = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hangup]


def torchrun_rank() -> tuple[int, int] | None:
    """Return (rank, world size) if torchrun, or a program that also sets RANK, started this process; else None.

    Raises `InputError` if RANK is set, but variables that the processes need to connect are missing.
    """
    values = os.environ
    if "RANK" not in values:
        return None
    needed = _TORCHRUN if values.get("WORLD_SIZE") == "1" else (*_TORCHRUN, *_LOCAL)
    advice = "Start the processes with torchrun, or unset RANK."
    if missing := [name for name in needed if not values.get(name)]:
        hint = " With one process per machine, set LOCAL_RANK=0 and LOCAL_WORLD_SIZE=1." if missing[0] in _LOCAL else ""
        raise InputError(f"RANK is {values['RANK']!r} in the environment, but {missing[0]} is not set. {advice}{hint}")
    for rank_name, size_name in (_TORCHRUN[:2], _LOCAL):
        rank, size = values.get(rank_name) or "0", values.get(size_name) or "1"
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise InputError(
                f"{rank_name} is {rank!r} and {size_name} {size!r} in the environment: not a valid rank. {advice}"
            )
    return int(values["RANK"]), int(values["WORLD_SIZE"])


@dataclass(frozen=True)
class TrainingRequest:
    """The training request, which every worker of a run receives as JSON.

    Attributes:
        config: the run's settings, as `model_dump(mode="json")`.
        resume: whether to continue from the latest checkpoint, if there is one.
        events: events that happened before the start, which the run records first.
        callbacks: functions and objects that the run calls; serialized ones are strings.
    """

    config: dict[str, Any]
    resume: bool
    events: tuple[dict[str, Any], ...] = ()
    callbacks: tuple[Any, ...] = ()


@dataclass
class Worker:
    """One process of a run: its rank, its CPU threads and its stop requests.

    The defaults are for a run of one process. `rank` is among all processes, `local_rank` among this machine's.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    threads: int = 0  # CPU threads for torch; 0 keeps torch's default
    flags: tuple[Flag, ...] = ()  # any of them requests a stop if it is set
    _signaled: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)
    interrupts: Interrupts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.interrupts = Interrupts(self.stop_requested)

    def stop_requested(self) -> bool:
        """Return whether this process received one of the `stop_signals`, or a flag is set. Costs one stat per flag.

        Only the first process of a machine checks the flags; the others would query the same storage again.
        """
        return self._signaled.is_set() or (self.local_rank == 0 and any(flag.is_set() for flag in self.flags))

    def watch_stop_file(self, run_dir: Path) -> None:
        """Treat the run's stop file as a stop request if it is touched from now on. Rank 0 removes an earlier one."""
        self.flags = (Flag(run_dir / STOP_FILE, since=clear_stop(run_dir, remove=self.rank == 0)),)

    def handle_signals(self) -> None:
        """Treat the `stop_signals` as stop requests; a second SIGINT kills the process immediately.

        Only the main thread can set signal handlers; in other threads this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return

        def on_signal(signum: int, frame: FrameType | None) -> None:
            self._signaled.set()
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        for signum in stop_signals():
            signal.signal(signum, on_signal)

    @classmethod
    def from_environment(cls) -> Worker:
        """Create the worker of this process, with its rank under torchrun (RANK, WORLD_SIZE, LOCAL_RANK, ...).

        The process handles stop signals from now on. Raises `InputError` as `torchrun_rank` does.
        """
        worker = cls()
        if ranks := torchrun_rank():
            rank, world_size = ranks
            worker = cls(
                rank=rank,
                world_size=world_size,
                local_rank=int(os.environ.get("LOCAL_RANK") or "0"),
                local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE") or "1"),
            )
        worker.handle_signals()
        return worker

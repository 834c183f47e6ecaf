"""Who this process is among the workers of a run, and whether it has been asked to stop. No Ray, no torch."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

HANG_FILE = "hang.json"  # in the run's logs: what a watchdog found, for who restarts the workers
WAITING_FILE = "waiting.json"  # in the run's logs, as long as the run waits for nodes: {"time", "message"}

_OWNER = "for "
_OWNER_BYTES = 200
# When `Flag.set` says that it wrote a file, in nanoseconds: in 2001. One that was touched since has another time.
_SET_AT = 10**18


@dataclass(frozen=True)
class Flag:
    """A file that asks the processes of one attempt to save and end.

    Shared storage may show a file for a minute after it was removed, and a process of an earlier attempt may write one
    late. So a file counts only where it belongs to this attempt.

    Attributes:
        path: where the file is.
        owner: what `set` writes into it; a file of another owner does not count, unless it was touched.
        since: a file that was touched, or names no owner, counts when it is not older than this, in nanoseconds by the
            file system's clock. None: such a file never counts.
    """

    path: Path
    owner: str = ""
    since: int | None = 0

    def is_set(self) -> bool:
        """Whether the file is there for this attempt. Without a file this costs one stat."""
        try:
            self.path.stat()
            # Opening asks the server of a network file system; the look above is answered from a cache.
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(descriptor, "rb") as file:
                written = os.fstat(descriptor).st_mtime_ns
                text = file.read(_OWNER_BYTES).decode("utf-8", "replace")
        except OSError:
            return False
        if text.startswith(_OWNER):
            if text.removeprefix(_OWNER).strip() == self.owner:
                return True
            if written == _SET_AT:
                return False
        return self.since is not None and written >= self.since

    def set(self) -> None:
        """Write the file. It is renamed into place, so a link of that name is replaced and not followed."""
        aside = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.tmp")
        try:
            aside.touch()
            try:
                aside.write_text(f"{_OWNER}{self.owner}\n", encoding="utf-8")
            except OSError:  # on a full disk the file stays empty
                if self.since is None:
                    raise
            else:
                with contextlib.suppress(OSError):  # storage without such times: the file counts as touched
                    os.utime(aside, ns=(_SET_AT, _SET_AT))
            aside.replace(self.path)
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()


@dataclass
class Worker:
    """One process of a run: its place, its share of the machine and its ear for a stop.

    The default is a run of one process. `rank` counts over all machines, `local_rank` within this one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    threads: int = 0  # CPU threads for torch; 0 leaves torch alone
    flags: tuple[Flag, ...] = ()  # each asks for a stop where it is set
    _signalled: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    def stop_requested(self) -> bool:
        """True once this process saw SIGTERM or SIGINT, or a flag is set. Cheap: a stat for each flag."""
        return self._signalled.is_set() or any(flag.is_set() for flag in self.flags)

    def listen(self) -> None:
        """Take SIGTERM and the first SIGINT as a wish to stop; a second SIGINT ends the process at once.

        Only the main thread may set signal handlers, so elsewhere this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return

        def on_signal(number: int, frame: FrameType | None) -> None:
            self._signalled.set()
            signal.signal(signal.SIGINT, signal.SIG_DFL)

        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Worker:
        """This process alone, or its place under torchrun (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE).

        The worker listens for signals from then on. `environment` stands in for os.environ.
        """
        values = os.environ if environment is None else environment
        world_size = int(values.get("WORLD_SIZE", "1"))
        worker = cls(
            rank=int(values.get("RANK", "0")),
            world_size=world_size,
            local_rank=int(values.get("LOCAL_RANK", "0")),
            local_world_size=int(values.get("LOCAL_WORLD_SIZE", str(world_size))),
        )
        worker.listen()
        return worker

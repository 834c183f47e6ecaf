"""Who this process is among the workers of a run, and whether it has been asked to stop. No Ray, no torch."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

HANG_FILE = "hang.json"  # in the run's logs: what a watchdog found, for who restarts the workers


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
    stop_file: Path | None = None  # its existence asks for a stop
    restart_file: Path | None = None  # likewise, of who will start the workers again
    _signalled: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    def stop_requested(self) -> bool:
        """True once this process saw SIGTERM or SIGINT, or one of the files exists. Cheap: two stats."""
        files = (self.stop_file, self.restart_file)
        return self._signalled.is_set() or any(file is not None and file.exists() for file in files)

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

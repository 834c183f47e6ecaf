"""Notices that training stands still, in any rank, writes down where every rank is, and ends this process.

Ranks wait for one another in collectives, so one that is stuck sticks them all, and libraries' own limits are minutes
(DeepSpeed's groups drop torch's). So each rank's thread here publishes how often its rank has come on, and looks at
all the others'. Whoever starts the workers, such as Ray, restarts them when one ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from pretrain.errors import MachineError
from pretrain.files import write_json
from pretrain.worker import HANG_FILE

_LOOK_SECONDS = 0.5
_VERDICT = "watchdog/verdict"
_COMPILE_SECONDS = 1800.0
_WARM_BEATS = 20  # before so many, what comes next may be slow for good reasons
_WARM_SECONDS = 1800.0
_PATIENCE = 10  # times the longest of the last beats
_DUMP_SECONDS = 4.0


class Watchdog:
    """Watches over all ranks from this one. Use as a context manager around training.

    Args:
        rank, world_size: this process among all.
        logs: folder for stacks-<rank>.txt and hang.json.
        limit_seconds: how long nothing may come on, or another process be silent; 0 watches nothing. Work whose beats
            are long gets more: ten times the longest of late.
        compiles: torch.compile is at work, and its compilations get half an hour each.
    """

    def __init__(
        self, rank: int, world_size: int, logs: Path, limit_seconds: float, *, compiles: bool = False
    ) -> None:
        self._rank, self._world_size, self._logs, self._limit = rank, world_size, logs, limit_seconds
        self._compiles = compiles
        self._store: Any = None
        self._beats, self._last = 0, time.monotonic()
        self._lengths: deque[float] = deque(maxlen=100)
        self._allowances: list[float] = []
        self._end = threading.Event()
        self._seen = {one: _Seen() for one in range(world_size)}
        self._count, self._exchanged_at = 0, time.monotonic()
        self._verdict: tuple[int, str] | None = None  # another rank's, that found it first
        self._watcher = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._exchanger = threading.Thread(target=self._exchange, name="watchdog-exchange", daemon=True)

    def beat(self) -> None:
        """This rank has come on."""
        now = time.monotonic()
        if self._beats:
            self._lengths.append(now - self._last)
        self._beats, self._last = self._beats + 1, now

    @contextlib.contextmanager
    def allow(self, seconds: float) -> Iterator[None]:
        """While the block runs, which this rank does in one go, all may stand still for so long."""
        self._allowances.append(seconds)
        try:
            yield
        finally:
            self._allowances.pop()
            self._beats, self._last = self._beats + 1, time.monotonic()

    def __enter__(self) -> Watchdog:
        if self._limit:
            self._store = _own_store() if self._world_size > 1 else None
            self._exchanged_at = time.monotonic()
            self._watcher.start()
            if self._store is not None:
                self._exchanger.start()
            if self._compiles:
                _compilations().register_start_callback(self._compilation_begins)
                _compilations().register_end_callback(self._compilation_ends)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._limit:
            return
        if self._compiles:
            _compilations().remove_start_callback(self._compilation_begins)
            _compilations().remove_end_callback(self._compilation_ends)
        self._end.set()
        self._watcher.join()
        if self._store is not None:
            self._exchanger.join(_LOOK_SECONDS * 4)
            with contextlib.suppress(Exception):
                self._store.set(f"watchdog/{self._rank}", json.dumps({"finished": True}))

    def _compilation_begins(self, _: Any) -> None:
        self._allowances.append(_COMPILE_SECONDS)

    def _compilation_ends(self, _: Any) -> None:
        self._allowances.pop()
        self.beat()

    def _allowed(self) -> float:
        """Seconds without a beat that this rank may take now."""
        if self._allowances:
            return max(self._allowances)
        if self._beats < _WARM_BEATS:
            return max(_WARM_SECONDS, self._limit)
        return max(self._limit, _PATIENCE * max(self._lengths, default=0.0))

    def _watch(self) -> None:
        """Look at what `_exchange` brings; apart from it, which waits for ever where the store's server is stopped."""
        while not self._end.wait(_LOOK_SECONDS):
            self._seen[self._rank].take(self._mine())
            reason = self._verdict or self._stuck()
            if reason is not None and not self._end.is_set():
                self._give_up(*reason)

    def _exchange(self) -> None:
        while not self._end.wait(_LOOK_SECONDS):
            with contextlib.suppress(Exception):
                self._store.set(f"watchdog/{self._rank}", json.dumps(self._mine()))
                for rank in range(self._world_size):
                    if rank != self._rank and self._store.check([f"watchdog/{rank}"]):
                        self._seen[rank].take(json.loads(self._store.get(f"watchdog/{rank}")))
                if self._store.check([_VERDICT]):
                    rank, why = json.loads(self._store.get(_VERDICT))
                    self._verdict = rank, why
                self._exchanged_at = time.monotonic()

    def _mine(self) -> dict[str, Any]:
        self._count += 1
        return {
            "beats": self._beats,
            "allowed": self._allowed(),
            "count": self._count,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }

    def _stuck(self) -> tuple[int, str] | None:
        """(rank, why) of who holds up the others; None while all is well."""
        now = time.monotonic()
        if self._store is not None and now - self._exchanged_at > self._limit:
            # Nobody can be heard: the server, which is in rank 0, does not answer.
            return 0, f"was silent for {now - self._exchanged_at:.0f} s: stopped, or starved of its processor"
        known = {rank: one for rank, one in self._seen.items() if one.told and not one.told.get("finished")}
        for rank, one in known.items():
            if now - one.told_at > self._limit:
                return rank, f"was silent for {now - one.told_at:.0f} s: stopped, or starved of its processor"
        allowed = max(one.told["allowed"] for one in known.values())
        still = now - max(one.came_on_at for one in known.values())
        if still > allowed:
            behind = min(known, key=lambda rank: known[rank].told["beats"])
            return behind, f"is furthest behind, and no rank came on for {still:.0f} s"
        return None

    def _give_up(self, rank: int, why: str) -> None:
        stacks = self._logs / f"stacks-{self._rank}.txt"
        with contextlib.suppress(Exception), stacks.open("a") as file:
            file.write(f"---- {time.strftime('%F %T')}, rank {self._rank}: rank {rank} {why}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        if rank != self._rank:
            self._dump_other(rank)
        with contextlib.suppress(Exception):
            found = {
                "rank": rank,
                "reason": f"rank {rank} {why}",
                "time": time.time(),
                "found_by": self._rank,
            }
            write_json(self._logs / HANG_FILE, found)
        self._tell_verdict(rank, why)
        print(f"watchdog: rank {rank} {why}; stacks are in {stacks}", file=sys.stderr, flush=True)
        os._exit(MachineError.exit_code)

    def _tell_verdict(self, rank: int, why: str) -> None:
        """Let the others write their stacks, too, before our end breaks the collective that they wait in."""
        if self._store is None or self._verdict is not None:
            return
        # The exchanger may be waiting in the store for a server that is stopped, and hold its lock.
        threading.Thread(
            target=self._store.set, args=(_VERDICT, json.dumps([rank, why])), daemon=True
        ).start()
        time.sleep(_LOOK_SECONDS * 2.5)

    def _dump_other(self, rank: int) -> None:
        """A process that is stopped cannot write its own stacks; from outside they can be read on the same machine."""
        told = self._seen[rank].told
        if told.get("host") != socket.gethostname():
            return
        with contextlib.suppress(Exception), (self._logs / f"stacks-{rank}.txt").open("a") as file:
            file.write(f"---- {time.strftime('%F %T')}, rank {rank}, seen by rank {self._rank}\n")
            file.flush()
            subprocess.run(
                [Path(sys.executable).with_name("py-spy"), "dump", "--nonblocking", "--pid", str(told["pid"])],
                stdout=file, stderr=file, timeout=_DUMP_SECONDS, check=False,
            )  # fmt: skip


class _Seen:
    """What a rank told last, and when anything in it was new."""

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}
        self.told_at = self.came_on_at = time.monotonic()

    def take(self, told: dict[str, Any]) -> None:
        now = time.monotonic()
        if told.get("count") != self.told.get("count"):
            self.told_at = now
        if told.get("beats") != self.told.get("beats"):
            self.came_on_at = now
        self.told = told


def _own_store() -> Any:
    """A connection of this thread's own to the store that the ranks met in: training's blocks while it waits."""
    found: Any = dist.distributed_c10d._get_default_store()
    while hasattr(found, "underlying_store"):
        found = found.underlying_store
    if not isinstance(found, TCPStore):
        return None
    return TCPStore(
        found.host, found.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2)
    )


def _compilations() -> Any:
    from torch._dynamo.callback import callback_handler

    return callback_handler

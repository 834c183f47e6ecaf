"""Notices a hang in any rank, writes down where every rank is, names the one that causes it, and ends this process.

Ranks wait for one another in collectives, so one that hangs stops all of them, and libraries' own limits are long
(DeepSpeed's groups drop torch's). So a thread of each rank publishes heartbeats (`pretrain.training.heartbeats`). Whoever starts
the workers, such as Ray, restarts them when one ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from pretrain.common.errors import MachineError
from pretrain.common.files import write_json
from pretrain.common.worker import HANG_FILE
from pretrain.training.engine.deepspeed_patches import COLLECTIVE_MODULES, GATHERING_MODULES
from pretrain.training.heartbeats import (
    HANG,
    IN_COLLECTIVE,
    START_SECONDS,
    Exchange,
    Finding,
    Follower,
    Heartbeat,
    HeartbeatSummary,
    Ranks,
)

_ROUND_SECONDS = (0.2, 2.0)  # between heartbeats: a sixteenth of the limit, within these
_LINGER_ROUNDS = 2.5  # between a finding and the end, so that every rank learns of it before a collective breaks
_STORE_SECONDS = 30.0  # for an answer of the store
_GOODBYE_SECONDS = 4.0  # for the last heartbeat to be out
_ANNOUNCE_SECONDS = 1.0  # that a rank waits at most for its announcement to be out
_COMPILE_SECONDS = 1800.0
_FIRST_BEATS = 20  # before so many, what follows may be slow for good reasons
_PATIENCE = 10  # times the longest of the last beats, but for some
_EXCEPTIONS = 2  # that may have been a stall of another rank
_DUMP_SECONDS = 4.0
_WRITE_SECONDS = 10.0  # for stacks and hang.json, on storage that may be what hangs
_INNERMOST = 8  # frames of a stack that are looked at
# Python modules in whose functions a rank waits for others.
_COLLECTIVES = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", COLLECTIVE_MODULES)
# NCCL's calls return at once: where the host waits for their results instead, as the innermost Python function.
_DEVICE_WAITS = {
    ("pretrain.training.engine.engine", "sum_over_workers"),
    ("pretrain.training.engine.state_layouts", "step"),
    ("pretrain.training.engine.state_layouts", "_deepspeed_step"),
    ("pretrain.training.loop", "train_step"),
}

_Look = Callable[[float], Finding | None]  # who hangs, at a time of `_Clock`


class Watchdog:
    """Watches over all ranks from this one. Use as a context manager around training, in the thread that trains.

    Args:
        rank, world_size: this process among all.
        logs: folder for stacks-<rank>.txt and hang.json.
        limit_seconds: how long there may be no progress, or a process be silent; 0 watches nothing. Work whose beats
            are long gets more: ten times what long ones take of late.
        stall_seconds: how long a rank may wait for data or storage instead; 0 is for ever.
        compiles: torch.compile is at work, and each of its compilations gets half an hour.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        logs: Path,
        limit_seconds: float,
        *,
        stall_seconds: float = 0.0,
        compiles: bool = False,
    ) -> None:
        self._rank, self._world_size, self._logs, self._limit = rank, world_size, logs, limit_seconds
        self._stall = stall_seconds or math.inf
        self._compiles = compiles
        low, high = _ROUND_SECONDS
        self._round = min(high, max(low, limit_seconds / 16))
        self._count = self._pulses = self._position = 0
        self._last = time.monotonic()
        self._lengths: deque[float] = deque(maxlen=100)
        self._allowances: list[float] = []
        self._awaited = ""
        self._end = threading.Event()
        self._began = time.time()
        self._trainer = threading.get_ident()
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._watcher = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._talk: _Talk | None = None

    def beat(self) -> None:
        """This rank begins another micro-batch."""
        now = time.monotonic()
        if self._pulses:
            self._lengths.append(now - self._last)
        if not self._allowances:  # the others may have more or fewer micro-batches in such a block
            self._position += 1
        self._pulses, self._last = self._pulses + 1, now

    @contextlib.contextmanager
    def allow(self, seconds: float) -> Iterator[None]:
        """While the block runs, this rank may make no progress and be silent for so long.

        The others know of it before the block begins, which may therefore hold Python's lock all the time.
        """
        self._begin_allowance(seconds)
        try:
            yield
        finally:
            self._end_allowance()

    @contextlib.contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """The block waits for `what` ("a batch"), which comes from data or storage, and not for other ranks."""
        began = time.monotonic()
        self._awaited = what
        try:
            yield
        finally:
            self._awaited = ""
            self._pulses += 1
            self._last += time.monotonic() - began  # a stall is no measure of how long work takes

    def __enter__(self) -> Watchdog:
        if not self._limit:
            return self
        self._trainer = threading.get_ident()
        if self._world_size > 1 and (connect := _connection()):
            self._talk = _Talk(self, connect, self._rank, self._world_size, self._round)
        self._watcher.start()
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
        if self._talk is not None:
            self._talk.end()

    def heartbeat(self, *, ended: bool = False) -> Heartbeat:
        """What this rank says of itself now; each has a number of its own."""
        self._count += 1
        return Heartbeat(
            count=self._count,
            pulses=self._pulses,
            position=self._position,
            allowed=self._allowed(),
            quiet=max(self._limit, *self._allowances, 0.0),
            doing=self._doing(),
            ended=ended,
            host=self._host,
            pid=self._pid,
        )

    def _compilation_begins(self, _: Any) -> None:
        self._begin_allowance(_COMPILE_SECONDS)

    def _compilation_ends(self, _: Any) -> None:
        self._end_allowance()

    def _begin_allowance(self, seconds: float) -> None:
        self._allowances.append(seconds)
        if self._talk is not None:
            self._talk.announce()

    def _end_allowance(self) -> None:
        self._allowances.pop()
        self._pulses, self._last = self._pulses + 1, time.monotonic()

    def _allowed(self) -> float:
        """Seconds without progress that this rank may take now."""
        long = sorted(self._lengths)[-_EXCEPTIONS - 1 : -_EXCEPTIONS]
        usual = max(self._limit, *(_PATIENCE * one for one in long), 0.0)
        first = START_SECONDS if self._position < _FIRST_BEATS else 0.0
        stall = self._stall if self._awaited else 0.0
        if self._allowances:
            return max(self._limit, stall, *self._allowances)
        return max(usual, first, stall)

    def _doing(self) -> str:
        return self._awaited or (IN_COLLECTIVE if _waits_for_others(self._trainer) else "")

    def _watch(self) -> None:
        """Judge what `_Talk` brings; apart from it, which may wait for ever where the store's server is stopped."""
        clock = _Clock(2 * self._round)
        if self._talk is None:
            look = self._look_alone(Ranks(1, 0.0))
        elif self._rank == 0:
            look = self._look_at_all(self._talk, Ranks(self._world_size, 0.0))
        else:
            look = self._look_at_first(self._talk, Follower(self._rank, _LINGER_ROUNDS * self._round))
        while not self._end.wait(self._round):
            finding = look(clock.tick())
            if finding is not None and not self._end.is_set():
                self._give_up(finding)

    def _look_alone(self, ranks: Ranks) -> _Look:
        def look(now: float) -> Finding | None:
            ranks.hear([self.heartbeat()], now)
            finding = ranks.find()
            return finding and finding._replace(rank=self._rank)

        return look

    def _look_at_all(self, talk: _Talk, ranks: Ranks) -> _Look:
        def look(now: float) -> Finding | None:
            heard, talk.heard = talk.heard, None
            if heard is not None:
                ranks.hear(heard, now)
            if unheard := ranks.unheard(now, self._limit):
                why = f"has had no answer from the store of the heartbeats for {unheard:.0f} s"
                return Finding(HANG, self._rank, why, self._host, self._pid)
            return ranks.find()

        return look

    def _look_at_first(self, talk: _Talk, follower: Follower) -> _Look:
        return lambda now: follower.find(talk.summary, self._pulses, self._allowed(), now)

    def _give_up(self, finding: Finding) -> None:
        told = self._talk is not None and self._talk.summary is not None and self._talk.summary.finding == finding
        if self._talk is not None and self._rank == 0:
            self._talk.publish(finding)
        learnt = time.monotonic()
        # The storage may be what hangs, so the end does not wait for it.
        writer = threading.Thread(target=self._write, args=(finding, not told), daemon=True)
        writer.start()
        writer.join(_WRITE_SECONDS)
        if self._talk is not None:
            time.sleep(max(0.0, learnt + _LINGER_ROUNDS * self._round - time.monotonic()))
        os._exit(MachineError.exit_code)

    def _write(self, finding: Finding, found_here: bool) -> None:
        rank, why = finding.rank, finding.why
        stacks = self._logs / f"stacks-{self._rank}.txt"
        print(f"watchdog: rank {rank} {why}; stacks are in {stacks}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception), stacks.open("a") as file:
            file.write(f"---- {time.strftime('%F %T')}, rank {self._rank}: rank {rank} {why}\n{_stacks()}")
        if found_here:
            with contextlib.suppress(Exception):
                self._write_finding(finding)
        if rank != self._rank and finding.host == self._host:
            self._dump_other(finding)

    def _write_finding(self, finding: Finding) -> None:
        """Write hang.json, unless another rank of this start has: one that was cut off blames those that it cannot hear."""
        path = self._logs / HANG_FILE
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text(encoding="utf-8"))["time"] >= self._began:
                return
        found = {
            "event": finding.event,
            "rank": finding.rank,
            "reason": f"rank {finding.rank} {finding.why}",
            "time": time.time(),
            "found_by": self._rank,
        }
        write_json(path, found)

    def _dump_other(self, finding: Finding) -> None:
        """A process that is stopped cannot write its own stacks; from outside they can be read on the same machine."""
        with contextlib.suppress(Exception), (self._logs / f"stacks-{finding.rank}.txt").open("a") as file:
            file.write(f"---- {time.strftime('%F %T')}, rank {finding.rank}, seen by rank {self._rank}\n")
            file.flush()
            subprocess.run(
                [Path(sys.executable).with_name("py-spy"), "dump", "--nonblocking", "--pid", str(finding.pid)],
                stdout=file,
                stderr=file,
                timeout=_DUMP_SECONDS,
                check=False,
            )


class _Talk:
    """The thread that carries heartbeats: rank 0 gathers them, the others report.

    Attributes:
        heard: rank 0, the newest heartbeats of all ranks; who takes them puts None there.
        summary: other ranks, what rank 0 told last; None before the first round.
    """

    def __init__(
        self, watchdog: Watchdog, connect: Callable[[], TCPStore], rank: int, world_size: int, seconds: float
    ) -> None:
        self.heard: list[Heartbeat | None] | None = None
        self.summary: HeartbeatSummary | None = None
        self._watchdog, self._connect, self._rank, self._seconds = watchdog, connect, rank, seconds
        self._exchange = Exchange(rank, world_size)
        self._finding: Finding | None = None
        self._end = False
        self._asked = self._answered = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="watchdog-exchange", daemon=True)
        self._thread.start()

    def announce(self) -> None:
        """Publish a heartbeat now, and return when it is out (or the store does not answer)."""
        with self._changed:
            self._asked += 1
            asked = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._answered >= asked, _ANNOUNCE_SECONDS)

    def publish(self, finding: Finding) -> None:
        """Rank 0: tell the others what was found."""
        self._finding = finding
        self.announce()

    def end(self) -> None:
        """Say that this rank has ended, and close."""
        with self._changed:
            self._end = True
            self._changed.notify_all()
        self._thread.join(_GOODBYE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                asked, ends = self._asked, self._end
            self._talk_once(self._watchdog.heartbeat(ended=ends))
            with self._changed:
                self._answered = asked
                self._changed.notify_all()
                if ends:
                    return
                self._changed.wait_for(lambda asked=asked: self._end or self._asked > asked, self._seconds)

    def _talk_once(self, mine: Heartbeat) -> None:
        try:
            if not self._exchange.attached:  # which takes long where hundreds of ranks connect at once
                self._exchange.attach(self._connect())
            if self._rank == 0:
                self.heard = self._exchange.gather(mine, self._finding)
            else:
                self.summary = self._exchange.report(mine)
        except dist.DistNetworkError:  # a broken connection stays broken
            self._exchange.detach()
        except Exception:  # whatever it is, others notice when it lasts
            pass


class _Clock:
    """Seconds that this process has run: a look that comes late, since the process was stopped, counts as `longest`.

    Otherwise one that was stopped itself would take the others for silent when it runs again.
    """

    def __init__(self, longest: float) -> None:
        self._longest, self._now, self._last = longest, 0.0, time.monotonic()

    def tick(self) -> float:
        now = time.monotonic()
        self._now += min(now - self._last, self._longest)
        self._last = now
        return self._now


def _waits_for_others(thread: int) -> bool:
    """Whether a thread is in a collective, as far as its Python frames tell."""
    frame, modules = sys._current_frames().get(thread), []
    if frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) in _DEVICE_WAITS:
        return True
    while frame is not None and len(modules) < _INNERMOST:
        modules.append(frame.f_globals.get("__name__") or "")
        frame = frame.f_back
    # ZeRO 3 waits for gathered parameters on handles, whose `wait` has no frame.
    on_handle = any(name.startswith(GATHERING_MODULES) for name in modules[:1])
    return on_handle or any(name.startswith(_COLLECTIVES) for name in modules)


def _stacks() -> str:
    """Of all threads. Written to a local file first: faulthandler holds Python's lock while it writes."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _connection() -> Callable[[], TCPStore] | None:
    """How to connect to the store that the ranks met in: training's own connection blocks while training waits."""
    found: Any = dist.distributed_c10d._get_default_store()
    while hasattr(found, "underlying_store"):
        found = found.underlying_store
    if not isinstance(found, TCPStore):
        return None
    host, port = found.host, found.port

    def connect() -> TCPStore:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_STORE_SECONDS))

    return connect


def _compilations() -> Any:
    from torch._dynamo.callback import callback_handler

    return callback_handler

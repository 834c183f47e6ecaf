"""Detects a hang of any rank, writes the stacks of all ranks, reports the rank at fault, and exits this process.

Ranks wait for one another in collectives, so one hanging rank stops all. torch's timeouts are long, and DeepSpeed's
process groups ignore them. So a thread of each rank publishes heartbeats (`pretrain.training.heartbeats`). When a
worker exits, the program that started the workers, such as Ray, restarts them.
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
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain.common.errors import MachineError
from pretrain.common.files import write_json
from pretrain.common.worker import HANG_FILE
from pretrain.training.engine.deepspeed_patches import COLLECTIVE_MODULES, GATHERING_MODULES
from pretrain.training.heartbeats import (
    HANG,
    IN_COLLECTIVE,
    STARTUP_TIMEOUT_SECONDS,
    AllRanksCheck,
    Hang,
    Heartbeat,
    HeartbeatExchange,
    HeartbeatSummary,
    Rank0Check,
)

_ROUND_SECONDS = (0.2, 2.0)  # bounds of the time between heartbeats, which is a sixteenth of the limit
_LINGER_ROUNDS = 2.5  # rounds from finding a hang to the exit, so that all ranks learn of it before a collective fails
_STORE_SECONDS = 30.0  # timeout of a request to the store
_LAST_HEARTBEAT_SECONDS = 4.0  # time limit for publishing the last heartbeat
_ANNOUNCE_SECONDS = 1.0  # time limit for publishing an announcement
_COMPILE_SECONDS = 1800.0  # time limit of one compilation
_FIRST_BEATS = 20  # number of micro-batches at the start that may take `STARTUP_TIMEOUT_SECONDS` each
_PATIENCE = 10  # allowed time without progress, as a multiple of the longest recent micro-batch except outliers
_OUTLIERS = 2  # number of longest recent micro-batches to ignore: another rank may have stalled in them
_DUMP_SECONDS = 4.0  # time limit of py-spy
_WRITE_SECONDS = 10.0  # time limit for writing stacks and hang.json; the storage itself may hang
_INSPECTED_FRAMES = 8  # number of innermost frames of a stack to inspect
# Python modules in whose functions a rank waits for other ranks.
COLLECTIVES = ("torch.distributed", COLLECTIVE_MODULES)
# On a GPU, these modules and functions, and what `launching` lists, only launch kernels and copies, or read a result.
# A host that stays in one of them waits for a collective, directly or because the device's queue is full.
LAUNCHING = (
    "deepspeed.runtime",
    "pretrain.common.transfers",
    "pretrain.model",
    "pretrain.training.engine",
    "pretrain.training.optim",
    "torch.",
    "triton.",
)


class Watchdog:
    """Watches all ranks from this one. Use as a context manager around training, in the training thread.

    Args:
        rank, world_size: this process's rank, and the number of ranks.
        logs: folder to which stacks-<rank>.txt and hang.json are written.
        limit_seconds: how long a rank may go without progress or a heartbeat; 0 disables the watchdog. If micro-batches
            are long, the limit grows to ten times the length of recent long ones.
        stall_seconds: time limit for waits for data or storage; 0 sets no limit.
        compiles: whether torch.compile is used; a compilation may take half an hour.
        on_gpu: whether the model runs on a GPU, so that the host launches kernels without waiting for them.
        launching: names of the run's modules and functions that only launch kernels on a GPU.
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
        on_gpu: bool = False,
        launching: Sequence[str] = (),
    ) -> None:
        self._rank, self._world_size, self._logs, self._limit_seconds = rank, world_size, logs, limit_seconds
        self._stall_seconds = stall_seconds or math.inf
        self._compiles, self._launching = compiles, (*LAUNCHING, *launching) if on_gpu else ()
        low, high = _ROUND_SECONDS
        self._round_seconds = min(high, max(low, limit_seconds / 16))
        self._heartbeat_count = self._progress_count = self._micro_batches = 0
        self._last_beat_at = time.monotonic()
        self._beat_seconds: deque[float] = deque(maxlen=100)  # lengths of recent micro-batches
        self._allowances: list[float] = []  # seconds for each `allow` block or compilation in progress
        self._waiting_for = ""
        self._stop = threading.Event()
        self._started_at = time.time()
        self._thread_id = threading.get_ident()
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._watcher = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._exchange: ExchangeThread | None = None
        # Functions that torch calls at the start and end of a compilation.
        self._compile_hooks = (lambda _: self._start_allowance(_COMPILE_SECONDS)), (lambda _: self._end_allowance())

    def beat(self) -> None:
        """Record that this rank starts another micro-batch."""
        now = time.monotonic()
        if self._progress_count:
            self._beat_seconds.append(now - self._last_beat_at)
        if not self._allowances:  # inside `allow`, ranks may have different numbers of micro-batches
            self._micro_batches += 1
        self._progress_count, self._last_beat_at = self._progress_count + 1, now

    @contextlib.contextmanager
    def allow(self, seconds: float) -> Iterator[None]:
        """Allow this rank to make no progress and send no heartbeat for `seconds` inside the block.

        The allowance is published before the block starts, so the block may hold the GIL all the time.
        """
        self._start_allowance(seconds)
        try:
            yield
        finally:
            self._end_allowance()

    @contextlib.contextmanager
    def awaiting(self, what: str) -> Iterator[None]:
        """Declare that the block waits for `what`, such as "a batch", from data or storage, not for other ranks."""
        started = time.monotonic()
        self._waiting_for = what
        try:
            yield
        finally:
            self._waiting_for = ""
            self._progress_count += 1
            self._last_beat_at += time.monotonic() - started  # the length of a micro-batch excludes stalls

    def __enter__(self) -> Watchdog:
        if not self._limit_seconds:
            return self
        self._thread_id = threading.get_ident()
        if self._world_size > 1 and (connect := _store_connector()):
            self._exchange = ExchangeThread(self, connect, self._rank, self._world_size, self._round_seconds)
        self._watcher.start()
        if self._compiles:
            _compile_callbacks().register_start_callback(self._compile_hooks[0])
            _compile_callbacks().register_end_callback(self._compile_hooks[1])
        return self

    def __exit__(self, *_: object) -> None:
        if not self._limit_seconds:
            return
        if self._compiles:
            _compile_callbacks().remove_start_callback(self._compile_hooks[0])
            _compile_callbacks().remove_end_callback(self._compile_hooks[1])
        self._stop.set()
        self._watcher.join()
        if self._exchange is not None:
            self._exchange.end()

    def heartbeat(self, *, has_ended: bool = False) -> Heartbeat:
        """Return this rank's heartbeat, with a higher count at each call."""
        self._heartbeat_count += 1
        return Heartbeat(
            count=self._heartbeat_count,
            progress_count=self._progress_count,
            micro_batches=self._micro_batches,
            progress_timeout=self._progress_timeout(),
            silence_timeout=max(self._limit_seconds, *self._allowances, 0.0),
            waiting_for=self._waiting_for
            or (IN_COLLECTIVE if waits_for_others(self._thread_id, self._launching) else ""),
            has_ended=has_ended,
            host=self._host,
            pid=self._pid,
        )

    def _start_allowance(self, seconds: float) -> None:
        self._allowances.append(seconds)
        if self._exchange is not None:
            self._exchange.announce()

    def _end_allowance(self) -> None:
        self._allowances.pop()
        self._progress_count, self._last_beat_at = self._progress_count + 1, time.monotonic()

    def _progress_timeout(self) -> float:
        """Return this rank's current limit on seconds without progress."""
        longest = sorted(self._beat_seconds)[-_OUTLIERS - 1 : -_OUTLIERS]  # empty or one number
        usual = max(self._limit_seconds, *(_PATIENCE * seconds for seconds in longest), 0.0)
        startup = STARTUP_TIMEOUT_SECONDS if self._micro_batches < _FIRST_BEATS else 0.0
        stall = self._stall_seconds if self._waiting_for else 0.0
        if self._allowances:
            return max(self._limit_seconds, stall, *self._allowances)
        return max(usual, startup, stall)

    def _watch(self) -> None:
        """Evaluate heartbeats; the thread that exchanges them may block while the store's server is stopped."""
        clock = Clock(2 * self._round_seconds)
        all_ranks = AllRanksCheck(self._world_size if self._exchange else 1, 0.0)
        rank0 = Rank0Check(self._rank, _LINGER_ROUNDS * self._round_seconds)
        while not self._stop.wait(self._round_seconds):
            hang = self._find(all_ranks, rank0, clock.tick())
            if hang is not None and not self._stop.is_set():
                self._give_up(hang)

    def _find(self, all_ranks: AllRanksCheck, rank0: Rank0Check, now: float) -> Hang | None:
        """Return a hang found at the time `now`, or None; rank 0 checks all ranks, the others check rank 0."""
        exchange = self._exchange
        if exchange is None:
            all_ranks.record([self.heartbeat()], now)
            hang = all_ranks.find()
            return hang and hang._replace(rank=self._rank)
        if self._rank:
            return rank0.find(exchange.summary, self._progress_count, self._progress_timeout(), now)
        heartbeats, exchange.heartbeats = exchange.heartbeats, None
        if heartbeats is not None:
            all_ranks.record(heartbeats, now)
        if overdue := all_ranks.overdue_round_seconds(now, self._limit_seconds):
            reason = f"got no response from the heartbeat store for {overdue:.0f} s"
            return Hang(HANG, self._rank, reason, self._host, self._pid)
        return all_ranks.find()

    def _give_up(self, hang: Hang) -> None:
        exchange = self._exchange
        found_here = exchange is None or exchange.summary is None or exchange.summary.hang != hang
        if exchange is not None and self._rank == 0:
            exchange.publish(hang)
        found_at = time.monotonic()
        # The storage itself may hang, so the exit waits for it only briefly.
        writer = threading.Thread(target=self._write, args=(hang, found_here), daemon=True)
        writer.start()
        writer.join(_WRITE_SECONDS)
        if exchange is not None:
            time.sleep(max(0.0, found_at + _LINGER_ROUNDS * self._round_seconds - time.monotonic()))
        os._exit(MachineError.exit_code)

    def _write(self, hang: Hang, found_here: bool) -> None:
        rank, reason = hang.rank, hang.reason
        stacks = self._logs / f"stacks-{self._rank}.txt"
        print(f"watchdog: rank {rank} {reason}; stacks are in {stacks}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception), stacks.open("a") as file:
            file.write(f"---- {time.strftime('%F %T')}, rank {self._rank}: rank {rank} {reason}\n")
            if self._exchange is not None and self._exchange.error is not None:
                file.write(f"the last exchange of heartbeats failed: {self._exchange.error!r}\n")
            file.write(_stacks())
        if found_here:
            with contextlib.suppress(Exception):
                self.write_hang(hang)
        if rank != self._rank and hang.host == self._host:
            self._dump_stacks_of(hang)

    def write_hang(self, hang: Hang) -> None:
        """Write hang.json unless another rank has: a disconnected rank would blame ranks that it cannot reach."""
        path = self._logs / HANG_FILE
        with contextlib.suppress(OSError, ValueError):
            if json.loads(path.read_text(encoding="utf-8"))["time"] >= self._started_at:
                return
        content = {
            "event": hang.event,
            "rank": hang.rank,
            "reason": f"rank {hang.rank} {hang.reason}",
            "time": time.time(),
            "found_by": self._rank,
        }
        write_json(path, content)

    def _dump_stacks_of(self, hang: Hang) -> None:
        """Write the stacks of another rank on this machine with py-spy: a stopped process cannot write them itself."""
        with contextlib.suppress(Exception), (self._logs / f"stacks-{hang.rank}.txt").open("a") as file:
            file.write(f"---- {time.strftime('%F %T')}, rank {hang.rank}, seen by rank {self._rank}\n")
            file.flush()
            subprocess.run(
                [Path(sys.executable).with_name("py-spy"), "dump", "--nonblocking", "--pid", str(hang.pid)],
                stdout=file,
                stderr=file,
                timeout=_DUMP_SECONDS,
                check=False,
            )


class ExchangeThread:
    """The thread that exchanges heartbeats: rank 0 gathers them, the other ranks report theirs.

    Attributes:
        heartbeats: on rank 0, the latest heartbeats of all ranks; None once they have been read.
        summary: on other ranks, rank 0's latest summary; None before the first round.
        error: the last round's error; None if the round succeeded.
    """

    def __init__(
        self, watchdog: Watchdog, connect: Callable[[], Any], rank: int, world_size: int, round_seconds: float
    ) -> None:
        self.heartbeats: list[Heartbeat | None] | None = None
        self.summary: HeartbeatSummary | None = None
        self.error: Exception | None = None
        self._watchdog, self._connect, self._rank, self._round_seconds = watchdog, connect, rank, round_seconds
        self._exchange = HeartbeatExchange(rank, world_size)
        self._hang: Hang | None = None
        self._is_ending = False
        self._requested = self._published = 0  # number of announcements requested and published so far
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="watchdog-exchange", daemon=True)
        self._thread.start()

    def announce(self) -> None:
        """Publish a heartbeat now; return when it is published, or when the store does not respond in time."""
        with self._condition:
            self._requested += 1
            requested = self._requested
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._published >= requested, _ANNOUNCE_SECONDS)

    def publish(self, hang: Hang) -> None:
        """On rank 0: publish a hang."""
        self._hang = hang
        self.announce()

    def end(self) -> None:
        """Publish that this rank has ended, and stop the thread."""
        with self._condition:
            self._is_ending = True
            self._condition.notify_all()
        self._thread.join(_LAST_HEARTBEAT_SECONDS)

    def _run(self) -> None:
        while True:
            with self._condition:
                requested, is_ending = self._requested, self._is_ending
            self._run_round(self._watchdog.heartbeat(has_ended=is_ending))
            with self._condition:
                self._published = requested
                self._condition.notify_all()
                if is_ending:
                    return
                self._condition.wait_for(
                    lambda done=requested: self._is_ending or self._requested > done, self._round_seconds
                )

    def _run_round(self, heartbeat: Heartbeat) -> None:
        try:
            if not self._exchange.is_attached:  # connecting is slow if hundreds of ranks do it at once
                self._exchange.attach(self._connect())
            if self._rank == 0:
                self.heartbeats = self._exchange.gather(heartbeat, self._hang)
            else:
                self.summary = self._exchange.report(heartbeat)
            self.error = None
        # No error may stop this thread: the next round may succeed. Errors are not logged here: hanging storage would
        # stop the heartbeats. If rounds keep failing, the ranks report a hang and write the error with the stacks.
        except Exception as error:
            self.error = error
            if isinstance(error, dist.DistNetworkError):  # a broken connection stays broken
                self._exchange.detach()


class Clock:
    """A clock that counts only seconds in which this process runs: a late tick adds at most `max_tick` seconds.

    With a normal clock, a process that was stopped would report the other ranks as silent when it continues.
    """

    def __init__(self, max_tick: float) -> None:
        self._max_tick, self._now, self._last_tick_at = max_tick, 0.0, time.monotonic()

    def tick(self) -> float:
        """Return the current time in seconds; the clock starts at 0."""
        now = time.monotonic()
        self._now += min(now - self._last_tick_at, self._max_tick)
        self._last_tick_at = now
        return self._now


def waits_for_others(thread: int, launching: tuple[str, ...]) -> bool:
    """Return whether a thread is in a collective, or launches kernels that queue behind a collective."""
    frame, modules = sys._current_frames().get(thread), []
    if frame is not None:
        module, name = frame.f_globals.get("__name__") or "", frame.f_code.co_name
        if f"{module}.{name}".startswith(launching):
            return True
    while frame is not None and len(modules) < _INSPECTED_FRAMES:
        modules.append(frame.f_globals.get("__name__") or "")
        frame = frame.f_back
    # ZeRO 3 waits for gathered parameters on handles, whose `wait` has no Python frame.
    waits_on_handle = any(name.startswith(GATHERING_MODULES) for name in modules[:1])
    return waits_on_handle or any(name.startswith(COLLECTIVES) for name in modules)


def _stacks() -> str:
    """Return the stacks of all threads, through a local file: faulthandler holds the GIL while it writes."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _store_connector() -> Callable[[], Any] | None:
    """Return a function that opens another connection to the ranks' store, since training's may be blocked.

    Returns None if the ranks were not initialized through MASTER_ADDR.
    """
    host, port = os.environ.get("MASTER_ADDR"), int(os.environ.get("MASTER_PORT", "0"))
    if not host:
        return None
    tcp_store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    timeout = timedelta(seconds=_STORE_SECONDS)
    return lambda: tcp_store(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _compile_callbacks() -> Any:
    from torch._dynamo.callback import callback_handler

    return callback_handler

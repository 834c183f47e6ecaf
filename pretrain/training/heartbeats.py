"""Heartbeats of the ranks: their exchange through a store, and hang detection.

In each round, every rank sets one key. Rank 0 reads all keys with one request and sets a summary of constant size,
which the other ranks read, so a round costs O(ranks). `AllRanksCheck` and `Rank0Check` evaluate heartbeats
without a store.
"""

import itertools
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

HANG, DATA_STALL = "hang", "data_stall"
IN_COLLECTIVE = "a collective"  # value of `Heartbeat.waiting_for` while a rank waits for other ranks
STARTUP_TIMEOUT_SECONDS = 1800.0  # limit until a rank's first report; in `Watchdog`, also per early micro-batch

exchange_ids = itertools.count()  # ids of `HeartbeatExchange`s, which every rank creates in the same order


class Heartbeat(NamedTuple):
    """The report of one rank in one round."""

    count: int  # number of heartbeats so far; a rank whose count does not change is silent
    progress_count: int  # increases at each sign of progress
    micro_batches: int  # number of training micro-batches so far, comparable between ranks
    progress_timeout: float  # current limit on seconds without progress
    silence_timeout: float  # current limit on seconds without a heartbeat
    waiting_for: str  # what the rank waits for; "" while it works
    has_ended: bool  # whether the rank has left training
    host: str
    pid: int


class Hang(NamedTuple):
    """The rank that blocks the others, and the reason."""

    event: str  # HANG or DATA_STALL
    rank: int
    reason: str  # the message without its beginning, "rank N "
    host: str
    pid: int


class HeartbeatSummary(NamedTuple):
    """The summary that rank 0 publishes for the other ranks."""

    rank0_heartbeat: Heartbeat
    hang: Hang | None


class HeartbeatExchange:
    """One rank's side of the exchange of heartbeats, through the store that was attached last."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._store: Any = None  # torch's TCPStore
        self._has_summary = False  # whether the store has a summary; `get` would wait for a missing key and then raise
        # Keys must be unique: torchrun's store outlives restarts, and a process may have several runs.
        prefix = f"watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(exchange_ids)}"
        self._summary_key = f"{prefix}/summary"
        self._heartbeat_keys = [f"{prefix}/{rank}" for rank in range(world_size)]

    @property
    def is_attached(self) -> bool:
        return self._store is not None

    def attach(self, store: Any) -> None:
        """Use this store from now on."""
        if self._rank == 0:  # `multi_get` waits for missing keys, so create them
            for key in self._heartbeat_keys[1:]:
                store.compare_set(key, "", "null")  # does not overwrite a heartbeat
        self._store = store

    def detach(self) -> None:
        self._store = None

    def gather(self, heartbeat: Heartbeat, hang: Hang | None) -> list[Heartbeat | None]:
        """On rank 0: publish the summary; return each rank's latest heartbeat, or None before its first."""
        self._store.set(self._summary_key, json.dumps([heartbeat, hang]))
        others = self._store.multi_get(self._heartbeat_keys[1:])
        return [heartbeat, *(Heartbeat(*values) if values else None for values in map(json.loads, others))]

    def report(self, heartbeat: Heartbeat) -> HeartbeatSummary | None:
        """On other ranks: publish a heartbeat; return the latest summary, or None before the first."""
        self._store.set(self._heartbeat_keys[self._rank], json.dumps(heartbeat))
        self._has_summary = self._has_summary or self._store.check([self._summary_key])
        if not self._has_summary:
            return None
        rank0_heartbeat, hang = json.loads(self._store.get(self._summary_key))
        return HeartbeatSummary(Heartbeat(*rank0_heartbeat), Hang(*hang) if hang else None)


class AllRanksCheck:
    """Rank 0's check of all ranks. Times are seconds on a clock that stands still while this process is suspended.

    Args:
        world_size: number of ranks.
        now: current time.
    """

    def __init__(self, world_size: int, now: float) -> None:
        self._latest: list[Heartbeat | None] = [None] * world_size  # the latest heartbeat of each rank
        self._received_at = [now] * world_size  # when rank 0 received it
        self._last_round_at = self._progress_at = now

    def record(self, heartbeats: Sequence[Heartbeat | None], now: float) -> None:
        """Record the heartbeats of one round, None for ranks without one."""
        for rank, (new, old) in enumerate(zip(heartbeats, self._latest, strict=True)):
            if new is None or (old is not None and new.count == old.count):
                continue
            self._received_at[rank] = now
            if old is None or new.progress_count != old.progress_count:
                self._progress_at = now
            self._latest[rank] = new
        self._last_round_at = now

    def overdue_round_seconds(self, now: float, limit: float) -> float:
        """Return the seconds since the last round if they exceed `limit` (at startup, a higher one), otherwise 0."""
        any_reported = any(heartbeat is not None for heartbeat in self._latest)
        seconds = now - self._last_round_at
        return seconds if seconds > (limit if any_reported else max(limit, STARTUP_TIMEOUT_SECONDS)) else 0.0

    def find(self) -> Hang | None:
        """Return the hang of the rank that blocks the others, or None."""
        return self._find_silent() or self._find_stuck()

    def _find_silent(self) -> Hang | None:
        """Return the hang of the rank that has been silent longest, if that is too long."""
        for rank in sorted(range(len(self._latest)), key=self._received_at.__getitem__):
            heartbeat = self._latest[rank]
            silence = self._last_round_at - self._received_at[rank]
            if heartbeat is None and silence > STARTUP_TIMEOUT_SECONDS:
                return _unreported_hang(rank, silence)
            if heartbeat is not None and not heartbeat.has_ended and silence > heartbeat.silence_timeout:
                return _silent_hang(rank, heartbeat, silence)
        return None

    def _find_stuck(self) -> Hang | None:
        """Return the hang of the rank that the others wait for, if no rank makes progress."""
        active = [
            (rank, heartbeat)
            for rank, heartbeat in enumerate(self._latest)
            if heartbeat is not None and not heartbeat.has_ended
        ]
        idle = self._last_round_at - self._progress_at
        if not active or idle <= max(heartbeat.progress_timeout for _, heartbeat in active):
            return None
        active.sort(key=lambda item: item[1].micro_batches)  # the rank that is furthest behind comes first
        for rank, heartbeat in active:
            if heartbeat.waiting_for not in ("", IN_COLLECTIVE):
                return _make_hang(rank, heartbeat, f"has waited {idle:.0f} s for {heartbeat.waiting_for}", DATA_STALL)
        unreported = [rank for rank, heartbeat in enumerate(self._latest) if heartbeat is None]
        if unreported:
            return Hang(HANG, unreported[0], f"has not reported, and no rank made progress for {idle:.0f} s", "", 0)
        for rank, heartbeat in active:
            if not heartbeat.waiting_for:
                return _make_hang(rank, heartbeat, f"has made no progress for {idle:.0f} s")
        for rank, heartbeat in enumerate(self._latest):
            if heartbeat is not None and heartbeat.has_ended:
                reason = f"has ended, and the others have waited {idle:.0f} s for it in a collective"
                return _make_hang(rank, heartbeat, reason)
        return _make_hang(
            *active[0],
            f"is furthest behind (the lowest rank of several), and all ranks have waited {idle:.0f} s in collectives: "
            "either the network is failing, or the ranks are calling different collectives",
        )


class Rank0Check:
    """The check of rank 0 that every other rank runs. Times are as in `AllRanksCheck`; the clock starts at 0.

    Args:
        rank: this rank.
        patience: seconds beyond rank 0's `silence_timeout`, in which it can report a hang before it is blamed itself.
    """

    def __init__(self, rank: int, patience: float) -> None:
        self._rank, self._patience = rank, patience
        self._count = self._progress_count = -1
        self._received_at = self._progress_at = 0.0

    def find(self, summary: HeartbeatSummary | None, progress_count: int, timeout: float, now: float) -> Hang | None:
        """Return the hang that rank 0 has found, or the hang of rank 0 itself, or None.

        `summary` is rank 0's latest; `progress_count` and `timeout` (`progress_timeout`) are of this rank's heartbeat.
        """
        if progress_count != self._progress_count:
            self._progress_count, self._progress_at = progress_count, now
        if summary is None:
            return _unreported_hang(0, now) if now > STARTUP_TIMEOUT_SECONDS else None
        rank0 = summary.rank0_heartbeat
        if rank0.count != self._count:
            self._count, self._received_at = rank0.count, now
        if summary.hang is not None:
            return summary.hang
        if rank0.has_ended:  # rank 0 no longer gathers heartbeats
            idle = now - max(self._progress_at, self._received_at)
            reason = f"has ended, and rank {self._rank} has made no progress for {idle:.0f} s"
            return _make_hang(0, rank0, reason) if idle > timeout else None
        silence = now - self._received_at
        return _silent_hang(0, rank0, silence) if silence > rank0.silence_timeout + self._patience else None


def _silent_hang(rank: int, heartbeat: Heartbeat, seconds: float) -> Hang:
    reason = f"was silent for {seconds:.0f} s: its process may be stopped, starved of CPU, or disconnected"
    return _make_hang(rank, heartbeat, reason)


def _make_hang(rank: int, heartbeat: Heartbeat, reason: str, event: str = HANG) -> Hang:
    return Hang(event, rank, reason, heartbeat.host, heartbeat.pid)


def _unreported_hang(rank: int, seconds: float) -> Hang:
    return Hang(HANG, rank, f"has not reported since the start {seconds:.0f} s ago", "", 0)

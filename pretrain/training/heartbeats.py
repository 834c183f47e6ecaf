"""Heartbeats: what each rank says of itself, how rank 0 gathers it, and what follows from it.

A round costs O(ranks): each rank sets one key, rank 0 reads all of them with one request and sets a summary of constant
size, and the others read that. Judging needs no store and no clock, so it is in `Ranks`.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

HANG, DATA_STALL = "hang", "data_stall"
IN_COLLECTIVE = "a collective"  # what a rank that waits for other ranks is doing
START_SECONDS = 1800.0  # for a rank to report for the first time, and for the first steps

_starts = itertools.count()  # every rank makes its exchanges in the same order


class Heartbeat(NamedTuple):
    """What a rank says of itself in each round."""

    count: int  # rounds so far; a rank whose count stays the same is silent
    pulses: int  # signs of progress so far
    position: int  # micro-batches of training so far, which compares between ranks
    allowed: float  # seconds without progress that are no hang now
    quiet: float  # seconds of silence that are no hang now
    doing: str  # what it waits for; "" while it works
    ended: bool
    host: str
    pid: int


class Finding(NamedTuple):
    """Which rank holds up the others, and why."""

    event: str  # HANG or DATA_STALL
    rank: int
    why: str  # follows "rank N"
    host: str
    pid: int


class HeartbeatSummary(NamedTuple):
    """What rank 0 tells the others."""

    aggregator: Heartbeat
    finding: Finding | None


class Store(Protocol):
    """The part of torch's TCPStore that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...


class Exchange:
    """One rank's part in the rounds, over the store that it was last attached to."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._store: Store | None = None
        self._told = False  # whether there is a summary; `get` waits for a key that is missing, and complains
        # A store of torchrun's agent outlives a start, and a process may have several runs.
        start = f"watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_starts)}"
        self._summary = f"{start}/summary"
        self._keys = [f"{start}/{one}" for one in range(world_size)]

    @property
    def attached(self) -> bool:
        return self._store is not None

    def attach(self, store: Store) -> None:
        """Use this store from now on."""
        if self._rank == 0:  # `multi_get` waits for keys that are missing
            for key in self._keys[1:]:
                store.compare_set(key, "", "null")  # keeps a heartbeat that came before
        self._store = store

    def detach(self) -> None:
        """The store is of no use any more."""
        self._store = None

    def gather(self, mine: Heartbeat, finding: Finding | None) -> list[Heartbeat | None]:
        """Rank 0: publish the summary; returns the newest heartbeat of each rank, None before its first."""
        assert self._store is not None
        self._store.set(self._summary, json.dumps([mine, finding]))
        others = self._store.multi_get(self._keys[1:])
        return [mine, *(_heartbeat(json.loads(value)) for value in others)]

    def report(self, mine: Heartbeat) -> HeartbeatSummary | None:
        """Other ranks: publish a heartbeat; returns the newest summary, None before the first."""
        assert self._store is not None
        self._store.set(self._keys[self._rank], json.dumps(mine))
        self._told = self._told or self._store.check([self._summary])
        if not self._told:
            return None
        aggregator, finding = json.loads(self._store.get(self._summary))
        return HeartbeatSummary(Heartbeat(*aggregator), Finding(*finding) if finding else None)


def _heartbeat(value: list[Any] | None) -> Heartbeat | None:
    return Heartbeat(*value) if value else None


class Ranks:
    """What rank 0 knows of all ranks. Times are seconds of any clock that stops while this process does.

    Args:
        world_size: how many there are.
        now: the time of the start.
    """

    def __init__(self, world_size: int, now: float) -> None:
        self._told: list[Heartbeat | None] = [None] * world_size
        self._told_at = [now] * world_size
        self._heard_at = self._progress_at = now

    def hear(self, heartbeats: Sequence[Heartbeat | None], now: float) -> None:
        """Take in one round."""
        for rank, (new, old) in enumerate(zip(heartbeats, self._told, strict=True)):
            if new is None or (old is not None and new.count == old.count):
                continue
            self._told_at[rank] = now
            if old is None or new.pulses != old.pulses:
                self._progress_at = now
            self._told[rank] = new
        self._heard_at = now

    def unheard(self, now: float, limit: float) -> float:
        """Seconds since the last round where they are more than `limit`, or than a start takes; else 0."""
        started = any(told is not None for told in self._told)
        seconds = now - self._heard_at
        return seconds if seconds > (limit if started else max(limit, START_SECONDS)) else 0.0

    def find(self) -> Finding | None:
        """The rank that holds up the others; None while all is well."""
        return self._silent() or self._stuck()

    def _silent(self) -> Finding | None:
        for rank in sorted(range(len(self._told)), key=self._told_at.__getitem__):
            told = self._told[rank]
            silence = self._heard_at - self._told_at[rank]
            if told is None and silence > START_SECONDS:
                return _unreported(rank, silence)
            if told is not None and not told.ended and silence > told.quiet:
                return _silent(rank, told, silence)
        return None

    def _stuck(self) -> Finding | None:
        """No rank makes progress: who keeps the others waiting?"""
        active = [(rank, told) for rank, told in enumerate(self._told) if told is not None and not told.ended]
        still = self._heard_at - self._progress_at
        if not active or still <= max(told.allowed for _, told in active):
            return None
        active.sort(key=lambda one: one[1].position)  # the furthest behind first
        for rank, told in active:
            if told.doing not in ("", IN_COLLECTIVE):
                return Finding(DATA_STALL, rank, f"has waited {still:.0f} s for {told.doing}", told.host, told.pid)
        missing = [rank for rank, told in enumerate(self._told) if told is None]
        if missing:
            return Finding(HANG, missing[0], f"has not reported, and no rank made progress for {still:.0f} s", "", 0)
        for rank, told in active:
            if not told.doing:
                return Finding(HANG, rank, f"has made no progress for {still:.0f} s", told.host, told.pid)
        for rank, told in enumerate(self._told):
            if told is not None and told.ended:
                return Finding(
                    HANG,
                    rank,
                    f"has ended, and the others have waited {still:.0f} s for it in a collective",
                    told.host,
                    told.pid,
                )
        rank, told = active[0]
        return Finding(
            HANG,
            rank,
            f"is the first of those furthest behind, and all ranks have waited {still:.0f} s in collectives: "
            "the network, or collectives that differ between ranks",
            told.host,
            told.pid,
        )


class Follower:
    """What another rank knows of rank 0. Times are as in `Ranks`, from 0 on.

    Args:
        rank: whose knowledge it is.
        patience: seconds more for rank 0 to find its silence elsewhere first.
    """

    def __init__(self, rank: int, patience: float) -> None:
        self._rank, self._patience = rank, patience
        self._count = self._pulses = -1
        self._told_at = self._progress_at = 0.0

    def find(self, summary: HeartbeatSummary | None, pulses: int, allowed: float, now: float) -> Finding | None:
        """What rank 0 found, or that rank 0 itself hangs.

        `summary` is the newest that it published; `pulses` and `allowed` are this rank's own, as in its heartbeat.
        """
        if pulses != self._pulses:
            self._pulses, self._progress_at = pulses, now
        if summary is None:
            return _unreported(0, now) if now > START_SECONDS else None
        first = summary.aggregator
        if first.count != self._count:
            self._count, self._told_at = first.count, now
        if summary.finding is not None:
            return summary.finding
        if first.ended:  # and with it what it gathers
            still = now - max(self._progress_at, self._told_at)
            why = f"has ended, and rank {self._rank} has made no progress since, {still:.0f} s ago"
            return Finding(HANG, 0, why, first.host, first.pid) if still > allowed else None
        silence = now - self._told_at
        return _silent(0, first, silence) if silence > first.quiet + self._patience else None


def _silent(rank: int, told: Heartbeat, seconds: float) -> Finding:
    why = f"was silent for {seconds:.0f} s: its process is stopped, starved of its processor or cut off"
    return Finding(HANG, rank, why, told.host, told.pid)


def _unreported(rank: int, seconds: float) -> Finding:
    return Finding(HANG, rank, f"has not reported since the start, {seconds:.0f} s ago", "", 0)

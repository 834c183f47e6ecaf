"""The crashes of a run: how many count against its limit, and on which nodes they were. Plain data; Ray is not asked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

_LOST_SECONDS = 60.0  # after a crash, within which the loss of one of its nodes explains it
_MEMORY_SECONDS = 24 * 3600.0  # for which a node is held to account
_CRASHES_OF_A_BAD_NODE = 2
_FEWEST_LOSSES = 10  # which a run survives without a new checkpoint, however few failures it may have
_LOSSES_PER_FAILURE = 3


@dataclass(frozen=True)
class _Entry:
    time: float
    nodes: frozenset[str]  # of all workers
    blamed: str  # the node of the worker that crashed first; empty where that is not known


class Failures:
    """Counts crashes.

    A crash counts until a newer checkpoint was written before the next one. Where one of its nodes is gone or to go
    within a minute, the crash was a preemption: it counts neither for the run nor for a node. Of those there is a limit,
    too, since a run may fell its nodes itself: one that is out of memory may lose Ray together with the workers.

    Args:
        limit: so many crashes may count.
        clock: seconds, as `time.monotonic`.

    Attributes:
        losses: crashes that the loss of a node explained, since a checkpoint was written.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._counted: list[_Entry | None] = []  # None: the workers did not start
        self._remembered: list[_Entry] = []
        self._addresses: dict[str, str] = {}
        self.losses = 0

    def add(self, nodes: Mapping[str, str], blamed: str, *, progressed: bool) -> None:
        """Workers crashed.

        Args:
            nodes: addresses of the nodes they ran on, by id.
            blamed: id of the node of the worker that crashed; empty where that is not known.
            progressed: whether a checkpoint was written since the crash before.
        """
        crash = _Entry(self._clock(), frozenset(nodes), blamed)
        if progressed:
            self._counted, self.losses = [], 0
        self._counted.append(crash)
        self._remembered.append(crash)
        self._addresses.update(nodes)

    def add_start(self) -> None:
        """Workers did not start, for a reason other than want of room."""
        self._counted.append(None)

    def forgive(self, staying: Collection[str]) -> list[str]:
        """Drop the crashes of the last minute whose nodes are not all among `staying`; the addresses of the lost nodes."""
        lost: set[str] = set()
        for crash in list(self._remembered):
            gone = crash.nodes.difference(staying)
            if gone and self._clock() - crash.time <= _LOST_SECONDS:
                lost |= gone
                self._remembered.remove(crash)
                self._counted = [one for one in self._counted if one is not crash]
                self.losses += 1
        return sorted(self._addresses[node] for node in lost)

    @property
    def exhausted(self) -> bool:
        """Whether more crashes count than may."""
        return len(self._counted) > self._limit

    @property
    def lost_too_often(self) -> bool:
        """Whether more nodes were lost without a new checkpoint than preemptions explain."""
        return self.losses > max(_FEWEST_LOSSES, _LOSSES_PER_FAILURE * self._limit)

    def bad_nodes(self) -> dict[str, str]:
        """Addresses, by id, of the nodes on which workers crashed twice within a day."""
        now = self._clock()
        crashes = Counter(one.blamed for one in self._remembered if now - one.time <= _MEMORY_SECONDS and one.blamed)
        return {node: self._addresses[node] for node, count in crashes.items() if count >= _CRASHES_OF_A_BAD_NODE}

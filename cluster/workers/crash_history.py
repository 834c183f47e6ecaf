"""Crashes of a run: how many count towards its limit, and on which nodes they happened. Plain data, without Ray."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

_LOST_SECONDS = 60.0  # after a crash; the loss of one of its nodes within this time explains it
_NODE_SECONDS = 24 * 3600.0  # for which a crash is held against its node
_CRASHES_OF_A_BAD_NODE = 2
_ALLOWED_LOSSES = 10  # without a new checkpoint, even if max_failures is small
_LOSSES_PER_FAILURE = 3


@dataclass(frozen=True)
class _Crash:
    time: float
    nodes: frozenset[str]  # of all workers
    blamed: str  # id of the node whose worker crashed first; empty if unknown


class CrashHistory:
    """Counts crashes, and starts that failed.

    A crash counts until a newer checkpoint has been written. If one of its nodes is lost or draining within a minute,
    the crash was a preemption: it counts neither against the run nor against a node. Preemptions have a limit, too,
    since a run may bring down its nodes itself: on a node that is out of memory, Ray may die together with the workers.

    Args:
        limit: how many crashes are allowed without a new checkpoint.
        clock: returns seconds, as `time.monotonic` does.

    Attributes:
        losses: crashes explained by the loss of a node, since the last new checkpoint.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._counted: list[_Crash] = []
        self._crashes: list[_Crash] = []
        self._addresses: dict[str, str] = {}
        self.losses = 0

    def add(self, nodes: Mapping[str, str], blamed: str, *, progressed: bool) -> None:
        """Record that workers crashed.

        Args:
            nodes: addresses of the workers' nodes, by id.
            blamed: id of the node of the worker that crashed; empty if unknown.
            progressed: whether a checkpoint was written since the previous crash.
        """
        crash = _Crash(self._clock(), frozenset(nodes), blamed)
        if progressed:
            self._counted, self.losses = [], 0
        self._counted.append(crash)
        self._crashes.append(crash)
        self._addresses.update(nodes)

    def add_failed_start(self, nodes: Collection[str]) -> None:
        """Record that workers did not start on the nodes with these ids, for a reason other than a lack of capacity."""
        start = _Crash(self._clock(), frozenset(nodes), blamed="")
        self._counted.append(start)
        self._crashes.append(start)

    def forgive(self, staying: Collection[str]) -> list[str]:
        """Drop the crashes of the last minute whose nodes are not all in `staying`.

        Returns the addresses of the lost nodes, or the ids of nodes on which no worker ran.
        """
        lost: set[str] = set()
        for crash in list(self._crashes):
            missing = crash.nodes.difference(staying)
            if missing and self._clock() - crash.time <= _LOST_SECONDS:
                lost |= missing
                self._crashes.remove(crash)
                self._counted = [other for other in self._counted if other is not crash]
                self.losses += 1
        return sorted(self._addresses.get(node, node) for node in lost)

    @property
    def exhausted(self) -> bool:
        """True if more crashes count than the limit allows."""
        return len(self._counted) > self._limit

    @property
    def lost_too_often(self) -> bool:
        """True if more nodes were lost without a new checkpoint than preemptions explain."""
        return self.losses > max(_ALLOWED_LOSSES, _LOSSES_PER_FAILURE * self._limit)

    def bad_nodes(self) -> dict[str, str]:
        """Return the addresses, by id, of the nodes on which workers crashed twice within a day."""
        now = self._clock()
        crashes = Counter(crash.blamed for crash in self._crashes if now - crash.time <= _NODE_SECONDS and crash.blamed)
        return {node: self._addresses[node] for node, count in crashes.items() if count >= _CRASHES_OF_A_BAD_NODE}

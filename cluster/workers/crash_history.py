"""Records the crashes of a run: how many count towards its limit, and on which nodes they happened. Ray is not used."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

_LOST_SECONDS = 60.0  # how long after a crash the loss of one of its nodes still explains it
_NODE_SECONDS = 24 * 3600.0  # how long a crash counts against its node
_BAD_NODE_CRASHES = 2  # number of crashes within that time after which a node is avoided
# Limit of crashes with lost nodes, without a new checkpoint: this number, or this factor times max_failures if larger.
_MIN_ALLOWED_LOSSES, _LOSSES_PER_FAILURE = 10, 3


@dataclass(frozen=True)
class _Crash:
    time: float
    nodes: frozenset[str]  # ids of the nodes of all workers
    blamed_node: str  # id of the node whose worker crashed first; empty if unknown


class CrashHistory:
    """Counts crashes, and starts that failed.

    A crash counts until the next new checkpoint. If one of its nodes is lost or draining within a minute, the crash is
    regarded as a preemption: it counts neither against the run nor against a node. Preemptions have a limit, too, since
    a run may bring down its nodes itself: on a node that is out of memory, Ray may die together with the workers.

    Args:
        limit: maximum number of crashes without a new checkpoint.
        clock: returns seconds, as `time.monotonic` does.

    Attributes:
        losses: number of crashes explained by the loss of a node since the last new checkpoint.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._crashes: list[_Crash] = []
        self._counted: list[_Crash] = []  # crashes that count towards the limit
        self._addresses: dict[str, str] = {}  # addresses of nodes, by id
        self.losses = 0

    def add(self, nodes: Mapping[str, str], blamed_node: str, *, has_new_checkpoint: bool) -> None:
        """Record that workers crashed.

        Args:
            nodes: address of each node with workers, by id.
            blamed_node: id of the node of the worker that crashed first; empty if unknown.
            has_new_checkpoint: whether a checkpoint was written since the previous crash.
        """
        crash = _Crash(self._clock(), frozenset(nodes), blamed_node)
        if has_new_checkpoint:
            self._counted, self.losses = [], 0
        self._counted.append(crash)
        self._crashes.append(crash)
        self._addresses.update(nodes)

    def add_failed_start(self, nodes: Collection[str]) -> None:
        """Record that workers did not start on the nodes with these ids, for a reason other than a lack of capacity."""
        start = _Crash(self._clock(), frozenset(nodes), blamed_node="")
        self._counted.append(start)
        self._crashes.append(start)

    def forgive(self, staying: Collection[str]) -> list[str]:
        """Drop the crashes of the last minute with a node whose id is not in `staying`: its loss explains them.

        Returns the addresses of the lost nodes; for a node on which no worker ran, its id.
        """
        lost: set[str] = set()
        for crash in list(self._crashes):
            lost_now = crash.nodes.difference(staying)
            if lost_now and self._clock() - crash.time <= _LOST_SECONDS:
                lost |= lost_now
                self._crashes.remove(crash)
                self._counted = [other for other in self._counted if other is not crash]
                self.losses += 1
        return sorted(self._addresses.get(node, node) for node in lost)

    @property
    def exhausted(self) -> bool:
        """True if more crashes were counted than the limit allows."""
        return len(self._counted) > self._limit

    @property
    def lost_too_often(self) -> bool:
        """True if there were more crashes with lost nodes, without a new checkpoint, than preemptions can explain."""
        return self.losses > max(_MIN_ALLOWED_LOSSES, _LOSSES_PER_FAILURE * self._limit)

    def bad_nodes(self) -> dict[str, str]:
        """Return the address of each node on which workers crashed twice within a day, by id."""
        now = self._clock()
        counts = Counter(crash.blamed_node for crash in self._crashes if now - crash.time <= _NODE_SECONDS)
        return {node: self._addresses[node] for node, count in counts.items() if node and count >= _BAD_NODE_CRASHES}

"""Capacity of a cluster for workers: how many fit, the wait for nodes, and when to scale up to new ones."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.workers.actors import request_bundles
from cluster.workers.nodes import Node, NodeSize, fitting_workers, resources_of, usable_nodes
from cluster.workers.outcomes import one_line
from cluster.workers.request import LaunchRequest, new_event
from pretrain.common.files import write_json
from pretrain.common.wording import counted
from pretrain.common.worker import WAITING_FILE

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
_REPORTED_WAIT_SECONDS = 10.0  # shorter waits are not reported
_LOCAL_SECONDS = 10.0  # for a local Ray, which gets no further nodes: it may be slow to answer
_SINGLE_BUNDLES = 64  # max workers beyond the minimum that are requested from an autoscaler

# Of scaling up. A restart costs about a minute; nodes that are started together arrive one after another.
_STEADY_SECONDS = 2.0  # so that a flapping node does not restart everything
_SETTLE_SECONDS = 120.0  # without another arrival
_COOL_DOWN_SECONDS = 600.0  # since the workers were started
_MAX_DELAY_SECONDS = 1800.0  # since there was capacity for more, while further nodes arrive


@dataclass(frozen=True)
class Capacity:
    """The number of workers that the cluster can run.

    Attributes:
        nodes: nodes that stay and may be used.
        workers: how many workers fit; 0 if fewer fit than the run needs.
        staying: ids of all nodes that stay, the avoided ones included.
        waited_seconds: how long `wait_for_capacity` waited for it.
    """

    nodes: list[Node]
    workers: int
    staying: frozenset[str] = frozenset()
    waited_seconds: float = 0.0

    @property
    def sizes(self) -> list[NodeSize]:
        """(CPUs, GPUs) of each node."""
        return [(node.cpus, node.gpus) for node in self.nodes]

    def events(self) -> list[dict[str, Any]]:
        """Return an event if the wait was long enough to report."""
        if not self.workers or self.waited_seconds <= _REPORTED_WAIT_SECONDS:
            return []
        message = f"{self.waited_seconds:.0f} s for nodes; there is capacity for {counted(self.workers, 'worker')}"
        return [new_event("waited", message)]


def find_capacity(
    nodes: Sequence[Node],
    request: LaunchRequest,
    *,
    held: Mapping[str, int] | None = None,
    avoid: Collection[str] = (),
    min_workers: int | None = None,
) -> Capacity:
    """Return how many of the request's workers fit on `nodes`.

    Args:
        held: how many of our workers each node runs. Only if it is given, resources that others use are subtracted.
        avoid: ids of nodes to leave out.
        min_workers: return 0 workers if fewer fit; None takes the request's minimum.
    """
    cpus = request.cpus_per_worker

    def size_of(node: Node) -> NodeSize:
        if held is None:
            return node.cpus, node.gpus
        ours = held.get(node.id, 0)
        return node.free_cpus + ours * cpus, node.free_gpus + (ours if node.gpus else 0)

    staying = [node for node in nodes if not node.draining]
    usable = [node for node in staying if node.id not in avoid]
    low = request.required_workers if min_workers is None else min_workers
    # Free GPUs do not tell: all may be in use.
    use_gpu = any(node.gpus for node in usable) if request.use_gpu is None else request.use_gpu
    workers = fitting_workers([size_of(node) for node in usable], low, request.workers, cpus, use_gpu)
    return Capacity(usable, workers, frozenset(node.id for node in staying))


def wait_for_capacity(
    request: LaunchRequest,
    *,
    busy: bool = False,
    avoid: Collection[str] = (),
    deadline: float | None = None,
) -> Capacity:
    """Return the capacity as soon as it suffices, or as it is after `wait_for_nodes_seconds`.

    While it waits, Ray's autoscaler sees what is missing. `status` (through a file in the run's logs) and the log show
    it.

    Args:
        busy: subtract the resources that others use. After a crash Ray learns later than this process which
            resources are free.
        avoid: ids of nodes to leave out.
        deadline: by `time.monotonic`; None waits as long as the request says.

    Raises `StoppedError` if a stop is requested before or during the wait.
    """
    start = time.monotonic()
    if deadline is None:
        deadline = start + waiting_seconds(request)
    with _Demand(request, avoid, busy) as demand, _Notice(request.launch.run_dir) as notice:
        while True:
            capacity, missing = _check(request, busy, avoid, demand)
            waited = time.monotonic() - start
            request.launch.check_stop()
            if capacity.workers or time.monotonic() > deadline:
                return replace(capacity, waited_seconds=waited)
            if waited > POLL_SECONDS:  # most waits are over at the second check
                notice.show(missing)
                demand.make(capacity.nodes)
            time.sleep(POLL_SECONDS)


def waiting_seconds(request: LaunchRequest) -> float:
    """Return the seconds to wait for nodes."""
    return request.wait_for_nodes_seconds if request.address else _LOCAL_SECONDS


class ScaleUp:
    """Decides when to restart the workers because more of them would fit.

    Immediately if all workers of the request would fit. Otherwise when no more nodes arrive and the workers have run
    for a while, so that many nodes cost one or two restarts and not one each.

    Args:
        workers: how many run.
        max_workers: the largest number of workers.
        now: when they were started, by the clock of `is_due`.
    """

    def __init__(self, workers: int, max_workers: int, now: float) -> None:
        self._workers, self._max_workers, self._started = workers, max_workers, now
        self._capacity, self._since, self._first = 0, now, now

    def is_due(self, capacity: int, now: float) -> bool:
        """Return whether to restart now; `capacity` is the number of workers that fit."""
        if capacity <= self._workers:
            self._capacity = 0
            return False
        if not self._capacity:
            self._first = now
        if capacity != self._capacity:
            self._capacity, self._since = capacity, now
        steady = now - self._since
        if capacity >= self._max_workers:
            return steady >= _STEADY_SECONDS
        settled = steady >= _SETTLE_SECONDS and now - self._started >= _COOL_DOWN_SECONDS
        return settled or (steady >= _STEADY_SECONDS and now - self._first >= _MAX_DELAY_SECONDS)


def _check(request: LaunchRequest, busy: bool, avoid: Collection[str], demand: _Demand) -> tuple[Capacity, str]:
    """Return the current capacity, with 0 workers if it does not suffice, and what is missing."""
    held = {} if busy else None
    needed = request.required_workers
    try:
        nodes = usable_nodes()
        if demand.gpus and not any(node.gpus for node in nodes):
            return Capacity([], 0), f"waiting for nodes: no node has a GPU, {needed} workers need one each"
        capacity = find_capacity(nodes, request, held=held, avoid=avoid)
        placed = demand.placed()
    except Exception as error:  # the head may be unreachable for a while
        logger.warning("the nodes are unknown: %s", one_line(error))
        return Capacity([], 0), f"waiting for the cluster's head, which does not answer ({one_line(error)})"
    if placed >= needed:  # Ray has reserved these resources for us
        return replace(capacity, workers=max(placed, capacity.workers)), ""
    fitting = find_capacity(nodes, request, held=held, avoid=avoid, min_workers=1).workers
    what = "free capacity" if busy else "capacity"
    return (
        capacity,
        f"waiting for nodes: {what} for {fitting} of {counted(needed, 'worker')} on "
        f"{counted(len(capacity.nodes), 'node')}",
    )


class _Demand:
    """The needs of a waiting run, as placement groups that Ray's autoscaler sees; they are removed after the wait.

    The minimum of workers is one group, which an autoscaler serves as a whole. An elastic run requests the others one
    by one, since an autoscaler starts nothing for a group that it cannot serve. Not on a busy cluster: Ray would place
    them on the resources that become free, one by one, and never the group.
    """

    def __init__(self, request: LaunchRequest, avoid: Collection[str], busy: bool) -> None:
        self._request, self._avoid, self._busy = request, avoid, busy
        self._groups: list[Any] = []
        self._gpus: bool | None = request.use_gpu

    @property
    def gpus(self) -> bool:
        """True if each worker takes a GPU: known once workers have run, otherwise assumed if an autoscaler has some."""
        if self._gpus is None:
            self._gpus = bool(self._request.address) and autoscaled_gpus() > 0
        return self._gpus

    def make(self, nodes: Sequence[Node]) -> None:
        """Request what is missing, once."""
        if self._groups or not self._request.address:
            return
        with_gpu = self.gpus or any(node.gpus for node in nodes)
        resources = resources_of(self._request.cpus_per_worker or 1, with_gpu)
        low, high = self._request.required_workers, self._request.workers
        singles = 0 if self._busy else min(high - low, _SINGLE_BUNDLES)
        for size in [low] + [1] * singles:
            self._groups.append(request_bundles(size, resources, self._avoid))

    def placed(self) -> int:
        """Return for how many workers Ray has reserved resources; 0 if not even for the minimum."""
        if not self._groups:
            return 0
        from ray.util import placement_group_table

        table: Mapping[str, Any] = placement_group_table()
        ready = [table.get(group.id.hex(), {}).get("state") == "CREATED" for group in self._groups]
        sizes = [group.bundle_count for group in self._groups]
        return sum(size for size, is_ready in zip(sizes, ready, strict=True) if is_ready) if ready[0] else 0

    def __enter__(self) -> _Demand:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._groups:
            return
        from ray.util import remove_placement_group

        for group in self._groups:
            with contextlib.suppress(Exception):  # an unreachable head drops them when we exit
                remove_placement_group(group)


def autoscaled_gpus() -> int:
    """Return how many GPUs the cluster's autoscaler may start; 0 without an autoscaler."""
    from ray._private.state import state

    return int((state.get_max_resources_from_cluster_config() or {}).get("GPU", 0))


class _Notice:
    """Shows a wait in the log, and in a file that exists during the wait."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "logs" / WAITING_FILE
        self._start_time = time.time()
        self._shown = ""

    def show(self, message: str) -> None:
        if message == self._shown:
            return
        self._shown = message
        logger.info("%s", message)
        with contextlib.suppress(Exception):  # the run continues without a notice
            write_json(self._path, {"time": self._start_time, "message": message})

    def __enter__(self) -> _Notice:
        self._remove()  # a driver that was killed while it waited leaves its notice
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            logger.info("waited %.0f s for nodes", time.time() - self._start_time)
            self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

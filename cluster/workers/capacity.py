"""Determines how many workers fit on a cluster, waits for nodes, and decides when to scale up to new ones."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.workers.actors import request_bundles
from cluster.workers.nodes import Node, NodeSize, fitting_workers, process_resources, usable_nodes
from cluster.workers.outcomes import one_line
from cluster.workers.request import LaunchRequest, new_event
from pretrain.common.files import write_json
from pretrain.common.wording import counted
from pretrain.common.worker import WAITING_FILE

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
_REPORTED_WAIT_SECONDS = 10.0  # shorter waits are not reported
_LOCAL_SECONDS = 10.0  # maximum wait for a local Ray, which gets no more nodes but may be slow to respond
_MAX_EXTRA_WORKERS = 64  # how many workers beyond the minimum are requested from an autoscaler

# Waits before scaling up: a restart costs about a minute, and nodes that are started together join one by one.
_STEADY_SECONDS = 2.0  # minimum time with unchanged capacity, so that a flapping node does not restart everything
_SETTLE_SECONDS = 120.0  # minimum time without another new node, unless all workers fit
_COOL_DOWN_SECONDS = 600.0  # minimum time since the start of the workers, unless all workers fit
_MAX_DELAY_SECONDS = 1800.0  # if more workers have fit for this long, the two minimum times above do not apply


@dataclass(frozen=True)
class Capacity:
    """The number of workers that the cluster can run.

    Attributes:
        nodes: nodes that are neither draining nor avoided.
        workers: how many workers fit; 0 if fewer fit than the run needs.
        staying: ids of all nodes that are not draining, including the avoided ones.
        waited_seconds: how long `wait_for_capacity` waited.
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
        """Return a list with an event if the wait was long enough to report, else []."""
        if not self.workers or self.waited_seconds <= _REPORTED_WAIT_SECONDS:
            return []
        message = f"{self.waited_seconds:.0f} s for nodes; there is capacity for {counted(self.workers, 'worker')}"
        return [new_event("waited", message)]


def find_capacity(
    nodes: Sequence[Node],
    request: LaunchRequest,
    *,
    own_workers: Mapping[str, int] | None = None,
    avoid: Collection[str] = (),
    min_workers: int | None = None,
) -> Capacity:
    """Return how many of the request's workers fit on `nodes`.

    Args:
        own_workers: number of this run's workers by node id, to count only free resources and theirs; None counts all.
        avoid: ids of nodes to leave out.
        min_workers: if fewer workers fit, the result is 0 workers; None means the request's minimum.
    """
    cpus = request.cpus_per_worker

    def size_of(node: Node) -> NodeSize:
        if own_workers is None:
            return node.cpus, node.gpus
        workers = own_workers.get(node.id, 0)
        return node.free_cpus + workers * cpus, node.free_gpus + (workers if node.gpus else 0)

    staying = [node for node in nodes if not node.draining]
    usable = [node for node in staying if node.id not in avoid]
    minimum = request.required_workers if min_workers is None else min_workers
    # Derived from all GPUs, not from the free ones: all may be in use.
    use_gpu = any(node.gpus for node in usable) if request.use_gpu is None else request.use_gpu
    workers = fitting_workers([size_of(node) for node in usable], minimum, request.workers, cpus, use_gpu)
    return Capacity(usable, workers, frozenset(node.id for node in staying))


def wait_for_capacity(
    request: LaunchRequest,
    *,
    only_free: bool = False,
    avoid: Collection[str] = (),
    deadline: float | None = None,
) -> Capacity:
    """Return the capacity as soon as it suffices, or the insufficient capacity after `wait_for_nodes_seconds`.

    During the wait, Ray's autoscaler sees the missing resources as demand; the log shows the wait, and so does the
    command `status`, from a file in the run's logs.

    Args:
        only_free: count only free resources. Do not set it after a crash: Ray frees the crashed workers' resources
            with a delay.
        avoid: ids of nodes to leave out.
        deadline: end of the wait, by `time.monotonic`; None: the wait may take as long as the request allows.

    Raises `StoppedError` if a stop is requested before or during the wait.
    """
    start = time.monotonic()
    if deadline is None:
        deadline = start + wait_limit(request)
    with _Demand(request, avoid, only_free) as demand, _Notice(request.launch.run_dir) as notice:
        while True:
            capacity, message = _check(request, only_free, avoid, demand)
            waited = time.monotonic() - start
            request.launch.check_stop()
            if capacity.workers or time.monotonic() > deadline:
                return replace(capacity, waited_seconds=waited)
            if waited > POLL_SECONDS:  # most waits end at the second check
                notice.show(message)
                demand.request(capacity.nodes)
            time.sleep(POLL_SECONDS)


def wait_limit(request: LaunchRequest) -> float:
    """Return the maximum number of seconds to wait for nodes."""
    return request.wait_for_nodes_seconds if request.address else _LOCAL_SECONDS


class ScaleUp:
    """Decides when to restart the workers because more of them would fit.

    The restart is due immediately if all workers of the request would fit. Otherwise it is due once no more nodes join
    and the workers have run for a while, so that many new nodes cost one or two restarts instead of one each.

    Args:
        workers: number of running workers.
        max_workers: maximum number of workers.
        now: start time of the workers, by the clock that `is_due` uses.
    """

    def __init__(self, workers: int, max_workers: int, now: float) -> None:
        self._workers, self._max_workers, self._started = workers, max_workers, now
        self._capacity, self._capacity_since, self._scalable_since = 0, now, now

    def is_due(self, capacity: int, now: float) -> bool:
        """Return whether to restart now; `capacity` is the number of workers that fit."""
        if capacity <= self._workers:
            self._capacity = 0
            return False
        if not self._capacity:
            self._scalable_since = now
        if capacity != self._capacity:
            self._capacity, self._capacity_since = capacity, now
        steady_seconds = now - self._capacity_since
        if capacity >= self._max_workers:
            return steady_seconds >= _STEADY_SECONDS
        settled = steady_seconds >= _SETTLE_SECONDS and now - self._started >= _COOL_DOWN_SECONDS
        return settled or (steady_seconds >= _STEADY_SECONDS and now - self._scalable_since >= _MAX_DELAY_SECONDS)


def _check(request: LaunchRequest, only_free: bool, avoid: Collection[str], demand: _Demand) -> tuple[Capacity, str]:
    """Return the current capacity, with 0 workers if it does not suffice, and a message about what is missing."""
    own_workers = {} if only_free else None
    needed = request.required_workers
    try:
        nodes = usable_nodes()
        if demand.needs_gpus and not any(node.gpus for node in nodes):
            return Capacity([], 0), f"waiting for nodes: no node has a GPU, {needed} workers need one each"
        capacity = find_capacity(nodes, request, own_workers=own_workers, avoid=avoid)
        placed = demand.placed_workers()
    except Exception as error:  # the head may be unreachable for a while
        logger.warning("the nodes are unknown: %s", one_line(error))
        return Capacity([], 0), f"waiting for the cluster's head, which does not answer ({one_line(error)})"
    if placed >= needed:  # Ray has reserved these resources for us
        return replace(capacity, workers=max(placed, capacity.workers)), ""
    fitting = find_capacity(nodes, request, own_workers=own_workers, avoid=avoid, min_workers=1).workers
    kind = "free capacity" if only_free else "capacity"
    return (
        capacity,
        f"waiting for nodes: {kind} for {fitting} of {counted(needed, 'worker')} on "
        f"{counted(len(capacity.nodes), 'node')}",
    )


class _Demand:
    """The resource demand of a waiting run: placement groups that Ray's autoscaler sees, removed after the wait.

    The minimum number of workers is one group, which an autoscaler serves as a whole. An elastic run requests further
    workers one by one, since an autoscaler starts no nodes for a group that it cannot serve. With `only_free` it
    requests none: single workers would take all resources that become free, and the group would never be placed.
    """

    def __init__(self, request: LaunchRequest, avoid: Collection[str], only_free: bool) -> None:
        self._request, self._avoid, self._only_free = request, avoid, only_free
        self._groups: list[Any] = []
        self._needs_gpus: bool | None = request.use_gpu

    @property
    def needs_gpus(self) -> bool:
        """True if each worker takes a GPU or, if the request leaves it open, if an autoscaler may start GPU nodes."""
        if self._needs_gpus is None:
            self._needs_gpus = bool(self._request.address) and autoscaled_gpus() > 0
        return self._needs_gpus

    def request(self, nodes: Sequence[Node]) -> None:
        """Request the resources of the run, at the first call only."""
        if self._groups or not self._request.address:
            return
        with_gpu = self.needs_gpus or any(node.gpus for node in nodes)
        resources = process_resources(self._request.cpus_per_worker or 1, with_gpu)
        minimum, maximum = self._request.required_workers, self._request.workers
        extra = 0 if self._only_free else min(maximum - minimum, _MAX_EXTRA_WORKERS)
        for size in [minimum] + [1] * extra:
            self._groups.append(request_bundles(size, resources, self._avoid))

    def placed_workers(self) -> int:
        """Return the number of workers for which Ray has reserved resources; 0 if it is below the minimum."""
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
            with contextlib.suppress(Exception):  # an unreachable head drops the group when this process exits
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
        self._message = ""

    def show(self, message: str) -> None:
        if message == self._message:
            return
        self._message = message
        logger.info("%s", message)
        with contextlib.suppress(Exception):  # the run continues without a notice
            write_json(self._path, {"time": self._start_time, "message": message})

    def __enter__(self) -> _Notice:
        self._remove()  # in case an earlier driver was killed while it waited
        return self

    def __exit__(self, *_: object) -> None:
        if self._message:
            logger.info("waited %.0f s for nodes", time.time() - self._start_time)
            self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

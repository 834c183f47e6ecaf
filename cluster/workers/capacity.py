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
from cluster.workers.nodes import Node, NodeSize, most_that_fit, resources_of, usable_nodes
from cluster.workers.outcomes import one_line
from cluster.workers.request import LaunchRequest, new_event
from pretrain.common.files import write_json
from pretrain.common.wording import counted
from pretrain.common.worker import WAITING_FILE

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
_REPORTED_WAIT_SECONDS = 10.0  # shorter waits are no event
_OWN_SECONDS = 10.0  # for a Ray of our own, which gets no further nodes: it may be slow to answer
_SINGLE_BUNDLES = 64  # the most workers, beyond the fewest, that are requested from an autoscaler

# Of scaling up. A restart costs about a minute; nodes that are started together arrive one after another.
_STEADY_SECONDS = 2.0  # so that a flapping node does not restart everything
_SETTLE_SECONDS = 120.0  # without another arrival
_COOL_DOWN_SECONDS = 600.0  # since the workers were started
_LONGEST_SECONDS = 1800.0  # since there was capacity for more, while further nodes arrive


@dataclass(frozen=True)
class Capacity:
    """How many workers the cluster can run.

    Attributes:
        nodes: those that stay and may be used.
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
        """An event, if the wait was long enough to report."""
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
    fewest: int | None = None,
) -> Capacity:
    """How many of the request's workers fit on `nodes`.

    Args:
        held: how many of our workers each node runs. Only if it is given, resources that others use are subtracted.
        avoid: ids of nodes to leave out.
        fewest: the smallest number of workers that counts; otherwise that of the request.
    """
    cpus = request.cpus_per_worker

    def size_of(node: Node) -> NodeSize:
        if held is None:
            return node.cpus, node.gpus
        ours = held.get(node.id, 0)
        return node.free_cpus + ours * cpus, node.free_gpus + (ours if node.gpus else 0)

    staying = [node for node in nodes if not node.draining]
    usable = [node for node in staying if node.id not in avoid]
    low = request.fewest_workers if fewest is None else fewest
    # Free GPUs do not show it: all may be in use.
    use_gpu = any(node.gpus for node in usable) if request.use_gpu is None else request.use_gpu
    workers = most_that_fit([size_of(node) for node in usable], low, request.workers, cpus, use_gpu)
    return Capacity(usable, workers, frozenset(node.id for node in staying))


def wait_for_capacity(
    request: LaunchRequest,
    *,
    crowded: bool = False,
    avoid: Collection[str] = (),
    deadline: float | None = None,
) -> Capacity:
    """The capacity as soon as it suffices, or as it is when `wait_for_nodes_seconds` have passed.

    While it waits, Ray's autoscaler sees what is missing. `status` (through a file in the run's logs) and the log show
    it.

    Args:
        crowded: subtract the resources that others use. After a crash Ray learns later than this process which
            resources are free.
        avoid: ids of nodes to leave out.
        deadline: by `time.monotonic`, instead of the request's wait from now on.

    Raises `StoppedError` if a stop is requested before or meanwhile.
    """
    began = time.monotonic()
    if deadline is None:
        deadline = began + waiting_seconds(request)
    with _Demand(request, avoid, crowded) as demand, _Notice(request.launch.run_dir) as notice:
        while True:
            capacity, missing = _check(request, crowded, avoid, demand)
            waited = time.monotonic() - began
            request.launch.check_stop()
            if capacity.workers or time.monotonic() > deadline:
                return replace(capacity, waited_seconds=waited)
            if waited > POLL_SECONDS:  # most waits are over at the second check
                notice.show(missing)
                demand.make(capacity.nodes)
            time.sleep(POLL_SECONDS)


def waiting_seconds(request: LaunchRequest) -> float:
    """How long to wait for nodes."""
    return request.wait_for_nodes_seconds if request.address else _OWN_SECONDS


class ScaleUp:
    """Decides when to restart the workers because more of them would fit.

    At once if all workers of the request would fit. Otherwise when no more nodes arrive and the workers have run for a
    while, so that many nodes cost one or two restarts and not one each.

    Args:
        workers: how many run.
        most: the largest number of workers.
        now: when they were started, by the clock of `is_due`.
    """

    def __init__(self, workers: int, most: int, now: float) -> None:
        self._workers, self._most, self._began = workers, most, now
        self._capacity, self._since, self._first = 0, now, now

    def is_due(self, capacity: int, now: float) -> bool:
        """Whether to restart now; `capacity` is the number of workers that fit."""
        if capacity <= self._workers:
            self._capacity = 0
            return False
        if not self._capacity:
            self._first = now
        if capacity != self._capacity:
            self._capacity, self._since = capacity, now
        steady = now - self._since
        if capacity >= self._most:
            return steady >= _STEADY_SECONDS
        settled = steady >= _SETTLE_SECONDS and now - self._began >= _COOL_DOWN_SECONDS
        return settled or (steady >= _STEADY_SECONDS and now - self._first >= _LONGEST_SECONDS)


def _check(request: LaunchRequest, crowded: bool, avoid: Collection[str], demand: _Demand) -> tuple[Capacity, str]:
    """The capacity now, with 0 workers if it does not suffice, and then what is missing."""
    held = {} if crowded else None
    needed = request.fewest_workers
    try:
        nodes = usable_nodes()
        if demand.gpus and not any(node.gpus for node in nodes):
            return Capacity([], 0), f"waiting for nodes: no node has a GPU, {needed} workers need one each"
        capacity = find_capacity(nodes, request, held=held, avoid=avoid)
        placed = demand.placed()
    except Exception as error:  # a head that is away for a while
        logger.warning("the nodes are unknown: %s", one_line(error))
        return Capacity([], 0), f"waiting for the cluster's head, which does not answer ({one_line(error)})"
    if placed >= needed:  # Ray has reserved these resources for us
        return replace(capacity, workers=max(placed, capacity.workers)), ""
    fitting = find_capacity(nodes, request, held=held, avoid=avoid, fewest=1).workers
    what = "free capacity" if crowded else "capacity"
    return (
        capacity,
        f"waiting for nodes: {what} for {fitting} of {counted(needed, 'worker')} on "
        f"{counted(len(capacity.nodes), 'node')}",
    )


class _Demand:
    """What a waiting run needs, as placement groups that Ray's autoscaler sees; they are removed after the wait.

    The fewest workers are one group, which an autoscaler serves as a whole. An elastic run requests the others one by
    one, since an autoscaler starts nothing for a group that it cannot serve. Not on a crowded cluster: Ray would place
    them on the resources that become free, one by one, and never the group.
    """

    def __init__(self, request: LaunchRequest, avoid: Collection[str], crowded: bool) -> None:
        self._request, self._avoid, self._crowded = request, avoid, crowded
        self._groups: list[Any] = []
        self._gpus: bool | None = request.use_gpu

    @property
    def gpus(self) -> bool:
        """Whether each worker takes a GPU: known once workers have run, otherwise assumed if an autoscaler has some."""
        if self._gpus is None:
            self._gpus = bool(self._request.address) and autoscaled_gpus() > 0
        return self._gpus

    def make(self, nodes: Sequence[Node]) -> None:
        """Request what is missing, once."""
        if self._groups or not self._request.address:
            return
        with_gpu = self.gpus or any(node.gpus for node in nodes)
        resources = resources_of(self._request.cpus_per_worker or 1, with_gpu)
        low, high = self._request.fewest_workers, self._request.workers
        singles = 0 if self._crowded else min(high - low, _SINGLE_BUNDLES)
        for size in [low] + [1] * singles:
            self._groups.append(request_bundles(size, resources, self._avoid))

    def placed(self) -> int:
        """For how many workers Ray has reserved resources, if it has for the fewest; else 0."""
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
            with contextlib.suppress(Exception):  # a head that is away drops them when we exit
                remove_placement_group(group)


def autoscaled_gpus() -> int:
    """How many GPUs the cluster's autoscaler may start; 0 without an autoscaler."""
    from ray._private.state import state

    return int((state.get_max_resources_from_cluster_config() or {}).get("GPU", 0))


class _Notice:
    """Shows a wait in the log, and in a file that exists as long as the wait."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "logs" / WAITING_FILE
        self._began = time.time()
        self._shown = ""

    def show(self, message: str) -> None:
        if message == self._shown:
            return
        self._shown = message
        logger.info("%s", message)
        with contextlib.suppress(Exception):  # the run continues without a notice
            write_json(self._path, {"time": self._began, "message": message})

    def __enter__(self) -> _Notice:
        self._remove()  # a driver that was killed while it waited leaves its notice
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            logger.info("waited %.0f s for nodes", time.time() - self._began)
            self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

"""Room for workers on the nodes of a cluster: how many fit, the wait for nodes to come, and when to grow into new ones."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.workers.members import ask_for
from cluster.workers.nodes import Node, most_that_fit, usable_nodes
from cluster.workers.worker import one_line, stop_flag
from pretrain.common.errors import StoppedError
from pretrain.common.files import write_json
from pretrain.common.worker import WAITING_FILE

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
_WORTH_TELLING_SECONDS = 10.0  # of a wait
_OWN_SECONDS = 10.0  # for a Ray of our own, to which no nodes come: it may be slow to answer
_SINGLE_BUNDLES = 64  # at most so many, beyond the fewest workers, are asked of an autoscaler

# Of growth. A restart costs about a minute; nodes that are started together arrive one after another.
_STEADY_SECONDS = 2.0  # so that a node that flickers does not stop everything
_SETTLE_SECONDS = 120.0  # without another arrival
_COOL_DOWN_SECONDS = 600.0  # since the workers were started
_LONGEST_SECONDS = 1800.0  # since there was room for more, while nodes go on arriving


@dataclass(frozen=True)
class Room:
    """What was found.

    Attributes:
        nodes: those that stay and may be used.
        workers: for how many there is room.
        staying: ids of all that stay, those that are left out among them.
    """

    nodes: list[Node]
    workers: int
    staying: frozenset[str] = frozenset()

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """(CPUs, GPUs) of each node."""
        return [(node.cpus, node.gpus) for node in self.nodes]


def find_room(
    nodes: Sequence[Node],
    request: Mapping[str, Any],
    *,
    held: Mapping[str, int] | None = None,
    avoid: Collection[str] = (),
    fewest: int | None = None,
) -> Room:
    """For how many of the request's workers `nodes` have room, from `fewest` (otherwise its `min_workers`) on; else 0.

    Args:
        held: what others hold counts only where this is given: how many workers of ours each node has.
        avoid: ids of nodes to leave out.
    """
    cpus = request["cpus_per_worker"]

    def room_on(node: Node) -> tuple[int, int]:
        if held is None:
            return node.cpus, node.gpus
        ours = held.get(node.id, 0)
        return node.free_cpus + ours * cpus, node.free_gpus + (ours if node.gpus else 0)

    staying = [node for node in nodes if not node.draining]
    usable = [node for node in staying if node.id not in avoid]
    low = fewest_workers(request) if fewest is None else fewest
    workers = most_that_fit([room_on(node) for node in usable], low, request["workers"], cpus)
    return Room(usable, workers, frozenset(node.id for node in staying))


def fewest_workers(request: Mapping[str, Any]) -> int:
    """With how many workers the run is content."""
    return request["min_workers"] or request["workers"]


def wait_for_room(
    request: Mapping[str, Any],
    *,
    crowded: bool = False,
    avoid: Collection[str] = (),
    deadline: float | None = None,
) -> Room:
    """The room for workers as soon as there is enough, or what there is when `wait_for_nodes_seconds` have passed.

    While it waits, Ray's autoscaler sees what is missing, and `status` (through a file in the run's logs) and the log
    tell of it.

    Args:
        crowded: count what others hold. After a crash Ray knows later than we do that room is free.
        avoid: ids of nodes to leave out.
        deadline: by `time.monotonic`, instead of the request's wait from now on.

    Raises `StoppedError` when a stop is asked for meanwhile.
    """
    began = time.monotonic()
    if deadline is None:
        deadline = began + waiting_seconds(request)
    stop = stop_flag(request)
    with _Demand(request, avoid) as demand, _Notice(request) as notice:
        while True:
            room, why = _look(request, crowded, avoid, demand)
            waited = time.monotonic() - began
            if room.workers and waited > _WORTH_TELLING_SECONDS:
                add_event(request, "waited", f"{waited:.0f} s for nodes; there is room for {room.workers} workers")
            if room.workers or time.monotonic() > deadline:
                return room
            if stop.is_set():
                raise StoppedError(f"{request['run_dir']}: stopped while it waited for nodes. --resume goes on.")
            if waited > LOOK_SECONDS:  # most waits are over at the second look
                notice.tell(why)
                demand.make(room.nodes)
            time.sleep(LOOK_SECONDS)


def add_event(request: Mapping[str, Any], kind: str, message: str) -> None:
    """Have the next start of the workers record an event."""
    event = {"event": kind, "time": time.time(), "message": message}
    request["payload"].setdefault("events", []).append(event)


def waiting_seconds(request: Mapping[str, Any]) -> float:
    """How long to wait for nodes."""
    return request["wait_for_nodes_seconds"] if request["address"] else _OWN_SECONDS


class Growth:
    """When to restart the workers because there is room for more of them.

    At once when there is room for all that there may be. Else when nodes have stopped arriving and the workers have run
    for a while, so that many nodes cost a restart or two and not one each.

    Args:
        workers: how many run.
        most: how many there may be.
        now: when they were started, by the clock of `due`.
    """

    def __init__(self, workers: int, most: int, now: float) -> None:
        self._workers, self._most, self._began = workers, most, now
        self._room, self._since, self._first = 0, now, now

    def due(self, room: int, now: float) -> bool:
        """Whether to restart now, with room for so many workers."""
        if room <= self._workers:
            self._room = 0
            return False
        if not self._room:
            self._first = now
        if room != self._room:
            self._room, self._since = room, now
        steady = now - self._since
        if room >= self._most:
            return steady >= _STEADY_SECONDS
        settled = steady >= _SETTLE_SECONDS and now - self._began >= _COOL_DOWN_SECONDS
        return settled or (steady >= _STEADY_SECONDS and now - self._first >= _LONGEST_SECONDS)


def _look(request: Mapping[str, Any], crowded: bool, avoid: Collection[str], demand: _Demand) -> tuple[Room, str]:
    """The room there is now, with 0 workers where it is too little, and what is missing then."""
    held = {} if crowded else None
    wanted = fewest_workers(request)
    try:
        nodes = usable_nodes()
        if demand.gpus and not any(node.gpus for node in nodes):
            return Room([], 0), f"waiting for nodes: has none with a GPU, for {wanted} workers"
        room = find_room(nodes, request, held=held, avoid=avoid)
        placed = demand.placed()
    except Exception as error:  # a head that is away for a while
        logger.warning("the nodes cannot be asked for: %s", one_line(error))
        return Room([], 0), f"waiting for the cluster's head, which does not answer ({one_line(error)})"
    if placed >= wanted:  # Ray holds it for us
        return replace(room, workers=max(placed, room.workers)), ""
    has = find_room(nodes, request, held=held, avoid=avoid, fewest=1).workers
    what = "free room" if crowded else "room"
    return room, f"waiting for nodes: has {what} for {has} of {wanted} workers on {len(room.nodes)} nodes"


class _Demand:
    """What a run that waits needs, as placement groups that Ray's autoscaler sees; they end with the wait.

    The fewest workers are one group, which an autoscaler serves as a whole. More, where the run is elastic, are asked for
    one by one, since it starts nothing for a group that it cannot serve.
    """

    def __init__(self, request: Mapping[str, Any], avoid: Collection[str]) -> None:
        self._request, self._avoid = request, avoid
        self._groups: list[Any] = []
        self._gpus: bool | None = None

    @property
    def gpus(self) -> bool:
        """Whether each worker takes a GPU: known once workers have run, otherwise because an autoscaler has some."""
        if "use_gpu" in self._request:
            return self._request["use_gpu"]
        if self._gpus is None:
            self._gpus = bool(self._request["address"]) and _autoscaled_gpus() > 0
        return self._gpus

    def make(self, nodes: Sequence[Node]) -> None:
        """Ask for what is missing, once."""
        if self._groups or not self._request["address"]:
            return
        gpu = self.gpus or any(node.gpus for node in nodes)
        resources = {"CPU": self._request["cpus_per_worker"] or 1, **({"GPU": 1} if gpu else {})}
        low, high = fewest_workers(self._request), self._request["workers"]
        for size in [low] + [1] * min(high - low, _SINGLE_BUNDLES):
            self._groups.append(ask_for(size, resources, self._avoid))

    def placed(self) -> int:
        """For how many workers Ray has found a place, once it has for the fewest; else 0."""
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
            with contextlib.suppress(Exception):  # a head that is away drops them with us
                remove_placement_group(group)


def _autoscaled_gpus() -> int:
    """How many GPUs the cluster's autoscaler may bring; 0 where there is none."""
    from ray._private.state import state

    return int((state.get_max_resources_from_cluster_config() or {}).get("GPU", 0))


class _Notice:
    """Tells of a wait: in the log, and in a file that is there as long as the wait."""

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._path = Path(request["run_dir"]) / "logs" / WAITING_FILE
        self._began = time.time()
        self._told = ""

    def tell(self, message: str) -> None:
        if message == self._told:
            return
        self._told = message
        logger.info("%s", message)
        with contextlib.suppress(Exception):  # a notice that cannot be written stops nothing
            write_json(self._path, {"time": self._began, "message": message})

    def __enter__(self) -> _Notice:
        self._remove()  # a driver that was killed while it waited leaves its notice
        return self

    def __exit__(self, *_: object) -> None:
        if self._told:
            logger.info("waited %.0f s for nodes", time.time() - self._began)
            self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

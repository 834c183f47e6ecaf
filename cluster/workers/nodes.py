"""The machines of a cluster: which are fit for work, and how many workers they hold. Ray is asked only where it is joined."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.common.errors import MachineError

_CONNECT_SECONDS = 1.0


@dataclass(frozen=True)
class Node:
    """A living node of the cluster that this process has joined."""

    id: str
    cpus: int
    gpus: int
    draining: bool  # it is to go soon
    free_cpus: int  # which nobody holds, some moments ago
    free_gpus: int


def nodes_fit(
    nodes: Sequence[tuple[int, int]],
    workers: int,
    cpus_per_worker: int,
    where: str,
    setting: str = "scheduling.workers (--workers)",
) -> int:
    """The CPUs each worker gets, so that `workers` fit on `nodes`, a list of (CPUs, GPUs).

    With GPUs anywhere each worker takes one. `cpus_per_worker` 0 means as many as fit. `where` names the
    machine or cluster in the `MachineError` that says what there is when they do not fit, and `setting` what to lower.
    """
    cpus, gpus = sum(cpu for cpu, _ in nodes), sum(gpu for _, gpu in nodes)
    if gpus and workers > gpus:
        raise MachineError(
            f"{where} has {gpus} GPUs, too few for {workers} workers of one GPU each. Set {setting} to {gpus} or less."
        )
    largest = max((cpu for cpu, _ in nodes), default=0)
    choices = [cpus_per_worker] if cpus_per_worker else range(largest, 0, -1)
    for each in choices:
        if _room(nodes, each) >= workers:
            return each
    raise MachineError(
        f"{where} has {cpus} CPU cores, too few for {workers} workers of {cpus_per_worker or 1} each. "
        f"Set {setting} or scheduling.cpus_per_worker lower."
    )


def _room(nodes: Sequence[tuple[int, int]], each: int) -> int:
    """For how many workers of `each` CPUs there is room."""
    gpus = any(gpu for _, gpu in nodes)
    return sum(min(cpu // each, gpu) if gpus else cpu // each for cpu, gpu in nodes)


def most_that_fit(nodes: Sequence[tuple[int, int]], low: int, high: int, cpus_per_worker: int) -> int:
    """How many of `low` to `high` workers find room on `nodes`, a list of (CPUs, GPUs); 0 where not even `low` do."""
    workers = min(high, _room(nodes, cpus_per_worker or 1))
    return workers if workers >= low else 0


def share_out(nodes: Sequence[tuple[int, int]], low: int, high: int, cpus_per_worker: int, where: str) -> int:
    """The CPUs each worker gets, so that as many of `low` to `high` as can be find room on `nodes`; errors of `nodes_fit`."""
    workers = most_that_fit(nodes, low, high, cpus_per_worker) or low
    return nodes_fit(nodes, workers, cpus_per_worker, where)


def usable_nodes() -> list[Node]:
    """Nodes that live and answer. Ray itself takes some seconds to notice that one is lost."""
    import ray
    from ray._private.state import available_resources_per_node

    draining, free = _draining(), available_resources_per_node()
    found = []
    for node in ray.nodes():
        if node["Alive"] and _answers(node["NodeManagerAddress"], node["NodeManagerPort"]):
            resources, left = node["Resources"], free.get(node["NodeID"], {})
            found.append(
                Node(
                    node["NodeID"],
                    int(resources.get("CPU", 0)),
                    int(resources.get("GPU", 0)),
                    node["NodeID"] in draining,
                    int(left.get("CPU", 0)),
                    int(left.get("GPU", 0)),
                )
            )
    return found


def _draining() -> set[str]:
    """Ids of the nodes that are announced to go: by `ray drain-node`, an autoscaler or a spot notice."""
    from ray._private.worker import global_worker

    client: Any = global_worker.gcs_client  # pyright: ignore[reportAttributeAccessIssue]
    ids = client.get_draining_nodes(timeout=_CONNECT_SECONDS)
    return {key.hex() if isinstance(key, bytes) else str(key) for key in ids}


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        return True
    return False

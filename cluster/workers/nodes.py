"""Lists the usable nodes of a cluster, and computes how many workers fit on them."""

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pretrain.common.errors import MachineError
from pretrain.common.wording import counted

_CONNECT_SECONDS = 1.0  # time limit for a connection to a node, and for a response of the head

NodeSize = tuple[int, int]  # (CPUs, GPUs)


@dataclass(frozen=True)
class Node:
    """An alive node of the cluster that this process has joined."""

    id: str
    cpus: int
    gpus: int
    draining: bool  # whether the node is about to leave the cluster
    free_cpus: int  # CPUs that were not in use when the nodes were listed
    free_gpus: int


def choose_cpus(
    nodes: Sequence[NodeSize],
    workers: int,
    cpus_per_worker: int,
    name: str,
    setting: str = "scheduling.workers (--workers)",
) -> int:
    """Return the number of CPUs per worker with which this number of workers fits on `nodes`.

    If any node has GPUs, each worker takes one.

    Args:
        cpus_per_worker: fixed number of CPUs; 0 means as many as fit.
        name: name of the machine or cluster, for the error.
        setting: name of the setting to lower, for the error.

    Raises:
        MachineError: the workers do not fit.
    """
    cpus, gpus = sum(cpu for cpu, _ in nodes), sum(gpu for _, gpu in nodes)
    if gpus and workers > gpus:
        raise MachineError(
            f"{name} has {counted(gpus, 'GPU')}, too few for {counted(workers, 'worker')} of one GPU each. Set "
            f"{setting} to {gpus} or less."
        )
    largest_node = max((cpu for cpu, _ in nodes), default=0)
    choices = [cpus_per_worker] if cpus_per_worker else range(largest_node, 0, -1)
    for choice in choices:
        if _count_fitting(nodes, choice) >= workers:
            return choice
    raise MachineError(
        f"{name} has {counted(cpus, 'CPU core')}, too few for {counted(workers, 'worker')} of "
        f"{cpus_per_worker or 1} each. "
        f"Set {setting} or scheduling.cpus_per_worker lower."
    )


def fitting_workers(
    nodes: Sequence[NodeSize], minimum: int, maximum: int, cpus_per_worker: int, use_gpu: bool | None = None
) -> int:
    """Return how many workers fit on `nodes`, at most `maximum`; 0 if fewer than `minimum` fit.

    Args:
        use_gpu: whether each worker takes a GPU; None means yes if any node has GPUs.
    """
    workers = min(maximum, _count_fitting(nodes, cpus_per_worker or 1, use_gpu))
    return workers if workers >= minimum else 0


def choose_elastic_cpus(nodes: Sequence[NodeSize], minimum: int, maximum: int, cpus_per_worker: int, name: str) -> int:
    """Return the CPUs per worker with which as many workers as possible fit, up to `maximum`; see `choose_cpus`."""
    workers = fitting_workers(nodes, minimum, maximum, cpus_per_worker) or minimum
    return choose_cpus(nodes, workers, cpus_per_worker, name)


def process_resources(cpus: int, with_gpu: bool | None) -> dict[str, float]:
    """Return the resources that one process requests from Ray."""
    return {"CPU": cpus, "GPU": 1} if with_gpu else {"CPU": cpus}


def usable_nodes(timeout: float = _CONNECT_SECONDS) -> list[Node]:
    """List the alive nodes that accept connections. Ray itself takes some seconds to notice that a node is lost.

    Raises one of Ray's errors if the head does not respond within `timeout` seconds.
    """
    import ray
    from ray._private.state import state

    draining, available = _draining_ids(timeout), state.available_resources_per_node()
    nodes = []
    for node in ray.nodes():
        if node["Alive"] and _accepts_connections(node["NodeManagerAddress"], node["NodeManagerPort"]):
            resources, free = node["Resources"], available.get(node["NodeID"], {})
            nodes.append(
                Node(
                    node["NodeID"],
                    int(resources.get("CPU", 0)),
                    int(resources.get("GPU", 0)),
                    node["NodeID"] in draining,
                    int(free.get("CPU", 0)),
                    int(free.get("GPU", 0)),
                )
            )
    return nodes


def _count_fitting(nodes: Sequence[NodeSize], cpus_per_worker: int, use_gpu: bool | None = None) -> int:
    """Return how many workers of `cpus_per_worker` CPUs fit."""
    need_gpu = any(gpu for _, gpu in nodes) if use_gpu is None else use_gpu
    return sum(min(cpu // cpus_per_worker, gpu) if need_gpu else cpu // cpus_per_worker for cpu, gpu in nodes)


def _draining_ids(timeout: float) -> set[str]:
    """Return the ids of nodes that will leave soon, because of `ray drain-node`, an autoscaler or a spot notice."""
    from ray._private.worker import global_worker

    client: Any = global_worker.gcs_client  # pyright: ignore[reportAttributeAccessIssue]
    ids = client.get_draining_nodes(timeout=timeout)
    return {key.hex() if isinstance(key, bytes) else str(key) for key in ids}


def _accepts_connections(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
        return True
    return False

"""The worker processes of one attempt: Ray actors, each on its bundle of one placement group.

Ray Core places the processes, starts them and reports which one died. Ray Train is not used: its controller would be
one more process that imports torch before the first step, and one more that can die.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.workers.outcomes import CRASH, WorkerError, one_line
from cluster.workers.request import Attempt
from cluster.workers.target import RankAssignment, run_worker
from pretrain.common.errors import MachineError
from pretrain.common.wording import counted

_REPORT_SECONDS = 2.0  # how long the other workers may take to report errors after the first one
# Time limit for all processes to start after Ray has placed them: Ray's head starts about a hundred per minute.
_START_SECONDS, _START_SECONDS_PER_WORKER = 120.0, 0.5
_POLL_SECONDS = 1.0  # interval of the checks for a stop while workers start
_NODE_LABEL = "ray.io/node-id"
_MIG_PREFIX = "MIG-"


class WorkersNotStartedError(Exception):
    """The workers could not be started: the message has the reason; an empty message means a lack of capacity."""


class WorkersFailedError(Exception):
    """Workers failed. `failures` maps ranks to errors: a worker's own `WorkerError`, or Ray's error if it died."""

    def __init__(self, failures: dict[int, Exception]) -> None:
        super().__init__(failures)
        self.failures = failures


class WorkerGroup:
    """A group of `workers` processes with `resources` each, ready to run. On exit, the context manager kills them.

    No worker is placed on nodes whose id is in `avoid`. Raises `WorkersNotStartedError` if Ray cannot place them
    within `placement_seconds`, or if their start then takes longer than `start_seconds` (0: a limit that grows with
    their number). Until they have started, `check_stop` is called every second and may raise.
    """

    def __init__(
        self,
        workers: int,
        resources: dict[str, float],
        placement_seconds: float,
        avoid: Collection[str],
        check_stop: Callable[[], None],
        start_seconds: float = 0.0,
    ) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._group = request_bundles(workers, resources, avoid)
        try:
            deadline = time.monotonic() + placement_seconds
            while not self._group.wait(_POLL_SECONDS):
                check_stop()
                if time.monotonic() > deadline:
                    raise WorkersNotStartedError
            actor: Any = ray.remote(WorkerActor)
            self.actors = [
                actor.options(
                    num_cpus=resources["CPU"],
                    num_gpus=resources.get("GPU", 0),
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
                ).remote()
                for index in range(workers)
            ]
            limit = start_seconds or _START_SECONDS + _START_SECONDS_PER_WORKER * workers
            locations = self._await_locations(check_stop, limit)
        except BaseException:
            self._remove_group()
            raise
        # As with torch's launchers, the ranks on a machine are consecutive.
        order = sorted(
            range(workers),
            key=lambda index: (
                locations[index].address,
                [_gpu_sort_key(gpu) for gpu in locations[index].gpus],
                index,
            ),
        )
        self.actors = [self.actors[index] for index in order]
        self.locations = [locations[index] for index in order]

    def run(self, attempt: Attempt) -> list[dict[str, str] | None]:
        """Call `cluster.workers.target.run_worker` in each worker until all have finished; return the results by rank.

        Raises `WorkersFailedError` within about two seconds of the first failure, with all errors reported by then.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        assignments = assign_ranks(self.locations)
        calls = [actor.run.remote(attempt, ranks) for actor, ranks in zip(self.actors, assignments, strict=True)]
        outcomes: dict[int, dict[str, str] | None] = {}
        failures: dict[int, Exception] = {}
        pending, deadline = list(calls), None
        while pending:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, num_returns=1, timeout=timeout)
            if not done:
                break
            rank = calls.index(done[0])
            try:
                outcomes[rank] = ray.get(done[0])
            except RayTaskError as error:
                cause = error.cause or error  # not a `WorkerError` if the process could not load our code
                failures[rank] = cause if isinstance(cause, WorkerError) else WorkerError(CRASH, one_line(cause))
            except RayError as error:
                failures[rank] = error
            if any(not isinstance(error, WorkerError) for error in failures.values()):
                break  # a dead process is the cause, whatever the others report
            if failures and deadline is None:
                deadline = time.monotonic() + _REPORT_SECONDS
        if failures:
            raise WorkersFailedError(failures)
        return [outcomes[rank] for rank in range(len(calls))]

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        for actor in self.actors:
            ray.kill(actor)
        self._remove_group()

    def _await_locations(self, check_stop: Callable[[], None], limit: float) -> list[WorkerLocation]:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        calls = [actor.locate.remote() for actor in self.actors]
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline:
            try:
                return ray.get(calls, timeout=_POLL_SECONDS)
            except GetTimeoutError:
                check_stop()
            except RayActorError as error:
                if missing := re.search(r"No module named '?([\w.]+)", str(error)):
                    raise MachineError(
                        f"the Python of the cluster's Ray has no module {missing[1]}. Start Ray on all nodes with this "
                        f"project's environment, as {Path(sys.executable).with_name('ray')} is here."
                    ) from None
                raise WorkersNotStartedError(f"a worker died while it was started ({one_line(error)})") from None
        _, pending = ray.wait(calls, num_returns=len(calls), timeout=0)
        nodes = self._node_addresses([calls.index(call) for call in pending])
        raise WorkersNotStartedError(
            f"{len(pending)} of {counted(len(calls), 'worker')} did not start within {limit:.0f} s "
            f"(scheduling.start_seconds), on {', '.join(nodes) or 'unknown nodes'}"
        )

    def _node_addresses(self, workers: Sequence[int]) -> list[str]:
        """Return the addresses of the nodes on which these workers were placed."""
        import ray
        from ray.util.placement_group import placement_group_table

        node_ids: dict[int, str] = placement_group_table(self._group).get("bundles_to_node_id", {})
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        return sorted({addresses[node_ids[worker]] for worker in workers if node_ids.get(worker) in addresses})

    def _remove_group(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)


def request_bundles(workers: int, resources: dict[str, float], avoid: Collection[str] = ()) -> Any:
    """Request a placement group of `workers` bundles; while it is pending, Ray's autoscaler starts nodes for it.

    Ray removes the group when this process exits. A request through `ray.autoscaler.sdk.request_resources` would
    outlive the process, and all users of a cluster share a single such request.
    """
    from ray.util.placement_group import placement_group

    # The same selector for every bundle; Ray labels each node with its id.
    selector = [{_NODE_LABEL: f"!in({','.join(sorted(avoid))})"}] * workers if avoid else None
    return placement_group([resources] * workers, strategy="PACK", bundle_label_selector=selector)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class WorkerLocation:
    """The node, port and GPUs of a worker."""

    node: str  # id of the node
    address: str  # address of the node
    port: int  # free port on the node
    gpus: tuple[str, ...]  # GPUs as in CUDA_VISIBLE_DEVICES: indices, UUIDs or ids of MIG instances


class WorkerActor:
    """The actor of each worker process. Ray pickles it by name, so workers must be able to import this module."""

    def locate(self) -> WorkerLocation:
        import ray

        context = ray.get_runtime_context()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        gpus = tuple(sorted(map(str, ray.get_gpu_ids()), key=_gpu_sort_key))
        return WorkerLocation(context.get_node_id(), ray.util.get_node_ip_address(), port, gpus)

    def run(self, attempt: Attempt, assignment: RankAssignment) -> dict[str, str] | None:
        if assignment.visible_gpus:
            # All GPUs of the run on this machine, not only this worker's, so that NCCL reaches its peers directly.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(assignment.visible_gpus)
        return run_worker(attempt, assignment)


PROCESS_TITLE = f"ray::{WorkerActor.__name__}"  # prefix of each worker's process title


def assign_ranks(locations: Sequence[WorkerLocation]) -> list[RankAssignment]:
    """Return the rank assignment of each worker, in the order of `locations`; all workers connect to rank 0."""
    workers_per_node = Counter(location.node for location in locations)
    local_ranks: Counter[str] = Counter()
    assignments = []
    for rank, location in enumerate(locations):
        gpus_on_node = {gpu for other in locations if other.node == location.node for gpu in other.gpus}
        visible = sorted(gpus_on_node, key=_gpu_sort_key)
        if any(gpu.startswith(_MIG_PREFIX) for gpu in visible):
            visible = location.gpus  # a process can use only one MIG instance, the first that is visible
        assignments.append(
            RankAssignment(
                rank=rank,
                world_size=len(locations),
                local_rank=local_ranks[location.node],
                local_world_size=workers_per_node[location.node],
                address=location.address,
                master=locations[0].address,
                port=locations[0].port,
                visible_gpus=tuple(visible),
            )
        )
        local_ranks[location.node] += 1
    return assignments


def _gpu_sort_key(gpu: str) -> tuple[bool, int, str]:
    """Return the sort key of a GPU: indices come first, in numeric order, then UUIDs and ids of MIG instances."""
    return (True, 0, gpu) if not gpu.isdigit() else (False, int(gpu), "")

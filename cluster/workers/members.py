"""The worker processes of one start: Ray actors, each on its bundle of one placement group.

Ray Core does all of it: placing, starting, telling who died. A controller between it and us (Ray Train's) would be one
more process to import torch before the first step, and one more that can die.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.workers.worker import RankPlacement, WorkerEnd, enter, one_line

_LAST_WORDS_SECONDS = 2.0  # after the first failure, for the others to say theirs
_START_SECONDS = 120.0  # for a process to start where a place for it is
_NODE_LABEL = "ray.io/node-id"
_MIG = "MIG-"


PROCESS_TITLE = "ray::_Member"  # how the process of a member begins in the list of processes


class NoRoomError(Exception):
    """The workers did not come to be, now: for want of a place, or for the reason given."""


class Members:
    """`workers` processes with `resources` each, ready to run; use as a context manager, which ends them.

    None is placed on the nodes with the ids `avoid`. Raises `NoRoomError` when there is no place for them within
    `patience` seconds.
    """

    def __init__(self, workers: int, resources: dict[str, float], patience: float, avoid: Collection[str] = ()) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._group = ask_for(workers, resources, avoid)
        try:
            if not self._group.wait(patience):
                raise NoRoomError
            actor: Any = ray.remote(_Member)
            self._actors = [
                actor.options(
                    num_cpus=resources["CPU"],
                    num_gpus=resources.get("GPU", 0),
                    max_restarts=0,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, number),
                ).remote()
                for number in range(workers)
            ]
            found = self._found()
        except BaseException:
            self._remove()
            raise
        # Ranks of one machine follow one another, as launchers of torch have it.
        order = sorted(
            range(workers),
            key=lambda number: (
                found[number].address,
                [_gpu_order(gpu) for gpu in found[number].gpus],
                number,
            ),
        )
        self._actors = [self._actors[number] for number in order]
        self.found = [found[number] for number in order]

    def run(self, request: dict[str, Any]) -> list[dict[str, str] | None]:
        """`cluster.workers.worker.enter` in each, to the end of all; what each returned, by rank.

        Raises `MemberError` as soon as one fails, with what the others say of it.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        places = _places(self.found)
        runs = [actor.run.remote(request, place) for actor, place in zip(self._actors, places, strict=True)]
        ends: dict[int, dict[str, str] | None] = {}
        failures: dict[int, Exception] = {}
        pending, deadline = list(runs), None
        while pending:
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, pending = ray.wait(pending, num_returns=1, timeout=patience)
            if not done:
                break
            rank = runs.index(done[0])
            try:
                ends[rank] = ray.get(done[0])
            except RayTaskError as error:
                failures[rank] = error.cause if isinstance(error.cause, Exception) else error
            except RayError as error:
                failures[rank] = error
            if any(not isinstance(error, WorkerEnd) for error in failures.values()):
                break  # a dead one is to blame, whatever the others say
            if failures and deadline is None:
                deadline = time.monotonic() + _LAST_WORDS_SECONDS
        if failures:
            raise MemberError(failures)
        return [ends[rank] for rank in range(len(runs))]

    def __enter__(self) -> Members:
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        for actor in self._actors:
            ray.kill(actor)
        self._remove()

    def _found(self) -> list[Found]:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        try:
            return ray.get([actor.find.remote() for actor in self._actors], timeout=_START_SECONDS)
        except GetTimeoutError:
            raise NoRoomError(f"a worker did not start within {_START_SECONDS:.0f} s") from None
        except RayActorError as error:
            raise NoRoomError(f"a worker died while it was started ({one_line(error)})") from None

    def _remove(self) -> None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(self._group)


def ask_for(workers: int, resources: dict[str, float], avoid: Collection[str] = ()) -> Any:
    """A placement group of so many bundles, pending until they fit: Ray's autoscaler sees it and starts nodes for it.

    It ends with this process. `ray.autoscaler.sdk.request_resources` would outlive it, and there is only one such
    request for all users of a cluster.
    """
    from ray.util.placement_group import placement_group

    # The same in all bundles; Ray labels each node with its id.
    selector = [{_NODE_LABEL: f"!in({','.join(sorted(avoid))})"}] * workers if avoid else None
    return placement_group([resources] * workers, strategy="PACK", bundle_label_selector=selector)  # pyright: ignore[reportArgumentType]


class MemberError(Exception):
    """Members failed: their exceptions by rank, `WorkerEnd` for those that could tell, Ray's for those that died."""

    def __init__(self, failures: dict[int, Exception]) -> None:
        super().__init__(failures)
        self.failures = failures


@dataclass(frozen=True)
class Found:
    """Where a member runs: node id, the node's address, a free port there, its GPUs as CUDA_VISIBLE_DEVICES names them."""

    node: str
    address: str
    port: int
    gpus: tuple[str, ...]  # numbers, UUIDs or ids of MIG instances


class _Member:
    """What runs in each process. Ray pickles it by its name, so workers must be able to import this module."""

    def find(self) -> Found:
        import ray

        context = ray.get_runtime_context()
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        gpus = tuple(sorted(map(str, ray.get_gpu_ids()), key=_gpu_order))
        return Found(context.get_node_id(), ray.util.get_node_ip_address(), port, gpus)

    def run(self, request: dict[str, Any], place: RankPlacement) -> dict[str, str] | None:
        if place.visible_gpus:
            # All GPUs of this machine that are the run's, so that NCCL reaches its peers directly.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(place.visible_gpus)
        return enter(request, place)


def _places(found: Sequence[Found]) -> list[RankPlacement]:
    """Each member's rank and neighbours; rank 0's address is where they meet."""
    sizes = Counter(one.node for one in found)
    seen: Counter[str] = Counter()
    places = []
    for rank, one in enumerate(found):
        visible = sorted({gpu for other in found if other.node == one.node for gpu in other.gpus}, key=_gpu_order)
        if any(gpu.startswith(_MIG) for gpu in visible):
            visible = one.gpus  # CUDA shows a process one MIG instance only, the first that is named
        places.append(
            RankPlacement(
                rank=rank,
                world_size=len(found),
                local_rank=seen[one.node],
                local_world_size=sizes[one.node],
                address=one.address,
                master=found[0].address,
                port=found[0].port,
                visible_gpus=tuple(visible),
            )
        )
        seen[one.node] += 1
    return places


def _gpu_order(gpu: str) -> tuple[bool, int, str]:
    """Numbers by their value, then UUIDs and ids of MIG instances."""
    return (True, 0, gpu) if not gpu.isdigit() else (False, int(gpu), "")

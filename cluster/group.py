"""The workers of a run as a group: started, restarted after crashes, shrunk and grown with the cluster."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cluster.members import MemberError, Members, NoRoomError
from cluster.nodes import Node, most_that_fit, usable_nodes
from cluster.run import LOGS, RESTART_FILE, STOP_FILE, last_line
from cluster.worker import CRASH, WorkerEnd, error_from, one_line
from pretrain.errors import MachineError, StoppedError
from pretrain.files import MANIFEST
from pretrain.worker import HANG_FILE

logger = logging.getLogger(__name__)

ROOM_SECONDS = 20  # for the cluster to make room for the workers
_LOOK_SECONDS = 1.0
_LOOKS_TO_GROW = 2  # in a row, so that a node that flickers does not stop everything
_PATIENCE_SECONDS = 60.0  # for lost nodes to return, where the rest is too small


def train(request: dict[str, Any], *, use_gpu: bool, keep_logs: Callable[[], None]) -> None:
    """Run the workers to their end, however often they have to start.

    request["min_workers"] to request["workers"] of them, as many as the cluster holds at each start. A crash costs one
    of request["max_failures"], which are had anew when a checkpoint was written since; a change of size costs none.
    """
    run_dir = Path(request["run_dir"])
    failures, reached, crowded = 0, _newest_step(run_dir), False
    for attempt in itertools.count():
        workers = _choose_size(request, crowded=crowded)
        crowded = False
        (run_dir / RESTART_FILE).unlink(missing_ok=True)
        with _Overseer(request, workers) as overseer:
            try:
                return _attempt(request, attempt, workers, use_gpu, overseer.watch)
            except _Crash as crash:
                event, reason = _hang(run_dir, since=overseer.began) or (
                    "restart",
                    f"worker {crash.rank}: {crash.reason}",
                )
                logger.warning("start %d ended in a crash, %s", attempt + 1, reason)
                keep_logs()
                _refuse_if_stopped(run_dir, reason)
                newest = _newest_step(run_dir)
                failures, reached = (1, newest) if newest > reached else (failures + 1, reached)
                if failures > request["max_failures"]:
                    raise _used_up(run_dir, crash.rank, reason, request["max_failures"]) from None
            except NoRoomError as error:
                failures, crowded = failures + 1, True
                if not request["min_workers"] or failures > request["max_failures"]:
                    raise _not_started(request, workers, str(error)) from None
                event = "restart"
                reason = str(error) or "nodes went, or others took them, while the workers were started"
            except StoppedError:
                if overseer.reason is None or (run_dir / STOP_FILE).exists():
                    raise
                event, reason = "resize", overseer.reason
        logger.info("starting again: %s", reason)
        request["payload"]["resume"] = True
        request["payload"]["events"] = [{"event": event, "time": time.time(), "message": reason}]


def _choose_size(request: dict[str, Any], *, crowded: bool) -> int:
    """How many workers the cluster holds now; `StoppedError` where it stays too small.

    What others hold counts only where the cluster turned out to be `crowded`: after a crash it is known to be free later
    than it is.
    """
    low, high = request["min_workers"] or request["workers"], request["workers"]
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        why = f"the cluster has no room for {low} workers any more"
        try:
            workers = _room(
                usable_nodes(), low, high, request["cpus_per_worker"], held={} if crowded else None
            )
        except Exception as error:  # a head that is away for a while
            why = f"the cluster's head does not answer any more ({one_line(error)})"
            logger.warning("the nodes cannot be asked for: %s", one_line(error))
            workers = 0
        if workers:
            return workers
        if time.monotonic() > deadline or (Path(request["run_dir"]) / STOP_FILE).exists():
            raise StoppedError(
                f"{request['run_dir']}: {why}. --resume goes on from the newest checkpoint when that is mended."
            )
        time.sleep(_LOOK_SECONDS)


def _room(
    nodes: list[Node], low: int, high: int, cpus_per_worker: int, *, held: Mapping[str, int] | None
) -> int:
    """How many workers find room; beside others where `held` says how many of ours each node has already."""

    def room_on(node: Node) -> tuple[int, int]:
        if held is None:
            return node.cpus, node.gpus
        ours = held.get(node.id, 0)
        return node.free_cpus + ours * cpus_per_worker, node.free_gpus + (ours if node.gpus else 0)

    staying = [room_on(node) for node in nodes if not node.draining]
    return most_that_fit(staying, low, high, cpus_per_worker)


class _Overseer:
    """While workers run: has them save and end where a node of theirs is to go, or where more of them would fit.

    Attributes:
        reason: why they were asked to end; None if they were not.
    """

    def __init__(self, request: dict[str, Any], workers: int) -> None:
        self.reason: str | None = None
        self.began = time.time()
        self._request, self._workers = request, workers
        self._run_dir = Path(request["run_dir"])
        self._nodes: Mapping[str, int] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="overseer", daemon=True)

    def watch(self, nodes: Mapping[str, int]) -> None:
        """The workers run on these nodes, so many on each."""
        self._nodes = nodes
        if self._request["address"]:  # a Ray of our own has one node, which stays
            self._thread.start()

    def __enter__(self) -> _Overseer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> None:
        looks = 0
        while not self._end.wait(_LOOK_SECONDS):
            try:
                nodes = usable_nodes()
            except Exception as error:  # a head that is away for a while
                logger.warning("the nodes cannot be asked for: %s", one_line(error))
                continue
            if any(node.draining and node.id in self._nodes for node in nodes):
                self._ask("a node is drained")
                return
            looks = looks + 1 if self._may_grow(nodes) else 0
            if looks == _LOOKS_TO_GROW:
                self._ask("nodes have come")
                return

    def _may_grow(self, nodes: list[Node]) -> bool:
        low, high = self._request["min_workers"], self._request["workers"]
        if not low or self._workers == high:
            return False
        cpus = self._request["cpus_per_worker"]
        return _room(nodes, low, high, cpus, held=self._nodes) > self._workers

    def _ask(self, reason: str) -> None:
        self.reason = reason
        logger.info("%s: the workers are to save and end", reason)
        (self._run_dir / RESTART_FILE).touch()


def _newest_step(run_dir: Path) -> int:
    steps = [int(path.parent.name[5:]) for path in (run_dir / "checkpoints").glob(f"step-*/{MANIFEST}")]
    return max(steps, default=-1)


def _hang(run_dir: Path, *, since: float) -> tuple[str, str] | None:
    """The event and its reason that the watchdog of a worker found, if it ended the workers after that time."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((run_dir / LOGS / HANG_FILE).read_text(encoding="utf-8"))
        if found["time"] >= since:
            return found["event"], found["reason"]
    return None


def _refuse_if_stopped(run_dir: Path, reason: str) -> None:
    if (run_dir / STOP_FILE).exists():
        raise StoppedError(
            f"{run_dir}: the workers crashed while stopping ({reason}). --resume continues from the newest checkpoint."
        )


def _not_started(request: dict[str, Any], workers: int, why: str) -> MachineError:
    if why:
        return MachineError(f"{workers} workers were to start, but {why}. Its log on the cluster tells more.")
    return MachineError(
        f"The cluster made no room for {workers} workers of {request['cpus_per_worker']} CPUs within {ROOM_SECONDS} s. "
        "Wait until it is less busy, or set scheduling.workers lower."
    )


def _used_up(run_dir: Path, rank: int, reason: str, max_failures: int) -> MachineError:
    log = run_dir / LOGS / f"worker-{rank}.log"
    return MachineError(
        f"{log}: {reason}, and all max_failures={max_failures} restarts without a new checkpoint are used up. Its log ends "
        f"with: {last_line(log)!r}. Mend the cause and run the same command with --resume."
    )


class _Crash(Exception):
    """A worker ended in a way that a restart may cure."""

    def __init__(self, rank: int, reason: str):
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason


def _attempt(
    request: dict[str, Any],
    attempt: int,
    workers: int,
    use_gpu: bool,
    begun: Callable[[Mapping[str, int]], None],
) -> None:
    """One start of so many workers, to their end; `begun` is told the ids of their nodes."""
    resources = {"CPU": request["cpus_per_worker"], **({"GPU": 1} if use_gpu else {})}
    started = time.monotonic()
    try:
        with Members(workers, resources, ROOM_SECONDS) as members:
            begun(members.nodes)
            logger.info(
                "start %d has its %d workers after %.1f s", attempt + 1, workers, time.monotonic() - started
            )
            ends = members.run({**request, "attempt": attempt})
    except MemberError as error:
        raise _cause(error.failures) from None
    finally:
        logger.info("start %d ran %.1f s", attempt + 1, time.monotonic() - started)
    end = next((end for end in ends if end is not None), None)
    if end is not None:
        raise error_from(end)


def _cause(failures: dict[int, Exception]) -> Exception:
    """What to raise for a failed start: the first worker's `RunError`, else the crash that felled the others.

    A worker that is gone comes before one that only lost its peer.
    """
    ends = sorted((rank, error) for rank, error in failures.items() if isinstance(error, WorkerEnd))
    for _, end in ends:
        if end.kind != CRASH:
            return error_from({"kind": end.kind, "message": end.message})
    gone = [rank for rank, error in sorted(failures.items()) if not isinstance(error, WorkerEnd)]
    if gone:
        logger.error("worker %d: %s", gone[0], failures[gone[0]])
        return _Crash(gone[0], "its process died (killed, or out of memory)")
    rank, end = ends[0]
    return _Crash(rank, end.message)

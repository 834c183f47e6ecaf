"""Supervises the workers of a run: starts them, restarts them after crashes, and adapts their number to the cluster."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.workers.actors import WorkerGroup, WorkerLocation, WorkersFailedError, WorkersNotStartedError
from cluster.workers.capacity import POLL_SECONDS, ScaleUp, find_capacity, wait_for_capacity, wait_limit
from cluster.workers.crash_history import CrashHistory
from cluster.workers.launch import LOGS, RAY_LOG, last_line
from cluster.workers.nodes import Node, process_resources, usable_nodes
from cluster.workers.outcomes import CRASH, WorkerError, error_from, one_line
from cluster.workers.request import RESTART_FILE, Attempt, LaunchRequest, new_event
from cluster.workers.single import SingleWorker
from pretrain.common.errors import MachineError, StoppedError
from pretrain.common.files import MANIFEST
from pretrain.common.wording import counted
from pretrain.common.worker import HANG_FILE

logger = logging.getLogger(__name__)

PLACEMENT_SECONDS = 20  # time limit for the cluster to reserve resources for the workers
NODE_LOSS_SECONDS = 8.0  # how long the end of a run is delayed for Ray to notice a lost node


def supervise(request: LaunchRequest, *, keep_logs: Callable[[], None], events: Sequence[dict[str, Any]] = ()) -> None:
    """Run the workers until they finish, with as many restarts as needed.

    Each attempt has as many workers as fit on the cluster, from `min_workers` to `workers`; if too few fit, the run
    waits for nodes. A crash uses up one of `max_failures` restarts, and a new checkpoint resets the count. A preemption
    or resizing uses up none, but many preemptions without a new checkpoint end the run, too. Nodes on which workers
    crashed twice are avoided if the other nodes suffice.

    Args:
        request: request whose `cpus_per_worker` and `use_gpu` are known.
        keep_logs: copies Ray's logs; called after each crash.
        events: events for the first attempt to record.

    Raises:
        RunError: the error of a worker, a `StoppedError`, or a `MachineError` if restarts do not help.
    """
    _Supervisor(request, keep_logs, events).run()


class _Supervisor:
    """Runs the attempts of one launch, and keeps the state between them."""

    def __init__(self, request: LaunchRequest, keep_logs: Callable[[], None], events: Sequence[dict[str, Any]]) -> None:
        self._request = request
        self._keep_logs = keep_logs
        self._events = list(events)  # to be recorded by the next attempt
        self._run_dir = request.launch.run_dir
        self._crashes = CrashHistory(request.max_failures)
        self._latest_step = _latest_step(self._run_dir)
        self._usable_ids: list[str] = []  # ids of the nodes on which the latest attempt may place workers
        self._busy_until: float | None = None  # end of the wait for free resources; None: resources in use count, too
        self._reported_nodes: set[str] = set()  # ids of the avoided nodes that an event has reported

    def run(self) -> None:
        for number in itertools.count():
            attempt = self._next_attempt(number)
            (self._run_dir / RESTART_FILE).unlink(missing_ok=True)
            with NodeMonitor(attempt) as monitor:
                try:
                    return run_attempt(attempt, monitor.start)
                except AttemptCrashed as crash:
                    event = self._after_crash(crash, attempt, monitor)
                except WorkersNotStartedError as error:
                    event = self._after_failed_start(str(error), attempt)
                except StoppedError:
                    if monitor.reason is None or self._request.launch.stop_flag().is_set():
                        raise
                    event = new_event("resize", monitor.reason)
            if monitor.has_workers:
                self._busy_until = None
            logger.info("starting again: %s", event["message"])
            self._events = [event]

    def _next_attempt(self, number: int) -> Attempt:
        """Wait until the cluster has capacity for an attempt, and return the attempt."""
        avoid = self._nodes_to_avoid()
        for node in avoid.keys() - self._reported_nodes:
            message = (
                f"node {avoid[node]}: workers crashed on it twice within a day, so no more are placed there. It is "
                "used again after a day, after a restart of its Ray, if the other nodes do not suffice, or if the run "
                "is started with --resume."
            )
            logger.warning("%s", message)
            self._events.append(new_event("left_out", message))
        self._reported_nodes.update(avoid)
        workers = self._wait_for_workers(avoid)
        training = self._request.training
        training = replace(training, resume=training.resume or number > 0, events=tuple(self._events))
        return Attempt(self._request, number, workers, training, frozenset(avoid))

    def _nodes_to_avoid(self) -> dict[str, str]:
        """Return the bad nodes' addresses by id if the run fits on the other nodes; else {}."""
        bad_nodes = self._crashes.bad_nodes()
        with contextlib.suppress(Exception):  # the head may be unreachable for a while
            if bad_nodes and find_capacity(usable_nodes(), self._request, avoid=bad_nodes).workers:
                return bad_nodes
        return {}

    def _wait_for_workers(self, avoid: Mapping[str, str]) -> int:
        """Return how many workers fit; `StoppedError` if the cluster stays too small, or a stop is requested."""
        if not self._request.in_ray:
            self._request.launch.check_stop()
            return 1
        capacity = wait_for_capacity(
            self._request, only_free=self._busy_until is not None, avoid=avoid, deadline=self._busy_until
        )
        if not capacity.workers:
            raise StoppedError(
                f"{self._run_dir}: the cluster had no capacity for {counted(self._request.required_workers, 'worker')} "
                f"for {wait_limit(self._request):.0f} s (scheduling.wait_for_nodes_seconds). Add nodes first."
                f"{StoppedError.CONTINUE}"
            )
        self._events += capacity.events()
        self._usable_ids = [node.id for node in capacity.nodes]
        if self._request.address:
            self._crashes.forgive(capacity.staying)  # by now Ray may have noticed more lost nodes
        return capacity.workers

    def _after_crash(self, crash: AttemptCrashed, attempt: Attempt, monitor: NodeMonitor) -> dict[str, Any]:
        """Return the event that explains the restart; raise an error if the run must end."""
        hang = hang_event(self._run_dir, since=monitor.start_time)
        kind, rank, reason = hang or ("restart", crash.rank, f"worker {crash.rank}: {crash.reason}")
        logger.warning("start %d crashed, %s", attempt.number + 1, reason)
        self._keep_logs()
        if self._request.launch.stop_flag().is_set():
            raise StoppedError(
                f"{self._run_dir}: the workers ended while stopping ({reason}); steps after the last checkpoint are "
                f"lost.{StoppedError.CONTINUE}"
            ) from None
        latest = _latest_step(self._run_dir)
        self._crashes.add(monitor.nodes, monitor.node_of(rank), has_new_checkpoint=latest > self._latest_step)
        self._latest_step = max(self._latest_step, latest)
        if lost := self._forgive():
            reason = f"lost the node {', '.join(lost)} ({reason})"
        if self._crashes.exhausted or self._crashes.lost_too_often:
            raise self._give_up_error(rank, reason) from None
        return new_event(kind, reason)

    def _after_failed_start(self, reason: str, attempt: Attempt) -> dict[str, Any]:
        """Return the event that explains the restart, or raise an error. The reason "" means a lack of capacity."""
        request = self._request
        if reason:
            self._crashes.add_failed_start(self._usable_ids)
        if reason and (lost := self._forgive()):
            reason = f"lost the node {', '.join(lost)} ({reason})"
            gives_up = self._crashes.lost_too_often
        else:
            # The number of workers was chosen by all resources, also used ones. Now count only the free ones.
            is_first = self._busy_until is None
            self._busy_until = self._busy_until or time.monotonic() + wait_limit(request)
            is_late = not is_first and time.monotonic() > self._busy_until
            cannot_resize = not request.address and not request.min_workers
            gives_up = cannot_resize or is_late or self._crashes.exhausted
        if gives_up:
            raise _not_started_error(request, attempt.workers, reason) from None
        return new_event("restart", reason or "nodes left, or others used them, while the workers were started")

    def _forgive(self) -> list[str]:
        """Forgive crashes that lost nodes explain, and return these nodes. Wait for Ray if the run would end."""
        if not self._request.address:
            return []
        deadline = time.monotonic() + NODE_LOSS_SECONDS
        while True:
            with contextlib.suppress(Exception):  # the head may be unreachable for a while
                if lost := self._crashes.forgive([node.id for node in usable_nodes() if not node.draining]):
                    return lost
            if not self._crashes.exhausted or time.monotonic() > deadline:
                return []
            self._request.launch.check_stop()
            time.sleep(POLL_SECONDS)

    def _give_up_error(self, rank: int, reason: str) -> MachineError:
        log = self._run_dir / LOGS / f"worker-{rank}.log"
        bad = ", ".join(self._crashes.bad_nodes().values()) if self._request.address else ""
        where = f" Workers crashed repeatedly on {bad}: check that machine." if bad else ""
        limit = f"all max_failures={self._request.max_failures} restarts without a new checkpoint are used up"
        if not self._crashes.exhausted:
            limit = f"there were {self._crashes.losses} crashes with the loss of a node and no new checkpoint"
            where += " A machine out of memory may lose Ray together with its workers: check its memory first."
        return MachineError(
            f"{log}: {reason}, and {limit}. The last line of the log: {last_line(log)!r}.{where} "
            "Fix the cause and run the same command with --resume."
        )


class NodeMonitor:
    """Makes running workers save and finish if one of their nodes drains, or if more workers would fit.

    Attributes:
        reason: why the workers were requested to finish; None if they were not.
        start_time: start of the attempt, by `time.time`.
    """

    def __init__(self, attempt: Attempt) -> None:
        self.reason: str | None = None
        self.start_time = time.time()
        self._attempt = attempt
        self._locations: Sequence[WorkerLocation] = ()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="node-monitor", daemon=True)

    def start(self, locations: Sequence[WorkerLocation]) -> None:
        """Start to watch the nodes of the workers at `locations`, which are in the order of ranks."""
        self._locations = locations
        if self._attempt.request.address:  # a local Ray has a single node, which never drains
            self._thread.start()

    @property
    def has_workers(self) -> bool:
        """True if the workers were started."""
        return bool(self._locations)

    @property
    def nodes(self) -> dict[str, str]:
        """Addresses of the workers' nodes, by id."""
        return {location.node: location.address for location in self._locations}

    def node_of(self, rank: int) -> str:
        """Return the id of the node of a worker; empty if unknown."""
        return self._locations[rank].node if rank < len(self._locations) else ""

    def __enter__(self) -> NodeMonitor:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        own_workers = Counter(location.node for location in self._locations)
        scale_up = ScaleUp(self._attempt.workers, self._attempt.request.workers, time.monotonic())
        while not self._end.wait(POLL_SECONDS):
            try:
                nodes = usable_nodes()
            except Exception as error:  # the head may be unreachable for a while
                logger.warning("the nodes are unknown: %s", one_line(error))
                continue
            reason = self._restart_reason(nodes, own_workers, scale_up)
            if reason and self._request_restart(reason):
                return

    def _restart_reason(self, nodes: Sequence[Node], own_workers: Mapping[str, int], scale_up: ScaleUp) -> str:
        """Return why the workers must finish now; empty if they need not."""
        if any(node.draining and node.id in own_workers for node in nodes):
            return "a node is drained"
        request = self._attempt.request
        if request.min_workers:
            fitting = find_capacity(nodes, request, own_workers=own_workers, avoid=self._attempt.avoid).workers
            if scale_up.is_due(fitting, time.monotonic()):
                return f"nodes joined, with capacity for {counted(fitting, 'worker')}"
        return ""

    def _request_restart(self, reason: str) -> bool:
        self.reason = reason
        try:
            self._attempt.restart_flag().set()
        except OSError as error:
            self.reason = None
            logger.warning("%s, but the workers cannot be requested to finish: %s", reason, one_line(error))
            return False
        logger.info("%s: the workers save and finish", reason)
        return True


class AttemptCrashed(Exception):
    """A worker failed in a way that a restart may fix."""

    def __init__(self, rank: int, reason: str):
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason


def run_attempt(attempt: Attempt, on_start: Callable[[Sequence[WorkerLocation]], None]) -> None:
    """Start the workers and wait until they finish; `on_start` is called with their locations, ordered by rank."""
    start = attempt.number + 1
    since = time.monotonic()
    try:
        with _create_workers(attempt) as workers:
            on_start(workers.locations)
            logger.info("start %d has its %d workers after %.1f s", start, attempt.workers, time.monotonic() - since)
            outcomes = workers.run(attempt)
    except WorkersFailedError as error:
        raise failure_cause(error.failures) from None
    finally:
        logger.info("start %d ran %.1f s", start, time.monotonic() - since)
    outcome = next((outcome for outcome in outcomes if outcome is not None), None)
    if outcome is not None:
        raise error_from(outcome)


def _create_workers(attempt: Attempt) -> WorkerGroup | SingleWorker:
    request = attempt.request
    if not request.in_ray:
        return SingleWorker()
    resources = process_resources(request.cpus_per_worker, request.use_gpu)
    check_stop, start_seconds = request.launch.check_stop, request.start_seconds
    return WorkerGroup(attempt.workers, resources, PLACEMENT_SECONDS, attempt.avoid, check_stop, start_seconds)


def failure_cause(failures: dict[int, Exception]) -> Exception:
    """Return the exception of a failed attempt: the `RunError` of the lowest rank, else the crash that came first.

    A process that died takes precedence over workers that report a crash, which may only follow from its death.
    """
    reported = [(rank, error) for rank, error in failures.items() if isinstance(error, WorkerError)]
    for _, error in sorted(reported, key=lambda item: item[0]):
        if error.kind != CRASH:
            return error_from({"kind": error.kind, "message": error.message})
    dead = [rank for rank, error in sorted(failures.items()) if not isinstance(error, WorkerError)]
    if dead:
        logger.error("worker %d: %s", dead[0], failures[dead[0]])
        return AttemptCrashed(dead[0], "its process died (killed, or out of memory)")
    # The first crash is the cause; the others only report that a peer was gone.
    rank, error = reported[0]
    return AttemptCrashed(rank, error.message)


def _latest_step(run_dir: Path) -> int:
    steps = [int(path.parent.name[5:]) for path in (run_dir / "checkpoints").glob(f"step-*/{MANIFEST}")]
    return max(steps, default=-1)


def hang_event(run_dir: Path, *, since: float) -> tuple[str, int, str] | None:
    """Return (event, rank that caused it, reason) if a watchdog has killed the workers after the time `since`."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        hang = json.loads((run_dir / LOGS / HANG_FILE).read_text(encoding="utf-8"))
        if hang["time"] >= since:
            return hang["event"], hang["rank"], hang["reason"]
    return None


def _not_started_error(request: LaunchRequest, workers: int, reason: str) -> MachineError:
    if reason:
        return MachineError(
            f"{request.launch.run_dir / LOGS / RAY_LOG}: starting {counted(workers, 'worker')} failed: {reason}. "
            "Fix the cause and run the same command with --resume."
        )
    return MachineError(
        f"The cluster had no capacity for {counted(workers, 'worker')} of {counted(request.cpus_per_worker, 'CPU')} "
        f"within {PLACEMENT_SECONDS} s. Wait until it is less busy, or set scheduling.workers lower. "
        "Then run the same command with --resume."
    )

"""The workers of a run as a group: started, restarted after crashes, shrunk and grown with the cluster."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.workers.failures import Failures
from cluster.workers.launch import LOGS, last_line
from cluster.workers.members import Found, MemberError, Members, NoRoomError
from cluster.workers.nodes import Node, usable_nodes
from cluster.workers.placement import (
    LOOK_SECONDS,
    Growth,
    add_event,
    fewest_workers,
    find_room,
    wait_for_room,
    waiting_seconds,
)
from cluster.workers.worker import (
    CRASH,
    RESTART_FILE,
    WorkerEnd,
    error_from,
    one_line,
    restart_flag,
    stop_flag,
)
from pretrain.common.errors import MachineError, StoppedError
from pretrain.common.files import MANIFEST
from pretrain.common.worker import HANG_FILE

logger = logging.getLogger(__name__)

ROOM_SECONDS = 20  # for the cluster to make room for the workers
_VERDICT_SECONDS = 8.0  # for Ray to learn that a node is lost, where that decides over the run's end


def train(request: dict[str, Any], *, use_gpu: bool, keep_logs: Callable[[], None]) -> None:
    """Run the workers to their end, however often they have to start.

    request["min_workers"] to request["workers"] of them, as many as the cluster holds at each start; where it holds too
    few, nodes are waited for. A crash costs one of request["max_failures"], which are had anew when a checkpoint was
    written since; a preemption or a change of size costs none, though many preemptions without a checkpoint
    end the run, too. Nodes on which workers crashed twice are left out where the others have room.
    """
    run_dir = Path(request["run_dir"])
    request["use_gpu"] = use_gpu
    failures, reached = Failures(request["max_failures"]), _newest_step(run_dir)
    crowded_until: float | None = None  # the cluster turned out to be busy, and is waited for until then
    told: set[str] = set()  # ids of bad nodes that an event named
    for attempt in itertools.count():
        avoid = _avoidable(request, failures.bad_nodes())
        for node in avoid.keys() - told:
            logger.warning("%s", _left_out(avoid[node]))
            add_event(request, "left_out", _left_out(avoid[node]))
        told.update(avoid)
        workers = _choose_size(request, failures, avoid, crowded_until)
        (run_dir / RESTART_FILE).unlink(missing_ok=True)
        with _Overseer(request, attempt, workers, avoid) as overseer:
            try:
                return _attempt(request, attempt, workers, use_gpu, overseer.watch, avoid)
            except _Crash as crash:
                hang = _hang(run_dir, since=overseer.began)
                event, rank, reason = hang or ("restart", crash.rank, f"worker {crash.rank}: {crash.reason}")
                logger.warning("start %d ended in a crash, %s", attempt + 1, reason)
                keep_logs()
                _refuse_if_stopped(request, reason)
                newest = _newest_step(run_dir)
                failures.add(overseer.nodes, overseer.node_of(rank), progressed=newest > reached)
                reached = max(reached, newest)
                if lost := _forgive(request, failures):
                    reason = f"lost the node {', '.join(lost)} ({reason})"
                if failures.exhausted or failures.lost_too_often:
                    raise _used_up(request, rank, reason, failures) from None
            except NoRoomError as error:
                crowded_until = crowded_until or time.monotonic() + waiting_seconds(request)
                reason = str(error)
                if reason:
                    failures.add_start()
                never = not request["address"] and not request["min_workers"]
                if never or failures.exhausted or time.monotonic() > crowded_until:
                    raise _not_started(request, workers, reason) from None
                event = "restart"
                reason = reason or "nodes went, or others took them, while the workers were started"
            except StoppedError:
                if overseer.reason is None or stop_flag(request).is_set():
                    raise
                event, reason = "resize", overseer.reason
        if overseer.began_work:
            crowded_until = None
        logger.info("starting again: %s", reason)
        request["payload"]["resume"] = True
        request["payload"]["events"] = []
        add_event(request, event, reason)


def _choose_size(
    request: dict[str, Any], failures: Failures, avoid: Mapping[str, str], crowded_until: float | None
) -> int:
    """How many workers the cluster holds; `StoppedError` where it stays too small, or a stop is asked for."""
    room = wait_for_room(request, crowded=crowded_until is not None, avoid=avoid, deadline=crowded_until)
    if not room.workers:
        raise StoppedError(
            f"{request['run_dir']}: the cluster had no room for {fewest_workers(request)} workers for "
            f"{waiting_seconds(request):.0f} s (scheduling.wait_for_nodes_seconds). "
            "--resume continues from the newest checkpoint when there are enough nodes."
        )
    if request["address"]:
        failures.forgive(room.staying)  # Ray has learned of more nodes that are lost by now
    return room.workers


def _forgive(request: dict[str, Any], failures: Failures) -> list[str]:
    """The addresses of nodes whose loss explains the newest crash. The last crash that may be waits for news of it."""
    if not request["address"]:
        return []
    deadline = time.monotonic() + _VERDICT_SECONDS
    while True:
        with contextlib.suppress(Exception):  # a head that is away for a while
            if lost := failures.forgive([node.id for node in usable_nodes() if not node.draining]):
                return lost
        if not failures.exhausted or time.monotonic() > deadline:
            return []
        time.sleep(LOOK_SECONDS)


def _avoidable(request: dict[str, Any], bad: dict[str, str]) -> dict[str, str]:
    """The bad nodes, by id with their addresses, if the others have room for the run; else none."""
    with contextlib.suppress(Exception):  # a head that is away for a while
        if bad and find_room(usable_nodes(), request, avoid=bad).workers:
            return bad
    return {}


def _left_out(address: str) -> str:
    return (
        f"node {address}: workers crashed on it twice within a day, so it gets none. It is used again a day later, when "
        "Ray was restarted on it, when the others do not suffice, or when the run is started with --resume."
    )


class _Overseer:
    """While workers run: has them save and end where a node of theirs is to go, or where more of them would fit.

    Attributes:
        reason: why they were asked to end; None if they were not.
        began: when the attempt began, as `time.time` has it.
    """

    def __init__(self, request: dict[str, Any], attempt: int, workers: int, avoid: Collection[str]) -> None:
        self.reason: str | None = None
        self.began = time.time()
        self._request, self._workers, self._avoid = request, workers, avoid
        self._restart = restart_flag(request, attempt)
        self._found: Sequence[Found] = ()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="overseer", daemon=True)

    def watch(self, found: Sequence[Found]) -> None:
        """The workers run there, by rank."""
        self._found = found
        if self._request["address"]:  # a Ray of our own has one node, which stays
            self._thread.start()

    @property
    def began_work(self) -> bool:
        """Whether the workers were started."""
        return bool(self._found)

    @property
    def nodes(self) -> dict[str, str]:
        """Addresses of the workers' nodes, by id."""
        return {one.node: one.address for one in self._found}

    def node_of(self, rank: int) -> str:
        """The id of the node of a worker; empty where that is not known."""
        return self._found[rank].node if rank < len(self._found) else ""

    def __enter__(self) -> _Overseer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    def _look(self) -> None:
        held = Counter(one.node for one in self._found)
        growth = Growth(self._workers, self._request["workers"], time.monotonic())
        while not self._end.wait(LOOK_SECONDS):
            try:
                nodes = usable_nodes()
            except Exception as error:  # a head that is away for a while
                logger.warning("the nodes cannot be asked for: %s", one_line(error))
                continue
            reason = self._reason(nodes, held, growth)
            if reason and self._ask(reason):
                return

    def _reason(self, nodes: Sequence[Node], held: Mapping[str, int], growth: Growth) -> str:
        """Why the workers are to end now; empty where they are not."""
        if any(node.draining and node.id in held for node in nodes):
            return "a node is drained"
        if self._request["min_workers"]:
            room = find_room(nodes, self._request, held=held, avoid=self._avoid).workers
            if growth.due(room, time.monotonic()):
                return f"nodes have come, with room for {room} workers"
        return ""

    def _ask(self, reason: str) -> bool:
        self.reason = reason
        try:
            self._restart.set()
        except OSError as error:
            self.reason = None
            logger.warning("%s, but the workers cannot be asked to end: %s", reason, one_line(error))
            return False
        logger.info("%s: the workers are to save and end", reason)
        return True


def _newest_step(run_dir: Path) -> int:
    steps = [int(path.parent.name[5:]) for path in (run_dir / "checkpoints").glob(f"step-*/{MANIFEST}")]
    return max(steps, default=-1)


def _hang(run_dir: Path, *, since: float) -> tuple[str, int, str] | None:
    """(event, rank that caused it, what was seen), if the watchdog of a worker ended the workers after that time."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        found = json.loads((run_dir / LOGS / HANG_FILE).read_text(encoding="utf-8"))
        if found["time"] >= since:
            return found["event"], found["rank"], found["reason"]
    return None


def _refuse_if_stopped(request: dict[str, Any], reason: str) -> None:
    if stop_flag(request).is_set():
        raise StoppedError(
            f"{request['run_dir']}: the workers crashed while stopping ({reason}). --resume continues from the newest checkpoint."
        )


def _not_started(request: dict[str, Any], workers: int, why: str) -> MachineError:
    if why:
        return MachineError(f"{workers} workers were to start, but {why}. Its log on the cluster tells more.")
    return MachineError(
        f"The cluster made no room for {workers} workers of {request['cpus_per_worker']} CPUs within {ROOM_SECONDS} s. "
        "Wait until it is less busy, or set scheduling.workers lower."
    )


def _used_up(request: dict[str, Any], rank: int, reason: str, failures: Failures) -> MachineError:
    log = Path(request["run_dir"]) / LOGS / f"worker-{rank}.log"
    bad = ", ".join(failures.bad_nodes().values()) if request["address"] else ""
    where = f" Workers crashed more than once on {bad}: check that machine." if bad else ""
    spent = f"all max_failures={request['max_failures']} restarts without a new checkpoint are used up"
    if not failures.exhausted:
        spent = f"there were {failures.losses} crashes with the loss of a node and no new checkpoint"
        where += " A machine out of memory may lose Ray together with its workers: check its memory first."
    return MachineError(
        f"{log}: {reason}, and {spent}. Its log ends with: {last_line(log)!r}.{where} "
        "Mend the cause and run the same command with --resume."
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
    begun: Callable[[Sequence[Found]], None],
    avoid: Collection[str],
) -> None:
    """One start of so many workers, to their end; `begun` is told where they run, by rank."""
    resources = {"CPU": request["cpus_per_worker"], **({"GPU": 1} if use_gpu else {})}
    started = time.monotonic()
    try:
        with Members(workers, resources, ROOM_SECONDS, avoid) as members:
            begun(members.found)
            logger.info("start %d has its %d workers after %.1f s", attempt + 1, workers, time.monotonic() - started)
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
    # The first one: what the others say, they say of a peer that was gone by then.
    rank, end = next((rank, error) for rank, error in failures.items() if isinstance(error, WorkerEnd))
    return _Crash(rank, end.message)

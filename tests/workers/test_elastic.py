"""Runs on clusters whose nodes arrive and leave: waiting, preemptions, bad nodes, growth, GPUs by name. Without Ray."""

import io
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cluster.jobs import client
from cluster.workers import capacity, supervisor
from cluster.workers.actors import WorkerActor, WorkerLocation, WorkersNotStartedError, assign_ranks
from cluster.workers.capacity import ScaleUp, wait_for_capacity
from cluster.workers.crash_history import CrashHistory
from cluster.workers.launch import run_driver
from cluster.workers.nodes import Node
from cluster.workers.request import Attempt, Launch, LaunchRequest
from cluster.workers.supervisor import AttemptCrashed
from pretrain.common.errors import MachineError, StoppedError
from pretrain.common.files import MANIFEST
from pretrain.common.worker import HANG_FILE, TrainingRequest
from pretrain.tracking.live import LiveProgress


def node(name: str, cpus: int = 2, *, gpus: int = 0, draining: bool = False, free: int | None = None) -> Node:
    return Node(name, cpus, gpus, draining, cpus if free is None else free, gpus)


def make_request(folder: Path, **changes: Any) -> LaunchRequest:
    """Of a run of four workers on a cluster."""
    launch = Launch("this", folder, folder, folder / "ray", folder / "outcome.json", since=0, launcher_pid=0)
    request = LaunchRequest(
        launch=launch,
        target="module:function",
        name="test",
        address="10.0.0.5:6379",
        max_failures=3,
        use_gpu=None,
        in_ray=True,
        training=TrainingRequest({}, False),
        workers=4,
        min_workers=0,
        cpus_per_worker=1,
        wait_for_nodes_seconds=60.0,
    )
    return replace(request, **changes)


class Cluster:
    """A run on a cluster whose nodes and placement groups are stand-ins; what was requested of Ray."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        (folder / "logs").mkdir()
        self.request, self.patch = make_request(folder), patch
        self.sizes: list[tuple[int, dict[str, float]]] = []
        self.placed = False
        self.removed = 0
        util = SimpleNamespace(placement_group_table=self._table, remove_placement_group=self._remove)
        patch.setitem(sys.modules, "ray", SimpleNamespace(util=util))
        patch.setitem(sys.modules, "ray.util", util)
        patch.setattr(capacity, "request_bundles", self._request_bundles)
        patch.setattr(capacity, "autoscaled_gpus", lambda: 0)
        patch.setattr(capacity, "POLL_SECONDS", 0.002)

    def _request_bundles(self, workers: int, resources: dict[str, float], avoid: Any = ()) -> Any:
        self.sizes.append((workers, resources))
        return SimpleNamespace(id=SimpleNamespace(hex=lambda: str(workers)), bundle_count=workers)

    def _remove(self, _: Any) -> None:
        self.removed += 1

    def _table(self) -> dict[str, Any]:
        return {str(size): {"state": "CREATED" if self.placed else "PENDING"} for size, _ in self.sizes}

    @property
    def folder(self) -> Path:
        return self.request.launch.run_dir

    def show(self, nodes: Callable[[], Sequence[Node]]) -> None:
        self.patch.setattr(capacity, "usable_nodes", nodes)
        self.patch.setattr(supervisor, "usable_nodes", nodes)

    def train(self, nodes: list[Node], run: Callable[[Attempt], None], *, started: bool = True, **changes: Any) -> None:
        """`supervisor.supervise` on these nodes, which an attempt may change.

        If its workers are started, they run on as many as there are.
        """
        self.show(lambda: list(nodes))
        self.patch.setattr(supervisor.NodeMonitor, "_watch", lambda self: None)

        def stand_in(attempt: Attempt, show_locations: Any) -> None:
            usable = [one.id for one in nodes if one.id not in attempt.avoid]
            if started:
                show_locations([WorkerLocation(name, f"10.0.0.{name}", 1, ()) for name in usable])
            run(attempt)

        self.patch.setattr(supervisor, "run_attempt", stand_in)
        supervisor.supervise(replace(self.request, **changes), keep_logs=lambda: None)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


# Waiting


def test_a_node_that_comes_late_is_waited_for(cluster: Cluster) -> None:
    """What is missing is there for an autoscaler and for `status` to see, as long as it is missing."""
    notice = cluster.folder / "logs/waiting.json"
    shown: list[str] = []

    def nodes() -> list[Node]:
        shown.extend(client._wait_notice(cluster.folder))
        return [node("a", 3), node("b")] if len(shown) == 3 else [node("a", 3)]

    cluster.show(nodes)
    assert wait_for_capacity(cluster.request).workers == 4
    assert shown[0] == "waiting for nodes: capacity for 3 of 4 workers on 1 node, for 0:00"
    assert cluster.sizes == [(4, {"CPU": 1})]
    assert cluster.removed == 1
    assert not notice.exists()


def test_an_autoscaler_gets_the_request_before_there_is_any_node(cluster: Cluster) -> None:
    """An elastic run requests the fewest as a whole, and the rest one by one."""
    polls = iter(range(100))
    cluster.patch.setattr(capacity, "autoscaled_gpus", lambda: 8)
    head = node("head", 16)
    cluster.show(lambda: [head, node("b", 16, gpus=2)] if next(polls) > 5 else [head])
    request = replace(cluster.request, min_workers=2, cpus_per_worker=0)
    assert wait_for_capacity(request).workers == 2, "not on the CPUs of the head"
    assert cluster.sizes == [(2, {"CPU": 1, "GPU": 1}), (1, {"CPU": 1, "GPU": 1}), (1, {"CPU": 1, "GPU": 1})]
    assert cluster.removed == 3


def test_a_placed_group_ends_the_wait(cluster: Cluster) -> None:
    """Resources that Ray reserves for us do not count as free."""

    def nodes() -> list[Node]:
        cluster.placed = len(cluster.sizes) > 0
        return [node("a", 4, free=0)]

    cluster.show(nodes)
    assert wait_for_capacity(cluster.request, only_free=True).workers == 4


def test_an_elastic_run_takes_no_single_resources_on_a_crowded_cluster(cluster: Cluster) -> None:
    """Ray would give it what becomes free one by one, and never as many as it needs at once."""
    cluster.show(lambda: [node("a", 8, free=4 if cluster.sizes else 3)])
    assert wait_for_capacity(replace(cluster.request, min_workers=4, workers=8), only_free=True).workers == 4
    assert cluster.sizes == [(4, {"CPU": 1})]


def test_a_wait_is_limited(cluster: Cluster) -> None:
    cluster.show(lambda: [node("a", 3)])
    request = replace(cluster.request, wait_for_nodes_seconds=0.01)
    assert wait_for_capacity(request).workers == 0
    cluster.patch.setattr(supervisor, "run_attempt", lambda *_: pytest.fail("nothing may start"))
    with pytest.raises(StoppedError, match=r"no capacity for 4 workers for 0 s \(scheduling\.wait_for_nodes_seconds\)"):
        supervisor.supervise(request, keep_logs=lambda: None)


def test_a_stop_ends_a_wait(cluster: Cluster) -> None:
    def nodes() -> list[Node]:
        if cluster.sizes:
            (cluster.folder / "stop").touch()
        return [node("a", 3)]

    cluster.show(nodes)
    with pytest.raises(StoppedError, match="stopped while no workers ran"):
        wait_for_capacity(cluster.request)
    assert cluster.removed == 1


def test_a_stop_is_heard_between_starts_that_fail(cluster: Cluster) -> None:
    cluster.show(lambda: [node("a", 4)])
    numbers: list[int] = []

    def run(attempt: Attempt, _: Any) -> None:
        numbers.append(attempt.number)
        attempt.request.launch.stop_flag().set()
        raise WorkersNotStartedError

    cluster.patch.setattr(supervisor, "run_attempt", run)
    with pytest.raises(StoppedError, match=r"stopped while no workers ran\. Continue with --resume"):
        supervisor.supervise(cluster.request, keep_logs=lambda: None)
    assert numbers == [0]


def test_a_notice_of_a_driver_that_was_killed_is_removed(cluster: Cluster) -> None:
    notice = cluster.folder / "logs/waiting.json"
    notice.write_text(json.dumps({"time": 0.0, "message": "waiting"}))
    cluster.show(lambda: [node("a", 4)])
    wait_for_capacity(cluster.request)
    assert not notice.exists()


def test_the_terminal_shows_a_wait_once(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    notice, output = tmp_path / "logs/waiting.json", io.StringIO()
    progress = LiveProgress(tmp_path, 10, Console(file=output))
    for message in ("has capacity for 1 of 4", "has capacity for 1 of 4", "has capacity for 2 of 4", ""):
        if message:
            notice.write_text(json.dumps({"time": 0.0, "message": message}))
        else:
            notice.unlink()
        progress.poll()
    assert output.getvalue().splitlines() == ["  has capacity for 1 of 4", "  has capacity for 2 of 4"]


# Crashes and preemptions


def test_a_preemption_is_not_a_failure(cluster: Cluster) -> None:
    """Ten nodes are lost or drained under a run that may fail once."""
    nodes = [node(str(number)) for number in range(11)]

    def run(attempt: Attempt) -> None:
        if attempt.number:
            assert "lost the node 10.0.0." in attempt.training.events[0]["message"]
        if attempt.number < 10:
            nodes[0] = node(nodes[0].id, draining=True)
            if attempt.number % 2:
                del nodes[0]
            raise AttemptCrashed(0, "killed")

    cluster.train(nodes, run, max_failures=1, min_workers=1)


def test_a_node_that_is_lost_while_workers_start_is_no_failure(cluster: Cluster) -> None:
    nodes = [node("0")]

    def run(attempt: Attempt) -> None:
        if attempt.number < 5:
            nodes[0] = node(str(attempt.number + 1))
            raise WorkersNotStartedError("a worker died while it was started")
        message = attempt.training.events[0]["message"]
        assert message == "lost the node 4 (a worker died while it was started)"

    cluster.train(nodes, run, started=False, max_failures=1, workers=2)


def test_workers_that_never_start_are_failures(cluster: Cluster) -> None:
    cluster.patch.setattr(supervisor, "NODE_LOSS_SECONDS", 0.0)
    numbers: list[int] = []

    def run(attempt: Attempt) -> None:
        numbers.append(attempt.number)
        raise WorkersNotStartedError("a worker did not start within 120 s")

    failed = r"logs/ray\.log: starting 4 workers failed: a worker did not start .* with --resume\."
    with pytest.raises(MachineError, match=failed):
        cluster.train([node("a", 4)], run, started=False)
    assert numbers == [0, 1, 2, 3]


def test_a_crowded_cluster_gets_a_smaller_request_though_nothing_is_waited_for(cluster: Cluster) -> None:
    few = {"workers": 8, "min_workers": 2, "wait_for_nodes_seconds": 0.0}
    sizes: list[int] = []

    def run(attempt: Attempt) -> None:
        sizes.append(attempt.workers)
        if attempt.workers > 4:
            raise WorkersNotStartedError

    cluster.train([node("a", 8, free=4)], run, started=False, **few)
    assert sizes == [8, 4]


def test_a_crash_on_nodes_that_stay_is_a_failure(cluster: Cluster) -> None:
    cluster.patch.setattr(supervisor, "NODE_LOSS_SECONDS", 0.0)
    seen: list[tuple[int, bool]] = []

    def run(attempt: Attempt) -> None:
        seen.append((attempt.number, attempt.training.resume))
        raise AttemptCrashed(1, "killed")

    crashed = r"worker-1\.log: worker 1: killed, and all max_failures=3 .* crashed repeatedly on 10\.0\.0\.b: check"
    with pytest.raises(MachineError, match=crashed):
        cluster.train([node("a"), node("b")], run)
    # A bad node that the run needs is not left out.
    assert seen == [(0, False), (1, True), (2, True), (3, True)]


def test_crashes_with_a_new_checkpoint_between_them_are_not_counted_up(cluster: Cluster) -> None:
    cluster.patch.setattr(supervisor, "NODE_LOSS_SECONDS", 0.0)

    def run(attempt: Attempt) -> None:
        checkpoint = cluster.folder / f"checkpoints/step-{attempt.number:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / MANIFEST).touch()
        if attempt.number < 7:
            raise AttemptCrashed(0, "killed")

    cluster.train([node("a", 4)], run, max_failures=1)


def test_crash_while_stopping_is_a_stop(cluster: Cluster) -> None:
    cluster.patch.setattr(supervisor, "NODE_LOSS_SECONDS", 0.0)

    def run(attempt: Attempt) -> None:
        assert attempt.number == 0
        (cluster.folder / "stop").touch()
        raise AttemptCrashed(0, "killed")

    with pytest.raises(StoppedError, match="ended while stopping"):
        cluster.train([node("a", 4)], run)


def test_a_crash_that_takes_its_node_along_does_not_come_back_for_ever(cluster: Cluster) -> None:
    """A pod without memory loses Ray with the worker, and returns under another id. A checkpoint clears the count."""
    nodes = [node("0")]

    def run(attempt: Attempt) -> None:
        nodes[0] = node(str(attempt.number + 1))
        if attempt.number == 8:
            checkpoint = cluster.folder / "checkpoints" / "step-7" / MANIFEST
            checkpoint.parent.mkdir(parents=True)
            checkpoint.touch()
        assert attempt.number < 30
        raise AttemptCrashed(0, "its process died (killed, or out of memory)")

    lost = r"lost the node 10\.0\.0\.18 .* 11 crashes with the loss of a node .* out of memory may lose Ray"
    with pytest.raises(MachineError, match=lost):
        cluster.train(nodes, run, max_failures=1, workers=1)
    assert nodes[0].id == "19", "eight crashes, a checkpoint, and eleven more"


def test_the_log_of_the_worker_that_hangs_is_named(cluster: Cluster) -> None:
    """Its watchdog ends another worker first, whose log does not show the cause."""
    cluster.patch.setattr(supervisor, "NODE_LOSS_SECONDS", 0.0)
    logs = cluster.folder / "logs"
    (logs / "worker-0.log").write_text("terminated\n")
    (logs / "worker-3.log").write_text("waits in a collective\n")

    def run(_: Attempt) -> None:
        seen = {"event": "hang", "rank": 3, "reason": "worker 3 hangs", "time": time.time() + 1}
        (logs / HANG_FILE).write_text(json.dumps(seen))
        raise AttemptCrashed(0, "killed")

    hangs = r"worker-3\.log: worker 3 hangs, .* last line of the log: 'waits in a collective'"
    with pytest.raises(MachineError, match=hangs):
        cluster.train([node("a"), node("b")], run, max_failures=0)


def test_a_node_with_two_crashes_is_left_out_and_named(cluster: Cluster) -> None:
    attempts: list[Attempt] = []

    def run(attempt: Attempt) -> None:
        attempts.append(attempt)
        if attempt.number < 2:
            raise AttemptCrashed(1, "CUDA error: uncorrectable ECC error")

    cluster.train([node("a"), node("b")], run, workers=2)
    assert [sorted(attempt.avoid) for attempt in attempts] == [[], [], ["b"]]
    restart, left_out = attempts[-1].training.events
    assert (restart["event"], left_out["event"]) == ("restart", "left_out")
    assert left_out["message"].startswith("node 10.0.0.b: workers crashed on it twice within a day")


def test_a_node_is_forgiven_after_a_day() -> None:
    now = [0.0]
    crashes = CrashHistory(1, lambda: now[0])
    for time_ in (0.0, 3600.0):
        now[0] = time_
        crashes.add({"a": "10.0.0.1", "b": "10.0.0.2"}, "b", has_new_checkpoint=False)
    assert crashes.bad_nodes() == {"b": "10.0.0.2"}
    assert crashes.exhausted
    now[0] = 86_401.0
    assert crashes.bad_nodes() == {}


def test_the_loss_of_a_node_explains_a_crash_of_the_last_minute_only() -> None:
    now = [0.0]
    crashes = CrashHistory(0, lambda: now[0])
    crashes.add({"a": "10.0.0.1", "b": "10.0.0.2"}, "b", has_new_checkpoint=False)
    assert crashes.forgive(["a", "b", "c"]) == []
    now[0] = 61.0
    assert crashes.forgive(["a"]) == []
    assert crashes.exhausted
    crashes.add({"a": "10.0.0.1", "c": "10.0.0.3"}, "a", has_new_checkpoint=True)
    assert crashes.forgive(["a"]) == ["10.0.0.3"]
    assert not crashes.exhausted
    assert crashes.bad_nodes() == {}


# Growth


def restarts(arrivals: Sequence[float], *, most: int, until: float) -> list[float]:
    """When a run of one worker, started at 0, is restarted, if one more worker fits from each of these times on."""
    times, workers, scale_up = [], 1, ScaleUp(1, most, 0.0)
    for second in range(int(until)):
        fits = min(most, 1 + sum(arrival <= second for arrival in arrivals))
        if scale_up.is_due(fits, float(second)):
            times.append(float(second))
            workers, scale_up = fits, ScaleUp(fits, most, float(second))
    assert workers == min(most, 1 + len(arrivals))
    return times


@pytest.mark.parametrize("every", [2.0, 15.0, 40.0, 90.0])
@pytest.mark.parametrize("most", [33, 40])
def test_nodes_that_arrive_one_by_one_cost_a_restart_or_two(every: float, most: int) -> None:
    arrivals = [60.0 + number * every for number in range(32)]
    assert len(restarts(arrivals, most=most, until=arrivals[-1] + 2000)) <= 2


def test_a_run_that_can_be_whole_again_is_at_once() -> None:
    (at,) = restarts([100.0], most=2, until=200)
    assert 100 <= at <= 105


def test_a_node_that_flickers_stops_nothing() -> None:
    scale_up = ScaleUp(1, 2, 0.0)
    assert not any(scale_up.is_due(1 + second % 2, float(second)) for second in range(100))


# Flags


def test_a_stop_file_of_an_earlier_launch_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node sees a removed file for a while: here it is put back as it was."""
    stop = tmp_path / "stop"
    stop.touch()
    old = stop.stat().st_mtime_ns - 1
    requests: list[LaunchRequest] = []

    class Child:
        pid, returncode = 0, 0

        def __init__(self, command: list[str], **_: Any) -> None:
            requests.append(pickle.loads(Path(command[-1]).read_bytes()))
            requests[-1].launch.outcome_path.write_text('{"error": null}')

        def wait(self) -> None:
            pass

    monkeypatch.setattr("cluster.workers.launch.subprocess.Popen", Child)
    monkeypatch.setattr("cluster.workers.launch.end_session", lambda _: None)
    for _ in range(2):
        run_driver("module", lambda launch: make_request(tmp_path, launch=launch), address="", run_dir=tmp_path)
    first, second = (request.launch for request in requests)
    assert not stop.exists()
    stop.touch()
    assert second.stop_flag().is_set(), "as a pod's hook does"
    os.utime(stop, ns=(old, old))
    assert not first.stop_flag().is_set()
    first.stop_flag().set()
    assert first.stop_flag().is_set()
    assert not second.stop_flag().is_set(), "a launcher that exited late"
    second.restart_flag(1).set()
    assert [second.restart_flag(attempt).is_set() for attempt in (0, 1, 2)] == [False, True, False]


def test_a_restart_is_requested_of_the_attempt_that_runs(cluster: Cluster) -> None:
    """The previous attempt's file is still visible: it once ended the run, like a stop that nobody had requested."""
    nodes = [node("a", 4), node("b", 4)]
    attempts: list[bool] = []
    cluster.show(lambda: nodes)
    cluster.patch.setattr(supervisor, "POLL_SECONDS", 0.002)

    def run(attempt: Attempt, started: Any) -> None:
        started([WorkerLocation("ab"[attempt.number], "10.0.0.1", 1, ())])  # the second leaves the node that goes
        attempts.append(attempt.restart_flag().is_set())
        if attempt.number == 0:
            nodes[0] = node("a", 4, draining=True)
            deadline = time.monotonic() + 20
            while not attempt.restart_flag().is_set() and time.monotonic() < deadline:
                threading.Event().wait(0.002)
            raise StoppedError("saved")

    cluster.patch.setattr(supervisor, "run_attempt", run)
    cluster.patch.setattr(Path, "unlink", lambda *_, **__: None)  # as with a cache of file attributes
    supervisor.supervise(cluster.request, keep_logs=lambda: None)
    assert attempts == [False, False]


# GPUs by name


NAMES = [([10, 9, 0], ("0", "9", "10")), (["10", "9"], ("9", "10")), (["MIG-5c3e"], ("MIG-5c3e",)), ([], ())]
NAMES += [(["GPU-b1c2", "GPU-0a1b"], ("GPU-0a1b", "GPU-b1c2"))]


@pytest.mark.parametrize(("ids", "names"), NAMES)
def test_gpus_have_the_names_that_ray_gives(
    monkeypatch: pytest.MonkeyPatch, ids: list[Any], names: tuple[str, ...]
) -> None:
    """Ray passes on what CUDA_VISIBLE_DEVICES holds on the node."""
    context = SimpleNamespace(get_node_id=lambda: "a")
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    ray = SimpleNamespace(get_gpu_ids=lambda: ids, get_runtime_context=lambda: context, util=util)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert WorkerActor().locate().gpus == names


def test_workers_of_a_node_see_all_its_gpus_but_one_instance_of_a_shared_one() -> None:
    def visible(*gpus: str) -> list[tuple[str, ...]]:
        return [one.visible_gpus for one in assign_ranks([WorkerLocation("a", "10.0.0.1", 1, (gpu,)) for gpu in gpus])]

    assert visible("2", "10") == [("2", "10")] * 2
    assert visible("GPU-0a", "GPU-b1") == [("GPU-0a", "GPU-b1")] * 2
    assert visible("MIG-0a", "MIG-b1") == [("MIG-0a",), ("MIG-b1",)]

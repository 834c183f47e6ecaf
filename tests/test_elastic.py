"""Runs on clusters whose nodes come and go: waiting, preemptions, bad nodes, growth, GPUs by name. Without Ray."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from cluster.jobs import client
from cluster.workers import group, placement
from cluster.workers.failures import Failures
from cluster.workers.group import _Crash
from cluster.workers.launch import drive
from cluster.workers.members import Found, _Member, _places
from cluster.workers.nodes import Node
from cluster.workers.placement import Growth, wait_for_room
from cluster.workers.worker import WorkerEnd, restart_flag, stop_flag
from pretrain.common.errors import MachineError, StoppedError
from pretrain.common.files import MANIFEST
from pretrain.common.worker import HANG_FILE
from pretrain.tracking.live import _Progress


def node(name: str, cpus: int = 2, *, gpus: int = 0, draining: bool = False, free: int | None = None) -> Node:
    return Node(name, cpus, gpus, draining, cpus if free is None else free, gpus)


class Asked:
    """Stands in for Ray's placement groups: what was asked for, and which of it has a place."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, dict[str, float]]] = []
        self.placed = False
        self.removed = 0

    def ask_for(self, workers: int, resources: dict[str, float], avoid: Any = ()) -> Any:
        self.sizes.append((workers, resources))
        return SimpleNamespace(id=SimpleNamespace(hex=lambda: str(workers)), bundle_count=workers)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Asked:
        def remove(_: Any) -> None:
            self.removed += 1

        def table() -> dict[str, Any]:
            state = "CREATED" if self.placed else "PENDING"
            return {str(size): {"state": state} for size, _ in self.sizes}

        util = SimpleNamespace(placement_group_table=table, remove_placement_group=remove)
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=util))
        monkeypatch.setitem(sys.modules, "ray.util", util)
        monkeypatch.setattr(placement, "ask_for", self.ask_for)
        monkeypatch.setattr(placement, "_autoscaled_gpus", lambda: 0)
        monkeypatch.setattr(placement, "LOOK_SECONDS", 0.002)
        return self


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked().install(monkeypatch)


@pytest.fixture
def request_(tmp_path: Path) -> dict[str, Any]:
    """Of a run of four workers on a cluster."""
    (tmp_path / "logs").mkdir()
    return {
        "run_dir": str(tmp_path),
        "ray_dir": str(tmp_path / "ray"),
        "max_failures": 3,
        "workers": 4,
        "min_workers": 0,
        "cpus_per_worker": 1,
        "address": "10.0.0.5:6379",
        "wait_for_nodes_seconds": 60.0,
        "launch": "this",
        "since": 0,
        "payload": {"resume": False},
    }


def show(monkeypatch: pytest.MonkeyPatch, nodes: Callable[[], Sequence[Node]]) -> None:
    monkeypatch.setattr(placement, "usable_nodes", nodes)
    monkeypatch.setattr(group, "usable_nodes", nodes)


# Waiting


def test_a_node_that_comes_late_is_waited_for(
    request_: dict[str, Any], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing is there for an autoscaler and for `status` to see, as long as it is missing."""
    notice = Path(request_["run_dir"]) / "logs/waiting.json"
    told: list[str] = []

    def nodes() -> list[Node]:
        told.extend(client._waiting(Path(request_["run_dir"])))
        return [node("a", 3), node("b")] if len(told) == 3 else [node("a", 3)]

    show(monkeypatch, nodes)
    assert wait_for_room(request_).workers == 4
    assert told[0] == "waiting for nodes: has room for 3 of 4 workers on 1 nodes, for 0:00:00"
    assert asked.sizes == [(4, {"CPU": 1})]
    assert asked.removed == 1
    assert not notice.exists()


def test_an_autoscaler_is_asked_before_there_is_any_node(
    request_: dict[str, Any], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An elastic run asks for the fewest as a whole, and for the rest one by one."""
    looks = iter(range(100))
    monkeypatch.setattr(placement, "_autoscaled_gpus", lambda: 8)
    head = node("head", 16)
    show(monkeypatch, lambda: [head, node("b", 16, gpus=2)] if next(looks) > 5 else [head])
    request_.update(min_workers=2, cpus_per_worker=0)
    assert wait_for_room(request_).workers == 2, "not on the CPUs of the head"
    assert asked.sizes == [(2, {"CPU": 1, "GPU": 1}), (1, {"CPU": 1, "GPU": 1}), (1, {"CPU": 1, "GPU": 1})]
    assert asked.removed == 3


def test_a_place_that_ray_found_ends_the_wait(
    request_: dict[str, Any], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Ray holds for us does not look free."""

    def nodes() -> list[Node]:
        asked.placed = len(asked.sizes) > 0
        return [node("a", 4, free=0)]

    show(monkeypatch, nodes)
    assert wait_for_room(request_, crowded=True).workers == 4


def test_a_wait_has_an_end(request_: dict[str, Any], asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, lambda: [node("a", 3)])
    request_["wait_for_nodes_seconds"] = 0.01
    assert wait_for_room(request_).workers == 0
    monkeypatch.setattr(group, "_attempt", lambda *_: pytest.fail("nothing may start"))
    with pytest.raises(StoppedError, match=r"no room for 4 workers for 0 s \(scheduling\.wait_for_nodes_seconds\)"):
        group.train(request_, use_gpu=False, keep_logs=lambda: None)


def test_a_wait_hears_a_stop(request_: dict[str, Any], asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes() -> list[Node]:
        if asked.sizes:
            (Path(request_["run_dir"]) / "stop").touch()
        return [node("a", 3)]

    show(monkeypatch, nodes)
    with pytest.raises(StoppedError, match="stopped while it waited for nodes"):
        wait_for_room(request_)
    assert asked.removed == 1


def test_a_notice_of_a_driver_that_was_killed_is_removed(
    request_: dict[str, Any], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    notice = Path(request_["run_dir"]) / "logs/waiting.json"
    notice.write_text(json.dumps({"time": 0.0, "message": "waiting"}))
    show(monkeypatch, lambda: [node("a", 4)])
    wait_for_room(request_)
    assert not notice.exists()


def test_the_terminal_tells_a_wait_once(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    notice, said = tmp_path / "logs/waiting.json", io.StringIO()
    progress = _Progress(tmp_path, 10, Console(file=said))
    for message in ("has room for 1 of 4", "has room for 1 of 4", "has room for 2 of 4", ""):
        if message:
            notice.write_text(json.dumps({"time": 0.0, "message": message}))
        else:
            notice.unlink()
        progress.poll()
    assert said.getvalue().splitlines() == ["  has room for 1 of 4", "  has room for 2 of 4"]


# Crashes and preemptions


def train(
    monkeypatch: pytest.MonkeyPatch,
    request: dict[str, Any],
    nodes: list[Node],
    attempt: Callable[[int, Any], None],
) -> None:
    """`group.train` on these nodes, which an attempt may change; its workers run on as many as there are."""
    show(monkeypatch, lambda: list(nodes))
    monkeypatch.setattr(group._Overseer, "_look", lambda self: None)

    def stand_in(request: Any, number: int, workers: int, use_gpu: bool, begun: Any, avoid: Any) -> None:
        begun([Found(one.id, f"10.0.0.{one.id}", 1, ()) for one in nodes if one.id not in avoid])
        attempt(number, avoid)

    monkeypatch.setattr(group, "_attempt", stand_in)
    group.train(request, use_gpu=False, keep_logs=lambda: None)


def test_a_preemption_is_no_failure(request_: dict[str, Any], asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten nodes are lost or drained under a run that may fail once."""
    request_.update(max_failures=1, min_workers=1)
    nodes = [node(str(number)) for number in range(11)]

    def attempt(number: int, _: Any) -> None:
        if number:
            assert "lost the node 10.0.0." in request_["payload"]["events"][0]["message"]
        if number < 10:
            nodes[0] = node(nodes[0].id, draining=True)
            if number % 2:
                del nodes[0]
            raise _Crash(0, "killed")

    train(monkeypatch, request_, nodes, attempt)


def test_a_crash_on_nodes_that_stay_is_a_failure(
    request_: dict[str, Any], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "_VERDICT_SECONDS", 0.0)
    seen: list[int] = []

    def attempt(number: int, _: Any) -> None:
        seen.append(number)
        raise _Crash(1, "killed")

    with pytest.raises(
        MachineError, match=r"max_failures=3 restarts .* Workers crashed more than once on 10\.0\.0\.b: check"
    ):
        train(monkeypatch, request_, [node("a"), node("b")], attempt)
    assert seen == [0, 1, 2, 3], "a bad node that the run needs is not left out"


def test_a_crash_that_takes_its_node_along_does_not_come_back_for_ever(
    request_: dict[str, Any], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that is out of memory ends Ray with the worker, and comes back under another id. A checkpoint clears the count."""
    request_.update(max_failures=1, workers=1)
    nodes = [node("0")]

    def attempt(number: int, _: Any) -> None:
        nodes[0] = node(str(number + 1))
        if number == 8:
            checkpoint = Path(request_["run_dir"], "checkpoints", "step-7", MANIFEST)
            checkpoint.parent.mkdir(parents=True)
            checkpoint.touch()
        assert number < 30
        raise _Crash(0, "its process died (killed, or out of memory)")

    with pytest.raises(
        MachineError,
        match=r"lost the node 10\.0\.0\.18 .* 11 crashes with the loss of a node .* A machine out of memory may lose Ray",
    ):
        train(monkeypatch, request_, nodes, attempt)
    assert nodes[0].id == "19", "eight crashes, a checkpoint, and eleven more"


def test_the_log_of_the_worker_that_hangs_is_named(
    request_: dict[str, Any], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its watchdog ends another worker first, whose log says nothing of the cause."""
    request_["max_failures"] = 0
    monkeypatch.setattr(group, "_VERDICT_SECONDS", 0.0)
    logs = Path(request_["run_dir"]) / "logs"
    (logs / "worker-0.log").write_text("terminated\n")
    (logs / "worker-3.log").write_text("waits in a collective\n")

    def attempt(number: int, _: Any) -> None:
        seen = {"event": "hang", "rank": 3, "reason": "worker 3 hangs", "time": time.time() + 1}
        (logs / HANG_FILE).write_text(json.dumps(seen))
        raise _Crash(0, "killed")

    with pytest.raises(MachineError, match=r"worker-3\.log: worker 3 hangs, .* ends with: 'waits in a collective'"):
        train(monkeypatch, request_, [node("a"), node("b")], attempt)


def test_a_node_with_two_crashes_is_left_out_and_named(
    request_: dict[str, Any], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_["workers"] = 2
    avoided = []

    def attempt(number: int, avoid: Any) -> None:
        avoided.append(sorted(avoid))
        if number < 2:
            raise _Crash(1, "CUDA error: uncorrectable ECC error")

    train(monkeypatch, request_, [node("a"), node("b")], attempt)
    assert avoided == [[], [], ["b"]]
    restart, left_out = request_["payload"]["events"]
    assert (restart["event"], left_out["event"]) == ("restart", "left_out")
    assert left_out["message"].startswith("node 10.0.0.b: workers crashed on it twice within a day")


def test_a_node_is_forgiven_after_a_day() -> None:
    now = [0.0]
    failures = Failures(1, lambda: now[0])
    for time_ in (0.0, 3600.0):
        now[0] = time_
        failures.add({"a": "10.0.0.1", "b": "10.0.0.2"}, "b", progressed=False)
    assert failures.bad_nodes() == {"b": "10.0.0.2"}
    assert failures.exhausted
    now[0] = 86_401.0
    assert failures.bad_nodes() == {}


def test_the_loss_of_a_node_explains_a_crash_of_the_last_minute_only() -> None:
    now = [0.0]
    failures = Failures(0, lambda: now[0])
    failures.add({"a": "10.0.0.1", "b": "10.0.0.2"}, "b", progressed=False)
    assert failures.forgive(["a", "b", "c"]) == []
    now[0] = 61.0
    assert failures.forgive(["a"]) == []
    assert failures.exhausted
    failures.add({"a": "10.0.0.1", "c": "10.0.0.3"}, "a", progressed=True)
    assert failures.forgive(["a"]) == ["10.0.0.3"]
    assert not failures.exhausted
    assert failures.bad_nodes() == {}


def test_the_first_crash_is_to_blame() -> None:
    """What the others say, they say of a peer that was gone by then."""
    cause = group._cause({3: WorkerEnd("crash", "ECC error"), 0: WorkerEnd("crash", "connection reset by peer")})
    assert isinstance(cause, _Crash)
    assert (cause.rank, cause.reason) == (3, "ECC error")


# Growth


def restarts(arrivals: Sequence[float], *, most: int, until: float) -> list[float]:
    """When a run of one worker, started at 0, is restarted, with a place more at each of the times."""
    times, workers, growth = [], 1, Growth(1, most, 0.0)
    for second in range(int(until)):
        fits = min(most, 1 + sum(arrival <= second for arrival in arrivals))
        if growth.due(fits, float(second)):
            times.append(float(second))
            workers, growth = fits, Growth(fits, most, float(second))
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
    growth = Growth(1, 2, 0.0)
    assert not any(growth.due(1 + second % 2, float(second)) for second in range(100))


# Flags


def test_a_stop_file_of_an_earlier_launch_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node goes on seeing a removed file for a while: here it is put back as it was."""
    stop = tmp_path / "stop"
    stop.touch()
    old = stop.stat().st_mtime_ns - 1
    requests: list[dict[str, Any]] = []

    class Child:
        pid, returncode = 0, 0

        def __init__(self, command: list[str], **_: Any) -> None:
            requests.append(json.loads(Path(command[-1]).read_text()))
            Path(requests[-1]["outcome"]).write_text('{"error": null}')

        def wait(self) -> None:
            pass

    monkeypatch.setattr("cluster.workers.launch.subprocess.Popen", Child)
    monkeypatch.setattr("cluster.workers.launch.end_session", lambda _: None)
    for _ in range(2):
        drive("module", {"address": ""}, run_dir=tmp_path)
    first, second = requests
    assert not stop.exists()
    stop.touch()
    assert stop_flag(second).is_set(), "as a pod's hook does"
    os.utime(stop, ns=(old, old))
    assert not stop_flag(first).is_set()
    stop_flag(first).set()
    assert stop_flag(first).is_set()
    assert not stop_flag(second).is_set(), "a launcher that ended late"
    restart_flag(second, 1).set()
    assert [restart_flag(second, attempt).is_set() for attempt in (0, 1, 2)] == [False, True, False]


def test_a_restart_is_asked_of_the_attempt_that_runs(
    request_: dict[str, Any], asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the attempt before is still seen: it ended the run, as a stop that nobody had asked for."""
    nodes = [node("a", 4), node("b", 4)]
    attempts: list[bool] = []
    show(monkeypatch, lambda: nodes)
    monkeypatch.setattr(group, "LOOK_SECONDS", 0.002)

    def attempt(request: Any, number: int, workers: int, use_gpu: bool, begun: Any, avoid: Any) -> None:
        begun([Found("a", "10.0.0.1", 1, ())])
        attempts.append(restart_flag(request, number).is_set())
        if number == 0:
            nodes[0] = node("a", 4, draining=True)
            deadline = time.monotonic() + 20
            while not restart_flag(request, 0).is_set() and time.monotonic() < deadline:
                threading.Event().wait(0.002)
            raise StoppedError("saved")

    monkeypatch.setattr(group, "_attempt", attempt)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)  # as a cache of attributes would have it
    group.train(request_, use_gpu=False, keep_logs=lambda: None)
    assert attempts == [False, False]


# GPUs by name


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        ([10, 9, 0], ("0", "9", "10")),
        (["10", "9"], ("9", "10")),
        (["GPU-b1c2", "GPU-0a1b"], ("GPU-0a1b", "GPU-b1c2")),
        (["MIG-5c3e"], ("MIG-5c3e",)),
        ([], ()),
    ],
)
def test_gpus_have_the_names_that_ray_gives(
    monkeypatch: pytest.MonkeyPatch, ids: list[Any], names: tuple[str, ...]
) -> None:
    """Ray hands on what CUDA_VISIBLE_DEVICES holds on the node."""
    context = SimpleNamespace(get_node_id=lambda: "a")
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    ray = SimpleNamespace(get_gpu_ids=lambda: ids, get_runtime_context=lambda: context, util=util)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert _Member().find().gpus == names


def test_workers_of_a_node_see_all_its_gpus_but_one_instance_of_a_shared_one() -> None:
    def visible(*gpus: str) -> list[tuple[str, ...]]:
        return [place.visible_gpus for place in _places([Found("a", "10.0.0.1", 1, (gpu,)) for gpu in gpus])]

    assert visible("2", "10") == [("2", "10")] * 2
    assert visible("GPU-0a", "GPU-b1") == [("GPU-0a", "GPU-b1")] * 2
    assert visible("MIG-0a", "MIG-b1") == [("MIG-0a",), ("MIG-b1",)]

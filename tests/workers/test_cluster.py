"""Workers through Ray: their ranks, their crashes, the user's mistakes, stopping, and the clean-up."""

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray import _raylet  # pyright: ignore[reportAttributeAccessIssue]
from ray.exceptions import AuthenticationError

from cluster.workers import actors, capacity, driver, supervisor, target
from cluster.workers.actors import (
    PROCESS_TITLE,
    WorkerGroup,
    WorkerLocation,
    WorkersFailedError,
    WorkersNotStartedError,
)
from cluster.workers.launch import Signals, end_session, last_line, run, run_driver
from cluster.workers.nodes import Node, choose_cpus, choose_elastic_cpus
from cluster.workers.outcomes import CRASH, WorkerError, as_data, error_from, one_line
from cluster.workers.request import Attempt, LaunchRequest, TrialRequest
from cluster.workers.supervisor import AttemptCrashed, failure_cause
from cluster.workers.target import RankAssignment, run_worker
from cluster.workers.trials import run_trials
from pretrain.common.errors import DivergedError, InputError, MachineError, RunError, StoppedError
from pretrain.common.worker import Flag, TrainingRequest
from tests.distributed import free_port
from tests.workers.test_elastic import make_request

ROOT = Path(__file__).parents[2]
CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, with the targets importable by workers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    return tmp_path


@pytest.fixture
def nothing_left(folder: Path) -> Iterator[None]:
    """Fails when a process that works in the test's folder outlives it."""
    yield
    assert not _processes_in(folder)


def _processes_in(folder: Path) -> set[int]:
    """All processes whose working directory is `folder` or below it, but this one."""
    pids = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and Path(process.cwd()).is_relative_to(folder):
                pids.add(process.pid)
    return pids


def _run(target: str, folder: Path, **options: Any) -> None:
    run(f"cluster_targets:{target}", TrainingRequest({}, False), name="test", run_dir=folder / "run", **options)


def request_of(folder: Path, **changes: Any) -> LaunchRequest:
    """Of a run of two workers on this machine."""
    usual = {"address": "", "max_failures": 0, "use_gpu": False, "workers": 2, "wait_for_nodes_seconds": 0.0}
    return make_request(folder, **{**usual, **changes})


def _starts(folder: Path, rank: int = 0) -> list[str]:
    return (folder / f"starts-{rank}").read_text().splitlines()


# ---- whole runs through Ray


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.skipif(CORES < 2, reason="needs two cores")
def test_killed_worker_restarts_once_and_a_mistake_never_does(folder: Path) -> None:
    with pytest.raises(InputError, match=r"^corpus/: not there\. Prepare it first\.$"):
        _run("killed_then_mistaken", folder, workers=2, cpus_per_worker=1, max_failures=5)
    assert _starts(folder, 0) == _starts(folder, 1) == ["resume=False", "resume=True"]
    assert (folder / "sum-0").read_text() == "2", "the workers did not reach each other"
    assert (folder / "title-1").read_text().startswith(PROCESS_TITLE), "Kubernetes waits for processes of that name"
    ray = (folder / "ray-1").read_text()
    assert "/raylet " in ray
    assert "log_monitor" not in ray, "it looks at logs that nobody reads, ten times a second"
    log = (folder / "run/logs/worker-1.log").read_text()
    assert log.count("rank 1 of 2, 1 threads") == 2
    assert log.count("a child writes here too") == 2
    assert "rank 1" not in (folder / "run/logs/worker-0.log").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("in_ray", [False, True])
def test_a_bug_ends_after_max_failures_and_names_the_log(folder: Path, in_ray: bool) -> None:
    with pytest.raises(MachineError) as caught:
        _run("fails", folder, max_failures=1, in_ray=in_ray)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder / "run/logs/worker-0.log") in message
    assert "ZeroDivisionError: a bug in two lines" in message
    assert "max_failures=1" in message
    assert _starts(folder) == ["resume=False", "resume=True"]
    assert "Traceback" in (folder / "run/logs/worker-0.log").read_text()
    assert any((folder / "run/logs/ray").glob("raylet.*")) == in_ray, "Ray's own logs are kept after a crash"


@pytest.mark.usefixtures("nothing_left")
def test_one_worker_is_restarted_without_ray(folder: Path) -> None:
    with pytest.raises(InputError, match=r"^corpus/: not there\. Prepare it first\.$"):
        _run("killed_alone", folder, max_failures=1)
    assert _starts(folder) == ["resume=False", "resume=True"]
    assert (folder / "seen").read_text() == f"no ray, {CORES} threads"
    assert not any((folder / "run/logs").glob("ray/*"))


_STAND_IN = """
import signal, sys, time
from pathlib import Path
from cluster.workers.driver import main

def work(request):
    for stage in ("during", "after"):
        if stage == "during":  # as `ray.init` does
            signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        Path(stage).touch()
        while Path(stage).exists():
            time.sleep(0.01)

main(sys.argv[1], work)
"""


@pytest.mark.usefixtures("nothing_left")
def test_a_driver_outlives_signals_whatever_handlers_a_library_sets(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first moment on: whoever stops a job signals all its processes, and the launcher decides."""
    (folder / "stand_in.py").write_text(_STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    sent: list[str] = []
    others = set(psutil.Process().children())

    def poll() -> None:
        for stage in ("start", "during", "after"):
            if stage not in sent and (stage == "start" or (folder / stage).exists()):
                for child in set(psutil.Process().children()) - others:
                    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                        child.send_signal(number)
                sent.append(stage)
                (folder / stage).unlink(missing_ok=True)

    usual = request_of(folder)
    run_driver("stand_in", lambda launch: replace(usual, launch=launch), address="", run_dir=folder / "run", poll=poll)
    assert sent == ["start", "during", "after"]


class Launched:
    """`run` in a process of its own, as a command line would call it."""

    def __init__(self, target: str, folder: Path, python: str = sys.executable, **options: Any):
        script = (
            "import json, sys\n"
            "from cluster.workers.launch import run\n"
            "from pretrain.common.worker import TrainingRequest\n"
            "from pretrain.common.errors import RunError\n"
            "try:\n"
            "    run(sys.argv[1], TrainingRequest({}, False), name='test', run_dir='run', **json.loads(sys.argv[2]))\n"
            "except RunError as error:\n"
            "    print(type(error).__name__, error)\n"
            "    sys.exit(error.exit_code)\n"
        )
        self.process = subprocess.Popen(
            [python, "-c", script, f"cluster_targets:{target}", json.dumps(options)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, condition: Callable[[], bool], seconds: float = 90) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline, "waited too long"
            time.sleep(0.1)

    def end(self, seconds: float = 60) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, output


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("in_ray", [False, True])
def test_signal_stops_and_is_resumable(folder: Path, number: signal.Signals, in_ray: bool) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:  # the tests run under nohup, and the launcher would, too
        pytest.skip(f"{number.name} is ignored here")
    (folder / "run").mkdir()
    (folder / "run/stop").touch()  # of an earlier stop; must not stop this one
    launched = Launched("until_stopped", folder, max_failures=3, in_ray=in_ray)
    launched.wait_for((folder / "starts-0").exists)
    launched.process.send_signal(number)
    code, output = launched.end()
    assert code == 75
    assert output == "StoppedError stopped at step 7. --resume continues.\n"
    assert _starts(folder) == ["resume=False"]


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("in_ray", [False, True])
def test_second_interrupt_ends_at_once(folder: Path, in_ray: bool) -> None:
    launched = Launched("deaf", folder, in_ray=in_ray)
    launched.wait_for((folder / "starts-0").exists)
    launched.process.send_signal(signal.SIGINT)
    launched.wait_for((folder / "run/stop").exists)
    launched.process.send_signal(signal.SIGINT)
    code, output = launched.end(10)
    assert code == 75
    assert "without a final checkpoint" in output


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_paths_with_spaces(folder: Path) -> None:
    directory = folder / "two words"
    directory.mkdir()
    python = Path(sys.executable)
    (directory / "venv").symlink_to(python.parent.parent)
    launched = Launched("fine", directory, str(directory / "venv" / python.parent.name / python.name), in_ray=True)
    code, output = launched.end(90)
    assert (code, output) == (0, "")
    assert _starts(directory) == ["resume=False"]


@pytest.mark.slow
@pytest.mark.parametrize("in_ray", [False, True])
def test_killed_launcher_leaves_nothing(folder: Path, in_ray: bool) -> None:
    launched = Launched("deaf", folder, in_ray=in_ray)
    launched.wait_for((folder / "starts-0").exists)
    assert len(_processes_in(folder)) > (3 if in_ray else 2), "its processes are to be seen this way"
    launched.process.kill()
    launched.process.communicate(timeout=10)
    deadline = time.monotonic() + 10
    while _processes_in(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _processes_in(folder)


def test_a_driver_whose_launcher_is_gone_ends(tmp_path: Path) -> None:
    """The launcher was killed while its driver imported."""
    launcher = subprocess.Popen(["true"])
    launcher.wait()
    request = request_of(tmp_path)
    launch = replace(request.launch, launcher_pid=launcher.pid)
    launch.ray_dir.mkdir()
    with socket.socket() as silent:  # as a cluster whose answer is awaited
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        request = replace(request, launch=launch, address=f"127.0.0.1:{silent.getsockname()[1]}")
        (tmp_path / "request.pickle").write_bytes(pickle.dumps(request))
        command = [sys.executable, "-m", "cluster.workers.driver", str(tmp_path / "request.pickle")]
        done = subprocess.run(command, cwd=ROOT, start_new_session=True, timeout=120, check=False)
    assert done.returncode == MachineError.exit_code
    assert not launch.ray_dir.exists()
    assert not launch.outcome_path.exists()


@pytest.mark.slow
def test_joins_a_running_cluster_by_address(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with own_head(tmp_path_factory, cpus=1) as (head, port):
        _run("fine", folder, address=f"127.0.0.1:{port}")
        assert _starts(folder) == ["resume=False"]
        with pytest.raises(MachineError, match=rf"cluster at 127.0.0.1:{port} has 1 CPU core.* 2 workers"):
            _run("fine", folder, address=f"127.0.0.1:{port}", workers=2)
        os.environ["RAY_AUTH_TOKEN"] = "1" * 64
        began = time.monotonic()
        with pytest.raises(InputError, match=rf"127\.0\.0\.1:{port}: the cluster rejects this token\. Unset .* put"):
            _run("fine", folder, address=f"127.0.0.1:{port}")
        assert time.monotonic() - began < 20
        assert head.poll() is None, "the cluster is not ours to end"


@contextlib.contextmanager
def own_head(folders: pytest.TempPathFactory, cpus: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The head of a cluster that nothing of ours started, and its port; the environment has its token."""
    port, directory = free_port(), folders.mktemp("r")  # short: unix sockets
    start = f"start --head --block --port={port} --num-cpus={cpus} --include-dashboard=false --disable-usage-stats"
    os.environ["RAY_AUTH_TOKEN"] = "0" * 64
    head = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *start.split(), f"--temp-dir={directory}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "RAY_AUTH_MODE": "token"},
        start_new_session=True,
    )
    try:
        _wait_for_port(port)
        yield head, port
    finally:
        os.environ.pop("RAY_AUTH_TOKEN", None)
        end_session(head.pid)
        head.wait()


def _wait_for_port(port: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise AssertionError("the head node did not start")


# ---- refusals before anything runs


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"workers": CORES + 1}, MachineError, rf"has {CORES} CPU cores, too few for {CORES + 1} workers"),
        ({"address": "auto"}, InputError, "not host:port"),
        ({"address": "ray://10.0.0.1:10001"}, InputError, "not host:port"),
        ({}, InputError, "run"),  # its folder is a file
    ],
)
def test_what_is_refused_before_anything_runs(folder: Path, options: Any, kind: type[Exception], message: str) -> None:
    if not options:
        (folder / "run").write_text("a file where the folder should be")
    with pytest.raises(kind, match=message):
        _run("fine", folder, **options)


@pytest.mark.usefixtures("nothing_left")
def test_unreachable_cluster(folder: Path) -> None:
    with pytest.raises(MachineError, match=r"^No Ray cluster answers at 127\.0\.0\.1:\d+ .*refused[^\n]*$"):
        _run("fine", folder, address=f"127.0.0.1:{free_port()}")


@pytest.mark.usefixtures("nothing_left")
def test_a_stop_ends_the_wait_for_a_cluster_that_does_not_answer(folder: Path) -> None:
    """Ray's call, which nothing interrupts, would take six seconds more."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        launched = Launched("fine", folder, address=f"127.0.0.1:{silent.getsockname()[1]}")
        launched.wait_for((folder / "run/logs/ray.log").exists)
        launched.process.send_signal(signal.SIGINT)
        code, output = launched.end()
    assert (code, output) == (75, f"StoppedError {folder}/run: stopped while no workers ran. Continue with --resume.\n")


def test_a_wrong_token_is_a_mistake_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str) -> None:
        raise AuthenticationError("InvalidAuthToken: " + "advice of Ray " * 40)

    monkeypatch.setattr(_raylet, "GcsClient", refuse)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "1" * 64)
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        head.listen()
        with pytest.raises(InputError, match=r"rejects this token\. Unset .* or ~/\.ray/auth_token\.$"):
            driver.join_ray(f"127.0.0.1:{head.getsockname()[1]}", lambda _: None)


# ---- the parts


@pytest.mark.parametrize(
    ("nodes", "workers", "requested", "each"),
    [
        ([(2, 0)], 1, 0, 2),
        ([(2, 0)], 2, 0, 1),
        ([(8, 0), (8, 0)], 3, 0, 4),  # 5 would put one on each machine only
        ([(8, 0)], 2, 3, 3),
        ([(8, 4)], 4, 0, 2),
        ([(8, 1), (8, 1)], 2, 0, 8),
        ([(64, 0), (8, 2)], 2, 0, 4),  # GPUs are on the second machine
        ([(2, 0)], 3, 0, "2 CPU cores"),
        ([(4, 0)], 2, 3, "2 workers of 3 each"),
        ([(16, 2)], 3, 0, "2 GPUs"),
        ([], 1, 0, "0 CPU cores"),
    ],
)
def test_cores_are_divided_among_workers(
    nodes: list[tuple[int, int]], workers: int, requested: int, each: int | str
) -> None:
    if isinstance(each, int):
        assert choose_cpus(nodes, workers, requested, "here") == each
        return
    with pytest.raises(MachineError, match=each):
        choose_cpus(nodes, workers, requested, "here")


@pytest.mark.parametrize("kind", [InputError, MachineError, DivergedError, StoppedError, RunError])
def test_errors_come_back_as_themselves(kind: type[RunError]) -> None:
    back = error_from({"kind": kind.__name__, "message": "a: b. Do c."})
    assert type(back) is kind
    assert str(back) == "a: b. Do c."
    # An error of a room arrives as the kind that all know.
    error = error_from(as_data(type("DamagedError", (kind,), {})("here: damaged.")))
    assert (type(error), str(error)) == (kind, "here: damaged.")


@pytest.mark.parametrize(
    ("failures", "kind", "text"),
    [
        # A user's mistake comes before the crash that it caused.
        ({0: WorkerError(CRASH, "lost"), 1: WorkerError("InputError", "bad corpus")}, InputError, "bad corpus"),
        # A dead worker is to blame before those that lost it, the first crash before those whose peer was gone by then.
        ({0: WorkerError(CRASH, "lost"), 1: RuntimeError("died")}, AttemptCrashed, "worker 1"),
        ({3: WorkerError(CRASH, "ECC error"), 0: WorkerError(CRASH, "reset")}, AttemptCrashed, "worker 3: ECC error"),
    ],
)
def test_the_cause_is_to_blame(failures: dict[int, Exception], kind: type[Exception], text: str) -> None:
    cause = failure_cause(failures)
    assert type(cause) is kind
    said = f"worker {cause.rank}: {cause.reason}" if isinstance(cause, AttemptCrashed) else str(cause)
    assert said.startswith(text)


def test_a_worker_that_cannot_write_its_log_is_a_mistake(tmp_path: Path) -> None:
    """The other machines do not share the run folder."""
    (tmp_path / "file").touch()
    launch = replace(request_of(tmp_path).launch, run_dir=tmp_path / "file" / "run")
    attempt = Attempt(replace(request_of(tmp_path), launch=launch), 0, 1, TrainingRequest({}, False), frozenset())
    with pytest.raises(WorkerError, match=r"InputError: .*worker-0\.log: cannot write here .* is the machine "):
        run_worker(attempt, RankAssignment(0, 1, 0, 1, "127.0.0.1", "127.0.0.1", 1))


def test_code_that_does_not_load_is_no_dead_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ray
    from ray.exceptions import RayTaskError

    def get(_: Any) -> None:
        raise RayTaskError("run", "Traceback", ImportError("no module named cluster"))

    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray, "get", get)
    group = object.__new__(WorkerGroup)
    group.locations = [WorkerLocation("a", "10.0.0.1", 1, ())]
    group.actors = [SimpleNamespace(run=SimpleNamespace(remote=lambda *_: "reference"))]
    with pytest.raises(WorkersFailedError) as caught:
        group.run(Attempt(request_of(tmp_path), 0, 1, TrainingRequest({}, False), frozenset()))
    cause = failure_cause(caught.value.failures)
    assert isinstance(cause, AttemptCrashed)
    assert cause.reason == "ImportError: no module named cluster"


FITS = [([(64, 0)] * 4, 8, 32, 8), ([(2, 0)], 1, 2, 1), ([(8, 0), (2, 0)], 2, 2, 4), ([(4, 0)], 1, 8, 1)]
FITS += [([(64, 8)], 4, 8, 8)]  # eight GPUs hold eight workers


@pytest.mark.parametrize(("nodes", "low", "high", "each"), FITS)
def test_cpus_are_divided_among_as_many_workers_as_possible(nodes, low: int, high: int, each: int) -> None:
    assert choose_elastic_cpus(nodes, low, high, 0, "here") == each


def test_capacity_beside_others_counts_what_is_free_and_what_is_ours() -> None:
    def count(nodes: list[Node], most: int, cpus: int, use_gpu: bool | None = None, **options: Any) -> int:
        request = replace(request_of(Path()), min_workers=1, workers=most, cpus_per_worker=cpus, use_gpu=use_gpu)
        return capacity.find_capacity(nodes, request, **options).workers

    nodes = [Node("a", 4, 0, False, 1, 0), Node("b", 4, 0, False, 0, 0), Node("c", 4, 0, True, 4, 0)]
    assert count(nodes, 12, 1) == 8
    assert count(nodes, 12, 1, own_workers={}) == 1
    assert count(nodes, 12, 1, own_workers={"a": 3, "b": 2}) == 6
    assert count(nodes, 12, 1, avoid={"b"}) == 4
    assert count([Node("a", 16, 4, False, 12, 1)], 4, 4, own_workers={"a": 1}) == 2
    assert count([Node("a", 64, 8, False, 60, 0)], 8, 4, own_workers={}, use_gpu=None) == 0, "all GPUs are in use"
    nodes = [Node("a", 64, 8, False, 60, 1), Node("b", 8, 0, False, 8, 0)]
    assert count(nodes, 8, 4, own_workers={}, use_gpu=True) == 1
    assert count([Node("a", 64, 8, False, 64, 8)], 32, 4, use_gpu=False) == 16, "its workers were started without GPUs"


@pytest.mark.parametrize("placed", [False, True])
def test_a_stop_is_heard_while_workers_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placed: bool) -> None:
    """Ray does not place them, or their processes do not start."""
    import ray
    from ray.exceptions import GetTimeoutError

    launch, removed = request_of(tmp_path).launch, []

    def wait(_: float) -> bool:
        if not placed:
            launch.stop_flag().set()
        return placed

    def get(*_: Any, **__: Any) -> Any:
        launch.stop_flag().set()
        raise GetTimeoutError

    group, actor = SimpleNamespace(wait=wait), SimpleNamespace()
    actor.options = lambda **_: SimpleNamespace(remote=lambda: actor)
    actor.locate = SimpleNamespace(remote=lambda: None)
    monkeypatch.setattr(actors, "request_bundles", lambda *_: group)
    monkeypatch.setattr(ray, "remote", lambda _: actor)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(sys.modules["ray.util.placement_group"], "remove_placement_group", removed.append)
    with pytest.raises(StoppedError):
        WorkerGroup(2, {"CPU": 1}, 60.0, (), launch.check_stop)
    assert removed == [group]


@pytest.mark.parametrize(
    ("lacks", "kind", "message"),
    [
        ("", WorkersNotStartedError, r"2 of 3 workers did not start within 0 s .*, on 10\.0\.0\.1, 10\.0\.0\.2$"),
        ("torch", MachineError, r"the Python of the cluster's Ray has no module torch\. Start Ray on all nodes with"),
    ],
)
def test_workers_that_do_not_start_have_a_reason(monkeypatch: Any, lacks: str, kind: Any, message: str) -> None:
    """Late ones are named by their nodes."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    group, actor, calls = SimpleNamespace(wait=lambda _: True), SimpleNamespace(), iter("abc")

    def get(*_: Any, **__: Any) -> Any:
        raise RayActorError(error_msg=f"ModuleNotFoundError: No module named '{lacks}'") if lacks else GetTimeoutError

    actor.options = lambda **_: SimpleNamespace(remote=lambda: actor)
    actor.locate = SimpleNamespace(remote=lambda: next(calls))
    placement = sys.modules["ray.util.placement_group"]
    monkeypatch.setattr(actors, "request_bundles", lambda *_: group)
    monkeypatch.setattr(placement, "remove_placement_group", lambda _: None)
    monkeypatch.setattr(placement, "placement_group_table", lambda _: {"bundles_to_node_id": {0: "x", 1: "y", 2: "z"}})
    found = [{"NodeID": one, "NodeManagerAddress": f"10.0.0.{number}"} for number, one in enumerate("xyz")]
    for name, value in {"remote": lambda _: actor, "get": get, "nodes": lambda: found}.items():
        monkeypatch.setattr(ray, name, value)
    monkeypatch.setattr(ray, "wait", lambda *_, **__: (["a"], ["b", "c"]))
    with pytest.raises(kind, match=message):
        WorkerGroup(3, {"CPU": 1}, 60.0, (), lambda: None, 0.01)


def test_a_head_that_is_away_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [ConnectionError("no GCS"), [Node("here", 2, 0, False, 2, 0)]]

    def usable_nodes() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(capacity, "usable_nodes", usable_nodes)
    monkeypatch.setattr(supervisor, "run_attempt", lambda *_: None)
    supervisor.supervise(request_of(tmp_path), keep_logs=lambda: None)
    assert not answers


def test_a_head_that_is_slow_when_it_is_joined_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any) -> Any:
        raise TimeoutError("Deadline Exceeded")

    answers = iter([slow, lambda: [Node("here", 2, 0, False, 2, 0)]])
    before, fitted = signal.getsignal(signal.SIGTERM), []
    monkeypatch.setattr(driver, "join_ray", lambda *_: None)
    monkeypatch.setattr(driver, "usable_nodes", slow)
    monkeypatch.setattr(capacity, "usable_nodes", lambda: next(answers)())
    monkeypatch.setattr(driver, "supervise", lambda request, **_: fitted.append(request))
    request = replace(request_of(tmp_path), address="10.0.0.5:6379", wait_for_nodes_seconds=60.0)
    try:
        driver._run(request)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert fitted == [request]


def test_workers_and_launcher_have_one_folder_for_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker on a cluster has the environment of the cluster, which may name another folder or none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BERTRAIN_RUNS", "/mine")
    attempt = Attempt(request_of(tmp_path, max_failures=1), 0, 1, TrainingRequest({}, False), frozenset())
    for name in ("BERTRAIN_RUNS", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "of the cluster")
    seen: list[str] = []
    monkeypatch.setattr(target, "redirect_output", lambda *_: None)
    monkeypatch.setattr(target, "bind_gloo", lambda _: None)
    monkeypatch.setattr(target, "resolve", lambda _: lambda *_: seen.append(os.environ["BERTRAIN_RUNS"]))
    assert target.run_worker(attempt, target.RankAssignment(0, 1, 0, 1, "127.0.0.1", "127.0.0.1", 1)) is None
    assert seen == ["/mine"]


def test_last_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    log.write_bytes(b"x" * 9000 + b"\nfirst\n  last \xff line\n\n")
    assert last_line(log) == "last \ufffd line"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\n  b"), "ValueError: a b"),
        (ValueError("word " * 99), "ValueError: " + "word " * 57 + "..."),
        (ValueError("a" * 999), "ValueError: " + "a" * 285 + "..."),
    ],
)
def test_a_long_message_ends_visibly(error: Exception, line: str) -> None:
    assert one_line(error) == line


def test_end_session_ends_grandchildren_and_nobody_else() -> None:
    script = "sleep 60 & echo up; wait"
    ours = subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    other = subprocess.Popen(["sleep", "60"])
    assert ours.stdout is not None
    ours.stdout.readline()
    grandchild = psutil.Process(ours.pid).children()[0]
    try:
        end_session(ours.pid)
        assert ours.wait(5) == -signal.SIGKILL
        assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        ours.stdout.close()


def test_signals_first_asks_second_ends(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    ended = []
    with Signals(Flag(tmp_path / "stop")) as signals:
        signals.on_second_sigint = lambda: ended.append(True)
        os.kill(os.getpid(), signal.SIGINT)
        assert (tmp_path / "stop").exists()
        assert not ended
        os.kill(os.getpid(), signal.SIGTERM)
        assert not ended, "a second SIGTERM still waits"
        os.kill(os.getpid(), signal.SIGINT)
        assert ended
        assert signals.was_killed
    assert signal.getsignal(signal.SIGINT) is before


def test_a_stop_is_requested_when_storage_can_be_written_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = tmp_path / "away" / "stop"
    with Signals(Flag(stop)) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        stop.parent.mkdir()
        deadline = time.monotonic() + 60
        while not stop.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stop.exists()
        assert not signals.was_killed
    assert "stop: cannot be written now (No such file or directory)" in capsys.readouterr().err


def test_signals_are_left_alone_off_the_main_thread(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            with Signals(Flag(tmp_path / "stop")):
                assert signal.getsignal(signal.SIGTERM) is before
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not errors


# ---- many trials through Ray Tune


TRIALS = (
    {"name": "a", "do": "meet", "other": "b"},
    {"name": "b", "do": "meet", "other": "a"},
    {"name": "c", "do": "die once"},
    {"name": "d", "do": "diverge"},
    {"name": "e", "do": "bug"},
)


def run_all(trials: tuple[dict[str, Any], ...], **options: Any) -> dict[str, Exception | None]:
    """Run the trials; returns the error, if any, of each."""
    found: dict[int, Exception | None] = {}
    requests = [TrialRequest(Path("run") / trial["name"], TrainingRequest(trial, True)) for trial in trials]
    where: dict[str, Any] = {"name": "test", "run_dir": Path("run"), "poll": found.update}
    run_trials("trial_targets:trial", requests, **where, **options)
    return {str(TRIALS[number]["name"]): error for number, error in found.items()}


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
def test_trials_run_side_by_side_and_only_crashes_are_repeated(folder: Path) -> None:
    outcomes = run_all(TRIALS, parallel=2, cpus_per_trial=1, max_failures=1)
    assert list(map(outcomes.get, "abc")) == [None, None, None]
    assert set(outcomes) == set("abcde")
    assert isinstance(outcomes["d"], DivergedError)
    assert str(outcomes["d"]) == "step 3: loss is NaN."
    assert isinstance(outcomes["e"], MachineError)
    message = str(outcomes["e"])
    assert "\n" not in message
    assert "run/e/logs/worker-0.log: crashed (ZeroDivisionError: a bug in two lines) and all max_failures=1" in message
    starts = {name: (folder / f"starts-{name}").read_text().splitlines() for name in "abcde"}
    assert {name: len(lines) for name, lines in starts.items()} == {"a": 1, "b": 1, "c": 2, "d": 1, "e": 2}
    assert all(line.split()[0] == "1" for lines in starts.values() for line in lines)
    processes = [line.split()[1] for lines in starts.values() for line in lines]
    assert len(set(processes)) == len(processes), "two trials shared a process"
    assert "Traceback" in (folder / "run/e/logs/worker-0.log").read_text()


@pytest.mark.slow
def test_trials_run_on_a_cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with own_head(tmp_path_factory, cpus=2) as (head, port):
        errors = run_all(TRIALS[:4], address=f"127.0.0.1:{port}", parallel=2)
        kinds = {name: type(error) for name, error in errors.items()}
        assert kinds == {"a": type(None), "b": type(None), "c": MachineError, "d": DivergedError}
        assert head.poll() is None, "the cluster is not ours to end"


def test_an_address_is_host_and_port(folder: Path) -> None:
    with pytest.raises(InputError, match="host:port"):
        run_all(TRIALS, address="auto")
    assert not (folder / "run").exists()

"""The queue of jobs on a cluster: which job starts next, and how little it costs to wait."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cluster.jobs import job_queue
from cluster.jobs.job_queue import Queue, UnfinishedJob, fits_behind, wait_in_queue
from pretrain.common.errors import InputError, MachineError, StoppedError
from tests.json_server import serving

ROOT = Path(__file__).parents[2]
EIGHT_CPUS = [(8, 0)]
TWO_NODES = [(4, 0), (4, 0)]


def wants(low: int, high: int = 0, cpus: int = 1) -> UnfinishedJob:
    return UnfinishedJob("job", low, high or low, cpus)


@pytest.mark.parametrize(
    ("nodes", "ahead", "mine", "fits"),
    [
        (EIGHT_CPUS, [wants(1, 8)], wants(1), False),  # an elastic job may take all
        (EIGHT_CPUS, [wants(4)], wants(1, 8), True),  # and begins with the fewest
        (EIGHT_CPUS, [wants(4), wants(8)], wants(1), False),  # the one before it is not overtaken
        (EIGHT_CPUS, [wants(1, cpus=0)], wants(1), False),  # unnamed: all there are
        (TWO_NODES, [wants(2, cpus=3)], wants(1, cpus=2), False),  # two CPUs are free, on two nodes
        (TWO_NODES, [wants(2, cpus=3)], wants(2, cpus=1), True),
        (TWO_NODES, [wants(1, cpus=2)], wants(1, cpus=4), True),  # on the other node
        ([(8, 0), (2, 0)], [wants(1, cpus=2)], wants(1, cpus=8), True),  # the fullest node on which it fits is chosen
        (TWO_NODES, [wants(1)], wants(1, cpus=5), False),  # no node is that large
        (TWO_NODES, [wants(12)], wants(1), False),  # it waits for nodes, which are its own then
        ([(64, 4), (64, 4)], [wants(6, cpus=8)], wants(2, cpus=8), True),
        ([(64, 4), (64, 4)], [wants(6, cpus=8)], wants(3, cpus=8), False),  # CPUs are free, GPUs are not
        ([(9, 4), (64, 4)], [wants(4, cpus=8)], wants(2, cpus=8), False),  # and the other way round
        ([], [wants(1)], wants(1), False),  # a cluster that an autoscaler is to start
    ],
)
def test_a_job_starts_when_its_bundles_fit(
    nodes: list[tuple[int, int]], ahead: list[UnfinishedJob], mine: UnfinishedJob, fits: bool
) -> None:
    assert fits_behind(mine, ahead, nodes) == fits


class _Cluster:
    """A dashboard of 8 CPUs and jobs of 4 workers each, which records the requests."""

    def __init__(self, jobs: int) -> None:
        self.states = {f"job-{number}": "RUNNING" for number in range(jobs)}
        self.submitted = {name: number for number, name in enumerate(self.states, 1)}
        self.requests: list[str] = []

    def jobs(self) -> list[dict[str, Any]]:
        self.requests.append("all")
        jobs = [job for name in self.states if (job := self.job(name)) is not None]
        self.requests = self.requests[: -len(self.states)]
        return jobs[::-1]  # Ray has no order

    def job(self, name: str) -> dict[str, Any] | None:
        self.requests.append(name)
        if self.states[name] == "DELETED":
            return None
        needs = {"workers": "4", "most_workers": "4", "cpus_per_worker": "1"}
        job = {"submission_id": name, "status": self.states[name], "start_time": self.submitted[name]}
        return {**job, "metadata": needs}

    def nodes(self) -> list[tuple[int, int]]:
        self.requests.append("nodes")
        return EIGHT_CPUS


def test_jobs_start_in_the_order_of_their_submission() -> None:
    cluster: Any = _Cluster(4)
    assert Queue("job-1", cluster).poll(), "two fit"
    third, last = Queue("job-2", cluster), Queue("job-3", cluster)
    assert not third.poll()
    assert not last.poll()
    cluster.states["job-1"] = "FAILED"
    assert third.poll()
    assert not last.poll()
    cluster.states["job-0"] = "SUCCEEDED"
    assert last.poll()
    with pytest.raises(InputError, match="mine: Ray has no such job"):
        Queue("mine", cluster)


@pytest.mark.parametrize("end", ["DELETED", "STOPPED"])
def test_a_job_that_was_submitted_again_is_behind(end: str) -> None:
    cluster: Any = _Cluster(3)
    waiting = Queue("job-2", cluster)
    assert not waiting.poll()
    if end == "DELETED":
        cluster.states["job-0"] = end
    else:
        cluster.submitted["job-0"] = 99
    assert waiting.poll()


def test_a_poll_reads_two_jobs_however_many_there_are() -> None:
    cluster: Any = _Cluster(100)
    waiting = Queue("job-99", cluster)
    assert not waiting.poll()
    assert cluster.requests[0] == "all"
    assert cluster.requests.count("nodes") == 1
    cluster.requests.clear()
    for _ in range(98):
        assert not waiting.poll()
    assert len(cluster.requests) == 2 * 98, "all jobs and the nodes are not listed again"
    assert set(cluster.requests) == {f"job-{number}" for number in range(99)}, "every job is polled in time"


def test_finished_jobs_are_skipped_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a night of many short jobs: the job would start minutes late."""
    cluster: Any = _Cluster(20)
    listed = cluster.jobs

    def jobs() -> list[dict[str, Any]]:
        jobs = listed()
        cluster.states.update(dict.fromkeys(list(cluster.states)[:-1], "SUCCEEDED"))
        return jobs

    monkeypatch.setattr(cluster, "jobs", jobs)
    monkeypatch.setattr(job_queue, "sleep", lambda *_: pytest.fail("it waits, though it may start"))
    job_queue.wait_for_turn("job-19", cluster, lambda: False)
    assert "nodes" not in cluster.requests


def test_a_hundred_waiting_jobs_ask_little_of_the_dashboard() -> None:
    assert sum(2 / job_queue.pause_seconds(ahead) for ahead in range(1, 101)) < 25
    assert job_queue.pause_seconds(1) < 3


@pytest.mark.parametrize("stopped", [False, True])
def test_a_waiting_job_outlives_a_silent_head_and_stops(monkeypatch: pytest.MonkeyPatch, stopped: bool) -> None:
    """A stop that comes while the head is polled must not be lost, though the job may start."""
    answers: list[Any] = [MachineError("away"), False, True]

    class Answers:
        ahead: ClassVar = ["other"]

        def poll(self) -> bool:
            answer = answers.pop(0)
            if not answers and stopped:
                os.kill(os.getpid(), signal.SIGTERM)
            if isinstance(answer, Exception):
                raise answer
            return answer

    monkeypatch.setattr(job_queue, "find_dashboard", lambda: "http://127.0.0.1:9")
    monkeypatch.setattr(job_queue, "Queue", lambda *_: Answers())
    monkeypatch.setattr(job_queue, "pause_seconds", lambda _: 0.01)
    with pytest.raises(StoppedError) if stopped else contextlib.nullcontext():
        wait_in_queue("mine")
    assert not answers


@pytest.fixture
def dashboard() -> Iterator[str]:
    """It has a job that runs for two questions, and one that waits for it."""
    left = [404, 200, 200]
    needs = {"workers": "1", "most_workers": "8", "cpus_per_worker": "0", "config": "x" * 4000}
    job = {"submission_id": "first", "status": "RUNNING", "start_time": 1, "metadata": needs}
    mine = {**job, "submission_id": "mine", "start_time": 2}
    driver = {**job, "submission_id": None, "metadata": None}
    nodes = [{"state": state, "resources_total": {"CPU": 8.0}} for state in ("ALIVE", "DEAD")]

    def answer(path: str, headers: Mapping[str, str]) -> tuple[int, Any]:
        if headers["Authorization"] != "Bearer secret":
            return 401, {}
        if path == "/api/jobs/":
            return 200, [mine, driver, job]
        if path == "/api/jobs/first":
            return left.pop(), job
        return 200, {"data": {"result": {"result": nodes}}}

    with serving(answer) as url:
        yield url


def test_a_wait_loads_nothing_heavy(dashboard: str) -> None:
    """Each job that waits is a process on the cluster's head."""
    script = (
        "import sys, finetune.cli; from cluster.jobs import entrypoint, job_queue\n"
        f"job_queue.find_dashboard = lambda: {dashboard!r}\n"
        "job_queue.pause_seconds = lambda _: 0.01\n"
        "job_queue.wait_in_queue('mine')\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print({'ray', 'torch', 'pydantic', 'numpy', 'requests', 'psutil'} & loaded)\n"
    )
    how: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "RAY_AUTH_TOKEN": "secret"}, **how)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["mine: queued behind first", "mine: starts", "set()"]


def test_a_token_that_is_refused(dashboard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    with pytest.raises(MachineError, match="answered with HTTP 401"):
        job_queue.Dashboard(dashboard).jobs()

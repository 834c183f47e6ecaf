"""The queue of a cluster: a job waits until the jobs submitted before it leave enough capacity.

Hundreds of jobs may wait on the head node, so neither Ray nor torch is imported here. A waiting job reads the list of
all jobs once; then it polls a few of them, two at a time, through the dashboard's REST API.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from cluster.workers.nodes import NodeSize, choose_elastic_cpus
from pretrain.common.errors import InputError, MachineError, StoppedError

FINISHED = ("STOPPED", "SUCCEEDED", "FAILED")
QUEUED = "queued behind "  # the last line of a waiting job's output is `NAME: queued behind OTHERS`
DONE = "finished"  # the last line of a finished training's output is `NAME: finished`

_REQUEST_TIMEOUT_SECONDS = 10.0
_UNREACHABLE_SECONDS = 600.0  # how long a waiting job tolerates a head that does not respond
_STOP_CHECK_SECONDS = 0.5  # time between two checks whether the job was stopped
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 2.0, 30.0  # minimum and maximum time between two polls
_MAX_NAMES = 3  # maximum number of job names in a log line
_NODE_REFRESH_SECONDS = 60.0  # time between two reads of the list of nodes, unless a job finishes

# Prints the dashboard's URL. Runs in a child process: importing Ray takes 60 MB, which Python does not free.
_FIND_DASHBOARD = (
    "import os; from ray.dashboard.utils import ray_address_to_api_server_url as find; "
    "print(find(os.environ['RAY_ADDRESS']))"
)


@dataclass(frozen=True)
class UnfinishedJob:
    """A running or waiting job, and the workers that it requests."""

    name: str
    min_workers: int
    max_workers: int
    cpus_per_worker: int  # number of CPUs per worker; 0: the cluster's CPUs are divided among the workers
    submitted_at: int = 0  # Ray's start_time of the job; a later job of the same name has another start_time


def wait_in_queue(name: str) -> None:
    """Return when the unfinished jobs that were submitted before the job `name` leave enough capacity for it.

    So jobs start in the order of their submission, and none starves. Ray keeps the list of jobs, and chooses the nodes
    for their workers.

    Raises:
        StoppedError: a SIGTERM arrived.
        MachineError: the cluster's head did not respond for ten minutes.
    """
    received_signals: list[int] = []
    previous_handler = signal.signal(signal.SIGTERM, lambda number, _: received_signals.append(number))
    try:
        wait_for_turn(name, Dashboard(find_dashboard()), lambda: bool(received_signals))
    except MachineError:
        if received_signals:  # the signal has also stopped the child process that finds the dashboard
            raise StoppedError(f"{name}: stopped; nothing was started.") from None
        raise
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def wait_for_turn(name: str, dashboard: Dashboard, is_stopped: Callable[[], bool]) -> None:
    """Wait until the job may start. Raises `StoppedError` if `is_stopped()` is true before that."""
    queue: Queue | None = None
    responded_at, printed_ahead = time.monotonic(), ""  # last response of the head; jobs ahead, as last printed
    while True:
        try:
            if queue is None:
                queue = Queue(name, dashboard)
            may_start, responded_at = queue.poll(), time.monotonic()
        except MachineError:  # the head may be unreachable for a while
            may_start = False
            if time.monotonic() - responded_at > _UNREACHABLE_SECONDS:
                raise
        if is_stopped():
            behind = f" behind {printed_ahead}" if printed_ahead else ""
            raise StoppedError(f"{name}: stopped while waiting in the queue{behind}; nothing was started.")
        if may_start:
            if printed_ahead:
                print(f"{name}: starts", flush=True)
            return
        if queue and printed_ahead != (printed_ahead := _join_names(queue.ahead)):
            print(f"{name}: {QUEUED}{printed_ahead}", flush=True)
        sleep(pause_seconds(len(queue.ahead) if queue else 0), is_stopped)


def pause_seconds(num_ahead: int) -> float:
    """Return the seconds between polls with `num_ahead` jobs ahead: 100 waiting jobs send 20 requests/s in total."""
    return min(_MIN_PAUSE_SECONDS * (1 + num_ahead / 8), _MAX_PAUSE_SECONDS)


class Queue:
    """The job `name`, and the jobs ahead of it: the unfinished jobs that were submitted before it.

    Each poll reads the states of two jobs ahead: the oldest, which started first, and one of the others in turn. If
    either has finished, the states of two more are read immediately.

    Raises:
        InputError: the dashboard does not list the job `name`.
        MachineError: the dashboard does not respond.
    """

    def __init__(self, name: str, dashboard: Dashboard) -> None:
        unfinished = sorted(  # the doctor's jobs and other programs' have no `workers`
            (job for job in dashboard.jobs() if job["status"] not in FINISHED and "workers" in (job["metadata"] or {})),
            key=lambda job: job["start_time"] or 0,
        )
        names = [job["submission_id"] for job in unfinished]
        if name not in names:
            raise InputError(f"{name}: Ray has no such job.")
        *self._ahead, self._job = (_parse_job(job) for job in unfinished[: names.index(name) + 1])
        self._dashboard = dashboard
        self._next_index = 0
        self._nodes_read_at = float("-inf")

    @property
    def ahead(self) -> list[str]:
        """Names of the unfinished jobs ahead, oldest first."""
        return [job.name for job in self._ahead]

    def poll(self) -> bool:
        """Return whether the job may start."""
        while finished := {job.name for job in self._jobs_to_poll() if self._has_finished(job)}:
            self._ahead = [job for job in self._ahead if job.name not in finished]
            self._nodes_read_at = float("-inf")  # there may be capacity now
        if not self._ahead:
            return True
        if time.monotonic() - self._nodes_read_at < _NODE_REFRESH_SECONDS:
            return False
        nodes = self._dashboard.nodes()
        self._nodes_read_at = time.monotonic()
        return fits_behind(self._job, self._ahead, nodes)

    def _has_finished(self, job: UnfinishedJob) -> bool:
        current = self._dashboard.job(job.name)
        return current is None or current["status"] in FINISHED or (current["start_time"] or 0) != job.submitted_at

    def _jobs_to_poll(self) -> list[UnfinishedJob]:
        """Return the jobs ahead whose states are read now: the oldest, and one of the others in turn."""
        if len(self._ahead) < 2:
            return self._ahead
        self._next_index = self._next_index % (len(self._ahead) - 1) + 1
        return [self._ahead[0], self._ahead[self._next_index]]


def fits_behind(job: UnfinishedJob, ahead: Sequence[UnfinishedJob], nodes: Sequence[NodeSize]) -> bool:
    """Return whether the workers of `job` fit on `nodes` together with the workers of the jobs `ahead` of it.

    Jobs ahead reserve their maximum number of workers, `job` its minimum. If not even the minimum of a job ahead fits,
    that job waits for nodes, and no later job overtakes it.
    """
    free = [list(node) for node in nodes]
    for job_ahead in ahead:
        if _reserve_workers(free, nodes, job_ahead, job_ahead.max_workers) < job_ahead.min_workers:
            return False
    return _reserve_workers(free, nodes, job, job.min_workers) == job.min_workers


def _reserve_workers(free: list[list[int]], nodes: Sequence[NodeSize], job: UnfinishedJob, limit: int) -> int:
    """Reserve free CPUs and GPUs for up to `limit` workers, each on the fullest node where it fits; return how many."""
    try:
        cpus = job.cpus_per_worker or choose_elastic_cpus(nodes, job.min_workers, job.max_workers, 0, "")
    except MachineError:
        return 0
    gpus = 1 if any(gpu for _, gpu in nodes) else 0
    for reserved in range(limit):
        fitting = [node for node in free if node[0] >= cpus and node[1] >= gpus]
        if not fitting:
            return reserved
        chosen = min(fitting, key=lambda node: (node[1], node[0]))
        chosen[0] -= cpus
        chosen[1] -= gpus
    return limit


class Dashboard:
    """REST client of Ray's dashboard at `url`, with the cluster's token; `MachineError` if it does not respond."""

    def __init__(self, url: str) -> None:
        self._url, self._host = url, urlsplit(url).netloc
        token = _read_token()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def jobs(self) -> list[dict[str, Any]]:
        """Return all submitted jobs, with their metadata."""
        return [job for job in self._get("/api/jobs/") or () if job["submission_id"]]

    def job(self, name: str) -> dict[str, Any] | None:
        """Return the job with this name; None if it was deleted."""
        return self._get(f"/api/jobs/{quote(name, safe='')}")

    def nodes(self) -> list[NodeSize]:
        """Return (number of CPUs, number of GPUs) of each live node."""
        response = self._get("/api/v0/nodes?detail=1&limit=10000") or {}
        nodes = [node["resources_total"] for node in response["data"]["result"]["result"] if node["state"] == "ALIVE"]
        return [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in nodes]

    def _get(self, path: str) -> Any:
        connection = http.client.HTTPConnection(self._host, timeout=_REQUEST_TIMEOUT_SECONDS)
        try:
            connection.request("GET", path, headers=self._headers)
            response = connection.getresponse()
            body = response.read()
            if response.status == http.client.NOT_FOUND:
                return None
            if response.status != http.client.OK:
                raise MachineError(f"{self._url}{path}: answered with HTTP {response.status}.")
            return json.loads(body)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise MachineError(f"{self._url}: the cluster's head does not answer ({type(error).__name__}).") from None
        finally:
            connection.close()


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more


def _parse_job(job: Mapping[str, Any]) -> UnfinishedJob:
    worker_counts = (int(job["metadata"][key]) for key in ("workers", "most_workers", "cpus_per_worker"))
    return UnfinishedJob(job["submission_id"], *worker_counts, submitted_at=job["start_time"] or 0)


def find_dashboard() -> str:
    """Return the URL of Ray's dashboard on the cluster that this job runs on."""
    result = subprocess.run([sys.executable, "-c", _FIND_DASHBOARD], capture_output=True, text=True)
    url = (result.stdout.split() or [""])[-1]
    if result.returncode or not url.startswith("http"):
        reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise MachineError(f"{os.environ['RAY_ADDRESS']}: Ray did not report the address of its dashboard ({reason}).")
    return url


def _read_token() -> str:
    """Return the cluster's token from the variable or file that Ray reads; empty if there is none."""
    if "RAY_AUTH_TOKEN" in os.environ:
        return os.environ["RAY_AUTH_TOKEN"]
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def sleep(seconds: float, is_stopped: Callable[[], bool]) -> None:
    """Sleep for `seconds`; return early if `is_stopped()` is true."""
    deadline = time.monotonic() + seconds
    while not is_stopped() and (remaining := deadline - time.monotonic()) > 0:
        time.sleep(min(remaining, _STOP_CHECK_SECONDS))

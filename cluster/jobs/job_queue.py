"""A job's turn on the cluster: it waits until all jobs submitted before it leave room.

Hundreds of jobs may wait on the head, so neither Ray nor torch is imported here, all jobs are read once, and then a few
are asked for, one by one, over the dashboard's REST interface.
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

from cluster.workers.nodes import cpus_that_fit
from pretrain.common.errors import InputError, MachineError, StoppedError

ENDED = ("STOPPED", "SUCCEEDED", "FAILED")

_ANSWER_SECONDS = 10.0
_SILENCE_SECONDS = 600.0  # of the cluster's head, while a job waits; without a head the job is ended anyway
_STOP_SECONDS = 0.5  # after which a stop is heard
_SHORTEST_PAUSE_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 30.0
_FEW = 3  # names of jobs, in the log
_NODES_SECONDS = 60.0  # after which nodes are asked for again, though no job has ended

# Prints the dashboard's URL. In a process of its own: importing Ray takes 60 MB, which Python does not give back.
_FIND_DASHBOARD = (
    "import os; from ray.dashboard.utils import ray_address_to_api_server_url as find; "
    "print(find(os.environ['RAY_ADDRESS']))"
)


@dataclass(frozen=True)
class Waiting:
    """A job in the queue: `low` to `high` workers of `cpus` CPUs each, 0 for a share of them all.

    `submitted` tells it from a later job of the same name, which is behind.
    """

    name: str
    low: int
    high: int
    cpus: int
    submitted: int = 0


def await_turn(name: str) -> None:
    """Return when all jobs submitted before `name` that have not ended leave room for it.

    So jobs begin in the order of their submission and none starves. Ray keeps the jobs and their needs; where room is,
    Ray decides.

    Raises:
        StoppedError: a SIGTERM came.
        MachineError: the cluster's head did not answer for ten minutes.
    """
    stopped: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    try:
        _wait(name, Dashboard(_dashboard()), lambda: bool(stopped))
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait(name: str, dashboard: Dashboard, stopped: Callable[[], bool]) -> None:
    queue: Queue | None = None
    heard, told = time.monotonic(), ""
    while True:
        try:
            if queue is None:
                queue = Queue(name, dashboard)
            its_turn, heard = queue.look(), time.monotonic()
        except MachineError:  # a head that is away for a while
            its_turn = False
            if time.monotonic() - heard > _SILENCE_SECONDS:
                raise
        if stopped():
            raise StoppedError(f"{name}: stopped while it waited for {told or 'its turn'}; nothing was begun.")
        if its_turn:
            return
        if queue and told != (told := _few(queue.ahead)):
            print(f"{name}: waits for {told}", flush=True)
        _sleep(pause(len(queue.ahead) if queue else 0), stopped)


def pause(ahead: int) -> float:
    """Seconds between two looks with so many jobs ahead: the dashboard gets about 20 requests a second from 100 jobs."""
    return min(_SHORTEST_PAUSE_SECONDS * (1 + ahead / 8), _LONGEST_PAUSE_SECONDS)


class Queue:
    """The jobs before one, as they end.

    The oldest is asked for at each look, since it began first, and of the others one after another. As long as one of
    them has ended, the next are asked for at once.

    Raises `InputError` where the dashboard knows no such job, and `MachineError` where it does not answer.
    """

    def __init__(self, name: str, dashboard: Dashboard) -> None:
        active = sorted(
            (job for job in dashboard.jobs() if job["status"] not in ENDED and "workers" in (job["metadata"] or {})),
            key=lambda job: job["start_time"] or 0,
        )
        names = [job["submission_id"] for job in active]
        if name not in names:
            raise InputError(f"{name}: Ray knows no such job.")
        *self._ahead, self._mine = (_waiting(job) for job in active[: names.index(name) + 1])
        self._dashboard = dashboard
        self._next = 0
        self._looked = float("-inf")  # at the nodes

    @property
    def ahead(self) -> list[str]:
        """The jobs that have not ended, oldest first."""
        return [job.name for job in self._ahead]

    def look(self) -> bool:
        """Whether it is the job's turn."""
        while ended := {job.name for job in self._due() if self._has_ended(job)}:
            self._ahead = [job for job in self._ahead if job.name not in ended]
            self._looked = float("-inf")  # there may be room now
        if not self._ahead:
            return True
        if time.monotonic() - self._looked < _NODES_SECONDS:
            return False
        nodes = self._dashboard.nodes()
        self._looked = time.monotonic()
        return leaves_room(nodes, self._ahead, self._mine)

    def _has_ended(self, job: Waiting) -> bool:
        now = self._dashboard.job(job.name)
        return now is None or now["status"] in ENDED or (now["start_time"] or 0) != job.submitted

    def _due(self) -> list[Waiting]:
        """The jobs to ask for at this look: the oldest, and another."""
        if len(self._ahead) < 2:
            return self._ahead
        self._next = self._next % (len(self._ahead) - 1) + 1
        return [self._ahead[0], self._ahead[self._next]]


def leaves_room(nodes: Sequence[tuple[int, int]], ahead: Sequence[Waiting], mine: Waiting) -> bool:
    """Whether the bundles of `mine` fit beside those of the jobs before it on `nodes`, a list of (CPUs, GPUs).

    Those before it have, or will take, as many workers as they may; it can begin with the fewest. A job before it that
    does not fit itself waits for nodes, and is not overtaken.
    """
    free = [list(node) for node in nodes]
    for job in ahead:
        if _place(free, nodes, job, job.high) < job.low:
            return False
    return _place(free, nodes, mine, mine.low) == mine.low


def _place(free: list[list[int]], nodes: Sequence[tuple[int, int]], job: Waiting, most: int) -> int:
    """Take up to `most` of the job's bundles from `free`, each from the fullest node that has room; how many it got."""
    try:
        cpus = job.cpus or cpus_that_fit(nodes, job.low, job.high, 0, "")
    except MachineError:
        return 0
    gpus = 1 if any(gpu for _, gpu in nodes) else 0
    for placed in range(most):
        fitting = [node for node in free if node[0] >= cpus and node[1] >= gpus]
        if not fitting:
            return placed
        chosen = min(fitting, key=lambda node: (node[1], node[0]))
        chosen[0] -= cpus
        chosen[1] -= gpus
    return most


class Dashboard:
    """What is asked of a cluster's dashboard at `url`, with the cluster's token; `MachineError` where it does not answer."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._url, self._host = url, parts.netloc
        token = _token()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def jobs(self) -> list[dict[str, Any]]:
        """All submitted jobs, with their metadata."""
        return [job for job in self._get("/api/jobs/") or () if job["submission_id"]]

    def job(self, name: str) -> dict[str, Any] | None:
        """One job; None where it was deleted."""
        return self._get(f"/api/jobs/{quote(name, safe='')}")

    def nodes(self) -> list[tuple[int, int]]:
        """(CPUs, GPUs) of the living nodes."""
        answer = self._get("/api/v0/nodes?detail=1&limit=10000") or {}
        nodes = [node["resources_total"] for node in answer["data"]["result"]["result"] if node["state"] == "ALIVE"]
        return [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in nodes]

    def _get(self, path: str) -> Any:
        connection = http.client.HTTPConnection(self._host, timeout=_ANSWER_SECONDS)
        try:
            connection.request("GET", path, headers=self._headers)
            answer = connection.getresponse()
            body = answer.read()
            if answer.status == http.client.NOT_FOUND:
                return None
            if answer.status != http.client.OK:
                raise MachineError(f"{self._url}{path}: answered with HTTP {answer.status}.")
            return json.loads(body)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise MachineError(f"{self._url}: the cluster's head does not answer ({type(error).__name__}).") from None
        finally:
            connection.close()


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(names[:_FEW]) + more


def _waiting(job: Mapping[str, Any]) -> Waiting:
    needs = {key: int(job["metadata"][key]) for key in ("workers", "most_workers", "cpus_per_worker")}
    return Waiting(
        job["submission_id"], needs["workers"], needs["most_workers"], needs["cpus_per_worker"], job["start_time"] or 0
    )


def _dashboard() -> str:
    """URL of the dashboard of the cluster that this job runs on."""
    done = subprocess.run([sys.executable, "-c", _FIND_DASHBOARD], capture_output=True, text=True)
    url = (done.stdout.split() or [""])[-1]
    if done.returncode or not url.startswith("http"):
        reason = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise MachineError(f"{os.environ['RAY_ADDRESS']}: Ray did not name its dashboard ({reason}).")
    return url


def _token() -> str:
    """The cluster's token, from where Ray takes it; empty where there is none."""
    if "RAY_AUTH_TOKEN" in os.environ:
        return os.environ["RAY_AUTH_TOKEN"]
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _sleep(seconds: float, stopped: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while not stopped() and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _STOP_SECONDS))

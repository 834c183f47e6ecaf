"""Jobs on a Ray cluster, from the client's side: submit, status, logs, stop, list, delete.

A run's name is its id everywhere: Ray's submission id, the run folder's name and the id in W&B. So a run cannot be
started twice at once, and submitting it again continues it. What the cluster does with a job is in `cluster.jobs.entrypoint`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import local
from cluster.jobs.job_queue import ENDED
from cluster.workers.address import answers_without_token, check_dashboard, redacted, without_password
from cluster.workers.driver import choose_token
from cluster.workers.nodes import nodes_fit
from cluster.workers.processes import JOB_ENTRYPOINT
from pretrain.common.errors import DivergedError, InputError, MachineError, RunError, StoppedError
from pretrain.common.worker import WAITING_FILE

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

KINDS = ("pretrain", "finetune", "prepare")

_JOB_BYTES = 90 << 20  # of a job on the head while it waits: Ray's supervisor has 73 MiB, our process 13
_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.5
_WATCH_SECONDS = 2.5
_AGENT_SECONDS = 20.0
_MEANING = {
    InputError.exit_code: "your input; see its log",
    MachineError.exit_code: "the machine or cluster was not fit; see its log",
    DivergedError.exit_code: "training diverged; see its log",
    StoppedError.exit_code: "stopped, its state is saved; submit it again to go on",
}


@dataclass(frozen=True)
class Job:
    """One run to submit.

    Attributes:
        kind: pretrain, finetune or prepare.
        name: the run's id.
        config: the resolved settings, as JSON has them.
        run_dir: the run folder.
        folder: working directory on the cluster, which relative paths of the config start from.
        workers: at least and at most so many.
        cpus_per_worker: 0 where the cluster's are shared out.
    """

    kind: str
    name: str
    config: dict[str, Any]
    run_dir: Path
    folder: Path
    workers: tuple[int, int]
    cpus_per_worker: int


class Jobs:
    """The jobs of one cluster.

    Args:
        address: URL of the cluster's dashboard, such as http://127.0.0.1:8265; empty takes the local one of `up`.
        plain_http: send the token over http to other machines than this one, too.

    Attributes:
        address: that URL, as it was given; `shown` is the same for messages, without a password.

    Raises:
        InputError: no URL; no local cluster; the token is missing or wrong, or would leave this machine unencrypted.
        MachineError: nothing answers there.
    """

    def __init__(self, address: str = "", *, plain_http: bool = False) -> None:
        cluster = local.find() if not address else None
        # Of the supervisor, who gives the driver so long for a last checkpoint; Ray's own default is 3 s. A cluster of
        # ours has it set, and workers without a special environment start sooner.
        wait = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(local.STOP_SECONDS)}}
        self._runtime_env = {} if cluster else wait
        if not address and cluster is None:
            raise InputError("No cluster: name one with --address URL, or start one here with ./launch.sh up.")
        self.address = address or (cluster.dashboard if cluster else "")
        self.shown = without_password(self.address)
        if cluster is not None and "RAY_AUTH_TOKEN" not in os.environ:
            local.use_token(cluster)
        elif address:
            choose_token(address)
        check_dashboard(self.address, plain_http=plain_http)
        from ray.job_submission import JobSubmissionClient

        logging.getLogger("ray.dashboard").setLevel(logging.WARNING)  # it tells each closed connection
        with self._answers():
            self._client: JobSubmissionClient = JobSubmissionClient(self.address)
            self._client.list_jobs()  # the version is told to anyone

    def is_open(self) -> bool:
        """Whether the cluster answers without a token, so that whoever reaches it can run code there."""
        return answers_without_token(self.address)

    def submit(self, job: Job, *, wait_for_nodes: bool = False) -> None:
        """Start the run, or continue it where it was begun; it goes on when this process has ended.

        With `wait_for_nodes` a cluster that is too small as it is will do: the run waits for nodes on it.

        Raises:
            InputError: it runs or waits already.
            MachineError: its workers would not fit on the cluster, or its head holds no more jobs.
        """
        known = self.all()
        before = next((one for one in known if one.submission_id == job.name), None)
        if before is not None and before.status not in ENDED:
            raise InputError(
                f"{job.name}: is {before.status.lower()} already on {self.shown}. Watch it with `logs -f {job.name}`, "
                f"end it with `stop {job.name}`, or choose another name."
            )
        found = nodes_of(self.address)
        _check_head(found, sum(one.status not in ENDED for one in known), self.shown)
        if not wait_for_nodes:
            _check_room(found, job, self.shown)
        if before is not None:
            self._forget(before)
        self.start(job.name, JOB_ENTRYPOINT, _metadata(job))

    def start(self, name: str, module: str, metadata: dict[str, str]) -> None:
        """Have `python -m MODULE` run on the cluster as a job of this name; `InputError` where there is one already."""
        deadline = time.monotonic() + _AGENT_SECONDS
        with self._answers():
            while True:
                try:
                    self._client.submit_job(
                        submission_id=name,
                        entrypoint=f"python -m {module}",
                        metadata=metadata,
                        runtime_env=self._runtime_env,
                    )
                    return
                except RuntimeError as error:
                    if "already exists" in str(error):
                        raise InputError(f"{name}: was submitted by another at this moment.") from None
                    # A cluster that has just come up has no agent for jobs yet.
                    if "No available agent" not in str(error) or time.monotonic() > deadline:
                        raise
                time.sleep(_POLL_SECONDS)

    def find(self, name: str) -> JobDetails | None:
        """The job of this name; None where there is none."""
        return next((job for job in self.all() if job.submission_id == name), None)

    def get(self, name: str) -> JobDetails:
        """The job of this name; `InputError` where there is none."""
        job = self.find(name)
        if job is None:
            known = ", ".join(str(job.submission_id) for job in self.all()) or "none"
            raise InputError(f"{name}: no such job on {self.shown}. There are: {known}.")
        return job

    def all(self) -> list[JobDetails]:
        """Jobs by the time of their submission; Ray's other drivers are left out."""
        with self._answers():
            found = [job for job in self._client.list_jobs() if job.submission_id]
        return sorted(found, key=lambda job: job.start_time or 0)

    def log(self, name: str) -> str:
        """All that the job has printed."""
        self.get(name)
        with self._answers():
            return self._client.get_job_logs(name)

    def follow(self, name: str) -> Iterator[str]:
        """What the job prints, piece by piece, to its end."""
        import asyncio

        self.get(name)
        pieces = self._client.tail_job_logs(name)
        loop = asyncio.new_event_loop()
        try:
            while True:
                try:
                    yield loop.run_until_complete(pieces.__anext__())  # type: ignore[arg-type]
                except StopAsyncIteration:
                    return
        finally:
            loop.close()

    def stop(self, name: str, seconds: float = local.STOP_SECONDS) -> JobDetails:
        """Ask the job to save a checkpoint and end, and wait for that; a job that has ended stays as it is."""
        job = self.get(name)
        if job.status not in ENDED:
            with self._answers():
                self._client.stop_job(name)
        return self.wait(name, seconds)

    def wait(self, name: str, seconds: float = float("inf")) -> JobDetails:
        """The job when it has ended; `MachineError` after so many seconds."""
        deadline = time.monotonic() + seconds
        while (job := self.get(name)).status not in ENDED:
            if time.monotonic() > deadline:
                raise MachineError(
                    f"{name}: is still {job.status.lower()} after {seconds:.0f} s. Ask its `status` again."
                )
            time.sleep(_POLL_SECONDS)
        return job

    def delete(self, name: str) -> None:
        """Forget a job that has ended; its run folder stays."""
        job = self.get(name)
        if job.status not in ENDED:
            raise InputError(f"{name}: is {job.status.lower()}. End it with `stop {name}` first.")
        self._forget(job)

    def _forget(self, job: JobDetails) -> None:
        # Ray's own watch of a job looks once a second, and would write down as failed what it finds no more.
        passed = time.time() - (job.end_time or 0) / 1000
        time.sleep(min(_WATCH_SECONDS, max(0.0, _WATCH_SECONDS - passed)))
        with self._answers():
            self._client.delete_job(str(job.submission_id))

    @contextlib.contextmanager
    def _answers(self) -> Iterator[None]:
        """What Ray's client raises, as one line of ours."""
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError:
            raise InputError(
                f"{self.shown}: the cluster refuses this token. Put the cluster's own into RAY_AUTH_TOKEN_PATH (a file "
                "of mode 0600) or ~/.ray/auth_token."
            ) from None
        except RunError:
            raise
        except Exception as error:
            raise MachineError(
                f"{self.shown}: the cluster did not answer as Ray does ({redacted(error, self.address)})."
            ) from None


def _check_room(nodes: list[dict[str, Any]], job: Job, address: str) -> None:
    sizes = [(int(node["resources_total"].get("CPU", 0)), int(node["resources_total"].get("GPU", 0))) for node in nodes]
    needed = 1 if job.kind == "prepare" else job.workers[0]
    try:
        nodes_fit(sizes, needed, job.cpus_per_worker, f"the cluster at {address}")
    except MachineError as error:
        raise MachineError(f"{error} Where nodes will come, add --wait-for-nodes.") from None


def _check_head(nodes: list[dict[str, Any]], jobs: int, address: str) -> None:
    """Refuse (`MachineError`) a job that the head has no memory for: it would take all others with it."""
    memory = next((node["resources_total"].get("memory", 0) for node in nodes if node["is_head_node"]), 0)
    if memory and (jobs + 1) * _JOB_BYTES > memory:
        raise MachineError(
            f"the cluster at {address} runs or holds {jobs} jobs, as many as the memory of its head allows "
            f"({memory / 2**30:.1f} GiB, {_JOB_BYTES >> 20} MiB each). Submit again when some have ended."
        )


def nodes_of(dashboard: str) -> list[dict[str, Any]]:
    """The living nodes, by the dashboard: node_id, node_ip, resources_total and more. The token must be set."""
    from ray.util.state import list_nodes

    try:
        found = list_nodes(address=dashboard, timeout=int(_ANSWER_SECONDS), raise_on_missing_output=False)
    except Exception as error:
        raise MachineError(
            f"{without_password(dashboard)}: told nothing of its nodes ({redacted(error, dashboard)})."
        ) from None
    return [node for node in map(vars, found) if node["state"] == "ALIVE"]


def run_folder(name: str, address: str = "", *, plain_http: bool = False) -> Path | None:
    """The run folder of a job; None where no cluster is named and none runs here, or that has no such job."""
    if not address and local.find() is None:
        return None
    jobs = Jobs(address, plain_http=plain_http)
    job = jobs.get(name) if address else jobs.find(name)
    folder = (job.metadata or {}).get("run_dir") if job else None
    return Path(folder) if folder else None


def describe(job: JobDetails) -> str:
    """One job for the terminal: its state, what that means, and how far its run is."""
    lines = [f"{job.submission_id}: {state(job)}"]
    lines.append(f"  submitted {clock(job.start_time)}, {_duration(job)}")
    metadata = job.metadata or {}
    if "run_dir" in metadata:
        lines.append(f"  run folder {metadata['run_dir']}")
        lines += [f"  {line}" for line in progress(job)]
    return "\n".join(lines)


def state(job: JobDetails) -> str:
    """Ray's word for the job's state, and ours for its exit code."""
    word = str(job.status.value).lower()
    code = job.driver_exit_code
    if word == "failed" and code is not None:
        return f"failed with exit code {code}: {_MEANING.get(code, 'crashed; see its log')}"
    if word == "failed" and job.message:
        return f"failed: {' '.join(job.message.split())[:200]}"
    return word


def exit_code(job: JobDetails) -> int:
    """The code of a process that followed the job to its end."""
    if job.status == "SUCCEEDED":
        return 0
    if job.status == "STOPPED":
        return StoppedError.exit_code
    return job.driver_exit_code or MachineError.exit_code


def progress(job: JobDetails) -> list[str]:
    """How far a job's run is by its folder, and what it waits for; [] where that cannot be seen from here."""
    run_dir = Path((job.metadata or {}).get("run_dir", "/nowhere"))
    return [*(_waiting(run_dir) if job.status not in ENDED else ()), *_trained(run_dir)]


def _waiting(run_dir: Path) -> list[str]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        notice = json.loads((run_dir / "logs" / WAITING_FILE).read_text(encoding="utf-8"))
        return [f"{notice['message']}, for {_clock(time.time() - notice['time'])}"]
    return []


def _trained(run_dir: Path) -> list[str]:
    from pretrain.tracking.records import is_training, read_records

    try:
        records = read_records(run_dir)
    except (RunError, OSError):
        return []
    last = next((record for record in reversed(records) if is_training(record)), None)
    if last is None:
        return []
    loss, rate = last.get("loss"), last.get("tokens_per_second") or 0.0
    loss = "not finite" if loss is None else f"{loss:.4f}"
    return [f"step {last['step']:,}, loss {loss}, {rate:,.0f} tokens/s"]


def _metadata(job: Job) -> dict[str, str]:
    """All that `cluster.jobs.entrypoint` needs, so nothing is uploaded and nothing need be found."""
    return {
        "bertrain": job.kind,
        "config": json.dumps(job.config, separators=(",", ":")),
        "folder": str(job.folder),
        "run_dir": str(job.folder / job.run_dir),
        "workers": str(job.workers[0]),
        "most_workers": str(job.workers[1]),
        "cpus_per_worker": str(job.cpus_per_worker),
    }


def clock(milliseconds: int | None) -> str:
    """A time of Ray's in this machine's zone."""
    return time.strftime("%F %T", time.localtime((milliseconds or 0) / 1000))


def _duration(job: JobDetails) -> str:
    end = (job.end_time or time.time() * 1000) / 1000
    return f"{'ran' if job.status in ENDED else 'for'} {_clock(end - (job.start_time or 0) / 1000)}"


def _clock(seconds: float) -> str:
    hours, rest = divmod(max(0, int(seconds)), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"

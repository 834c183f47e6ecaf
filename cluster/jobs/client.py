"""Jobs on a Ray cluster, from the client's side: submit, status, logs, stop, list, delete.

A run's name is its id everywhere: Ray's submission id, the run folder's name and the id in W&B. So a run cannot be
started twice at the same time, and submitting it again continues it. Each job runs `cluster.jobs.entrypoint`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.jobs.job_queue import DONE, FINISHED, QUEUED
from cluster.workers import local
from cluster.workers.address import (
    answers_without_token,
    check_dashboard,
    redact_credentials,
    redact_error,
    token_rejected_error,
)
from cluster.workers.driver import set_token_variables
from cluster.workers.nodes import choose_cpus
from cluster.workers.processes import JOB_COMMAND
from pretrain.common.addresses import RUNS_VARIABLE, is_remote, local_run, runs_folder
from pretrain.common.commands import program
from pretrain.common.errors import DivergedError, InputError, MachineError, NothingSavedError, RunError, StoppedError
from pretrain.common.extensions import ship_modules
from pretrain.common.files import UNTRAINED, checkpoint_names
from pretrain.common.packages import expect
from pretrain.common.wording import clock
from pretrain.common.worker import WAITING_FILE

if TYPE_CHECKING:
    from ray.job_submission import JobDetails, JobSubmissionClient

_JOB_BYTES = 90 << 20  # memory that a job needs on the head node: 73 MiB for Ray's supervisor, 13 for our process
_LIST_SECONDS = 5.0  # time limit for listing the nodes
_POLL_SECONDS = 0.5
_MONITOR_SECONDS = 2.5  # time within which Ray's own monitor notices the end of a job
_AGENT_SECONDS = 20.0  # how long a new cluster may take to accept jobs
_MAX_NODES = 10_000  # maximum number of nodes to list; by default a dashboard lists 100
_ADDRESS_VARIABLES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # they would override the address argument
_NO_COMMAND = 127  # exit code of a shell that does not find the command
_EXIT_CODE_MEANINGS = {
    InputError.exit_code: "your input is wrong; see its log",
    MachineError.exit_code: "the machine or cluster was unsuitable; see its log",
    DivergedError.exit_code: "training diverged; see its log",
    StoppedError.exit_code: "stopped, its state is saved; submit it again to continue",
    NothingSavedError.exit_code: "stopped, no step is saved; submit it again to start",
    _NO_COMMAND: "its Ray has no `bertrain` on the PATH; install this project there, then start Ray with that PATH",
}
_NO_STEP, _STEP_LINE = "No step", re.compile(r"^step [\d,]+/", re.MULTILINE)
_SAVED_STEP = re.compile(rf"(?:[Cc]heckpoint )?(step-\d+|{_NO_STEP}) is saved")  # the last match in a log is used


@dataclass(frozen=True)
class Job:
    """One run to submit.

    Attributes:
        kind: console command that the job runs: pretrain, finetune or prepare.
        resumes: whether the job is a training run, which resumes from its latest checkpoint.
        name: id of the run.
        config: resolved settings, as plain data for JSON.
        run_dir: the run folder, or the object store URL of the run, whose local folder the cluster chooses.
        folder: working directory on the cluster; the config's relative paths start there.
        workers: the minimum and maximum number of workers.
        cpus_per_worker: number of CPUs per worker; 0 divides the cluster's CPUs among the workers.
    """

    kind: str
    resumes: bool
    name: str
    config: dict[str, Any]
    run_dir: str
    folder: Path
    workers: tuple[int, int]
    cpus_per_worker: int


@dataclass(frozen=True, repr=False)
class SubmittedJob:
    """A job on a cluster, named like its run. Its `client` can return its log, stop it and wait for it."""

    name: str
    client: JobsClient

    def state(self) -> str:
        """Return the state, such as "running", or why the job stopped."""
        return describe_state(self.client.get(self.name))

    def __repr__(self) -> str:
        return f"{self.name}: submitted to {self.client.safe_url}."


class JobsClient:
    """A client for the jobs of one cluster.

    Args:
        address: URL of the cluster's dashboard, such as http://127.0.0.1:8265; empty uses the local one of `up`.
        plain_http: whether the token may be sent to other machines over http, unencrypted.

    Attributes:
        address: URL of the dashboard.
        safe_url: the URL for messages, without credentials.

    Raises:
        InputError: `address` is not a URL, or no local cluster runs; the token is missing, wrong or unencrypted.
        MachineError: no dashboard responds at the address.
    """

    def __init__(self, address: str = "", *, plain_http: bool = False) -> None:
        expect("jobs on a cluster", "ray")
        cluster = local.find_cluster() if not address else None
        # Time for a stopped job to save its last checkpoint before Ray kills it (Ray's default: 3 s). A cluster of `up`
        # has this setting already, and workers without a custom environment start sooner.
        stop_limit_env = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(local.STOP_SECONDS)}}
        self._runtime_env = {} if cluster else stop_limit_env
        if not address and cluster is None:
            raise InputError(
                f"No cluster is running on this machine. Give --address URL, or start one with {program()} up."
            )
        self.address = address or (cluster.dashboard if cluster else "")
        self.safe_url = redact_credentials(self.address)
        if cluster is not None:
            local.use_token(cluster)
        else:
            set_token_variables(address)
        for name in _ADDRESS_VARIABLES:
            os.environ.pop(name, None)
        check_dashboard(self.address, plain_http=plain_http)
        from ray.job_submission import JobSubmissionClient

        logging.getLogger("ray.dashboard").setLevel(logging.WARNING)  # at INFO it reports each closed connection
        with self.one_line_errors():
            self.ray_client: JobSubmissionClient = JobSubmissionClient(self.address)
            self.ray_client.list_jobs()  # the constructor's request needs no token; this one does

    def is_open(self) -> bool:
        """Return whether the cluster needs no token, so that anyone who can connect to it can run code there."""
        return answers_without_token(self.address)

    def submit(self, job: Job, *, wait_for_nodes: bool = False) -> SubmittedJob:
        """Start the run, or continue it if it was started before. Its job keeps running after this process exits.

        Args:
            job: the result of `cluster.jobs.submission.make_job`.
            wait_for_nodes: accept a cluster that is too small now; the run waits there for nodes.

        Raises:
            InputError: the run is already running or queued.
            MachineError: its workers do not fit on the cluster, or the cluster's head has no memory for more jobs.
        """
        if self.is_open():
            print(
                f"warning: {self.safe_url}: this cluster accepts jobs without a token, so anyone who can connect to it "
                "can run code there. Restart its Ray with RAY_AUTH_MODE=token; see SECURITY.md.",
                file=sys.stderr,
            )
        jobs = self.jobs()
        existing = next((other for other in jobs if other.submission_id == job.name), None)
        if existing is not None and existing.status not in FINISHED:
            raise InputError(
                f"{job.name}: is already {describe_state(existing, self.queued(jobs).get(job.name, ''))} on "
                f"{self.safe_url}. Follow it with `logs -f {job.name}`, stop it with `stop {job.name}`, or choose "
                "another name."
            )
        nodes = alive_nodes(self.address)
        check_head(nodes, sum(other.status not in FINISHED for other in jobs), self.safe_url)
        if not wait_for_nodes:
            _check_capacity(nodes, job, self.safe_url)
        if existing is not None:
            self._forget(existing)
        self.start(job.name, JOB_COMMAND, job_metadata(job))
        return SubmittedJob(job.name, self)

    def start(self, name: str, command: str, metadata: dict[str, str]) -> None:
        """Run `command` on the cluster as a job of this name; `InputError` if there already is one."""
        deadline = time.monotonic() + _AGENT_SECONDS
        with self.one_line_errors(), tempfile.TemporaryDirectory(prefix="bertrain-") as scratch:
            runtime_env = ship_modules(self._runtime_env, Path(scratch))
            while True:
                try:
                    self.ray_client.submit_job(
                        submission_id=name, entrypoint=command, metadata=metadata, runtime_env=runtime_env
                    )
                    return
                except RuntimeError as error:
                    if "already exists" in str(error):
                        raise InputError(
                            f"{name}: another process is submitting this job right now. Check it with `status`."
                        ) from None
                    # A cluster that has just started has no agent for jobs yet.
                    if "No available agent" not in str(error) or time.monotonic() > deadline:
                        raise
                time.sleep(_POLL_SECONDS)

    def find(self, name: str) -> JobDetails | None:
        """Return the job of this name, or None."""
        return next((job for job in self.jobs() if job.submission_id == name), None)

    def get(self, name: str) -> JobDetails:
        """Return the job of this name; `InputError` if there is none."""
        job = self.find(name)
        if job is None:
            known = ", ".join(str(job.submission_id) for job in self.jobs()) or "none"
            raise InputError(f"{name}: no such job on {self.safe_url}. Known jobs: {known}.")
        return job

    def jobs(self) -> list[JobDetails]:
        """List the submitted jobs, without other Ray drivers, in the order of their submission."""
        with self.one_line_errors():
            jobs = [job for job in self.ray_client.list_jobs() if job.submission_id]
        return sorted(jobs, key=lambda job: job.start_time or 0)

    def log(self, name: str) -> str:
        """Return all output of the job so far."""
        self.get(name)
        return self._log(name)

    def exit_status(self, job: JobDetails) -> tuple[int, str]:
        """Return (exit code for a process that followed the job to its end, description of the job's state).

        The state of a stopped training includes the saved step, from its log or its run folder on this machine.
        """
        metadata, code = job.metadata or {}, job.driver_exit_code
        if job.status != "STOPPED" or "resumes" not in metadata:
            code = MachineError.exit_code if code in (None, 0, _NO_COMMAND) else code
            return {"SUCCEEDED": 0, "STOPPED": StoppedError.exit_code}.get(job.status, code), describe_state(job)
        log, folder = "", local_run(metadata["run_dir"])
        with contextlib.suppress(MachineError):  # a job that had not started has no log
            log = self._log(str(job.submission_id)).rstrip()
        if log.endswith(f"{job.submission_id}: {DONE}"):
            return 0, "stopped, but had finished"
        saved = _SAVED_STEP.findall(log)
        latest = saved[-1] if saved else max(checkpoint_names(folder), default=UNTRAINED if folder.is_dir() else "")
        if not latest and _STEP_LINE.search(log):  # killed before it printed the step; its run folder is elsewhere
            return StoppedError.exit_code, "stopped; its log does not say which step is saved"
        if latest in ("", UNTRAINED, _NO_STEP):
            return NothingSavedError.exit_code, "stopped; no step is saved"
        return StoppedError.exit_code, f"stopped; checkpoint {latest} is saved"

    def _log(self, name: str) -> str:
        with self.one_line_errors():
            return self.ray_client.get_job_logs(name)

    def queued(self, jobs: Sequence[JobDetails]) -> dict[str, str]:
        """Return {name: "queued behind OTHERS"} for the queued jobs among `jobs`, the result of `jobs()`.

        For Ray a queued job is running, so only the last line of its output tells. The oldest job never waits.
        """
        active = [job for job in jobs if job.status not in FINISHED and "workers" in (job.metadata or {})]
        messages = {}
        for name in (str(job.submission_id) for job in active[1:]):
            line = self._log(name).rstrip().rpartition("\n")[2]
            if line.startswith(f"{name}: {QUEUED}"):
                messages[name] = line.removeprefix(f"{name}: ")
        return messages

    def follow(self, name: str) -> Iterator[str]:
        """Yield the output of the job as it arrives, until it finishes; `MachineError` if the connection is lost."""
        import asyncio

        self.get(name)
        loop = asyncio.new_event_loop()
        chunks: Any = self.ray_client.tail_job_logs(name)
        try:
            while True:
                try:
                    yield loop.run_until_complete(chunks.__anext__())
                except StopAsyncIteration:
                    return
                except Exception as error:
                    raise MachineError(
                        f"{self.safe_url}: the connection was lost ({redact_error(error, self.address)}). {name} may "
                        f"still be running: `logs -f {name}` follows it again."
                    ) from None
        finally:
            for task in asyncio.all_tasks(loop):  # the read that Ctrl-C interrupted, if any
                task.cancel()
                loop.run_until_complete(asyncio.wait([task]))
            loop.run_until_complete(chunks.aclose())
            loop.close()

    def stop(self, name: str, seconds: float = local.STOP_SECONDS) -> JobDetails:
        """Ask the job to save a checkpoint and finish, and wait until it has; a finished job is not changed."""
        job = self.get(name)
        if job.status not in FINISHED:
            with self.one_line_errors():
                self.ray_client.stop_job(name)
        return self.wait(name, seconds)

    def wait(
        self, name: str, seconds: float = float("inf"), advice: str = "Check its `status` again later."
    ) -> JobDetails:
        """Wait until the job has finished and return it; `MachineError`, with `advice`, after `seconds`."""
        deadline = time.monotonic() + seconds
        while (job := self.get(name)).status not in FINISHED:
            if time.monotonic() > deadline:
                raise MachineError(f"{name}: is still {job.status.lower()} after {seconds:.0f} s. {advice}")
            time.sleep(_POLL_SECONDS)
        return job

    def delete(self, name: str) -> None:
        """Remove a finished job from the cluster's list; its run folder is kept."""
        job = self.get(name)
        if job.status not in FINISHED:
            raise InputError(f"{name}: is {job.status.lower()}. Stop it with `stop {name}` first.")
        self._forget(job)

    def _forget(self, job: JobDetails) -> None:
        # Ray's own monitor polls a job once a second; if the job is deleted earlier, Ray records it again as failed.
        elapsed = time.time() - (job.end_time or 0) / 1000
        time.sleep(min(_MONITOR_SECONDS, max(0.0, _MONITOR_SECONDS - elapsed)))
        with self.one_line_errors():
            self.ray_client.delete_job(str(job.submission_id))

    @contextlib.contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """Turn exceptions of Ray's client into one-line errors."""
        import requests
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError:
            raise token_rejected_error(self.safe_url) from None
        except RunError:
            raise
        except (ConnectionError, requests.ConnectionError, requests.Timeout) as error:
            raise MachineError(
                f"{self.safe_url}: the cluster does not answer now ({redact_error(error, self.address)}). Jobs "
                "continue as long as its head runs; run the same command again later."
            ) from None
        except Exception as error:
            raise MachineError(
                f"{self.safe_url}: unexpected answer; this does not look like a Ray dashboard "
                f"({redact_error(error, self.address)})."
            ) from None


def _check_capacity(nodes: list[dict[str, Any]], job: Job, address: str) -> None:
    sizes = [(int(node["resources_total"].get("CPU", 0)), int(node["resources_total"].get("GPU", 0))) for node in nodes]
    needed = 1 if job.kind == "prepare" else job.workers[0]
    try:
        choose_cpus(sizes, needed, job.cpus_per_worker, f"the cluster at {address}")
    except MachineError as error:
        raise MachineError(f"{error} If nodes will be added, use --wait-for-nodes.") from None


def check_head(nodes: list[dict[str, Any]], job_count: int, address: str) -> None:
    """Raise `MachineError` if the head lacks memory for one more job, since all jobs would fail with the head."""
    memory = next((node["resources_total"].get("memory", 0) for node in nodes if node["is_head_node"]), 0)
    if memory and (job_count + 1) * _JOB_BYTES > memory:
        raise MachineError(
            f"the cluster at {address} has {job_count} running or queued jobs, the most that its head node's memory "
            f"allows ({memory / 2**30:.1f} GiB, {_JOB_BYTES >> 20} MiB each). Submit again when some have finished."
        )


def alive_nodes(dashboard: str) -> list[dict[str, Any]]:
    """Return the alive nodes (node_id, resources_total and more) from the dashboard. The token must be set."""
    from ray.util.state import list_nodes

    try:
        nodes = list_nodes(
            address=dashboard,
            filters=[("state", "=", "ALIVE")],  # Ray also lists up to a thousand dead nodes
            limit=_MAX_NODES,
            timeout=int(_LIST_SECONDS),
            raise_on_missing_output=False,
        )
    except Exception as error:
        raise MachineError(
            f"{redact_credentials(dashboard)}: did not report its nodes ({redact_error(error, dashboard)})."
        ) from None
    return [vars(node) for node in nodes]


def run_folder(name: str, address: str = "", *, plain_http: bool = False) -> Path | None:
    """Return a job's run folder. Without `address`, return None if no local cluster runs or if it has no such job."""
    if not address and local.find_cluster() is None:
        return None
    jobs = JobsClient(address, plain_http=plain_http)
    job = jobs.get(name) if address else jobs.find(name)
    folder = (job.metadata or {}).get("run_dir") if job else None
    return local_run(folder) if folder else None


def describe(job: JobDetails, queue_message: str = "") -> str:
    """Describe one job for the terminal: its state, what that means, and the progress of its run."""
    lines = [f"{job.submission_id}: {describe_state(job, queue_message)}"]
    lines.append(f"  submitted {format_time(job.start_time)}, {_duration(job)}")
    metadata = job.metadata or {}
    if "run_dir" in metadata:
        lines.append(f"  run folder {metadata['run_dir']}")
        lines += [f"  {line}" for line in progress_lines(job)]
    return "\n".join(lines)


def describe_state(job: JobDetails, queue_message: str = "") -> str:
    """Return the `queue_message` (from `JobsClient.queued`), if any, else Ray's state and what the exit code means."""
    if queue_message:
        return queue_message
    status = str(job.status.value).lower()
    code = job.driver_exit_code
    if status == "failed" and code is not None:
        return f"failed with exit code {code}: {_EXIT_CODE_MEANINGS.get(code, 'crashed; see its log')}"
    if status == "failed" and job.message:
        return f"failed: {' '.join(job.message.split())[:200]}"
    return status


def progress_lines(job: JobDetails) -> list[str]:
    """Return lines about a run's wait for nodes and its progress; [] if its folder is not on this machine."""
    run_dir = local_run((job.metadata or {}).get("run_dir", "/nowhere"))
    return [*(_wait_notice(run_dir) if job.status not in FINISHED else ()), *_training_progress(run_dir)]


def _wait_notice(run_dir: Path) -> list[str]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        notice = json.loads((run_dir / "logs" / WAITING_FILE).read_text(encoding="utf-8"))
        return [f"{notice['message']}, for {clock(time.time() - notice['time'])}"]
    return []


def _training_progress(run_dir: Path) -> list[str]:
    from pretrain.common.records import is_training, read_records

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


def job_metadata(job: Job) -> dict[str, str]:
    """Return a job's metadata: all that `cluster.jobs.entrypoint` needs, so that no files are uploaded."""
    return {
        **({"runs": str(runs_folder())} if os.environ.get(RUNS_VARIABLE) else {}),
        "bertrain": job.kind,
        **({"resumes": "yes"} if job.resumes else {}),
        "config": json.dumps(job.config, separators=(",", ":")),
        "folder": str(job.folder),
        "run_dir": job.run_dir if is_remote(job.run_dir) else str(job.folder / job.run_dir),
        "workers": str(job.workers[0]),
        "most_workers": str(job.workers[1]),
        "cpus_per_worker": str(job.cpus_per_worker),
    }


def format_time(milliseconds: int | None) -> str:
    """Format a Unix time in milliseconds, as Ray reports it, in this machine's time zone."""
    return time.strftime("%F %T", time.localtime((milliseconds or 0) / 1000))


def _duration(job: JobDetails) -> str:
    end = (job.end_time or time.time() * 1000) / 1000
    return f"{'ran' if job.status in FINISHED else 'for'} {clock(end - (job.start_time or 0) / 1000)}"

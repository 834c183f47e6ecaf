"""Jobs on a Ray cluster, from the client's side: submit, status, logs, stop, list, delete.

A run's name is its id everywhere: Ray's submission id, the run folder's name and the id in W&B. So a run cannot be
started twice at once, and submitting it again continues it. The cluster runs `cluster.jobs.entrypoint`.
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
    redacted,
    token_refused,
    without_password,
)
from cluster.workers.driver import choose_token
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

_JOB_BYTES = 90 << 20  # per waiting job on the head: 73 MiB for Ray's supervisor, 13 for our process
_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.5
_MONITOR_SECONDS = 2.5  # within which Ray's own monitor of a job notices its end
_AGENT_SECONDS = 20.0
_MAX_NODES = 10_000  # to list; by default a dashboard lists 100
_OTHER_ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # Ray would prefer them to the address passed to it
_NOT_FOUND = 127  # the exit code of a shell that does not find a command
_MEANING = {
    InputError.exit_code: "your input is wrong; see its log",
    MachineError.exit_code: "the machine or cluster was unsuitable; see its log",
    DivergedError.exit_code: "training diverged; see its log",
    StoppedError.exit_code: "stopped, its state is saved; submit it again to continue",
    NothingSavedError.exit_code: "stopped, no step is saved; submit it again to start",
    _NOT_FOUND: "its Ray has no `bertrain` on the PATH; install this project there, then start Ray with that PATH",
}
_NO_STEP, _STEP = "No step", re.compile(r"^step [\d,]+/", re.MULTILINE)
_SAVED = re.compile(rf"(?:[Cc]heckpoint )?(step-\d+|{_NO_STEP}) is saved")  # the last match in a log is used


@dataclass(frozen=True)
class Job:
    """One run to submit.

    Attributes:
        kind: the console command that it runs: pretrain, finetune or prepare.
        resumes: whether it is a training, which resumes from its latest checkpoint.
        name: the run's id.
        config: the resolved settings, as plain data for JSON.
        run_dir: the run folder, or the address of a stored run, whose folder the cluster chooses.
        folder: working directory on the cluster; the config's relative paths start there.
        workers: the minimum and maximum number of workers.
        cpus_per_worker: 0 divides the cluster's CPUs among the workers.
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
    """A job on a cluster, by the name of its run; `jobs` has its log, stops it and waits for it."""

    name: str
    jobs: Jobs

    def state(self) -> str:
        """Return the state, such as "running", or why it stopped."""
        return state(self.jobs.get(self.name))

    def __repr__(self) -> str:
        return f"{self.name}: submitted to {self.jobs.shown}."


class Jobs:
    """The jobs of one cluster.

    Args:
        address: URL of the cluster's dashboard, such as http://127.0.0.1:8265; empty uses the local one of `up`.
        plain_http: send the token over http to other machines, too.

    Attributes:
        address: the URL, as passed.
        shown: the URL for messages, without its password.

    Raises:
        InputError: not a URL; no local cluster; the token is missing or wrong, or would leave this machine unencrypted.
        MachineError: nothing answers there.
    """

    def __init__(self, address: str = "", *, plain_http: bool = False) -> None:
        expect("jobs on a cluster", "ray")
        cluster = local.find() if not address else None
        # How long a stopped job may save its last checkpoint before Ray kills it; Ray's default is 3 s. A cluster of
        # `up` has set it already, and workers without a custom environment start sooner.
        stop_time = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(local.STOP_SECONDS)}}
        self._runtime_env = {} if cluster else stop_time
        if not address and cluster is None:
            raise InputError(
                f"No cluster is running on this machine. Give --address URL, or start one with {program()} up."
            )
        self.address = address or (cluster.dashboard if cluster else "")
        self.shown = without_password(self.address)
        if cluster is not None:
            local.use_token(cluster)
        else:
            choose_token(address)
        for name in _OTHER_ADDRESSES:
            os.environ.pop(name, None)
        check_dashboard(self.address, plain_http=plain_http)
        from ray.job_submission import JobSubmissionClient

        logging.getLogger("ray.dashboard").setLevel(logging.WARNING)  # it reports each closed connection
        with self.one_line_errors():
            self.client: JobSubmissionClient = JobSubmissionClient(self.address)
            self.client.list_jobs()  # the constructor's request needs no token; this one does

    def is_open(self) -> bool:
        """Return whether the cluster answers without a token, so that anyone who reaches it can run code there."""
        return answers_without_token(self.address)

    def submit(self, job: Job, *, wait_for_nodes: bool = False) -> SubmittedJob:
        """Start the run, or continue it if it was started before; it outlives this process.

        Args:
            job: the result of `cluster.jobs.submission.make_job`.
            wait_for_nodes: accept a cluster that is too small now; the run waits there for nodes.

        Raises:
            InputError: it runs or waits already.
            MachineError: its workers do not fit on the cluster, or its head has no memory for more jobs.
        """
        if self.is_open():
            print(
                f"warning: {self.shown}: this cluster accepts jobs without a token, so anyone who can connect to it "
                "can run code there. Restart its Ray with RAY_AUTH_MODE=token; see SECURITY.md.",
                file=sys.stderr,
            )
        known = self.all()
        earlier = next((other for other in known if other.submission_id == job.name), None)
        if earlier is not None and earlier.status not in FINISHED:
            raise InputError(
                f"{job.name}: is already {state(earlier, self.queued(known).get(job.name, ''))} on {self.shown}. "
                f"Follow it with `logs -f {job.name}`, stop it with `stop {job.name}`, or choose another name."
            )
        nodes = alive_nodes(self.address)
        check_head(nodes, sum(other.status not in FINISHED for other in known), self.shown)
        if not wait_for_nodes:
            _check_capacity(nodes, job, self.shown)
        if earlier is not None:
            self._forget(earlier)
        self.start(job.name, JOB_COMMAND, job_metadata(job))
        return SubmittedJob(job.name, self)

    def start(self, name: str, command: str, metadata: dict[str, str]) -> None:
        """Run `command` on the cluster as a job of this name; `InputError` if there is one already."""
        deadline = time.monotonic() + _AGENT_SECONDS
        with self.one_line_errors(), tempfile.TemporaryDirectory(prefix="bertrain-") as scratch:
            environment = ship_modules(self._runtime_env, Path(scratch))
            while True:
                try:
                    self.client.submit_job(
                        submission_id=name,
                        entrypoint=command,
                        metadata=metadata,
                        runtime_env=environment,
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
        return next((job for job in self.all() if job.submission_id == name), None)

    def get(self, name: str) -> JobDetails:
        """Return the job of this name; `InputError` if there is none."""
        job = self.find(name)
        if job is None:
            known = ", ".join(str(job.submission_id) for job in self.all()) or "none"
            raise InputError(f"{name}: no such job on {self.shown}. Known jobs: {known}.")
        return job

    def all(self) -> list[JobDetails]:
        """List the jobs in the order of their submission, without Ray's other drivers."""
        with self.one_line_errors():
            jobs = [job for job in self.client.list_jobs() if job.submission_id]
        return sorted(jobs, key=lambda job: job.start_time or 0)

    def log(self, name: str) -> str:
        """Return all output of the job so far."""
        self.get(name)
        return self._log(name)

    def exit_status(self, job: JobDetails) -> tuple[int, str]:
        """Return (exit code for a process that followed a job until it finished, its state).

        The state of a stopped training includes the saved step, from its log or its run folder on this machine.
        """
        metadata, code = job.metadata or {}, job.driver_exit_code
        if job.status != "STOPPED" or "resumes" not in metadata:
            code = MachineError.exit_code if code in (None, 0, _NOT_FOUND) else code
            return {"SUCCEEDED": 0, "STOPPED": StoppedError.exit_code}.get(job.status, code), state(job)
        log, folder = "", local_run(metadata["run_dir"])
        with contextlib.suppress(MachineError):  # a job that had not started has no log
            log = self._log(str(job.submission_id)).rstrip()
        if log.endswith(f"{job.submission_id}: {DONE}"):
            return 0, "stopped, but had finished"
        saved = _SAVED.findall(log)
        latest = saved[-1] if saved else max(checkpoint_names(folder), default=UNTRAINED if folder.is_dir() else "")
        if not latest and _STEP.search(log):  # killed before it could report, and its folder is on another machine
            return StoppedError.exit_code, "stopped; its log does not say which step is saved"
        if latest in ("", UNTRAINED, _NO_STEP):
            return NothingSavedError.exit_code, "stopped; no step is saved"
        return StoppedError.exit_code, f"stopped; checkpoint {latest} is saved"

    def _log(self, name: str) -> str:
        with self.one_line_errors():
            return self.client.get_job_logs(name)

    def queued(self, jobs: Sequence[JobDetails]) -> dict[str, str]:
        """Return name -> "queued behind OTHERS" for each of `jobs` (`all`) that waits in the queue.

        Ray reports them as running, so the last line of their output is read; the oldest job never waits.
        """
        active = [job for job in jobs if job.status not in FINISHED and "workers" in (job.metadata or {})]
        queued = {}
        for name in (str(job.submission_id) for job in active[1:]):
            line = self._log(name).rstrip().rpartition("\n")[2]
            if line.startswith(f"{name}: {QUEUED}"):
                queued[name] = line.removeprefix(f"{name}: ")
        return queued

    def follow(self, name: str) -> Iterator[str]:
        """Yield the output of the job as it arrives, until it finishes; `MachineError` if the connection is lost."""
        import asyncio

        self.get(name)
        loop = asyncio.new_event_loop()
        chunks: Any = self.client.tail_job_logs(name)
        try:
            while True:
                try:
                    yield loop.run_until_complete(chunks.__anext__())
                except StopAsyncIteration:
                    return
                except Exception as error:
                    raise MachineError(
                        f"{self.shown}: the connection was lost ({redacted(error, self.address)}). {name} may still be "
                        f"running: `logs -f {name}` follows it again."
                    ) from None
        finally:
            for task in asyncio.all_tasks(loop):  # after Ctrl-C: the pending read
                task.cancel()
                loop.run_until_complete(asyncio.wait([task]))
            loop.run_until_complete(chunks.aclose())
            loop.close()

    def stop(self, name: str, seconds: float = local.STOP_SECONDS) -> JobDetails:
        """Ask the job to save a checkpoint and finish, and wait for it; a finished job is not changed."""
        job = self.get(name)
        if job.status not in FINISHED:
            with self.one_line_errors():
                self.client.stop_job(name)
        return self.wait(name, seconds)

    def wait(
        self, name: str, seconds: float = float("inf"), advice: str = "Check its `status` again later."
    ) -> JobDetails:
        """Return the job when it has finished; `MachineError`, with `advice`, if it has not after `seconds`."""
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
        # Ray's own monitor polls a job once a second, and would record a deleted job as failed.
        elapsed = time.time() - (job.end_time or 0) / 1000
        time.sleep(min(_MONITOR_SECONDS, max(0.0, _MONITOR_SECONDS - elapsed)))
        with self.one_line_errors():
            self.client.delete_job(str(job.submission_id))

    @contextlib.contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """Turn exceptions of Ray's client into one-line errors."""
        import requests
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError:
            raise token_refused(self.shown) from None
        except RunError:
            raise
        except (ConnectionError, requests.ConnectionError, requests.Timeout) as error:
            raise MachineError(
                f"{self.shown}: the cluster does not answer now ({redacted(error, self.address)}). Jobs continue as "
                "long as its head runs; run the same command again later."
            ) from None
        except Exception as error:
            raise MachineError(
                f"{self.shown}: unexpected answer; this does not look like a Ray dashboard "
                f"({redacted(error, self.address)})."
            ) from None


def _check_capacity(nodes: list[dict[str, Any]], job: Job, address: str) -> None:
    sizes = [(int(node["resources_total"].get("CPU", 0)), int(node["resources_total"].get("GPU", 0))) for node in nodes]
    needed = 1 if job.kind == "prepare" else job.workers[0]
    try:
        choose_cpus(sizes, needed, job.cpus_per_worker, f"the cluster at {address}")
    except MachineError as error:
        raise MachineError(f"{error} If nodes will be added, use --wait-for-nodes.") from None


def check_head(nodes: list[dict[str, Any]], jobs: int, address: str) -> None:
    """Refuse (`MachineError`) a job for which the head lacks memory: all jobs would fail with the head."""
    memory = next((node["resources_total"].get("memory", 0) for node in nodes if node["is_head_node"]), 0)
    if memory and (jobs + 1) * _JOB_BYTES > memory:
        raise MachineError(
            f"the cluster at {address} has {jobs} running or queued jobs, the most that its head node's memory allows "
            f"({memory / 2**30:.1f} GiB, {_JOB_BYTES >> 20} MiB each). Submit again when some have finished."
        )


def alive_nodes(dashboard: str) -> list[dict[str, Any]]:
    """Return the alive nodes, with node_id, resources_total and more, from the dashboard. The token must be set."""
    from ray.util.state import list_nodes

    try:
        nodes = list_nodes(
            address=dashboard,
            filters=[("state", "=", "ALIVE")],  # Ray remembers a thousand dead nodes
            limit=_MAX_NODES,
            timeout=int(_ANSWER_SECONDS),
            raise_on_missing_output=False,
        )
    except Exception as error:
        raise MachineError(
            f"{without_password(dashboard)}: did not report its nodes ({redacted(error, dashboard)})."
        ) from None
    return [vars(node) for node in nodes]


def run_folder(name: str, address: str = "", *, plain_http: bool = False) -> Path | None:
    """Return a job's run folder; None without `address` if no local cluster runs or it has no such job."""
    if not address and local.find() is None:
        return None
    jobs = Jobs(address, plain_http=plain_http)
    job = jobs.get(name) if address else jobs.find(name)
    folder = (job.metadata or {}).get("run_dir") if job else None
    return local_run(folder) if folder else None


def describe(job: JobDetails, queued: str = "") -> str:
    """Describe one job for the terminal: its state, what that means, and the progress of its run."""
    lines = [f"{job.submission_id}: {state(job, queued)}"]
    lines.append(f"  submitted {date(job.start_time)}, {_duration(job)}")
    metadata = job.metadata or {}
    if "run_dir" in metadata:
        lines.append(f"  run folder {metadata['run_dir']}")
        lines += [f"  {line}" for line in progress(job)]
    return "\n".join(lines)


def state(job: JobDetails, queued: str = "") -> str:
    """Return `queued` (from `Jobs.queued`) if not empty, else Ray's name of the state and what its exit code means."""
    if queued:
        return queued
    word = str(job.status.value).lower()
    code = job.driver_exit_code
    if word == "failed" and code is not None:
        return f"failed with exit code {code}: {_MEANING.get(code, 'crashed; see its log')}"
    if word == "failed" and job.message:
        return f"failed: {' '.join(job.message.split())[:200]}"
    return word


def progress(job: JobDetails) -> list[str]:
    """Return lines about a run's waiting and progress, from its folder; [] if the folder is not on this machine."""
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
    """Return the metadata that `cluster.jobs.entrypoint` needs, so that no file is uploaded or looked up."""
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


def date(milliseconds: int | None) -> str:
    """Format Ray's time in milliseconds, in this machine's time zone."""
    return time.strftime("%F %T", time.localtime((milliseconds or 0) / 1000))


def _duration(job: JobDetails) -> str:
    end = (job.end_time or time.time() * 1000) / 1000
    return f"{'ran' if job.status in FINISHED else 'for'} {clock(end - (job.start_time or 0) / 1000)}"

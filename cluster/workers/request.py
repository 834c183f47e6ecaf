"""Requests of a launcher to its Ray driver, and of a driver to its workers: immutable, and sent pickled."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.common.addresses import runs_folder
from pretrain.common.errors import StoppedError
from pretrain.common.worker import STOP_FILE, Flag, TrainingRequest

RESTART_FILE = "restart"  # in the run folder: makes the workers save a checkpoint and finish, to be started again


@dataclass(frozen=True)
class Launch:
    """One call of a launcher: its identity and its folders.

    Attributes:
        id: random; distinguishes the launches of the same run.
        run_dir: the run folder, absolute.
        working_dir: where workers resolve relative paths.
        ray_dir: private temporary folder of a local Ray; drivers report progress there.
        outcome: file to which the driver writes how the launch finished.
        since: when the launch started, in nanoseconds by the clock of the run folder's file system.
        launcher: process id of the launcher. Its driver exits with it.
        runs: folder in which stored runs train, for the launcher and all its workers.
    """

    id: str
    run_dir: Path
    working_dir: Path
    ray_dir: Path
    outcome: Path
    since: int
    launcher: int
    runs: Path = field(default_factory=runs_folder)

    def stop_flag(self) -> Flag:
        """Return the flag that stops the whole launch. A pod's hook or a user may also set it with `touch`."""
        return Flag(self.run_dir / STOP_FILE, self.id, self.since)

    def check_stop(self) -> None:
        """Raise `StoppedError` if a stop is requested; called while no workers run."""
        if self.stop_flag().is_set():
            raise StoppedError(f"{self.run_dir}: stopped while no workers ran.{StoppedError.CONTINUE}")

    def restart_flag(self, attempt: int) -> Flag:
        """Return the flag that makes the workers of one attempt save a checkpoint and finish."""
        return Flag(self.run_dir / RESTART_FILE, f"{self.id} {attempt}", since=None)


@dataclass(frozen=True)
class DriverRequest:
    """The settings that all drivers have.

    Attributes:
        launch: the call of the launcher.
        target: "package.module:function", called with (TrainingRequest, Worker).
        name: name of the run.
        address: "host:port" of a Ray cluster; empty starts a local Ray.
        max_failures: maximum number of restarts after crashes.
        use_gpu: whether each process has a GPU; None until the nodes are known.
    """

    launch: Launch
    target: str
    name: str
    address: str
    max_failures: int
    use_gpu: bool | None

    @property
    def total_cpus(self) -> int:
        """CPU cores of all processes that run in parallel."""
        raise NotImplementedError


@dataclass(frozen=True)
class LaunchRequest(DriverRequest):
    """One training in `workers` processes; shared by all its attempts.

    Attributes:
        training: the target's argument in the first attempt.
        workers: the maximum number of processes.
        min_workers: the minimum number with which the run starts; 0 means `workers`.
        cpus_per_worker: 0 until the nodes are known, if the user set none.
        in_ray: whether Ray starts the workers; otherwise there is one, a child of the driver.
        wait_for_nodes_seconds: how long the run waits for nodes if the cluster is too small.
        start_seconds: time limit for the placed workers to start; 0: grows with their number.
    """

    training: TrainingRequest
    workers: int
    min_workers: int
    cpus_per_worker: int
    in_ray: bool
    wait_for_nodes_seconds: float
    start_seconds: float = 0.0

    @property
    def required_workers(self) -> int:
        """The minimum number of workers with which the run starts."""
        return self.min_workers or self.workers

    @property
    def total_cpus(self) -> int:
        """CPU cores of all workers together."""
        return self.workers * self.cpus_per_worker


@dataclass(frozen=True)
class TrialRequest:
    """One call of the target with `training`; logs go to `run_dir`/logs/worker-0.log."""

    run_dir: Path
    training: TrainingRequest


@dataclass(frozen=True)
class TrialsRequest(DriverRequest):
    """Many calls of the target, in this order. `parallel` and `cpus_per_trial` are 0 until the nodes are known."""

    trials: tuple[TrialRequest, ...]
    parallel: int
    cpus_per_trial: int

    @property
    def total_cpus(self) -> int:
        """CPU cores of the trials that run in parallel."""
        return self.parallel * self.cpus_per_trial

    def outcome_file(self, trial: int) -> Path:
        """Return the file for the outcome of a trial, as `cluster.workers.outcomes.as_data`; {} means success."""
        return self.launch.ray_dir / f"trial-{trial}.json"


@dataclass(frozen=True)
class Attempt:
    """One start of the workers of a launch.

    Attributes:
        request: the launch's request, the same for all attempts.
        number: counted from 0.
        workers: how many workers this attempt starts.
        training: the target's argument in this attempt, with its `resume` and `events`.
        avoid: ids of the nodes on which no worker is placed.
    """

    request: LaunchRequest
    number: int
    workers: int
    training: TrainingRequest
    avoid: frozenset[str]

    def restart_flag(self) -> Flag:
        """Return the flag that makes the workers of this attempt save a checkpoint and finish."""
        return self.request.launch.restart_flag(self.number)


def new_event(kind: str, message: str) -> dict[str, Any]:
    """Return an event that the next attempt's workers record in the run's metrics."""
    return {"event": kind, "time": time.time(), "message": message}

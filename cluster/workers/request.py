"""Requests of a launcher to its driver, and of a driver to its workers: immutable, and pickled to be sent."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.common.addresses import runs_folder
from pretrain.common.errors import StoppedError
from pretrain.common.worker import STOP_FILE, Flag, TrainingRequest

RESTART_FILE = "restart"  # file in the run folder that makes the workers save and finish, to be restarted


@dataclass(frozen=True)
class Launch:
    """One call of a launcher: its identity and its folders.

    Attributes:
        id: random id, which distinguishes the launches of a run.
        run_dir: absolute path of the run folder.
        working_dir: folder in which workers resolve relative paths.
        ray_dir: private temporary folder, for a local Ray and for files of the driver.
        outcome_path: file to which the driver writes the error of the launch, or null for success.
        since: start time of the launch, in nanoseconds by the clock of the run folder's file system.
        launcher_pid: process id of the launcher, with which the driver exits.
        stored_runs: folder for the local files of runs in an object store, the same in all workers.
    """

    id: str
    run_dir: Path
    working_dir: Path
    ray_dir: Path
    outcome_path: Path
    since: int
    launcher_pid: int
    stored_runs: Path = field(default_factory=runs_folder)

    def stop_flag(self) -> Flag:
        """Return the flag that stops the launch. A pod's stop script or a user may also set it, with `touch`."""
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
    """The settings of every driver.

    Attributes:
        launch: launch that the driver serves.
        target: "package.module:function", called with (TrainingRequest, Worker).
        name: name of the run.
        address: "host:port" of a Ray cluster; empty starts a local Ray.
        max_failures: maximum number of restarts after crashes.
        use_gpu: whether each process gets a GPU; None until the nodes are known.
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
    """One training in `workers` processes, with as many attempts as necessary.

    Attributes:
        training: argument of the target in the first attempt.
        workers: maximum number of processes.
        min_workers: minimum number of processes with which the run starts; 0 means `workers`.
        cpus_per_worker: number of cores per process; 0 until the nodes are known, unless the user set it.
        in_ray: whether Ray starts the workers; otherwise there is one, a child of the driver.
        wait_for_nodes_seconds: how long the run waits for nodes if the cluster is too small.
        start_seconds: time limit for the placed workers to start; 0 means a limit that grows with their number.
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
    """One call of the target with `training`; its output goes to `run_dir`/logs/worker-0.log."""

    run_dir: Path
    training: TrainingRequest


@dataclass(frozen=True)
class TrialsRequest(DriverRequest):
    """Calls of the target, started in this order; `parallel` and `cpus_per_trial` are 0 until the nodes are known."""

    trials: tuple[TrialRequest, ...]
    parallel: int
    cpus_per_trial: int

    @property
    def total_cpus(self) -> int:
        """CPU cores of the trials that run in parallel."""
        return self.parallel * self.cpus_per_trial

    def outcome_file(self, trial: int) -> Path:
        """Return the file for a trial's outcome: `cluster.workers.outcomes.as_data` of its error, or {} for success."""
        return self.launch.ray_dir / f"trial-{trial}.json"


@dataclass(frozen=True)
class Attempt:
    """One start of the workers of a launch.

    Attributes:
        request: request of the launch, the same for all attempts.
        number: 0-based index of the attempt.
        workers: number of workers that this attempt starts.
        training: argument of the target in this attempt, with the attempt's `resume` and `events`.
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

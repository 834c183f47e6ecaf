"""What `cluster.workers.trials.launch` requests of its driver, and what the driver reports about the trials."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster.workers.request import DriverRequest
from pretrain.common.errors import RunError
from pretrain.common.worker import TrainingRequest

EVENTS = "events.jsonl"  # in the launch's private folder: the driver appends a line for each `TrialEvent`


@dataclass(frozen=True)
class TrialRequest:
    """One call of the target with `training`, which must survive JSON; logs go to `run_dir`/logs/worker-0.log."""

    run_dir: Path
    training: TrainingRequest


@dataclass(frozen=True)
class TrialsRequest(DriverRequest):
    """Many calls of the target, each in a process of its own.

    Attributes:
        trials: in the order in which they are started.
        parallel: how many run at once; 0 until the nodes are known, if the caller left it open.
        cpus_per_trial: likewise.
    """

    trials: tuple[TrialRequest, ...]
    parallel: int
    cpus_per_trial: int

    @property
    def total_cpus(self) -> int:
        """CPU cores of the trials that run at once."""
        return self.parallel * self.cpus_per_trial


@dataclass(frozen=True)
class TrialEvent:
    """What happened to a trial, by its index in the list. `error` says why an ended trial did not succeed."""

    trial: int
    kind: Literal["started", "restarted", "ended"]
    error: RunError | None = None

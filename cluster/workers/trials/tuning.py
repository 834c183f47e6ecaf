"""Ray Tune, in the driver's process: starts the trials, and records what happens to them."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from cluster.workers.launch import LOGS, last_line
from cluster.workers.nodes import resources_of
from cluster.workers.outcomes import CRASH, WorkerError
from cluster.workers.trials.request import EVENTS, TrialsRequest
from cluster.workers.trials.worker import SUCCESS, run_trial
from pretrain.common.worker import Flag

logger = logging.getLogger(__name__)

_TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # its own copies of the metrics
    "TUNE_MAX_PENDING_TRIALS_PG": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # they are in the trials' logs
}


def tune_trials(request: TrialsRequest) -> int:
    """Run all trials of the request; returns how many ended other than by a stop."""
    os.environ.update(_TUNE_ENVIRONMENT)
    launch, trials = request.launch, len(request.trials)
    events = _EventWriter(request)
    resources = resources_of(request.cpus_per_trial, request.use_gpu)
    trainable = tune.with_resources(tune.with_parameters(run_trial, request=request), resources)
    storage = launch.run_dir / LOGS / "ray-tune" if request.address else launch.ray_dir
    tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=_InOrder(trials, launch.stop_flag()),
            num_samples=trials,
            max_concurrent_trials=request.parallel,
            trial_name_creator=_name,
            trial_dirname_creator=_name,
        ),
        run_config=tune.RunConfig(
            name=request.name,
            storage_path=str(storage),
            failure_config=tune.FailureConfig(max_failures=request.max_failures),
            callbacks=[events],
            verbose=0,
        ),
    ).fit()
    return events.ended


class _InOrder(Searcher):
    """Suggests the trials in their order, until all are suggested or a stop is requested."""

    def __init__(self, trials: int, stop: Flag) -> None:
        super().__init__()
        self._trials, self._stop = trials, stop
        self._next = 0

    def suggest(self, trial_id: str) -> Any:
        if self._next == self._trials or self._stop.is_set():
            return Searcher.FINISHED
        self._next += 1
        return {"number": self._next - 1}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        pass

    def save(self, checkpoint_path: str) -> None:
        """Tune saves its state to continue from it; we continue from the trials' own run folders."""

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError


class _EventWriter(tune.Callback):
    """Writes what happens to the trials, a line each, for `cluster.workers.trials.launch`."""

    def __init__(self, request: TrialsRequest) -> None:
        self.ended = 0
        self._request = request
        self._path = request.launch.ray_dir / EVENTS

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._write(trial, "started")

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        logger.warning("trial %d crashed: %s", trial.config["number"], self._reason(trial))
        self._write(trial, "restarted")

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        outcome = {key: trial.last_result.get(key, "") for key in SUCCESS}
        self.ended += outcome["kind"] != "StoppedError"
        self._write(trial, "ended", outcome)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.ended += 1
        log = self._request.trials[trial.config["number"]].run_dir / LOGS / "worker-0.log"
        self._write(
            trial,
            "ended",
            {
                "kind": "MachineError",
                "message": f"{log}: crashed ({self._reason(trial)}) and all max_failures={self._request.max_failures} "
                f"restarts are used up. The last line of the log: {last_line(log)!r}.",
            },
        )

    def _reason(self, trial: Trial) -> str:
        # Tune's file of the trial's failures; its last line is that of the newest traceback.
        last = last_line(Path(trial.error_file)) if trial.error_file else ""
        crash = f"{WorkerError.__name__}: {CRASH}: "
        return last.partition(crash)[2] if crash in last else "its process died: killed, or out of memory"

    def _write(self, trial: Trial, kind: str, error: dict[str, str] = SUCCESS) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"trial": trial.config["number"], "kind": kind, "error": error}) + "\n")


def _name(trial: Trial) -> str:
    return f"trial-{trial.config['number']:04}"

"""Runs Ray Tune in the driver of `cluster.workers.trials`, as a grid search over the indices of the trials."""

import logging
import os
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial

from cluster.workers.launch import LOGS, last_line
from cluster.workers.nodes import process_resources
from cluster.workers.outcomes import CRASH, WorkerError, as_data
from cluster.workers.request import TrialsRequest
from cluster.workers.target import change_folder, crashes_as_data, redirect_output, resolve
from pretrain.common.addresses import RUNS_VARIABLE
from pretrain.common.errors import MachineError, RunError, StoppedError
from pretrain.common.files import write_json
from pretrain.common.worker import Worker

logger = logging.getLogger(__name__)

_WORKER_LOG = "worker-0.log"
_TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # these loggers would copy the metrics
    "TUNE_MAX_PENDING_TRIALS_PG": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # they are in the trials' logs
}


def tune_trials(request: TrialsRequest) -> None:
    """Run all trials of the request; after a stop request, wait only for the running trials."""
    os.environ.update(_TUNE_ENVIRONMENT)
    launch, outcomes = request.launch, _Outcomes(request)
    resources = process_resources(request.cpus_per_trial, request.use_gpu)
    storage = launch.run_dir / LOGS / "ray-tune" if request.address else launch.ray_dir
    tune.Tuner(
        tune.with_resources(tune.with_parameters(_run_trial, request=request), resources),
        param_space={"index": tune.grid_search(list(range(len(request.trials))))},
        tune_config=tune.TuneConfig(max_concurrent_trials=request.parallel),
        run_config=tune.RunConfig(
            name=request.name,
            storage_path=str(storage),
            failure_config=tune.FailureConfig(max_failures=request.max_failures),
            callbacks=[outcomes],
            stop=outcomes,
            verbose=0,
        ),
    ).fit()


def _run_trial(config: dict[str, int], request: TrialsRequest) -> dict[str, str]:
    """Call the request's target for trial `config["index"]`.

    A `RunError` is returned as data, so that Tune repeats only crashes, which raise `WorkerError`.
    """
    trial = request.trials[config["index"]]
    os.environ[RUNS_VARIABLE] = str(request.launch.stored_runs)
    worker = Worker(threads=request.cpus_per_trial, flags=(request.launch.stop_flag(),))
    with crashes_as_data():
        try:
            if worker.stop_requested():
                raise StoppedError(f"{trial.run_dir}: stopped before the first step.")
            redirect_output(trial.run_dir / LOGS / _WORKER_LOG, 0)
            change_folder(request.launch.working_dir)
            resolve(request.target)(trial.training, worker)
        except RunError as error:
            return as_data(error)
    return {}


class _Outcomes(tune.Callback, tune.Stopper):
    """Writes the outcomes of trials; after a stop request, stops Tune once no trial runs."""

    def __init__(self, request: TrialsRequest) -> None:
        self._request = request
        self._trials: list[Trial] = []

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        self._trials = trials

    def stop_all(self) -> bool:
        is_running = any(trial.status == Trial.RUNNING for trial in self._trials)
        return not is_running and self._request.launch.stop_flag().is_set()

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        logger.warning("trial %d crashed: %s", trial.config["index"], _reason(trial))

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        outcome = {key: trial.last_result[key] for key in ("kind", "message") if key in trial.last_result}
        write_json(self._request.outcome_file(trial.config["index"]), outcome)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        index = trial.config["index"]
        log = self._request.trials[index].run_dir / LOGS / _WORKER_LOG
        error = MachineError(
            f"{log}: crashed ({_reason(trial)}) and all max_failures={self._request.max_failures} restarts are "
            f"used up. The last line of the log: {last_line(log)!r}."
        )
        write_json(self._request.outcome_file(index), as_data(error))


def _reason(trial: Trial) -> str:
    # Tune appends the traceback of each failure to this file.
    last = last_line(Path(trial.error_file)) if trial.error_file else ""
    crash = f"{WorkerError.__name__}: {CRASH}: "
    return last.partition(crash)[2] if crash in last else "its process died: killed, or out of memory"

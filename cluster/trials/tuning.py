"""Ray Tune, in the driver's process: hands out trials, and writes what becomes of them."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.search import Searcher

from cluster.trials.launch import EVENTS
from cluster.workers.launch import LOGS, last_line
from cluster.workers.worker import CRASH, WorkerEnd, enter_trial, stop_flag
from pretrain.common.worker import Flag

logger = logging.getLogger(__name__)

_TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # its own copies of the metrics
    "TUNE_MAX_PENDING_TRIALS_PG": "1",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # they are in the trials' logs
}
_DONE = {"kind": "", "message": ""}


def tune_trials(request: dict[str, Any], use_gpu: bool) -> int:
    """Try everything that the request names; returns how many trials came to an end that is no stop."""
    os.environ.update(_TUNE_ENVIRONMENT)
    events = _Events(request)
    resources = {"CPU": request["cpus_per_worker"], **({"GPU": 1} if use_gpu else {})}
    trainable = tune.with_resources(tune.with_parameters(enter_trial, request=request), resources)
    storage = f"{request['run_dir']}/{LOGS}/ray-tune" if request["address"] else request["ray_dir"]
    tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=_Queue(len(request["trials"]), stop_flag(request)),
            num_samples=len(request["trials"]),
            max_concurrent_trials=request["workers"],
            trial_name_creator=_name,
            trial_dirname_creator=_name,
        ),
        run_config=tune.RunConfig(
            name=request["name"],
            storage_path=storage,
            failure_config=tune.FailureConfig(max_failures=request["max_failures"]),
            callbacks=[events],
            verbose=0,
        ),
    ).fit()
    return events.ended


class _Queue(Searcher):
    """Hands out the trials in their order, until they are all out or a stop is asked for."""

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
        """Tune saves its state to continue from it; we continue from what the trials left."""

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError


class _Events(tune.Callback):
    """Writes what becomes of the trials, a line each, for `cluster.trials.launch`."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.ended = 0
        self._request = request
        self._path = Path(request["ray_dir"]) / EVENTS

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._write(trial, "started")

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        logger.warning("trial %d crashed: %s", trial.config["number"], self._reason(trial))
        self._write(trial, "restarted")

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        end = {key: trial.last_result.get(key, "") for key in ("kind", "message")}
        self.ended += end["kind"] != "StoppedError"
        self._write(trial, "ended", end)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self.ended += 1
        log = Path(self._request["trials"][trial.config["number"]]["run_dir"]) / LOGS / "worker-0.log"
        self._write(
            trial,
            "ended",
            {
                "kind": "MachineError",
                "message": f"{log}: crashed ({self._reason(trial)}) and all max_failures={self._request['max_failures']} "
                f"restarts are used up. The log ends with: {last_line(log)!r}.",
            },
        )

    def _reason(self, trial: Trial) -> str:
        # Tune's file of the trial's failures; the last line is that of the newest one's traceback.
        last = last_line(Path(trial.error_file)) if trial.error_file else ""
        crash = f"{WorkerEnd.__name__}: {CRASH}: "
        return last.partition(crash)[2] if crash in last else "its process died: killed, or out of memory"

    def _write(self, trial: Trial, kind: str, error: dict[str, str] = _DONE) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"trial": trial.config["number"], "kind": kind, "error": error}) + "\n")


def _name(trial: Trial) -> str:
    return f"trial-{trial.config['number']:04}"

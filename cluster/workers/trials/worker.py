"""What runs inside the process of a trial, for Ray Tune."""

import os

from cluster.workers.outcomes import as_data
from cluster.workers.target import change_folder, crashes_as_data, log_to, resolve
from cluster.workers.trials.request import TrialsRequest
from pretrain.common.addresses import RUNS_VARIABLE
from pretrain.common.errors import RunError, StoppedError
from pretrain.common.worker import Worker

SUCCESS = {"kind": "", "message": ""}


def run_trial(config: dict[str, int], request: TrialsRequest) -> dict[str, str]:
    """Call the request's target for trial `config["number"]`.

    A `RunError` is a result like any other and returned, {"kind": class name, "message": text}, or `SUCCESS`. So Tune
    repeats only crashes, which raise `WorkerError`.
    """
    trial = request.trials[config["number"]]
    os.environ[RUNS_VARIABLE] = str(request.launch.runs)
    worker = Worker(threads=request.cpus_per_trial, flags=(request.launch.stop_flag(),))
    with crashes_as_data():
        try:
            log_to(trial.run_dir / "logs" / "worker-0.log", 0)
            if worker.stop_requested():
                raise StoppedError(f"{trial.run_dir}: stopped before the first step.")
            change_folder(request.launch.working_dir)
            resolve(request.target)(trial.training, worker)
        except RunError as error:
            return as_data(error)
    return SUCCESS

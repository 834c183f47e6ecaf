"""Runs a function many times through Ray Tune, each time in a new process, as many in parallel as fit on the nodes.

As in training (`cluster.workers.launch`), Ray's driver is a child process in a separate session.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from cluster.workers.driver import main, ray_session
from cluster.workers.launch import run_driver
from cluster.workers.nodes import NodeSize, choose_cpus
from cluster.workers.outcomes import error_from
from cluster.workers.request import Launch, TrialRequest, TrialsRequest
from pretrain.common.errors import MachineError, RunError, StoppedError


def run_trials(
    target: str,
    trials: Sequence[TrialRequest],
    *,
    name: str,
    run_dir: Path | str,
    poll: Callable[[dict[int, RunError | None]], None],
    parallel: int = 0,
    cpus_per_trial: int = 0,
    address: str = "",
    max_failures: int = 0,
) -> None:
    """Call `target` ("package.module:function") with (TrainingRequest, Worker) for every trial, in order.

    Each trial is a process, with one GPU if there are any. A trial that crashes is restarted at most `max_failures`
    times, with the same request; after any other error it stops, and the other trials continue. A signal creates
    `run_dir`/stop: the running trials then finish (`Worker.stop_requested`), and no further ones start. See
    `cluster.workers.launch.run` for signals and `address`.

    Args:
        poll: called about four times a second, in this thread, with the trials that finished since the previous call:
            index of the trial -> its error, or None for success.
        parallel: number of parallel trials. 0 means one for each GPU; without GPUs one for each machine, since shared
            cores make every trial slower.
        cpus_per_trial: number of cores per trial; 0 divides the cores among the parallel trials.

    Raises:
        StoppedError: a stop was requested.
        MachineError: Ray cannot start, or not even one trial fits.
    """
    requests: list[TrialsRequest] = []
    finished: set[int] = set()

    def make_request(launch: Launch) -> TrialsRequest:
        driver_fields = (launch, target, name, address, max_failures, None)
        absolute_trials = tuple(replace(trial, run_dir=trial.run_dir.absolute()) for trial in trials)
        requests.append(TrialsRequest(*driver_fields, absolute_trials, parallel, cpus_per_trial))
        return requests[0]

    def read_outcomes() -> None:
        files = {index: requests[0].outcome_file(index) for index in range(len(trials)) if index not in finished}
        outcomes = {index: json.loads(path.read_text("utf-8")) for index, path in files.items() if path.exists()}
        finished.update(outcomes)
        poll({index: error_from(data) if data else None for index, data in outcomes.items()})

    run_driver(__name__, make_request, address=address, run_dir=run_dir, poll=read_outcomes)


# ---------------------------------------------------------------- the code of the driver


def choose_parallel(
    nodes: Sequence[NodeSize], trials: int, parallel: int, cpus_per_trial: int, nodes_name: str
) -> tuple[int, int]:
    """Return (number of parallel trials, CPUs of each); for 0 see `run_trials`. `MachineError` if not even one fits."""
    gpus = sum(node_gpus for _, node_gpus in nodes)
    count = min(trials, parallel or gpus or len(nodes))
    while True:
        try:
            return count, choose_cpus(nodes, count, cpus_per_trial, nodes_name, "--parallel")
        except MachineError:
            if parallel or count <= 1:
                raise
            count -= 1


def _run(request: TrialsRequest) -> None:
    """Start or join Ray, run all trials, then leave Ray."""

    def fit_to_nodes(find_sizes: Callable[[], Sequence[NodeSize]], nodes_name: str) -> TrialsRequest:
        nodes = find_sizes()
        count, cpus = choose_parallel(nodes, len(request.trials), request.parallel, request.cpus_per_trial, nodes_name)
        return replace(request, parallel=count, cpus_per_trial=cpus, use_gpu=any(gpus for _, gpus in nodes))

    with ray_session(request, fit_to_nodes) as fitted_request:
        from cluster.workers.tuning import tune_trials

        tune_trials(fitted_request)
    if request.launch.stop_flag().is_set():
        raise StoppedError(f"{request.launch.run_dir}: stopped.")


if __name__ == "__main__":
    main(sys.argv[1], _run)

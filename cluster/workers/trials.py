"""Many runs of one function through Ray Tune, each in a separate process, as many at once as the nodes hold.

As for training (`cluster.workers.launch`), Ray's driver is a child process in a separate session.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from cluster.workers.driver import main, ray_session
from cluster.workers.launch import drive
from cluster.workers.nodes import NodeSize, nodes_fit
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
    """Call `target` ("package.module:function") with (TrainingRequest, Worker) for every trial, in their order.

    Each trial is a process with one GPU if there are any. A trial that crashes is started again at most `max_failures`
    times, with the same request; after any other error it stops, and the other trials continue. A signal creates
    `run_dir`/stop, at which the running trials finish (`Worker.stop_requested`) and no other starts; see
    `cluster.workers.launch.run`, also for `address`.

    Args:
        poll: called about four times a second, in this thread, with the trials that ended since the previous call:
            index -> its error; None if it succeeded.
        parallel: how many run at once. 0 means one for each GPU; without GPUs one for each machine, since shared cores
            make every trial slower.
        cpus_per_trial: 0 divides the cores among them.

    Raises:
        StoppedError: a stop was requested.
        MachineError: Ray cannot start, or not even one trial fits.
    """
    requests: list[TrialsRequest] = []
    ended: set[int] = set()

    def request(launch: Launch) -> TrialsRequest:
        absolute = tuple(replace(trial, run_dir=trial.run_dir.absolute()) for trial in trials)
        common = (launch, target, name, address, max_failures, None)
        requests.append(TrialsRequest(*common, trials=absolute, parallel=parallel, cpus_per_trial=cpus_per_trial))
        return requests[0]

    def read() -> None:
        files = {number: requests[0].outcome_file(number) for number in range(len(trials)) if number not in ended}
        outcomes = {number: json.loads(path.read_text("utf-8")) for number, path in files.items() if path.exists()}
        ended.update(outcomes)
        poll({number: error_from(data) if data else None for number, data in outcomes.items()})

    drive(__name__, request, address=address, run_dir=run_dir, poll=read)


# ---------------------------------------------------------------- in the driver


def trials_that_fit(
    nodes: Sequence[NodeSize], trials: int, parallel: int, cpus_per_trial: int, where: str
) -> tuple[int, int]:
    """Return (trials at once, CPUs of each) on `nodes`; 0 chooses, as in `run_trials`. `MachineError` if none fits."""
    gpus = sum(gpu for _, gpu in nodes)
    at_once = min(trials, parallel or gpus or len(nodes))
    while True:
        try:
            return at_once, nodes_fit(nodes, at_once, cpus_per_trial, where, "--parallel")
        except MachineError:
            if parallel or at_once <= 1:
                raise
            at_once -= 1


def _run(request: TrialsRequest) -> None:
    """Start or join Ray, run all trials, and leave Ray again."""

    def fit(find_sizes: Callable[[], Sequence[NodeSize]], where: str) -> TrialsRequest:
        nodes = find_sizes()
        at_once, cpus = trials_that_fit(nodes, len(request.trials), request.parallel, request.cpus_per_trial, where)
        return replace(request, parallel=at_once, cpus_per_trial=cpus, use_gpu=any(gpu for _, gpu in nodes))

    with ray_session(request, fit) as fitted:
        from cluster.workers.tuning import tune_trials

        tune_trials(fitted)
    if request.launch.stop_flag().is_set():
        raise StoppedError(f"{request.launch.run_dir}: stopped.")


if __name__ == "__main__":
    main(sys.argv[1], _run)

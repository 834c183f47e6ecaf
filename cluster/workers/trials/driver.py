"""The child process of `cluster.workers.trials.launch`: start or join Ray, run all trials, and leave Ray again."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.workers.driver import main, ray_session
from cluster.workers.nodes import NodeSize, nodes_fit
from cluster.workers.trials.request import TrialsRequest
from pretrain.common.errors import MachineError, StoppedError
from pretrain.common.wording import counted


def trials_that_fit(
    nodes: Sequence[NodeSize], trials: int, parallel: int, cpus_per_trial: int, where: str
) -> tuple[int, int]:
    """(Trials at once, CPUs of each) on `nodes`; 0 chooses, see `cluster.workers.trials.launch.run_trials`.

    Raises `MachineError` if what is requested does not fit.
    """
    gpus = sum(gpu for _, gpu in nodes)
    at_once = min(trials, parallel or gpus or len(nodes))
    while True:
        try:
            return at_once, nodes_fit(nodes, at_once, cpus_per_trial, where, "--parallel")
        except MachineError:
            if parallel or at_once <= 1:
                raise
            at_once -= 1


def _run_trials(request: TrialsRequest) -> None:

    def fit(find_sizes: Callable[[], Sequence[NodeSize]], where: str) -> TrialsRequest:
        nodes = find_sizes()
        at_once, cpus = trials_that_fit(nodes, len(request.trials), request.parallel, request.cpus_per_trial, where)
        return replace(request, parallel=at_once, cpus_per_trial=cpus, use_gpu=any(gpu for _, gpu in nodes))

    with ray_session(request, fit) as fitted:
        from cluster.workers.trials.tuning import tune_trials

        finished = tune_trials(fitted)
    launch, unfinished = request.launch, len(request.trials) - finished
    if unfinished and launch.stop_flag().is_set():
        raise StoppedError(f"{launch.run_dir}: stopped with {counted(unfinished, 'run')} unfinished.")
    if unfinished:
        raise MachineError(
            f"{launch.run_dir}/logs/ray.log: Ray Tune left {counted(unfinished, 'run')} unfinished. Run the same "
            "command again."
        )


if __name__ == "__main__":
    main(sys.argv[1], TrialsRequest, _run_trials)

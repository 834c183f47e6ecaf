"""Many runs of one function through Ray Tune, each in a process of its own, as many at once as the nodes hold.

As for training (`cluster.workers.launch`), Ray's driver (`cluster.workers.trials.driver`) lives in a child process in a
session of its own; it reports what happens to the trials in a file of events.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.workers.launch import drive
from cluster.workers.outcomes import error_from
from cluster.workers.request import Launch
from cluster.workers.trials.request import EVENTS, TrialEvent, TrialRequest, TrialsRequest


def run_trials(
    target: str,
    trials: Sequence[TrialRequest],
    *,
    name: str,
    run_dir: Path | str,
    poll: Callable[[list[TrialEvent]], None],
    parallel: int = 0,
    cpus_per_trial: int = 0,
    address: str = "",
    max_failures: int = 0,
) -> None:
    """Call `target` ("package.module:function") with (TrainingRequest, Worker) for every trial, in their order.

    Each trial is a process with one GPU if there are any. A trial that crashes is started again at most `max_failures`
    times, with the same request; any other error ends it, and the other trials continue. A signal creates
    `run_dir`/stop, at which the running trials finish (`Worker.stop_requested`) and no other starts; see
    `cluster.workers.launch.run`, also for `address`.

    Args:
        poll: gets the events since the previous call, about four times a second, in this thread.
        parallel: how many run at once. 0 means one for each GPU; without GPUs one for each machine, since shared cores
            make every trial slower.
        cpus_per_trial: 0 divides the cores among them.

    Raises:
        StoppedError: trials were stopped or not started.
        MachineError: Ray cannot start, or not even one trial fits.
    """
    events = _EventReader()

    def request(launch: Launch) -> TrialsRequest:
        return TrialsRequest(
            launch=launch,
            target=target,
            name=name,
            address=address,
            max_failures=max_failures,
            use_gpu=None,
            trials=tuple(replace(trial, run_dir=trial.run_dir.absolute()) for trial in trials),
            parallel=parallel,
            cpus_per_trial=cpus_per_trial,
        )

    drive(
        "cluster.workers.trials.driver",
        request,
        address=address,
        run_dir=run_dir,
        poll=lambda folder: poll(events.read(folder / EVENTS)),
    )


class _EventReader:
    """Reads the new lines of the file of events."""

    def __init__(self) -> None:
        self._offset = 0

    def read(self, path: Path) -> list[TrialEvent]:
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [_event(json.loads(line)) for line in whole.splitlines()]


def _event(data: dict[str, Any]) -> TrialEvent:
    error = error_from(data["error"]) if data["error"]["kind"] else None
    return TrialEvent(data["trial"], data["kind"], error)

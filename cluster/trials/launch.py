"""Many runs of one function through Ray Tune, each in a process of its own, as many at once as there is room for.

As for training (`cluster.workers.launch`), Ray's driver lives in a child process in a session of its own; what becomes of the
trials it tells in a file of events.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster.workers.driver import main, ray_of
from cluster.workers.launch import drive
from cluster.workers.nodes import nodes_fit
from cluster.workers.worker import error_from, stop_flag
from pretrain.common.errors import MachineError, RunError, StoppedError

EVENTS = "events.jsonl"


@dataclass(frozen=True)
class TrialRequest:
    """One call of the target with its `payload`, which must survive JSON; logs go to `run_dir`/logs/worker-0.log."""

    run_dir: Path
    payload: dict[str, Any]


@dataclass(frozen=True)
class Event:
    """What became of a trial, by its place in the list. `error` says how it ended where it came to no good end."""

    trial: int
    kind: Literal["started", "restarted", "ended"]
    error: RunError | None = None


def run_trials(
    target: str,
    trials: Sequence[TrialRequest],
    *,
    name: str,
    run_dir: Path | str,
    poll: Callable[[list[Event]], None],
    parallel: int = 0,
    cpus_per_trial: int = 0,
    address: str = "",
    max_failures: int = 0,
) -> None:
    """Call `target` ("package.module:function") with (payload, Worker) for every trial, in their order.

    Each trial is a process with one GPU where there are any. `parallel` 0 means one for each GPU; without GPUs one for
    each machine, since cores that are shared make every trial slower. `cpus_per_trial` 0 shares out the cores.

    `poll` gets what happened since it was called last, about four times a second, in this thread. A trial that crashes
    is started again at most `max_failures` times, with the same payload; any other error is its end, and the other
    trials go on. A signal creates `run_dir`/stop, at which the running trials end themselves (`Worker.stop_requested`)
    and no other is begun; see `cluster.workers.launch.run`, also for `address`.

    Raises `StoppedError` when trials were stopped or not begun, and `MachineError` when Ray cannot start or has no
    room for one trial.
    """
    given = [{"run_dir": str(trial.run_dir.absolute()), "payload": trial.payload} for trial in trials]
    events = _Events()

    def look(folder: Path) -> None:
        poll(events.read(folder / EVENTS))

    request = {
        "target": target,
        "trials": given,
        "name": name,
        "workers": parallel,
        "cpus_per_worker": cpus_per_trial,
        "address": address,
        "max_failures": max_failures,
    }
    drive("cluster.trials.launch", request, run_dir=run_dir, poll=look)


class _Events:
    """New lines of the file of events since the last look."""

    def __init__(self) -> None:
        self._offset = 0

    def read(self, path: Path) -> list[Event]:
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [_event(json.loads(line)) for line in whole.splitlines()]


def _event(data: dict[str, Any]) -> Event:
    error = error_from(data["error"]) if data["error"]["kind"] else None
    return Event(data["trial"], data["kind"], error)


def share_out(
    nodes: Sequence[tuple[int, int]], trials: int, parallel: int, cpus_per_trial: int, where: str
) -> tuple[int, int]:
    """(trials at once, CPUs of each) on `nodes`, a list of (CPUs, GPUs); 0 chooses, see `run_trials`.

    Raises `MachineError` where what is asked for does not fit.
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


# ---------------------------------------------------------------- the child: Ray's driver


def _tune(request: dict[str, Any]) -> None:
    """Start or join Ray, try everything, and leave Ray again."""

    def fit(nodes: Sequence[tuple[int, int]], where: str) -> None:
        request["workers"], request["cpus_per_worker"] = share_out(
            nodes, len(request["trials"]), request["workers"], request["cpus_per_worker"], where
        )

    with ray_of(request, fit) as nodes:
        from cluster.trials.tuning import tune_trials

        ended = tune_trials(request, use_gpu=any(gpu for _, gpu in nodes))
    unfinished = len(request["trials"]) - ended
    if unfinished and stop_flag(request).is_set():
        raise StoppedError(f"{request['run_dir']}: stopped with {unfinished} runs to go.")
    if unfinished:
        raise MachineError(
            f"{request['run_dir']}/logs/ray.log: Ray Tune left {unfinished} runs undone. Run the same command again."
        )


if __name__ == "__main__":
    main(sys.argv[1], _tune)

"""Stands for Ray where several fine-tunings are run: their scores are given, and nothing is trained."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from cluster.workers.trials.request import TrialEvent
from pretrain.common.errors import RunError, StoppedError


def hand_out(tasks: Sequence[Any], poll: Callable[[list[TrialEvent]], None], result: Callable[[Any], Any]) -> None:
    """Start and end each task with its `result`: the accuracy on the dev set, or an error. A stop ends all of them."""
    for number, task in enumerate(tasks):
        found = result(task)
        if isinstance(found, StoppedError):
            raise found
        error = found if isinstance(found, RunError) else None
        if error is None:
            scores = {"dev": {"accuracy": found}}
            saved = {"metric": "accuracy", "scores": scores, "chosen_on": "dev", "details": {}, "data": ""}
            (task.run_dir / "scores.json").write_text(json.dumps(saved))
        poll([TrialEvent(number, "started"), TrialEvent(number, "ended", error)])

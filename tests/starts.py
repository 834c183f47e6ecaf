"""Whole trainings, started, stopped and resumed in the processes of `tests.distributed`."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pretrain.common.errors import RunError
from pretrain.common.worker import TrainingRequest, Worker


@dataclass(frozen=True)
class Start:
    """One start of a training on every worker."""

    config: dict[str, Any]
    resume: bool = False
    stop_at: int = 0  # the step, from this start on, in which a stop is asked for


def make_starts(main: Callable[[TrainingRequest, Worker], None], given: Sequence[Start]) -> list[str]:
    """Make the starts one after another on this worker; the kind and text of the error of each, or ''."""
    outcomes = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for start in given:
        try:
            main(
                TrainingRequest(start.config, start.resume),
                _StopsAt(rank, size, rank, size, step=start.stop_at),
            )
            outcomes.append("")
        except RunError as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


def starts(given: Sequence[Start]) -> list[str]:
    """Starts of pretrainings; as `make_starts`."""
    from pretrain.run import train

    return make_starts(train.main, given)


def pretraining(
    corpus: Path, run_dir: Path, phases: Sequence[tuple[int, int, int]], /, **changes: Any
) -> dict[str, Any]:
    """Settings of an fp32 run that logs every step; phases are (length, sequences, steps), section__key changes one."""
    return with_changes(
        {
            "name": "trial",
            "run_dir": str(run_dir),
            "corpus": {"dir": str(corpus), "vocabulary": {"size": 300}},
            "model": {"size": "custom", "layers": 2, "hidden": 32, "heads": 2, "max_positions": 64},
            "phases": [
                {"sequence_length": length, "global_sequences": count, "steps": steps, "peak_learning_rate": 1e-3}
                for length, count, steps in phases
            ],
            "engine": {"precision": "fp32", "compile": False, "micro_batch_tokens": 512},
            "evaluation": {"every_steps": 1000, "sequences": 16},
            "checkpoint": {"every_steps": 100},
            "tracking": {"log_every_steps": 1, "wandb": "off"},
        },
        changes,
    )


def with_changes(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested `values` with those named as section__key changed, in place."""
    for key, value in changes.items():
        *sections, last = key.split("__")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return values


def all_records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def records(run_dir: Path, split: str = "train") -> list[dict[str, Any]]:
    return [one for one in all_records(run_dir) if "event" not in one and one.get("split", "train") == split]


def losses(run_dir: Path, split: str = "train") -> list[tuple[int, float]]:
    """(step, loss) in the order of the file."""
    return [(record["step"], record["loss"]) for record in records(run_dir, split)]


@dataclass
class _StopsAt(Worker):
    """A worker that is asked to stop while it takes its `step`-th step."""

    step: int = 0
    _asked: int = 0

    def stop_requested(self) -> bool:
        if threading.current_thread() is not threading.main_thread():  # the watcher asks by the clock
            return False
        self._asked += 1
        return self._asked == self.step

"""Starts, stops and resumes training runs in the processes of `tests.distributed`."""

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
    """One start of a training run, on every worker."""

    config: dict[str, Any]
    resume: bool = False
    stop_at: int = 0  # a stop is requested in this step, counted from 1 at this start; 0: never


def make_starts(main: Callable[[TrainingRequest, Worker], None], starts: Sequence[Start]) -> list[str]:
    """Run the starts in order on this worker; return the type and message of the error of each, or ""."""
    outcomes = []
    rank, size = dist.get_rank(), dist.get_world_size()
    for start in starts:
        try:
            main(
                TrainingRequest(start.config, start.resume),
                _StopsAt(rank, size, rank, size, step=start.stop_at),
            )
            outcomes.append("")
        except RunError as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


def starts(requested: Sequence[Start]) -> list[str]:
    """Call `make_starts` for pretraining runs."""
    from pretrain.run import train

    return make_starts(train.main, requested)


def pretraining(
    corpus: Path, run_dir: Path, phases: Sequence[tuple[int, int, int]], /, **changes: Any
) -> dict[str, Any]:
    """Return the config of an fp32 run that logs every step; phases are (length, sequences per step, steps)."""
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
    """Set `changes`, whose names are section__key, in the nested dict `values`, and return it."""
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
    """Return (step, loss) of all records, in file order."""
    return [(record["step"], record["loss"]) for record in records(run_dir, split)]


@dataclass
class _StopsAt(Worker):
    """A worker of which a stop is requested in its `step`-th step."""

    step: int = 0
    _calls: int = 0

    def stop_requested(self) -> bool:
        if threading.current_thread() is not threading.main_thread():  # the watcher thread polls, too
            return False
        self._calls += 1
        return self._calls == self.step

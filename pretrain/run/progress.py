"""The progress of a training run, and the state that a checkpoint stores besides weights and moments."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pretrain.checkpoint import store
from pretrain.common.errors import InputError
from pretrain.common.memory import return_freed_memory
from pretrain.config import CheckpointConfig, ConfigT
from pretrain.run import preflight
from pretrain.training.engine import Engine


@dataclass
class MetricSums:
    """Sums over the steps since the last record and over all ranks; a checkpoint keeps them for the next record."""

    totals: list[float] = field(default_factory=list)  # sum of each metric's numerators
    counts: list[float] = field(default_factory=list)  # sum of each metric's denominators
    tokens: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0  # seconds of training from the last record to the last checkpoint after it
    stalled: float = 0.0  # seconds of waiting for batches, averaged over ranks

    def add(self, totals: list[float], counts: list[float]) -> None:
        """Add one step's sums and counts."""
        self.totals = [a + b for a, b in zip(self.totals or [0.0] * len(totals), totals, strict=True)]
        self.counts = [a + b for a, b in zip(self.counts or [0.0] * len(counts), counts, strict=True)]


class Stopwatch:
    """Measures the seconds of training; evaluation and checkpoints are counted separately."""

    def __init__(self) -> None:
        self._lap_start, self._excluded_in_lap = time.perf_counter(), 0.0
        self.excluded = {"evaluation": 0.0, "checkpoint": 0.0}  # {activity: seconds since the last record}

    def lap(self) -> float:
        """Return the seconds of training since the last lap."""
        now = time.perf_counter()
        seconds = now - self._lap_start - self._excluded_in_lap
        self._lap_start, self._excluded_in_lap = now, 0.0
        return seconds

    def exclude(self, activity: str, seconds: float) -> None:
        """Count these seconds as `activity`, not as training."""
        self.excluded[activity] += seconds
        self._excluded_in_lap += seconds


@dataclass
class Progress:
    """Counters and other state of the training loop, stored in checkpoints."""

    step: int = 0  # number of optimizer steps so far, including skipped ones
    samples: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    bad_in_a_row: int = 0  # consecutive steps without a finite loss and gradient
    seconds: float = 0.0  # seconds of training, over all starts of the run, up to the last record
    part: str = ""  # name of the phase's validation set; losses on different sets are not comparable
    best: list[float] | None = None  # lowest (best) `pretrain.storage.runs.evaluation_key` on this validation set
    evaluations_without_gain: int = 0
    stopped_early: bool = False
    recent: list[float] = field(default_factory=list)  # losses of the latest steps, for `spikes.is_spike`
    rollbacks: int = 0  # number of rollbacks; back to 0 after a checkpoint at or after `failed_step`
    failed_step: int = 0  # the step that caused the last rollback
    skipped: dict[str, Any] = field(default_factory=dict)  # data skipped by rollbacks, from `TrainingTask.skip`
    window: MetricSums = field(default_factory=MetricSums)  # sums since the last record
    saved_tokens: int = 0  # `tokens` at the last checkpoint

    def register_checkpoint(self, settings: CheckpointConfig) -> bool:
        """Note that this step's checkpoint is about to be saved, and return whether it is kept permanently."""
        interval, previous, self.saved_tokens = settings.keep_every_tokens, self.saved_tokens, self.tokens
        return self.step in settings.keep_at or (interval > 0 and self.tokens // interval > previous // interval)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """Create the progress from a checkpoint's state.json."""
        values = {name: state[name] for name in cls.__dataclass_fields__ if name in state}
        return cls(**{**values, "window": MetricSums(**values["window"])})


def checkpoint_state(engine: Engine, progress: Progress, extra_state: dict[str, Any]) -> dict[str, Any]:
    """Return the content of state.json: the progress, the engine's state that `restore` needs, and `extra_state`."""
    return {**dataclasses.asdict(progress), **engine.state(), **extra_state}


def read_state(engine: Engine, checkpoint: Path) -> dict[str, Any]:
    """Read a verified checkpoint's state.json. Raises `InputError` if its parameters differ from the engine's."""
    state = store.read_state(checkpoint)
    saved, expected = state["shapes"], {name: list(shape) for name, shape in engine.shapes.items()}
    for name in {**expected, **saved}:
        if saved.get(name) != expected.get(name):
            raise InputError(
                f"{checkpoint}: {name} has shape {saved.get(name)}, but {expected.get(name)} with this config. "
                "Resume with the config of the run that wrote it."
            )
    return state


def check_settings(
    state: dict[str, Any], checkpoint: Path, config: ConfigT, find_changed: preflight.FindChanged[ConfigT]
) -> None:
    """Raise `InputError` if `config` differs from the config with which the checkpoint of this state was written.

    `preflight` compares the run folder's config.yaml, but that file may be missing.
    """
    old_config = preflight.config_of_checkpoint(type(config), state, checkpoint)
    preflight.check_unchanged(checkpoint, old_config, config, state["step"], find_changed)


def restore(engine: Engine, checkpoint: Path) -> dict[str, Any]:
    """Load a verified checkpoint into `engine`; return the content of its state.json."""
    state = read_state(engine, checkpoint)
    return_freed_memory()  # leaves memory for the page cache of the checkpoint's files
    with store.CheckpointReader(checkpoint) as reader:
        engine.load(reader, state)
    return_freed_memory()
    return state

"""Trials (the single fine-tunings of a command that runs several), their outcomes, and statistics of their scores."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from finetune.experiments.grid import GridPoint
from finetune.training.config import FinetuneConfig
from pretrain.common.errors import DivergedError, MachineError, RunError


@dataclass(frozen=True)
class Trial:
    """One fine-tuning among several."""

    label: str
    config: FinetuneConfig
    base: FinetuneConfig  # the user's config, from which `config` is derived
    point: GridPoint


@dataclass(frozen=True)
class Outcome:
    """The result of a trial: scores, or the error."""

    metric: str = ""  # name of the score that chooses the checkpoint
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # {set: {score: value}}
    error: RunError | None = None
    chosen_on: str = ""  # the set that chose the checkpoint, or the fold; trials are compared only on it
    degenerate: str = ""  # reason why a finished run counts as failed (`trials.degenerate`); "" if it does not
    data: str = ""  # digest of the training data and of all scored data
    positive: str = ""  # with two classes: the class that f1 is computed for

    @property
    def is_final(self) -> bool:
        """True if the same command does not repeat the run; it repeats failed runs, unless they diverged."""
        return self.error is None or isinstance(self.error, DivergedError)

    @property
    def score(self) -> float | None:
        """The `metric` on the set that chose the checkpoint; None for a failed run, or if no set chose it."""
        return self.scores.get(self.chosen_on, {}).get(self.metric)


@dataclass(frozen=True)
class Spread:
    """Statistics of a score over runs; `deviation` is the sample standard deviation, None for a single run."""

    runs: int
    mean: float
    deviation: float | None
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Return the statistics of `values`; None if there are none."""
        if not values:
            return None
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(len(values), statistics.fmean(values), deviation, min(values), max(values))


def spreads(outcomes: Iterable[Outcome | None]) -> dict[str, dict[str, Spread]]:
    """Return {set: {score: its statistics over the outcomes that have this score}}."""
    values: dict[str, dict[str, list[float]]] = {}
    for outcome in outcomes:
        for split, scores in (outcome.scores if outcome else {}).items():
            for name, value in scores.items():
                if math.isfinite(value):
                    values.setdefault(split, {}).setdefault(name, []).append(value)
    return {
        split: {name: spread for name, samples in scores.items() if (spread := Spread.of(samples))}
        for split, scores in values.items()
    }


def failure(outcomes: Sequence[Outcome | None]) -> RunError | None:
    """Return the error of a command if runs failed: of the class of their errors, or `MachineError` if these differ."""
    errors = [outcome.error for outcome in outcomes if outcome and outcome.error]
    if not errors:
        return None
    classes = {type(error) for error in errors}
    error_class = classes.pop() if len(classes) == 1 else MachineError
    runs = f"{len(errors)} of {len(outcomes)} runs" if len(outcomes) > 1 else "the run"
    return error_class(f"{runs} failed; the reasons are above. The same command runs them again, unless they diverged.")

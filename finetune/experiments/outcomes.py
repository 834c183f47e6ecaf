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
    chosen_on: str = ""  # name of the set whose score chose the checkpoint, or of the fold; compares trials
    degenerate: str = ""  # reason why the scores are useless (`trials.degenerate_reason`); "" if there is none
    data_digest: str = ""  # digest of the training data and of all scored data
    positive: str = ""  # class whose F1 is computed, if there are two classes

    @property
    def is_final(self) -> bool:
        """True if the same command would not run the trial again: it succeeded, or it diverged."""
        return self.error is None or isinstance(self.error, DivergedError)

    @property
    def score(self) -> float | None:
        """Value of `metric` on the set `chosen_on`; None if the trial failed or had no such set."""
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
            for name, score in scores.items():
                if math.isfinite(score):
                    values.setdefault(split, {}).setdefault(name, []).append(score)
    return {
        split: {name: spread for name, samples in scores.items() if (spread := Spread.of(samples))}
        for split, scores in values.items()
    }


def combined_error(outcomes: Sequence[Outcome | None]) -> RunError | None:
    """Combine the errors of failed runs into one: of their class, or `MachineError` if classes differ; None if none."""
    errors = [outcome.error for outcome in outcomes if outcome and outcome.error]
    if not errors:
        return None
    classes = {type(error) for error in errors}
    error_class = classes.pop() if len(classes) == 1 else MachineError
    runs = f"{len(errors)} of {len(outcomes)} runs" if len(outcomes) > 1 else "the run"
    return error_class(f"{runs} failed; the reasons are above. The same command runs them again, unless they diverged.")

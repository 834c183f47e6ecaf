"""Candidates of a sweep: combinations of settings with their runs, ranked by the dev score."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from finetune.experiments.grid import GridPoint
from finetune.experiments.outcomes import Outcome, Spread, Trial
from finetune.training.config import FinetuneConfig


@dataclass(frozen=True)
class Candidate:
    """One combination of settings and its runs, one per seed."""

    base: FinetuneConfig  # the user's config
    point: GridPoint
    runs: dict[int, Outcome | None]  # index of a trial -> its outcome, or None if unfinished

    @cached_property
    def scores(self) -> dict[int, float]:
        """Scores of the runs that have one, as {index of the trial: score}."""
        return {
            index: outcome.score
            for index, outcome in self.runs.items()
            if outcome is not None and outcome.score is not None
        }

    @property
    def spread(self) -> Spread | None:
        """Statistics of the scores; None without any."""
        return Spread.of(list(self.scores.values()))

    @property
    def best_run(self) -> int | None:
        """Index of the trial with the highest score, the first if several have it; None without scores."""
        return max(self.scores, key=lambda index: (self.scores[index], -index), default=None)

    @property
    def num_failed(self) -> int:
        """Number of failed runs."""
        return sum(outcome is not None and outcome.error is not None for outcome in self.runs.values())

    @property
    def is_complete(self) -> bool:
        """True if no run would start or continue when the command is repeated."""
        return all(outcome is not None and outcome.is_final for outcome in self.runs.values())


def candidates(trials: Sequence[Trial], outcomes: Sequence[Outcome | None]) -> list[list[Candidate]]:
    """Group the trials into candidates, and return the candidates of each of the user's configs, in order."""
    by_config: dict[Path, dict[str, Candidate]] = {}
    for index, (trial, outcome) in enumerate(zip(trials, outcomes, strict=True)):
        by_point = by_config.setdefault(trial.base.folder, {})
        by_point.setdefault(trial.point.label, Candidate(trial.base, trial.point, {})).runs[index] = outcome
    return [list(by_point.values()) for by_point in by_config.values()]


def rank(unranked: Iterable[Candidate]) -> list[Candidate]:
    """Sort candidates: with scores first, then by fewest failed runs, then by highest mean. Ties keep their order."""

    def sort_key(candidate: Candidate) -> tuple[bool, int, float]:
        spread = candidate.spread
        return spread is None, candidate.num_failed, -spread.mean if spread else 0.0

    return sorted(unranked, key=sort_key)


def removable_trials(group: Sequence[Candidate]) -> list[int]:
    """Return the indices of the finished trials whose models are no longer needed, for the candidates of one config.

    Models to keep are from the best run of each incomplete candidate and of the best complete one.
    """
    best = next((candidate for candidate in rank(group) if candidate.scores and candidate.is_complete), None)
    kept = {candidate.best_run for candidate in group if candidate is best or not candidate.is_complete}
    finished = (index for candidate in group for index, outcome in candidate.runs.items() if outcome is not None)
    return sorted(index for index in finished if index not in kept)

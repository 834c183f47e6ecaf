"""Candidates of a sweep: settings with their runs, ranked by the dev score."""

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
    runs: dict[int, Outcome | None]  # trial number -> outcome; None if unfinished

    @cached_property
    def scores(self) -> dict[int, float]:
        """{trial number: score} of the runs that have one."""
        return {
            number: outcome.score
            for number, outcome in self.runs.items()
            if outcome is not None and outcome.score is not None
        }

    @property
    def spread(self) -> Spread | None:
        """Statistics of the scores; None without any."""
        return Spread.of(list(self.scores.values()))

    @property
    def best_run(self) -> int | None:
        """Number of the run with the highest score, the first of equals; None without scores."""
        return max(self.scores, key=lambda number: (self.scores[number], -number), default=None)

    @property
    def failed(self) -> int:
        """Number of failed runs."""
        return sum(outcome is not None and outcome.error is not None for outcome in self.runs.values())

    @property
    def is_complete(self) -> bool:
        """True if repeating the command would run nothing."""
        return all(outcome is not None and outcome.is_final for outcome in self.runs.values())


def candidates(trials: Sequence[Trial], outcomes: Sequence[Outcome | None]) -> list[list[Candidate]]:
    """Return the candidates of each of the user's configs, in the order of the trials."""
    by_config: dict[Path, dict[str, Candidate]] = {}
    for number, (trial, outcome) in enumerate(zip(trials, outcomes, strict=True)):
        by_point = by_config.setdefault(trial.base.folder, {})
        by_point.setdefault(trial.point.label, Candidate(trial.base, trial.point, {})).runs[number] = outcome
    return [list(by_point.values()) for by_point in by_config.values()]


def rank(unranked: Iterable[Candidate]) -> list[Candidate]:
    """Sort candidates by number of failed runs, then by mean, best first; no scores last. Ties keep their order."""

    def sort_key(candidate: Candidate) -> tuple[bool, int, float]:
        spread = candidate.spread
        return spread is None, candidate.failed, -spread.mean if spread else 0.0

    return sorted(unranked, key=sort_key)


def removable(group: Sequence[Candidate]) -> list[int]:
    """Return the numbers of finished trials whose models are not needed any more, from the candidates of one config.

    The best run of every incomplete candidate is kept, and the best run of the leading complete one.
    """
    leader = next((candidate for candidate in rank(group) if candidate.scores and candidate.is_complete), None)
    kept = {candidate.best_run for candidate in group if candidate is leader or not candidate.is_complete}
    finished = (number for candidate in group for number, outcome in candidate.runs.items() if outcome is not None)
    return sorted(number for number in finished if number not in kept)

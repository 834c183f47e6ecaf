"""The candidates of a sweep: choices of settings with their runs, ranked by the dev score."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from finetune.experiments.grid import GridPoint
from finetune.experiments.outcomes import Outcome, Spread, Trial
from finetune.training.config import FinetuneConfig


@dataclass(frozen=True)
class Candidate:
    """One choice of settings and its runs, one per seed."""

    base: FinetuneConfig  # the config whose settings they are
    point: GridPoint
    runs: dict[int, Outcome | None]  # number of the trial -> its outcome; None if it is still to run

    @cached_property
    def scores(self) -> dict[int, float]:
        """Number of the trial -> score, of the runs that have one."""
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
        """Whether no run is left for the same command."""
        return all(outcome is not None and outcome.is_final for outcome in self.runs.values())


def candidates(trials: Sequence[Trial], outcomes: Sequence[Outcome | None]) -> list[list[Candidate]]:
    """The candidates of each of the user's configs, in the order of the trials."""
    made: dict[Path, dict[str, Candidate]] = {}
    for number, (trial, outcome) in enumerate(zip(trials, outcomes, strict=True)):
        those = made.setdefault(trial.base.folder, {})
        those.setdefault(trial.point.label, Candidate(trial.base, trial.point, {})).runs[number] = outcome
    return [list(those.values()) for those in made.values()]


def rank(given: Iterable[Candidate]) -> list[Candidate]:
    """Candidates by fewest failed runs, then by highest mean; those without a score last. Ties keep their order."""

    def place(candidate: Candidate) -> tuple[bool, int, float]:
        spread = candidate.spread
        return spread is None, candidate.failed, -spread.mean if spread else 0.0

    return sorted(given, key=place)


def to_drop(given: Sequence[Candidate]) -> list[int]:
    """Numbers of the finished trials whose models are not needed any more.

    `given` are of one config. The best run of every incomplete candidate stays, and that of the leading complete one.
    """
    leader = next((candidate for candidate in rank(given) if candidate.scores and candidate.is_complete), None)
    kept = {candidate.best_run for candidate in given if candidate is leader or not candidate.is_complete}
    finished = (number for candidate in given for number, outcome in candidate.runs.items() if outcome is not None)
    return sorted(number for number in finished if number not in kept)

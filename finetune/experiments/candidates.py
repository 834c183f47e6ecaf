"""The candidates of a sweep: choices of settings with their runs, ranked by the dev score."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from finetune.experiments.grid import GridPoint
from finetune.experiments.outcomes import Outcome, Spread
from pretrain.common.errors import DivergedError


@dataclass(frozen=True)
class Candidate:
    """One choice of settings and its runs, one per seed."""

    point: GridPoint
    runs: dict[int, Outcome | None]  # number of the trial in the sweep -> its outcome; None if it is still to run

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
    def diverged(self) -> int:
        """Number of diverged runs."""
        return sum(outcome is not None and isinstance(outcome.error, DivergedError) for outcome in self.runs.values())

    @property
    def is_complete(self) -> bool:
        """Whether no run is left for the same command: it repeats runs that failed, except those that diverged."""
        return None not in self.runs.values() and self.failed == self.diverged


def candidates(points: Sequence[GridPoint], outcomes: Sequence[Outcome | None]) -> list[Candidate]:
    """The candidates of a sweep, from the point and the outcome of each trial, in the grid's order."""
    made: dict[str, Candidate] = {}
    for number, (point, outcome) in enumerate(zip(points, outcomes, strict=True)):
        made.setdefault(point.label, Candidate(point, {})).runs[number] = outcome
    return list(made.values())


def rank(given: Iterable[Candidate]) -> list[Candidate]:
    """Candidates by fewest failed runs, then by highest mean; those without a score last. Ties keep their order."""

    def place(candidate: Candidate) -> tuple[bool, int, float]:
        spread = candidate.spread
        return spread is None, candidate.failed, -spread.mean if spread else 0.0

    return sorted(given, key=place)


def to_drop(given: Sequence[Candidate]) -> list[int]:
    """Numbers of the finished trials whose models are not needed any more.

    The best run of every incomplete candidate stays, and the best run of the leading complete one.
    """
    scored = [candidate for candidate in given if candidate.scores]
    kept = {candidate.best_run for candidate in scored if not candidate.is_complete}
    if complete := [candidate for candidate in scored if candidate.is_complete]:
        kept.add(max(complete, key=_lead).best_run)
    finished = (number for candidate in given for number, outcome in candidate.runs.items() if outcome is not None)
    return sorted(number for number in finished if number not in kept)


def _lead(candidate: Candidate) -> tuple[int, float, int]:
    best, spread = candidate.best_run, candidate.spread
    assert best is not None
    assert spread is not None
    return -candidate.diverged, spread.mean, -best

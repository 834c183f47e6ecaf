"""Candidates of a sweep: combinations of settings, ranked by their scores on the dev set."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from finetune.experiments.grid import GridPoint
from finetune.experiments.outcomes import Outcome, Spread, Trial
from finetune.training.config import FinetuneConfig


@dataclass(frozen=True)
class Candidate:
    """One combination of settings, with the outcomes of its trials: one per seed and fold."""

    base: FinetuneConfig  # the user's config
    point: GridPoint
    outcomes: dict[int, Outcome | None]  # {index of a trial: its outcome, or None if it is unfinished}

    @cached_property
    def scores(self) -> dict[int, float]:
        """{index of a trial: its score}, for the trials that have a score."""
        return {
            index: outcome.score for index, outcome in self.outcomes.items() if outcome and outcome.score is not None
        }

    @property
    def spread(self) -> Spread | None:
        """Statistics of the scores; None if there are no scores."""
        return Spread.of(list(self.scores.values()))

    @property
    def best_trial(self) -> int | None:
        """Index of the trial with the highest score, the first one of a tie; None if there are no scores."""
        return max(self.scores, key=lambda index: (self.scores[index], -index), default=None)

    @property
    def num_failed(self) -> int:
        """Number of failed trials."""
        return sum(bool(outcome and outcome.error) for outcome in self.outcomes.values())

    @property
    def is_complete(self) -> bool:
        """True if the same command would not start or continue any of the trials."""
        return all(outcome and outcome.is_final for outcome in self.outcomes.values())


def group_trials(trials: Sequence[Trial], outcomes: Sequence[Outcome | None]) -> list[list[Candidate]]:
    """Group the trials into candidates; return one list of candidates for each of the user's configs, in order."""
    by_config: dict[Path, dict[str, Candidate]] = {}
    for index, (trial, outcome) in enumerate(zip(trials, outcomes, strict=True)):
        by_point = by_config.setdefault(trial.base.folder, {})
        by_point.setdefault(trial.point.label, Candidate(trial.base, trial.point, {})).outcomes[index] = outcome
    return [list(by_point.values()) for by_point in by_config.values()]


def rank(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort candidates: scored before unscored, then by fewest failed trials and highest mean. Ties keep their order."""

    def sort_key(candidate: Candidate) -> tuple[bool, int, float]:
        spread = candidate.spread
        return spread is None, candidate.num_failed, -spread.mean if spread else 0.0

    return sorted(candidates, key=sort_key)


def removable_trials(candidates: Sequence[Candidate]) -> list[int]:
    """Given the candidates of one config, return the indices of the finished trials whose models are no longer needed.

    Still needed: the model of the best trial of each incomplete candidate, and of the best complete candidate.
    """
    best = next((candidate for candidate in rank(candidates) if candidate.scores and candidate.is_complete), None)
    kept = {candidate.best_trial for candidate in candidates if candidate is best or not candidate.is_complete}
    finished = (index for candidate in candidates for index, outcome in candidate.outcomes.items() if outcome)
    return sorted(index for index in finished if index not in kept)

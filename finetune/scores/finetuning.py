"""The scores of fine-tunings from a checkpoint and from random weights of its shape, several seeds each."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from finetune.experiments.grid import GridPoint
from finetune.experiments.outcomes import Outcome, Spread
from finetune.experiments.trials import TrialRuns, raise_failure
from finetune.scores.finetuning_runs import (
    ConfigRuns,
    FinetuningSettings,
    Member,
    lasting,
    read_configs,
    run_members,
    starts,
)
from finetune.scores.masked_model import text_digest
from finetune.scores.record import Record
from finetune.training.config import FinetuneConfig
from pretrain.common.errors import DivergedError
from pretrain.run import preflight

PART = "finetuning"  # of a record
_NO_CHOICE = GridPoint({})


@dataclass(frozen=True)
class FinetuningScore:
    """The scores of one config on the set that chose its checkpoints, as fractions of 1, one for each finished run.

    Attributes:
        metric: name of the score, such as accuracy.
        part: name of the set, such as dev.
        pretrained: from the checkpoint.
        random: from random weights; () if they were not asked for.
        runs: how many there should be of each; 0 in records of earlier versions.
        chosen: "pretrained" and "random" -> the settings that were chosen from a grid, such as "learning_rate 1e-3".
    """

    metric: str
    part: str
    pretrained: tuple[float, ...]
    random: tuple[float, ...] = ()
    runs: int = 0
    chosen: Mapping[str, str] = field(default_factory=dict)

    @property
    def difference(self) -> float | None:
        """Mean from the checkpoint minus mean from random weights."""
        own, other = Spread.of(self.pretrained), Spread.of(self.random)
        return None if own is None or other is None else own.mean - other.mean

    @property
    def difference_in_errors(self) -> float | None:
        """The difference divided by its standard error; None without two runs of each, or if no scores differ."""
        own, other = Spread.of(self.pretrained), Spread.of(self.random)
        if own is None or other is None or own.error is None or other.error is None:
            return None
        error = math.hypot(own.error, other.error)
        return (own.mean - other.mean) / error if error else None

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        spread = {name: Spread.of(getattr(self, name)) for name in ("pretrained", "random")}
        statistics = {
            f"{name}_{what}": getattr(one, what) for name, one in spread.items() if one for what in ("mean", "error")
        }
        differences = {"difference": self.difference, "difference_in_errors": self.difference_in_errors}
        return {**asdict(self), **statistics, **differences}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> FinetuningScore:
        """The inverse of `as_data`."""
        values = tuple(data["pretrained"]), tuple(data["random"])
        return cls(data["metric"], data["part"], *values, data.get("runs", 0), data.get("chosen", {}))


def finetuning_scores(
    folder: Path, out: Path, name: str, settings: FinetuningSettings, *, record: Record | None = None
) -> dict[str, FinetuningScore]:
    """Fine-tune with each config; runs that finished before are not repeated.

    Args:
        folder: what `pretrain.checkpoint.released.read_released` reads.
        out: folder of all results, of this checkpoint and of others.
        name: of this checkpoint's runs in it.
        settings: configs, seeds, data.
        record: gets the scores whenever a run finishes.

    Returns:
        Config's name -> its scores.

    Raises:
        InputError: as `read_plans`, or a run folder has a run with other settings.
        MachineError: Ray cannot start.
        StoppedError: a signal; the same call continues.
        RunError: runs failed; all others have finished and are recorded.
    """
    given = starts(folder, out, name, settings)
    # Runs from random weights are shared with other checkpoints, whose processes must not run at once.
    with preflight.only_run(out) if settings.random else contextlib.nullcontext():
        return _fine_tuned(given, f"scores-{name}"[:63], settings, folder, record)


def _fine_tuned(
    given: Sequence[ConfigRuns], run_as: str, settings: FinetuningSettings, folder: Path, record: Record | None
) -> dict[str, FinetuningScore]:
    """As `finetuning_scores`, when no other process has the runs from random weights."""
    common = next(one.folder for one in given if not one.random)
    tried = [member for start in given for member in start.tried()] if settings.grid else []
    searched = run_members(tried, common, run_as, parallel=settings.parallel)
    raise_failure(TrialRuns([], searched.stopped))
    points = choices(tried, searched.outcomes)
    members = _scored(given, points, settings)
    hows = _hows(folder, settings) if record is not None else {}

    def ended(outcomes: Sequence[Outcome | None]) -> None:
        if record is not None:
            new = {key: {**one.as_data(), **hows[key]} for key, one in _scores(members, outcomes).items()}
            record.write(PART, {}, new, beside=True)

    ran = run_members(members, common, run_as, parallel=settings.parallel, ended=ended)
    undecided = [
        outcome
        for member, outcome in zip(tried, searched.outcomes, strict=True)
        if (member.config, member.random) not in points
    ]
    raise_failure(TrialRuns([*undecided, *ran.outcomes], ran.stopped))
    return _scores(members, ran.outcomes)


def choices(members: Sequence[Member], outcomes: Sequence[Outcome | None]) -> dict[tuple[str, bool], GridPoint]:
    """(config, whether from random weights) -> the point of the grid with the highest score, the first of equals.

    Each was run once, with a seed that is not scored. Runs that diverged lose; where others failed, nothing is chosen.
    """
    groups: dict[tuple[str, bool], list[tuple[GridPoint, Outcome | None]]] = {}
    for member, outcome in zip(members, outcomes, strict=True):
        groups.setdefault((member.config, member.random), []).append((member.point, outcome))
    chosen = {}
    for key, group in groups.items():
        scores = [
            (outcome.score, point) for point, outcome in group if outcome is not None and outcome.score is not None
        ]
        over = all(one is not None and (one.error is None or isinstance(one.error, DivergedError)) for _, one in group)
        if over and scores:
            chosen[key] = max(scores, key=lambda pair: pair[0])[1]
    return chosen


def _scored(
    given: Sequence[ConfigRuns], points: Mapping[tuple[str, bool], GridPoint], settings: FinetuningSettings
) -> list[Member]:
    """The runs that are scored, with the settings that were chosen for them."""
    members = []
    for start in given:
        point = points.get((start.config, start.random)) if settings.grid else _NO_CHOICE
        members += [] if point is None else start.scored(point)
    return members


def _hows(folder: Path, settings: FinetuningSettings) -> dict[str, dict[str, Any]]:
    """Config's name -> how its scores are measured: scores of models that differ in it cannot be compared.

    The point that a model chooses is none of it, the grid is.
    """
    grid = {"grid": {key: list(values) for key, values in settings.grid.items()}} if settings.grid else {}
    return {key: {**_how(config, settings), **grid} for key, config in read_configs(folder, settings).items()}


def _how(config: FinetuneConfig, settings: FinetuningSettings) -> dict[str, Any]:
    """The data are told apart by their texts and labels: their tokens are those of a model's own tokenizer."""
    task = config.make_task()
    sets = {"train": task.read_train(), **task.read_held_out()}
    records = ([name, task.record(example)] for name, examples in sets.items() for example in examples)
    return {
        "overrides": list(settings.overrides),
        "config": text_digest(json.dumps(lasting(config), sort_keys=True)),
        "data": text_digest(*(json.dumps(one, sort_keys=True) for one in records)),
    }


def _scores(members: Sequence[Member], outcomes: Sequence[Outcome | None]) -> dict[str, FinetuningScore]:
    """Config's name -> scores of the runs that finished."""
    done = [
        (member, outcome, outcome.score)
        for member, outcome in zip(members, outcomes, strict=True)
        if outcome is not None and outcome.score is not None
    ]
    return {
        key: FinetuningScore(
            metric=next(outcome.metric for member, outcome, _ in done if member.config == key),
            part=next(outcome.chosen_on for member, outcome, _ in done if member.config == key),
            pretrained=tuple(score for member, _, score in done if member.config == key and not member.random),
            random=tuple(score for member, _, score in done if member.config == key and member.random),
            runs=sum(member.config == key and not member.random for member in members),
            chosen={
                "random" if member.random else "pretrained": member.point.label
                for member, _, _ in done
                if member.config == key and member.point.settings
            },
        )
        for key in dict.fromkeys(member.config for member, _, _ in done)
    }

"""The trials of a folder: speedrun.json, the table for the terminal and the rows of the log."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from pretrain.common.errors import InputError
from pretrain.common.files import write_json
from pretrain.common.wording import counted
from tests.bench import aligned
from tests.bench.speedrun.scores import Scores
from tests.bench.speedrun.trial import budget_text

RESULTS = "speedrun.json"
NEWER = ("common words, bits", "whole words, bits/character")
HEADINGS = (
    "trial",
    "budget",
    "FLOP",
    "steps",
    "epochs",
    "minutes",
    *NEWER,
    "bits/character, one vocabulary",
    "nats/token",
    "accuracy",
)
RIGHT_ALIGNED = frozenset(range(1, len(HEADINGS)))
# As in the log of the documentation, whose earlier rows lack the last two.
_ELSEWHERE = ("BLiMP", "transfer")  # what `evaluate-pretrained` measures of the same run
_OTHERS = (one for one in HEADINGS if one not in NEWER)
LOG_HEADINGS = ("date", *_OTHERS, *_ELSEWHERE, "machine", "commit", "remarks", *NEWER)
_NONE = "-"


def _short_commit(commit: str | None) -> str:
    """The commit with a short hash; keeps the suffix -dirty."""
    return re.sub(r"([0-9a-f]{7})[0-9a-f]{33}", r"\1", commit) if commit else "unknown"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Trial(_Frozen):
    """One run of a trial."""

    trial: str  # name of the config
    run: str  # name of its run folder
    seed: int
    budget: float
    flops: float = 0.0  # executed, counted from the tokens that were trained on; 0 if it did not run
    steps: int = 0
    tokens: int = 0
    epochs: float = 0.0
    minutes: float = 0.0  # of training, over all starts, without evaluations and checkpoints
    words: int  # of the drawn text
    ground: str
    scores: Scores = Scores()  # as `scores.Scores`
    config: dict[str, Any] = {}  # of the run, whole
    machine: dict[str, Any] = {}  # environment.json of the run
    remarks: str = ""  # why it has no scores, or what else its row must say

    @property
    def date(self) -> str:
        """The day on which the run was last started."""
        return str(self.machine.get("started", ""))[:10]


class Results(_Frozen):
    """All trials of a folder, on one text."""

    format: int = 1
    trials: tuple[Trial, ...] = ()


def read(path: Path, ground: str | None = None) -> Results:
    """The trials in the file `path`; none if it does not exist.

    Raises `InputError` if it is damaged, or has trials on another text than that with the SHA-256 `ground`.
    """
    if not path.is_file():
        return Results()
    try:
        results = Results.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise InputError(f"{path}: damaged ({first['msg']}). Remove it; finished runs are measured again.") from None
    if ground is not None and any(one.ground != ground for one in results.trials):
        raise InputError(f"{path}: has trials on another text, which do not compare. Give another --out, or remove it.")
    return results


def with_trial(results: Results, trial: Trial) -> Results:
    """The results with one trial more, or another one of the same run; in the order of budgets and scores."""
    trials = [one for one in results.trials if one.run != trial.run] + [trial]
    trials.sort(key=lambda one: (one.budget, _rank(one.scores), one.run))
    return Results(trials=tuple(trials))


def _rank(scores: Scores) -> tuple[float, float]:
    """Of runs with one budget: by the score that compares vocabularies, then by that within one."""
    across, within = scores.common_word_bits, scores.bits_per_character
    return float("inf") if across is None else across, float("inf") if within is None else within


def write(results: Results, path: Path) -> None:
    """Write speedrun.json, atomically."""
    write_json(path, results.model_dump(mode="json"))


def cells(trial: Trial) -> tuple[str, ...]:
    """The trial as text: one string per heading."""
    scores = trial.scores
    return (
        f"{trial.trial} s{trial.seed}",
        budget_text(trial.budget),
        f"{trial.flops:.4g}" if trial.flops else _NONE,
        f"{trial.steps:,}" if trial.steps else _NONE,
        f"{trial.epochs:.2f}" if trial.steps else _NONE,
        f"{trial.minutes:.1f}" if trial.minutes else _NONE,
        _number(scores.common_word_bits, 4),
        _NONE if scores.whole_word_bits is None else " to ".join(_number(one, 3) for one in scores.whole_word_bits),
        _number(scores.bits_per_character, 4),
        _number(scores.nats, 4),
        _number(scores.accuracy, 4),
    )


def table(results: Results) -> str:
    """The table for a terminal: a line per run, then their remarks."""
    lines = aligned([HEADINGS, *map(cells, results.trials)], RIGHT_ALIGNED)
    lines += [f"{one.run}: {one.remarks}" for one in results.trials if one.remarks]
    return "\n".join(lines)


def log_row(trial: Trial) -> str:
    """The trial as a row of the Markdown table that ends docs/benchmarks/speedrun.md."""
    machine = f"{counted(trial.machine.get('cpu_cores', 0), 'core')} of {trial.machine.get('cpu')}"
    gpus = ", ".join(filter(None, trial.machine.get("gpus", [])))
    commit = _short_commit(trial.machine.get("git_commit"))
    values = {"date": trial.date, **dict(zip(HEADINGS, cells(trial), strict=True))}
    values |= {"machine": gpus or machine, "commit": commit, "remarks": trial.remarks}
    return "| " + " | ".join(values.get(heading, _NONE).replace("|", "\\|") for heading in LOG_HEADINGS) + " |"


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"

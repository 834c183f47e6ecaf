"""The runs of `bench speedrun` as points of a scaling law."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import ValidationError

from pretrain.common.errors import InputError
from pretrain.config import PretrainConfig
from pretrain.planning.candidates import shape_name
from pretrain.planning.law import FLOPS_PER_PARAMETER
from pretrain.planning.published import MeasuredRun
from pretrain.planning.work import optimizer_flops, phase_work
from tests.bench.speedrun import results
from tests.bench.speedrun.results import Trial


@dataclass(frozen=True)
class Run:
    """A trial that counts, as a point."""

    point: MeasuredRun  # its figures
    trial: Trial  # its row
    config: PretrainConfig  # of the run


@dataclass(frozen=True)
class Choice:
    """Which trials count."""

    only: tuple[str, ...] = ()  # patterns of names of runs or trials; () takes all
    held_out: tuple[str, ...] = ()  # likewise, of those that the law is not fitted to
    below: float = float("inf")  # most bits per character; infinite takes all


def read_runs(folders: Sequence[Path], choice: Choice) -> tuple[list[Run], list[str]]:
    """(the runs that count, by FLOPs; why others do not).

    Raises `InputError` if a folder has no results, they are of different texts, or a name has no run.
    """
    trials = _trials(folders)
    for option, patterns in (("--only", choice.only), ("--holdout", choice.held_out)):
        for pattern in patterns:
            if not any(_matches(one, [pattern]) for one in trials):
                names = ", ".join(sorted({one.trial for one in trials}))
                raise InputError(f"{option} {pattern}: no run or trial has this name; there are {names}.")
    taken = [one for one in trials if not choice.only or _matches(one, choice.only)]
    found: list[Run] = []
    left_out: list[str] = []
    for one in taken:
        run = _run(one, choice)
        if isinstance(run, Run):
            found.append(run)
        else:
            left_out.append(f"{one.run}: left out, {run}")
    best = _best(found)
    left_out += [
        f"{run.trial.run}: left out, {best[_key(run)].trial.run} is better" for run in found if run not in best.values()
    ]
    return sorted(best.values(), key=lambda run: (run.point.flops, run.point.size)), left_out


def _trials(folders: Sequence[Path]) -> list[Trial]:
    trials: list[Trial] = []
    for folder in folders:
        path = folder / results.RESULTS
        if not path.is_file():
            raise InputError(f"{folder}: has no {results.RESULTS}. Give the --out of a `bench speedrun`.")
        trials += results.read(path).trials
    grounds = {one.ground for one in trials}
    if len(grounds) > 1:
        raise InputError(f"{', '.join(map(str, folders))}: have trials on different texts, which do not compare.")
    return trials


def _matches(one: Trial, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in (one.run, one.trial) for pattern in patterns)


def _refusal(one: Trial, below: float) -> str:
    """Why a trial is no point, or ""."""
    loss = one.scores.bits_per_character
    if not one.flops or loss is None:
        return one.remarks or "it has no score"
    config = one.config
    if config.get("distillation", {}).get("teacher"):
        return "it has a teacher"
    if not 0 < loss < math.inf:
        return f"its score is {loss:g} bits per character"
    return f"{loss:.3f} bits per character are not below {below:g}" if loss >= below else ""


def _run(one: Trial, choice: Choice) -> Run | str:
    """The trial as a point, or why it is none."""
    why = _refusal(one, choice.below)
    if why:
        return why
    try:
        config = PretrainConfig.model_validate(one.config)
    except ValidationError as error:
        return f"its config is of another version ({error.errors()[0]['msg']})"
    flops = (one.flops - one.steps * optimizer_flops(config)) * (1 - _repeated_share(config))
    loss = one.scores.bits_per_character
    assert loss is not None
    point = MeasuredRun(
        run=one.run,
        shape=shape_name(config.model),
        size=flops / FLOPS_PER_PARAMETER / one.tokens,
        tokens=one.tokens,
        unique=one.tokens / one.epochs,
        flops=one.flops,
        loss=loss,
        minutes=one.minutes,
        held_out=_matches(one, choice.held_out),
    )
    return Run(point, one, config)


def _repeated_share(config: PretrainConfig) -> float:
    """The share of the FLOPs, without the optimizer's, that activation checkpointing adds."""
    rows = config.model.rows(config.corpus.vocabulary.size)
    work = [phase_work(config, phase, rows) for phase in config.phases]
    executed = sum(part.executed - part.steps * optimizer_flops(config) for part in work)
    return sum(part.repeated for part in work) / executed


def _key(run: Run) -> str:
    """Equal for runs of one size and budget, which differ in batch, rate or seed."""
    model = run.config.model.model_dump(mode="json")
    return json.dumps([model, run.config.corpus.vocabulary.size, run.trial.budget, run.point.held_out])


def _best(runs: Sequence[Run]) -> dict[str, Run]:
    best: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: run.point.loss):
        best.setdefault(_key(run), run)
    return best

"""Several seeds of one fine-tuning, and grids of settings: what is tried, tables, the best of them."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import runs
from finetune.artifacts.saved import MODEL
from finetune.config import GRIDS, FinetuneConfig, load_config
from finetune.experiments.trials import (
    Outcome,
    Ran,
    Spread,
    Trial,
    as_data,
    failure,
    run_all,
    spreads,
    trial_config,
)
from pretrain.common.errors import DivergedError, InputError, RunError
from pretrain.common.files import atomic_open, write_json
from pretrain.common.settings import dump

if TYPE_CHECKING:
    from rich.table import Table

SUMMARY = "summary.json"
BEST = "best.yaml"

_COLUMNS = 6  # scores in a table; all are in summary.json
_NO_AXES = ("seed", "name", "run_dir", "scheduling", "tracking")  # each run has its own, or all have one
_REMARK = 90  # characters of the reason why a run failed

Grid = Mapping[str, Sequence[str]]
"""A setting's dotted name -> its values as YAML writes them."""


@dataclass(frozen=True)
class Point:
    """One choice of settings in a sweep, as dotted name -> value as YAML writes it."""

    settings: Mapping[str, str]

    @property
    def label(self) -> str:
        return ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in self.settings.items())

    @property
    def folder(self) -> str:
        """Name of its folder: the same in every sweep over these settings."""
        parts = (f"{name.rpartition('.')[2]}-{value}" for name, value in self.settings.items())
        return _plain("-".join(parts), keep=".")

    @property
    def name(self) -> str:
        return _plain("-".join(self.settings.values()))

    @property
    def overrides(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.settings.items()]


# ---------------------------------------------------------------- the commands


def run_seeds(config: FinetuneConfig, seeds: int, *, parallel: int = 0, dry_run: bool = False) -> None:
    """Fine-tune with seeds config.seed, config.seed + 1, ... and print and write what they came to.

    Raises what `trials.run_all` does, `StoppedError` on a signal, and at the end an error if runs failed.
    """
    plan = runs.plan(config, alone=True)
    trials = [
        Trial(
            f"seed {seed}",
            trial_config(config, f"seed-{seed}", folder=config.folder / f"seed-{seed}", seed=seed),
            plan.steps,
        )
        for seed in range(config.seed, config.seed + seeds)
    ]
    if dry_run:
        print(runs.describe(config, plan))
        print(f"\n{len(trials)} runs: " + ", ".join(str(trial.config.folder) for trial in trials))
        return
    print(runs.describe_start(config, plan))
    ran = run_all(config, trials, parallel=parallel)
    write_json(config.folder / SUMMARY, summary(trials, ran.outcomes))
    show(seeds_table(trials, ran.outcomes))
    print(f"{config.folder / SUMMARY}: {count_line(ran.outcomes)}")
    end(ran)


def run_sweep(
    path: Path,
    overrides: Sequence[str],
    grid: Grid,
    *,
    seeds: int = 1,
    parallel: int = 0,
    keep: str = "best",
    dry_run: bool = False,
) -> None:
    """Fine-tune with every combination of `grid`; print the table, best first, and write summary.json and best.yaml.

    Args:
        keep: "best" keeps the model of the best run only, "all" those of all.

    Raises as `run_seeds` does, and `InputError` where no held-out set says which is the best.
    """
    config = load_config(path, overrides)
    trials = sweep_trials(config, path, overrides, expand(grid), seeds)
    plan = runs.plan(trials[0][1].config, alone=True)
    if not plan.held_out:
        raise InputError(f"{path}: no dev set, so nothing says which settings are best. Name one.")
    points, members = [point for point, _ in trials], [trial for _, trial in trials]
    for trial in members:
        runs.check_fit(trial.config, plan.model)
    members = [Trial(trial.label, trial.config, trial.config.total_steps(plan.units)) for trial in members]
    if dry_run:
        print(runs.describe(config, plan))
        print(f"\n{len(members)} runs:\n" + "\n".join(f"  {trial.config.folder}" for trial in members))
        return
    print(runs.describe_start(config, plan))

    def spare_disk(outcomes: list[Outcome | None]) -> None:
        if keep == "best":
            for number in to_drop(points, outcomes):
                shutil.rmtree(members[number].config.folder / MODEL, ignore_errors=True)

    ran = run_all(config, members, parallel=parallel, ended=spare_disk)
    spare_disk(ran.outcomes)
    ranking = rank(points, ran.outcomes)
    data = summary(members, ran.outcomes)
    data["settings"] = [
        {**point.settings, "metric": spread.mean, "deviation": spread.deviation, "runs": spread.runs}
        for point, spread in ranking
        if spread is not None
    ]
    write_json(config.folder / SUMMARY, data)
    show(sweep_table(points, ran.outcomes, _metric(ran.outcomes)))
    print(f"{config.folder / SUMMARY}: {count_line(ran.outcomes)}")
    if ranking[0][1] is not None:
        _tell_best(config, path, overrides, points, members, ran.outcomes, ranking[0][0])
    end(ran)


def end(ran: Ran) -> None:
    """Raise what a command of several runs ends with, if anything."""
    error: RunError | None = ran.stopped or failure(ran.outcomes)
    if error is not None:
        raise error


# ---------------------------------------------------------------- what is tried


def parse_grid(name: str, given: Sequence[str]) -> dict[str, list[str]]:
    """The grid of this name (empty for none) with axes "key=value,value" laid over it."""
    grid = {key: [f"{value:g}" for value in values] for key, values in GRIDS[name].items()} if name else {}
    for text in given:
        key, equals, written = text.partition("=")
        values = [value.strip() for value in _split(written)]
        if not equals or not key.strip() or not all(values):
            raise InputError(
                f"--grid-set {text}: expected key=value,value, for example training.learning_rate=1e-5,3e-5."
            )
        if key.strip().partition(".")[0] in _NO_AXES:
            instead = " Use --seeds N." if key.strip() == "seed" else " Use --set, for all runs."
            raise InputError(f"--grid-set {text}: is no setting to compare by.{instead}")
        grid[key.strip()] = list(dict.fromkeys(values))
    return grid


def expand(grid: Grid) -> list[Point]:
    """Every combination, the last setting changing fastest."""
    return [Point(dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values())]


def sweep_trials(
    config: FinetuneConfig, path: Path, overrides: Sequence[str], points: Sequence[Point], seeds: int
) -> list[tuple[Point, Trial]]:
    """The trials of all points, the seeds of one next to each other. Steps are not known yet."""
    if config.training.steps and any("training.epochs" in point.settings for point in points):
        raise InputError("training.steps: is set and goes before training.epochs, so a grid of epochs has no use.")
    trials, folders = [], set()
    for point in points:
        chosen = load_config(path, [*overrides, *point.overrides])
        if point.folder in folders:
            raise InputError(f"--grid-set: two points would share the folder {point.folder}. Name one of them.")
        folders.add(point.folder)
        for seed in range(config.seed, config.seed + seeds):
            several = f"seed-{seed}" if seeds > 1 else ""
            label = f"{point.label}, seed {seed}" if several else point.label
            one = trial_config(
                chosen,
                "-".join(filter(None, [point.name, several])),
                folder=config.folder / point.folder / f"seed-{seed}",
                seed=seed,
            )
            trials.append((point, Trial(label, one, 0)))
    return trials


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _plain(text: str, keep: str = "") -> str:
    return re.sub(rf"[^a-z0-9{re.escape(keep)}]+", "-", text.lower()).strip("-.")


# ---------------------------------------------------------------- what came of it


def rank(points: Sequence[Point], outcomes: Sequence[Outcome | None]) -> list[tuple[Point, Spread | None]]:
    """The settings, those of the fewest failed runs first and of them that of the highest mean.

    Those without a score come last. Ties keep the grid's order.
    """
    found = [
        (point, Spread.of([outcomes[number].score for number in numbers]))  # pyright: ignore
        for point, numbers in _by_point(points, outcomes)
    ]
    failed = Counter(point.label for point, outcome in zip(points, outcomes, strict=True) if outcome and outcome.error)

    def place(one: tuple[Point, Spread | None]) -> tuple[bool, int, float]:
        point, spread = one
        return spread is None, failed[point.label], -spread.mean if spread else 0.0

    return sorted(found, key=place)


def to_drop(points: Sequence[Point], outcomes: Sequence[Outcome | None]) -> list[int]:
    """Numbers of the trials whose models need not be kept any more.

    Kept are the best run of the settings that lead among those whose runs are all over, and of settings that are not.
    A run that failed and did not diverge is not over: the same command runs it again.
    """
    whole: list[tuple[int, float, int]] = []  # (-diverged runs, mean, -number of the best run)
    kept: set[int] = set()
    members: dict[str, list[int]] = {}
    for number, point in enumerate(points):
        members.setdefault(point.label, []).append(number)
    for numbers in members.values():
        scored = {number: score for number in numbers if (score := _score(outcomes[number])) is not None}
        if not scored:
            continue
        best = max(scored, key=lambda number: (scored[number], -number))
        errors = [outcome.error for number in numbers if (outcome := outcomes[number]) is not None]
        diverged = sum(isinstance(error, DivergedError) for error in errors)
        if len(errors) == len(numbers) and diverged == sum(error is not None for error in errors):
            whole.append((-diverged, sum(scored.values()) / len(scored), -best))
        else:
            kept.add(best)
    if whole:
        kept.add(-max(whole)[2])
    return [number for number, outcome in enumerate(outcomes) if outcome is not None and number not in kept]


def summary(trials: Sequence[Trial], outcomes: Sequence[Outcome | None]) -> dict[str, Any]:
    """summary.json: counts, statistics of every score, and every run."""
    return {
        "command": sys.argv[1:],
        "metric": _metric(outcomes),
        **counts(outcomes),
        "scores": {
            part: {name: vars(spread) for name, spread in those.items()} for part, those in spreads(outcomes).items()
        },
        "each": [as_data(trial, outcome) for trial, outcome in zip(trials, outcomes, strict=True)],
    }


def counts(outcomes: Sequence[Outcome | None]) -> dict[str, int]:
    """How many runs there are, are done with scores, failed, learnt nothing (of those done), and are still to run."""
    return {
        "runs": len(outcomes),
        "done": sum(outcome is not None and outcome.error is None for outcome in outcomes),
        "failed": sum(outcome is not None and outcome.error is not None for outcome in outcomes),
        "degenerate": sum(outcome is not None and bool(outcome.degenerate) for outcome in outcomes),
        "to_run": sum(outcome is None for outcome in outcomes),
    }


def count_line(outcomes: Sequence[Outcome | None]) -> str:
    """`5 runs, 4 done, 1 failed`, and what else is not 0."""
    number = counts(outcomes)
    runs_word = "run" if number["runs"] == 1 else "runs"
    line = f"{number['runs']} {runs_word}, {number['done']} done, {number['failed']} failed"
    if number["degenerate"]:
        line += f", {number['degenerate']} no better than the most frequent class"
    return line + (f", {number['to_run']} to run" if number["to_run"] else "")


def seeds_table(trials: Sequence[Trial], outcomes: Sequence[Outcome | None]) -> Table:
    """A row for every run, then mean, deviation, least and most."""
    columns = _columns(outcomes)
    table = _table(["", *(_heading(part, name, outcomes) for part, name in columns), ""])
    for trial, outcome in zip(trials, outcomes, strict=True):
        cells = [_cell(outcome and outcome.scores.get(part, {}).get(name)) for part, name in columns]
        table.add_row(trial.label, *cells, _remark(outcome))
    found = spreads(outcomes)
    if columns and any(outcome and outcome.scores for outcome in outcomes):
        table.add_section()
        those = [found.get(part, {}).get(name) for part, name in columns]
        table.add_row("mean", *(_cell(one and one.mean) for one in those), "", style="bold")
        table.add_row("std", *(_cell(one and one.deviation) for one in those), "")
        table.add_row("min", *(_cell(one and one.least) for one in those), "")
        table.add_row("max", *(_cell(one and one.most) for one in those), "")
    return table


def sweep_table(points: Sequence[Point], outcomes: Sequence[Outcome | None], metric: str) -> Table:
    """A row for every choice of settings, the best first."""
    axes = list(points[0].settings)
    several = len(points) > len({point.label for point in points})
    statistic = ["mean", "std", "min", "max"] if several else []
    headings = [name.rpartition(".")[2] for name in axes]
    table = _table([*headings, *([f"{metric} {one}" for one in statistic] or [metric]), ""])
    remarks = {
        point.label: [_remark(outcome) for one, outcome in zip(points, outcomes, strict=True) if one == point]
        for point in points
    }
    for place, (point, spread) in enumerate(rank(points, outcomes)):
        values = (spread.mean, spread.deviation, spread.least, spread.most) if spread else (None,) * 4
        remark = "; ".join(dict.fromkeys(filter(None, remarks[point.label])))
        cells = [_cell(value) for value in (values if several else values[:1])]
        table.add_row(*point.settings.values(), *cells, remark, style="" if place or not spread else "bold")
    return table


def show(table: Table) -> None:
    """Print a table as wide as the terminal; into a file as wide as it needs."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=200)
    console.print(table)


def _tell_best(
    config: FinetuneConfig,
    path: Path,
    overrides: Sequence[str],
    points: Sequence[Point],
    trials: Sequence[Trial],
    outcomes: Sequence[Outcome | None],
    best: Point,
) -> None:
    """Write best.yaml, a run of its own, and say where the best run's model is."""
    chosen = load_config(path, [*overrides, *best.overrides])
    chosen = chosen.model_copy(update={"name": f"{config.name[:58]}-best", "run_dir": ""})
    with atomic_open(config.folder / BEST, "w") as file:
        file.write(dump(chosen))
    numbers = [number for number, point in enumerate(points) if point.label == best.label]
    number = max(numbers, key=lambda number: (_score(outcomes[number]) or float("-inf"), -number))
    print(f"best: {best.label}; written to {config.folder / BEST}")
    model = trials[number].config.folder / MODEL
    if model.is_dir():
        print(f"{model}: the best of its runs. {runs.next_command(trials[number].config)}")


def _by_point(points: Sequence[Point], outcomes: Sequence[Outcome | None]) -> list[tuple[Point, list[int]]]:
    """Every point once, with the numbers of its runs that have a score."""
    found: dict[str, tuple[Point, list[int]]] = {}
    for number, point in enumerate(points):
        found.setdefault(point.label, (point, []))
        if _score(outcomes[number]) is not None:
            found[point.label][1].append(number)
    return list(found.values())


def _score(outcome: Outcome | None) -> float | None:
    return outcome.score if outcome is not None else None


def _metric(outcomes: Sequence[Outcome | None]) -> str:
    return next((outcome.metric for outcome in outcomes if outcome and outcome.metric), "")


def _columns(outcomes: Sequence[Outcome | None]) -> list[tuple[str, str]]:
    """(set, score) of the table: the score that counts first, then the first set's others, then the other sets'."""
    scores = next((outcome.scores for outcome in outcomes if outcome and outcome.scores), {})
    metric = _metric(outcomes)
    every = [(part, name) for part, those in scores.items() for name in those]
    first = next(iter(scores), "")
    every.sort(key=lambda one: (one[1] != metric, one[0] != first))
    return every[:_COLUMNS]


def _heading(part: str, name: str, outcomes: Sequence[Outcome | None]) -> str:
    several = any(outcome and len(outcome.scores) > 1 for outcome in outcomes)
    return f"{part} {name}" if several else name


def _remark(outcome: Outcome | None) -> str:
    if outcome is None:
        return "to run"
    if outcome.error is not None:
        return textwrap.shorten(f"failed: {outcome.error}", _REMARK, placeholder=" ...")
    return outcome.degenerate


def _table(headings: Sequence[str]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        is_number = heading not in ("", headings[0])
        table.add_column(heading, justify="right" if is_number else "left", overflow="fold")
    return table


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"

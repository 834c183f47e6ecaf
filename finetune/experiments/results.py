"""What a command of several runs writes and prints: summary.json and tables."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from finetune.experiments.candidates import Candidate, rank
from finetune.experiments.outcomes import Outcome, Trial, as_data, spreads
from pretrain.common.wording import counted, shown_scores

if TYPE_CHECKING:
    from rich.table import Table

SUMMARY = "summary.json"

_COLUMNS = 6  # scores in a table; summary.json has all
_REMARK = 90  # characters of the reason why a run failed


def summary(trials: Sequence[Trial], outcomes: Sequence[Outcome | None]) -> dict[str, Any]:
    """summary.json: counts, statistics of every score, and every run."""
    return {
        "command": sys.argv[1:],
        "metric": metric_of(outcomes),
        **counts(outcomes),
        "scores": {
            part: {name: vars(spread) for name, spread in those.items()} for part, those in spreads(outcomes).items()
        },
        "each": [as_data(trial, outcome) for trial, outcome in zip(trials, outcomes, strict=True)],
    }


def counts(outcomes: Sequence[Outcome | None]) -> dict[str, int]:
    """Numbers of runs: all, done with scores, failed, degenerate (of those done), still to run."""
    return {
        "runs": len(outcomes),
        "done": sum(outcome is not None and outcome.error is None for outcome in outcomes),
        "failed": sum(outcome is not None and outcome.error is not None for outcome in outcomes),
        "degenerate": sum(outcome is not None and bool(outcome.degenerate) for outcome in outcomes),
        "to_run": sum(outcome is None for outcome in outcomes),
    }


def count_line(outcomes: Sequence[Outcome | None]) -> str:
    """`5 runs, 4 done, 1 failed`, and the other counts if not 0."""
    number = counts(outcomes)
    line = f"{counted(number['runs'], 'run')}, {number['done']} done, {number['failed']} failed"
    if number["degenerate"]:
        line += f", {number['degenerate']} no better than the most frequent class"
    return line + (f", {number['to_run']} to run" if number["to_run"] else "")


def seeds_table(trials: Sequence[Trial], outcomes: Sequence[Outcome | None]) -> Table:
    """A row for every run, then mean, standard deviation, minimum and maximum."""
    columns = _columns(outcomes)
    table = _table(["", *(_heading(part, name, outcomes) for part, name in columns), ""])
    for trial, outcome in zip(trials, outcomes, strict=True):
        cells = [_cell(outcome and outcome.scores.get(part, {}).get(name)) for part, name in columns]
        table.add_row(trial.label, *cells, _remark(outcome))
    statistics = spreads(outcomes)
    if columns and any(outcome and outcome.scores for outcome in outcomes):
        table.add_section()
        those = [statistics.get(part, {}).get(name) for part, name in columns]
        table.add_row("mean", *(_cell(one and one.mean) for one in those), "", style="bold")
        table.add_row("std", *(_cell(one and one.deviation) for one in those), "")
        table.add_row("min", *(_cell(one and one.least) for one in those), "")
        table.add_row("max", *(_cell(one and one.most) for one in those), "")
    return table


def sweep_table(given: Sequence[Candidate], metric: str) -> Table:
    """A row for every candidate, the best first."""
    axes = list(given[0].point.settings)
    several = any(len(candidate.runs) > 1 for candidate in given)
    statistic = ["mean", "std", "min", "max"] if several else []
    headings = [name.rpartition(".")[2] for name in axes]
    table = _table([*headings, *([f"{metric} {one}" for one in statistic] or [metric]), ""])
    for place, candidate in enumerate(rank(given)):
        spread = candidate.spread
        values = (spread.mean, spread.deviation, spread.least, spread.most) if spread else (None,) * 4
        remark = "; ".join(dict.fromkeys(filter(None, map(_remark, candidate.runs.values()))))
        cells = [_cell(value) for value in (values if several else values[:1])]
        table.add_row(*candidate.point.settings.values(), *cells, remark, style="" if place or not spread else "bold")
    return table


def show(table: Table) -> None:
    """Print a table as wide as the terminal, or 200 characters wide into a file."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=200)
    console.print(table)


def metric_of(outcomes: Sequence[Outcome | None]) -> str:
    """The score that chooses checkpoints; "" before any run has one."""
    return next((outcome.metric for outcome in outcomes if outcome and outcome.metric), "")


def _columns(outcomes: Sequence[Outcome | None]) -> list[tuple[str, str]]:
    """(set, score) of the columns: the choosing metric first, then other scores of the first set, then other sets."""
    scores = next((outcome.scores for outcome in outcomes if outcome and outcome.scores), {})
    metric = metric_of(outcomes)
    every = [(part, name) for part, those in scores.items() for name in shown_scores(those, metric)]
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

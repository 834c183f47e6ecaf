"""The command `bench law`: points, fit, table and file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pretrain.common.errors import InputError
from pretrain.common.files import disk_errors, write_json
from pretrain.common.wording import aligned, counted
from pretrain.planning import published
from pretrain.planning.published import PublishedLaw, Recipe
from tests.bench.law.fitting import FEWEST, published_fit
from tests.bench.law.options import make_parser
from tests.bench.law.points import Choice, Run, read_runs
from tests.bench.law.table import HEADINGS, RIGHT_ALIGNED, cells, summary
from tests.bench.speedrun.results import short_commit

FILE = "law.json"
_SIZES = 3  # sizes and budgets, below which a law says nothing
_ALIKE = 0.01  # relative difference up to which two count as one; those of one shape vary with the steps


def main(argv: Sequence[str]) -> int:
    """Fit, print the table, write the file.

    Args:
        argv: those of `options.make_parser`.

    Raises:
        InputError: a path or name is wrong, or there are too few runs.
    """
    arguments = make_parser().parse_args(argv)
    below = float("inf") if arguments.below is None else arguments.below
    runs, left_out = read_runs(arguments.runs, Choice(tuple(arguments.only or ()), tuple(arguments.holdout), below))
    law = fit_runs(runs)
    likely = law.likely
    print("\n".join([*aligned([HEADINGS, *cells(law, likely)], RIGHT_ALIGNED), *left_out, "", *summary(law, likely)]))
    out: Path = arguments.out or arguments.runs[0]
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    for path in (out / FILE, *([published.PUBLISHED] if arguments.write else [])):
        write_json(path, law.model_dump(mode="json"))
        print(path)
    return 0


def fit_runs(runs: Sequence[Run]) -> PublishedLaw:
    """The law of the runs that are not held out. Raises `InputError` if they are too few or too much alike."""
    fitted = [run for run in runs if not run.point.held_out]
    sizes, amounts = (_distinct([value(run) for run in fitted]) for value in (_size, _tokens))
    if len(fitted) < FEWEST or min(sizes, amounts) < _SIZES:
        raise InputError(
            f"bench law: {counted(len(fitted), 'run')} of {counted(sizes, 'size')} to fit; expected at least "
            f"{FEWEST} of {_SIZES} sizes and {_SIZES} numbers of tokens. Train more with `bench speedrun`."
        )
    newest = max(fitted, key=lambda run: run.trial.machine.get("started", ""))
    machine = newest.trial.machine
    gpus = ", ".join(filter(None, machine.get("gpus", [])))
    return PublishedLaw(
        **published_fit([run.point for run in fitted]),
        points=tuple(run.point for run in runs),
        recipe=Recipe.of(*(run.config for run in fitted)),
        machine=gpus or f"{machine.get('cpu_cores')} cores of {machine.get('cpu')}",
        commit=short_commit(machine.get("git_commit")),
        date=newest.trial.date,
        words=newest.trial.words,
        ground=newest.trial.ground,
    )


def _distinct(values: Sequence[float]) -> int:
    """How many of the values differ by more than `_ALIKE`."""
    kept: list[float] = []
    for value in sorted(values):
        if not kept or value > (1 + _ALIKE) * kept[-1]:
            kept.append(value)
    return len(kept)


def _size(run: Run) -> float:
    return run.point.size


def _tokens(run: Run) -> float:
    return run.point.tokens

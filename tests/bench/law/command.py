"""The command `bench law`: points, fit, table and file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pretrain.common.commands import local_path, program
from pretrain.common.errors import InputError
from pretrain.common.files import disk_errors, write_json
from pretrain.common.wording import aligned, counted
from pretrain.planning import published
from pretrain.planning.law import Law, interval
from pretrain.planning.published import PublishedLaw, Recipe
from tests.bench.law.fitting import FEWEST, published_fit
from tests.bench.law.points import Choice, Run, read_runs
from tests.bench.speedrun.results import short_commit

_HEADINGS = ("run", "size", "parameters", "tokens", "epochs", "FLOP", "measured", "predicted", "90 %", "error", "")
_RIGHT_ALIGNED = frozenset(range(2, len(_HEADINGS) - 1))
_DESCRIPTION = """Fits a scaling law to runs of `bench speedrun`, and says how well it predicts others.

L(N, D) = E + A / N^alpha + B / D^beta, in bits per character (Hoffmann et al. 2022). N is the size in effective
parameters, D the tokens, of which repeated ones count less (Muennighoff et al. 2023). `pretrain --dry-run --budget`
reads the result. Of several runs of one size and budget, the best counts."""
_EPILOG = """examples:
  ./launch.sh bench law runs/speedrun
  ./launch.sh bench law runs/speedrun --only 'law-*' --holdout law-4x256-5e13-s0
  ./launch.sh bench law runs/speedrun runs/more --holdout law-6x320 --out law/ --write

Exit codes: 0 success, 2 invalid input, or too few runs."""
_SIZES = 3  # sizes and budgets, below which a law says nothing
_ALIKE = 0.01  # relative difference up to which two count as one; those of one shape vary with the steps


def main(argv: Sequence[str]) -> int:
    """Fit, print the table, write the file. Raises `InputError` if a path is wrong, or there are too few runs."""
    arguments = _parser().parse_args(argv)
    below = float("inf") if arguments.below is None else arguments.below
    runs, left_out = read_runs(arguments.runs, Choice(tuple(arguments.only or ()), tuple(arguments.holdout), below))
    law = fit_runs(runs)
    likely = law.likely
    print(
        "\n".join([*aligned([_HEADINGS, *_cells(law, likely)], _RIGHT_ALIGNED), *left_out, "", *_summary(law, likely)])
    )
    out: Path = arguments.out or arguments.runs[0]
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    for path in (out / "law.json", *([published.PUBLISHED] if arguments.write else [])):
        write_json(path, law.model_dump(mode="json"))
        print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{program()} bench law",
        description=_DESCRIPTION,
        epilog=_EPILOG.replace("./launch.sh", program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", type=local_path, nargs="+", metavar="RUNS", help="folder of `bench speedrun`, with its speedrun.json"
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="take only runs or trials of this name; * stands for any characters; may be repeated (default: all)",
    )
    parser.add_argument(
        "--holdout",
        action="append",
        default=[],
        metavar="NAME",
        help="predict this run, or all runs of this trial, without fitting to it; may be repeated",
    )
    parser.add_argument(
        "--below",
        type=float,
        metavar="BITS",
        help="leave out runs that have not come below this loss: early ones, which know only how frequent words are",
    )
    parser.add_argument(
        "--out", type=local_path, metavar="DIR", help="where law.json is written (default: the first RUNS)"
    )
    parser.add_argument(
        "--write", action="store_true", help="also replace the published law, the one that `pretrain --budget` reads"
    )
    return parser


def _cells(law: PublishedLaw, likely: Sequence[Law]) -> list[tuple[str, ...]]:
    """A row of `_HEADINGS` for each point."""
    rows = []
    for point in law.points:
        predicted = law.predicted(point)
        low, high = interval(likely, point.size, point.tokens, point.unique)
        rows.append(
            (
                point.run,
                point.shape,
                f"{point.size / 1e6:.3g} M",
                f"{point.tokens / 1e6:.3g} M",
                f"{point.tokens / point.unique:.2f}",
                f"{point.flops:.3g}",
                f"{point.loss:.4f}",
                f"{predicted:.4f}",
                f"{low:.3f}-{high:.3f}",
                f"{predicted / point.loss - 1:+.1%}",
                "held out" if point.held_out else "",
            )
        )
    return rows


def _summary(law: PublishedLaw, likely: Sequence[Law]) -> list[str]:
    """The formula with the range of each coefficient, and the errors."""
    one = law.law
    values = np.array([[each.floor, each.size_exponent, each.data_exponent] for each in likely])
    spans = [f"{low:.2f}-{high:.2f}" for low, high in zip(*np.percentile(values, [5, 95], axis=0), strict=True)]
    lines = [
        f"L(N, D) = {one.floor:.3f} + {one.size_scale:.4g} / N^{one.size_exponent:.3f} + "
        f"{one.data_scale:.4g} / D^{one.data_exponent:.3f} bits per character",
        f"90 % of the likely laws: E {spans[0]}, alpha {spans[1]}, beta {spans[2]}",
        f"largest error on {counted(len(law.fitted), 'fitted run')}: {law.error(law.fitted):.1%}",
    ]
    if law.held_out:
        lines.append(f"largest error on {counted(len(law.held_out), 'held-out run')}: {law.error(law.held_out):.1%}")
    return lines


def fit_runs(runs: Sequence[Run]) -> PublishedLaw:
    """The law of the runs that are not held out. Raises `InputError` if they are too few or too much alike."""
    fitted = [run for run in runs if not run.point.held_out]
    sizes, amounts = (_distinct([getattr(run.point, name) for run in fitted]) for name in ("size", "tokens"))
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

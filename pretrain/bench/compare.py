"""`bench compare A.json B.json`: compares two results of `bench all`, row by row.

It compares the ratio to the baseline. The baseline ran in alternation with ours, so a slower machine is not reported as
a regression. If the baselines of the two rows differ, it compares our rate. A change is significant if the two ranges
(lowest to highest repetition) do not overlap. A row is slower or faster if its change is significant and at least the
threshold.
"""

from __future__ import annotations

import argparse

from pretrain.bench.results import Comparison, Figure, Results, number, read, short_commit, span
from pretrain.commands import local_path, program
from pretrain.common.errors import InputError
from pretrain.common.wording import aligned

EXIT_SLOWER = 1
_MACHINE = ("cpu", "cores", "threads", "gpus")
_HEADINGS = ("", "unit", "A", "(range)", "B", "(range)", "change", "baseline", "ratio", "")
_RIGHT_ALIGNED = frozenset({2, 3, 4, 5, 6, 7, 8})  # the columns of numbers


def main(argv: list[str]) -> int:
    """Print the comparison. Returns 1 if a row is slower, or failed in B only."""
    options = _parser().parse_args(argv)
    if not options.threshold >= 0:
        raise InputError(f"--threshold: is {options.threshold:g}; expected 0 or more, such as 0.05 for 5 %.")
    a, b = read(options.a), read(options.b)
    for name, path, file in (("A", options.a, a), ("B", options.b, b)):
        print(f"{name}  {path}: {file.date[:16].replace('T', ' ')} UTC, commit {short_commit(file.commit)}")
    print("\n".join([*warnings(a, b), *_table(a, b, options.threshold), *_unpaired(a, b)]))
    worse = regressions(a, b, options.threshold)
    print(f"regressions: {', '.join(worse)}" if worse else "no regressions")
    return EXIT_SLOWER if worse else 0


def compared(a: Comparison, b: Comparison) -> tuple[Figure, Figure]:
    """The values of the two rows that are compared: the ratios, or our rates if the baselines differ."""
    return (a.ratio, b.ratio) if _same_baseline(a, b) else (a.ours, b.ours)


def verdict(a: Figure, b: Figure, threshold: float) -> str:
    """How a rate or ratio changed from A to B: "slower", "faster", or why neither."""
    if a.low <= b.high and b.low <= a.high:
        return "ranges overlap"
    if abs(_change(a, b)) < threshold:
        return f"significant, but under {threshold:.0%}"
    return "faster" if b.median > a.median else "slower"


def regressions(a: Results, b: Results, threshold: float) -> list[str]:
    """Names of the rows that became slower, and of the benchmarks that failed in B only."""
    slower = [row_a.what for row_a, row_b in _pairs(a, b) if verdict(*compared(row_a, row_b), threshold) == "slower"]
    succeeded = {run.what for run in a.runs if not run.failed}
    return slower + [f"{what} (failed)" for what in b.failed if what in succeeded]


def warnings(a: Results, b: Results) -> list[str]:
    """A line if the machines differ, and a line if the corpus or the text differ; the rates are then not comparable."""
    machines = {name: (getattr(a.machine, name), getattr(b.machine, name)) for name in _MACHINE}
    inputs = {name: (a.inputs.get(name), b.inputs.get(name)) for name in sorted({*a.inputs, *b.inputs})}
    lines = []
    for title, facts in (("machines", machines), ("inputs", inputs)):
        differing = [f"{name} {in_a} / {in_b}" for name, (in_a, in_b) in facts.items() if in_a != in_b]
        if differing:
            lines.append(f"warning: the {title} differ: {', '.join(differing)}")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"{program()} bench compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit codes: 0 no regressions, 1 a row is slower or failed in B only, 2 invalid input.",
        allow_abbrev=False,
    )
    parser.add_argument("a", type=local_path, metavar="A.json", help="bench.json of the reference")
    parser.add_argument("b", type=local_path, metavar="B.json", help="bench.json to compare with it")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="smallest change to report (default: 0.05, that is 5 %%)",
    )
    return parser


def _pairs(a: Results, b: Results) -> list[tuple[Comparison, Comparison]]:
    return [(row, b.measured[what]) for what, row in a.measured.items() if what in b.measured]


def _change(a: Figure, b: Figure) -> float:
    return b.median / a.median - 1


def _table(a: Results, b: Results, threshold: float) -> list[str]:
    rows = [
        (
            row_a.what,
            row_a.unit,
            number(row_a.ours.median),
            span(row_a.ours),
            number(row_b.ours.median),
            span(row_b.ours),
            f"{_change(row_a.ours, row_b.ours):+.1%}",
            f"{_change(row_a.baseline, row_b.baseline):+.1%}" if _same_baseline(row_a, row_b) else "differs",
            f"{_change(row_a.ratio, row_b.ratio):+.1%}" if _same_baseline(row_a, row_b) else "differs",
            verdict(*compared(row_a, row_b), threshold),
        )
        for row_a, row_b in _pairs(a, b)
    ]
    return aligned([_HEADINGS, *rows], _RIGHT_ALIGNED) if rows else ["no row is in both files"]


def _same_baseline(a: Comparison, b: Comparison) -> bool:
    """Whether both rows have the same baseline; otherwise its rate and the ratio to it are not comparable."""
    return a.baseline_name == b.baseline_name


def _unpaired(a: Results, b: Results) -> list[str]:
    lines = []
    for name, results, others in (("A", a, b), ("B", b, a)):
        lines += [f"only in {name}: {what}" for what in results.measured if what not in others.measured]
        lines += [f"failed in {name}: {what}: {reason}" for what, reason in results.failed.items()]
    return lines

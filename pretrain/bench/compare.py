"""`bench compare A.json B.json`: what moved between two files of `bench all`, row by row.

What is judged is the ratio to the peer, which ran in turns with us, so that a slower machine is no slow-down; where the
peer is another one, our rate. A change is real where the two ranges, from the lowest to the highest alternation, do not
overlap. A row is slower or faster where the change is real and not below the threshold.
"""

from __future__ import annotations

import argparse

from pretrain.bench.results import Comparison, Figure, Results, aligned, number, read, short_commit, span
from pretrain.commands import local_path
from pretrain.common.errors import InputError

EXIT_SLOWER = 1
_MACHINE = ("cpu", "cores", "threads", "gpus")
_HEADINGS = ("", "unit", "A", "(range)", "B", "(range)", "change", "peer", "ratio", "")
_TO_THE_RIGHT = frozenset({2, 3, 4, 5, 6, 7, 8})  # columns of figures


def main(argv: list[str]) -> int:
    """Print what moved; 1 where something became slower, or failed in B and not in A."""
    options = _parser().parse_args(argv)
    if not options.threshold >= 0:
        raise InputError(f"--threshold: is {options.threshold:g}, must be 0 or more; 0.05 is 5 %.")
    a, b = read(options.a), read(options.b)
    for name, path, found in (("A", options.a, a), ("B", options.b, b)):
        print(f"{name}  {path}: {found.date[:16].replace('T', ' ')} UTC, commit {short_commit(found.commit)}")
    print("\n".join([*warnings(a, b), *_table(a, b, options.threshold), *_unpaired(a, b)]))
    worse = regressions(a, b, options.threshold)
    print(f"worse: {', '.join(worse)}" if worse else "nothing became slower")
    return EXIT_SLOWER if worse else 0


def judged(a: Comparison, b: Comparison) -> tuple[Figure, Figure]:
    """What of the two rows is held against each other."""
    return (a.ratio, b.ratio) if a.peer_name == b.peer_name else (a.ours, b.ours)


def verdict(a: Figure, b: Figure, threshold: float) -> str:
    """What became of a rate or ratio between A and B: "slower", "faster", or why neither."""
    if a.low <= b.high and b.low <= a.high:
        return "within the ranges"
    if abs(_change(a, b)) < threshold:
        return f"real, but under {threshold:.0%}"
    return "faster" if b.median > a.median else "slower"


def regressions(a: Results, b: Results, threshold: float) -> list[str]:
    """Names of the rows that became slower, and of the benchmarks that failed in B and not in A."""
    slower = [one.what for one, other in _pairs(a, b) if verdict(*judged(one, other), threshold) == "slower"]
    worked = {run.what for run in a.runs if not run.failed}
    return slower + [f"{what} (failed)" for what in b.failed if what in worked]


def warnings(a: Results, b: Results) -> list[str]:
    """A line if the machines differ, and one if the corpus or the text does: then rates say little."""
    machines = {name: (getattr(a.machine, name), getattr(b.machine, name)) for name in _MACHINE}
    inputs = {name: (a.inputs.get(name), b.inputs.get(name)) for name in sorted({*a.inputs, *b.inputs})}
    lines = []
    for title, facts in (("machines", machines), ("inputs", inputs)):
        unlike = [f"{name} {one} / {other}" for name, (one, other) in facts.items() if one != other]
        if unlike:
            lines.append(f"warning: the {title} differ: {', '.join(unlike)}")
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./launch.sh bench compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit codes: 0 nothing became slower, 1 something did, or failed only in B, 2 your input.",
        allow_abbrev=False,
    )
    parser.add_argument("a", type=local_path, metavar="A.json", help="bench.json of before")
    parser.add_argument("b", type=local_path, metavar="B.json", help="bench.json of after")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.05,
        metavar="SHARE",
        help="least change that counts (default: 0.05, which is 5 %%)",
    )
    return parser


def _pairs(a: Results, b: Results) -> list[tuple[Comparison, Comparison]]:
    return [(row, b.measured[what]) for what, row in a.measured.items() if what in b.measured]


def _change(a: Figure, b: Figure) -> float:
    return b.median / a.median - 1


def _table(a: Results, b: Results, threshold: float) -> list[str]:
    rows = [
        (
            one.what,
            one.unit,
            number(one.ours.median),
            span(one.ours),
            number(other.ours.median),
            span(other.ours),
            f"{_change(one.ours, other.ours):+.1%}",
            _change_beside(one.peer, other.peer, one, other),
            _change_beside(one.ratio, other.ratio, one, other),
            verdict(*judged(one, other), threshold),
        )
        for one, other in _pairs(a, b)
    ]
    return aligned([_HEADINGS, *rows], _TO_THE_RIGHT) if rows else ["no row is in both files"]


def _change_beside(a: Figure, b: Figure, one: Comparison, other: Comparison) -> str:
    """The fastest kind of peer may be another one in B; that is no change of its rate, nor of the ratio to it."""
    return f"{_change(a, b):+.1%}" if one.peer_name == other.peer_name else "another"


def _unpaired(a: Results, b: Results) -> list[str]:
    lines = []
    for name, one, other in (("A", a, b), ("B", b, a)):
        lines += [f"only in {name}: {what}" for what in one.measured if what not in other.measured]
        lines += [f"failed in {name}: {what}: {reason}" for what, reason in one.failed.items()]
    return lines

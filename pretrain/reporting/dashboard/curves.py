"""Records as curves of a few hundred points: what a screen can show, without losing a spike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pretrain.reporting.dashboard.panels import Panel
from pretrain.reporting.dashboard.runs import RunRecords

BUCKETS = 800
"""Most points of a curve; one of more records is cut into so many stretches of equal numbers of steps."""

_MOST_RANKS = 8  # with a curve each; of more, the fastest, the median and the slowest are shown
_DIGITS = 6


@dataclass(frozen=True)
class Curve:
    """Points by ascending step; `y` is None where a number was not finite.

    `low` and `high` are the least and most of each stretch, empty where every point is one record.
    """

    name: str
    kind: str  # training, held-out or rank
    x: list[int]
    y: list[float | None]
    low: list[float | None]
    high: list[float | None]
    not_finite: int


def curves(panel: Panel, runs: Sequence[RunRecords]) -> list[Curve]:
    """What the panel shows: of one run all metrics, of several one curve each."""
    if len(runs) > 1:
        return one_each(panel, runs)
    (run,) = runs
    if panel.kind == "ranks":
        return [curve for metric in panel.metrics for curve in _by_rank(run, metric)]
    shown = []
    for metric in panel.metrics:
        for kind, records in (("training", run.training), ("held-out", run.evaluations)):
            name = kind if len(panel.metrics) == 1 else metric.removesuffix("_seconds").replace("_", " ")
            shown.append(_curve(name, kind, records, metric))
    return [curve for curve in shown if curve]


def thin(name: str, kind: str, x: Sequence[int], y: Sequence[float | None], most: int = BUCKETS) -> Curve:
    """The curve through (x, y), by ascending x, with at most `most` points."""
    values = np.array(y, np.float64)  # None becomes NaN
    values[~np.isfinite(values)] = np.nan
    bad = int(np.isnan(values).sum())
    if len(values) <= most:
        return Curve(name, kind, list(x), _plain(values), [], [], bad)
    steps = np.asarray(x, np.int64)
    bucket = (steps - steps[0]) * most // (steps[-1] - steps[0] + 1)
    first = np.flatnonzero(np.diff(bucket, prepend=-1))
    counts = np.add.reduceat(~np.isnan(values), first)
    sums = np.add.reduceat(np.nan_to_num(values), first)
    means = np.divide(sums, counts, out=np.full(len(first), np.nan), where=counts > 0)
    middles = np.add.reduceat(steps, first) // np.diff(first, append=len(steps))
    low, high = np.fmin.reduceat(values, first), np.fmax.reduceat(values, first)
    return Curve(name, kind, middles.tolist(), _plain(means), _plain(low), _plain(high), bad)


def one_each(panel: Panel, runs: Sequence[RunRecords]) -> list[Curve]:
    """The panel's first metric of every run: on held-out examples where it is measured there."""
    metric = panel.metrics[0]
    if panel.kind == "ranks":
        return []
    held_out = any(metric in record for run in runs for record in run.evaluations)
    kind = "held-out" if held_out else "training"
    shown = [_curve(run.label, kind, run.evaluations if held_out else run.training, metric) for run in runs]
    return [curve for curve in shown if curve]


def _by_rank(run: RunRecords, metric: str) -> list[Curve]:
    records = [record for record in run.training if isinstance(record.get(metric), list) and record[metric]]
    if not records:
        return []
    x = [record["step"] for record in records]
    ranks = max(len(record[metric]) for record in records)
    if ranks <= _MOST_RANKS:
        return [
            thin(f"rank {number}", "rank", x, [_item(record[metric], number) for record in records])
            for number in range(ranks)
        ]
    ordered = [sorted(record[metric], key=lambda value: value or 0.0) for record in records]
    places = {"slowest": -1, "median": None, "fastest": 0}
    return [
        thin(
            f"{name} of {ranks}",
            "rank",
            x,
            [one[len(one) // 2 if place is None else place] for one in ordered],
        )
        for name, place in places.items()
    ]


def _item(values: list[float | None], number: int) -> float | None:
    return values[number] if number < len(values) else None


def _curve(name: str, kind: str, records: Sequence[dict[str, Any]], metric: str) -> Curve | None:
    there = [record for record in records if metric in record]
    x, y = [record["step"] for record in there], [record[metric] for record in there]
    return thin(name, kind, x, y) if there else None


def _plain(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(f"{value:.{_DIGITS}g}") for value in values.tolist()]

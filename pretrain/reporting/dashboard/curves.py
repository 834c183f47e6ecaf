"""Turns records into curves of a few hundred points without losing a spike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pretrain.reporting.dashboard.panels import Panel
from pretrain.reporting.dashboard.runs import RunRecords

BUCKETS = 800
"""Most points of a curve. Longer curves are divided into this number of equal step intervals."""

# Up to this many ranks have a curve each. For more, the fastest, the median and the slowest rank are shown.
_MOST_RANKS = 8
_DIGITS = 6


@dataclass(frozen=True)
class Curve:
    """Points in ascending order of step; `y` is None if a value is not finite.

    `low` and `high` are the minimum and maximum of each interval; they are empty if every point is one record.
    """

    name: str
    kind: str  # training, held-out or rank
    x: list[int]
    y: list[float | None]
    low: list[float | None]
    high: list[float | None]
    not_finite: int


def curves(panel: Panel, runs: Sequence[RunRecords]) -> list[Curve]:
    """The curves of a panel: all metrics of a single run, or one curve for each of several runs."""
    if len(runs) > 1:
        return curve_per_run(panel, runs)
    (run,) = runs
    if panel.kind == "ranks":
        return [curve for metric in panel.metrics for curve in _by_rank(run, metric)]
    shown = []
    for metric in panel.metrics:
        sets = (("training", run.training), ("held-out", run.evaluations))
        for kind, records in sets if panel.kind != "probes" else (("held-out", run.probes),):
            several = len(panel.metrics) > 1 or "/" in metric
            name = metric.rpartition("/")[2].removesuffix("_seconds").replace("_", " ") if several else kind
            shown.append(_curve(name, kind, records, metric))
    return [curve for curve in shown if curve]


def thin(name: str, kind: str, x: Sequence[int], y: Sequence[float | None], most: int = BUCKETS) -> Curve:
    """The curve through (x, y), in ascending order of x, with at most `most` points."""
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


def curve_per_run(panel: Panel, runs: Sequence[RunRecords]) -> list[Curve]:
    """The panel's first metric of every run, on held-out examples if evaluations or probes measure it."""
    metric = panel.metrics[0]
    if panel.kind == "ranks":
        return []
    held_out = any(metric in record for run in runs for record in (*run.evaluations, *run.probes))
    kind = "held-out" if held_out else "training"
    shown = [
        _curve(run.label, kind, [*run.evaluations, *run.probes] if held_out else run.training, metric) for run in runs
    ]
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
            [values[len(values) // 2 if place is None else place] for values in ordered],
        )
        for name, place in places.items()
    ]


def _item(values: list[float | None], number: int) -> float | None:
    return values[number] if number < len(values) else None


def _curve(name: str, kind: str, records: Sequence[dict[str, Any]], metric: str) -> Curve | None:
    measured = [record for record in records if metric in record]
    x, y = [record["step"] for record in measured], [record[metric] for record in measured]
    return thin(name, kind, x, y) if measured else None


def _plain(values: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(f"{value:.{_DIGITS}g}") for value in values.tolist()]

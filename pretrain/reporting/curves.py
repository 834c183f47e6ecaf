"""The charts of a report: training and held-out values of one run, or one curve per run."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pretrain.reporting.attention.strips import percent
from pretrain.reporting.charts import Formatter, Points, Series, line_chart
from pretrain.reporting.panels import GENERAL_TEXT_PREFIX, Panel, Unit, panels_for
from pretrain.reporting.runs import RunRecords

_MAX_RANKS = 8  # maximum number of ranks that are all shown; of more, only the slowest, median and fastest are
_NUM_COLORS = 8  # number of colors; further curves use the same colors, but are dashed or dotted

Charts = dict[str, list[tuple[str, str]]]  # {section: [(title, <figure>)]}


def abbreviate(value: float) -> str:
    """Format with a suffix and at most three significant digits, such as 1234567 as 1.23M."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _format_value(value: float) -> str:
    """Format with at most three significant digits: 12.3, 0.00075 as 7.5e-4."""
    if value == 0 or abs(value) >= 1e-3:
        return f"{value:.3g}"
    exponent = -math.floor(math.log10(abs(value)))
    return f"{value * 10**exponent:.3g}e-{exponent}"


_FORMATTERS: dict[Unit, Formatter] = {"share": percent, "tokens/s": abbreviate, "bytes": lambda v: f"{v / 1e9:.3g} GB"}
_FROM_ZERO: tuple[Unit, ...] = ("tokens/s", "share", "s", "bytes", "steps")


def draw_charts(runs: Sequence[RunRecords]) -> Charts:
    """Draw all charts for which the runs have values; charts of a single run mark events and phase changes.

    Values that are not finite, such as the gradient norm of a skipped step, are omitted; titles state their number.
    """
    marks = [*_phase_marks(runs[0]), *((event["step"], "", "") for event in runs[0].events)] if len(runs) == 1 else []
    charts: Charts = {}
    for panel in panels_for(record for run in runs for record in run.records):
        plots = _multi_run_series(panel, runs) if len(runs) > 1 else [(panel.title, _single_run_series(panel, runs[0]))]
        format_y = _FORMATTERS.get(panel.unit, _format_value)
        values = [record[name] for run in runs for record in run.records for name in panel.metrics if name in record]
        omitted = f" ({values.count(None):,} not finite)" if None in values else ""
        for title, series in plots:
            unit = panel.unit if panel.unit in ("nats", "s", "steps") else ""
            chart = line_chart(
                (f"{title}, {unit}" if unit else title) + omitted,
                series,
                format_y=format_y,
                format_x=lambda step: f"{step:,.0f}",
                marks=marks,
                from_zero=panel.unit in _FROM_ZERO,
            )
            if chart:
                charts.setdefault(panel.section, []).append((title, chart))
    return charts


def _single_run_series(panel: Panel, run: RunRecords) -> list[Series]:
    if panel.kind == "ranks":
        return [curve for metric in panel.metrics for curve in _rank_series(run, metric)]
    metric, *other_metrics = panel.metrics
    if other_metrics or "/" in metric:
        return [Series(_readable(name), _points(run.records, name), _style(n)) for n, name in enumerate(panel.metrics)]
    return [
        Series("training", _points(run.training, metric), "train", smooth=True),
        Series("held-out", _points((*run.evaluations, *run.probes), metric), "held-out"),
        Series("general text", _points(run.evaluations, GENERAL_TEXT_PREFIX + metric), "baseline"),
    ]


def _multi_run_series(panel: Panel, runs: Sequence[RunRecords]) -> Iterator[tuple[str, list[Series]]]:
    """Yield (title, curves) of each chart. Training and held-out values, and scores of different data, are separate."""
    styles = {run.label: _style(index) for index, run in enumerate(runs)}
    for (data, metric), members in _groups(panel, runs).items():
        metric_title = _readable(metric) if len(panel.metrics) > 1 or "/" in metric else ""
        title = ": ".join(part for part in (panel.title, metric_title) if part) + (data and f", {data}")
        by_kind = []
        for kind, fields in (("training", ("training",)), ("held-out", ("evaluations", "probes"))):
            points = {run.label: [p for name in fields for p in _points(getattr(run, name), metric)] for run in members}
            smooth = kind == "training"
            by_kind.append((kind, [Series(label, ps, styles[label], smooth) for label, ps in points.items() if ps]))
        has_both = all(series for _, series in by_kind)
        yield from ((f"{title}, {kind}" if has_both else title, series) for kind, series in by_kind)


def _groups(panel: Panel, runs: Sequence[RunRecords]) -> dict[tuple[str, str], list[RunRecords]]:
    """Return {(dataset, metric): runs in the chart}; the dataset is "" unless the panel shows scores."""
    if panel.kind == "ranks":
        return {}
    if panel.kind != "scores":
        return {("", metric): list(runs) for metric in panel.metrics[: None if "/" in panel.metrics[0] else 1]}
    groups: dict[tuple[str, str], list[RunRecords]] = {}
    for run in runs:
        if run.main_metric:
            groups.setdefault((run.subject.data if run.subject else "", run.main_metric), []).append(run)
    return groups


def _rank_series(run: RunRecords, metric: str) -> list[Series]:
    rows = [(record["step"], record[metric]) for record in run.training if isinstance(record.get(metric), list)]
    num_ranks = max((len(values) for _, values in rows), default=0)
    names = [f"rank {rank}" for rank in range(num_ranks)]
    if num_ranks > _MAX_RANKS:
        names = [f"{name} of {num_ranks}" for name in ("slowest", "median", "fastest")]
        ordered = [(step, sorted(value or 0.0 for value in values)) for step, values in rows if values]
        rows = [(step, [values[-1], values[len(values) // 2], values[0]]) for step, values in ordered]
    return [
        Series(
            name, [(step, values[n]) for step, values in rows if n < len(values) and values[n] is not None], _style(n)
        )
        for n, name in enumerate(names)
    ]


def _points(records: Iterable[dict[str, Any]], metric: str) -> Points:
    return [(record["step"], record[metric]) for record in records if record.get(metric) is not None]


def _phase_marks(run: RunRecords) -> Iterator[tuple[float, str, str]]:
    """Yield a mark for each phase change: its step, and the sequence lengths before and after."""
    step = 0
    for phase, following in itertools.pairwise(run.config.get("phases") or []):
        step += phase["steps"]
        yield float(step), f"length {phase['sequence_length']}", str(following["sequence_length"])


def _readable(metric: str) -> str:
    """Return a metric's name for a legend, such as wiki for source_loss/wiki, or evaluation for evaluation_seconds."""
    return metric.rpartition("/")[2].removesuffix("_seconds").replace("_", " ")


def _style(index: int) -> str:
    """Return the CSS classes of a curve."""
    return f"c{index % _NUM_COLORS}{('', ' dashed', ' dotted')[index // _NUM_COLORS % 3]}"

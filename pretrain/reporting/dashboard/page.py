"""The dashboard as one self-contained HTML page: curves as JSON, drawn by a script in the page."""

import dataclasses
import datetime
import itertools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pretrain.common.wording import clock, shown_scores
from pretrain.reporting.dashboard.curves import BUCKETS, curve_per_run, curves
from pretrain.reporting.dashboard.panels import Panel, panels_for
from pretrain.reporting.dashboard.runs import UNFINISHED, RunRecords, Score, read_scores
from pretrain.reporting.dashboard.subjects import Subject, differing, starts
from pretrain.reporting.pages import DATE, write_page
from pretrain.reporting.report import short
from pretrain.tracking.live import phases_of, work

_SEVERE = ("rollback", "hang")
_MOST_SCORES = 5  # shown next to the main metric of a fine-tuning


def write(folder: Path, runs: Sequence[RunRecords], out: Path, *, refresh_seconds: int = 0) -> Path:
    """Write the dashboard of `runs`, which were read from `folder`, to the file `out` atomically; returns `out`.

    `refresh_seconds` is the interval in which a browser reloads the page; 0 disables that.
    """
    scores = read_scores(folder)
    charts = list(_charts(runs))
    return write_page(
        out,
        "dashboard.html.j2",
        name=runs[0].name if len(runs) == 1 else folder.resolve().name,
        folder=folder,
        runs=runs,
        state=_state(runs),
        tiles=_tiles(runs[0]) if len(runs) == 1 else _tiles_of_many(runs, scores),
        sections=[
            (section, list(members))
            for section, members in itertools.groupby(enumerate(charts), lambda numbered: numbered[1]["section"])
        ],
        events=list(_events(runs)),
        scores=list(map(_score_row, scores)),
        comparison=_comparison(scores),
        data={
            "charts": charts,
            # Of several runs no line would show whose event it is; the list of events names the run.
            "marks": [*_events(runs), *_phases(runs[0])] if len(runs) == 1 else [],
            "low": min(record["step"] for run in runs for record in run.records),
            "high": max(record["step"] for run in runs for record in run.records),
        },
        updated=max(run.updated for run in runs),
        buckets=BUCKETS if any(curve["low"] for chart in charts for curve in chart["curves"]) else None,
        refresh_seconds=refresh_seconds,
    )


# ---- charts and marks


def _charts(runs: Sequence[RunRecords]) -> Iterator[dict[str, Any]]:
    for panel in panels_for(record for run in runs for record in run.records):
        if panel.kind == "scores" and len(runs) > 1:
            yield from _score_charts(panel, runs)
            continue
        apart = len(runs) > 1 and any("/" in name for name in panel.metrics)
        for one in [dataclasses.replace(panel, metrics=(name,)) for name in panel.metrics] if apart else [panel]:
            shown = [dataclasses.asdict(curve) for curve in curves(one, runs)]
            if shown:
                title = _title(one, shown[0]["kind"]) if len(runs) > 1 else one.title
                yield {"title": title, "unit": one.unit, "section": one.section, "curves": shown}


def _score_charts(panel: Panel, runs: Sequence[RunRecords]) -> Iterator[dict[str, Any]]:
    """A chart of the main metric for each task and dataset; scores of different tasks are not compared."""
    groups: dict[tuple[str, str], list[RunRecords]] = {}
    for run in runs:
        if run.score:
            groups.setdefault((run.subject.data if run.subject else "", run.score), []).append(run)
    for (data, metric), members in groups.items():
        shown = curve_per_run(dataclasses.replace(panel, metrics=(metric,)), members)
        title = f"{panel.title}: {metric.replace('_', ' ')}" + (f", {data}" if len(groups) > 1 else "")
        yield {
            "title": title,
            "unit": panel.unit,
            "section": panel.section,
            "curves": [dataclasses.asdict(curve) for curve in shown],
        }


def _title(panel: Panel, kind: str) -> str:
    """The title of a panel of several runs, which shows one metric, from evaluations if they measure it."""
    if len(panel.metrics) > 1:
        return f"{panel.title}: {panel.metrics[0].replace('_', ' ')}"
    if of := "".join(panel.metrics).partition("/")[2]:
        return f"{panel.title}: {of}"
    return f"{panel.title}, held-out" if kind == "held-out" else panel.title


def _events(runs: Sequence[RunRecords]) -> Iterator[dict[str, Any]]:
    """The events of the runs in order of time."""
    events = [(run, event) for run in runs for event in run.events]
    for run, event in sorted(events, key=lambda pair: pair[1].get("time") or 0.0):
        kind = str(event["event"])
        yield {
            "step": event["step"],
            "kind": kind,
            "color": "--severe" if kind in _SEVERE else "--event",
            "time": _date(event.get("time")),
            "message": str(event.get("message") or ""),
            "run": run.label if len(runs) > 1 else "",
        }


def _phases(run: RunRecords) -> Iterator[dict[str, Any]]:
    """The steps at which a run enters its next phase."""
    step = 0
    for phase, following in itertools.pairwise(run.config.get("phases") or []):
        step += int(phase["steps"])
        lengths = f"sequence length {phase['sequence_length']} -> {following['sequence_length']}"
        yield {"step": step, "kind": "phase", "color": "--soft", "time": "", "message": lengths, "run": ""}


# ---- the header


def _state(runs: Sequence[RunRecords]) -> str:
    if len(runs) > 1:
        states = [run.state for run in runs]
        counts = {state: states.count(state) for state in dict.fromkeys(states)}
        return f"{len(runs)} runs: " + ", ".join(f"{count} {state}" for state, count in counts.items())
    (run,) = runs
    total = f" of {run.total_steps:,}" if run.total_steps else ""
    if run.state == UNFINISHED:
        return f"Training: step {run.step:,}{total}"
    return f"{run.state.capitalize()} at step {run.step:,}{total}"


def _tiles(run: RunRecords) -> list[tuple[str, str, str]]:
    """(label, value, note) of the most important results."""
    tiles = [*_held_out_tiles(run)]
    rates = _values(run, "tokens_per_second")
    utilization, stalls = _values(run, "mfu"), _values(run, "data_stall_fraction")
    if rates:
        note = f"median; {statistics.median(utilization):.1%} MFU" if utilization else "median"
        tiles.append(("useful tokens/s", f"{statistics.median(rates):,.0f}", note))
    if stalls:
        tiles.append(("data stalls", f"{statistics.median(stalls):.2%}", "of the time, median"))
    last = run.training[-1] if run.training else {}
    if last.get("tokens"):
        tiles.append(("tokens trained on", short(last["tokens"]), f"in {run.step:,} steps"))
    if last.get("seconds"):
        tiles.append(("training time", clock(last["seconds"]), _time_left(run, last["seconds"])))
    counts = {kind: sum(event["event"] == kind for event in run.events) for kind in ("restart", "rollback")}
    if run.events:
        others = len(run.events) - sum(counts.values())
        note = f"rollbacks: {counts['rollback']}, other events: {others}"
        tiles.append(("restarts", str(counts["restart"]), note))
    return tiles


def _held_out_tiles(run: RunRecords) -> Iterator[tuple[str, str, str]]:
    forms = {"mlm_loss": ("MLM loss", "{:.3f}"), "mlm_accuracy": ("MLM accuracy", "{:.1%}")}
    if not run.evaluations:
        return
    last = run.evaluations[-1]
    shown = {key: form for key, form in forms.items() if last.get(key) is not None}
    if not shown:  # a fine-tuning run
        names = [name for panel in panels_for(run.evaluations) if panel.kind == "scores" for name in panel.metrics]
        shown = {name: (name.replace("_", " "), "{:.4f}") for name in names[:2] if last.get(name) is not None}
    for key, (label, form) in shown.items():
        yield label, form.format(last[key]), f"held-out, step {last['step']:,}"


def _time_left(run: RunRecords, seconds: float) -> str:
    if run.total_steps is None or run.step >= run.total_steps:
        return "over all starts"
    phases = phases_of(run.config)
    done, total = work(phases, run.step), work(phases, run.total_steps)
    left = seconds / done * (total - done)
    return f"{clock(left)} left at this speed"


def _tiles_of_many(runs: Sequence[RunRecords], scores: Sequence[Score]) -> list[tuple[str, str, str]]:
    tiles = [("runs", str(len(runs)), _state(runs).partition(": ")[2])]
    series = _series(scores)
    if len(series) == 1:  # scores of different series have no common mean
        [((_, _, metric), values)] = series.items()
        note = f"mean of {len(values)}, {min(values):.4f} to {max(values):.4f}"
        tiles.append((metric.replace("_", " "), f"{statistics.fmean(values):.4f}", note))
    seconds = [value for run in runs for value in _values(run, "seconds")[-1:]]
    if seconds:
        tiles.append(("training time", clock(sum(seconds)), "sum of all runs"))
    return tiles


def _values(run: RunRecords, metric: str) -> list[float]:
    return [record[metric] for record in run.training if record.get(metric) is not None]


# ---- tables


def _score_row(score: Score) -> dict[str, str]:
    known = shown_scores(score.values, score.metric)
    others = [(name, value) for name, value in known.items() if name not in (score.metric, "loss")]
    value = score.values.get(score.metric)
    return {
        "label": score.label,
        "part": score.part,
        "metric": score.metric.replace("_", " "),
        "value": "" if value is None else f"{value:.4f}",
        "others": score.remark
        or ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in others[:_MOST_SCORES]),
    }


def _series(scores: Sequence[Score]) -> dict[tuple[Subject, str, str], list[float]]:
    """(subject, set, metric) -> the scores of its runs, which differ in their seeds only."""
    series: dict[tuple[Subject, str, str], list[float]] = {}
    for score in scores:
        if score.subject is not None and score.metric in score.values:
            series.setdefault((score.subject, score.part, score.metric), []).append(score.values[score.metric])
    return series


def _comparison(scores: Sequence[Score]) -> dict[str, Any] | None:
    """A row for each task and dataset, a column for each initial checkpoint; None if no two runs are comparable.

    If runs on the same dataset differ in further settings, the row's label names these.
    """
    series = _series(scores)
    subjects = [subject for subject, _, _ in series]
    columns = starts(subjects)
    rows: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    named = differing(subjects)
    for (subject, part, metric), values in series.items():
        settings = dict(subject.settings)
        label = ", ".join([subject.data, *(f"{name} {settings[name]}" for name in named if name in settings)])
        rows.setdefault((label, part, metric), {})[subject.start] = values
    if all(len(row) == 1 for row in rows.values()) and all(len(values) == 1 for values in series.values()):
        return None
    return {
        "starts": [f"from {start}" for start in columns],
        "rows": [
            {
                "label": label,
                "part": part,
                "metric": metric.replace("_", " "),
                "cells": [_cell(row.get(start, [])) for start in columns],
            }
            for (label, part, metric), row in rows.items()
        ],
    }


def _cell(values: Sequence[float]) -> tuple[str, str]:
    """(mean and standard deviation, number of runs and range)."""
    if len(values) < 2:
        return "".join(f"{value:.4f}" for value in values), ""
    mean = f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}"
    return mean, f"mean of {len(values)}, {min(values):.4f} to {max(values):.4f}"


def _date(seconds: Any) -> str:
    if not isinstance(seconds, int | float):
        return ""
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime(DATE)

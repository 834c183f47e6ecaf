"""The tables of a report: a comparison of runs, and the scores of fine-tunings."""

import datetime
import statistics
from collections.abc import Sequence

from pretrain.common.files import read_json
from pretrain.common.run_files import SUMMARY
from pretrain.common.wording import clock, score_title, shown_scores
from pretrain.reporting.pages import TIMESTAMP_FORMAT
from pretrain.reporting.runs import RunRecords, Score
from pretrain.reporting.subjects import Subject, differing_settings, initial_checkpoints
from pretrain.run.metrics import objective_metrics
from pretrain.tracking.events import PROBE_SCORES

_MAX_SCORES = 5  # maximum number of scores shown next to a fine-tuning's main metric

Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # header, and the cells of each row


def run_table(runs: Sequence[RunRecords]) -> Table:
    """Return a row for each run: its state, scores, last evaluation and probe, and speed."""
    last_records = [{**(run.probes or [{}])[-1], **(run.evaluations or [{}])[-1]} for run in runs]
    metrics = {name: metric for name, metric in {**objective_metrics(), **PROBE_SCORES}.items() if metric.short}
    rows: list[Sequence[str]] = []
    for run, record in zip(runs, last_records, strict=True):
        speeds, seconds = run.values("tokens_per_second"), run.values("seconds")
        cells = [run.label, describe_state(run), "; ".join(map(_format_score, run.scores))]
        cells += ["" if record.get(name) is None else metric.text(record[name]) for name, metric in metrics.items()]
        cells += [f"{statistics.median(speeds):,.0f}" if speeds else "", clock(seconds[-1]) if seconds else ""]
        rows.append(cells)
    header: list[str] = ["run", "state", "scores", *(m.title for m in metrics.values()), "tokens/s", "training time"]
    columns = [column for column in zip(header, *rows, strict=True) if any(column[1:])]
    shown_header, *shown_rows = zip(*columns, strict=True)
    return shown_header, shown_rows


def _format_score(score: Score) -> str:
    """Format the main metric and a few others on a held-out set, or the reason why the run failed."""
    values = shown_scores(score.values, score.metric)
    names = [score.metric, *(name for name in values if name not in (score.metric, "loss"))][: _MAX_SCORES + 1]
    formatted = [f"{_metric_title(name, score)} {values[name]:.4f}" for name in names if values.get(name) is not None]
    return score.error or f"{score.split}: {', '.join(formatted)}"


def describe_state(run: RunRecords) -> str:
    """Return the state in words, such as "stopped at step 1,000 of 2,000"."""
    step = run.stop_event["step"] if run.state == "stopped" else run.step
    total = f" of {run.total_steps:,}" if run.total_steps and step < run.total_steps else ""
    return f"{run.state} at step {step:,}{total}"


def event_table(runs: Sequence[RunRecords]) -> Table:
    """Return the events of the runs in chronological order."""
    events = [(run.label, event) for run in runs for event in run.events]
    rows = [
        [label, str(event["event"]), f"{event['step']:,}", _date(event.get("time")), str(event.get("message") or "")]
        for label, event in sorted(events, key=lambda pair: pair[1].get("time") or 0.0)
    ]
    return ["run", "event", "step", "time", "message"], rows


def _date(seconds: float | None) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime(TIMESTAMP_FORMAT) if seconds else ""


def comparison_table(runs: Sequence[RunRecords]) -> Table:
    """Return a row per task and dataset and a column per initial checkpoint; no rows if nothing is comparable.

    Runs that differ only in their seeds are averaged. If runs on the same dataset differ in other settings, row labels
    include these settings.
    """
    scores: dict[tuple[Subject, str, str], list[float]] = {}  # {(subject, set, metric): scores of the runs}
    for run in runs:
        for score in run.scores:
            if run.subject is not None and score.metric in score.values:
                key = run.subject, score.split, _metric_title(score.metric, score)
                scores.setdefault(key, []).append(score.values[score.metric])
    subjects = [subject for subject, _, _ in scores]
    columns, differing_names = initial_checkpoints(subjects), differing_settings(subjects)
    rows: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for (subject, split, metric), values in scores.items():
        settings = dict(subject.settings)
        label = ", ".join([subject.data, *(f"{name} {settings[name]}" for name in differing_names if name in settings)])
        rows.setdefault((label, metric, split), {})[subject.initial] = values
    header = ["task", "metric", "set", *(f"from {initial}" for initial in columns)]
    if all(len(row) == 1 for row in rows.values()) and all(len(values) == 1 for values in scores.values()):
        return header, []
    return header, [[*key, *(_format_mean(row.get(initial, [])) for initial in columns)] for key, row in rows.items()]


def glue_table(runs: Sequence[RunRecords]) -> Table:
    """Return GLUE's table from the latest sweep that any of the runs belongs to; no rows if there is none."""
    parents = {folder for run in runs if run.subject and len(runs) > 1 for folder in run.folder.parents[:2]}
    summaries = (parent / SUMMARY for parent in parents if (parent / SUMMARY).is_file())
    paths = sorted(summaries, key=lambda path: path.stat().st_mtime)
    tables = [table for path in paths if (table := read_json(path).get("glue"))]
    return (tables[-1][0], tables[-1][1:]) if tables else ([], [])


def _format_mean(values: Sequence[float]) -> str:
    """Format the mean and, for several values, the standard deviation and the range; "" if there are no values."""
    if len(values) < 2:
        return "".join(f"{value:.4f}" for value in values)
    mean = f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}"
    return f"{mean} (mean of {len(values)}, {min(values):.4f} to {max(values):.4f})"


def _metric_title(name: str, score: Score) -> str:
    return score_title(name, score.positive).replace("_", " ")

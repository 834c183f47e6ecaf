"""The report of one or several runs: one self-contained HTML page, and a summary for the terminal.

The page shows data of the run folders (config, environment, records, scores) and, for a single pretraining, of its
export and corpus. It loads no external resources: charts are inline SVG, and our encoder predicts the masked words.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pretrain.common.records import Metric
from pretrain.common.run_files import CONFIG_FILE, ENVIRONMENT_FILE, read_fork
from pretrain.common.wording import clock, counted, score_title
from pretrain.config import PretrainConfig, config_of
from pretrain.reporting.attention.progress import attention_section
from pretrain.reporting.curves import abbreviate, draw_charts
from pretrain.reporting.fill_mask import Filling, fill, held_out_sentences
from pretrain.reporting.gains import gains
from pretrain.reporting.pages import write_page
from pretrain.reporting.runs import UNFINISHED, RunRecords, read_runs
from pretrain.reporting.tables import Table, comparison_table, describe_state, event_table, glue_table, run_table
from pretrain.run.metrics import objective_metrics
from pretrain.tracking.events import PROBE_SCORES
from pretrain.tracking.live import phases_of, training_work

NUM_SENTENCES, NUM_SHOWN = 100, 10  # number of sentences to mask and predict; number of them to show on the page
FINETUNED = "finetuned.json"  # results of the demo's fine-tunings, in its run folder
_DETAILS = (CONFIG_FILE, ENVIRONMENT_FILE)  # files to show verbatim
_REFRESH_SECONDS = 10  # interval at which a watched page is reloaded


def write_report(folders: Sequence[Path], out: Path, *, watched: bool = False) -> Path:
    """Write the report of one or several runs to the file `out` atomically and return `out`.

    Predictions of masked words and the matrices of all heads need a single run with an export in its folder.

    Args:
        folders: run folders, or folders that contain several run folders.
        out: the HTML file.
        watched: let the browser reload the page every 10 s until all runs have ended.

    Raises:
        InputError: a folder has no run, none of its runs has a record, or a file is damaged.
    """
    runs = read_runs(folders)
    config = _pretraining_config(runs)
    tables = {
        "Benefit of pretraining": _benefit_table(runs[0]) if config else ([], []),
        "Runs": run_table(runs) if len(runs) > 1 or runs[0].scores else ([], []),
        "Fine-tuning scores by task and initial checkpoint": comparison_table(runs),
        "GLUE": glue_table(runs),
        "Events": event_table(runs),
    }
    return write_page(
        out,
        "report.html.j2",
        title=folders[0].resolve().name if len(folders) == 1 < len(runs) else ", ".join(run.name for run in runs[:3]),
        runs=runs,
        header=_header(runs),
        tiles=_tiles(runs, config),
        tables={title: table for title, table in tables.items() if table[1]},
        config=config,
        **(_pretraining_values(runs[0], config) if config else {}),
        charts=draw_charts(runs),
        details=[(f"{run.label}/{name}", _read_text(run.folder / name)) for run in runs for name in _DETAILS],
        refresh_seconds=_REFRESH_SECONDS if watched and any(run.state == UNFINISHED for run in runs) else 0,
    )


def summary(folders: Sequence[Path]) -> str:
    """Summarize the runs in a few lines for the terminal."""
    runs = read_runs(folders)
    if len(runs) == 1:
        lines = [f"{runs[0].name}: {_header(runs)}"]
        tiles = _tiles(runs, _pretraining_config(runs))
        lines += [f"  {label:<18}{value}   {note}".rstrip() for label, value, note in tiles]
        benefit = _benefit_table(runs[0])
        return "\n".join([*lines, *([_format_table(benefit)] if benefit[1] else [])])
    return "\n\n".join(_format_table(table) for table in (run_table(runs), comparison_table(runs)) if table[1])


def _format_table(table: Table) -> str:
    """Format a table as lines of text. If it is wider than the terminal, each row becomes a block of lines."""
    rows = [table[0], *table[1]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if sys.stdout.isatty() and sum(widths) + 2 * len(widths) - 2 > shutil.get_terminal_size().columns:
        lines: list[str] = []
        for name, *cells in table[1]:
            lines += [name, *(f"  {title:<18}{cell}" for title, cell in zip(table[0][1:], cells, strict=True) if cell)]
        return "\n".join(lines)
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


# ---- the parts of every report


def _header(runs: Sequence[RunRecords]) -> str:
    if len(runs) > 1:
        states = Counter(run.state for run in runs)
        return f"{len(runs)} runs: " + ", ".join(f"{count} {name}" for name, count in states.items())
    fork = read_fork(runs[0].folder)
    forks = [fork, *reversed(fork.get("earlier", ()))] if fork else []
    return ", ".join([describe_state(runs[0]), *(f"forked from {f['name']} at step {f['step']:,}" for f in forks)])


def _tiles(runs: Sequence[RunRecords], config: PretrainConfig | None) -> list[tuple[str, str, str]]:
    """Return (label, value, note) of the most important results."""
    seconds = sum(map(_seconds, runs))
    if len(runs) > 1:
        return [("runs", str(len(runs)), ""), ("training time", clock(seconds), "sum of all runs")]
    (run,) = runs
    tiles = list(_score_tiles(run))
    if rates := run.values("tokens_per_second"):
        notes = {"mfu": "{:.0%} MFU", "data_stall_fraction": "data stall {:.1%}"}
        medians = [note.format(statistics.median(v)) for name, note in notes.items() if (v := run.values(name))]
        tiles.append(("useful tokens/s", f"{statistics.median(rates):,.0f}", ", ".join(["median", *medians])))
    if tokens := run.values("tokens"):
        tiles.append(("tokens trained on", abbreviate(tokens[-1]), f"in {run.step:,} steps"))
    workers = [f"on {counted(config.scheduling.workers, 'worker')}"] if config else []
    tiles.append(("training time", clock(seconds), ", ".join([*workers, *_time_left(run)])))
    if run.events:
        counts = Counter(event["event"] for event in run.events)
        tiles.append(("restarts", str(counts["restart"]), f"rollbacks: {counts['rollback']}"))
    return tiles


def _score_tiles(run: RunRecords) -> Iterator[tuple[str, str, str]]:
    """Yield tiles of the last evaluation, with a fine-tuning's main score, and of the last probe."""
    evaluation, probe = (run.evaluations or [{}])[-1], (run.probes or [{}])[-1]
    title = score_title(run.main_metric, next((score.positive for score in run.scores), "")).replace("_", " ")
    scores = {run.main_metric: Metric("", "", title, "score")} if run.main_metric else {}
    for record, kind, metrics in (
        (evaluation, "held-out", {**scores, **objective_metrics()}),
        (probe, "probe", PROBE_SCORES),
    ):
        for name, metric in metrics.items():
            if metric.short and record.get(name) is not None:
                yield metric.title, metric.text(record[name]), f"{kind}, step {record['step']:,}"
    if "error" in probe:
        yield "probe", "failed", probe["error"]


def _time_left(run: RunRecords) -> Iterator[str]:
    if run.total_steps and run.state == UNFINISHED and run.step:
        phases = phases_of(run.config)
        done, total = training_work(phases, run.step), training_work(phases, run.total_steps)
        yield f"{clock(_seconds(run) / done * (total - done))} left at this speed"


def _seconds(run: RunRecords) -> float:
    """Return the training time over all starts, in seconds."""
    return (run.training or [{}])[-1].get("seconds") or 0.0


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


# ---- the parts that only the report of a single pretraining has


def _pretraining_config(runs: Sequence[RunRecords]) -> PretrainConfig | None:
    """Return the config if there is a single run and it is a pretraining."""
    return config_of(runs[0].folder) if len(runs) == 1 and "corpus" in runs[0].config else None


def _pretraining_values(run: RunRecords, config: PretrainConfig) -> dict[str, Any]:
    """Return the values for report.html.j2 that only the report of a single pretraining has."""
    from pretrain.checkpoint import hf
    from pretrain.reporting.attention.page import page_values

    export_dir, corpus = hf.fill_mask_export(run.folder, config), config.corpus.folder
    fillings, attention, model = _predictions(export_dir, corpus), attention_section(run.folder, corpus), config.model
    return {
        "model": f"{model.layers} layers x {model.hidden}, {model.heads} heads, {config.optimizer.name}",
        "attention": attention,
        "heads": attention and attention.text and export_dir.is_dir() and page_values(export_dir, attention.text),
        "gains": gains(run.folder),
        "fillings": fillings[:: max(1, len(fillings) // NUM_SHOWN)],
        "success": _success_phrase(fillings),
        "finetuned": _read_finetuned(run),
        "card": _read_text(corpus / "card.md"),
    }


def _read_finetuned(run: RunRecords) -> list[dict[str, Any]]:
    return json.loads(_read_text(run.folder / FINETUNED) or "[]")


def _benefit_table(run: RunRecords) -> Table:
    """Return the held-out scores of the demo's fine-tunings from this run's weights and from random weights."""
    rows = []
    for result in _read_finetuned(run):
        scores = (result["scores"].get(weights) for weights in ("pretrained", "random"))
        rows.append([result["title"], result["metric"], *("" if score is None else f"{score:.3f}" for score in scores)])
    return ["task", "metric", "pretrained weights", "random weights"], rows


def _predictions(export_dir: Path, corpus: Path) -> list[Filling]:
    """Return predictions for masked words; [] if the run's export or corpus is missing."""
    if not export_dir.is_dir() or not corpus.is_dir():
        return []
    from pretrain.corpus.shards import open_shards
    from pretrain.corpus.vocabulary import read_vocabulary

    vocabulary = read_vocabulary(corpus / "vocab.txt")
    return fill(export_dir, held_out_sentences(open_shards(corpus, "validation"), vocabulary, NUM_SENTENCES))


def _success_phrase(fillings: Sequence[Filling]) -> str:
    """Return a phrase such as "the first guess in 21 and among the guesses in 44 of 100 sentences"."""
    num_first = sum(filling.rank == 1 for filling in fillings)
    num_top = sum(filling.rank <= len(filling.guesses) for filling in fillings)
    return f"the first guess in {num_first} and among the guesses in {num_top} of {counted(len(fillings), 'sentence')}"

"""Results of a command with several runs: summary.json, a table of scores, and GLUE's table."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.experiments.candidates import Candidate
from finetune.experiments.outcomes import Outcome, Spread, Trial, spreads
from finetune.tasks.datasets import glue
from finetune.training.saved import PREDICTIONS
from pretrain.common.wording import counted, score_title, shown_scores

if TYPE_CHECKING:
    from rich.table import Table

_MAX_REMARK = 90  # characters of the reason why a run failed


def summary(trials: Sequence[Trial], outcomes: Sequence[Outcome | None], ranked: Sequence[Candidate]) -> dict[str, Any]:
    """Return summary.json: counts, statistics of every score, the settings, best first, and every run."""
    return {
        "command": sys.argv[1:],
        "metric": next((outcome.metric for outcome in outcomes if outcome and outcome.metric), ""),
        **_counts(outcomes),
        "scores": {
            split: {name: vars(spread) for name, spread in scores.items()}
            for split, scores in spreads(outcomes).items()
        },
        "settings": [
            {**candidate.point.settings, "metric": spread.mean, "deviation": spread.deviation, "runs": spread.runs}
            for candidate in ranked
            if (spread := candidate.spread) is not None
        ],
        "each": [
            {
                "label": trial.label,
                "folder": str(trial.config.folder),
                "seed": trial.config.seed,
                "scores": outcome.scores if outcome else {},
                "degenerate": (outcome.degenerate if outcome else "") or None,
                "error": " ".join(str(outcome.error).split()) if outcome and outcome.error else None,
                "over": outcome is not None,
            }
            for trial, outcome in zip(trials, outcomes, strict=True)
        ],
    }


def _counts(outcomes: Sequence[Outcome | None]) -> dict[str, int]:
    """Return numbers of runs: all, done with scores, failed, degenerate (included in done), still to run."""
    finished = [outcome for outcome in outcomes if outcome]
    failed = sum(outcome.error is not None for outcome in finished)
    return {
        "runs": len(outcomes),
        "done": len(finished) - failed,
        "failed": failed,
        "degenerate": sum(bool(outcome.degenerate) for outcome in finished),
        "to_run": outcomes.count(None),
    }


def count_line(outcomes: Sequence[Outcome | None]) -> str:
    """Return a line such as `5 runs, 4 done, 1 failed`, with the other counts if they are not 0."""
    number = _counts(outcomes)
    line = f"{counted(number['runs'], 'run')}, {number['done']} done, {number['failed']} failed"
    if number["degenerate"]:
        line += f", {number['degenerate']} no better than the most frequent class"
    return line + (f", {number['to_run']} to run" if number["to_run"] else "")


def score_table(ranked: Sequence[Sequence[Candidate]]) -> Table:
    """Return the candidates of each config, best first, with the ranking score; a single candidate with all scores."""
    rows = [candidate for group in ranked for candidate in group]
    statistics = ["mean", "std", "min", "max"] if any(len(row.runs) > 1 for row in rows) else ["value"]
    names = ["config"] if len(ranked) > 1 else []
    headings = [*names, *(axis.rpartition(".")[2] for axis in rows[0].point.settings), "score"]
    table, notes = _table([*headings, *statistics], left=len(headings)), list[str]()
    for candidate in rows:
        is_best = any(len(group) > 1 and group[0] is candidate for group in ranked)
        chosen = [*([candidate.base.name] if names else []), *candidate.point.settings.values()]
        if remarks := "; ".join(dict.fromkeys(filter(None, map(_remark, candidate.runs.values())))):
            notes.append(f"{', '.join(chosen) or candidate.base.name}: {remarks}")
        for heading, spread in _scores(candidate, show_all=len(rows) == 1):
            values = (spread.mean, spread.deviation, spread.least, spread.most) if spread else (None,) * 4
            cells = ["–" if value is None else f"{value:.4f}" for value in values[: len(statistics)]]
            table.add_row(*chosen, heading, *cells, style="bold" if spread and is_best else "")
    table.caption, table.caption_justify = "\n".join(notes), "left"
    return table


def glue_best(ranked: Sequence[Sequence[Candidate]]) -> dict[str, Candidate]:
    """Return {GLUE task: its best candidate}, over all configs of the task."""
    scored = [(spread.mean, group[0]) for group in ranked if (spread := group[0].spread) is not None]
    best: dict[str, Candidate] = {}
    for _, leader in sorted(scored, key=lambda pair: -pair[0]):
        if task := getattr(leader.base.task_settings, "glue", ""):
            best.setdefault(task, leader)
    return best


def glue_rows(best: Mapping[str, Candidate], name: str) -> list[list[str]]:
    """Return the table of the BERT paper (Devlin et al., table 1) and a row with the means over each task's runs."""
    means = {
        task: {
            split: {score: spread.mean for score, spread in scores.items()}
            for split, scores in spreads(candidate.runs.values()).items()
        }
        for task, candidate in best.items()
    }
    return glue.table_rows(means, name=name)


def write_submission(best: Mapping[str, Path], folder: Path) -> None:
    """Write the files for GLUE's site from the predictions of the test sets in each task's run folder."""
    written = []
    for task, run in best.items():
        files = {split: run / PREDICTIONS / f"{split}.jsonl" for split in glue.TASKS[task].test}
        rows = {
            split: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            for split, path in files.items()
            if path.is_file()
        }
        written += [path.name for path in glue.write_submission(task, rows, folder)]
    print(f"{folder}: {', '.join(written) or 'nothing, since there are no test sets'}")
    if missing := [task.title for name, task in glue.TASKS.items() if name not in best]:
        print(f"  GLUE's site needs all tasks; missing: {', '.join(missing)}")


def _scores(candidate: Candidate, *, show_all: bool) -> Iterator[tuple[str, Spread | None]]:
    """Yield (set and score, statistics) of the ranking score, or of every score."""
    done = next((outcome for outcome in candidate.runs.values() if outcome and outcome.scores), Outcome())
    if not show_all or not done.scores:
        yield f"{done.chosen_on} {score_title(done.metric, done.positive)}".strip(), candidate.spread
        return
    statistics = spreads(candidate.runs.values())
    for split, scores in done.scores.items():
        names = shown_scores(scores, done.metric)
        for name in sorted(names, key=lambda score: score != done.metric):
            yield f"{split} {score_title(name, done.positive)}", statistics.get(split, {}).get(name)


def _remark(outcome: Outcome | None) -> str:
    if outcome is None:
        return "to run"
    if outcome.error is not None:
        return textwrap.shorten(f"failed: {outcome.error}", _MAX_REMARK, placeholder=" ...")
    return outcome.degenerate


def _table(headings: Sequence[str], left: int) -> Table:
    """Return an empty table whose first `left` columns are left-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings[:left]:
        table.add_column(heading.replace("_", " "), overflow="fold")
    for heading in headings[left:]:
        table.add_column(heading, justify="right", overflow="fold", min_width=len("-0.1234"))
    return table

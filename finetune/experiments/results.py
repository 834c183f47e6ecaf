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

_MAX_REMARK = 90  # maximum number of characters of a failed run's reason that are shown


def summary(trials: Sequence[Trial], outcomes: Sequence[Outcome | None], ranked: Sequence[Candidate]) -> dict[str, Any]:
    """Return the content of summary.json: counts of runs, statistics of scores, settings (best first), every run."""
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
    """Return the numbers of all runs, and of done (scored), failed, degenerate (a part of done) and remaining runs."""
    finished = [outcome for outcome in outcomes if outcome]
    num_failed = sum(outcome.error is not None for outcome in finished)
    return {
        "runs": len(outcomes),
        "done": len(finished) - num_failed,
        "failed": num_failed,
        "degenerate": sum(bool(outcome.degenerate) for outcome in finished),
        "to_run": outcomes.count(None),
    }


def count_line(outcomes: Sequence[Outcome | None]) -> str:
    """Return a line such as `5 runs, 4 done, 1 failed`, with the other counts if they are not 0."""
    counts = _counts(outcomes)
    line = f"{counted(counts['runs'], 'run')}, {counts['done']} done, {counts['failed']} failed"
    if counts["degenerate"]:
        line += f", {counts['degenerate']} no better than the most frequent class"
    return line + (f", {counts['to_run']} to run" if counts["to_run"] else "")


def score_table(ranked: Sequence[Sequence[Candidate]]) -> Table:
    """Return a table of the candidates, best first, with the score that ranks them; one candidate gets all scores."""
    candidates = [candidate for group in ranked for candidate in group]
    statistics = ["mean", "std", "min", "max"] if any(len(item.outcomes) > 1 for item in candidates) else ["value"]
    config_heading = ["config"] if len(ranked) > 1 else []
    headings = [*config_heading, *(axis.rpartition(".")[2] for axis in candidates[0].point.settings), "score"]
    table, notes = _table([*headings, *statistics], num_left=len(headings)), list[str]()
    for candidate in candidates:
        is_best = any(len(group) > 1 and group[0] is candidate for group in ranked)
        settings = [*([candidate.base.name] if config_heading else []), *candidate.point.settings.values()]
        if remarks := "; ".join(dict.fromkeys(filter(None, map(_remark, candidate.outcomes.values())))):
            notes.append(f"{', '.join(settings) or candidate.base.name}: {remarks}")
        for heading, spread in _score_statistics(candidate, show_all=len(candidates) == 1):
            values = (spread.mean, spread.deviation, spread.least, spread.most) if spread else (None,) * 4
            cells = ["–" if value is None else f"{value:.4f}" for value in values[: len(statistics)]]
            table.add_row(*settings, heading, *cells, style="bold" if spread and is_best else "")
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
    """Return table 1 of the BERT paper (Devlin et al. 2019) with a new row `name`: means over the runs of each task."""
    means = {
        task: {
            split: {score: spread.mean for score, spread in scores.items()}
            for split, scores in spreads(candidate.outcomes.values()).items()
        }
        for task, candidate in best.items()
    }
    return glue.table_rows(means, name=name)


def write_submission(run_folders: Mapping[str, Path], folder: Path) -> None:
    """Write the files for GLUE's site to `folder`, from the test predictions in each task's run folder."""
    file_names = []
    for task, run_folder in run_folders.items():
        files = {split: run_folder / PREDICTIONS / f"{split}.jsonl" for split in glue.TASKS[task].test}
        rows = {
            split: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            for split, path in files.items()
            if path.is_file()
        }
        file_names += [path.name for path in glue.write_submission(task, rows, folder)]
    print(f"{folder}: {', '.join(file_names) or 'nothing, since there are no test sets'}")
    if missing := [task.title for name, task in glue.TASKS.items() if name not in run_folders]:
        print(f"  GLUE's site needs all tasks; missing: {', '.join(missing)}")


def _score_statistics(candidate: Candidate, *, show_all: bool) -> Iterator[tuple[str, Spread | None]]:
    """Yield (heading, statistics) of the score that ranks candidates or, with `show_all`, of every score."""
    scored = next((outcome for outcome in candidate.outcomes.values() if outcome and outcome.scores), Outcome())
    if not show_all or not scored.scores:
        yield f"{scored.chosen_on} {score_title(scored.metric, scored.positive)}".strip(), candidate.spread
        return
    statistics = spreads(candidate.outcomes.values())
    for split, scores in scored.scores.items():
        names = shown_scores(scores, scored.metric)
        for name in sorted(names, key=lambda score: score != scored.metric):
            yield f"{split} {score_title(name, scored.positive)}", statistics.get(split, {}).get(name)


def _remark(outcome: Outcome | None) -> str:
    if outcome is None:
        return "to run"
    if outcome.error is not None:
        return textwrap.shorten(f"failed: {outcome.error}", _MAX_REMARK, placeholder=" ...")
    return outcome.degenerate


def _table(headings: Sequence[str], num_left: int) -> Table:
    """Return an empty table whose first `num_left` columns are left-aligned."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in headings[:num_left]:
        table.add_column(heading.replace("_", " "), overflow="fold")
    for heading in headings[num_left:]:
        table.add_column(heading, justify="right", overflow="fold", min_width=len("-0.1234"))
    return table

"""The HTML page of all trials of a folder: learning curves over FLOPs, the tables, the text, the machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.scores import blimp, finetuning
from finetune.scores.record import MODEL
from finetune.scores.view import score_notes, score_rows
from pretrain.reporting.charts import Series, line_chart
from pretrain.reporting.pages import write_page
from tests.bench.speedrun.ground import HELD_OUT, TRAIN
from tests.bench.speedrun.results import HEADINGS, RIGHT_ALIGNED, Results, Trial, cells, short_commit
from tests.bench.speedrun.scores import Scores

_COLORS = 8  # of the template


def write(results: Results, records: Sequence[Mapping[str, Any]], card: Mapping[str, Any], out: Path) -> Path:
    """Write the page to the file `out`, atomically, and return it.

    Args:
        results: the trials.
        records: their scores, as `scores.score_records`.
        card: of the text, as `ground.draw_text`.
        out: the file.
    """
    trials = results.trials
    return write_page(
        out,
        "speedrun.html.j2",
        beside=Path(__file__).parents[1] / "templates",
        words=card["words"],
        digest=card["sha256"][:16],
        charts=[chart for chart in (*_scores(trials), _during(trials)) if chart],
        headings=HEADINGS,
        right_aligned=RIGHT_ALIGNED,
        cells=[cells(one) for one in trials],
        blimp=_part_table(records, blimp.PART),
        finetuning=_part_table(records, finetuning.PART),
        remarks=[(one.run, one.remarks) for one in trials if one.remarks],
        notes=[("Text", _text(card)), ("Machines", _machines(trials))],
        colors=_COLORS,
    )


def _scores(trials: Sequence[Trial]) -> Iterator[str]:
    yield _learning(trials, "bits of common words", lambda one: one.common_word_bits)
    yield _learning(trials, "bits per character (within one vocabulary)", lambda one: one.bits_per_character)


def _learning(trials: Sequence[Trial], title: str, score: Callable[[Scores], float | None]) -> str:
    """A score over FLOPs; a line joins the budgets of one config and seed."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in trials:
        found = score(one.scores)
        if found is not None:
            lines.setdefault(f"{one.trial} s{one.seed}", []).append((one.flops, found))
    series = [Series(name, sorted(points), _kind(number)) for number, (name, points) in enumerate(lines.items())]
    return line_chart(
        f"Held-out text at the end of each run, {title}",
        series,
        form=lambda value: f"{value:.3f}",
        form_x=_flops,
        x_name="FLOP",
    )


def _during(trials: Sequence[Trial]) -> str:
    series = [
        Series(one.run, one.curve, _kind(number)) for number, one in enumerate(one for one in trials if one.curve)
    ]
    return line_chart(
        "During each run, its own evaluation on the held-out text, nats per masked token",
        series,
        form=lambda value: f"{value:.2f}",
        form_x=_flops,
        x_name="FLOP",
    )


def _kind(number: int) -> str:
    """CSS class of a line."""
    return f"line-{number % _COLORS}"


def _flops(value: float) -> str:
    return f"{value:.2g}"


def _text(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("SHA-256 of all", card["sha256"])]
    for name, source in card["sources"].items():
        for part in (TRAIN, HELD_OUT):
            one = source[part]
            counts = ", ".join(f"{one[key]:,} {key}" for key in ("documents", "words", "characters"))
            rows.append((f"{name}, {part}", f"{counts}; SHA-256 of {one['file']}: {one['sha256']}"))
    return rows


def _machines(trials: Sequence[Trial]) -> list[tuple[str, str]]:
    rows = []
    for one in trials:
        if one.machine:
            gpus = ", ".join(filter(None, one.machine.get("gpus", []))) or "no GPU"
            packages = ", ".join(f"{name} {version}" for name, version in one.machine.get("packages", {}).items())
            cores = f"{one.machine.get('cpu_cores')} cores of {one.machine.get('cpu')}, {gpus}"
            commit = short_commit(one.machine.get("git_commit"))
            rows.append((one.run, f"{one.date}, commit {commit}, {cores}; {packages}"))
    return rows


def _part_table(models: Sequence[Mapping[str, Any]], part: str) -> dict[str, Any]:
    """One part of the models that have it, for the template's `scores_table`; its rows are [] if none has it."""
    having = [model for model in models if model.get(part, {}).get("scores")]
    names = [model[MODEL]["name"] for model in having]
    return {"names": names, "rows": score_rows(having, [part]), "marks": score_notes(having, [part])}

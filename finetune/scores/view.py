"""Shows the scores of several models side by side: a table for the terminal, and an HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.scores import blimp, common_words, held_out, whole_words
from finetune.scores.record import MODEL
from finetune.scores.text_scores import MISSING_REASON
from pretrain.reporting.pages import write_page

if TYPE_CHECKING:
    from rich.table import Table

_TITLES = {
    common_words.NAME: "common words",
    whole_words.NAME: "whole words",
    held_out.NAME: "held-out text",
    blimp.NAME: "BLiMP",
}
# {name of a score: {format of the cells in a row: title of the row}}
_ROW_FORMATS = {
    common_words.NAME: {"{bits:.4f} ± {standard_error:.4f}": "common words, bits (English only)"},
    whole_words.NAME: {"{lower:.4f} to {upper:.4f}": "whole words, bits per character (bounds)"},
    held_out.NAME: {
        "{bits_per_character:.4f}": "held-out text, bits per character (within one vocabulary)",
        "{nats_per_token:.4f}": "held-out text, nats per masked token",
        "{accuracy:.4f}": "held-out text, accuracy",
    },
}
_MISSING = "–"


def score_rows(models: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return (title, one cell per model) of each row; scores with different settings are in separate rows."""
    rows: dict[tuple[str, str], list[str]] = {}
    for score_name in _TITLES:
        for column, model in enumerate(models):
            how = json.dumps(model.get(score_name, {}).get("how"), sort_keys=True)
            for title, value in _cells(score_name, _scores(model, score_name)):
                rows.setdefault((title, how), [_MISSING] * len(models))[column] = value
    return [(title, values) for (title, _), values in rows.items()]


def score_notes(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the reasons why models lack requested scores."""
    return [
        f"{title}, {model[MODEL]['name']}: no score, {_scores(model, score_name)[MISSING_REASON]}"
        for score_name, title in _TITLES.items()
        for model in models
        if MISSING_REASON in _scores(model, score_name)
    ]


def score_table(models: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table for the terminal, with a column for each model."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption="\n".join(score_notes(models)), caption_justify="left")
    table.add_column("")
    rows = score_rows(models)
    for column, model in enumerate(models):
        width = max((len(values[column]) for _, values in rows), default=0)  # long names are wrapped, numbers are not
        table.add_column(model[MODEL]["name"], justify="right", overflow="fold", min_width=width)
    for title, values in rows:
        table.add_row(title, *values)
    return table


def write_scores_page(models: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Write the page to the file `out` atomically, and return its path."""
    return write_page(
        out,
        "scores.html.j2",
        names=[model[MODEL]["name"] for model in models],
        rows=score_rows(models),
        notes=score_notes(models),
        models=[(model[MODEL]["name"], _facts(model)) for model in models],
    )


# ---- rows


def _scores(model: Mapping[str, Any], score_name: str) -> dict[str, Any]:
    return model.get(score_name, {}).get("scores", {})


def _cells(score_name: str, scores: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (title of the row, cell) of one score of one model."""
    if MISSING_REASON in scores or not scores:
        return
    if score_name == blimp.NAME:
        yield "BLiMP, all paradigms", f"{scores['overall']:.4f}"
        for name, value in scores["phenomena"].items():
            yield f"  {_readable(name)}", f"{value:.4f}"
    else:
        for cell_format, title in _ROW_FORMATS[score_name].items():
            yield title, cell_format.format(**scores)


def _readable(name: str) -> str:
    return name.replace("_", " ")


def _facts(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (name, value) of each fact: the model's description, then the settings and values of each score."""
    facts = [(_readable(name), str(value)) for name, value in model[MODEL].items()]
    for score_name, title in _TITLES.items():
        numbers = {name: value for name, value in _scores(model, score_name).items() if isinstance(value, int | float)}
        cells = {name: f"{value:,}" if isinstance(value, int) else f"{value:.4g}" for name, value in numbers.items()}
        if how := {**model.get(score_name, {}).get("how", {}), **cells}:
            facts.append((title, ", ".join(f"{_readable(name)} {value}" for name, value in how.items())))
    return facts

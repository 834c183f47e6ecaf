"""The scores of several models side by side: a table for the terminal, and a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.experiments.outcomes import Spread
from finetune.scores import blimp, finetuning, held_out
from finetune.scores.finetuning import FinetuningScore
from finetune.scores.record import MODEL
from pretrain.reporting.charts import Bar, bar_chart
from pretrain.reporting.pages import write_page

if TYPE_CHECKING:
    from rich.table import Table

_NONE = "–"
_CHANCE = 0.5  # of a pair of BLiMP


def score_rows(models: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """(what was measured, its value for each model) of the records `models`."""
    return [*_held_out_rows(models), *_blimp_rows(models), *_finetuning_rows(models)]


def score_table(models: Sequence[Mapping[str, Any]]) -> Table:
    """The rows as a table, a column for each model."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for model in models:
        table.add_column(model[MODEL]["name"], justify="right", overflow="fold")
    for what, values in score_rows(models):
        table.add_row(what, *values)
    return table


def write_scores_page(models: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Write the page to the file `out`, atomically, and return it."""
    return write_page(
        out,
        "scores.html.j2",
        names=[model[MODEL]["name"] for model in models],
        rows=score_rows(models),
        blimp=list(_blimp_charts(models)),
        finetuning=list(_finetuning_charts(models)),
        models=[(model[MODEL]["name"], _facts(model)) for model in models],
    )


# ---- rows


def _scores(model: Mapping[str, Any], part: str) -> dict[str, Any]:
    return model.get(part, {}).get("scores", {})


def _held_out_rows(models: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    found = [_scores(model, held_out.PART) for model in models]
    if not any(found):
        return
    for key, title in (
        ("bits_per_character", "held-out text, bits per character"),
        ("nats_per_token", "held-out text, nats per masked token"),
        ("accuracy", "held-out text, accuracy"),
    ):
        yield title, [f"{one[key]:.4f}" if one else _NONE for one in found]


def _blimp_rows(models: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    found = [_scores(model, blimp.PART) for model in models]
    if not any(found):
        return
    yield "BLiMP, all paradigms", [f"{one['overall']:.4f}" if one else _NONE for one in found]
    for name in dict.fromkeys(name for one in found for name in one.get("phenomena", {})):
        values = [one.get("phenomena", {}).get(name) for one in found]
        yield f"  {_readable(name)}", [_NONE if value is None else f"{value:.4f}" for value in values]


def _finetuning_rows(models: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    for name, ones in _by_config(models):
        metric = next(one.metric for one in ones if one)
        yield f"{name}, {_readable(metric)}", [_spread(one.pretrained) if one else _NONE for one in ones]
        if any(one and one.random for one in ones):
            yield "  from random weights", [_spread(one.random) if one else _NONE for one in ones]
            yield "  difference", [_difference(one) for one in ones]


def _by_config(models: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[FinetuningScore | None]]]:
    """(name of a config, its scores for each model)."""
    found = [_scores(model, finetuning.PART) for model in models]
    for name in dict.fromkeys(name for one in found for name in one):
        yield name, [FinetuningScore.from_data(one[name]) if name in one else None for one in found]


def _spread(values: Sequence[float]) -> str:
    """The mean with its standard error."""
    spread = Spread.of(values)
    if spread is None:
        return _NONE
    return f"{spread.mean:.4f}" + ("" if spread.error is None else f" ± {spread.error:.4f}")


def _difference(score: FinetuningScore | None) -> str:
    if score is None or score.difference is None:
        return _NONE
    errors = score.difference_in_errors
    return f"{score.difference:+.4f}" + ("" if errors is None else f" ({errors:+.1f} SE)")


def _readable(name: str) -> str:
    return name.replace("_", " ")


# ---- charts


def _blimp_charts(models: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A chart for each model, so that they stand side by side."""
    for model in models:
        scores = _scores(model, blimp.PART)
        if scores:
            values = {"all paradigms": scores["overall"], **scores["phenomena"]}
            bars = [Bar(_readable(name), value, value, value) for name, value in values.items()]
            yield bar_chart(
                model[MODEL]["name"],
                f"accuracy{_of_pairs(model)}",
                bars,
                form=lambda value: f"{value:.3f}",
                limit=("chance", _CHANCE),
                whole=1.0,
            )


def _of_pairs(model: Mapping[str, Any]) -> str:
    limit = model[blimp.PART]["how"]["limit"]
    return f", first {limit:,} pairs of each paradigm" if limit else ""


def _finetuning_charts(models: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A chart for each config: the models, each with random weights of its shape below."""
    names = [model[MODEL]["name"] for model in models]
    for config, ones in _by_config(models):
        bars = []
        for name, one in zip(names, ones, strict=True):
            if one is not None:
                bars += _bars(name, one.pretrained, "train")
                bars += _bars(f"{name}, random weights", one.random, "baseline")
        metric = next(one.metric for one in ones if one)
        if bars:
            yield bar_chart(config, _readable(metric), bars, form=lambda value: f"{value:.3f}")


def _bars(name: str, values: Sequence[float], kind: str) -> list[Bar]:
    spread = Spread.of(values)
    if spread is None:
        return []
    error = spread.error or 0.0
    return [Bar(name, spread.mean, spread.mean - error, spread.mean + error, kind)]


def _facts(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What is known about a model and how it was measured."""
    known = model[MODEL]
    facts = [
        ("folder", known["folder"]),
        ("shape", f"{known['family']}, {known['layers']} layers x {known['hidden']}"),
        ("parameters", f"{known['parameters']:,} without heads"),
        ("vocabulary", f"{known['vocabulary']:,}"),
        ("fingerprint", known["fingerprint"]),
    ]
    text = _scores(model, held_out.PART)
    if text:
        facts.append(
            (
                "held-out text",
                f"{text['documents']:,} documents, {text['tokens']:,} tokens, {text['predictions']:,} masked "
                f"({text['characters']:,} characters), {text['unknown']:.2%} of them unknown to the vocabulary",
            )
        )
    for name, one in _scores(model, finetuning.PART).items():
        runs = f"{len(one['pretrained'])} runs, {len(one['random'])} from random weights, on {one['part']}"
        facts.append((f"fine-tuning {name}", ", ".join([runs, *one["overrides"]])))
    for part in (held_out.PART, blimp.PART):
        how = model.get(part, {}).get("how", {})
        if how:
            facts.append((_readable(part), ", ".join(f"{_readable(key)} {value}" for key, value in how.items())))
    return facts

"""The scores of several models side by side: a table for the terminal, and a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.experiments.outcomes import Spread
from finetune.scores import blimp, common_words, finetuning, held_out, positions, whole_words
from finetune.scores.finetuning import FinetuningScore
from finetune.scores.record import MODEL
from finetune.scores.text_scores import WHY_NOT
from pretrain.reporting.charts import Bar, bar_chart
from pretrain.reporting.pages import write_page

if TYPE_CHECKING:
    from rich.table import Table

_PARTS = (common_words.PART, whole_words.PART, held_out.PART, positions.PART, blimp.PART, finetuning.PART)
_TITLES = {
    common_words.PART: "common words",
    whole_words.PART: "whole words",
    held_out.PART: "held-out text",
    positions.PART: "loss by position",
    blimp.PART: "BLiMP",
}
# The forms of the rows of a part -> their titles.
_FORMS = {
    common_words.PART: {"{bits:.4f} ± {standard_error:.4f}": "common words, bits"},
    whole_words.PART: {"{lower:.4f} and {upper:.4f}": "whole words, bits per character, between"},
    held_out.PART: {
        "{bits_per_character:.4f}": "held-out text, bits per character (within one vocabulary)",
        "{nats_per_token:.4f}": "held-out text, nats per masked token",
        "{accuracy:.4f}": "held-out text, accuracy",
    },
}
_NONE = "–"
_LONGEST = 40  # characters of a setting in a note, where digests are cut
_CHANCE = 0.5  # of a pair of BLiMP


def score_rows(models: Sequence[Mapping[str, Any]], parts: Sequence[str] = _PARTS) -> list[tuple[str, list[str]]]:
    """(what was measured, its value for each model) of these parts of the records `models`."""
    rows: list[tuple[str, list[str]]] = []
    for part in parts:
        rows += _finetuning_rows(models) if part == finetuning.PART else _rows(models, part)
    return rows


def score_notes(models: Sequence[Mapping[str, Any]], parts: Sequence[str] = _PARTS) -> list[str]:
    """What the marks in the rows mean: the settings in which measurements of one row differ; and why there is none."""
    hows = [(title, _settings(models, part)) for part, title in _TITLES.items() if part in parts]
    if finetuning.PART in parts:
        hows += [(name, _hows(models, name)) for name, _ in _by_config(models)]
    missing = [
        f"{title}, {model[MODEL]['name']}: no score, {_scores(model, part)[WHY_NOT]}"
        for part, title in _TITLES.items()
        for model in models
        if part in parts and WHY_NOT in _scores(model, part)
    ]
    return [f"{title} {line}" for title, ways in hows for line in _explained(ways)] + missing


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
    notes = score_notes(models)
    if notes:
        table.caption = "\n".join(notes)
        table.caption_justify = "left"
    return table


def write_scores_page(models: Sequence[Mapping[str, Any]], out: Path) -> Path:
    """Write the page to the file `out`, atomically, and return it."""
    return write_page(
        out,
        "scores.html.j2",
        names=[model[MODEL]["name"] for model in models],
        rows=score_rows(models),
        marks=score_notes(models),
        blimp=list(_blimp_charts(models)),
        finetuning=list(finetuning_charts(models)),
        models=[(model[MODEL]["name"], _facts(model)) for model in models],
    )


# ---- rows


def _scores(model: Mapping[str, Any], part: str) -> dict[str, Any]:
    return model.get(part, {}).get("scores", {})


def _rows(models: Sequence[Mapping[str, Any]], part: str) -> Iterator[tuple[str, list[str]]]:
    texts = [dict(_texts(part, scores)) if (scores := _scores(model, part)) else {} for model in models]
    for title in dict.fromkeys(title for one in texts for title in one):
        yield title, _marked([one.get(title, _NONE) for one in texts], _settings(models, part))


def _texts(part: str, scores: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(what was measured, its value) of one model."""
    if part == blimp.PART:
        yield "BLiMP, all paradigms", f"{scores['overall']:.4f}{_unfinished(scores)}"
        for name, value in ({} if _unfinished(scores) else scores.get("phenomena", {})).items():
            yield f"  {_readable(name)}", f"{value:.4f}"
    elif part == positions.PART:
        for name, nats in scores.get("nats", {}).items():
            error = scores["standard_errors"][name]
            yield f"positions {name}, nats per masked token", f"{nats:.4f} ± {error:.4f}"
    else:
        for form, title in _FORMS[part].items():
            yield title, _NONE if WHY_NOT in scores else form.format(**scores)


def _unfinished(scores: Mapping[str, Any]) -> str:
    """How many paradigms are scored, if some are missing."""
    missing = blimp.missing_paradigms(scores) if scores else 0
    done = len(scores.get("paradigms", {}))
    return f" ({done} of {done + missing})" if missing else ""


def _finetuning_rows(models: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[str]]]:
    for name, ones in _by_config(models):
        metric = next(one.metric for one in ones if one)
        hows = _hows(models, name)
        pretrained = [_spread(one.pretrained, one.runs) if one else _NONE for one in ones]
        yield f"{name}, {_readable(metric)}", _marked(pretrained, hows)
        if any(one and one.random for one in ones):
            random = [_spread(one.random, one.runs) if one else _NONE for one in ones]
            yield "  from random weights", _marked(random, hows)
            yield "  difference", _marked([_difference(one) for one in ones], hows)
        for start, title in (("pretrained", "  chosen"), ("random", "  chosen from random weights")):
            if any(one and start in one.chosen for one in ones):
                yield title, [one.chosen.get(start, _NONE) if one else _NONE for one in ones]


def _by_config(models: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[FinetuningScore | None]]]:
    """(name of a config, its scores for each model)."""
    found = [_scores(model, finetuning.PART) for model in models]
    for name in dict.fromkeys(name for one in found for name in one):
        yield name, [FinetuningScore.from_data(one[name]) if name in one else None for one in found]


# ---- measurements of one row that were made differently


def _settings(models: Sequence[Mapping[str, Any]], part: str) -> list[dict[str, Any] | None]:
    """How each model was measured, without what its training decides."""
    hows = [model[part]["how"] if part in model else None for model in models]
    return [None if how is None else {key: how[key] for key in how if key != "shifted"} for how in hows]


def _hows(models: Sequence[Mapping[str, Any]], config: str) -> list[dict[str, Any] | None]:
    """How each model was fine-tuned with a config of this name; older records do not know its content and data."""
    found = [_scores(model, finetuning.PART).get(config) for model in models]
    return [
        None
        if one is None
        else {
            "overrides": " ".join(one.get("overrides", [])) or "none",
            "grid": " ".join(f"{key}={','.join(values)}" for key, values in one.get("grid", {}).items()) or "none",
            **{key: one.get(key, "unknown") for key in ("config", "data")},
        }
        for one in found
    ]


def _distinct(hows: Sequence[Mapping[str, Any] | None]) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    for how in hows:
        if how is not None and how not in found:
            found.append(how)
    return found


def _marked(values: Sequence[str], hows: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """The values, with a mark for each way of measuring if there are several."""
    ways = _distinct(hows)
    return [
        value if how is None or value == _NONE or len(ways) < 2 else f"{value} [{ways.index(how) + 1}]"
        for value, how in zip(values, hows, strict=True)
    ]


def _explained(hows: Sequence[Mapping[str, Any] | None]) -> Iterator[str]:
    """For each mark, the settings that differ."""
    ways = _distinct(hows)
    keys = dict.fromkeys(key for way in ways for key in way)
    differing = [key for key in keys if any(way.get(key) != ways[0].get(key) for way in ways)]
    for number, way in enumerate(ways if len(ways) > 1 else [], 1):
        settings = ", ".join(f"{_readable(key)} {str(way.get(key, _NONE))[:_LONGEST]}" for key in differing)
        yield f"[{number}]: {settings}"


def _spread(values: Sequence[float], runs: int) -> str:
    """The mean with its standard error."""
    spread = Spread.of(values)
    if spread is None:
        return _NONE
    return f"{spread.mean:.4f}" + ("" if spread.error is None else f" ± {spread.error:.4f}") + _missing(values, runs)


def _missing(values: Sequence[float], runs: int) -> str:
    """Of how many runs the mean is, if some have no score: they diverged, failed or are still to run."""
    return f" ({len(values)} of {runs})" if len(values) < runs else ""


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
            values = {f"all paradigms{_unfinished(scores)}": scores["overall"], **scores["phenomena"]}
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


def finetuning_charts(models: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A chart for each config: the models, each with random weights of its shape below."""
    names = [model[MODEL]["name"] for model in models]
    for config, ones in _by_config(models):
        bars = []
        for name, one in zip(names, ones, strict=True):
            if one is not None:
                bars += _bars(f"{name}{_missing(one.pretrained, one.runs)}", one.pretrained, "train")
                random = f"{name}, random weights{_missing(one.random, one.runs)}"
                bars += _bars(random, one.random, "baseline")
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
    common, whole = (_scores(model, part).get("words") for part in (common_words.PART, whole_words.PART))
    if common or whole:
        facts.append(("words scored", f"{common or 0:,} common ones, {whole or 0:,} whole ones"))
    for name, one in _scores(model, finetuning.PART).items():
        runs = f"{len(one['pretrained'])} runs, {len(one['random'])} from random weights, on {one['part']}"
        facts.append((f"fine-tuning {name}", ", ".join([runs, *one["overrides"]])))
    for part in _TITLES:
        how = model.get(part, {}).get("how", {})
        if how:
            facts.append((_readable(part), ", ".join(f"{_readable(key)} {value}" for key, value in how.items())))
    return facts

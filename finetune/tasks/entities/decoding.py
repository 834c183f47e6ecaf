"""Logits to tags and entities, their official scores, and the file that conlleval reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, cast

import numpy as np

from finetune.datasets.sentences import Sentence
from finetune.metrics import entities as metrics
from finetune.tasks.base import Windows
from pretrain.common.errors import InputError

Predictions = Sequence[Mapping[str, Any]]


def label_names(types: Sequence[str]) -> tuple[str, ...]:
    """The labels in order of the outputs: O, then B and I of each type."""
    return ("O", *chain.from_iterable((f"B-{name}", f"I-{name}") for name in types))


def decode(
    types: tuple[str, ...], examples: Sequence[Sentence], windows: Windows, logits: np.ndarray
) -> list[dict[str, Any]]:
    """One prediction per example, as `Entities` describes it, from logits float32 [R, C]."""
    counts = np.fromiter((len(one.words) for one in examples), np.int64, len(examples))
    starts = np.concatenate([[0], np.cumsum(counts)])
    best, probability = _most_probable(windows, logits, starts)
    names = np.array(label_names(types), object)[best].tolist()
    predictions: list[dict[str, Any]] = [
        {"entities": [], "tags": names[first:end]}
        for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]
    prefixes = np.where(best == 0, metrics.OUTSIDE, 2 - best % 2).astype(np.uint8)
    spans = metrics.find(metrics.Tagged(prefixes, (best - 1) // 2, starts, types))
    total = np.concatenate([[0.0], np.cumsum(probability)])
    scores = (total[spans.end] - total[spans.first]) / (spans.end - spans.first)
    owner = np.searchsorted(starts, spans.first, "right") - 1
    for number, group in _groups(owner):
        text, offsets = examples[number].characters()
        columns = (
            spans.types[group].tolist(),
            (spans.first[group] - starts[number]).tolist(),
            (spans.end[group] - starts[number] - 1).tolist(),
            scores[group].tolist(),
        )
        predictions[number]["entities"] = [
            _entity(types[kind], text, offsets, first, last, score)
            for kind, first, last, score in zip(*columns, strict=True)
        ]
    return predictions


def conll_columns(examples: Sequence[Sentence], predictions: Predictions) -> str:
    """Columns separated by blanks: word, gold tag if all words have one, predicted tag. IOB2."""
    lines = []
    for one, prediction in zip(examples, predictions, strict=True):
        gold = [one.tags] if one.tags is not None else []
        rows = zip(map(_as_field, one.words), *gold, prediction["tags"], strict=True)
        lines += [" ".join(row) for row in rows] + [""]
    return "\n".join(lines) + "\n"


def score(types: tuple[str, ...], examples: Sequence[Sentence], predictions: Predictions) -> dict[str, float]:
    """precision, recall, f1 (conlleval, seqeval's default mode), macro_f1, strict_* (IOB2), accuracy of tags."""
    gold, predicted = _both(types, examples, predictions)
    counts = metrics.count(gold, predicted)
    strict = metrics.count(gold, predicted, "iob2")
    return {
        **counts.overall,
        "macro_f1": counts.macro_f1,
        **{f"strict_{name}": value for name, value in strict.overall.items()},
        "accuracy": metrics.accuracy(gold, predicted),
    }


def details(types: tuple[str, ...], examples: Sequence[Sentence], predictions: Predictions) -> dict[str, Any]:
    """{"types": {type: {precision, recall, f1, support}}, "sentences", "words", "entities"}."""
    gold, predicted = _both(types, examples, predictions)
    counts = metrics.count(gold, predicted)
    return {
        "types": counts.by_type,
        "sentences": len(examples),
        "words": len(gold),
        "entities": int(counts.gold.sum()),
    }


def _most_probable(windows: Windows, logits: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(most probable label int64 [W], its probability float64 [W]) of all words; 0 and 1 for words without a token."""
    example = windows.examples[np.searchsorted(windows.starts, windows.queries, "right") - 1]
    at = starts[example] + windows.extra["word"]
    best, probability = np.zeros(starts[-1], np.int64), np.ones(starts[-1])
    best[at] = logits.argmax(-1)
    above = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    probability[at] = 1 / np.exp(above).sum(-1)
    return best, probability


def _both(
    types: tuple[str, ...], examples: Sequence[Sentence], predictions: Predictions
) -> tuple[metrics.Tagged, metrics.Tagged]:
    """Gold and predicted tags."""
    for one in examples:
        if one.tags is None:
            raise InputError(f"{one.where()}: no labels, so predictions cannot be scored. Give each sentence its tags.")
    gold = metrics.tagged([cast(Sequence[str], one.tags) for one in examples], types)
    return gold, metrics.tagged([prediction["tags"] for prediction in predictions], gold.names)


def _as_field(word: str) -> str:
    """A word as one column for readers that split at white space."""
    return "_".join(word.split()) or "_"


def _groups(owner: np.ndarray) -> Iterator[tuple[int, slice]]:
    """(number, places) of each run of equal numbers."""
    edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    for first, end in pairwise(edges):
        if end > first:
            yield int(owner[first]), slice(first, end)


def _entity(kind: str, text: str, offsets: np.ndarray, first: int, last: int, score: float) -> dict[str, Any]:
    start, end = int(offsets[first, 0]), int(offsets[last, 1])
    return {
        "type": kind,
        "text": text[start:end],
        "score": score,
        "start": start,
        "end": end,
        "first_word": first,
        "last_word": last,
    }

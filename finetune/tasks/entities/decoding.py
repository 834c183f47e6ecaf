"""Turn logits into tags and entities, with their official scores and the input file of conlleval."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, cast

import numpy as np

from finetune.tasks.base import Windows
from finetune.tasks.datasets.sentences import Sentence
from finetune.tasks.entities import metrics as metrics
from pretrain.common.errors import InputError

Predictions = Sequence[Mapping[str, Any]]

_BEGIN, _INSIDE = slice(1, None, 2), slice(2, None, 2)  # of the labels
PENALTIES = tuple(number / 4 for number in range(-4, 17))  # of O, in nats, to try on the dev set


def label_names(types: Sequence[str]) -> tuple[str, ...]:
    """Return the labels in order of the outputs: O, then B and I of each type."""
    return ("O", *chain.from_iterable((f"B-{name}", f"I-{name}") for name in types))


@dataclass(frozen=True)
class Decoder:
    """Turns logits into tags.

    Attributes:
        types: entity types in the order of the outputs.
        outside_penalty: nats to subtract from the logits of O before decoding.
    """

    types: tuple[str, ...]
    outside_penalty: float = 0.0

    def predictions(self, examples: Sequence[Sentence], windows: Windows, logits: np.ndarray) -> list[dict[str, Any]]:
        """Return one prediction per example, as `Entities` describes it, from logits float32 [R, C]."""
        starts = _word_starts(examples)
        log_probabilities = self._log_probabilities(windows, logits, starts)
        return _predictions(self.types, examples, starts, log_probabilities, self._tags(log_probabilities, starts))

    def best_penalty(self, examples: Sequence[Sentence], windows: Windows, logits: np.ndarray, metric: str) -> float:
        """Return the element of `PENALTIES` with the best `metric` on these labeled examples, of equals nearest to 0.

        If entities are rare, the threshold with the best F1 is below a probability of one half (Lipton et al. 2014,
        arXiv:1402.1892).
        """
        starts = _word_starts(examples)
        gold = _gold(self.types, examples)
        log_probabilities = self._log_probabilities(windows, logits, starts)

        def value(penalty: float) -> float:
            tags = replace(self, outside_penalty=penalty)._tags(log_probabilities, starts)
            return _scores(gold, _tagged(self.types, tags, starts))[metric]

        return max(sorted(PENALTIES, key=abs), key=value)

    def _log_probabilities(self, windows: Windows, logits: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return float64 [W, C] of all words. A word without a token cannot start an entity, but may continue one."""
        example = windows.examples[np.searchsorted(windows.starts, windows.queries, "right") - 1]
        shifted = logits.astype(np.float64)
        shifted -= shifted.max(-1, keepdims=True, initial=-np.inf)
        result = np.zeros((starts[-1], len(self.types) * 2 + 1))
        result[:, _BEGIN] = -np.inf
        result[starts[example] + windows.extra["word"]] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return result

    def _tags(self, log_probabilities: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return label indices, int64 [W]."""
        penalized = log_probabilities.copy()
        has_token = np.isfinite(log_probabilities).all(-1)
        penalized[:, 0] -= self.outside_penalty * has_token
        return best_sequences(penalized, starts)


def best_sequences(log_probabilities: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the most probable IOB2 tags of N sentences (I-X only after B-X or I-X) by Viterbi's algorithm.

    Args:
        log_probabilities: float64 [W, C] of the words of all sentences, in the order of `label_names`.
        starts: int64 [N + 1], first word of each sentence.

    Returns:
        int64 [W]: numbers of the labels.
    """
    lengths = np.diff(starts)
    order = np.argsort(-lengths, kind="stable")  # longest first: the sentences with a word at a position are a prefix
    first, lengths = starts[:-1][order], lengths[order]
    num_active = [int(np.searchsorted(-lengths, -position, "left")) for position in range(int(lengths.max(initial=0)))]
    outputs = log_probabilities.shape[1]
    pointers = np.zeros(log_probabilities.shape, np.int64)  # best label of the previous word, by label of this word
    total = np.full((len(lengths), outputs), -np.inf)
    for position, active in enumerate(num_active):
        at = first[:active] + position
        if position == 0:
            best_before = np.zeros((active, outputs))
            best_before[:, _INSIDE] = -np.inf
        else:
            previous = total[:active]
            best = previous.argmax(-1)
            pointers[at] = best[:, None]
            best_before = np.repeat(previous.max(-1)[:, None], outputs, axis=1)
            continues = previous[:, _INSIDE] > previous[:, _BEGIN]
            best_before[:, _INSIDE] = np.where(continues, previous[:, _INSIDE], previous[:, _BEGIN])
            pointers[at, _INSIDE] = np.arange(1, outputs, 2) + continues
        total[:active] = best_before + log_probabilities[at]
    tags = np.zeros(len(log_probabilities), np.int64)
    last = total.argmax(-1)
    for position in reversed(range(len(num_active))):
        active = num_active[position]
        at = first[:active] + position
        tags[at] = last[:active]
        last[:active] = pointers[at, last[:active]]
    return tags


def _predictions(
    types: tuple[str, ...],
    examples: Sequence[Sentence],
    starts: np.ndarray,
    log_probabilities: np.ndarray,
    tags: np.ndarray,
) -> list[dict[str, Any]]:
    names = np.array(label_names(types), object)[tags].tolist()
    predictions: list[dict[str, Any]] = [
        {"entities": [], "tags": names[first:end]}
        for first, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]
    spans = metrics.find_entities(_tagged(types, tags, starts))
    probability = np.exp(log_probabilities[np.arange(len(tags)), tags])
    total = np.concatenate([[0.0], np.cumsum(probability)])
    scores = (total[spans.end] - total[spans.first]) / (spans.end - spans.first)
    owner = np.searchsorted(starts, spans.first, "right") - 1
    for number, group in _runs(owner):
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
    """Return columns separated by spaces: word, gold tag if all words have one, predicted tag; IOB2."""
    lines = []
    for sentence, prediction in zip(examples, predictions, strict=True):
        gold = [sentence.tags] if sentence.tags is not None else []
        rows = zip(sentence.words, *gold, prediction["tags"], strict=True)
        lines += [" ".join(map(_as_field, row)) for row in rows] + [""]
    return "\n".join(lines) + "\n"


def score(types: tuple[str, ...], examples: Sequence[Sentence], predictions: Predictions) -> dict[str, float]:
    """Return precision, recall, f1 (conlleval, seqeval's default), macro_f1, strict_* (IOB2), accuracy of tags."""
    return _scores(*gold_and_predicted(types, examples, predictions))


def details(types: tuple[str, ...], examples: Sequence[Sentence], predictions: Predictions) -> dict[str, Any]:
    """Return {"types": {type: {precision, recall, f1, support}}, "sentences", "words", "entities"}."""
    gold, predicted = gold_and_predicted(types, examples, predictions)
    counts = metrics.count(gold, predicted)
    return {
        "types": counts.by_type,
        "sentences": len(examples),
        "words": len(gold),
        "entities": int(counts.gold.sum()),
    }


def _word_starts(examples: Sequence[Sentence]) -> np.ndarray:
    """Return the first word of each sentence, int64 [N + 1]."""
    counts = np.fromiter((len(sentence.words) for sentence in examples), np.int64, len(examples))
    return np.concatenate([[0], np.cumsum(counts)])


def _tagged(types: tuple[str, ...], tags: np.ndarray, starts: np.ndarray) -> metrics.TaggedSentences:
    prefixes = np.where(tags == 0, metrics.OUTSIDE, 2 - tags % 2).astype(np.uint8)
    return metrics.TaggedSentences(prefixes, (tags - 1) // 2, starts, types)


def _gold(types: tuple[str, ...], examples: Sequence[Sentence]) -> metrics.TaggedSentences:
    for sentence in examples:
        if sentence.tags is None:
            raise InputError(f"{sentence.where()}: no labels, so predictions cannot be scored. Add its tags.")
    return metrics.encode_tags([cast(Sequence[str], sentence.tags) for sentence in examples], types)


def gold_and_predicted(
    types: tuple[str, ...], examples: Sequence[Sentence], predictions: Predictions
) -> tuple[metrics.TaggedSentences, metrics.TaggedSentences]:
    """Return gold and predicted tags."""
    gold = _gold(types, examples)
    return gold, metrics.encode_tags([prediction["tags"] for prediction in predictions], gold.names)


def _scores(gold: metrics.TaggedSentences, predicted: metrics.TaggedSentences) -> dict[str, float]:
    counts = metrics.count(gold, predicted)
    strict = metrics.count(gold, predicted, "iob2")
    return {
        **counts.overall,
        "macro_f1": counts.macro_f1,
        **{f"strict_{name}": value for name, value in strict.overall.items()},
        "accuracy": metrics.accuracy(gold, predicted),
    }


def _as_field(word: str) -> str:
    """Format a word or tag as one column for readers that split at white space."""
    return "_".join(word.split()) or "_"


def _runs(owner: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield (number, slice) of each run of equal numbers."""
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

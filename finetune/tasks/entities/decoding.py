"""Turn logits into tags and entities, compute their official scores, and write conlleval's input file."""

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

_BEGINS, _INSIDES = slice(1, None, 2), slice(2, None, 2)  # indices of the labels B-... and I-...
PENALTIES = tuple(quarters / 4 for quarters in range(-4, 17))  # penalties to try for O on the dev set, in nats


def label_names(types: Sequence[str]) -> tuple[str, ...]:
    """Return the labels in the order of the outputs: O, then B and I of each type."""
    return ("O", *chain.from_iterable((f"B-{name}", f"I-{name}") for name in types))


@dataclass(frozen=True)
class Decoder:
    """Turns logits into tags.

    Attributes:
        types: entity types in the order of the outputs.
        outside_penalty: penalty to subtract from the logits of O before decoding, in nats.
    """

    types: tuple[str, ...]
    outside_penalty: float = 0.0

    def decode(self, examples: Sequence[Sentence], windows: Windows, logits: np.ndarray) -> list[dict[str, Any]]:
        """Return one prediction per example, as `Entities` describes it, from logits float32 [R, C]."""
        starts = _word_starts(examples)
        log_probabilities = self._log_probabilities(windows, logits, starts)
        tags = self._best_tags(log_probabilities, starts)
        return _make_predictions(self.types, examples, starts, log_probabilities, tags)

    def best_penalty(self, examples: Sequence[Sentence], windows: Windows, logits: np.ndarray, metric: str) -> float:
        """Return the element of `PENALTIES` with the best `metric` on these labeled examples; ties: nearest to 0.

        A penalty of O lowers the probability from which an entity is predicted. If entities are rare, F1 is best with
        less than one half (Lipton et al. 2014, arXiv:1402.1892).
        """
        starts = _word_starts(examples)
        gold = _gold_tags(self.types, examples)
        log_probabilities = self._log_probabilities(windows, logits, starts)

        def score_with(penalty: float) -> float:
            tags = replace(self, outside_penalty=penalty)._best_tags(log_probabilities, starts)
            return _scores(gold, _tagged_sentences(self.types, tags, starts))[metric]

        return max(sorted(PENALTIES, key=abs), key=score_with)

    def _log_probabilities(self, windows: Windows, logits: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return log probabilities, float64 [W, C]. Words without a token can continue an entity but not start one."""
        example_R = windows.examples[np.searchsorted(windows.starts, windows.queries, "right") - 1]
        shifted = logits.astype(np.float64)
        shifted -= shifted.max(-1, keepdims=True, initial=-np.inf)
        result = np.zeros((starts[-1], len(self.types) * 2 + 1))
        result[:, _BEGINS] = -np.inf
        result[starts[example_R] + windows.extra["word"]] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return result

    def _best_tags(self, log_probabilities: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """Return the label indices of the most probable tags after the penalty, int64 [W]."""
        penalized = log_probabilities.copy()
        has_token = np.isfinite(log_probabilities).all(-1)
        penalized[:, 0] -= self.outside_penalty * has_token
        return best_sequences(penalized, starts)


def best_sequences(log_probabilities: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the label indices of the most probable IOB2 tags (I-X only after B-X or I-X), by Viterbi; int64 [W].

    Args:
        log_probabilities: float64 [W, C] of the words of all sentences, in the order of `label_names`.
        starts: int64 [N + 1], index of the first word of each of N sentences, and finally W.
    """
    lengths = np.diff(starts)
    order = np.argsort(-lengths, kind="stable")  # longest first: at each position, the sentences with a word come first
    first_words, lengths = starts[:-1][order], lengths[order]
    num_active = [int(np.searchsorted(-lengths, -position, "left")) for position in range(int(lengths.max(initial=0)))]
    num_labels = log_probabilities.shape[1]
    pointers = np.zeros(log_probabilities.shape, np.int64)  # [word, label]: best label of the previous word
    log_best = np.full((len(lengths), num_labels), -np.inf)  # [sentence, label]: best sequence up to this label
    for position, active in enumerate(num_active):
        words = first_words[:active] + position
        if position == 0:
            best_before = np.zeros((active, num_labels))
            best_before[:, _INSIDES] = -np.inf
        else:
            previous = log_best[:active]
            best = previous.argmax(-1)
            pointers[words] = best[:, None]
            best_before = np.repeat(previous.max(-1)[:, None], num_labels, axis=1)
            continues = previous[:, _INSIDES] > previous[:, _BEGINS]
            best_before[:, _INSIDES] = np.where(continues, previous[:, _INSIDES], previous[:, _BEGINS])
            pointers[words, _INSIDES] = np.arange(1, num_labels, 2) + continues
        log_best[:active] = best_before + log_probabilities[words]
    tags = np.zeros(len(log_probabilities), np.int64)
    labels = log_best.argmax(-1)
    for position in reversed(range(len(num_active))):
        active = num_active[position]
        words = first_words[:active] + position
        tags[words] = labels[:active]
        labels[:active] = pointers[words, labels[:active]]
    return tags


def _make_predictions(
    types: tuple[str, ...],
    examples: Sequence[Sentence],
    starts: np.ndarray,
    log_probabilities: np.ndarray,
    tags: np.ndarray,
) -> list[dict[str, Any]]:
    tag_names = np.array(label_names(types), object)[tags].tolist()
    predictions: list[dict[str, Any]] = [
        {"entities": [], "tags": tag_names[start:stop]}
        for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]
    spans = metrics.find_entities(_tagged_sentences(types, tags, starts))
    probability = np.exp(log_probabilities[np.arange(len(tags)), tags])
    summed = np.concatenate([[0.0], np.cumsum(probability)])
    scores = (summed[spans.end] - summed[spans.first]) / (spans.end - spans.first)
    sentence_E = np.searchsorted(starts, spans.first, "right") - 1
    for index, group in _equal_runs(sentence_E):
        text, offsets = examples[index].text_and_offsets()
        columns = (
            spans.types[group].tolist(),
            (spans.first[group] - starts[index]).tolist(),
            (spans.end[group] - starts[index] - 1).tolist(),
            scores[group].tolist(),
        )
        predictions[index]["entities"] = [
            _entity(types[type_], text, offsets, first, last, score)
            for type_, first, last, score in zip(*columns, strict=True)
        ]
    return predictions


def conll_columns(examples: Sequence[Sentence], predictions: Predictions) -> str:
    """Return lines of columns separated by spaces: word, gold tag if labeled, predicted tag; tags are IOB2."""
    lines = []
    for sentence, prediction in zip(examples, predictions, strict=True):
        gold = [sentence.tags] if sentence.tags is not None else []
        rows = zip(sentence.words, *gold, prediction["tags"], strict=True)
        lines += [" ".join(map(_as_field, row)) for row in rows] + [""]
    return "\n".join(lines) + "\n"


def score(types: tuple[str, ...], examples: Sequence[Sentence], predictions: Predictions) -> dict[str, float]:
    """Return precision, recall and f1 (as conlleval), macro_f1, strict_* (seqeval's strict mode), and accuracy."""
    return _scores(*gold_and_predicted(types, examples, predictions))


def details(types: tuple[str, ...], examples: Sequence[Sentence], predictions: Predictions) -> dict[str, Any]:
    """Return {"types": {type: {precision, recall, f1, support}}, "sentences", "words", "entities"}."""
    gold, predicted = gold_and_predicted(types, examples, predictions)
    counts = metrics.count(gold, predicted)
    total = int(counts.gold.sum())
    return {"types": counts.by_type, "sentences": len(examples), "words": len(gold), "entities": total}


def _word_starts(examples: Sequence[Sentence]) -> np.ndarray:
    """Return the index of each sentence's first word, and finally the number of words, int64 [N + 1]."""
    counts = np.fromiter((len(sentence.words) for sentence in examples), np.int64, len(examples))
    return np.concatenate([[0], np.cumsum(counts)])


def _tagged_sentences(types: tuple[str, ...], tags: np.ndarray, starts: np.ndarray) -> metrics.TaggedSentences:
    prefixes = np.where(tags == 0, metrics.OUTSIDE, 2 - tags % 2).astype(np.uint8)
    return metrics.TaggedSentences(prefixes, (tags - 1) // 2, starts, types)


def _gold_tags(types: tuple[str, ...], examples: Sequence[Sentence]) -> metrics.TaggedSentences:
    for sentence in examples:
        if sentence.tags is None:
            raise InputError(f"{sentence.where()}: no labels, so predictions cannot be scored. Add its tags.")
    return metrics.encode_tags([cast(Sequence[str], sentence.tags) for sentence in examples], types)


def gold_and_predicted(
    types: tuple[str, ...], examples: Sequence[Sentence], predictions: Predictions
) -> tuple[metrics.TaggedSentences, metrics.TaggedSentences]:
    """Return (gold tags, predicted tags), with equal type indices."""
    gold = _gold_tags(types, examples)
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
    """Replace whitespace in a word or tag, since readers of columns split at it."""
    return "_".join(word.split()) or "_"


def _equal_runs(values: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yield (value, slice) of each run of equal values."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    for start, stop in pairwise(edges):
        if stop > start:
            yield int(values[start]), slice(start, stop)


def _entity(type_: str, text: str, offsets: np.ndarray, first: int, last: int, score: float) -> dict[str, Any]:
    start, end = int(offsets[first, 0]), int(offsets[last, 1])
    return {
        "type": type_,
        "text": text[start:end],
        "score": score,
        "start": start,
        "end": end,
        "first_word": first,
        "last_word": last,
    }

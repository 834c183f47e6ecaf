"""Decode tags into entities, and score the entities as conlleval and both modes of seqeval do.

Tags are `O`, or a prefix and a type: `B-PER`. Prefixes are B and I; BIOES also has E and S. All functions work on the
concatenated words of all sentences (W words), because Python loops over 100,000 words or more are slow.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from finetune.tasks.datasets.arrays import concatenate_ranges
from finetune.tasks.intervals import bootstrap

Rule = Literal["conlleval", "iob2"]
"""Rules for decoding tags into entities.

    conlleval  every word that is not O belongs to an entity. One starts at B and S, after E, S and O, and where
               the type changes (startOfChunk, endOfChunk in Tjong Kim Sang's conlleval; seqeval's default mode)
    iob2       only B starts an entity; an I that does not continue one is ignored (seqeval mode="strict", scheme=IOB2)
"""

Scheme = Literal["iob1", "iob2", "bioes"]

OUTSIDE, BEGIN, INSIDE, END, SINGLE = range(5)
PREFIXES = "OBIES"


@dataclass(frozen=True)
class TaggedSentences:
    """The concatenated tags of N sentences, as integers."""

    prefixes: np.ndarray  # uint8 [W], indices into PREFIXES
    types: np.ndarray  # int64 [W], indices into `names`; -1 for O
    starts: np.ndarray  # int64 [N + 1], index of each sentence's first word, and finally W
    names: tuple[str, ...]  # names of the types

    def __len__(self) -> int:
        return len(self.prefixes)


@dataclass(frozen=True)
class EntitySpans:
    """The spans and types of E entities in N sentences, in order of position."""

    first: np.ndarray  # int64 [E], index of the first word, counted over all sentences
    end: np.ndarray  # int64 [E], index after the last word
    types: np.ndarray  # int64 [E], indices into `names` of the tags


def encode_tags(sentences: Sequence[Sequence[str]], names: Iterable[str] = ()) -> TaggedSentences:
    """Encode the tags of `sentences` as integers; types that are not in `names` are appended.

    As in seqeval, the type is the text after the first hyphen, or `_` if there is none. Raises what `parse_tag` raises.
    """
    lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tag_index: dict[str, int] = {}
    indices = (tag_index.setdefault(tag, len(tag_index)) for tag in chain.from_iterable(sentences))
    tag_W = np.fromiter(indices, np.int64, starts[-1])
    type_index = {name: index for index, name in enumerate(names)}
    prefixes, types = np.zeros(len(tag_index), np.uint8), np.full(len(tag_index), -1, np.int64)
    for tag, index in tag_index.items():
        prefix, name = parse_tag(tag)
        prefixes[index] = prefix
        if prefix != OUTSIDE:
            types[index] = type_index.setdefault(name, len(type_index))
    return TaggedSentences(prefixes[tag_W], types[tag_W], starts, tuple(type_index))


def parse_tag(tag: str) -> tuple[int, str]:
    """Return a tag's prefix, as an index into PREFIXES, and its type; ValueError if the prefix is unknown."""
    prefix = PREFIXES.find(tag[0]) if tag else -1
    if prefix < 0 or (tag[1:2] not in ("", "-")):
        raise ValueError(f"{tag!r} is not a tag: expected O, or one of B, I, E, S, a hyphen and a type")
    return prefix, tag[2:] or "_"


def find_entities(tags: TaggedSentences, rule: Rule = "conlleval") -> EntitySpans:
    """Return the entities in `tags`, decoded by `rule`."""
    prefixes = tags.prefixes
    previous, same_type = _previous_tags(tags)
    if rule == "conlleval":
        in_entity = prefixes != OUTSIDE
        continues = in_entity & same_type & _is_any(prefixes, INSIDE, END) & _is_any(previous, BEGIN, INSIDE)
        is_start = in_entity & ~continues
    else:
        is_start = prefixes == BEGIN
        continues = same_type & (prefixes == INSIDE)
    first = np.flatnonzero(is_start)
    stops = np.append(np.flatnonzero(~continues), len(tags))
    end = stops[np.searchsorted(stops, first, "right")]
    return EntitySpans(first, end, tags.types[first])


def write_prefixes(spans: EntitySpans, starts: np.ndarray, scheme: Scheme) -> np.ndarray:
    """Return the prefixes of `spans` in `scheme`, uint8 [W], for sentences that start at `starts` [N + 1]."""
    prefixes = np.full(starts[-1], OUTSIDE, np.uint8)
    lengths = spans.end - spans.first
    prefixes[concatenate_ranges(spans.first, lengths)] = INSIDE
    if scheme == "iob2":
        prefixes[spans.first] = BEGIN
    elif scheme == "bioes":
        prefixes[spans.end - 1] = END
        prefixes[spans.first] = np.where(lengths == 1, SINGLE, BEGIN)
    else:  # B only directly after an entity of the same type in the same sentence
        is_adjacent = (spans.first[1:] == spans.end[:-1]) & (spans.types[1:] == spans.types[:-1])
        is_adjacent &= ~np.isin(spans.first[1:], starts)
        prefixes[spans.first[1:][is_adjacent]] = BEGIN
    return prefixes


def scheme_violations(tags: TaggedSentences, scheme: Scheme) -> np.ndarray:
    """Return the indices of words whose prefix is not what `scheme` requires for the entities that conlleval finds."""
    return np.flatnonzero(write_prefixes(find_entities(tags), tags.starts, scheme) != tags.prefixes)


def detect_scheme(tags: TaggedSentences) -> Scheme:
    """Return bioes if there is an E or S, else iob1 or iob2, whichever fewer tags violate.

    In valid IOB2, no entity starts with I; in IOB1, almost all do.
    """
    if has_ends(tags):
        return "bioes"
    return "iob1" if len(scheme_violations(tags, "iob1")) < len(scheme_violations(tags, "iob2")) else "iob2"


def has_ends(tags: TaggedSentences) -> bool:
    """Return whether a prefix is E or S, which only BIOES has."""
    return bool(_is_any(tags.prefixes, END, SINGLE).any())


@dataclass(frozen=True)
class EntityCounts:
    """Counts for precision, recall and F1 of K types."""

    names: tuple[str, ...]  # names of the types
    gold: np.ndarray  # int64 [K], number of gold entities of each type
    predicted: np.ndarray  # int64 [K], number of predicted entities
    correct: np.ndarray  # int64 [K], number of predicted entities with the start, end and type of a gold one

    @property
    def overall(self) -> dict[str, float]:
        """Precision, recall and f1 over all entities (micro), as fractions of 1; 0 if undefined."""
        return precision_recall_f1(int(self.correct.sum()), int(self.predicted.sum()), int(self.gold.sum()))

    @property
    def by_type(self) -> dict[str, dict[str, float]]:
        """Precision, recall, f1 and support of each type that occurs in gold or prediction, by name."""
        return {
            name: {**precision_recall_f1(int(correct), int(predicted), int(gold)), "support": int(gold)}
            for name, gold, predicted, correct in sorted(
                zip(self.names, self.gold, self.predicted, self.correct, strict=True)
            )
            if gold or predicted
        }

    @property
    def macro_f1(self) -> float:
        """Mean of the types' f1 (seqeval average="macro")."""
        scores = [scores_of_type["f1"] for scores_of_type in self.by_type.values()]
        return sum(scores) / len(scores) if scores else 0.0


def count(gold: TaggedSentences, predicted: TaggedSentences, rule: Rule = "conlleval") -> EntityCounts:
    """Count gold and predicted entities, decoded by `rule`; `predicted.names` must start with `gold.names`."""
    gold_spans, predicted_spans, is_correct = _compare(gold, predicted, rule)
    num_types = len(predicted.names)
    return EntityCounts(
        predicted.names,
        gold=np.bincount(gold_spans.types, minlength=num_types),
        predicted=np.bincount(predicted_spans.types, minlength=num_types),
        correct=np.bincount(predicted_spans.types[is_correct], minlength=num_types),
    )


def f1_interval(gold: TaggedSentences, predicted: TaggedSentences) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of f1 over all entities, from resampled sentences."""
    gold_spans, predicted_spans, is_correct = _compare(gold, predicted, "conlleval")
    num_sentences = len(gold.starts) - 1
    # A word is in the last sentence that starts at or before it; empty sentences have no words.
    first_words = (gold_spans.first, predicted_spans.first, predicted_spans.first[is_correct])
    indices = (np.searchsorted(gold.starts, first, "right") - 1 for first in first_words)
    gold_counts, predicted_counts, correct_counts = (np.bincount(index, minlength=num_sentences) for index in indices)

    def f1(sentences: np.ndarray) -> float:
        sums = (int(counts[sentences].sum()) for counts in (correct_counts, predicted_counts, gold_counts))
        return precision_recall_f1(*sums)["f1"]

    return bootstrap(f1, num_sentences)


def _compare(
    gold: TaggedSentences, predicted: TaggedSentences, rule: Rule
) -> tuple[EntitySpans, EntitySpans, np.ndarray]:
    """Return (gold entities, predicted entities, bool array: whether each predicted entity is correct)."""
    gold_spans, predicted_spans = find_entities(gold, rule), find_entities(predicted, rule)
    end, types = np.zeros(len(gold), np.int64), np.zeros(len(gold), np.int64)
    end[gold_spans.first], types[gold_spans.first] = gold_spans.end, gold_spans.types
    first = predicted_spans.first
    return gold_spans, predicted_spans, (end[first] == predicted_spans.end) & (types[first] == predicted_spans.types)


def accuracy(gold: TaggedSentences, predicted: TaggedSentences) -> float:
    """Return the fraction of words whose prefix and type are correct; 0 without words."""
    if not len(gold):
        return 0.0
    return float(((gold.prefixes == predicted.prefixes) & (gold.types == predicted.types)).mean())


def precision_recall_f1(correct: int, predicted: int, gold: int) -> dict[str, float]:
    """Return precision, recall and F1, as fractions of 1, from numbers of entities; 0 if undefined."""
    precision = correct / predicted if predicted else 0.0
    recall = correct / gold if gold else 0.0
    total = precision + recall
    return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / total if total else 0.0}


def _previous_tags(tags: TaggedSentences) -> tuple[np.ndarray, np.ndarray]:
    """Return each word's previous prefix (O at the start of a sentence) and whether it has the previous type, [W]."""
    previous, same_type = np.zeros_like(tags.prefixes), np.zeros(len(tags), bool)
    previous[1:], same_type[1:] = tags.prefixes[:-1], tags.types[1:] == tags.types[:-1]
    first_words = tags.starts[:-1][tags.starts[:-1] < len(tags)]
    previous[first_words], same_type[first_words] = OUTSIDE, False
    return previous, same_type


def _is_any(prefixes: np.ndarray, *members: int) -> np.ndarray:
    is_member = np.zeros(len(PREFIXES), bool)
    is_member[list(members)] = True
    return is_member[prefixes]

"""Entities in columns of tags, and the official scores over them: conlleval's, and seqeval's two modes.

Tags are `O` or a prefix and a type, `B-PER`; prefixes are B, I, and in BIOES also E and S. Everything works on the
words of all sentences end to end (W words), because a set has 100,000 of them and a loop per word is slow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from finetune.datasets.arrays import ragged

Rule = Literal["conlleval", "iob2", "bioes"]
"""How entities are read off tags.

    conlleval  every word that is not O belongs to an entity: one begins at B and S, after E and S, after O, and
               where the type changes (Tjong Kim Sang's conlleval, startOfChunk and endOfChunk; seqeval's default mode)
    iob2       only B begins one, and an I that does not go on is none (seqeval mode="strict", scheme=IOB2)
    bioes      S, or B I* E of one type (seqeval mode="strict", scheme=IOBES)
"""

Scheme = Literal["iob1", "iob2", "bioes"]

OUTSIDE, BEGIN, INSIDE, END, SINGLE = range(5)
PREFIXES = "OBIES"


@dataclass(frozen=True)
class Tagged:
    """The tags of N sentences end to end, as numbers."""

    prefixes: np.ndarray  # uint8 [W], places in PREFIXES
    types: np.ndarray  # int64 [W], places in `names`; -1 for O
    starts: np.ndarray  # int64 [N + 1], first word of each sentence
    names: tuple[str, ...]  # types in order of their first appearance

    def __len__(self) -> int:
        return len(self.prefixes)


@dataclass(frozen=True)
class Spans:
    """E entities of N sentences, in order of their words."""

    first: np.ndarray  # int64 [E], first word, counted over all sentences
    end: np.ndarray  # int64 [E], word after the last
    types: np.ndarray  # int64 [E]


def tagged(sentences: Sequence[Sequence[str]], names: Iterable[str] = ()) -> Tagged:
    """The tags of `sentences` as numbers; types that are not in `names` are appended.

    Raises:
        ValueError: a tag is neither O nor begins with one of the letters B, I, E, S. As in seqeval, the type is
            what follows the first hyphen, and `_` if nothing does.
    """
    lengths = np.fromiter(map(len, sentences), np.int64, len(sentences))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    numbers: dict[str, int] = {}
    flat = np.fromiter(
        (numbers.setdefault(tag, len(numbers)) for tag in chain.from_iterable(sentences)),
        np.int64,
        starts[-1],
    )
    places = {name: place for place, name in enumerate(names)}
    prefixes, types = np.zeros(len(numbers), np.uint8), np.full(len(numbers), -1, np.int64)
    for tag, number in numbers.items():
        prefix, name = split(tag)
        prefixes[number] = prefix
        if prefix != OUTSIDE:
            types[number] = places.setdefault(name, len(places))
    return Tagged(prefixes[flat], types[flat], starts, tuple(places))


def split(tag: str) -> tuple[int, str]:
    """A tag's prefix, as its place in PREFIXES, and its type; ValueError where it has no such prefix."""
    prefix = PREFIXES.find(tag[0]) if tag else -1
    if prefix < 0 or (tag[1:2] not in ("", "-")):
        raise ValueError(f"{tag!r} is not a tag: expected O, or one of B, I, E, S, a hyphen and a type")
    return prefix, tag[2:] or "_"


def find(tags: Tagged, rule: Rule = "conlleval") -> Spans:
    """The entities in `tags` as `rule` reads them."""
    prefixes = tags.prefixes
    previous, same = _before(tags)
    if rule == "conlleval":
        inside = prefixes != OUTSIDE
        goes_on = inside & same & _is(prefixes, INSIDE, END) & _is(previous, BEGIN, INSIDE)
        begins = inside & ~goes_on
    elif rule == "iob2":
        _refuse(prefixes, (END, SINGLE), rule)
        begins = prefixes == BEGIN
        goes_on = same & (prefixes == INSIDE)
    else:
        begins = _is(prefixes, BEGIN, SINGLE)
        goes_on = same & _is(prefixes, INSIDE, END) & _is(previous, BEGIN, INSIDE)
    first = np.flatnonzero(begins)
    stops = np.append(np.flatnonzero(~goes_on), len(tags))
    end = stops[np.searchsorted(stops, first, "right")]
    if rule == "bioes":
        whole = _is(prefixes[end - 1], END, SINGLE)
        first, end = first[whole], end[whole]
    return Spans(first, end, tags.types[first])


def write(spans: Spans, starts: np.ndarray, scheme: Scheme) -> np.ndarray:
    """uint8 [W]: the prefixes that stand for `spans` in `scheme`, of sentences that begin at `starts` [N + 1]."""
    prefixes = np.full(starts[-1], OUTSIDE, np.uint8)
    lengths = spans.end - spans.first
    prefixes[ragged(spans.first, lengths)] = INSIDE
    if scheme == "iob2":
        prefixes[spans.first] = BEGIN
    elif scheme == "bioes":
        prefixes[spans.end - 1] = END
        prefixes[spans.first] = np.where(lengths == 1, SINGLE, BEGIN)
    else:  # B only where the entity before it, of the same type and sentence, would swallow it
        touches = (spans.first[1:] == spans.end[:-1]) & (spans.types[1:] == spans.types[:-1])
        touches &= ~np.isin(spans.first[1:], starts)
        prefixes[spans.first[1:][touches]] = BEGIN
    return prefixes


def slips(tags: Tagged, scheme: Scheme) -> np.ndarray:
    """int64: the words whose prefix is not the one that `scheme` has for the entities conlleval reads."""
    return np.flatnonzero(write(find(tags), tags.starts, scheme) != tags.prefixes)


def detect(tags: Tagged) -> Scheme:
    """BIOES where there is an E or S, else IOB1 or IOB2, whichever fewer tags contradict.

    A clean IOB2 file never begins an entity with I; one that does so throughout is IOB1.
    """
    if has_ends(tags):
        return "bioes"
    return "iob1" if len(slips(tags, "iob1")) < len(slips(tags, "iob2")) else "iob2"


def has_ends(tags: Tagged) -> bool:
    """Whether there is an E or S, which only BIOES has."""
    return bool(_is(tags.prefixes, END, SINGLE).any())


@dataclass(frozen=True)
class EntityCounts:
    """Entities of K types: how many there are, how many were predicted, and how many of these are right."""

    names: tuple[str, ...]
    gold: np.ndarray  # int64 [K]
    predicted: np.ndarray  # int64 [K]
    correct: np.ndarray  # int64 [K], both ends and the type

    @property
    def overall(self) -> dict[str, float]:
        """Precision, recall and f1 over all entities (micro), as shares of 1; 0 where nothing can be divided."""
        return shares(int(self.correct.sum()), int(self.predicted.sum()), int(self.gold.sum()))

    @property
    def by_type(self) -> dict[str, dict[str, float]]:
        """Precision, recall, f1 and support of each type that occurs in gold or prediction, by name."""
        return {
            name: {**shares(int(correct), int(predicted), int(gold)), "support": int(gold)}
            for name, gold, predicted, correct in sorted(
                zip(self.names, self.gold, self.predicted, self.correct, strict=True)
            )
            if gold or predicted
        }

    @property
    def macro_f1(self) -> float:
        """Mean of the types' f1 (seqeval average="macro")."""
        scores = [of["f1"] for of in self.by_type.values()]
        return sum(scores) / len(scores) if scores else 0.0


def count(gold: Tagged, predicted: Tagged, rule: Rule = "conlleval") -> EntityCounts:
    """Entities of both as `rule` reads them; `predicted` has the types of `gold` first, in the same order."""
    if not np.array_equal(gold.starts, predicted.starts):
        raise ValueError("gold and predicted tags are not of the same sentences")
    theirs, ours = find(gold, rule), find(predicted, rule)
    end, types = np.zeros(len(gold), np.int64), np.zeros(len(gold), np.int64)
    end[theirs.first], types[theirs.first] = theirs.end, theirs.types
    right = (end[ours.first] == ours.end) & (types[ours.first] == ours.types)
    size = len(predicted.names)
    return EntityCounts(
        predicted.names,
        gold=np.bincount(theirs.types, minlength=size),
        predicted=np.bincount(ours.types, minlength=size),
        correct=np.bincount(ours.types[right], minlength=size),
    )


def compare(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], rule: Rule = "conlleval"
) -> EntityCounts:
    """`count` over tags as text, a sequence for each sentence."""
    truth = tagged(gold)
    return count(truth, tagged(predicted, truth.names), rule)


def accuracy(gold: Tagged, predicted: Tagged) -> float:
    """Share of words whose whole tag is right; 0 without words."""
    if not len(gold):
        return 0.0
    return float(((gold.prefixes == predicted.prefixes) & (gold.types == predicted.types)).mean())


def shares(correct: int, predicted: int, gold: int) -> dict[str, float]:
    precision = correct / predicted if predicted else 0.0
    recall = correct / gold if gold else 0.0
    total = precision + recall
    return {"precision": precision, "recall": recall, "f1": 2 * precision * recall / total if total else 0.0}


def _before(tags: Tagged) -> tuple[np.ndarray, np.ndarray]:
    """[W] each: the prefix before each word, O at a sentence's beginning; whether the type before is the same."""
    previous, same = np.zeros_like(tags.prefixes), np.zeros(len(tags), bool)
    previous[1:], same[1:] = tags.prefixes[:-1], tags.types[1:] == tags.types[:-1]
    fresh = tags.starts[:-1][tags.starts[:-1] < len(tags)]
    previous[fresh], same[fresh] = OUTSIDE, False
    return previous, same


def _is(prefixes: np.ndarray, *wanted: int) -> np.ndarray:
    table = np.zeros(len(PREFIXES), bool)
    table[list(wanted)] = True
    return table[prefixes]


def _refuse(prefixes: np.ndarray, unknown: tuple[int, ...], rule: str) -> None:
    if _is(prefixes, *unknown).any():
        raise ValueError(f"a tag begins with {' or '.join(PREFIXES[one] for one in unknown)}, which {rule} has not")

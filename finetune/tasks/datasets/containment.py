"""Pairs made of unlabeled text: a passage, and words that it contains or does not.

A task between pretraining and a fine-tuning on pairs, which Phang et al. 2018, "Sentence Encoders on STILTs"
(arXiv:1811.01088), do with labeled sets; this one needs no labels. It asks what entailment asks first: whether a
longer text has the words of a short one.
"""

import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from finetune.tasks.datasets.table import Table
from pretrain.common.errors import InputError
from pretrain.corpus.formats import documents_of, files_below, pieces_of
from pretrain.corpus.inputs import Problems
from pretrain.corpus.sentences import split_sentences

logger = logging.getLogger(__name__)

LABELS = ("entailment", "not_entailment")  # those of RTE and QNLI, which keep the output layer

_STRETCH = 1_000  # characters of text that one pair is made of
_ROUNDS = 8  # pairs of a stretch at most, if there is too little text
_SENTENCE = (5, 45)  # words of those that are used
_MOST_WORDS = 70  # of a passage
_PART = (6, 14)  # words of what is or is not contained
_FREQUENT = 100  # words that say nothing of a text's content
_REACH = 50  # stretches around one, from which words are borrowed
_MARKS = ".,;:!?\"'()[]“”‘’-—_ "


Stretch = list[list[str]]
"""Successive sentences of one document, as words."""


def containment_pairs(path: Path, count: int) -> Table:
    """At most `count` pairs of the text in a file or folder, as columns `text`, `pair` and `label`.

    Half of them are contained: 6 to 14 successive words of a passage of 1 to 3 sentences, every second time without one
    inner word. The words of a quarter are of a sentence beside the passage. Those of the last quarter are of the
    passage, with one or two content words replaced. The text is read until there is enough of it, about 1,000
    characters for each pair. The same text and count give the same pairs.

    Raises:
        InputError: no such path, a file that cannot be read, or too little text for pairs of both labels.
    """
    problems = Problems()
    stretches = list(itertools.islice(_stretches(path, problems), count))
    for entry in problems.entries():
        logger.warning("%s: %s (%s times, first: %s)", entry["path"], entry["fault"], entry["count"], entry["first"])
    frequent = _frequent_words(stretches)
    rng = random.Random(0)
    numbers = itertools.chain.from_iterable(itertools.repeat(range(len(stretches)), _ROUNDS))
    found = (_pair(stretches, number, frequent, rng) for number in numbers)
    rows = list(itertools.islice((pair for pair in found if pair is not None), count))
    if {label for *_, label in rows} != set(LABELS):
        raise InputError(
            f"classification.containment: {path}: too little text: {len(rows)} pairs. Give documents with several "
            "sentences of 5 words and more."
        )
    texts, parts, labels = map(list, zip(*rows, strict=True))
    return Table(
        {"text": texts, "pair": parts, "label": labels}, f"pairs of {path}", range(1, 1 + len(rows)), ": pair "
    )


def _stretches(path: Path, problems: Problems) -> Iterator[Stretch]:
    for file in files_below(path):
        for document in documents_of(file, problems):
            for text in pieces_of(document, _STRETCH):
                found = [sentence.split() for sentence in split_sentences(text, "en")]
                sentences = [words for words in found if _SENTENCE[0] <= len(words) <= _SENTENCE[1]]
                if len(sentences) >= 2:
                    yield sentences


def _frequent_words(stretches: Sequence[Stretch]) -> frozenset[str]:
    counts = Counter(_bare(word) for stretch in stretches for words in stretch for word in words)
    return frozenset(word for word, _ in counts.most_common(_FREQUENT))


def _pair(
    stretches: Sequence[Stretch], number: int, frequent: frozenset[str], rng: random.Random
) -> tuple[str, str, str] | None:
    """(passage, words, label); None if the sentences at hand allow none of the kind that was drawn."""
    sentences = stretches[number]
    first = rng.randrange(len(sentences))
    passage = sentences[first : first + rng.randint(1, 3)]
    while len(passage) > 1 and sum(map(len, passage)) > _MOST_WORDS:
        passage = passage[:-1]
    inside = {_bare(word) for words in passage for word in words}
    kind = rng.random()
    if kind < 0.5:
        part = _window(rng.choice(passage), rng)
        if len(part) > _PART[0] and rng.random() < 0.5:
            del part[rng.randint(1, len(part) - 2)]
    elif kind < 0.75:
        beside = sentences[:first] + sentences[first + len(passage) :]
        part = _window(rng.choice(beside), rng) if beside else []
        if sum(_bare(word) not in frequent | inside for word in part) < 2:
            return None
    else:
        part = _window(rng.choice(passage), rng)
        if not _replace(part, inside | frequent, frequent, _borrowed(stretches, number, rng), rng):
            return None
    text = " ".join(part).strip(_MARKS)
    label = LABELS[0] if kind < 0.5 else LABELS[1]
    return " ".join(itertools.chain.from_iterable(passage)), f"{text[:1].upper()}{text[1:]}.", label


def _borrowed(stretches: Sequence[Stretch], number: int, rng: random.Random) -> list[str]:
    """The words of a sentence of a stretch nearby."""
    nearby = range(max(0, number - _REACH), min(len(stretches), number + _REACH + 1))
    return rng.choice(stretches[rng.choice(nearby)])


def _replace(
    part: list[str],
    excluded: set[str] | frozenset[str],
    frequent: frozenset[str],
    others: list[str],
    rng: random.Random,
) -> bool:
    """Replace one or two content words of `part` by words of `others` that are not `excluded`; False if none can be."""
    places = [place for place, word in enumerate(part) if _bare(word) not in frequent]
    others = [word for word in others if _bare(word) not in excluded]
    if len(places) < 2 or not others:
        return False
    for place in rng.sample(places, rng.randint(1, 2)):
        part[place] = rng.choice(others)
    return True


def _window(words: Sequence[str], rng: random.Random) -> list[str]:
    size = min(len(words), rng.randint(*_PART))
    first = rng.randint(0, len(words) - size)
    return list(words[first : first + size])


def _bare(word: str) -> str:
    return word.lower().strip(_MARKS)

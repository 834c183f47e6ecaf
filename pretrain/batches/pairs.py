"""Sentence pairs that read every token once: split spans into segments A and B, and exchange some Bs.

Devlin et al. (appendix A.2) and google-research/bert create_pretraining_data.py read a random B a second time from
another document, and truncate to the sequence length. Here two samples of different documents whose Bs have equal
lengths form a couple, and half of the couples exchange their Bs. So lengths and kinds of cuts reveal nothing about the
label, and no token is read twice or lost.

Everything is vectorized over the S samples of some cells; couples are formed within a cell. Arrays are int64 [S] unless
noted.
"""

from dataclasses import dataclass

import numpy as np

from pretrain.batches.order import below, draw, uniform
from pretrain.batches.text import ShardText

# Counters of the independent random numbers of one sample.
_LABEL = 0
_LABELED_1 = 0.5  # share of the labeled samples (Devlin et al. 2019, appendix A.2)
_SPLIT, _TIE, _INSIDE = 16, 32, 48  # plus the number of the round
_SENTENCE_ROUNDS = 2  # a sample without a partner draws another sentence for B
_INSIDE_ROUNDS = 3
IGNORED = -100  # the label that cross-entropy ignores, torch's and ours


@dataclass(frozen=True)
class PairSpans:
    """Spans of tokens of one document each, to be divided into A and B."""

    cell: np.ndarray
    shard: np.ndarray
    begin: np.ndarray  # token offset
    end: np.ndarray
    first: np.ndarray  # first sentence that starts after `begin`
    last: np.ndarray  # first sentence that starts at `end` or after
    at_begin: np.ndarray  # bool, whether `begin` is a sentence boundary
    at_end: np.ndarray  # bool, whether `end` is a sentence boundary
    document: np.ndarray  # identity of the document
    key: np.ndarray  # uint64, of the sample

    @property
    def sentences(self) -> np.ndarray:
        """Number of sentences that start inside."""
        return np.maximum(self.last - self.first, 0)


@dataclass(frozen=True)
class Segments:
    """The start of B in each span, and the exchange of the segments."""

    split: np.ndarray  # token offset
    b_of: np.ndarray  # the sample whose B this one gets
    label: np.ndarray  # of this sample, or `IGNORED`


def random_splits(text: ShardText, spans: PairSpans) -> np.ndarray:
    """Draw the start of B: one of the span's sentences, or anywhere in a span of one sentence; token offsets."""
    bits = draw(spans.key, _SPLIT)
    inside = spans.begin + 1 + below(bits, spans.end - spans.begin - 1)
    rows = np.flatnonzero(spans.sentences)
    sentence = spans.first[rows] + below(bits[rows], spans.sentences[rows])
    inside[rows] = text.offset(spans.shard[rows], sentence)
    return inside


def exchanged(text: ShardText, spans: PairSpans) -> Segments:
    """Exchange the Bs of some couples of samples of different documents of a cell; label 1 is an exchanged B.

    A couple's Bs are alike: they have equal lengths, and their starts are both sentence boundaries or both not, and so
    are their ends. Spans without a partner for any of their sentences are cut inside a sentence. Samples without a
    partner have no label.
    """
    split, partner = random_splits(text, spans), np.full(len(spans.cell), -1)
    for number in range(_SENTENCE_ROUNDS):
        _couple_at_sentences(text, spans, split, partner, number)
    _couple_inside(text, spans, split, partner)
    samples = np.arange(len(partner))
    coin = uniform(draw(spans.key[np.minimum(samples, partner)], _LABEL)) < _LABELED_1
    has_partner = partner >= 0
    return Segments(split, np.where(has_partner & coin, partner, samples), np.where(has_partner, coin, IGNORED))


def swapped(text: ShardText, spans: PairSpans) -> Segments:
    """Swap the segments of some samples (Lan et al. 2020, section 3.1); label 1 is a swapped one.

    All cuts of a labeled span are at sentence boundaries, or none of them is. Other samples have no label.
    """
    split = random_splits(text, spans)
    rows = np.flatnonzero(~spans.at_begin)
    split[rows] = spans.begin[rows] + 1 + below(draw(spans.key[rows], _INSIDE), (spans.end - spans.begin)[rows] - 1)
    inside = _is_inside(text, spans, np.arange(len(split)), spans.end - split)
    has_label = (spans.at_begin == spans.at_end) & (spans.at_begin != inside)
    coin = uniform(draw(spans.key, _LABEL)) < _LABELED_1
    return Segments(split, np.arange(len(split)), np.where(has_label, coin, IGNORED))


def _couple_at_sentences(
    text: ShardText, spans: PairSpans, split: np.ndarray, partner: np.ndarray, number: int
) -> None:
    """Couple samples whose Bs, starting with a sentence, have equal lengths."""
    rows = np.flatnonzero((partner < 0) & (spans.sentences > 0))
    if number:
        sentence = spans.first[rows] + below(draw(spans.key[rows], _SPLIT + number), spans.sentences[rows])
        split[rows] = text.offset(spans.shard[rows], sentence)
    length = spans.end[rows] - split[rows]
    alike = ((spans.cell[rows] << 32) | (length << 1) | spans.at_end[rows]).astype(np.uint64)
    order = np.lexsort((draw(spans.key[rows], _TIE + number), alike))
    rows, alike = rows[order], alike[order]
    place = _place_in_group(alike)
    first = np.flatnonzero((place[:-1] % 2 == 0) & (alike[1:] == alike[:-1])) if len(rows) else place
    _join(spans, partner, rows[first], rows[first + 1])


def _couple_inside(text: ShardText, spans: PairSpans, split: np.ndarray, partner: np.ndarray) -> None:
    """Couple the others at places inside sentences, so that both Bs have the same number of tokens."""
    rows = np.flatnonzero(partner < 0)
    group = (spans.cell[rows] << 1) | spans.at_end[rows]
    order = np.lexsort((draw(spans.key[rows], _TIE + _SENTENCE_ROUNDS), spans.document[rows], group))
    rows, group = rows[order], group[order]
    # Samples of a document are neighbors: half a group away is another document, unless it has more than half.
    place, half = _place_in_group(group), _group_sizes(group) // 2
    first = np.flatnonzero(place < half)
    one, other = rows[first], rows[first + half[first]]
    shorter = np.minimum(spans.end[one] - spans.begin[one], spans.end[other] - spans.begin[other])
    for number in range(_INSIDE_ROUNDS):
        length = 1 + below(draw(spans.key[one], _INSIDE + number), shorter - 1)
        fits = _is_inside(text, spans, one, length) & _is_inside(text, spans, other, length)
        fits &= spans.document[one] != spans.document[other]
        for samples in (one, other):
            split[samples[fits]] = spans.end[samples[fits]] - length[fits]
        _join(spans, partner, one[fits], other[fits])
        one, other, shorter = one[~fits], other[~fits], shorter[~fits]


def _is_inside(text: ShardText, spans: PairSpans, rows: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return whether the last `length` tokens of the spans `rows` start inside a sentence."""
    shard, begin, last = spans.shard[rows], spans.end[rows] - length, spans.last[rows]
    found = text.first_at_least(shard, spans.first[rows], last, begin)
    return (found >= last) | (text.offset(shard, np.minimum(found, last)) != begin)


def _join(spans: PairSpans, partner: np.ndarray, one: np.ndarray, other: np.ndarray) -> None:
    """Couple samples of different documents."""
    differ = spans.document[one] != spans.document[other]
    partner[one[differ]], partner[other[differ]] = other[differ], one[differ]


def _place_in_group(group: np.ndarray) -> np.ndarray:
    """Return 0, 1, 2, ... within each run of equal numbers."""
    begins = np.flatnonzero(np.append(True, group[1:] != group[:-1])) if len(group) else np.zeros(0, int)
    return np.arange(len(group)) - np.repeat(begins, np.diff(np.append(begins, len(group))))


def _group_sizes(group: np.ndarray) -> np.ndarray:
    """Return the length of the run that each number is in."""
    begins = np.flatnonzero(np.append(True, group[1:] != group[:-1])) if len(group) else np.zeros(0, int)
    sizes = np.diff(np.append(begins, len(group)))
    return np.repeat(sizes, sizes)

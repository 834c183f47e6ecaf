"""Sentence pairs that use every token once: spans are split into segments A and B, and some samples exchange their Bs.

Devlin et al. 2019 (appendix A.2) and google-research/bert create_pretraining_data.py copy a random B from another
document, so its tokens are used twice, and truncate pairs to the sequence length. Here, two samples of different
documents whose Bs have equal lengths form a couple, and half of the couples exchange their Bs. So the label cannot be
guessed from lengths or from where segments are cut, and no token is repeated or lost.

Everything is vectorized over S samples. Each belongs to a cell, a group within which couples are formed. Arrays are
int64 [S] unless noted, and `rows` are indices of samples.
"""

from dataclasses import dataclass

import numpy as np

from pretrain.batches.order import below, draw, uniform
from pretrain.batches.text import ShardText

# Counters for `draw`, for independent random numbers of a sample; the index of the round is added to the last three.
_LABEL, _SPLIT, _TIE, _INSIDE = 0, 16, 32, 48
_LABEL_1_SHARE = 0.5  # share of label 1 among the labeled samples (Devlin et al. 2019, appendix A.2)
_SENTENCE_ROUNDS = 2  # rounds of coupling at sentence starts; each draws a new start of B for samples without a partner
_INSIDE_ROUNDS = 3  # further rounds of coupling, in which B starts at a token inside a sentence
IGNORED = -100  # label that is ignored by cross-entropy, as in torch


@dataclass(frozen=True)
class PairSpans:
    """Spans of tokens to be divided into A and B, each within one document."""

    cell: np.ndarray  # index of the sample's cell
    shard: np.ndarray  # index of the shard
    start: np.ndarray  # offset of the first token
    end: np.ndarray  # offset after the last token
    first_sentence: np.ndarray  # index of the first sentence that starts after `start`
    stop_sentence: np.ndarray  # index of the first sentence that starts at or after `end`
    starts_at_sentence: np.ndarray  # bool, whether `start` is a sentence boundary
    ends_at_sentence: np.ndarray  # bool, whether `end` is a sentence boundary
    document: np.ndarray  # unique id of the document
    key: np.ndarray  # uint64, random key of the sample

    @property
    def num_sentences(self) -> np.ndarray:
        """Number of sentences that start inside each span."""
        return np.maximum(self.stop_sentence - self.first_sentence, 0)


@dataclass(frozen=True)
class Segments:
    """The split of each span into A and B, and the sample from which each sample gets its B."""

    split: np.ndarray  # token offset of the start of B
    b_source: np.ndarray  # index of the sample whose B this sample gets
    label: np.ndarray  # 0, 1 or `IGNORED`


def random_splits(text: ShardText, spans: PairSpans) -> np.ndarray:
    """Draw the token offset at which B starts: a random sentence start inside the span or, if none, any token."""
    bits = draw(spans.key, _SPLIT)
    split = spans.start + 1 + below(bits, spans.end - spans.start - 1)
    rows = np.flatnonzero(spans.num_sentences)
    sentence = spans.first_sentence[rows] + below(bits[rows], spans.num_sentences[rows])
    split[rows] = text.sentence_start(spans.shard[rows], sentence)
    return split


def exchange_segments(text: ShardText, spans: PairSpans) -> Segments:
    """Exchange the Bs of half of the couples; label 1 marks an exchanged B.

    A couple is two samples of different documents in a cell. Their Bs have equal lengths, and both or neither start
    (and both or neither end) at a sentence boundary. Samples without a partner are split again, inside a sentence. If
    they still find none, they have no label.
    """
    split, partner = random_splits(text, spans), np.full(len(spans.cell), -1)
    for round_ in range(_SENTENCE_ROUNDS):
        _couple_at_sentences(text, spans, split, partner, round_)
    _couple_inside(text, spans, split, partner)
    samples = np.arange(len(partner))
    label = uniform(draw(spans.key[np.minimum(samples, partner)], _LABEL)) < _LABEL_1_SHARE
    has_partner = partner >= 0
    return Segments(split, np.where(has_partner & label, partner, samples), np.where(has_partner, label, IGNORED))


def swap_segments(text: ShardText, spans: PairSpans) -> Segments:
    """Swap the segments of half of the samples (Lan et al. 2020, section 3.1); label 1 marks a swapped pair.

    A span has a label only if its start, split and end are all at sentence boundaries, or all inside sentences.
    """
    split = random_splits(text, spans)
    rows = np.flatnonzero(~spans.starts_at_sentence)
    split[rows] = spans.start[rows] + 1 + below(draw(spans.key[rows], _INSIDE), (spans.end - spans.start)[rows] - 1)
    split_is_inside = _is_inside(text, spans, np.arange(len(split)), spans.end - split)
    has_label = (spans.starts_at_sentence == spans.ends_at_sentence) & (spans.starts_at_sentence != split_is_inside)
    is_swapped = uniform(draw(spans.key, _LABEL)) < _LABEL_1_SHARE
    return Segments(split, np.arange(len(split)), np.where(has_label, is_swapped, IGNORED))


def _couple_at_sentences(
    text: ShardText, spans: PairSpans, split: np.ndarray, partner: np.ndarray, round_: int
) -> None:
    """Couple samples whose Bs start at a sentence boundary and have equal lengths."""
    rows = np.flatnonzero((partner < 0) & (spans.num_sentences > 0))
    if round_:
        sentence = spans.first_sentence[rows] + below(draw(spans.key[rows], _SPLIT + round_), spans.num_sentences[rows])
        split[rows] = text.sentence_start(spans.shard[rows], sentence)
    length = spans.end[rows] - split[rows]
    group = ((spans.cell[rows] << 32) | (length << 1) | spans.ends_at_sentence[rows]).astype(np.uint64)
    order = np.lexsort((draw(spans.key[rows], _TIE + round_), group))
    rows, group = rows[order], group[order]
    index = _index_in_run(group)
    first_of_couple = np.flatnonzero((index[:-1] % 2 == 0) & (group[1:] == group[:-1])) if len(rows) else index
    _couple(spans, partner, rows[first_of_couple], rows[first_of_couple + 1])


def _couple_inside(text: ShardText, spans: PairSpans, split: np.ndarray, partner: np.ndarray) -> None:
    """Couple the remaining samples: split them inside sentences, so that their Bs have equal lengths."""
    rows = np.flatnonzero(partner < 0)
    group = (spans.cell[rows] << 1) | spans.ends_at_sentence[rows]
    order = np.lexsort((draw(spans.key[rows], _TIE + _SENTENCE_ROUNDS), spans.document[rows], group))
    rows, group = rows[order], group[order]
    # Samples of a document are adjacent, so a sample half a group away is from another document, unless one document
    # has more than half of the samples.
    index, half = _index_in_run(group), _run_lengths(group) // 2
    first_of_couple = np.flatnonzero(index < half)
    row_a, row_b = rows[first_of_couple], rows[first_of_couple + half[first_of_couple]]
    shorter = np.minimum(spans.end[row_a] - spans.start[row_a], spans.end[row_b] - spans.start[row_b])
    for round_ in range(_INSIDE_ROUNDS):
        length = 1 + below(draw(spans.key[row_a], _INSIDE + round_), shorter - 1)
        fits = _is_inside(text, spans, row_a, length) & _is_inside(text, spans, row_b, length)
        fits &= spans.document[row_a] != spans.document[row_b]
        for samples in (row_a, row_b):
            split[samples[fits]] = spans.end[samples[fits]] - length[fits]
        _couple(spans, partner, row_a[fits], row_b[fits])
        row_a, row_b, shorter = row_a[~fits], row_b[~fits], shorter[~fits]


def _is_inside(text: ShardText, spans: PairSpans, rows: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return, for each of the spans `rows`, whether its last `length` tokens start inside a sentence."""
    shard, start, stop = spans.shard[rows], spans.end[rows] - length, spans.stop_sentence[rows]
    sentence = text.sentence_from(shard, spans.first_sentence[rows], stop, start)
    return (sentence >= stop) | (text.sentence_start(shard, np.minimum(sentence, stop)) != start)


def _couple(spans: PairSpans, partner: np.ndarray, row_a: np.ndarray, row_b: np.ndarray) -> None:
    """Couple `row_a[i]` with `row_b[i]` if their documents differ."""
    is_valid = spans.document[row_a] != spans.document[row_b]
    partner[row_a[is_valid]], partner[row_b[is_valid]] = row_b[is_valid], row_a[is_valid]


def _index_in_run(group: np.ndarray) -> np.ndarray:
    """Return each element's index in its run of equal values."""
    starts = np.flatnonzero(np.append(True, group[1:] != group[:-1])) if len(group) else np.zeros(0, int)
    return np.arange(len(group)) - np.repeat(starts, np.diff(np.append(starts, len(group))))


def _run_lengths(group: np.ndarray) -> np.ndarray:
    """Return the length of each element's run of equal values."""
    starts = np.flatnonzero(np.append(True, group[1:] != group[:-1])) if len(group) else np.zeros(0, int)
    sizes = np.diff(np.append(starts, len(group)))
    return np.repeat(sizes, sizes)

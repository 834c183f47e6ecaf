"""Common parts of masking schemes: their base class, and selection within concatenated sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pretrain.batches.order import below, draw, uniform
from pretrain.batches.plan import Rows
from pretrain.config import MaskingConfig
from pretrain.corpus.byte_words import WordEdges

_REPLACE, _CHOOSE = (1 << 32) + 1, (1 << 32) + 2  # counters that pairs.py and `Masker` do not use


@dataclass(frozen=True)
class MaskingVocabulary:
    """The properties of a vocabulary of V entries that masking needs."""

    mask_id: int
    ordinary: np.ndarray  # int64, ascending ids of the entries that may replace a token: no special, no [unused]
    edges: WordEdges
    entries: Sequence[str] = ()  # [V], the text of each id


class MaskingScheme:
    """Chooses the tokens to predict and their replacements. Every scheme subclasses this as `Scheme`.

    Results must depend only on the arguments: `bits` are a function of (source's fingerprint, seed, epoch of the
    source, index in it, sequence length, position). So all ranks, restarts and batch sizes see the same masks.
    """

    has_exact_counts: ClassVar[bool] = False
    """True if every sequence gets exactly as many masked tokens as its limit, or all ordinary ones if it has fewer.

    Otherwise the ranks exchange their counts, or choose the tokens of the whole global batch to count them.
    """

    def __init__(self, masking: MaskingConfig, vocabulary: MaskingVocabulary) -> None:
        self.masking = masking
        self.vocabulary = vocabulary

    def choose(self, rows: Rows, bits: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """Choose the tokens to predict, at most `limits` of each sequence and never a special one.

        Args:
            rows: S concatenated sequences of T tokens.
            bits: random bits of every token, uint64 [T].
            limits: maximum tokens to predict in each sequence, int64 [S]; may exceed its ordinary tokens.

        Returns:
            Ascending rows of the token axis, int64 [K].
        """
        raise NotImplementedError

    def replace(self, labels: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """Replace the chosen tokens by [MASK], a random ordinary token or the token itself.

        Args:
            labels: the chosen tokens, int64 [K].
            bits: their random bits, uint64 [K].

        Returns:
            Token ids, int64 [K], in the configured shares.
        """
        choice = uniform(draw(bits, _CHOOSE))
        masked = choice < self.masking.mask_share
        random = ~masked & (choice < self.masking.mask_share + self.masking.random_share)
        replaced = np.where(masked, self.vocabulary.mask_id, labels)
        ordinary = self.vocabulary.ordinary
        replaced[random] = ordinary[below(draw(bits[random], _REPLACE), len(ordinary))]
        return replaced


def word_heads(rows: Rows, candidates: np.ndarray, vocabulary: MaskingVocabulary) -> np.ndarray:
    """Return ascending indices into `candidates`, rows of ordinary tokens, of the tokens that start a word; int64.

    The first token after a special one always starts a word.
    """
    begins_word = vocabulary.edges.begins(rows.input_ids[candidates])
    begins_word[0] = True
    begins_word[1:] |= np.diff(candidates) > 1
    return np.flatnonzero(begins_word)


def shuffle(rows: Rows, index: np.ndarray, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle `index` (ascending rows of the token axis) within each sequence.

    Returns (end of each sequence in the result, int64 [S]; the result). It is one sort of 64-bit numbers: sequence,
    then 32 or fewer random bits, then position.
    """
    sequences = len(rows.starts) - 1
    position_bits = int(rows.positions.max(initial=0)).bit_length()
    random_bits = min(32, 64 - position_bits - sequences.bit_length())
    sequence = rows.sequence[index]
    packed = sequence.astype(np.uint64)
    packed <<= np.uint64(random_bits)
    packed |= bits[index] & np.uint64((1 << random_bits) - 1)
    packed <<= np.uint64(position_bits)
    packed |= rows.positions[index].astype(np.uint64)
    packed.sort()
    ends = np.cumsum(np.bincount(sequence, minlength=sequences))
    packed &= np.uint64((1 << position_bits) - 1)
    # Sorting keeps each sequence in its place, so `sequence` still names the sequence of each position.
    return ends, packed.view(np.int64) + rows.starts[sequence]


def per_sequence(rows: Rows, index: np.ndarray) -> np.ndarray:
    """Return the number of `index` (rows of the token axis) in each sequence, int64 [S]."""
    return np.bincount(rows.sequence[index], minlength=len(rows.starts) - 1)

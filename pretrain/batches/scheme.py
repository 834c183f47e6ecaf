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

_REPLACE, _CHOOSE = (1 << 32) + 1, (1 << 32) + 2  # counters of `draw`; not used in pairs.py or `Masker`


@dataclass(frozen=True)
class MaskingVocabulary:
    """The properties of a vocabulary of V entries that masking needs."""

    mask_id: int
    ordinary: np.ndarray  # int64, ascending ids of entries that may replace a token: neither special nor unused
    edges: WordEdges
    entries: Sequence[str] = ()  # [V], the text of each id


class MaskingScheme:
    """Chooses the tokens to predict and their replacements. Every scheme subclasses this as `Scheme`.

    Results must depend only on the arguments. `bits` are a function of (source's fingerprint, seed, epoch of the
    source, index in the epoch, sequence length, position), so masks do not depend on ranks, restarts or batch sizes.
    """

    has_exact_counts: ClassVar[bool] = False
    """True if a sequence always gets as many masked tokens as its limit, or all ordinary tokens if there are fewer.

    Otherwise the ranks exchange their counts, or each masks the whole global batch to count its tokens.
    """

    def __init__(self, masking: MaskingConfig, vocabulary: MaskingVocabulary) -> None:
        self.masking = masking
        self.vocabulary = vocabulary

    def choose(self, rows: Rows, bits: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """Choose the tokens to predict: at most `limits` in each sequence, and no special tokens.

        Args:
            rows: S concatenated sequences with T tokens in total.
            bits: random bits of each token, uint64 [T].
            limits: maximum tokens to predict in each sequence, int64 [S]; may exceed its number of ordinary tokens.

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
            Token ids, int64 [K]; the three cases occur in the configured shares.
        """
        choice = uniform(draw(bits, _CHOOSE))
        masked = choice < self.masking.mask_share
        random = ~masked & (choice < self.masking.mask_share + self.masking.random_share)
        replaced = np.where(masked, self.vocabulary.mask_id, labels)
        ordinary = self.vocabulary.ordinary
        replaced[random] = ordinary[below(draw(bits[random], _REPLACE), len(ordinary))]
        return replaced


def word_heads(rows: Rows, candidates: np.ndarray, vocabulary: MaskingVocabulary) -> np.ndarray:
    """Return which tokens start a word: ascending indices into `candidates`, rows of ordinary tokens; int64.

    The first token after a special token always starts a word.
    """
    is_start = vocabulary.edges.word_starts(rows.input_ids[candidates])
    is_start[0] = True
    is_start[1:] |= np.diff(candidates) > 1
    return np.flatnonzero(is_start)


def shuffle(rows: Rows, index: np.ndarray, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle `index` (ascending rows of the token axis) within each sequence.

    Return (end of each sequence in the result, int64 [S]; the result). It is one sort of 64-bit numbers that consist of
    the sequence, up to 32 random bits, and the position.
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
    # Sorting does not move rows between sequences, so `sequence` still applies.
    return ends, packed.view(np.int64) + rows.starts[sequence]


def per_sequence(rows: Rows, index: np.ndarray) -> np.ndarray:
    """Count the rows `index` of the token axis in each sequence, int64 [S]."""
    return np.bincount(rows.sequence[index], minlength=len(rows.starts) - 1)

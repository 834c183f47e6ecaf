"""The base class of masking schemes, and helpers that select tokens within concatenated sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pretrain.batches.order import below, draw, uniform
from pretrain.batches.plan import PackedTokens
from pretrain.config import MaskingConfig
from pretrain.corpus.byte_words import WordBoundaries

_REPLACE, _CHOOSE = (1 << 32) + 1, (1 << 32) + 2  # counters for `draw`; pairs.py and `Masker` use other counters


@dataclass(frozen=True)
class MaskingVocabulary:
    """The properties of a vocabulary of V entries that masking uses."""

    mask_id: int
    replacement_ids: np.ndarray  # int64, ascending ids of entries that may replace a token: not special, not unused
    boundaries: WordBoundaries  # finds the tokens that start a word
    entries: Sequence[str] = ()  # text of each entry, [V]


class MaskingScheme:
    """Chooses the tokens to predict and their replacements. Every scheme is a subclass named `Scheme`.

    Results must depend only on the arguments. `bits` are a function of (source's fingerprint, seed, epoch of the
    source, index in the epoch, sequence length, position), so masks do not depend on ranks, restarts or batch sizes.
    """

    has_exact_counts: ClassVar[bool] = False
    """True if every sequence gets as many masked tokens as its limit and its number of non-special tokens allow.

    If False, the ranks exchange their counts, or each rank masks the whole global batch to count the masked tokens.
    """

    def __init__(self, masking: MaskingConfig, vocabulary: MaskingVocabulary) -> None:
        self.masking = masking
        self.vocabulary = vocabulary

    def choose(self, tokens: PackedTokens, bits: np.ndarray, limits: np.ndarray) -> np.ndarray:
        """Choose the tokens to predict: at most `limits` in each sequence, and no special tokens.

        Args:
            tokens: S concatenated sequences with T tokens in total.
            bits: random bits of each token, uint64 [T].
            limits: maximum number of tokens to predict in each sequence, int64 [S]; may exceed its non-special tokens.

        Returns:
            Ascending indices of the chosen tokens, int64 [K].
        """
        raise NotImplementedError

    def replace(self, labels: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """Replace each chosen token by [MASK], a random token, or itself.

        Args:
            labels: ids of the chosen tokens, int64 [K].
            bits: random bits of the chosen tokens, uint64 [K].

        Returns:
            Input ids, int64 [K]; each of the three cases occurs in its configured share.
        """
        choice = uniform(draw(bits, _CHOOSE))
        is_masked = choice < self.masking.mask_share
        is_random = ~is_masked & (choice < self.masking.mask_share + self.masking.random_share)
        input_ids = np.where(is_masked, self.vocabulary.mask_id, labels)
        ids = self.vocabulary.replacement_ids
        input_ids[is_random] = ids[below(draw(bits[is_random], _REPLACE), len(ids))]
        return input_ids


def word_heads(tokens: PackedTokens, candidates: np.ndarray, vocabulary: MaskingVocabulary) -> np.ndarray:
    """Find the tokens that start a word; `candidates` are the ascending indices of all non-special tokens.

    Returns ascending indices into `candidates`, int64. The first token after a special token always starts a word.
    """
    is_start = vocabulary.boundaries.word_starts(tokens.input_ids[candidates])
    is_start[0] = True
    is_start[1:] |= np.diff(candidates) > 1
    return np.flatnonzero(is_start)


def shuffle(tokens: PackedTokens, indices: np.ndarray, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle `indices`, ascending indices of tokens, within each sequence.

    Returns (end of each sequence in the shuffled indices, int64 [S]; shuffled indices). It sorts 64-bit integers that
    consist of the index of the sequence, up to 32 random bits, and the position.
    """
    sequences = len(tokens.starts) - 1
    position_bits = int(tokens.positions.max(initial=0)).bit_length()
    random_bits = min(32, 64 - position_bits - sequences.bit_length())
    sequence = tokens.sequence[indices]
    packed = sequence.astype(np.uint64)
    packed <<= np.uint64(random_bits)
    packed |= bits[indices] & np.uint64((1 << random_bits) - 1)
    packed <<= np.uint64(position_bits)
    packed |= tokens.positions[indices].astype(np.uint64)
    packed.sort()
    ends = np.cumsum(np.bincount(sequence, minlength=sequences))
    packed &= np.uint64((1 << position_bits) - 1)
    # Sorting does not move tokens between sequences, so `sequence` still applies.
    return ends, packed.view(np.int64) + tokens.starts[sequence]


def per_sequence(tokens: PackedTokens, indices: np.ndarray) -> np.ndarray:
    """Count the tokens `indices` in each sequence, int64 [S]."""
    return np.bincount(tokens.sequence[indices], minlength=len(tokens.starts) - 1)

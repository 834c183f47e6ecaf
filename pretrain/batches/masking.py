"""Masked language modelling, Devlin et al. section 3.1, on sequences that lie end to end.

Which tokens are masked and what replaces them depends on the sample's key and the position alone (law 1).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from pretrain import config
from pretrain.batches.order import below, draw, uniform
from pretrain.batches.pairs import Rows
from pretrain.common.errors import InputError
from pretrain.corpus.shards import TokenShards

_TOKENS, _REPLACE, _CHOOSE = range(1 << 32, (1 << 32) + 3)  # counters apart from those of pairs.py
_UNUSED = re.compile(r"\[unused\d+\]")


@dataclass(frozen=True)
class Masked:
    """What masking makes of S sequences of T tokens, K of them masked."""

    input_ids: np.ndarray  # int64 [T]
    rows: np.ndarray  # int64 [K], ascending
    labels: np.ndarray  # int64 [K]
    token_keys: np.ndarray  # int32 [T]


class Masker:
    """Masks exactly as many tokens of each sequence as `counts` says, never a special one.

    With `whole_word` the pieces of a word are masked together, and a sequence may stay below its count when
    no word fits any more. Raises `InputError` when vocab.txt does not match the shards.
    """

    def __init__(
        self, shards: TokenShards, masking: config.MaskingConfig, *, sequence_length: int, max_predictions: int
    ) -> None:
        self.masking = masking
        most = max_predictions or int(np.rint(masking.probability * sequence_length))
        lengths = np.arange(sequence_length + 1)
        wanted = np.rint(masking.probability * lengths).astype(np.int64)
        self._counts = np.clip(wanted, 1, max(1, most))
        self._mask_id = shards.special_ids["mask"]
        vocabulary = _read_vocabulary(shards)
        special = set(shards.special_ids.values())
        self.ordinary = np.array(
            [i for i, entry in enumerate(vocabulary) if i not in special and not _UNUSED.fullmatch(entry)]
        )
        if not len(self.ordinary):
            raise InputError(f"{shards.folder}/vocab.txt: no ordinary token. Prepare the corpus again.")
        self._continues = np.array([entry.startswith("##") for entry in vocabulary])

    def counts(self, lengths: np.ndarray, *, special_tokens: int) -> np.ndarray:
        """Masked tokens of sequences of `lengths`, special tokens included; at most, if whole words."""
        return np.minimum(self._counts[lengths], lengths - special_tokens)

    def apply(self, rows: Rows, key: np.ndarray) -> Masked:
        """Mask `rows`; `key` uint64 [S] are the samples' keys."""
        bits = self._token_bits(rows, key)
        chosen = self.choose(rows, bits)
        labels = rows.input_ids[chosen]
        input_ids = rows.input_ids.copy()
        input_ids[chosen] = self._replacements(labels, bits[chosen])
        return Masked(input_ids, chosen, labels, (bits >> np.uint64(32)).astype(np.uint32).view(np.int32))

    def count_whole_words(self, rows: Rows, key: np.ndarray) -> int:
        """How many tokens `apply` would mask."""
        return len(self.choose(rows, self._token_bits(rows, key)))

    def choose(self, rows: Rows, bits: np.ndarray) -> np.ndarray:
        """Ascending rows of the token axis to mask, int64 [K]."""
        candidates = np.flatnonzero(rows.ordinary)
        if self.masking.whole_word:
            return self._choose_words(rows, bits, candidates)
        ends, order = _shuffle(rows, candidates, bits)
        begins = np.concatenate(([0], ends[:-1]))
        counts = np.minimum(self._counts[np.diff(rows.starts)], ends - begins)
        chosen = order[_ranges(begins, counts)]
        chosen.sort()
        return chosen

    def _token_bits(self, rows: Rows, key: np.ndarray) -> np.ndarray:
        """64 random bits per token, uint64 [T]; the upper half is the token key, the lower one orders."""
        return draw(draw(key, _TOKENS)[rows.sequence], rows.positions)

    def _replacements(self, labels: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """[MASK], a random ordinary token or the token itself, in the configured shares; int64 [K]."""
        choice = uniform(draw(bits, _CHOOSE))
        masked = choice < self.masking.mask_share
        random = ~masked & (choice < self.masking.mask_share + self.masking.random_share)
        replaced = np.where(masked, self._mask_id, labels)
        replaced[random] = self.ordinary[below(draw(bits[random], _REPLACE), len(self.ordinary))]
        return replaced

    def _choose_words(self, rows: Rows, bits: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Words in random order, each taken if it still fits (google-research/bert)."""
        begins_word = ~self._continues[rows.input_ids[candidates]]
        begins_word[0] = True
        begins_word[1:] |= np.diff(candidates) > 1  # the first piece after a special token
        first = np.flatnonzero(begins_word)
        sizes = np.zeros(len(rows.input_ids), np.int64)
        sizes[candidates[first]] = np.diff(first, append=len(candidates))
        ends, order = _shuffle(rows, candidates[first], bits)
        room = np.minimum(self._counts[np.diff(rows.starts)], _per_sequence(rows, candidates))
        next_word = np.concatenate(([0], ends[:-1]))
        taken = np.zeros(len(order), bool)
        open_ = np.arange(len(ends))
        while len(open_):
            words = next_word[open_]
            size = sizes[order[words]]
            fits = size <= room[open_]
            taken[words] = fits
            room[open_] -= size * fits
            next_word[open_] += 1
            open_ = open_[(room[open_] > 0) & (next_word[open_] < ends[open_])]
        heads = order[taken]
        heads.sort()
        return _ranges(heads, sizes[heads])


def _shuffle(rows: Rows, index: np.ndarray, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle `index` (ascending rows of the token axis) within each sequence.

    Returns where each sequence ends in the result, int64 [S], and the result. One sort of 64-bit numbers does
    it: sequence, then 32 or fewer random bits, then position.
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
    # Sorting keeps each sequence in its place, so `sequence` still says whose position this is.
    return ends, packed.view(np.int64) + rows.starts[sequence]


def _per_sequence(rows: Rows, index: np.ndarray) -> np.ndarray:
    return np.bincount(rows.sequence[index], minlength=len(rows.starts) - 1)


def _ranges(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """begins[0], begins[0]+1, ... (counts[0] of them), begins[1], ..."""
    ends = np.cumsum(counts)
    return np.repeat(begins - (ends - counts), counts) + np.arange(counts.sum())


def _read_vocabulary(shards: TokenShards) -> list[str]:
    path = shards.folder / "vocab.txt"
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error}). Prepare the corpus again.") from None
    if len(lines) != shards.vocabulary_size:
        raise InputError(
            f"{path}: {len(lines)} entries, but the shards were made with {shards.vocabulary_size}. "
            "Restore the vocabulary they were made with, or prepare the corpus again."
        )
    return [line.rstrip("\r") for line in lines]

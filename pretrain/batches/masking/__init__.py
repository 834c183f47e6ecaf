"""Masked language modeling, Devlin et al. section 3.1, on concatenated sequences.

The masked tokens and their replacements depend only on the sample's key and the position (invariant 1). Every module
of this package is a masking scheme: its class `Scheme` chooses the tokens, and a config names the scheme by the module.
docs/extend/add-a-masking-scheme.md shows how to add one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.batches.order import draw
from pretrain.batches.plan import Rows
from pretrain.batches.scheme import MaskingScheme, MaskingVocabulary
from pretrain.common.errors import InputError
from pretrain.common.extensions import Contract
from pretrain.common.kinds import load_kind
from pretrain.config import MaskingConfig
from pretrain.corpus.byte_words import speller, word_edges
from pretrain.corpus.shards import TokenShards
from pretrain.corpus.special_tokens import declared_settings, special_added_ids
from pretrain.corpus.vocabulary import read_vocabulary

KIND = Contract("Scheme", MaskingScheme, ("choose",))
_TOKENS = 1 << 32  # counter of `draw`; not used in pairs.py or scheme.py
# Unused entries of BERT, Gemma and Llama, and Gemma's byte-fallback entries.
_UNUSED = re.compile(r"\[unused\d+\]|<unused\d+>|<\|reserved_special_token_\d+\|>|<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class MaskingResult:
    """The result of masking S sequences of T tokens, K of them masked."""

    input_ids: np.ndarray  # int64 [T]
    rows: np.ndarray  # int64 [K], ascending
    labels: np.ndarray  # int64 [K]
    token_keys: np.ndarray  # int32 [T]


class Masker:
    """Masks tokens of sequences: in each, at most as many as `counts` returns, and no special tokens.

    Args:
        text: a corpus, or a vocabulary to mask text outside of a corpus.
        masking: the scheme and its shares.
        sequence_length: maximum sequence length.
        max_predictions: maximum tokens to predict in a sequence; 0 for the masking share of `sequence_length`.

    The methods' argument `share`, float64 [S], is the share of tokens to predict in each sequence, by default
    `masking.probability`. Raises `InputError` if vocab.txt does not match the shards.
    """

    def __init__(
        self,
        text: TokenShards | MaskingVocabulary,
        masking: MaskingConfig,
        *,
        sequence_length: int,
        max_predictions: int,
    ) -> None:
        self._probability, self._sequence_length = masking.probability, sequence_length
        self._max_predictions = max_predictions
        vocabulary = text if isinstance(text, MaskingVocabulary) else _vocabulary(text)
        self.ordinary = vocabulary.ordinary
        self._scheme: MaskingScheme = load_kind(__name__, masking.scheme).Scheme(masking, vocabulary)
        self.has_exact_counts = self._scheme.has_exact_counts

    @classmethod
    def without_corpus(cls, vocabulary: MaskingVocabulary, share: float, sequence_length: int) -> Masker:
        """Return a masker that masks single tokens, for text outside of a corpus."""
        masking = MaskingConfig(probability=share)
        return cls(vocabulary, masking, sequence_length=sequence_length, max_predictions=0)

    def counts(
        self, lengths: np.ndarray, *, special_tokens: np.ndarray | int, share: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the number of masked tokens in sequences of these `lengths`: a maximum unless `has_exact_counts`."""
        return np.minimum(self._limits(lengths, share), lengths - special_tokens)

    def apply(self, rows: Rows, key: np.ndarray, share: np.ndarray | None = None) -> MaskingResult:
        """Mask `rows`. `key` has the key of each sample, uint64 [S]."""
        bits = _token_bits(rows, key)
        chosen = self._choose(rows, bits, share)
        labels = rows.input_ids[chosen]
        input_ids = rows.input_ids.copy()
        input_ids[chosen] = self._scheme.replace(labels, bits[chosen])
        return MaskingResult(input_ids, chosen, labels, (bits >> np.uint64(32)).astype(np.uint32).view(np.int32))

    def count(self, rows: Rows, key: np.ndarray, share: np.ndarray | None = None) -> int:
        """Return the number of tokens that `apply` would mask."""
        return len(self._choose(rows, _token_bits(rows, key), share))

    def _choose(self, rows: Rows, bits: np.ndarray, share: np.ndarray | None) -> np.ndarray:
        return self._scheme.choose(rows, bits, self._limits(np.diff(rows.starts), share))

    def _limits(self, lengths: np.ndarray, share: np.ndarray | None) -> np.ndarray:
        """Return the maximum tokens to predict in sequences of these `lengths`, at least 1; int64 [S]."""
        shares = self._probability if share is None else share
        limit = self._max_predictions or np.rint(shares * self._sequence_length).astype(np.int64)
        return np.clip(np.rint(shares * lengths).astype(np.int64), 1, np.maximum(1, limit))


def ordinary_ids(entries: Sequence[str], special: Iterable[int]) -> np.ndarray:
    """Return the ids that may replace a token (int64, ascending): all but special, unused and byte-fallback entries."""
    excluded = set(special)
    ids = [number for number, entry in enumerate(entries) if number not in excluded and not _UNUSED.fullmatch(entry)]
    return np.array(ids, np.int64)


def _token_bits(rows: Rows, key: np.ndarray) -> np.ndarray:
    """Return 64 random bits per token, uint64 [T]. The upper half is the token key, the lower half shuffles tokens."""
    return draw(draw(key, _TOKENS)[rows.sequence], rows.positions)


def _vocabulary(shards: TokenShards) -> MaskingVocabulary:
    path = shards.folder / "vocab.txt"
    entries = read_vocabulary(path)
    if len(entries) != shards.vocabulary_size:
        raise InputError(
            f"{path}: {len(entries)} entries, but the shards were made with {shards.vocabulary_size}. "
            "Restore the vocabulary they were made with, or prepare the corpus again."
        )
    spell = speller(entries)
    # Released vocabularies have special tokens without a role, such as <|endoftext|>.
    without_role = special_added_ids(shards.folder) if spell else ()
    ordinary = ordinary_ids(entries, {*shards.special_ids.values(), *without_role})
    if not len(ordinary):
        raise InputError(f"{path}: no token besides special and unused ones. Prepare the corpus again.")
    # Japanese checkpoints expect text that is already segmented into words, and do not split at ideographs.
    is_segmented = declared_settings(shards.folder).get("tokenize_chinese_chars") is False
    edges = word_edges(entries, spell, is_segmented=is_segmented)
    return MaskingVocabulary(shards.special_ids["mask"], ordinary, edges, entries)

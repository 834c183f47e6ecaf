"""Masking for masked language modeling (Devlin et al. 2019, section 3.1), on concatenated sequences.

Masked tokens and their replacements depend only on a sample's text and key (invariant 1 in docs/invariants.md). Every
module of this package is a masking scheme: its class `Scheme` chooses the tokens. A config selects a scheme by name.
docs/extend/add-a-masking-scheme.md shows how to add one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.batches.order import draw
from pretrain.batches.plan import PackedTokens
from pretrain.batches.scheme import MaskingScheme, MaskingVocabulary
from pretrain.common.errors import InputError
from pretrain.common.extensions import Contract
from pretrain.common.kinds import load_kind
from pretrain.config import MaskingConfig
from pretrain.corpus.byte_words import entry_decoder, word_boundaries
from pretrain.corpus.shards import TokenShards
from pretrain.corpus.special_tokens import declared_settings, special_added_ids
from pretrain.corpus.vocabulary import read_vocabulary

INTERFACE = Contract("Scheme", MaskingScheme, ("choose",))
_TOKEN_STREAM = 1 << 32  # counter for `draw`, for random bits of tokens; pairs.py and scheme.py use other counters
# Entries that never replace a token: unused ones of BERT, Gemma and Llama, and Gemma's byte-fallback entries.
_UNUSABLE = re.compile(r"\[unused\d+\]|<unused\d+>|<\|reserved_special_token_\d+\|>|<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class MaskingResult:
    """The result of masking K of the T tokens of concatenated sequences."""

    input_ids: np.ndarray  # int64 [T], ids after masking
    indices: np.ndarray  # int64 [K], ascending indices of the masked tokens
    labels: np.ndarray  # int64 [K], ids of the masked tokens before masking
    token_keys: np.ndarray  # int32 [T], random bits of each token: its dropout seed


class Masker:
    """Masks tokens in S concatenated sequences: at most `max_counts` in each, and no special tokens.

    Args:
        source: the corpus, or the vocabulary of text that is not from a corpus.
        masking: the config section: the scheme and the probabilities of masking and replacing tokens.
        sequence_length: maximum sequence length.
        max_predictions: maximum number of masked tokens per sequence; 0 means `probability` times `sequence_length`.

    The methods' argument `probability`, float64 [S], is the fraction of tokens to mask in each sequence, by default
    `masking.probability`. The constructor raises `InputError` if vocab.txt does not match the shards.
    """

    def __init__(
        self,
        source: TokenShards | MaskingVocabulary,
        masking: MaskingConfig,
        *,
        sequence_length: int,
        max_predictions: int,
    ) -> None:
        self._probability, self._sequence_length = masking.probability, sequence_length
        self._max_predictions = max_predictions
        vocabulary = source if isinstance(source, MaskingVocabulary) else _masking_vocabulary(source)
        self.replacement_ids = vocabulary.replacement_ids
        self._scheme: MaskingScheme = load_kind(__name__, masking.scheme).Scheme(masking, vocabulary)
        self.has_exact_counts = self._scheme.has_exact_counts

    @classmethod
    def without_corpus(cls, vocabulary: MaskingVocabulary, probability: float, sequence_length: int) -> Masker:
        """Return a masker that masks single tokens, for text that is not from a corpus."""
        masking = MaskingConfig(probability=probability)
        return cls(vocabulary, masking, sequence_length=sequence_length, max_predictions=0)

    def max_counts(
        self, lengths: np.ndarray, *, special_tokens: np.ndarray | int, probability: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the number of masked tokens of each sequence: exact if `has_exact_counts`, else an upper limit."""
        return np.minimum(self._limits(lengths, probability), lengths - special_tokens)

    def apply(self, tokens: PackedTokens, key: np.ndarray, probability: np.ndarray | None = None) -> MaskingResult:
        """Mask `tokens`; `key` is the random key of each sequence, uint64 [S]."""
        bits = _token_bits(tokens, key)
        chosen = self._choose(tokens, bits, probability)
        labels = tokens.input_ids[chosen]
        input_ids = tokens.input_ids.copy()
        input_ids[chosen] = self._scheme.replace(labels, bits[chosen])
        return MaskingResult(input_ids, chosen, labels, (bits >> np.uint64(32)).astype(np.uint32).view(np.int32))

    def count_masked(self, tokens: PackedTokens, key: np.ndarray, probability: np.ndarray | None = None) -> int:
        """Return the number of tokens that `apply` would mask."""
        return len(self._choose(tokens, _token_bits(tokens, key), probability))

    def _choose(self, tokens: PackedTokens, bits: np.ndarray, probability: np.ndarray | None) -> np.ndarray:
        return self._scheme.choose(tokens, bits, self._limits(np.diff(tokens.starts), probability))

    def _limits(self, lengths: np.ndarray, probability: np.ndarray | None) -> np.ndarray:
        """Return the maximum number of masked tokens in sequences of `lengths`, at least 1; int64 [S]."""
        probabilities = self._probability if probability is None else probability
        limit = self._max_predictions or np.rint(probabilities * self._sequence_length).astype(np.int64)
        return np.clip(np.rint(probabilities * lengths).astype(np.int64), 1, np.maximum(1, limit))


def find_replacement_ids(entries: Sequence[str], special: Iterable[int]) -> np.ndarray:
    """Return the ids that may replace a token (int64, ascending): all but special, unused and byte-fallback entries."""
    excluded = set(special)
    ids = [index for index, entry in enumerate(entries) if index not in excluded and not _UNUSABLE.fullmatch(entry)]
    return np.array(ids, np.int64)


def _token_bits(tokens: PackedTokens, key: np.ndarray) -> np.ndarray:
    """Return 64 random bits per token, uint64 [T]: the upper 32 are its dropout seed, the lower 32 its sort key."""
    return draw(draw(key, _TOKEN_STREAM)[tokens.sequence], tokens.positions)


def _masking_vocabulary(shards: TokenShards) -> MaskingVocabulary:
    path = shards.folder / "vocab.txt"
    entries = read_vocabulary(path)
    if len(entries) != shards.vocabulary_size:
        raise InputError(
            f"{path}: {len(entries)} entries, but the shards were made with {shards.vocabulary_size}. "
            "Restore the vocabulary that they were made with, or prepare the corpus again."
        )
    decode = entry_decoder(entries)  # None for WordPiece vocabularies
    # Released vocabularies have special tokens that model inputs never contain, such as <|endoftext|>.
    unused_special = special_added_ids(shards.folder) if decode else ()
    replacement_ids = find_replacement_ids(entries, {*shards.special_ids.values(), *unused_special})
    if not len(replacement_ids):
        raise InputError(f"{path}: all tokens are special or unused. Prepare the corpus again.")
    # Japanese checkpoints expect text that is already segmented into words, and do not split at ideographs.
    is_segmented = declared_settings(shards.folder).get("tokenize_chinese_chars") is False
    boundaries = word_boundaries(entries, decode, is_segmented=is_segmented)
    return MaskingVocabulary(shards.special_ids["mask"], replacement_ids, boundaries, entries)

"""Tokenization with character offsets, for any tokenizer of the BERT family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from finetune.tasks.datasets.arrays import concatenate_ranges, unique_strings
from pretrain.common.errors import InputError

_BATCH_SIZE = 4096  # strings per tokenizer call; a limit, since encodings take 100 times the memory of ids
_WORDS_PER_LINE = 64  # distinct words joined into one string to encode; one word per string would be slow


@dataclass(frozen=True)
class TokenizedTexts:
    """The tokens of N strings (documents or words), concatenated, without special tokens."""

    ids: np.ndarray  # int32 [T]
    starts: np.ndarray  # int64 [N + 1], index of each string's first token, and finally T
    offsets: np.ndarray  # int32 [T, 2], start and end (exclusive) of each token in its string, in characters


class TextEncoder:
    """Tokenizes documents and pairs, and knows the special tokens that the tokenizer adds to them.

    Args:
        tokenizer: a tokenizer with its post-processor; its truncation and padding are disabled.
        max_length: maximum number of tokens per window, special tokens included.
        segments: whether the model has a token type for each text of a pair; if not, all tokens have type 0.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int, *, segments: bool = True) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.max_length, self.segments = max_length, segments
        # Encode a pair to find the special tokens before, between and after its halves, for any family.
        pair = tokenizer.encode("a", "a")
        ids = np.array(pair.ids, np.int32)
        first, second = ([n for n, sequence in enumerate(pair.sequence_ids) if sequence == index] for index in (0, 1))
        if not first or not second or not first[0] or second[-1] + 1 == len(ids):
            raise InputError(
                "tokenizer.json: adds no special tokens such as [CLS] and [SEP], so its post_processor does not belong "
                "to this model. Add the model's own tokenizer files to the folder."
            )
        self.prefix, self.between, self.suffix = ids[: first[0]], ids[first[-1] + 1 : second[0]], ids[second[-1] + 1 :]
        # Byte-level BPE: a word has different tokens at the start of a string and within it.
        ids_a, ids_b, ids_a_b = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("a", "b", "a b"))
        self._words_need_space = ids_a + ids_b != ids_a_b
        self.splits_at_spaces = _splits_at_spaces(tokenizer)

    def capacity(self, *, pair: bool) -> int:
        """Return the number of text tokens that fit in a window (for a pair, in total)."""
        return self.max_length - len(self.prefix) - len(self.suffix) - (len(self.between) if pair else 0)

    def encode(self, texts: Sequence[str]) -> TokenizedTexts:
        """Tokenize strings in the tokenizer's threads; repeated strings are tokenized once."""
        if self.splits_at_spaces:
            return self._encode_words_once(texts)
        distinct_texts, indices = unique_strings(texts)
        return _gather(self.encode_whole(distinct_texts), indices)

    def encode_words(self, words: Sequence[str]) -> TokenizedTexts:
        """Tokenize pre-split words, each as a separate string.

        Equivalent to `is_pretokenized=True` in Hugging Face (for byte-level BPE, with `add_prefix_space`).
        """
        if not self._words_need_space:
            return self.encode(words)
        encoded = self.encode([f" {word}" for word in words])
        return replace(encoded, offsets=np.maximum(encoded.offsets - 1, 0))

    def _encode_words_once(self, texts: Sequence[str]) -> TokenizedTexts:
        """Tokenize each distinct string between spaces once, then gather its tokens for each of the W occurrences."""
        first_word_N = np.concatenate([[0], np.cumsum([text.count(" ") + 1 for text in texts], dtype=np.int64)])
        vocabulary: dict[str, int] = {}
        indices = (vocabulary.setdefault(word, len(vocabulary)) for text in texts for word in text.split(" "))
        word_W = np.fromiter(indices, np.int32, first_word_N[-1])
        encoded, lengths = self._encode_distinct(list(vocabulary))
        offset_W = np.concatenate([[0], np.cumsum(lengths[word_W] + 1)])  # 1 for the space after each word
        offset_W = offset_W[:-1] - np.repeat(offset_W[first_word_N[:-1]], np.diff(first_word_N))
        count_W = np.diff(encoded.starts)[word_W]
        tokens = concatenate_ranges(encoded.starts[word_W], count_W)
        return TokenizedTexts(
            ids=encoded.ids[tokens],
            starts=np.concatenate([[0], np.cumsum(count_W)])[first_word_N],
            offsets=encoded.offsets[tokens] + np.repeat(offset_W, count_W).astype(np.int32)[:, None],
        )

    def _encode_distinct(self, words: list[str]) -> tuple[TokenizedTexts, np.ndarray]:
        """Return (tokens of each word, its number of characters, int64); many words are encoded as one string."""
        lines = [" ".join(words[n : n + _WORDS_PER_LINE]) for n in range(0, len(words), _WORDS_PER_LINE)]
        encoded = self.encode_whole(lines)
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        word_ends = np.cumsum(lengths + 1)
        word_starts = word_ends - lengths - 1  # character offset of each word in all lines, joined with spaces
        line_T = np.repeat(np.arange(len(lines)), np.diff(encoded.starts))
        offset_T = encoded.offsets[:, 0] + word_starts[line_T * _WORDS_PER_LINE]
        word_T = np.searchsorted(word_ends, offset_T, side="right")
        word_offset_T = (word_starts[word_T] - word_starts[line_T * _WORDS_PER_LINE]).astype(np.int32)  # in its line
        starts = np.searchsorted(word_T, np.arange(len(words) + 1))
        return TokenizedTexts(encoded.ids, starts, encoded.offsets - word_offset_T[:, None]), lengths

    def encode_whole(self, texts: list[str]) -> TokenizedTexts:
        """Tokenize each string as a whole, without special tokens, with offsets."""
        ids, offsets = [np.zeros(0, np.int32)], [np.zeros((0, 2), np.int32)]
        for first in range(0, len(texts), _BATCH_SIZE):
            for encoding in self.tokenizer.encode_batch(texts[first : first + _BATCH_SIZE], add_special_tokens=False):
                ids.append(np.array(encoding.ids, np.int32))
                offsets.append(np.array(encoding.offsets, np.int32).reshape(-1, 2))
        starts = np.cumsum([len(chunk_ids) for chunk_ids in ids], dtype=np.int64)
        return TokenizedTexts(np.concatenate(ids), starts, np.concatenate(offsets))


@dataclass(frozen=True)
class FramedWindows:
    """F windows of text with special tokens, concatenated to T tokens."""

    ids: np.ndarray  # int32 [T]
    types: np.ndarray  # uint8 [T], token types: 1 from the start of the second text on
    starts: np.ndarray  # int64 [F + 1], index of each window's first token, and finally T
    first: np.ndarray  # int64 [F], index of the first text's first token
    second: np.ndarray  # int64 [F], index of the second text's first token; of the suffix if there is none


Slices = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(ids int32 [T], start int64 [F], length int64 [F]): a slice of `ids` for each of F windows."""


def frame(encoder: TextEncoder, first: Slices, second: Slices | None = None) -> FramedWindows:
    """Build windows from `first`, or from `first` and `second`, with the tokenizer's special tokens."""
    count = len(first[1])
    parts = [_repeat(encoder.prefix, count), first]
    if second is not None:
        parts += [_repeat(encoder.between, count), second]
    parts.append(_repeat(encoder.suffix, count))
    lengths_PF = np.stack([length for _, _, length in parts])  # P parts per window
    starts = np.concatenate([[0], np.cumsum(lengths_PF.sum(0))])
    starts_PF = starts[:-1] + np.cumsum(lengths_PF, 0) - lengths_PF
    ids = np.empty(starts[-1], np.int32)
    for (source, start, length), target in zip(parts, starts_PF, strict=True):
        ids[concatenate_ranges(target, length)] = source[concatenate_ranges(start, length)]
    types = np.zeros(len(ids), np.uint8)
    if second is not None and encoder.segments:
        types[concatenate_ranges(starts_PF[3], lengths_PF[3] + lengths_PF[4])] = 1
    return FramedWindows(ids, types, starts, starts_PF[1], starts_PF[3] if second is not None else starts_PF[2])


def _splits_at_spaces(tokenizer: Tokenizer) -> bool:
    """Return whether the tokens of a string are the concatenated tokens of its parts between spaces.

    That is true for BERT's normalizer, which depends only on a character and its combining marks, with BERT's
    pre-tokenizer, which splits at every space, unless an added token contains or strips spaces.
    """
    return (
        isinstance(tokenizer.model, WordPiece)
        and isinstance(tokenizer.normalizer, BertNormalizer)
        and isinstance(tokenizer.pre_tokenizer, BertPreTokenizer)
        and not any(
            token.lstrip or token.rstrip or " " in token.content
            for token in tokenizer.get_added_tokens_decoder().values()
        )
    )


def _repeat(ids: np.ndarray, count: int) -> Slices:
    """Return slices that contain all of `ids`, for `count` windows."""
    return ids, np.zeros(count, np.int64), np.full(count, len(ids), np.int64)


def _gather(texts: TokenizedTexts, indices: np.ndarray) -> TokenizedTexts:
    """Return the tokens of the strings with these `indices`, which may repeat, in this order."""
    lengths = np.diff(texts.starts)[indices]
    tokens = concatenate_ranges(texts.starts[indices], lengths)
    return TokenizedTexts(texts.ids[tokens], np.concatenate([[0], np.cumsum(lengths)]), texts.offsets[tokens])

"""Computes the attention weights of a run, an export, a released or a fine-tuned model on any input.

Shape letters: L tokens, N heads.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pretrain.checkpoint.released import read_released
from pretrain.checkpoint.tokenizer import read_tokenizer
from pretrain.model.padded import PaddedEncoder
from pretrain.run.attention.kinds import TokenMarks

_PUNCTUATION = (".", ",")  # Clark et al. section 3.2
_SPACE = re.compile(r"\s")


@dataclass(frozen=True)
class DisplayTokens:
    """The tokens of a single input or a pair.

    Attributes:
        spellings: each token as spelled in the input, or the name of a special token.
        continues_word: whether each token continues the previous token's word.
        token_types: int64 [L], segment of each token.
        marks: the kinds of the tokens, for statistics.
    """

    spellings: tuple[str, ...]
    continues_word: tuple[bool, ...]
    token_types: np.ndarray
    marks: TokenMarks

    def __len__(self) -> int:
        return len(self.spellings)


class AttentionModel:
    """A model with its tokenizer, in fp32.

    Args:
        folder: a model that `pretrain.checkpoint.released.read_released` reads: a run, an export, a release, or a
            fine-tuned model.

    Raises:
        InputError: the model or its tokenizer cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        released = read_released(folder)
        self.shape, self.family = released.model, released.family
        self._tokenizer = read_tokenizer(folder, released.vocabulary_size)
        self._uses_segments = released.token_types > 1
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._encoder = PaddedEncoder(released.model, released.backbone).to(self._device)

    def tokens(self, text: str, pair: str | None = None) -> DisplayTokens:
        """Return all tokens of a single input or a pair, with special tokens, untruncated."""
        self._tokenizer.no_truncation()
        return _display_tokens(self._tokenizer.encode(text, pair), text, pair)

    def windows(self, text: str, max_length: int) -> Iterator[DisplayTokens]:
        """Yield the tokens in windows of at most `max_length` tokens, each with its special tokens."""
        self._tokenizer.enable_truncation(max_length)
        encoding = self._tokenizer.encode(text)
        for window in (encoding, *encoding.overflowing):
            yield _display_tokens(window, text, None)

    def weights(self, tokens: DisplayTokens) -> list[np.ndarray]:
        """Return the attention weights of each layer, float32 [N, L, L]; the weights of each query sum to 1."""
        arrays = (tokens.marks.ids, tokens.token_types)
        ids_1L, types_1L = (torch.from_numpy(array)[None].to(self._device) for array in arrays)
        attentions: list[torch.Tensor] = []
        with torch.inference_mode():
            types = types_1L if self._uses_segments else None
            self._encoder.encode(ids_1L, torch.ones_like(ids_1L), types, attention=attentions)
        return [layer_1NLL[0].float().cpu().numpy() for layer_1NLL in attentions]


def _display_tokens(encoding: Any, text: str, pair: str | None) -> DisplayTokens:
    """Convert an encoding from the tokenizers library."""
    spellings: list[str] = []
    continues_word: list[bool] = []
    words: list[tuple[int, int] | None] = []  # (segment, index of the word) of each token; None for special tokens
    last_end: tuple[int | None, int] = (None, -1)  # segment and end offset of the last token
    for index, name in enumerate(encoding.tokens):
        segment = None if encoding.special_tokens_mask[index] else encoding.sequence_ids[index]
        if segment is None:
            spellings.append(name)
            continues_word.append(False)
            words.append(None)
            continue
        segment_text, (start, end) = (text, pair or "")[segment], encoding.offsets[index]
        # Byte-level tokenizers include the space before a word in its first token.
        starts_with_space = _SPACE.match(segment_text[start:end]) is not None
        spellings.append(segment_text[start:end].strip() or name)
        # Without word boundaries, each token is a word.
        word = (segment, -1 - index if encoding.word_ids[index] is None else encoding.word_ids[index])
        continues_word.append(last_end == (segment, start) and not starts_with_space and word == words[-1])
        words.append(word)
        last_end = (segment, end)
    marks = _mark_kinds(encoding, spellings, words)
    return DisplayTokens(tuple(spellings), tuple(continues_word), np.array(encoding.type_ids, np.int64), marks)


def _mark_kinds(encoding: Any, spellings: list[str], words: list[tuple[int, int] | None]) -> TokenMarks:
    is_special = np.array([word is None for word in words])
    is_first = is_special & (np.arange(len(is_special)) == 0)
    word_spellings: dict[tuple[int, int], str] = {}
    for spelling, word in zip(spellings, words, strict=True):
        if word is not None:
            word_spellings[word] = word_spellings.get(word, "") + spelling.lower()
    word_ids = {spelling: index for index, spelling in enumerate(dict.fromkeys(word_spellings.values()))}
    word_indices = {word: index for index, word in enumerate(word_spellings)}
    return TokenMarks(
        ids=np.array(encoding.ids, np.int64),
        first=is_first,
        separator=is_special & ~is_first,
        punctuation=np.array([spelling in _PUNCTUATION for spelling in spellings]),
        word=np.array([-1 if word is None else word_ids[word_spellings[word]] for word in words]),
        word_index=np.array([-1 if word is None else word_indices[word] for word in words]),
    )

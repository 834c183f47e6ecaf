"""Splitters cut documents into pieces that a tokenizer encodes independently, so each distinct piece is encoded once.

Gpt2Splitter            for byte-level BPE: splits with the regular expression of GPT-2 or of byte_level.py
WordSplitter            for Metaspace, with a mark before every word (XLM-R, DeBERTa-v3): splits at whitespace
WhitespaceRunSplitter   for BPE without pre-tokenization (Gemma, mmBERT): splits at spaces, around `added_whitespace`
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from pretrain.corpus.byte_level import component_types, is_bertrain_byte_level
from pretrain.corpus.pieces import Bounds, DocumentPieces, bertrain_bounds, document_pieces, gpt2_bounds
from pretrain.corpus.tokenize import BytePairs, WordTable, WordTokens

_SPACE_MARK = "\u2581"  # character that represents a space
_END_OF_PIECE = "\0"
# Types of normalizers that change each word independently, unless a character of the word combines with a space.
_WORD_NORMALIZERS = {"Precompiled", "Strip", "Lowercase", "StripAccents", "NFC", "NFD", "NFKC", "NFKD"}
_TEST_TEXT = "The cat's (2) mats;\nA  b\t\tcaf\u00e9 \u6f22\u5b57.\n\n    \u00bd x "
# The normalizer Precompiled changes whole graphemes. They may include a space: before a character of category M or of
# _JOINS_SPACE_BEFORE, after a character of _JOINS_SPACE_AFTER, and before or after one of category Cf.
_JOINS_SPACE_BEFORE = frozenset("\u0e33\u0eb3\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff")
_JOINS_SPACE_AFTER = frozenset("\u0d4e\U000111c2\U000111c3\U0001193f\U00011941\U00011a3a")
_WORDS_PER_STRING = 100  # number of words that are joined into one string
_END, _SPACE, _OTHER, _RUN = range(4)  # classes of bytes; the n-th of `run_characters` has the class _RUN + n


class Gpt2Splitter:
    """Splitter for a byte-level BPE.

    `piece_encoder`: computes the tokens of pieces; None if there is no vocabulary yet. `adds_space`: whether a document
    that does not start with a space gets one. `keeps_line_breaks`: whether line breaks have tokens; if the tokenizer
    replaces them by spaces, documents with line breaks are not cut. `bounds`: as in `document_pieces`.
    """

    def __init__(
        self,
        piece_encoder: WordTokens | None,
        normalizer: Any = None,
        *,
        adds_space: bool,
        keeps_line_breaks: bool = True,
        bounds: Callable[[bytes, np.ndarray], Bounds] = gpt2_bounds,
    ) -> None:
        self.piece_encoder = piece_encoder
        self._normalizer, self._adds_space, self._keeps_line_breaks = normalizer, adds_space, keeps_line_breaks
        self._bounds = bounds

    @classmethod
    def for_bertrain(cls, piece_encoder: WordTokens | None, *, keeps_line_breaks: bool = True) -> Gpt2Splitter:
        """Return the splitter for a vocabulary that bertrain trained (byte_level.py)."""
        return cls(piece_encoder, adds_space=True, keeps_line_breaks=keeps_line_breaks, bounds=bertrain_bounds)

    def can_split(self, text: str) -> bool:
        """Return whether a document without added tokens may be cut into pieces."""
        if not self._keeps_line_breaks and "\n" in text:
            return False
        return self._normalizer is None or text.isascii() or self._normalizer.normalize_str(text) == text

    def cut(self, texts: Sequence[str], starts: Sequence[Sequence[int]], table: WordTable) -> DocumentPieces:
        """Cut documents into pieces; arguments as in `document_pieces`."""
        spaced_texts, shifted_starts = [], []
        for text, offsets in zip(texts, starts, strict=True):
            # Add a space as in pre_tokenizers/byte_level.rs of `tokenizers`.
            lacks_space = self._adds_space and not text.startswith(" ")
            spaced_texts.append(" " + text if lacks_space else text)
            shifted_starts.append(np.asarray(offsets) + lacks_space * (np.arange(len(offsets)) > 0))
        return document_pieces(spaced_texts, shifted_starts, table, self._bounds)

    def are_context_free(self, pieces: np.ndarray) -> np.ndarray:
        """Return whether each piece has the same tokens in a document as alone, bool [P]."""
        return np.ones(len(pieces), bool)


class WordSplitter:
    """Splitter at whitespace."""

    def __init__(self, tokenizer: Tokenizer, table: WordTable) -> None:
        self.piece_encoder = _LibraryPieces(tokenizer, table)

    def can_split(self, text: str) -> bool:
        return _SPACE_MARK not in text

    def cut(self, texts: Sequence[str], starts: Sequence[Sequence[int]], table: WordTable) -> DocumentPieces:
        return document_pieces(texts, [np.asarray(offsets) for offsets in starts], table, _word_bounds)

    def are_context_free(self, pieces: np.ndarray) -> np.ndarray:
        # If normalization gives a word a leading or trailing space, that space merges with the spaces around the word.
        return self.piece_encoder.are_plain_words(pieces)


class WhitespaceRunSplitter:
    """Splitter before spaces, and before and after a run of one of `run_characters`, which are added tokens."""

    def __init__(self, tokenizer: Tokenizer, table: WordTable, run_characters: str) -> None:
        self.piece_encoder = _LibraryPieces(tokenizer, table)
        self._classes = bytearray([_OTHER]) * 256
        self._classes[0], self._classes[ord(" ")] = _END, _SPACE
        for index, character in enumerate(run_characters):
            self._classes[ord(character)] = _RUN + index

    def can_split(self, text: str) -> bool:
        return _SPACE_MARK not in text

    def cut(self, texts: Sequence[str], starts: Sequence[Sequence[int]], table: WordTable) -> DocumentPieces:
        return document_pieces(texts, [np.asarray(offsets) for offsets in starts], table, self._bounds)

    def are_context_free(self, pieces: np.ndarray) -> np.ndarray:
        return np.ones(len(pieces), bool)

    def _bounds(self, raw: bytes, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        classes = np.frombuffer(raw.translate(bytes(self._classes)), np.uint8)
        current, previous = classes[1:], classes[:-1]
        may_start = (current >= _RUN) | (previous >= _RUN) | (previous == _END) | (current == _SPACE)
        is_start = (current != previous) & may_start
        starts = np.flatnonzero(is_start & (current != _END)) + 1
        edges = np.flatnonzero(is_start | (current == _END)) + 1
        return starts, edges[np.searchsorted(edges, starts, side="right")]


Splitter = Gpt2Splitter | WordSplitter | WhitespaceRunSplitter


def splitter_for(tokenizer: Tokenizer, table: WordTable) -> Splitter | None:
    """Return the splitter for a tokenizer; None if documents cannot be split. `table` will hold the distinct pieces."""
    spec = json.loads(tokenizer.to_str())
    pre_tokenizer = spec["pre_tokenizer"] or {}
    if is_bertrain_byte_level(spec):
        keeps_line_breaks = spec["normalizer"] is None
        return Gpt2Splitter.for_bertrain(BytePairs(tokenizer, table), keeps_line_breaks=keeps_line_breaks)
    if _splits_as_gpt2(spec):
        adds_space = bool(pre_tokenizer.get("add_prefix_space"))
        return Gpt2Splitter(BytePairs(tokenizer, table), tokenizer.normalizer, adds_space=adds_space)
    splitter: Splitter | None = None
    if _splits_at_spaces(spec) and _splits_at_tabs_and_line_breaks(tokenizer):
        splitter = WordSplitter(tokenizer, table)
    elif _never_joins_words(spec):
        splitter = WhitespaceRunSplitter(tokenizer, table, added_whitespace(spec))
    if splitter is None:
        return None
    pieces = splitter.cut([_TEST_TEXT], [[0]], table).pieces
    tokens, _ = splitter.piece_encoder.tokens(pieces, np.array([0, len(pieces)]), np.dtype(np.int64))
    agrees = tokens.tolist() == tokenizer.encode(_TEST_TEXT, add_special_tokens=False).ids
    return splitter if agrees else None


def added_whitespace(spec: dict[str, Any]) -> str:
    """Return which of line feed, tab and carriage return are added tokens, as a string of these characters."""
    added = {token["content"] for token in spec["added_tokens"] if _is_literal(token)}
    return "".join(character for character in "\n\t\r" if character in added)


def _is_literal(token: dict[str, Any]) -> bool:
    """Return whether an added token is matched literally, in any context."""
    return not any(token[flag] for flag in ("special", "normalized", "lstrip", "rstrip", "single_word"))


def _splits_as_gpt2(spec: dict[str, Any]) -> bool:
    """Return whether documents without added tokens are pre-tokenized as in GPT-2, apart from the normalizer NFC."""
    step, entries = spec["pre_tokenizer"], spec["model"]["vocab"]
    if spec["model"]["type"] != "BPE" or not step or step["type"] != "ByteLevel" or not step["use_regex"]:
        return False
    # `PieceEncoder` separates pieces by the first id after the vocabulary, which must therefore have no gaps.
    return max(entries.values()) < len(entries) and (spec["normalizer"] or {}).get("type") in (None, "NFC")


def _splits_at_spaces(spec: dict[str, Any]) -> bool:
    """Return whether words between spaces are encoded independently, each with a mark before it."""
    normalizers = (spec["normalizer"] or {}).get("normalizers", [spec["normalizer"]])
    steps = [step for step in normalizers if step is not None]
    if not all(map(_normalizes_words_separately, steps)):
        return False
    pre_tokenizer = spec["pre_tokenizer"] or {}
    *earlier_steps, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return (
        last.get("type") == "Metaspace"
        and last["replacement"] == _SPACE_MARK
        and last["prepend_scheme"] == "always"
        and last["split"]
        and all(step["type"] == "WhitespaceSplit" for step in earlier_steps)
    )


def _splits_at_tabs_and_line_breaks(tokenizer: Tokenizer) -> bool:
    """Return whether tabs and line breaks separate words like spaces; with Metaspace alone, they do not."""
    normalizer: Any = tokenizer.normalizer
    pre_tokenizer: Any = tokenizer.pre_tokenizer
    text = "a\tb\rc\nd"
    return len(pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text) if normalizer else text)) == 4


def _normalizes_words_separately(normalizer: dict[str, Any]) -> bool:
    """Return whether a normalizer changes words independently of each other, or only collapses spaces between them."""
    if normalizer["type"] == "Replace":
        return normalizer["pattern"] == {"Regex": " {2,}"} and normalizer["content"] == " "
    return normalizer["type"] in _WORD_NORMALIZERS


def _never_joins_words(spec: dict[str, Any]) -> bool:
    """Return whether this is a BPE without pre-tokenization whose tokens have no space after another character."""
    model, normalizer = spec["model"], spec["normalizer"] or {}
    space_normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_MARK}
    if component_types(spec) not in (["BPE", "Replace"], ["BPE", "Replace", "Split"]) or normalizer != space_normalizer:
        return False
    # Splitting at spaces has no effect, since the normalizer has replaced them.
    pre_tokenizer = spec["pre_tokenizer"] or {"pattern": {"String": " "}}
    if pre_tokenizer["pattern"] != {"String": " "} or any(" " in token["content"] for token in spec["added_tokens"]):
        return False
    has_all_bytes = all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))  # else, unknown bytes are fused
    inner_space = re.compile(f"[^{_SPACE_MARK}]{_SPACE_MARK}")
    return model["byte_fallback"] and has_all_bytes and not any(map(inner_space.search, model["vocab"]))


_IS_NON_SPACE = bytes(byte not in b"\0 \t\r\n" for byte in range(256))  # for `bytes.translate`


def _word_bounds(raw: bytes, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    is_non_space = np.frombuffer(raw.translate(_IS_NON_SPACE), bool)
    starts = np.flatnonzero(is_non_space[1:] & ~is_non_space[:-1]) + 1
    return starts, np.flatnonzero(is_non_space[:-1] & ~is_non_space[1:]) + 1


class _LibraryPieces(WordTokens):
    """Encodes pieces with the `tokenizers` library, many in one string, which is twice as fast as one by one."""

    def __init__(self, tokenizer: Tokenizer, table: WordTable) -> None:
        super().__init__(table)
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.add_tokens([AddedToken(_END_OF_PIECE, normalized=False)])
        self._end_id = self._tokenizer.token_to_id(_END_OF_PIECE)
        self._are_plain_words = np.zeros(0, bool)

    def are_plain_words(self, pieces: np.ndarray) -> np.ndarray:
        """Return whether normalized pieces are not empty and neither contain nor combine with a space, bool [P]."""
        self._extend()
        return self._are_plain_words[pieces]

    def _encode(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        words = [word.decode() for word in self._table.words(indices)]
        self._are_plain_words = np.append(self._are_plain_words, [self._is_plain_word(word) for word in words])
        starts = range(0, len(words), _WORDS_PER_STRING)
        strings = [_END_OF_PIECE.join((*words[start : start + _WORDS_PER_STRING], "")) for start in starts]
        encoded = self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        tokens = np.concatenate([np.zeros(0, np.int32), *(np.array(encoding.ids, np.int32) for encoding in encoded)])
        is_end = tokens == self._end_id
        return np.bincount(np.cumsum(is_end)[~is_end], minlength=len(words)), tokens[~is_end]

    def _is_plain_word(self, text: str) -> bool:
        if text.isascii() and text.isalnum():
            return True
        first, last = unicodedata.category(text[0]), unicodedata.category(text[-1])
        if first[0] == "M" or "Cf" in (first, last) or text[0] in _JOINS_SPACE_BEFORE or text[-1] in _JOINS_SPACE_AFTER:
            return False
        normalizer: Any = self._tokenizer.normalizer
        normalized = normalizer.normalize_str(text) if normalizer else text
        # Strip removes whitespace from a word encoded alone, but not from one inside a document.
        return bool(normalized) and _SPACE_MARK not in normalized and not any(map(str.isspace, text + normalized))

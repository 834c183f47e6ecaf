"""Splitters cut documents into pieces that a tokenizer encodes independently, so each distinct piece is encoded once.

Gpt2Splitter    splits with the regular expression of GPT-2 or of `byte_level`: for byte-level BPE
WordSplitter    splits at white space: for Metaspace marks before every word, as in XLM-R and DeBERTa-v3
RunSplitter     splits before spaces and around line breaks and tabs: for BPE over whole documents, as in Gemma, mmBERT
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

_MARK = "\u2581"  # character that represents a space
_END_OF_PIECE = "\0"
# Types of normalizers that change each word independently, unless a character of the word combines with a space.
_WORD_NORMALIZERS = {"Precompiled", "Strip", "Lowercase", "StripAccents", "NFC", "NFD", "NFKC", "NFKD", "Replace"}
_TEST_TEXT = "The cat's (2) mats;\nA  b\t\tcaf\u00e9 \u6f22\u5b57.\n\n    \u00bd x "
# Precompiled normalizes graphemes. These characters form a grapheme with a space before (_JOINS_BEFORE) or after them
# (_JOINS_AFTER). So do characters of category M with a space before them, and of category Cf with one on either side.
_JOINS_BEFORE = frozenset("\u0e33\u0eb3\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff")
_JOINS_AFTER = frozenset("\u0d4e\U000111c2\U000111c3\U0001193f\U00011941\U00011a3a")
_WORDS_PER_STRING = 100  # number of words that are joined into one string


class Gpt2Splitter:
    """Splitter for a byte-level BPE.

    `piece_tokens`: tokens of the pieces; None without a vocabulary. `adds_space`: whether documents that do not start
    with a space get one. `keep_lines`: whether line breaks are tokens. `bounds`: as in `document_pieces`.
    """

    def __init__(
        self,
        piece_tokens: WordTokens | None,
        normalizer: Any = None,
        *,
        adds_space: bool,
        keep_lines: bool = True,
        bounds: Callable[[bytes, np.ndarray], Bounds] = gpt2_bounds,
    ) -> None:
        self.piece_tokens = piece_tokens
        self._normalizer, self._adds_space, self._keep_lines = normalizer, adds_space, keep_lines
        self._bounds = bounds

    @classmethod
    def bertrain(cls, piece_tokens: WordTokens | None, *, keep_lines: bool = True) -> Gpt2Splitter:
        """Make the splitter for a vocabulary that bertrain trained (`byte_level`)."""
        return cls(piece_tokens, adds_space=True, keep_lines=keep_lines, bounds=bertrain_bounds)

    def can_split(self, text: str) -> bool:
        """Return whether a document may be cut into pieces. It must not contain added tokens."""
        if not self._keep_lines and "\n" in text:
            return False
        return self._normalizer is None or text.isascii() or self._normalizer.normalize_str(text) == text

    def cut(self, texts: Sequence[str], starts: Sequence[Sequence[int]], table: WordTable) -> DocumentPieces:
        """Cut documents into pieces; arguments as in `document_pieces`."""
        spaced, shifted = [], []
        for text, offsets in zip(texts, starts, strict=True):
            # Add a space as in pre_tokenizers/byte_level.rs of `tokenizers`.
            space = self._adds_space and not text.startswith(" ")
            spaced.append(" " + text if space else text)
            shifted.append(np.asarray(offsets) + space * (np.arange(len(offsets)) > 0))
        return document_pieces(spaced, shifted, table, self._bounds)

    def are_context_free(self, pieces: np.ndarray) -> np.ndarray:
        """Return whether each piece has the same tokens alone as within a document, bool [P]."""
        return np.ones(len(pieces), bool)


class WordSplitter:
    """Splitter at white space."""

    def __init__(self, tokenizer: Tokenizer, table: WordTable) -> None:
        self.piece_tokens = _LibraryPieces(tokenizer, table)

    def can_split(self, text: str) -> bool:
        return _MARK not in text

    def cut(self, texts: Sequence[str], starts: Sequence[Sequence[int]], table: WordTable) -> DocumentPieces:
        return document_pieces(texts, [np.asarray(offsets) for offsets in starts], table, _word_bounds)

    def are_context_free(self, pieces: np.ndarray) -> np.ndarray:
        # In a document, a leading or trailing space of a normalized word would merge with its neighbors.
        return self.piece_tokens.has_no_space(pieces)


class RunSplitter:
    """Splitter before spaces and around runs of a line break or tab that is an added token (`run_characters`)."""

    def __init__(self, tokenizer: Tokenizer, table: WordTable, run_characters: str) -> None:
        self.piece_tokens = _LibraryPieces(tokenizer, table)
        self._classes = bytearray([_OTHER]) * 256
        self._classes[0], self._classes[ord(" ")] = _END, _SPACE
        for index, character in enumerate(run_characters):
            self._classes[ord(character)] = _RUN + index

    def can_split(self, text: str) -> bool:
        return _MARK not in text

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


_END, _SPACE, _OTHER, _RUN = range(4)
Splitter = Gpt2Splitter | WordSplitter | RunSplitter


def splitter_for(tokenizer: Tokenizer, table: WordTable) -> Splitter | None:
    """Return the splitter for a tokenizer; None if documents cannot be split. `table` is the table of pieces."""
    spec = json.loads(tokenizer.to_str())
    pre_tokenizer = spec["pre_tokenizer"] or {}
    if is_bertrain_byte_level(spec):
        keep_lines = spec["normalizer"] is None
        return Gpt2Splitter.bertrain(BytePairs(tokenizer, table), keep_lines=keep_lines)
    if _splits_as_gpt2(spec):
        adds_space = bool(pre_tokenizer.get("add_prefix_space"))
        return Gpt2Splitter(BytePairs(tokenizer, table), tokenizer.normalizer, adds_space=adds_space)
    splitter: Splitter | None = None
    if _splits_at_spaces(spec) and _splits_at_all_spaces(tokenizer):
        splitter = WordSplitter(tokenizer, table)
    elif _joins_no_words(spec):
        splitter = RunSplitter(tokenizer, table, line_tokens(spec))
    if splitter is None:
        return None
    pieces = splitter.cut([_TEST_TEXT], [[0]], table).pieces
    tokens, _ = splitter.piece_tokens.tokens(pieces, np.array([0, len(pieces)]), np.dtype(np.int64))
    agrees = tokens.tolist() == tokenizer.encode(_TEST_TEXT, add_special_tokens=False).ids
    return splitter if agrees else None


def line_tokens(spec: dict[str, Any]) -> str:
    """Return which of line feed, tab and carriage return are added tokens; runs of them may be, too."""
    added = {token["content"] for token in spec["added_tokens"] if _is_literal(token)}
    return "".join(character for character in "\n\t\r" if character in added)


def _is_literal(token: dict[str, Any]) -> bool:
    """Return whether an added token is matched literally, in any context."""
    return not any(token[flag] for flag in ("special", "normalized", "lstrip", "rstrip", "single_word"))


def _splits_as_gpt2(spec: dict[str, Any]) -> bool:
    """Return whether documents without added tokens can be cut like in GPT-2, unless NFC changes them."""
    step, entries = spec["pre_tokenizer"], spec["model"]["vocab"]
    if spec["model"]["type"] != "BPE" or not step or step["type"] != "ByteLevel" or not step["use_regex"]:
        return False
    # `PieceEncoder` separates pieces by the first id after the vocabulary, which must therefore have no gaps.
    return max(entries.values()) < len(entries) and (spec["normalizer"] or {}).get("type") in (None, "NFC")


def _splits_at_spaces(spec: dict[str, Any]) -> bool:
    """Return whether words separated by spaces are encoded independently, each with a mark before it."""
    normalizers = (spec["normalizer"] or {}).get("normalizers", [spec["normalizer"]])
    steps = [step for step in normalizers if step is not None]
    if not all(step["type"] in _WORD_NORMALIZERS and _changes_words_only(step) for step in steps):
        return False
    pre_tokenizer = spec["pre_tokenizer"] or {}
    *first, last = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return (
        last.get("type") == "Metaspace"
        and last["replacement"] == _MARK
        and last["prepend_scheme"] == "always"
        and last["split"]
        and all(step["type"] == "WhitespaceSplit" for step in first)
    )


def _splits_at_all_spaces(tokenizer: Tokenizer) -> bool:
    """Return whether tabs and line breaks separate words like spaces; with Metaspace alone, they do not."""
    normalizer: Any = tokenizer.normalizer
    pre_tokenizer: Any = tokenizer.pre_tokenizer
    text = "a\tb\rc\nd"
    return len(pre_tokenizer.pre_tokenize_str(normalizer.normalize_str(text) if normalizer else text)) == 4


def _changes_words_only(normalizer: dict[str, Any]) -> bool:
    """Return whether a normalizer is not a Replace, or replaces only runs of spaces, which no word contains."""
    if normalizer["type"] != "Replace":
        return True
    return normalizer["pattern"] == {"Regex": " {2,}"} and normalizer["content"] == " "


def _joins_no_words(spec: dict[str, Any]) -> bool:
    """Return whether this is a BPE over whole documents in which no token has a space after another character."""
    model, normalizer = spec["model"], spec["normalizer"] or {}
    space_marker = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
    if component_types(spec) not in (["BPE", "Replace"], ["BPE", "Replace", "Split"]) or normalizer != space_marker:
        return False
    # Splitting at spaces has no effect, since the normalizer has replaced them.
    pre_tokenizer = spec["pre_tokenizer"] or {"pattern": {"String": " "}}
    if pre_tokenizer["pattern"] != {"String": " "} or any(" " in token["content"] for token in spec["added_tokens"]):
        return False
    bytes_known = all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))  # unknown bytes would be merged
    inner_space = re.compile(f"[^{_MARK}]{_MARK}")
    return model["byte_fallback"] and bytes_known and not any(map(inner_space.search, model["vocab"]))


def _word_bounds(raw: bytes, text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    is_solid = np.frombuffer(raw.translate(_IS_SOLID), bool)
    starts = np.flatnonzero(is_solid[1:] & ~is_solid[:-1]) + 1
    return starts, np.flatnonzero(is_solid[:-1] & ~is_solid[1:]) + 1


_IS_SOLID = bytes(byte not in b"\0 \t\r\n" for byte in range(256))


class _LibraryPieces(WordTokens):
    """The tokens of pieces, encoded by the `tokenizers` library."""

    def __init__(self, tokenizer: Tokenizer, table: WordTable) -> None:
        super().__init__(table)
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = True
        # Encode many pieces in one string, which is twice as fast as one by one.
        self._tokenizer.add_tokens([AddedToken(_END_OF_PIECE, normalized=False)])
        self._end_id = self._tokenizer.token_to_id(_END_OF_PIECE)
        self._no_space = np.zeros(0, bool)

    def has_no_space(self, pieces: np.ndarray) -> np.ndarray:
        """Return whether pieces, after normalization, are not empty and neither contain nor combine with a space."""
        self._extend()
        return self._no_space[pieces]

    def _encode(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        words = [word.decode() for word in self._table.words(indices)]
        self._no_space = np.append(self._no_space, [self._is_word(word) for word in words])
        starts = range(0, len(words), _WORDS_PER_STRING)
        strings = [_END_OF_PIECE.join((*words[start : start + _WORDS_PER_STRING], "")) for start in starts]
        encoded = self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        tokens = np.concatenate([np.zeros(0, np.int32), *(np.array(encoding.ids, np.int32) for encoding in encoded)])
        is_end = tokens == self._end_id
        return np.bincount(np.cumsum(is_end)[~is_end], minlength=len(words)), tokens[~is_end]

    def _is_word(self, text: str) -> bool:
        if text.isascii() and text.isalnum():
            return True
        first, last = unicodedata.category(text[0]), unicodedata.category(text[-1])
        if first[0] == "M" or "Cf" in (first, last) or text[0] in _JOINS_BEFORE or text[-1] in _JOINS_AFTER:
            return False
        normalizer: Any = self._tokenizer.normalizer
        normalized = normalizer.normalize_str(text) if normalizer else text
        # The normalizer Strip removes white space from a word alone, but keeps it if the word is inside a document.
        return bool(normalized) and _MARK not in normalized and not any(map(str.isspace, text + normalized))

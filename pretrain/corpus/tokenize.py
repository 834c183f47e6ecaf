"""WordPiece as a column operation over distinct words.

WordPiece is a function of the word alone, so a batch of text is cut into words by numpy, every word is looked
up in a hash table that lives as long as the process, only words never seen before are tokenised, and the ids are
gathered. The cuts (ASCII blanks, ASCII punctuation) are places where BERT's own pre-tokeniser always cuts; whatever
is left between them - accents, ideographs, control characters - goes to the `tokenizers` library as one piece, so
the ids equal BertTokenizer's by construction. The one exception is wanted: `[MASK]` and its like written out in a
text are ordinary characters here (BertTokenizer with `split_special_tokens=True`), never special tokens.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

MAX_TABLE_WORDS = 1 << 20  # a process's table of words starts afresh past this many: about 80 MB
END_OF_DOCUMENT = "\0"

_BLANK, _SENTENCE_END, _DOCUMENT_END, _WORD, _PUNCTUATION = range(5)
_PADDING = 16  # zero bytes behind the text, so that 16 bytes can be loaded at any word


def _character_classes() -> bytes:
    classes = bytearray([_WORD]) * 256
    for blank in b" \t\r":
        classes[blank] = _BLANK
    classes[ord("\n")] = _SENTENCE_END
    classes[0] = _DOCUMENT_END
    for mark in range(33, 127):
        if not chr(mark).isalnum():
            classes[mark] = _PUNCTUATION
    return bytes(classes)


_CLASSES = _character_classes()
_LOWER = bytes(range(256)).lower()
_LOW_BYTES = np.array(
    [(1 << 8 * n) - 1 for n in range(9)], np.uint64
)  # keeps the first n bytes of a little-endian word


@dataclass(frozen=True)
class Columns:
    """A batch of D documents with S sentences and W words.

    words int32 [W], numbers in the process's `WordTable`; sentences int64 [S+1], word offset of each sentence;
    documents int64 [D+1], sentence offset of each document; document_words int64 [D], blank-separated words;
    document_bytes int64 [D]; hashes uint64 [D, 2], 128 bits of the normalised text.
    Sentences have at least one word; documents may be empty.
    """

    words: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray
    document_words: np.ndarray
    document_bytes: np.ndarray
    hashes: np.ndarray


def columns(texts: Sequence[str], table: WordTable, *, lowercase: bool) -> Columns:
    """Cut documents into columns of words. Each text holds its sentences one per line and no NUL."""
    raw = (END_OF_DOCUMENT.join(texts) + END_OF_DOCUMENT).encode()
    # The first byte class decides everything; lower-casing ASCII first halves the distinct words and is what
    # BertNormalizer would do to these bytes anyway.
    text = raw.translate(_LOWER) if lowercase else raw
    kinds = np.frombuffer(text.translate(_CLASSES), np.uint8)
    starts, ends, blank_words = _word_bounds(kinds)
    words = table.intern(np.frombuffer(text + bytes(_PADDING), np.uint8), starts, ends - starts)

    line_ends = np.flatnonzero((kinds == _SENTENCE_END) | (kinds == _DOCUMENT_END))
    words_before = np.searchsorted(starts, line_ends)
    filled = np.diff(words_before, prepend=0) > 0
    document_ends = kinds[line_ends] == _DOCUMENT_END
    text_ends = line_ends[document_ends]
    return Columns(
        words=words,
        sentences=np.concatenate([[0], words_before[filled]]),
        documents=np.concatenate([[0], np.cumsum(filled)[document_ends]]),
        document_words=np.diff(np.searchsorted(blank_words, text_ends), prepend=0),
        document_bytes=np.diff(text_ends, prepend=-1) - 1,
        hashes=_hashes(raw, len(texts)),
    )


def _word_bounds(kinds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start and end byte of each word, and the starts of blank-separated words. The text ends in a NUL."""
    inside, mark = kinds == _WORD, kinds == _PUNCTUATION
    starts, ends, solid = mark.copy(), mark.copy(), inside | mark
    starts[0] |= inside[0]
    starts[1:] |= inside[1:] & ~inside[:-1]
    ends[:-1] |= inside[:-1] & ~inside[1:]
    blank_starts = solid.copy()
    blank_starts[1:] &= ~solid[:-1]
    return np.flatnonzero(starts), np.flatnonzero(ends) + 1, np.flatnonzero(blank_starts)


def _hashes(raw: bytes, count: int) -> np.ndarray:
    """uint64 [count, 2]: BLAKE2b of each text without its ASCII blanks and letter case."""
    folded = raw.translate(_LOWER, b" \t\r\n").split(b"\0")[:count]
    digests = b"".join(hashlib.blake2b(text, digest_size=16).digest() for text in folded)
    return np.frombuffer(digests, "<u8").reshape(count, 2)


class WordTable:
    """Numbers distinct words 0, 1, 2, ... in order of arrival; a word is a string of bytes without NUL."""

    def __init__(self) -> None:
        self._short = _KeyTable(1)  # up to 8 bytes: the word is its own 64-bit key
        self._middle = _KeyTable(2)  # up to 16 bytes
        self._long: dict[bytes, int] = {}
        self._words = np.zeros(1 << 12, "S16")
        self._long_words: dict[int, bytes] = {}
        self.size = 0

    def intern(self, buffer: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """int32 numbers of the words `buffer[start : start + length]`; 16 bytes must follow the last start."""
        numbers = np.empty(len(starts), np.int32)
        at_byte = np.ndarray((len(buffer) - 7,), "<u8", buffer, strides=(1,))
        short = np.flatnonzero(lengths <= 8)
        key = at_byte[starts[short]] & _LOW_BYTES[lengths[short]]
        numbers[short] = self._lookup(self._short, [key])
        middle = np.flatnonzero((lengths > 8) & (lengths <= 16))
        if middle.size:
            where = starts[middle]
            keys = [at_byte[where], at_byte[where + 8] & _LOW_BYTES[lengths[middle] - 8]]
            numbers[middle] = self._lookup(self._middle, keys)
        for n in np.flatnonzero(lengths > 16):
            numbers[n] = self._intern_long(buffer[starts[n] : starts[n] + lengths[n]].tobytes())
        return numbers

    def intern_words(self, words: Sequence[bytes]) -> np.ndarray:
        """int32 numbers of `words`."""
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        buffer = np.frombuffer(b"".join(words) + bytes(_PADDING), np.uint8)
        return self.intern(buffer, np.cumsum(lengths) - lengths, lengths)

    def words(self, numbers: np.ndarray) -> list[bytes]:
        """The words behind `numbers`."""
        words = self._words[numbers].tolist()
        if self._long_words:
            words = [self._long_words.get(n, word) for n, word in zip(numbers.tolist(), words, strict=True)]
        return words  # pyright: ignore[reportReturnType]

    def _lookup(self, table: _KeyTable, keys: list[np.ndarray]) -> np.ndarray:
        numbers, new_keys = table.lookup(keys, self.size)
        added = len(new_keys[0])
        if added:
            self._reserve(added)
            packed = np.zeros((added, 2), "<u8")
            for column, key in enumerate(new_keys):
                packed[:, column] = key
            self._words[self.size : self.size + added] = packed.view("S16")[:, 0]
            self.size += added
        return numbers

    def _intern_long(self, word: bytes) -> int:
        number = self._long.setdefault(word, self.size)
        if number == self.size:
            self._reserve(1)
            self._long_words[number] = word
            self.size += 1
        return number

    def _reserve(self, count: int) -> None:
        needed = self.size + count
        if needed > len(self._words):
            self._words = np.concatenate([self._words, np.zeros(max(needed, len(self._words)), "S16")])


class _KeyTable:
    """Open-addressing hash table from `columns` uint64 keys to an int32 number, all operations on whole arrays.

    The first key is never 0 (words hold no NUL), which marks an empty slot.
    """

    _HASH = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, Knuth's multiplicative hash
    _MIX = np.uint64(0xC2B2AE3D27D4EB4F)  # xxHash64's second prime

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._bits = 12
        self._used = 0
        self._allocate()

    def lookup(self, keys: list[np.ndarray], next_number: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """The number of every key, and the keys newly inserted, which got next_number, next_number + 1, ..."""
        numbers, missing = self._find(keys)
        if not missing.size:
            return numbers, [key[:0] for key in keys]
        new, inverse = _distinct([key[missing] for key in keys])
        numbers[missing] = next_number + inverse
        self._insert(new, np.arange(next_number, next_number + len(new[0]), dtype=np.int32))
        return numbers, new

    def _allocate(self) -> None:
        self._keys = [np.zeros(1 << self._bits, np.uint64) for _ in range(self._columns)]
        self._numbers = np.zeros(1 << self._bits, np.int32)

    def _slots(self, keys: list[np.ndarray]) -> np.ndarray:
        mixed = keys[0] if self._columns == 1 else keys[0] ^ (keys[1] * self._MIX)
        return ((mixed * self._HASH) >> np.uint64(64 - self._bits)).astype(np.int64)

    def _holds(self, slots: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        same = self._keys[0][slots] == keys[0]
        return same if self._columns == 1 else same & (self._keys[1][slots] == keys[1])

    def _find(self, keys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(numbers, indices of keys that are not in the table)."""
        slots = self._slots(keys)
        numbers = self._numbers[slots]
        pending = np.flatnonzero(~self._holds(slots, keys))
        missing = []
        while pending.size:
            at = slots[pending]
            empty = self._keys[0][at] == 0
            missing.append(pending[empty])
            pending = pending[~empty]
            at = (at[~empty] + 1) & ((1 << self._bits) - 1)
            slots[pending] = at
            numbers[pending] = self._numbers[at]
            pending = pending[~self._holds(at, [key[pending] for key in keys])]
        return numbers, np.sort(np.concatenate(missing)) if missing else pending

    def _insert(self, keys: list[np.ndarray], numbers: np.ndarray) -> None:
        """Insert distinct keys that are not in the table."""
        self._used += len(numbers)
        if 3 * self._used > 1 << self._bits:  # load of a third: 1.25 probes on average
            old, old_numbers = (
                [key[self._keys[0] != 0] for key in self._keys],
                self._numbers[self._keys[0] != 0],
            )
            while 3 * self._used > 1 << self._bits:
                self._bits += 1
            self._allocate()
            keys = [np.concatenate(pair) for pair in zip(old, keys, strict=True)]
            numbers = np.concatenate([old_numbers, numbers])
        slots = self._slots(keys)
        pending = np.arange(len(numbers))
        claim = np.empty(1 << self._bits, np.int64)
        while pending.size:
            at = slots[pending]
            free = self._keys[0][at] == 0
            claim[at[free]] = pending[free]  # several keys may want a slot; one of them stays written
            won = free & (claim[at] == pending)
            for column, key in zip(self._keys, keys, strict=True):
                column[at[won]] = key[pending[won]]
            self._numbers[at[won]] = numbers[pending[won]]
            slots[pending[~won]] = (at[~won] + 1) & ((1 << self._bits) - 1)
            pending = pending[~won]


def _distinct(keys: list[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Distinct rows of the key columns, ascending, and for each row the number of its distinct one."""
    order = np.lexsort(keys[::-1])
    ordered = [key[order] for key in keys]
    first = np.ones(len(order), bool)
    first[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in ordered])
    inverse = np.empty(len(order), np.int64)
    inverse[order] = np.cumsum(first) - 1
    return [key[first] for key in ordered], inverse


class WordPieces:
    """The tokens of every word in a `WordTable`, worked out once per word."""

    def __init__(self, tokenizer: Tokenizer, table: WordTable) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self._first = np.zeros(0, np.int32)  # offset of each word's tokens in the pool
        self._counts = np.zeros(0, np.int32)
        self._pool = np.zeros(0, np.int32)

    def tokens(
        self, words: np.ndarray, sentences: np.ndarray, dtype: np.dtype
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a row of word numbers, and the token offset of each sentence, int64 [S+1]."""
        self._extend()
        counts = self._counts[words]
        ends = np.zeros(len(words) + 1, np.int64)
        np.cumsum(counts, out=ends[1:])
        tokens = np.empty(ends[-1], dtype)
        first = self._first[words]
        # Most words are one token: write those at once, then the further tokens of the others.
        some = counts > 0
        if some.all():
            tokens[ends[:-1]] = self._pool[first]
        else:
            tokens[ends[:-1][some]] = self._pool[first[some]]
        several = np.flatnonzero(counts > 1)
        further = counts[several] - 1
        within = np.arange(further.sum()) - np.repeat(np.cumsum(further) - further, further) + 1
        tokens[np.repeat(ends[several], further) + within] = self._pool[
            np.repeat(first[several], further) + within
        ]
        return tokens, ends[sentences]

    def _extend(self) -> None:
        """Tokenise the words that joined the table since the last call."""
        known = len(self._counts)
        if known == self._table.size:
            return
        pieces = word_pieces(self._tokenizer, self._table.words(np.arange(known, self._table.size)))
        counts = np.fromiter(map(len, pieces), np.int32, len(pieces))
        new = np.fromiter(itertools.chain.from_iterable(pieces), np.int32, int(counts.sum()))
        self._first = np.concatenate(
            [self._first, len(self._pool) + (np.cumsum(counts) - counts).astype(np.int32)]
        )
        self._counts = np.concatenate([self._counts, counts])
        self._pool = np.concatenate([self._pool, new])


def word_pieces(tokenizer: Tokenizer, words: Sequence[bytes]) -> list[list[int]]:
    """Ids of each word. Words hold no ASCII blank, ASCII marks stand alone, ASCII letters have the right case.

    Plain ASCII words go straight to the WordPiece model, as normalising and cutting would not change them. All others
    take the tokenizer's whole way.
    """
    tokenize = tokenizer.model.tokenize
    texts = b"\n".join(words).decode().split("\n")
    result = [
        [t.id for t in tokenize(text)] if text.isascii() and text.isprintable() else [] for text in texts
    ]
    others = [n for n, text in enumerate(texts) if not (text.isascii() and text.isprintable())]
    encoded = tokenizer.encode_batch_fast([texts[n] for n in others], add_special_tokens=False)
    for number, encoding in zip(others, encoded, strict=True):
        result[number] = encoding.ids
    return result

"""WordPiece as an array operation over distinct words.

The tokens of a word do not depend on its context: numpy cuts a batch of documents into words, each word is looked up in
a hash table that the process keeps, only new words are tokenized, and the ids are gathered. Words are cut where BERT's
tokenizer always cuts: at ASCII whitespace and punctuation, and around ideographs. Plain ASCII words are matched in
`trie`. All others, with accents, ideographs or control characters, are passed to the `tokenizers` library, so the ids
equal BertTokenizer's by construction. There is one intended exception: special tokens such as `[MASK]` that are written
out in a document are ordinary characters here (as with `split_special_tokens=True`).
"""

from __future__ import annotations

import functools
import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from pretrain.corpus import byte_level
from pretrain.corpus.keytable import KeyTable
from pretrain.corpus.trie import TokenTrie
from pretrain.corpus.vocabulary import Fold, bert_tokenizer
from pretrain.corpus.word_counts import document_words

MAX_TABLE_WORDS = 1 << 20  # maximum words in a table, about 80 MB; then the process starts a new table
_CAPACITY = 40_000  # initial capacity for words of up to 8 bytes, and of up to 16 bytes: 4 MB
END_OF_DOCUMENT = "\0"

# Classes of bytes. Bytes of classes from _WORD on are parts of words; _IDEOGRAPH is the first byte of an ideograph.
_SPACE, _SENTENCE_END, _DOCUMENT_END, _PUNCTUATION, _WORD, _IDEOGRAPH = range(6)
PADDING = 16  # zero bytes after the data, so that 16 bytes can be read at any word


def _character_classes() -> bytes:
    classes = bytearray([_WORD]) * 256
    for space in b" \t\r":
        classes[space] = _SPACE
    classes[ord("\n")] = _SENTENCE_END
    classes[0] = _DOCUMENT_END
    for mark in range(33, 127):
        if not chr(mark).isalnum():
            classes[mark] = _PUNCTUATION
    for lead in range(0xE4, 0xEA):  # UTF-8 of U+4000 to U+9FFF
        classes[lead] = _IDEOGRAPH
    return bytes(classes)


_CLASSES = _character_classes()
_LOWER = bytes(range(256)).lower()
# UTF-8 prefixes of characters in decomposed strings: combining marks, leading jamo, voiced marks of kana.
_DECOMPOSED_PREFIXES = (b"\xcc", b"\xcd", b"\xe1\x84", b"\xe3\x82\x99", b"\xe3\x82\x9a")
_LOW_BYTES = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)  # masks of the first n little-endian bytes


@dataclass(frozen=True)
class CutWords:
    """A batch of D documents with S sentences and W words. Sentences have at least one word; documents may be empty."""

    words: np.ndarray  # int32 [W], index of each word in the process's `WordTable`
    sentences: np.ndarray  # int64 [S+1], index of each sentence's first word
    documents: np.ndarray  # int64 [D+1], index of each document's first sentence
    document_words: np.ndarray  # int64 [D], number of words as in `word_counts`
    document_bytes: np.ndarray  # int64 [D]
    hashes: np.ndarray  # uint64 [D, 2], hash of each normalized document


def cut_words(texts: Sequence[str], table: WordTable, *, lowercase: bool, fold: Fold = Fold.NOTHING) -> CutWords:
    """Cut documents, with one sentence per line and without NUL, into words; `fold` as in `document_hashes`."""
    raw = (END_OF_DOCUMENT.join(texts) + END_OF_DOCUMENT).encode()
    # Lowercasing ASCII first halves the number of distinct words; BertNormalizer changes these bytes in the same way.
    text = raw.translate(_LOWER) if lowercase else raw
    classes = np.frombuffer(text.translate(_CLASSES), np.uint8)
    starts, ends, spaced_starts = _word_bounds(classes, np.frombuffer(text, np.uint8))
    words = table.intern(np.frombuffer(text + bytes(PADDING), np.uint8), starts, ends - starts)

    line_ends = np.flatnonzero((classes == _SENTENCE_END) | (classes == _DOCUMENT_END))
    words_before = np.searchsorted(starts, line_ends)
    filled = np.diff(words_before, prepend=0) > 0
    document_ends = classes[line_ends] == _DOCUMENT_END
    text_ends = line_ends[document_ends]
    return CutWords(
        words=words,
        sentences=np.concatenate([[0], words_before[filled]]),
        documents=np.concatenate([[0], np.cumsum(filled)[document_ends]]),
        document_words=document_words(text, spaced_starts, text_ends),
        document_bytes=np.diff(text_ends, prepend=-1) - 1,
        hashes=document_hashes(raw, len(texts), fold=fold),
    )


def _word_bounds(classes: np.ndarray, text: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the bounds of words, and the starts of words separated by whitespace. The last byte must be a NUL."""
    in_word, is_mark = classes >= _WORD, classes == _PUNCTUATION
    starts, ends, is_non_space = is_mark.copy(), is_mark.copy(), in_word | is_mark
    starts[0] |= in_word[0]
    starts[1:] |= in_word[1:] & ~in_word[:-1]
    ends[:-1] |= in_word[:-1] & ~in_word[1:]
    # Each ideograph (3 bytes) is a separate word, as in google-research/bert tokenization.py, _tokenize_chinese_chars.
    leads = np.flatnonzero(classes == _IDEOGRAPH)
    leads = leads[(text[leads] != 0xE4) | (text[leads + 1] != 0xB7)]  # U+4DC0 to U+4DFF are hexagrams
    starts[leads] = ends[leads + 2] = True
    starts[leads + 3] |= in_word[leads + 3]
    preceding = leads[leads > 0] - 1
    ends[preceding] |= in_word[preceding]
    is_spaced_start = is_non_space.copy()
    is_spaced_start[1:] &= ~is_non_space[:-1]
    return np.flatnonzero(starts), np.flatnonzero(ends) + 1, np.flatnonzero(is_spaced_start)


def document_hashes(raw: bytes, count: int, *, fold: Fold) -> np.ndarray:
    """Return a hash of each document in NFC, uint64 [count, 2]. It ignores whitespace, and differences in `fold`."""
    stripped = raw.translate(_LOWER if Fold.CASE in fold else None, b" \t\r\n")
    if fold and not stripped.isascii():
        stripped = b"".join(_folded_runs(stripped, fold))
    folded = stripped.split(b"\0")[:count]
    if any(prefix in raw for prefix in _DECOMPOSED_PREFIXES):
        folded = [unicodedata.normalize("NFC", text.decode()).encode() for text in folded]
    digests = b"".join(hashlib.blake2b(text, digest_size=16).digest() for text in folded)
    return np.frombuffer(digests, "<u8").reshape(count, 2)


def _folded_runs(raw: bytes, fold: Fold) -> Iterator[bytes]:
    """Yield `raw` in consecutive runs, with characters beyond ASCII folded and composed."""
    indices = np.flatnonzero(np.frombuffer(raw, np.int8) < 0)
    gaps = np.flatnonzero(np.diff(indices) > 1)
    run_starts, run_ends = indices[np.append(0, gaps + 1)], indices[np.append(gaps, -1)] + 1
    copied = 0
    for start, end in zip(run_starts.tolist(), run_ends.tolist(), strict=True):
        yield raw[copied:start]
        text, copied = raw[start:end].decode(), end
        if Fold.ACCENTS in fold:
            text = _accents().sub("", unicodedata.normalize("NFD", text))
        if Fold.CASE in fold:
            text = text.casefold()
        yield unicodedata.normalize("NFC", text).encode()
    yield raw[copied:]


@functools.cache
def _accents() -> re.Pattern[str]:
    """Return a pattern for the accents that BERT's normalizer strips: nonspacing marks."""
    planes = (*range(0x20000), *range(0xE0000, 0xE0200))
    return re.compile("[" + "".join(chr(mark) for mark in planes if unicodedata.category(chr(mark)) == "Mn") + "]+")


class WordTable:
    """Assigns indices 0, 1, 2, ... to distinct words in order of arrival; a word is a string of bytes without NUL."""

    def __init__(self) -> None:
        self._short = KeyTable(1, capacity=_CAPACITY)  # up to 8 bytes: the word is the 64-bit key
        self._middle = KeyTable(2, capacity=_CAPACITY)  # up to 16 bytes
        self._long: dict[bytes, int] = {}
        self._words = np.zeros(1 << 12, "S16")
        self._long_words: dict[int, bytes] = {}
        self.size = 0

    def intern(self, buffer: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the indices of words `buffer[start : start + length]`, int32; 16 bytes must follow the last start."""
        indices = np.empty(len(starts), np.int32)
        uint64_at = np.ndarray((len(buffer) - 7,), "<u8", buffer, strides=(1,))
        short = np.flatnonzero(lengths <= 8)
        short_keys = uint64_at[starts[short]] & _LOW_BYTES[lengths[short]]
        indices[short] = self._lookup(self._short, [short_keys])
        middle = np.flatnonzero((lengths > 8) & (lengths <= 16))
        if middle.size:
            offsets = starts[middle]
            keys = [uint64_at[offsets], uint64_at[offsets + 8] & _LOW_BYTES[lengths[middle] - 8]]
            indices[middle] = self._lookup(self._middle, keys)
        for n in np.flatnonzero(lengths > 16):
            indices[n] = self._intern_long(buffer[starts[n] : starts[n] + lengths[n]].tobytes())
        return indices

    def intern_words(self, words: Sequence[bytes]) -> np.ndarray:
        """Return the indices of `words`, int32."""
        lengths = np.fromiter(map(len, words), np.int64, len(words))
        buffer = np.frombuffer(b"".join(words) + bytes(PADDING), np.uint8)
        return self.intern(buffer, np.cumsum(lengths) - lengths, lengths)

    def words(self, indices: np.ndarray) -> list[bytes]:
        """Return the words with the given indices."""
        words = self._words[indices].tolist()
        if self._long_words:
            words = [self._long_words.get(n, word) for n, word in zip(indices.tolist(), words, strict=True)]
        return words  # pyright: ignore[reportReturnType]

    def padded_words(self, indices: np.ndarray) -> np.ndarray:
        """Return the words with the given indices, padded with zeros, uint8 [words, 16]; longer words are all zero."""
        return self._words[indices].view(np.uint8).reshape(-1, 16)

    def _lookup(self, table: KeyTable, keys: list[np.ndarray]) -> np.ndarray:
        indices, new_keys = table.find_or_insert(keys, self.size)
        added = len(new_keys[0])
        if added:
            self._reserve(added)
            packed = np.zeros((added, 2), "<u8")
            for column, key in enumerate(new_keys):
                packed[:, column] = key
            self._words[self.size : self.size + added] = packed.view("S16")[:, 0]
            self.size += added
        return indices

    def _intern_long(self, word: bytes) -> int:
        index = self._long.setdefault(word, self.size)
        if index == self.size:
            self._reserve(1)
            self._long_words[index] = word
            self.size += 1
        return index

    def _reserve(self, count: int) -> None:
        needed = self.size + count
        if needed > len(self._words):
            self._words = np.concatenate([self._words, np.zeros(max(needed, len(self._words)), "S16")])


class WordTokens:
    """The tokens of every word in a `WordTable`, computed once per word. Subclasses implement `_encode`."""

    def __init__(self, table: WordTable) -> None:
        self._table = table
        self._word_count = self._pool_size = 0  # number of encoded words, and of tokens in the pool
        self._first_tokens = np.zeros(0, np.int32)  # first token of each word, 0 if it has none
        self._counts = np.zeros(0, np.int32)  # number of tokens of each word
        self._offsets = np.zeros(0, np.int32)  # offset of each word's tokens in the pool
        self._pool = np.zeros(0, np.int32)  # tokens of all encoded words

    def tokens(self, words: np.ndarray, sentences: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Return the concatenated tokens of words, and the index of each sentence's first token, int64 [S+1]."""
        self._extend()
        counts = self._counts[words]
        ends = np.zeros(len(words) + 1, np.int64)
        np.cumsum(counts, out=ends[1:])
        # Most words have one token: repeat the first token for all tokens of a word, then correct the others.
        tokens = np.repeat(self._first_tokens[words].astype(dtype), counts)
        multi_token = np.flatnonzero(counts > 1)
        extra = counts[multi_token] - 1
        offsets = np.arange(extra.sum()) - np.repeat(np.cumsum(extra) - extra, extra) + 1
        tokens[np.repeat(ends[multi_token], extra) + offsets] = self._pool[
            np.repeat(self._offsets[words[multi_token]], extra) + offsets
        ]
        return tokens, ends[sentences]

    def _extend(self) -> None:
        """Tokenize the words that were added to the table since the last call."""
        old_count, count = self._word_count, self._table.size
        if old_count == count:
            return
        counts, tokens = self._encode(np.arange(old_count, count))
        starts = np.cumsum(counts) - counts
        first_tokens = np.zeros(count - old_count, np.int32)
        first_tokens[counts > 0] = tokens[starts[counts > 0]]
        self._first_tokens = _append(self._first_tokens, old_count, first_tokens)
        self._counts = _append(self._counts, old_count, counts)
        self._offsets = _append(self._offsets, old_count, self._pool_size + starts)
        self._pool = _append(self._pool, self._pool_size, tokens)
        self._word_count, self._pool_size = count, self._pool_size + len(tokens)

    def _encode(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (number of tokens per word, concatenated tokens) of the words with these indices."""
        raise NotImplementedError


class WordPieces(WordTokens):
    """The tokens of words in a BERT vocabulary."""

    def __init__(self, tokenizer: Tokenizer, table: WordTable) -> None:
        super().__init__(table)
        self._trie = TokenTrie(tokenizer)
        self._library = _LibraryWords(tokenizer)

    def _encode(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (number of tokens per word, concatenated tokens) of the words with these indices.

        Words of printable ASCII are looked up in the trie: BERT's normalizer does not change them, and ASCII marks are
        already separate words. All others, one in nine, are encoded by the library.
        """
        characters = self._table.padded_words(indices)
        is_plain = (characters[:, 0] != 0) & (((characters > 32) & (characters < 127)) | (characters == 0)).all(1)
        in_trie, others = np.flatnonzero(is_plain), np.flatnonzero(~is_plain)
        trie_words, trie_tokens = self._trie.tokenize(characters[in_trie])
        other_words, other_tokens = self._library.tokens(self._table.words(indices[others]))
        words = np.concatenate([in_trie[trie_words], others[other_words]])
        tokens = np.concatenate([trie_tokens, other_tokens])
        return np.bincount(words, minlength=len(indices)), tokens[np.argsort(words, kind="stable")]


class BytePairs(WordTokens):
    """The tokens of pieces, from `pieces.document_pieces`, in a byte-level BPE vocabulary."""

    def __init__(self, tokenizer: Tokenizer, table: WordTable) -> None:
        super().__init__(table)
        self._encoder = byte_level.PieceEncoder(tokenizer)

    def _encode(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts, tokens = self._encoder.encode(self._table.words(indices))
        return counts, tokens


def _append(array: np.ndarray, size: int, new: np.ndarray) -> np.ndarray:
    """Append `new` after the first `size` items of an array, which is doubled when it is full."""
    needed = size + len(new)
    if needed > len(array):
        array = np.concatenate([array[:size], np.zeros(max(needed, 1 << 12), array.dtype)])
    array[size:needed] = new
    return array


class _LibraryWords:
    """Encodes words with the `tokenizers` library, many in one string, which is three times as fast as one by one.

    The separator is "|": it is always a separate token, and BERT's normalizer converts no other character to it.
    """

    _SEPARATOR = "|"
    _WORDS_PER_STRING = 100

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.token_to_id(self._SEPARATOR) is None:
            vocabulary = tokenizer.get_vocab()
            with_separator = {**vocabulary, self._SEPARATOR: len(vocabulary)}
            tokenizer = bert_tokenizer(with_separator, tokenizer.normalizer)  # pyright: ignore[reportArgumentType]
        self._tokenizer = tokenizer
        self._separator_id = tokenizer.token_to_id(self._SEPARATOR)

    def tokens(self, words: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        """Return the word index and the id of each token. Words contain no spaces; ASCII marks are separate words."""
        strings = [b"|".join((*batch, b"")).decode() for batch in _batched(words, self._WORDS_PER_STRING)]
        encoded = self._tokenizer.encode_batch_fast(strings, add_special_tokens=False)
        tokens = np.concatenate([np.zeros(0, np.int32), *(np.array(encoding.ids, np.int32) for encoding in encoded)])
        is_end = tokens == self._separator_id
        return np.cumsum(is_end)[~is_end], tokens[~is_end]


def _batched(items: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    return (items[start : start + size] for start in range(0, len(items), size))

"""Cut documents into pieces for byte-level BPE: GPT-2's splitting into words, vectorized with numpy.

Byte-level BPE encodes each pre-token independently, and `tokenizers` finds pre-tokens with GPT-2's regular expression:

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

A batch is only cut where this expression cuts in any context: before whitespace; between letters, numbers and other
characters (marks); before the last of several spaces. An apostrophe stays with the letters after it, and whitespace
with the next characters. So the pre-tokens of a document are the pre-tokens of its pieces, and the ids of each distinct
piece, which the library computes, can be cached (`tokenize.BytePairs`). Character classes also come from the library.

Line breaks are treated as whitespace, and no space is added.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import pre_tokenizers

from pretrain.corpus.byte_level import bertrain_splitter
from pretrain.corpus.tokenize import END_OF_DOCUMENT, PADDING, WordTable

# Classes of bytes; the order matters: whitespace, separators, and characters of pieces.
_SPACE, _TAB, _OTHER_SPACE, _SENTENCE_END, _DOCUMENT_END = range(5)
LETTER, NUMBER, MARK = range(5, 8)
_TWO, _THREE, _FOUR, _CONTINUATION = range(8, 12)  # first bytes of UTF-8 characters of 2 to 4 bytes, and other bytes
_JOINING = 12  # a mark that is part of a word after a letter
_APOSTROPHE, _LINE_FEED = ord("'"), ord("\n")
_RANGE = 1 << 12  # number of code points that are classified together


@dataclass(frozen=True)
class DocumentPieces:
    """D whole documents with S sentences, cut into P pieces."""

    pieces: np.ndarray  # int32 [P], index of each piece in the process's `WordTable`
    sentences: np.ndarray  # int64 [S+1], index of each sentence's first piece
    documents: np.ndarray  # int64 [D+1], index of each document's first sentence


Bounds = tuple[np.ndarray, np.ndarray]  # byte offsets of the start and end of each piece


def gpt2_bounds(raw: bytes, text: np.ndarray) -> Bounds:
    """Return the bounds of the pieces in GPT-2's splitting."""
    return _bounds(_byte_classes(raw.replace(b"\n", b"\t"), text, _gpt2_classes), text)


def bertrain_bounds(raw: bytes, text: np.ndarray) -> Bounds:
    """Return the bounds of the pieces in bertrain's variant of GPT-2's splitting (`byte_level`)."""
    byte_classes = _byte_classes(raw.replace(b"\n", b"\t"), text, _bertrain_classes)
    joining = byte_classes == _JOINING
    if joining.any():
        base = np.maximum.accumulate(np.where(joining, 0, np.arange(len(byte_classes))))  # last byte that does not join
        byte_classes[joining] = np.where(byte_classes[base[joining]] == LETTER, LETTER, MARK)
    return _bounds(byte_classes, text)


def document_pieces(
    texts: Sequence[str], starts: Sequence[np.ndarray], table: WordTable, bounds: Callable[[bytes, np.ndarray], Bounds]
) -> DocumentPieces:
    """Cut whole documents into pieces; line breaks are treated as whitespace, and no space is added.

    Args:
        texts: documents that are not empty, without NUL.
        starts: character offsets of the sentences of each document, ascending from 0. The start of a sentence within a
            piece is moved to the next piece.
        table: table of the distinct pieces, to which new ones are added.
        bounds: function that finds the pieces in documents, which are passed as bytes and as uint8 array, with a NUL
            before and after each document.
    """
    raw = (END_OF_DOCUMENT + END_OF_DOCUMENT.join(texts) + END_OF_DOCUMENT).encode()
    text = np.frombuffer(raw, np.uint8)
    ends = np.flatnonzero(text == 0)
    piece_starts, piece_ends = bounds(raw, text)
    pieces = table.intern(np.frombuffer(raw + bytes(PADDING), np.uint8), piece_starts, piece_ends - piece_starts)
    sentence_counts = np.fromiter(map(len, starts), np.int64, len(starts))
    text_starts = np.cumsum([1, *(len(document) + 1 for document in texts[:-1])])
    offsets = np.concatenate(starts) + np.repeat(text_starts, sentence_counts)
    if not raw.isascii():
        offsets = np.flatnonzero((text & 0xC0) != 0x80)[offsets]
    sentences = np.searchsorted(piece_starts, offsets)
    # Drop sentences without a piece: the next piece belongs to an earlier sentence or to another document.
    kept = np.flatnonzero(sentences < np.repeat(np.searchsorted(piece_starts, ends[1:]), sentence_counts))
    kept = kept[np.diff(sentences[kept], prepend=-1) > 0]
    documents = np.searchsorted(kept, np.concatenate([[0], np.cumsum(sentence_counts)]))
    return DocumentPieces(pieces, np.append(sentences[kept], len(pieces)), documents)


def _bounds(byte_classes: np.ndarray, text: np.ndarray) -> Bounds:
    """Return the bounds of pieces, from the class of each byte."""
    document_ends = np.flatnonzero(byte_classes == _DOCUMENT_END)
    is_non_space, is_end = byte_classes >= LETTER, np.zeros(len(byte_classes), bool)
    is_end[document_ends] = True
    is_space = ~(is_non_space | is_end)
    starts = np.zeros(len(byte_classes), bool)
    previous, current = slice(None, -1), slice(1, None)
    starts[current] = is_space[current] & is_non_space[previous]
    changes = is_non_space[current] & is_non_space[previous] & (byte_classes[current] != byte_classes[previous])
    changes &= (text[previous] != _APOSTROPHE) | (byte_classes[current] != LETTER)
    starts[current] |= changes
    # The last of several spaces belongs to the next characters; the others are a separate pre-token.
    starts[1:-1] |= (byte_classes[1:-1] == _SPACE) & is_space[:-2] & is_non_space[2:]
    starts[document_ends[:-1] + 1] = ~is_end[document_ends[:-1] + 1]
    bounds = np.flatnonzero(starts | is_end)
    indices = np.flatnonzero(starts[bounds])
    return bounds[indices], bounds[indices + 1]


# ---------------------------------------------------------------- classes


def _ascii_classes() -> bytes:
    classes = bytearray([MARK]) * 256
    for byte in range(128):
        character = chr(byte)
        if character.isalpha():
            classes[byte] = LETTER
        elif character.isdigit():
            classes[byte] = NUMBER
    for byte in b"\x0b\x0c":
        classes[byte] = _OTHER_SPACE
    classes[ord("\t")] = classes[ord("\r")] = _TAB
    classes[ord(" ")], classes[_LINE_FEED], classes[0] = _SPACE, _SENTENCE_END, _DOCUMENT_END
    for first, byte_class in ((0x80, _CONTINUATION), (0xC0, _TWO), (0xE0, _THREE), (0xF0, _FOUR)):
        classes[first:] = bytes([byte_class]) * (256 - first)
    return bytes(classes)


_ASCII = _ascii_classes()


def _byte_classes(raw: bytes, text: np.ndarray, range_classes: Callable[[int], np.ndarray]) -> np.ndarray:
    """Return the class of each byte, uint8; all bytes of a character have the same class."""
    byte_classes = np.frombuffer(bytearray(raw.translate(_ASCII)), np.uint8)
    if raw.isascii():
        return byte_classes
    for lead_class, bits in ((_TWO, 0x1F), (_THREE, 0x0F), (_FOUR, 0x07)):
        leads = np.flatnonzero(byte_classes == lead_class)
        characters = (text[leads] & bits).astype(np.int32)
        trailing_bytes = lead_class - _TWO + 1
        for offset in range(1, trailing_bytes + 1):
            characters = (characters << 6) | (text[leads + offset] & 0x3F)
        new_classes = _classes(characters, range_classes)
        for offset in range(trailing_bytes + 1):
            byte_classes[leads + offset] = new_classes
    return byte_classes


def character_classes(characters: np.ndarray) -> np.ndarray:
    """Return the class of each character in GPT-2's splitting, uint8."""
    return _classes(characters, _gpt2_classes)


def _classes(characters: np.ndarray, range_classes: Callable[[int], np.ndarray]) -> np.ndarray:
    classes = np.zeros(len(characters), np.uint8)
    ranges = characters // _RANGE
    for index in np.flatnonzero(np.bincount(ranges)).tolist():
        chosen = ranges == index
        classes[chosen] = range_classes(index)[characters[chosen] % _RANGE]
    return classes


@functools.cache
def _gpt2_classes(range_index: int) -> np.ndarray:
    """Return the classes of the range of code points with this index, as determined by the library's pre-tokenizer."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    text = "".join(_characters(range_index))
    classes = np.zeros(_RANGE, np.uint8)
    # All characters of a pre-token have the class of the example with which the first one forms a pre-token.
    for _, (start, end) in split(text):
        matches = [example_class for example_class, example in _EXAMPLES if len(split(example + text[start])) == 1]
        classes[start:end] = matches[0] if matches else _OTHER_SPACE
    return classes


@functools.cache
def _bertrain_classes(range_index: int) -> np.ndarray:
    """Like `_gpt2_classes`, for the splitter of `byte_level`: marks that join a preceding letter are `_JOINING`."""
    classes = _gpt2_classes(range_index).copy()
    marks, characters = np.flatnonzero(classes == MARK), _characters(range_index)
    letters = "".join("a" + characters[mark] for mark in marks.tolist())
    starts = [start for _, (start, _) in bertrain_splitter().pre_tokenize_str(letters)]
    classes[np.delete(marks, [start // 2 for start in starts if start % 2])] = _JOINING
    return classes


def _characters(range_index: int) -> list[str]:
    characters = map(chr, range(range_index * _RANGE, (range_index + 1) * _RANGE))
    return ["?" if "\ud800" <= character <= "\udfff" else character for character in characters]


_EXAMPLES = ((LETTER, "a"), (NUMBER, "1"), (MARK, "!"))

"""Converts a vocabulary's entries to bytes, and finds the tokens that start a word.

In byte-level BPE, an entry includes the space before its word ("\u0120word"), as in a Unigram or BPE with a mark for
spaces ("\u2581word": XLM-R, DeBERTa-v3, Gemma). In WordPiece, entries that continue a word have a prefix ("##ing").
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.common import scripts
from pretrain.corpus.pieces import LETTER, character_classes

# Classes of characters, in addition to the ones in `pieces`. A word continues from one token to the next only if the
# characters on both sides have equal classes; _ANY equals all. In scripts without spaces, each letter is a word, so its
# class is _WORD_START as a token's first character, but _WORD_END as the last.
_ANY, _SPACE, _WORD_START, _WORD_END = 0, 255, 254, 253
_PARTIAL = 252  # class of a character that spans several tokens, until it is known
_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # all bytes of a UTF-8 character but the first


def _bytes_of_characters() -> dict[str, int]:
    """Return the inverse of bytes_to_unicode in GPT-2's encoder.py: printable bytes are themselves, others 256 + n."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_of_characters()
_SPACE_MARK, _LINE_BREAK_MARK = "\u2581", "\u010a"  # represent a space and, in a vocab.txt, a line break
_BYTE_ENTRY = re.compile(r"<0x([0-9A-F]{2})>")

EntryDecoder = Callable[[str], bytes]  # function that returns the bytes of an entry, including spaces


def entry_decoder(entries: Sequence[str]) -> EntryDecoder | None:
    """Return the `EntryDecoder` function of a vocabulary with these entries; None for a WordPiece vocabulary."""
    counts = {mark: sum(_is_marked_word(entry, mark) for entry in entries) for mark in (_SPACE_MARK, "\u0120", "##")}
    if counts[_SPACE_MARK] > max(counts["\u0120"], counts["##"]):
        return _marked_bytes
    return entry_bytes if is_byte_vocabulary(entries) else None


def _is_marked_word(entry: str, mark: str) -> bool:
    return entry.startswith(mark) and scripts.WORD.fullmatch(entry, len(mark)) is not None


def is_byte_vocabulary(entries: Sequence[str]) -> bool:
    """Return whether these are entries of a byte-level BPE, not of a WordPiece.

    A byte-level BPE has all 256 bytes as entries, and no "##" followed by ASCII letters, since it always splits between
    punctuation and letters. "##" with other characters may be bytes of punctuation.
    """
    known = set(entries)
    continuations = (entry for entry in entries if entry.startswith("##") and entry.isascii() and entry[2:].isalnum())
    return known.issuperset(_BYTE_OF_CHARACTER) and next(continuations, None) is None


def entry_bytes(entry: str) -> bytes:
    """Return the bytes that an entry of a byte-level BPE stands for; for a special token, the bytes of its name."""
    if any(character not in _BYTE_OF_CHARACTER for character in entry):
        return entry.encode()
    return bytes(_BYTE_OF_CHARACTER[character] for character in entry)


def _marked_bytes(entry: str) -> bytes:
    """Return the bytes of an entry in which a mark stands for a space; <0xE4> stands for the byte E4."""
    if byte := _BYTE_ENTRY.fullmatch(entry):
        return bytes([int(byte[1], 16)])
    if entry.strip(_LINE_BREAK_MARK) == "":
        return b"\n" * len(entry)
    return entry.replace(_SPACE_MARK, " ").encode()


def entry_strings(entries: Sequence[str], decode: EntryDecoder = entry_bytes) -> list[str]:
    """Return the text of each entry in a sequence, with spaces; their concatenation is the decoded text.

    A character whose bytes are in several entries is assigned to the last of them; an invalid one becomes U+FFFD.
    """
    strings, pending = [], b""
    for index, entry in enumerate(entries):
        pending += decode(entry)
        complete = len(pending) if index + 1 == len(entries) else _complete_length(pending)
        strings.append(pending[:complete].decode("utf-8", "replace"))
        pending = pending[complete:]
    return strings


def _complete_length(text: bytes) -> int:
    """Return the length of `text`, in bytes, without an incomplete character at its end."""
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - back if back < needed else len(text)
        if byte < 0x80:
            break
    return len(text)


@dataclass(frozen=True)
class WordBoundaries:
    """Finds the tokens that start a word, from properties of the V entries of the vocabulary.

    A token continues the word of the previous token if its entry may continue a word and, if classes are given, the
    class of its first character equals the class of the previous token's last character.
    """

    continues: np.ndarray  # bool [V], whether the entry may continue a word
    first_class: np.ndarray | None = None  # uint8 [V], class of the entry's first character
    last_class: np.ndarray | None = None  # uint8 [V], class of the entry's last character
    # int64 [4, V], for characters that span several tokens. Rows: number of bytes at the entry's start that continue a
    # character; their value; number of bytes missing from the character at the entry's end; value of its other bytes.
    partial: np.ndarray | None = None

    def word_starts(self, tokens: np.ndarray) -> np.ndarray:
        """Return whether each token of a sequence starts a word, bool [T]."""
        starts = ~self.continues[tokens]
        if self.first_class is not None and self.last_class is not None:
            first, last = self.first_class[tokens], self.last_class[tokens]
            if self.partial is not None:
                _classify_partial(self.partial, tokens, first, last)
            current, previous = first[1:], last[:-1]
            starts[1:] |= (current != previous) & (current != _ANY) & (previous != _ANY)
        return starts


def word_boundaries(
    entries: Sequence[str], decode: EntryDecoder | None, *, is_segmented: bool = False
) -> WordBoundaries:
    """Return the `WordBoundaries` of a vocabulary. A word is roughly a pre-token of GPT-2, with the space before it.

    Unlike in GPT-2, combining marks and joiners belong to the preceding character, and each letter of a script without
    spaces starts a word, like ideographs in BERT. WordPiece has no `decode`; its entries that start with "##" continue
    a word. `is_segmented`: text for this WordPiece is already segmented into words, so that only "##" matters.
    """
    if decode is None:
        continues = np.array([entry.startswith("##") for entry in entries], bool)
        if is_segmented:
            return WordBoundaries(continues)
        first, last = _end_classes([entry.removeprefix("##") for entry in entries])
        for classes in (first, last):  # for other characters, "##" suffices: BERT splits at punctuation
            classes[~np.isin(classes, (_ANY, _WORD_START, _WORD_END))] = LETTER
        return WordBoundaries(continues, first, last)
    spellings = [decode(entry) for entry in entries]
    parts = [_split_partial(spelling) for spelling in spellings]
    first, last = _end_classes([characters for characters, *_ in parts])
    partial = np.array([values for _, *values in parts], np.int64).T
    has_no_character = [not characters for characters, *_ in parts]
    first[has_no_character] = last[has_no_character] = _PARTIAL
    first[partial[0] > 0] = _ANY  # continues a character of the previous token
    if decode is _marked_bytes:  # the indentation of a line is not part of its first word
        last[[len(spelling) > 1 and not spelling.strip(b" ") for spelling in spellings]] = _SPACE
    return WordBoundaries(np.array([not spelling[:1].isspace() for spelling in spellings], bool), first, last, partial)


def _split_partial(text: bytes) -> tuple[str, int, int, int, int]:
    """Return the complete characters of an entry, given as bytes, and its four values in `WordBoundaries.partial`."""
    leading = text[: len(text) - len(text.lstrip(_CONTINUATION_BYTES))]
    end = max(len(leading), _complete_length(text))
    trailing = text[end:]
    missing = 2 + (trailing >= b"\xe0") + (trailing >= b"\xf0") - len(trailing) if trailing else 0
    characters = text[len(leading) : end].decode("utf-8", "replace")
    return characters, len(leading), int.from_bytes(leading[-3:], "big"), missing, int.from_bytes(trailing, "big")


def _classify_partial(partial: np.ndarray, tokens: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
    """Replace _PARTIAL in the classes of the tokens' `first` and `last` characters; invalid characters become LETTER.

    In scripts without spaces, a character that spans several tokens starts a word at its last token if its first token
    also contains another character, which belongs to the previous word.
    """
    leading_sizes, leading_values, missing_sizes, trailing_values = partial
    # For each token that completes such a character: the character's class, and the index of its first token.
    character_class, first_token = np.zeros(len(tokens), np.uint8), np.zeros(len(tokens), np.int64)
    starts = positions = np.flatnonzero(missing_sizes[tokens[:-1]])
    values, missing = trailing_values[tokens[starts]], missing_sizes[tokens[starts]]
    while len(positions):
        positions = positions + 1
        current = tokens[positions]
        sizes = leading_sizes[current]
        values, missing = values << 8 * sizes | leading_values[current], missing - sizes
        first_positions, last_positions = starts[missing == 0], positions[missing == 0]
        distinct, inverse = np.unique(values[missing == 0], return_inverse=True)
        characters = [value.to_bytes(4, "big").lstrip(b"\0").decode("utf-8", "replace") for value in distinct.tolist()]
        new_first, new_last = (classes[inverse] for classes in _end_classes(characters))
        first[first_positions] = np.where(first[first_positions] == _PARTIAL, new_first, first[first_positions])
        last[last_positions] = np.where(last[last_positions] == _PARTIAL, new_last, last[last_positions])
        first_token[last_positions], character_class[last_positions] = first_positions, new_first
        is_incomplete = (missing > 0) & (sizes > 0) & (positions + 1 < len(tokens))
        starts, positions, values, missing = (a[is_incomplete] for a in (starts, positions, values, missing))
    first[(character_class == _WORD_START) & ~np.isin(last[first_token], (_ANY, _SPACE, _PARTIAL))] = _WORD_START
    first[first == _PARTIAL] = last[last == _PARTIAL] = LETTER


def _end_classes(strings: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the classes of the first and last character of each string, uint8; a final mark has its letter's class."""
    firsts = np.array([ord(string[0]) if string else 0 for string in strings], np.int64)
    lasts = np.array([ord(string[-1]) if string else 0 for string in strings], np.int64)
    first, last = _classes(firsts)[0], _classes(lasts)[1]
    bases = np.array([ord((scripts.MARKS_AT_END.sub("", text) or text or "\0")[-1]) for text in strings], np.int64)
    return first, np.where(last == _ANY, last, _classes(bases)[1])


def _classes(code_points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the classes that characters have as the first and as the last character of a token."""
    classes = character_classes(code_points)
    classes[classes < LETTER] = _SPACE
    classes[code_points == ord(" ")] = _ANY
    clipped = np.minimum(code_points, scripts.CODE_POINTS - 1)
    sets = (scripts.UNSPACED_LETTERS, scripts.CONTINUES_UNIT, scripts.JOINS_NEXT, scripts.ACCENTS)
    is_unspaced, continues_unit, joins_next, is_accent = (scripts.code_point_mask(group)[clipped] for group in sets)
    classes[is_accent] = LETTER
    first = np.where(continues_unit, _ANY, np.where(is_unspaced, _WORD_START, classes))
    return first, np.where(joins_next, _ANY, np.where(is_unspaced, _WORD_END, classes))

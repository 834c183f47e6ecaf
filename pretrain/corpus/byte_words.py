"""The bytes of a vocabulary's entries, and which tokens start a word.

Entries contain spaces in byte-level BPE ("\u0120word"), and in a Unigram or BPE with a mark for spaces ("\u2581word"),
as in XLM-R, DeBERTa-v3 or Gemma. WordPiece has no spaces, but marks continuations of a word ("##ing").
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.common import scripts
from pretrain.corpus.pieces import LETTER, character_classes

# Classes of characters, in addition to the ones in `pieces`. In scripts without spaces, each letter is a word: its
# class is _WORD_START at the start of a token, and _WORD_END at the end.
_ANY, _SPACE, _WORD_START, _WORD_END = 0, 255, 254, 253
_PARTIAL = 252  # bytes of an incomplete character, whose class depends on adjacent tokens
_CONTINUATION = bytes(range(0x80, 0xC0))


def _bytes_of_characters() -> dict[str, int]:
    """Invert bytes_to_unicode of openai/gpt-2 encoder.py: printable bytes map to themselves, others to 256 + n."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _bytes_of_characters()
_MARK, _LINE_FEED = "\u2581", "\u010a"  # represent a space, and a line break in a vocab.txt
_BYTE_ENTRY = re.compile(r"<0x([0-9A-F]{2})>")

Spell = Callable[[str], bytes]  # function that returns the bytes of an entry, including spaces


def speller(entries: Sequence[str]) -> Spell | None:
    """Return the `Spell` function of a vocabulary with these entries; None for a WordPiece vocabulary."""
    counts = {mark: sum(_starts_word(entry, mark) for entry in entries) for mark in (_MARK, "\u0120", "##")}
    if counts[_MARK] > max(counts["\u0120"], counts["##"]):
        return _marked_bytes
    return entry_bytes if is_byte_vocabulary(entries) else None


def _starts_word(entry: str, mark: str) -> bool:
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
    if entry.strip(_LINE_FEED) == "":
        return b"\n" * len(entry)
    return entry.replace(_MARK, " ").encode()


def entry_strings(entries: Sequence[str], spell: Spell = entry_bytes) -> list[str]:
    """Return the string of each entry in a sequence, with spaces; their concatenation is the decoded text.

    A character whose bytes are in several entries is assigned to the last of them; an invalid one becomes U+FFFD.
    """
    strings, pending = [], b""
    for index, entry in enumerate(entries):
        pending += spell(entry)
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
class WordEdges:
    """Determines word boundaries between the tokens of a vocabulary with V entries.

    A token continues the word of the previous token if its `continues` (bool [V]) is true and the class of its first
    character (`first_class`, uint8 [V]) equals the class of the previous token's last character (`last_class`, uint8
    [V]). Class 0 matches all classes; without the two, all match. `partial` (int64 [4, V]) describes characters that
    span several entries: the number and the value of the bytes at the start of an entry that continue a character; the
    number of bytes missing from the character at its end, and the value of the bytes that it has.
    """

    continues: np.ndarray
    first_class: np.ndarray | None = None
    last_class: np.ndarray | None = None
    partial: np.ndarray | None = None

    def word_starts(self, tokens: np.ndarray) -> np.ndarray:
        """Return which tokens of a sequence start a word, bool [T]; the sequence is not preceded by other tokens."""
        starts = ~self.continues[tokens]
        if self.first_class is not None and self.last_class is not None:
            first, last = self.first_class[tokens], self.last_class[tokens]
            if self.partial is not None:
                _join_partial(self.partial, tokens, first, last)
            current, previous = first[1:], last[:-1]
            starts[1:] |= (current != previous) & (current > 0) & (previous > 0)
        return starts


def word_edges(entries: Sequence[str], spell: Spell | None, *, is_segmented: bool = False) -> WordEdges:
    """Return the `WordEdges` of a vocabulary: words are approximately GPT-2's pre-tokens, with the space before them.

    Unlike in GPT-2, combining marks and joiners belong to the preceding character. In a WordPiece (without `spell`),
    "##" continues a word. A letter of a script without spaces starts a word, like ideographs in BERT, except in a
    WordPiece for text that is already segmented into words (`is_segmented`).
    """
    if spell is None:
        continues = np.array([entry.startswith("##") for entry in entries], bool)
        if is_segmented:
            return WordEdges(continues)
        first, last = _edge_classes([entry.removeprefix("##") for entry in entries])
        for classes in (first, last):  # punctuation is not part of a word, and has no "##"
            classes[~np.isin(classes, (_ANY, _WORD_START, _WORD_END))] = LETTER
        return WordEdges(continues, first, last)
    spellings = [spell(entry) for entry in entries]
    parts = [_split_partial(spelling) for spelling in spellings]
    first, last = _edge_classes([characters for characters, *_ in parts])
    partial = np.array([values for _, *values in parts], np.int64).T
    first[[not characters for characters, *_ in parts]] = last[[not characters for characters, *_ in parts]] = _PARTIAL
    first[partial[0] > 0] = _ANY
    if spell is _marked_bytes:  # the indentation of a line is not part of its first word
        last[[len(spelling) > 1 and not spelling.strip(b" ") for spelling in spellings]] = _SPACE
    return WordEdges(np.array([not spelling[:1].isspace() for spelling in spellings], bool), first, last, partial)


def _split_partial(text: bytes) -> tuple[str, int, int, int, int]:
    """Return the complete characters of an entry, and its four values in `WordEdges.partial`."""
    leading = text[: len(text) - len(text.lstrip(_CONTINUATION))]
    end = max(len(leading), _complete_length(text))
    trailing = text[end:]
    missing = 2 + (trailing >= b"\xe0") + (trailing >= b"\xf0") - len(trailing) if trailing else 0
    characters = text[len(leading) : end].decode("utf-8", "replace")
    return characters, len(leading), int.from_bytes(leading[-3:], "big"), missing, int.from_bytes(trailing, "big")


def _join_partial(partial: np.ndarray, tokens: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
    """Set the classes of tokens whose first or last character spans several tokens; invalid characters are letters.

    In scripts without spaces, the last token of such a character starts a word if its first token also contains
    another character.
    """
    lead_sizes, leading, missing_bytes, trailing = partial
    character_class, first_token = np.zeros(len(tokens), np.uint8), np.zeros(len(tokens), np.int64)
    starts = positions = np.flatnonzero(missing_bytes[tokens[:-1]])
    values, remaining = trailing[tokens[starts]], missing_bytes[tokens[starts]]
    while len(positions):
        positions = positions + 1
        current = tokens[positions]
        values, remaining = values << 8 * lead_sizes[current] | leading[current], remaining - lead_sizes[current]
        distinct, inverse = np.unique(values[remaining == 0], return_inverse=True)
        characters = [value.to_bytes(4, "big").lstrip(b"\0").decode("utf-8", "replace") for value in distinct.tolist()]
        token_pairs = starts[remaining == 0], positions[remaining == 0]
        new_classes = [classes[inverse] for classes in _edge_classes(characters)]
        for classes, chosen, new_class in zip((first, last), token_pairs, new_classes, strict=True):
            classes[chosen] = np.where(classes[chosen] == _PARTIAL, new_class, classes[chosen])
        first_token[token_pairs[1]], character_class[token_pairs[1]] = token_pairs[0], new_classes[0]
        is_incomplete = (remaining > 0) & (lead_sizes[current] > 0) & (positions + 1 < len(tokens))
        starts, positions, values, remaining = (a[is_incomplete] for a in (starts, positions, values, remaining))
    first[(character_class == _WORD_START) & ~np.isin(last[first_token], (_ANY, _SPACE, _PARTIAL))] = _WORD_START
    first[first == _PARTIAL] = last[last == _PARTIAL] = LETTER


def _edge_classes(strings: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the classes of first and last characters, uint8 [V] each; a trailing mark has the class of its letter."""
    firsts = np.array([ord(string[0]) if string else 0 for string in strings], np.int64)
    lasts = np.array([ord(string[-1]) if string else 0 for string in strings], np.int64)
    first, last = _classes(firsts)[0], _classes(lasts)[1]
    bases = np.array([ord((scripts.MARKS_AT_END.sub("", text) or text or "\0")[-1]) for text in strings], np.int64)
    return first, np.where(last == _ANY, last, _classes(bases)[1])


def _classes(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the classes of characters at the start and at the end of a token; a space matches any class."""
    classes = character_classes(points)
    classes[classes < LETTER] = _SPACE
    classes[points == ord(" ")] = _ANY
    clipped = np.minimum(points, scripts.CODE_POINTS - 1)
    sets = (scripts.UNSPACED_LETTERS, scripts.CONTINUES_UNIT, scripts.JOINS_NEXT, scripts.ACCENTS)
    alone, follows, joins, accents = (scripts.code_point_mask(group)[clipped] for group in sets)
    classes[accents] = LETTER
    first = np.where(follows, _ANY, np.where(alone, _WORD_START, classes))
    return first, np.where(joins, _ANY, np.where(alone, _WORD_END, classes))

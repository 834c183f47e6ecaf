"""The entries of vocabularies that spell blanks, and which of them start a word.

These vocabularies are byte-level BPE ("\u0120word"), and the Unigram and BPE with a mark for blanks ("\u2581word") of
XLM-R, DeBERTa-v3 or Gemma. WordPiece has no blanks, and marks continuations of a word ("##ing").
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.common import scripts
from pretrain.corpus.pieces import LETTER, character_classes

# Further classes. Letters of scripts without blanks get _BEGINS or _ENDS: no letter continues the word of another.
_ANY, _SPACE, _BEGINS, _ENDS = 0, 255, 254, 253
_PARTIAL = 252  # bytes of an incomplete character, whose class depends on neighboring tokens
_CONTINUATION = bytes(range(0x80, 0xC0))


def _bytes_of_characters() -> dict[str, int]:
    """Invert bytes_to_unicode of openai/gpt-2 encoder.py: printable bytes represent themselves, 256 + n the others."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [number for number in range(256) if number not in printable]
    return {chr(n): n for n in printable} | {chr(256 + index): n for index, n in enumerate(others)}


_BYTES = _bytes_of_characters()


_MARK, _LINE_FEED = "\u2581", "\u010a"  # of a blank; of a line break in a vocab.txt
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")

Spell = Callable[[str], bytes]


def speller(entries: Sequence[str]) -> Spell | None:
    """Return the function from an entry to its bytes, blanks included; None for a WordPiece vocabulary."""
    counts = {mark: sum(_begins_word(entry, mark) for entry in entries) for mark in (_MARK, "\u0120", "##")}
    if counts[_MARK] > max(counts["\u0120"], counts["##"]):
        return _marked_bytes
    return entry_bytes if is_byte_vocabulary(entries) else None


def _begins_word(entry: str, mark: str) -> bool:
    return entry.startswith(mark) and scripts.WORD.fullmatch(entry, len(mark)) is not None


def is_byte_vocabulary(entries: Sequence[str]) -> bool:
    """Return whether these are entries of a byte-level BPE and not of a WordPiece.

    Then all 256 bytes are entries, and none is "##" followed by ASCII letters: byte-level BPE always splits between
    marks and letters. Other characters may be the bytes of marks.
    """
    known = set(entries)
    joined = (entry for entry in entries if entry.startswith("##") and entry.isascii() and entry[2:].isalnum())
    return known.issuperset(_BYTES) and next(joined, None) is None


def entry_bytes(entry: str) -> bytes:
    """Return the bytes of an entry of a byte-level BPE; for a special token, the bytes of its name."""
    if any(character not in _BYTES for character in entry):
        return entry.encode()
    return bytes(_BYTES[character] for character in entry)


def _marked_bytes(entry: str) -> bytes:
    """Return the bytes of an entry with a mark for blanks; <0xE4> is the byte E4."""
    if byte := _BYTE.fullmatch(entry):
        return bytes([int(byte[1], 16)])
    if entry.strip(_LINE_FEED) == "":
        return b"\n" * len(entry)
    return entry.replace(_MARK, " ").encode()


def spelled(entries: Sequence[str], spell: Spell = entry_bytes) -> list[str]:
    """Return the characters of each entry of a sentence, with blanks. Joined, they are the sentence.

    A character whose bytes are in several entries is assigned to the last of them; an invalid one is U+FFFD.
    """
    strings, left = [], b""
    for number, entry in enumerate(entries):
        left += spell(entry)
        whole = len(left) if number + 1 == len(entries) else _whole_characters(left)
        strings.append(left[:whole].decode("utf-8", "replace"))
        left = left[whole:]
    return strings


def _whole_characters(text: bytes) -> int:
    """Return the length of `text` without an incomplete character at its end."""
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
    """Word boundaries among the V entries of a vocabulary. A token continues the word of the previous token if

    `continues` bool [V] is true, and its class in `first` uint8 [V] equals the previous token's class in `last` uint8
    [V]; class 0 matches all. Without classes, all match. `partial` int64 [4, V] describes incomplete characters: number
    and value of the bytes that complete one at the start of an entry; for one at its end, missing bytes and value.
    """

    continues: np.ndarray
    first: np.ndarray | None = None
    last: np.ndarray | None = None
    partial: np.ndarray | None = None

    def begins(self, tokens: np.ndarray) -> np.ndarray:
        """bool [T]: which of consecutive tokens start a word; the first one is judged without context."""
        begins = ~self.continues[tokens]
        if self.first is not None and self.last is not None:
            first, last = self.first[tokens], self.last[tokens]
            if self.partial is not None:
                _join(self.partial, tokens, first, last)
            here, before = first[1:], last[:-1]
            begins[1:] |= (here != before) & (here > 0) & (before > 0)
        return begins


def word_edges(entries: Sequence[str], spell: Spell | None, *, is_segmented: bool = False) -> WordEdges:
    """Find the word boundaries of a vocabulary: words are approximately GPT-2's pre-tokens, with the blank before.

    Unlike there, combining marks and joiners belong to the preceding character. In a WordPiece (without `spell`), "##"
    continues a word. A letter of a script without blanks starts a word, as ideographs do in BERT, except in a
    WordPiece for text that is segmented by blanks.
    """
    if spell is None:
        continues = np.array([entry.startswith("##") for entry in entries], bool)
        if is_segmented:
            return WordEdges(continues)
        first, last = _edge_classes([entry.removeprefix("##") for entry in entries])
        for classes in (first, last):  # punctuation is not part of a word, and has no "##"
            classes[~np.isin(classes, (_ANY, _BEGINS, _ENDS))] = LETTER
        return WordEdges(continues, first, last)
    spellings = [spell(entry) for entry in entries]
    cuts = [_cut(spelling) for spelling in spellings]
    first, last = _edge_classes([whole for whole, *_ in cuts])
    partial = np.array([cut for _, *cut in cuts], np.int64).T
    first[[not whole for whole, *_ in cuts]] = last[[not whole for whole, *_ in cuts]] = _PARTIAL
    first[partial[0] > 0] = _ANY
    if spell is _marked_bytes:  # the indentation of a line is not part of its first word
        last[[len(spelling) > 1 and not spelling.strip(b" ") for spelling in spellings]] = _SPACE
    return WordEdges(np.array([not spelling[:1].isspace() for spelling in spellings], bool), first, last, partial)


def _cut(text: bytes) -> tuple[str, int, int, int, int]:
    """Return the complete characters of an entry, and its `partial`."""
    end = text[: len(text) - len(text.lstrip(_CONTINUATION))]
    stop = max(len(end), _whole_characters(text))
    begin = text[stop:]
    lacks = 2 + (begin >= b"\xe0") + (begin >= b"\xf0") - len(begin) if begin else 0
    whole = text[len(end) : stop].decode("utf-8", "replace")
    return whole, len(end), int.from_bytes(end[-3:], "big"), lacks, int.from_bytes(begin, "big")


def _join(partial: np.ndarray, tokens: np.ndarray, first: np.ndarray, last: np.ndarray) -> None:
    """Set the classes of tokens whose first or last character spans several tokens; an invalid one counts as a letter.

    In scripts without blanks, such a character starts a word at its last token if its first token has another before.
    """
    ends, end, lacks, begin = partial
    inner, before = np.zeros(len(tokens), np.uint8), np.zeros(len(tokens), np.int64)
    begun = at = np.flatnonzero(lacks[tokens[:-1]])
    spelled, left = begin[tokens[begun]], lacks[tokens[begun]]
    while len(at):
        at = at + 1
        here = tokens[at]
        spelled, left = spelled << 8 * ends[here] | end[here], left - ends[here]
        distinct, which = np.unique(spelled[left == 0], return_inverse=True)
        characters = [one.to_bytes(4, "big").lstrip(b"\0").decode("utf-8", "replace") for one in distinct.tolist()]
        edges = begun[left == 0], at[left == 0]
        found = [classes[which] for classes in _edge_classes(characters)]
        for classes, chosen, edge in zip((first, last), edges, found, strict=True):
            classes[chosen] = np.where(classes[chosen] == _PARTIAL, edge, classes[chosen])
        before[edges[1]], inner[edges[1]] = edges[0], found[0]
        is_incomplete = (left > 0) & (ends[here] > 0) & (at + 1 < len(tokens))
        begun, at, spelled, left = (one[is_incomplete] for one in (begun, at, spelled, left))
    first[(inner == _BEGINS) & ~np.isin(last[before], (_ANY, _SPACE, _PARTIAL))] = _BEGINS
    first[first == _PARTIAL] = last[last == _PARTIAL] = LETTER


def _edge_classes(strings: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [V] each: the classes of first and last characters; final marks have the class of their base character."""
    firsts = np.array([ord(one[0]) if one else 0 for one in strings], np.int64)
    lasts = np.array([ord(one[-1]) if one else 0 for one in strings], np.int64)
    first, last = _classes(firsts)[0], _classes(lasts)[1]
    bases = np.array([ord((scripts.MARKS_AT_END.sub("", one) or one or "\0")[-1]) for one in strings], np.int64)
    return first, np.where(last == _ANY, last, _classes(bases)[1])


def _classes(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the classes of characters at the start and at the end of a token; a blank joins the next character."""
    classes = character_classes(points)
    classes[classes < LETTER] = _SPACE
    classes[points == ord(" ")] = _ANY
    inside = np.minimum(points, scripts.PLANES - 1)
    sets = (scripts.ALONE, scripts.FOLLOWS, scripts.JOINS, scripts.ACCENTS)
    alone, follows, joins, accents = (scripts.members(one)[inside] for one in sets)
    classes[accents] = LETTER
    first = np.where(follows, _ANY, np.where(alone, _BEGINS, classes))
    return first, np.where(joins, _ANY, np.where(alone, _ENDS, classes))

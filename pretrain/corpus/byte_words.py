"""The entries of vocabularies that spell the blanks of a text, and which of them begin a word.

Those are byte-level BPE ("\u0120word"), and the Unigram and BPE with a mark for blanks ("\u2581word") of XLM-R,
DeBERTa-v3 or Gemma. WordPiece has no blanks, and marks what continues a word ("##ing").
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.corpus.byte_columns import LETTER, MARK, NUMBER, character_classes

# Classes besides those of characters. Those of ideographs differ, so that none continues the word of another.
_ANY, _SPACE, _BEGINS_WITH_IDEOGRAPH, _ENDS_WITH_IDEOGRAPH = 0, 255, 254, 253
_IDEOGRAPHS = range(0xE4, 0xEA)  # first bytes of U+4000 to U+9FFF in UTF-8


def _bytes_of_characters() -> dict[str, int]:
    """openai/gpt-2 encoder.py, bytes_to_unicode, inverted: printable bytes stand for themselves, 256 + n for others."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [number for number in range(256) if number not in printable]
    return {chr(n): n for n in printable} | {chr(256 + place): n for place, n in enumerate(others)}


_BYTES = _bytes_of_characters()


_MARK, _LINE_FEED = "\u2581", "\u010a"  # of a blank; of a line break in a vocab.txt
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")

Spell = Callable[[str], bytes]


def speller(entries: Sequence[str]) -> Spell | None:
    """What gives the bytes that an entry spells, its blanks included; None for a WordPiece vocabulary."""
    counts = {mark: sum(_begins_word(entry, mark) for entry in entries) for mark in (_MARK, "\u0120", "##")}
    if counts[_MARK] > max(counts["\u0120"], counts["##"]):
        return _marked_bytes
    return entry_bytes if is_byte_vocabulary(entries) else None


def _begins_word(entry: str, mark: str) -> bool:
    return entry.startswith(mark) and entry[len(mark) :].isalpha()


def is_byte_vocabulary(entries: Sequence[str]) -> bool:
    """Whether these are entries of a byte-level BPE and not of a WordPiece.

    All 256 bytes are entries, and none is "##" and ASCII letters: the divisions of byte-level BPE keep two marks and
    letters apart. Other characters may be the bytes of marks.
    """
    known = set(entries)
    joined = (entry for entry in entries if entry.startswith("##") and entry.isascii() and entry[2:].isalnum())
    return known.issuperset(_BYTES) and next(joined, None) is None


def entry_bytes(entry: str) -> bytes:
    """What an entry of a byte-level BPE spells; a special token, which has characters for no byte, spells its name."""
    if any(character not in _BYTES for character in entry):
        return entry.encode()
    return bytes(_BYTES[character] for character in entry)


def _marked_bytes(entry: str) -> bytes:
    """What an entry with a mark for blanks spells; <0xE4> is the byte E4."""
    if byte := _BYTE.fullmatch(entry):
        return bytes([int(byte[1], 16)])
    if entry.strip(_LINE_FEED) == "":
        return b"\n" * len(entry)
    return entry.replace(_MARK, " ").encode()


def spelled(entries: Sequence[str], spell: Spell = entry_bytes) -> list[str]:
    """The text of each entry of a sentence, with its blanks. Joined, they are the sentence.

    A character whose bytes are in several entries stands in the last of them; a broken one is U+FFFD.
    """
    texts, left = [], b""
    for number, entry in enumerate(entries):
        left += spell(entry)
        whole = len(left) if number + 1 == len(entries) else _whole_characters(left)
        texts.append(left[:whole].decode("utf-8", "replace"))
        left = left[whole:]
    return texts


def _whole_characters(text: bytes) -> int:
    """How many bytes of `text` are not the beginning of a character whose other bytes may follow."""
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
    """Where words begin among the V entries of a vocabulary. A token continues the word of the one before it if

    continues bool [V] is true for it, and its class first uint8 [V] is the class last uint8 [V] of the one before; 0
    fits all.
    """

    continues: np.ndarray
    first: np.ndarray
    last: np.ndarray


def word_edges(entries: Sequence[str], spell: Spell) -> WordEdges:
    """Words are GPT-2's pre-tokens, as far as single tokens tell: letters, numbers or marks, with the blank before.

    Each ideograph begins a word, as in BERT. Part of a character counts as a letter.
    """
    spelled = [spell(entry) for entry in entries]
    first = np.array([_class_of(text, 0) for text in spelled], np.uint8)
    last = np.array([_class_of(text, -1) for text in spelled], np.uint8)
    if spell is _marked_bytes:  # the indentation of a line is no part of its first word
        last[[len(text) > 1 and not text.strip(b" ") for text in spelled]] = _SPACE
    begins = np.array([text[:1].isspace() for text in spelled], bool)
    return WordEdges(~begins, first, last)


def _class_of(text: bytes, place: int) -> int:
    """The class of the first (0) or last (-1) character; that of a letter if not all of its bytes are there.

    A blank has the class of what follows, with which it is one pre-token.
    """
    if place == 0 and text and text[0] in _IDEOGRAPHS:
        return _BEGINS_WITH_IDEOGRAPH
    decoded = text.decode("utf-8", "replace")
    character = decoded[place] if decoded else "\ufffd"
    if character == " ":
        return _ANY
    if character == "\ufffd":
        return LETTER
    if "\u4000" <= character <= "\u9fff":
        return _ENDS_WITH_IDEOGRAPH
    kind = int(character_classes(np.array([ord(character)]))[0])
    return kind if kind in (LETTER, NUMBER, MARK) else _SPACE

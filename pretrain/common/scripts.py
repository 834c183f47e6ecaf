"""What Unicode says about the characters of all scripts: kinds of characters, words, and a form to compare texts in.

Sources: Unicode's properties as the `regex` package has them; Unicode Standard Annex 14, Line Breaking, of which class
SA, AK and AS are letters of scripts without blanks between words, and class ID is ideographs. Tibetan marks the ends of
syllables, not of words, and its letters have another class, so it is named here.
"""

import functools
import unicodedata

import numpy as np
import regex

# Kinds of characters. A mark belongs to the letter before it; digits count as letters. Those from TIBETAN on are of
# scripts without blanks between words; COMPLEX: Thai, Lao, Khmer, Burmese, Javanese and others.
OTHER, MARK, LETTER, TIBETAN, IDEOGRAPH, KANA, COMPLEX = range(7)

_UNDRAWN = r"[\p{Default_Ignorable_Code_Point}--\u200b]"  # what a font may not draw; ZERO WIDTH SPACE parts words
_PATTERNS = {  # later ones prevail
    LETTER: r"\p{L}\p{N}",
    TIBETAN: r"[\p{Script=Tibetan}&&[\p{L}\p{N}]]",
    IDEOGRAPH: r"[\p{Script=Han}&&[\p{L}\p{N}]][\p{Line_Break=ID}&&\p{L}]",
    KANA: r"[[\p{Script_Extensions=Hiragana}\p{Script_Extensions=Katakana}]&&\p{L}--\p{Script=Han}]",
    COMPLEX: r"[[\p{Line_Break=SA}\p{Line_Break=AK}\p{Line_Break=AS}]&&\p{L}]",
    MARK: r"\p{M}" + _UNDRAWN,  # joiners, too, stand within words
}
# What is a word, or a part of one, by itself: letters where no blanks tell, with their marks. Tibetan's are syllables.
ALONE = "".join(_PATTERNS[kind] for kind in (IDEOGRAPH, KANA, COMPLEX)) + r"[\p{Line_Break=SA}&&\p{M}]"
# What begins none: also vowels that stand after their consonant, small kana, and signs that repeat (Annex 14, CJ, NS)
FOLLOWS = _PATTERNS[MARK] + (
    r"[\p{L}&&[[\p{InSC=Vowel_Dependent}--\p{InPC=Visual_Order_Left}]\p{Line_Break=CJ}\p{Line_Break=NS}]]"
    r"[\p{Lm}&&\p{Line_Break=SA}]"
)
# After what the next letter belongs to the same one: vowels that stand before their consonant, and signs that join.
JOINS = r"[\p{L}&&\p{InPC=Visual_Order_Left}]\p{InSC=Invisible_Stacker}\u00ad\u200c\u200d"
ACCENTS = r"[\p{M}--\p{Default_Ignorable_Code_Point}]"
PLANES = 0x40000  # code points of the planes that have letters
_IGNORED = regex.compile(f"(?V1){_UNDRAWN}+")
BEGINS_UNIT = regex.compile(f"(?V1)(?![{FOLLOWS}])[{ALONE}]")
FOLLOWING = regex.compile(f"(?V1)[{FOLLOWS}]")
CLUSTER = regex.compile(f"(?V1)(?s:.)(?:[{FOLLOWS}]|(?<=[{JOINS}])(?s:.))*")  # a letter and what belongs to it
MARKS_AT_END = regex.compile(f"(?V1)[{_PATTERNS[MARK]}]+$")
# What `comparable` may change. The others neither decompose nor compose with what stands before them (Annex 15, 9).
_CHANGING = rf"\p{{NFKC_QC=No}}\p{{NFKC_QC=Maybe}}{_UNDRAWN}[^\p{{CCC=0}}]"

WORD = regex.compile(r"(?V1)[\p{L}\p{N}_][\p{L}\p{M}\p{N}_\u200c\u200d]*")


@functools.cache
def members(pattern: str) -> np.ndarray:
    """bool [0x40000]: the characters that a set matches; read only."""
    points = np.arange(PLANES, dtype="<u4")
    points[0xD800:0xE000] = 0  # surrogates are no characters
    found = np.zeros(PLANES, bool)
    for run in regex.finditer(f"(?V1)[{pattern}]+", points.tobytes().decode("utf-32-le")):
        found[run.start() : run.end()] = True
    found.flags.writeable = False
    return found


@functools.cache
def kinds() -> np.ndarray:
    """uint8 [0x40000]: the kind of each character of the planes that have letters; read only."""
    kinds = np.full(PLANES, OTHER, np.uint8)
    for kind, pattern in _PATTERNS.items():
        kinds[members(pattern)] = kind
    kinds.flags.writeable = False
    return kinds


def kind_of(character: str) -> int:
    """The kind of one character."""
    return int(kinds()[ord(character)]) if ord(character) < PLANES else OTHER


def comparable(text: str) -> str:
    """A text as it is compared with others: composed (NFKC), without characters that a font may not draw."""
    if text.isascii():
        return text
    return unicodedata.normalize("NFKC", _IGNORED.sub("", text))


def changing() -> np.ndarray:
    """bool [0x40000]: the characters without which a text has the words of its comparable form.

    Those that are part of no word in either form, such as a no-break space, are not among them.
    """
    found = members(_CHANGING).copy()
    for point in np.flatnonzero(found).tolist():
        one = chr(point)
        found[point] = kind_of(one) != OTHER or any(kind_of(each) >= LETTER for each in comparable(one))
    return found

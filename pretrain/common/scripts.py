"""Unicode properties of all scripts: kinds of characters, words, and a normalized form for comparing strings.

Sources: Unicode's properties as the `regex` package has them; Unicode Standard Annex 14, Line Breaking, in which the
classes SA, AK and AS are letters of scripts without spaces between words, and ID is ideographs. Tibetan is separate: it
marks the end of syllables, not of words, and its letters have another class.
"""

import functools
import unicodedata

import numpy as np
import regex

# Kinds of characters. A mark belongs to the letter before it; digits are LETTER, too. TIBETAN and later kinds are
# scripts without spaces between words; COMPLEX: Thai, Lao, Khmer, Burmese, Javanese and others.
OTHER, MARK, LETTER, TIBETAN, IDEOGRAPH, KANA, COMPLEX = range(7)

_INVISIBLE = r"[\p{Default_Ignorable_Code_Point}--\u200b]"  # may be invisible; ZERO WIDTH SPACE separates words
_PATTERNS = {  # later entries take precedence
    LETTER: r"\p{L}\p{N}",
    TIBETAN: r"[\p{Script=Tibetan}&&[\p{L}\p{N}]]",
    IDEOGRAPH: r"[\p{Script=Han}&&[\p{L}\p{N}]][\p{Line_Break=ID}&&\p{L}]",
    KANA: r"[[\p{Script_Extensions=Hiragana}\p{Script_Extensions=Katakana}]&&\p{L}--\p{Script=Han}]",
    COMPLEX: r"[[\p{Line_Break=SA}\p{Line_Break=AK}\p{Line_Break=AS}]&&\p{L}]",
    MARK: r"\p{M}" + _INVISIBLE,  # joiners, too, occur within words
}
# Letters and marks of scripts without spaces: each letter is treated as a unit. Not Tibetan, which marks syllables.
ALONE = "".join(_PATTERNS[kind] for kind in (IDEOGRAPH, KANA, COMPLEX)) + r"[\p{Line_Break=SA}&&\p{M}]"
# Characters that cannot start a unit: marks, vowels after their consonant, small kana, repeat signs (Annex 14, CJ, NS)
FOLLOWS = _PATTERNS[MARK] + (
    r"[\p{L}&&[[\p{InSC=Vowel_Dependent}--\p{InPC=Visual_Order_Left}]\p{Line_Break=CJ}\p{Line_Break=NS}]]"
    r"[\p{Lm}&&\p{Line_Break=SA}]"
)
# Characters that attach to the next letter: vowels written before their consonant, and joining signs.
JOINS = r"[\p{L}&&\p{InPC=Visual_Order_Left}]\p{InSC=Invisible_Stacker}\u00ad\u200c\u200d"
ACCENTS = r"[\p{M}--\p{Default_Ignorable_Code_Point}]\u180b-\u180f"  # Mongolian ones occur within words
PLANES = 0x40000  # number of code points in the planes that have letters
_IGNORED = regex.compile(f"(?V1){_INVISIBLE}+")
STARTS_UNIT = regex.compile(f"(?V1)(?![{FOLLOWS}])[{ALONE}]")
FOLLOWING = regex.compile(f"(?V1)[{FOLLOWS}]")
CLUSTER = regex.compile(f"(?V1)(?s:.)(?:[{FOLLOWS}]|(?<=[{JOINS}])(?s:.))*")  # a letter and characters attached to it
MARKS_AT_END = regex.compile(f"(?V1)[{_PATTERNS[MARK]}]+$")
# Characters that `comparable` may change. Others neither decompose nor compose with preceding ones (Annex 15, 9).
_CHANGING = rf"\p{{NFKC_QC=No}}\p{{NFKC_QC=Maybe}}{_INVISIBLE}[^\p{{CCC=0}}]"

WORD = regex.compile(r"(?V1)[\p{L}\p{N}_][\p{L}\p{M}\p{N}_\u200c\u200d]*")


@functools.cache
def members(pattern: str) -> np.ndarray:
    """Return a read-only mask, bool [0x40000], of the code points that the character set `pattern` matches."""
    found = np.zeros(PLANES, bool)
    for run in regex.finditer(f"(?V1)[{pattern}]+", _characters()):
        found[run.start() : run.end()] = True
    found.flags.writeable = False
    return found


@functools.cache
def _characters() -> str:
    points = np.arange(PLANES, dtype="<u4")
    points[0xD800:0xE000] = 0  # surrogates are not characters
    return points.tobytes().decode("utf-32-le")


@functools.cache
def kinds() -> np.ndarray:
    """Return the kind of each code point in the planes that have letters: uint8 [0x40000], read-only."""
    kinds = np.full(PLANES, OTHER, np.uint8)
    for kind, pattern in _PATTERNS.items():
        kinds[members(pattern)] = kind
    kinds.flags.writeable = False
    return kinds


def kind_of(character: str) -> int:
    """Return the kind of a character."""
    return int(kinds()[ord(character)]) if ord(character) < PLANES else OTHER


def comparable(text: str) -> str:
    """Normalize a string for comparison: NFKC, without characters that may be invisible."""
    if text.isascii():
        return text
    return unicodedata.normalize("NFKC", _IGNORED.sub("", text))


def changing() -> np.ndarray:
    """Return a mask, bool [0x40000], of the code points that `comparable` may change in a word.

    Characters that belong to a word in neither form, such as a no-break space, are excluded.
    """
    found = members(_CHANGING).copy()
    for point in np.flatnonzero(found).tolist():
        character = chr(point)
        found[point] = kind_of(character) != OTHER or any(kind_of(c) >= LETTER for c in comparable(character))
    return found

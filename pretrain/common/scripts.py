"""Unicode properties of all scripts: kinds of characters, words, and a normalized form for comparing strings.

Sources: the Unicode properties in the `regex` package; Unicode Standard Annex 14, Line Breaking, whose classes SA, AK
and AS contain the letters of scripts without spaces between words, and whose class ID contains ideographs. Tibetan is a
separate kind: it marks the end of syllables, not of words, and its letters have another class.
"""

import functools
import unicodedata

import numpy as np
import regex

# Kinds of characters. A mark belongs to the letter before it. Digits are LETTER, too. TIBETAN and the later kinds are
# letters of scripts without spaces between words. COMPLEX is Thai, Lao, Khmer, Burmese, Javanese and others.
OTHER, MARK, LETTER, TIBETAN, IDEOGRAPH, KANA, COMPLEX = range(7)

_INVISIBLE = r"[\p{Default_Ignorable_Code_Point}--\u200b]"  # may be invisible; ZERO WIDTH SPACE separates words
_PATTERNS = {  # kind -> character set; later entries take precedence
    LETTER: r"\p{L}\p{N}",
    TIBETAN: r"[\p{Script=Tibetan}&&[\p{L}\p{N}]]",
    IDEOGRAPH: r"[\p{Script=Han}&&[\p{L}\p{N}]][\p{Line_Break=ID}&&\p{L}]",
    KANA: r"[[\p{Script_Extensions=Hiragana}\p{Script_Extensions=Katakana}]&&\p{L}--\p{Script=Han}]",
    COMPLEX: r"[[\p{Line_Break=SA}\p{Line_Break=AK}\p{Line_Break=AS}]&&\p{L}]",
    MARK: r"\p{M}" + _INVISIBLE,  # invisible characters, such as joiners, also occur within words
}
# Letters of scripts without spaces, each of which is treated as a unit, and their marks. Excludes Tibetan.
UNSPACED_LETTERS = "".join(_PATTERNS[kind] for kind in (IDEOGRAPH, KANA, COMPLEX)) + r"[\p{Line_Break=SA}&&\p{M}]"
# Characters that cannot start a unit: marks, vowels after their consonant, small kana, repeat signs (Annex 14, CJ, NS)
CONTINUES_UNIT = _PATTERNS[MARK] + (
    r"[\p{L}&&[[\p{InSC=Vowel_Dependent}--\p{InPC=Visual_Order_Left}]\p{Line_Break=CJ}\p{Line_Break=NS}]]"
    r"[\p{Lm}&&\p{Line_Break=SA}]"
)
# Characters that attach to the next letter: vowels written before their consonant, and joining signs.
JOINS_NEXT = r"[\p{L}&&\p{InPC=Visual_Order_Left}]\p{InSC=Invisible_Stacker}\u00ad\u200c\u200d"
ACCENTS = r"[\p{M}--\p{Default_Ignorable_Code_Point}]\u180b-\u180f"  # and Mongolian marks within words
CODE_POINTS = 0x40000  # number of code points in the planes that contain letters
_IGNORED = regex.compile(f"(?V1){_INVISIBLE}+")
STARTS_UNIT = regex.compile(f"(?V1)(?![{CONTINUES_UNIT}])[{UNSPACED_LETTERS}]")
CONTINUATION = regex.compile(f"(?V1)[{CONTINUES_UNIT}]")
# A letter and the characters attached to it.
CLUSTER = regex.compile(f"(?V1)(?s:.)(?:[{CONTINUES_UNIT}]|(?<=[{JOINS_NEXT}])(?s:.))*")
MARKS_AT_END = regex.compile(f"(?V1)[{_PATTERNS[MARK]}]+$")
# Characters that `normalize` may change; all others neither decompose nor compose with preceding ones (Annex 15, 9).
_CHANGEABLE = rf"\p{{NFKC_QC=No}}\p{{NFKC_QC=Maybe}}{_INVISIBLE}[^\p{{CCC=0}}]"

WORD = regex.compile(r"(?V1)[\p{L}\p{N}_][\p{L}\p{M}\p{N}_\u200c\u200d]*")


@functools.cache
def code_point_mask(pattern: str) -> np.ndarray:
    """Return a read-only mask of the code points that the character set `pattern` matches, bool [0x40000]."""
    mask = np.zeros(CODE_POINTS, bool)
    for match in regex.finditer(f"(?V1)[{pattern}]+", _characters()):
        mask[match.start() : match.end()] = True
    mask.flags.writeable = False
    return mask


@functools.cache
def _characters() -> str:
    points = np.arange(CODE_POINTS, dtype="<u4")
    points[0xD800:0xE000] = 0  # surrogates are not characters
    return points.tobytes().decode("utf-32-le")


@functools.cache
def kinds() -> np.ndarray:
    """Return the kind of each code point in the planes that have letters: uint8 [0x40000], read-only."""
    kinds = np.full(CODE_POINTS, OTHER, np.uint8)
    for kind, pattern in _PATTERNS.items():
        kinds[code_point_mask(pattern)] = kind
    kinds.flags.writeable = False
    return kinds


def kind_of(character: str) -> int:
    """Return the kind of a character."""
    return int(kinds()[ord(character)]) if ord(character) < CODE_POINTS else OTHER


def normalize(text: str) -> str:
    """Normalize a string for comparison: convert it to NFKC, without characters that may be invisible."""
    if text.isascii():
        return text
    return unicodedata.normalize("NFKC", _IGNORED.sub("", text))


def changeable_mask() -> np.ndarray:
    """Return a mask of the code points that `normalize` may change in a word, bool [0x40000].

    Characters that belong to a word neither before nor after the change, such as a no-break space, are excluded.
    """
    mask = code_point_mask(_CHANGEABLE).copy()
    for point in np.flatnonzero(mask).tolist():
        character = chr(point)
        mask[point] = kind_of(character) != OTHER or any(kind_of(c) >= LETTER for c in normalize(character))
    return mask

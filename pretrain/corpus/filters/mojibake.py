"""Mojibake: text that was decoded with another encoding than it was written in, such as `cafÃ©`; ftfy repairs it.

Only lines that ftfy's own test finds broken are given to it, and only the encoding is repaired: quotes, ligatures and
entities stay as they are.
"""

import re
from collections.abc import Sequence

from pretrain.corpus.filters.report import Report, excerpt

# What UTF-8 writes as several bytes, another encoding reads as that many characters, none of them ASCII; only a
# no-break space may have become a blank. A search for this is 30 times as fast as ftfy's test. It begins with one
# set of characters, which `re` skips to.
_MAY_BE_BROKEN = re.compile(r"[^\0-\x7f](?:[^\0-\x7f]|(?<=[ÂÃâàĂ]) )")


def repaired(texts: Sequence[str], report: Report) -> list[str]:
    """`texts` with their broken lines repaired; those that change go to `report`."""
    return [text if text.isascii() else _repaired(text, report) for text in texts]


def _repaired(text: str, report: Report) -> str:
    pieces: list[str] = []
    done = place = 0
    while match := _MAY_BE_BROKEN.search(text, place):
        start = text.rfind("\n", place, match.start()) + 1 or place
        end = text.find("\n", match.end())
        place = end = len(text) if end < 0 else end
        line = text[start:end]
        better = _repaired_line(line)
        if better != line:
            if not pieces:
                report.add("mojibake", "repaired", line, excerpt(better), is_dropped=False)
            pieces += (text[done:start], better)
            done = end
    return "".join([*pieces, text[done:]])


def _repaired_line(line: str) -> str:
    import ftfy
    from ftfy.badness import is_bad

    if not is_bad(line):
        return line
    better = ftfy.fix_encoding(line)
    # A repair may bring to light what a line cannot have: a NUL, half a surrogate pair, line ends.
    plain = better.replace("\0", "").encode("utf-8", "replace").decode()
    return line if better == line else " ".join(plain.splitlines())

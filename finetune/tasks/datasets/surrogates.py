r"""Half surrogate pairs, which JSON can hold ("\ud83d") and no encoding can write."""

import json
import re
from typing import Any

from pretrain.common.errors import InputError

_SURROGATES = re.compile("[\ud800-\udfff]")


def replaced(text: str) -> str:
    """Replace half surrogate pairs in `text` by replacement characters. The length stays the same."""
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", text)


def utf16_places(text: str) -> list[int]:
    """Return the index in `text` of each of its UTF-16 units, and finally its length."""
    places = [place for place, one in enumerate(text) for _ in range(1 + (one > "\uffff"))]
    return [*places, len(text)]


def check_whole(text: str, name: str, where: str) -> None:
    """Raise `InputError` if `text` has half of a surrogate pair."""
    if text.isascii():
        return
    if half := _SURROGATES.search(text):
        raise InputError(
            f"{where}: {name} has half of a surrogate pair at character {half.start()} (\\u{ord(half[0]):x}). "
            "Write the whole character."
        )


def check_id(value: Any, where: str) -> None:
    """Apply `check_whole` to a record's id, which may be any JSON."""
    if isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, str):
        check_whole(value, "the id", where)

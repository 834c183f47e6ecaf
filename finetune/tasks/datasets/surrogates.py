r"""Lone surrogates: halves of surrogate pairs, which JSON can contain ("\ud83d") but UTF-8 cannot encode."""

import json
import re
from typing import Any

from pretrain.common.errors import InputError

_SURROGATES = re.compile("[\ud800-\udfff]")


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates in `text` by replacement characters. The length stays the same."""
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", text)


def utf16_indices(text: str) -> list[int]:
    """Return, for each UTF-16 unit of `text`, the index of its character; finally the length of `text`."""
    indices = [index for index, character in enumerate(text) for _ in range(1 + (character > "\uffff"))]
    return [*indices, len(text)]


def check_surrogates(text: str, name: str, where: str) -> None:
    """Raise `InputError` if `text` has a lone surrogate."""
    if text.isascii():
        return
    if match := _SURROGATES.search(text):
        raise InputError(
            f"{where}: {name} has half of a surrogate pair at character {match.start()} (\\u{ord(match[0]):x}). "
            "Write the whole character."
        )


def check_id(value: Any, where: str) -> None:
    """Apply `check_surrogates` to a record's id, which may be any JSON value."""
    if isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, str):
        check_surrogates(value, "the id", where)

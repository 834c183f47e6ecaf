"""Recognizes settings that hold a secret by their names, in the usual spellings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str | int, ...]

_NAME = re.compile(
    r"(?:token|secret|password|passwd|passphrase|pwd|credential|authorization)s?$"
    r"|(?:api|access|private|ssh)key$|(?:^|[^a-z])(?:key|auth|pass)$"
)
# NAME=VALUE and "Name: value", as in environment variables, HTTP headers, shell commands and options; not a number.
_ASSIGNMENT = re.compile(r"\s*(?:export\s+|--?)?([A-Za-z][\w.-]*)\s*[=:]\s*(?!\d+\s*$)\S")
# A bearer's token, and a URL with a password, or with http a user alone, which may be a token.
_IN_TEXT = re.compile(r"^\s*bearer\s+\S+\s*$|://[^/\s:@]*:[^/\s@]+@|\bhttps?://[^/\s?#@]+@", re.IGNORECASE)


def secret_paths(value: Any, path: Path = (), *, named: bool = False) -> Iterator[Path]:
    """Paths of the secrets below `value`, which consists of mappings, lists, text and numbers.

    A secret is: text below a name that denotes one (`named`); text such as `API_KEY=x`, `Authorization: x` or
    `Bearer x`; the `value` next to such a `name`; a URL with a password.
    """
    if isinstance(value, Mapping):
        besides = is_secret_name(str(value.get("name", "")))
        for name, item in value.items():
            inner = named or is_secret_name(str(name)) or (besides and name == "value")
            yield from secret_paths(item, (*path, str(name)), named=inner)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from secret_paths(item, (*path, number), named=named)
    elif isinstance(value, str) and value and (named or _is_secret_text(value)):
        yield path


def is_secret_name(name: str) -> bool:
    """Whether the name denotes a secret: api_key, apiKey, API-KEY, apikey and the like."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name)
    return _NAME.search(words.lower().rstrip("0123456789_")) is not None


def _is_secret_text(text: str) -> bool:
    assignment = _ASSIGNMENT.match(text)
    return _IN_TEXT.search(text) is not None or (assignment is not None and is_secret_name(assignment[1]))

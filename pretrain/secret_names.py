"""Which settings hold a secret, by the names that they have in any usual spelling."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str | int, ...]

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# The last word of a secret's name, in the singular, and what names written as one word end in.
_LAST_WORDS = {"auth", "authorization", "bearer", "credential", "key", "pass", "passcode", "passphrase", "passwd",
               "password", "pwd", "secret", "token"}  # fmt: skip
_ENDS = ("accesskey", "apikey", "authkey", "credential", "encryptionkey", "passphrase", "passwd", "password",
         "privatekey", "secret", "secretkey", "signingkey", "token")  # fmt: skip
# NAME=VALUE and "Name: value", as in lists of variables and headers.
_ASSIGNMENT = re.compile(r"\s*([A-Za-z][\w.-]*)\s*[=:]\s*\S")
# User and password, or over http a user alone, which may be a token. Elsewhere it is none: abfss://container@account/.
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@|\bhttps?://[^/\s?#@]+@")


def secret_paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths below `value`, of mappings, lists, texts and numbers, where a secret stands.

    A secret is what is named like one, at any depth below that name; a text such as `API_KEY=x` or `Authorization: x`; the
    `value` beside a `name` of that kind; and a URL with a password.
    """
    if isinstance(value, Mapping):
        named = value.get("name", value.get("key"))
        for name, item in value.items():
            beside = name == "value" and isinstance(named, str) and is_secret_name(named)
            if (beside or is_secret_name(str(name))) and _holds_something(item, str(name)):
                yield (*path, str(name))
            else:
                yield from secret_paths(item, (*path, str(name)))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from secret_paths(item, (*path, number))
    elif isinstance(value, str):
        assignment = _ASSIGNMENT.match(value)
        if (assignment and is_secret_name(assignment[1])) or _URL_PASSWORD.search(value):
            yield path


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret: api_key, apiKey, API-KEY, apikey and the like."""
    words = [word.lower() for word in _WORDS.findall(name)]
    while words and (words[-1].isdigit() or words[-1] in ("value", "string")):
        words.pop()
    if not words:
        return False
    last = words[-1].removesuffix("s") if words[-1] != "pass" else "pass"
    return last in _LAST_WORDS or last.endswith(_ENDS)


def _holds_something(item: Any, name: str) -> bool:
    """Whether there is a text or a number in `item`; the number of tokens or keys is no secret."""
    if isinstance(item, Mapping):
        return any(_holds_something(inner, name) for inner in item.values())
    if isinstance(item, (list, tuple)):
        return any(_holds_something(inner, name) for inner in item)
    if isinstance(item, bool) or item is None:
        return False
    return item != "" if isinstance(item, str) else not name.lower().endswith("s")

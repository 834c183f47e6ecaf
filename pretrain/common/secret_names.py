"""Which settings hold a secret, by the names that they have in any usual spelling."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str | int, ...]

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# The last word of a secret's name, in the singular, and what names written as one word end in. Ends such as "pass" and
# "key" stand with what is before them: compass and monkey are no secrets.
_LAST_WORDS = {
    "auth",
    "authorization",
    "bearer",
    "credential",
    "jwt",
    "key",
    "pass",
    "passcode",
    "passphrase",
    "passwd",
    "password",
    "pw",
    "pwd",
    "secret",
    "token",
}
_ENDS = (
    "accesskey",
    "aeskey",
    "apikey",
    "authkey",
    "credential",
    "encryptionkey",
    "gpgkey",
    "hmackey",
    "masterkey",
    "passphrase",
    "passwd",
    "password",
    "privatekey",
    "pwd",
    "rsakey",
    "secret",
    "secretkey",
    "sharedkey",
    "signingkey",
    "sshkey",
    "sslkey",
    "tlskey",
    "token",
    *(f"{owner}{end}" for owner in ("admin", "db", "root", "user") for end in ("pass", "pw")),
)
# What may follow the word that says it: tokenValue, private_key_pem.
_FORMS = {"pem", "string", "value"}
# NAME=VALUE and "Name: value", as in lists of variables, headers, shell lines and options.
_ASSIGNMENT = re.compile(r"\s*(?:export\s+|--?)?([A-Za-z][\w.-]*)\s*[=:]\s*(\S+)")
_BEARER = re.compile(r"\s*bearer\s+\S+\s*", re.IGNORECASE)
# User and password, or over http a user alone, which may be a token. Elsewhere it is none: abfss://container@account/.
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@|\bhttps?://[^/\s?#@]+@")


def secret_paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths below `value`, of mappings, lists, texts and numbers, where a secret stands.

    A secret is what is named like one, at any depth below that name; a text such as `API_KEY=x`, `Authorization: x` or
    `Bearer x`; the `value` beside a `name` of that kind; and a URL with a password.
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
    elif isinstance(value, str) and _is_secret_text(value):
        yield path


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret: api_key, apiKey, API-KEY, apikey and the like."""
    last = _last_word(name)
    one = last if last.endswith("ss") else last.removesuffix("s")
    return one in _LAST_WORDS or one.endswith(_ENDS)


def _last_word(name: str) -> str:
    """The last word that says what it is, in small letters: `key` of API_KEY_2; "" where there is none."""
    words = [word.lower() for word in _WORDS.findall(name)]
    while words and (words[-1].isdigit() or words[-1] in _FORMS):
        words.pop()
    return words[-1] if words else ""


def _is_secret_text(text: str) -> bool:
    """Whether a text that no name tells of holds a secret."""
    if _BEARER.fullmatch(text) or _URL_PASSWORD.search(text):
        return True
    found = _ASSIGNMENT.match(text)
    if found is None or not is_secret_name(found[1]):
        return False
    return not (found[2].isdigit() and _counts(found[1]))


def _holds_something(item: Any, name: str) -> bool:
    """Whether there is a text or a number in `item`; the number of tokens or keys is no secret."""
    if isinstance(item, Mapping):
        return any(_holds_something(inner, name) for inner in item.values())
    if isinstance(item, (list, tuple)):
        return any(_holds_something(inner, name) for inner in item)
    if isinstance(item, bool) or item is None:
        return False
    return item != "" if isinstance(item, str) else not _counts(name)


def _counts(name: str) -> bool:
    """Whether a number of this name is how many there are: max_tokens, num_keys."""
    return _last_word(name).endswith(("tokens", "keys"))

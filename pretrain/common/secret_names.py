"""Recognises settings that hold a secret by their names, in any usual spelling."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str | int, ...]

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# The last word of a secret's name, in the singular, and endings of names written as one word. Endings such as "pass"
# and "key" include the word before them, since compass and monkey are not secrets.
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
# Words that may follow the decisive word: tokenValue, private_key_pem.
_FORMS = {"pem", "string", "value"}
# NAME=VALUE and "Name: value", as in environment variables, HTTP headers, shell commands and options.
_ASSIGNMENT = re.compile(r"\s*(?:export\s+|--?)?([A-Za-z][\w.-]*)\s*[=:]\s*(\S+)")
_BEARER = re.compile(r"\s*bearer\s+\S+\s*", re.IGNORECASE)
# User and password in a URL. With http also a user without password, which may be a token; with other schemes a user is
# not a secret, as in abfss://container@account/.
_URL_PASSWORD = re.compile(r"://[^/\s:@]*:[^/\s@]+@|\bhttps?://[^/\s?#@]+@")


def secret_paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of the secrets below `value`, which consists of mappings, lists, text and numbers.

    A secret is: any value below a name that denotes a secret; text such as `API_KEY=x`, `Authorization: x` or
    `Bearer x`; the `value` next to a `name` that denotes a secret; a URL with a password.
    """
    if isinstance(value, Mapping):
        own_name = value.get("name", value.get("key"))
        for name, item in value.items():
            is_named_value = name == "value" and isinstance(own_name, str) and is_secret_name(own_name)
            if (is_named_value or is_secret_name(str(name))) and _has_content(item, str(name)):
                yield (*path, str(name))
            else:
                yield from secret_paths(item, (*path, str(name)))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from secret_paths(item, (*path, number))
    elif isinstance(value, str) and _is_secret_text(value):
        yield path


def is_secret_name(name: str) -> bool:
    """Whether the name denotes a secret: api_key, apiKey, API-KEY, apikey and the like."""
    last = _last_word(name)
    singular = last if last.endswith("ss") else last.removesuffix("s")
    return singular in _LAST_WORDS or singular.endswith(_ENDS)


def _last_word(name: str) -> str:
    """The last meaningful word of a name in lower case, such as `key` for API_KEY_2; "" if there is none."""
    words = [word.lower() for word in _WORDS.findall(name)]
    while words and (words[-1].isdigit() or words[-1] in _FORMS):
        words.pop()
    return words[-1] if words else ""


def _is_secret_text(text: str) -> bool:
    """Whether a text contains a secret, judged only by the text."""
    if _BEARER.fullmatch(text) or _URL_PASSWORD.search(text):
        return True
    assignment = _ASSIGNMENT.match(text)
    if assignment is None or not is_secret_name(assignment[1]):
        return False
    return not (assignment[2].isdigit() and _is_count(assignment[1]))


def _has_content(item: Any, name: str) -> bool:
    """Whether `item` contains text or a number; a number of tokens or keys is not a secret."""
    if isinstance(item, Mapping):
        return any(_has_content(inner, name) for inner in item.values())
    if isinstance(item, (list, tuple)):
        return any(_has_content(inner, name) for inner in item)
    if isinstance(item, bool) or item is None:
        return False
    return item != "" if isinstance(item, str) else not _is_count(name)


def _is_count(name: str) -> bool:
    """Whether a number of this name is a count: max_tokens, num_keys."""
    return _last_word(name).endswith(("tokens", "keys"))

"""Formats error messages about settings: the expected value, the actual value, a suggested name."""

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pretrain.common.sections import Keys, Section, fields_of
from pretrain.common.wording import counted, did_you_mean, either, nearest

_MAX_VALUE_LENGTH = 60  # maximum number of characters of a value in a message

_SECTION, _SIZE = "expected a section of `key: value` lines", "expected a size such as 50GB"
_EXPECTED = {
    "bool_type": "expected true or false",
    "string_type": "expected text; put it in quotes if it looks like a number",
    "tuple_type": "expected a list",
    "too_short": "expected at least one item",
    "dict_type": _SECTION,
    "model_type": _SECTION,
    "byte_size": _SIZE,
    "byte_size_unit": _SIZE,
}
"""Type of a pydantic error -> our phrase for it, in terms of YAML."""

_PHRASES = {
    "Input should be": "expected",
    "String should match pattern": "expected text matching the pattern",
    "True": "true",
    "False": "false",
}
"""Phrases in pydantic's messages of other types -> ours."""


def describe_expected(error: ErrorDetails) -> str:
    """Return the part of an error message that says which value was expected."""
    message = error["msg"]
    for theirs, ours in _PHRASES.items():
        message = message.replace(theirs, ours)
    return _EXPECTED.get(error["type"], message)


def first_problem(error: ValidationError) -> str:
    """Describe, on one line, the first problem in settings that do not come from a file."""
    first = error.errors(include_url=False)[0]
    name, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    return f"{name}: {reason}" if name else reason


def suggest(schema: type[Section], path: Keys) -> str:
    """Suggest a setting whose name is similar to the unknown one at `path`: in the same section, or else in another."""
    unknown, settings = str(path[-1]), fields_of(schema)
    parent = tuple(0 if isinstance(key, int) else key for key in path[:-1])  # as in `fields_of`
    siblings = [str(keys[-1]) for keys in settings if keys[:-1] == parent]
    if similar := did_you_mean(unknown, siblings):
        return similar
    # Do not suggest settings of alternative sections, such as another task: a config has only one of them.
    alternatives = {name for name, field in schema.model_fields.items() if field.default is None} - {path[0]}
    candidates = [keys for keys in settings if len(path) == 1 or keys[0] not in alternatives]
    by_last_name = {str(keys[-1]): ".".join(map(str, keys)) for keys in reversed(candidates)}
    if similar := nearest(unknown, by_last_name, cutoff=0.8):
        return f"did you mean {either([by_last_name[name] for name in similar])}?"
    return f"known here: {', '.join(siblings)}."


def format_value(value: Any) -> str:
    """Format a value on one line, in at most `_MAX_VALUE_LENGTH` characters."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple):
        return f"a list of {counted(len(value), 'item')}"
    return shorten(repr(value) if not isinstance(value, bool) else str(value).lower(), _MAX_VALUE_LENGTH)


def shorten(text: str, limit: int) -> str:
    """Return `text`, cut to `limit` characters with an ellipsis if it is longer."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."

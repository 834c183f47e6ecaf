"""The words of error messages about settings: what was expected, what was given, which name was meant."""

import difflib
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from pretrain.common.sections import Keys, Section, dotted_names, section_at

_LONGEST_VALUE = 60  # characters of a value in a message

_EXPECTED: dict[str, Callable[[dict[str, Any]], str]] = {
    "int_type": lambda ctx: "a whole number",
    "int_from_float": lambda ctx: "a whole number",
    "float_type": lambda ctx: "a number",
    "finite_number": lambda ctx: "a finite number",
    "bool_type": lambda ctx: "true or false",
    "string_type": lambda ctx: "text; put it in quotes if it looks like a number",
    "literal_error": lambda ctx: f"one of {ctx['expected']}".replace("True", "true").replace("False", "false"),
    "tuple_type": lambda ctx: "a list",
    "dict_type": lambda ctx: "a section of `key: value` lines",
    "model_type": lambda ctx: "a section of `key: value` lines",
    "string_pattern_mismatch": lambda ctx: f"text like {ctx['pattern']}",
    "too_short": lambda ctx: f"at least {ctx['min_length']} item",
    "greater_than": lambda ctx: f"more than {ctx['gt']:.10g}",
    "greater_than_equal": lambda ctx: f"at least {ctx['ge']:.10g}",
    "less_than": lambda ctx: f"less than {ctx['lt']:.10g}",
    "byte_size": lambda ctx: "a size such as 50GB",
    "byte_size_unit": lambda ctx: "a size such as 50GB",
    "less_than_equal": lambda ctx: f"at most {ctx['le']:.10g}",
}


def expected(kind: str, context: dict[str, Any]) -> str:
    """What the rule `kind` of pydantic expects. Rules without a phrase here are given by pydantic's own name."""
    return _EXPECTED[kind](context) if kind in _EXPECTED else kind.replace("_", " ")


def first_problem(error: ValidationError) -> str:
    """The first of the problems in settings that no file holds, on one line."""
    first = error.errors(include_url=False)[0]
    where, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
    return f"{where}: {reason}" if where else reason


def suggest(model: type[Section], path: Keys) -> str:
    """The setting that an unknown one was probably meant to be: a similar name in the same section, or elsewhere."""
    unknown, section = str(path[-1]), section_at(model, path[:-1])
    siblings = list(section.model_fields) if section else []
    if similar := difflib.get_close_matches(unknown, siblings, n=1):
        return f"did you mean {similar[0]}?"
    # Of sections of which a config has one, such as the tasks, another is no help.
    others = {name for name, field in model.model_fields.items() if field.default is None} - {path[0]}
    useful = (name for name in dotted_names(model) if len(path) == 1 or name.partition(".")[0] not in others)
    by_last_name = {name.rpartition(".")[2]: name for name in reversed(list(useful))}
    if similar := difflib.get_close_matches(unknown, by_last_name, n=1, cutoff=0.8):
        return f"did you mean {by_last_name[similar[0]]}?"
    return f"known here: {', '.join(siblings)}."


def shown(value: Any) -> str:
    """A value in at most `_LONGEST_VALUE` characters of one line."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return shortened(repr(value) if not isinstance(value, bool) else str(value).lower(), _LONGEST_VALUE)


def shortened(text: str, longest: int) -> str:
    """`text` cut to `longest` characters, with an ellipsis."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."

"""Labels in files: a class name, a set of label names, or a value."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from finetune.datasets.surrogates import check_whole
from pretrain.common.errors import InputError

Problem = Literal["single_label", "multi_label", "regression"]

Label = str | tuple[str, ...] | float
"""By problem: a class name, the names of a set of labels, or a value."""


def parse(cell: Any, problem: Problem, separator: str, where: str) -> Label:
    """Parse the label in a cell.

    Args:
        separator: separator of the labels of a set; "" if the cell is a JSON list.
        where: the cell's place, for errors.
    """
    if problem == "single_label":
        return _name(cell, where)
    return _value(cell, where) if problem == "regression" else _set(cell, separator, where)


def ordered(labels: Iterable[Label | None]) -> list[str]:
    """The distinct names in `labels`, sorted, numerically if all are numbers."""
    names = {str(name) for label in labels for name in (label if isinstance(label, tuple) else (label,))}
    try:
        numbers = {name: float(name) for name in names}
    except ValueError:
        return sorted(names)
    if not all(map(math.isfinite, numbers.values())):  # a label called "nan" cannot be sorted
        return sorted(names)
    return sorted(names, key=lambda name: (numbers[name], name))


def renamed(label: Label | None, names: Mapping[str, str], where: str) -> Label | None:
    """A file's label mapped to our names; `InputError` with the closest known label if it is unknown."""
    if isinstance(label, tuple):
        return tuple(_renamed(name, names, where) for name in label)
    return _renamed(label, names, where) if isinstance(label, str) else label


def listed(names: Collection[Any]) -> str:
    """Up to 20 names, for a message."""
    shown = [str(name)[:40] for name in names]
    return ", ".join(shown[:20]) + (f", ... ({len(shown)} in all)" if len(shown) > 20 else "")


def shown(value: Any) -> str:
    """A value, shortened for a message."""
    text = "empty" if value is None or value == "" else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _name(cell: Any, where: str) -> str:
    """Text without surrounding spaces; numbers and booleans in JSON notation."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)  # integers in a column with missing values are read as floats
    if isinstance(cell, bool | int) or (isinstance(cell, float) and math.isfinite(cell)):
        return json.dumps(cell)
    if not isinstance(cell, str) or not (name := cell.strip()):
        raise InputError(f"{where}: label is {shown(cell)}. Give each example one, or remove it.")
    check_whole(name, "the label", where)
    return name


def _set(cell: Any, separator: str, where: str) -> tuple[str, ...]:
    parts: Any = cell
    if isinstance(cell, str) and separator:
        parts = [part for part in cell.split(separator) if part.strip()]
    elif isinstance(cell, str):
        try:
            parts = json.loads(cell) if cell.strip() else []
        except (ValueError, RecursionError):
            parts = None
    if not isinstance(parts, list):
        raise InputError(f"{where}: labels is {shown(cell)}, not a JSON list. Write one, or set `label_separator`.")
    return tuple(dict.fromkeys(_name(part, where) for part in parts))


def _value(cell: Any, where: str) -> float:
    try:
        value = float(cell)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value) or isinstance(cell, bool):
        raise InputError(f"{where}: label is {shown(cell)}, not a number. Correct or remove it.")
    return value


def _renamed(value: str, names: Mapping[str, str], where: str) -> str:
    if (name := names.get(value)) is not None:
        return name
    near = difflib.get_close_matches(value, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {listed(names)}."
    raise InputError(f"{where}: label {shown(value)} is not in the training set or `labels`; {hint}")

"""Parses labels in files: a class name, a set of label names, or a value."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from finetune.tasks.datasets.annotations import UNLABELED, NoLabel
from finetune.tasks.datasets.surrogates import check_surrogates
from finetune.tasks.datasets.table import listing
from pretrain.common.errors import InputError
from pretrain.common.wording import nearest

ProblemType = Literal["single_label", "multi_label", "regression"]

_FLAGS: dict[Any, bool] = {0: False, 1: True}  # 0.0 and True are equal to these keys
_FLAG_STRINGS: dict[Any, bool] = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}

Label = str | tuple[str, ...] | float
"""By problem type: a class name, the names of a set of labels, or a value."""


def parse(cell: Any, problem_type: ProblemType, separator: str, where: str) -> Label:
    """Parse the label in a cell.

    Args:
        separator: separator of the labels of a set; "" if the cell is a JSON list.
        where: the cell's location, for errors.
    """
    if problem_type == "single_label":
        return _parse_class_name(cell, where)
    return _parse_value(cell, where) if problem_type == "regression" else _parse_label_set(cell, separator, where)


def unwrap(cell: Any, problem_type: ProblemType) -> Any:
    """Return the label in `cell`, or in its only item if it is a list (but not for multi_label); `NoLabel` if none."""
    if isinstance(cell, list) and problem_type != "multi_label" and (len(cell) != 1 or isinstance(cell[0], str | None)):
        if len(cell) > 1:
            return NoLabel("with several labels")
        cell = cell[0] if cell else None
    is_blank = isinstance(cell, str) and problem_type != "multi_label" and not cell.strip()
    return UNLABELED if is_blank or cell is None or cell != cell else cell  # NaN differs from itself


def sort_names(labels: Iterable[Label | None]) -> list[str]:
    """Return the distinct names in `labels`, sorted, numerically if all are numbers."""
    names = {str(name) for label in labels for name in (label if isinstance(label, tuple) else (label,))}
    try:
        numbers = {name: float(name) for name in names}
    except ValueError:
        return sorted(names)
    if not all(map(math.isfinite, numbers.values())):  # a label called "nan" cannot be sorted
        return sorted(names)
    return sorted(names, key=lambda name: (numbers[name], name))


def to_name(label: Label | None, names: Mapping[str, str], where: str) -> Label | None:
    """Convert a label in a file to its name in `names`; `InputError` with the closest label if it is unknown."""
    if isinstance(label, tuple):
        return tuple(_to_name(name, names, where) for name in label)
    return _to_name(label, names, where) if isinstance(label, str) else label


def decode_flags(
    cells: Sequence[Any],
    separator: str,
    names: Sequence[str],
    where: Callable[[int], str],
    *,
    strict: bool,
    errors: dict[int, str] | None = None,
) -> list[Any]:
    """Convert label sets given as 0-1 vectors of equal length to lists of names.

    Args:
        separator: as in `parse`.
        names: labels in the order of the vectors; empty if unknown.
        where: returns the location of a row, for errors.
        strict: whether all cells must be vectors; if false, other cells are returned unchanged, as names.
        errors: collects the error of each invalid row, instead of raising `InputError`.
    """
    filled = {row: cell for row, cell in enumerate(cells) if cell is not None and cell != ""}
    strings = strict or bool(separator)
    vectors = {row: _parse_flags(_split_set(cell, separator), strings=strings) for row, cell in filled.items()}
    widths = {None if flags is None else len(flags) for flags in vectors.values()}
    if not strict and (len(widths) != 1 or None in widths or (widths == {1} and len(names) != 1)):
        return list(cells)
    converted = list(cells)
    for row, flags in vectors.items():
        if error := _vector_error(flags, names):
            if errors is None:
                raise InputError(f"{where(row)}: labels is {excerpt(cells[row])}{error}")
            errors[row] = f"{where(row)}: labels is {excerpt(cells[row])}{error}"
        else:
            converted[row] = [name for name, flag in zip(names, flags or (), strict=True) if flag]
    return converted


def excerpt(value: Any) -> str:
    """Format a value for a message, at most 60 characters."""
    text = "empty" if value is None or value == "" else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _vector_error(flags: list[bool] | None, names: Sequence[str]) -> str:
    """Return why `flags` is not a vector with a value for each of `names`; "" if it is."""
    if flags is None:
        return f"; expected 0 or 1 for each of {listing(names)}."
    if not names:
        return ". Set `labels` to the names of these values, in order."
    if len(flags) != len(names):
        return f", but there are {len(names)} labels: {listing(names)}."
    return ""


def _parse_class_name(cell: Any, where: str) -> str:
    """Return a string without surrounding spaces; numbers and booleans in JSON notation."""
    if isinstance(cell, float) and cell.is_integer():
        cell = int(cell)  # pandas stores integer columns with missing values as floats
    if isinstance(cell, bool | int) or (isinstance(cell, float) and math.isfinite(cell)):
        return json.dumps(cell)
    if not isinstance(cell, str) or not (name := cell.strip()):
        raise InputError(f"{where}: label is {excerpt(cell)}. Give each example the name of its label, or remove it.")
    check_surrogates(name, "the label", where)
    return name


def _parse_label_set(cell: Any, separator: str, where: str) -> tuple[str, ...]:
    parts = _split_set(cell, separator)
    if not isinstance(parts, list):
        raise InputError(f"{where}: labels is {excerpt(cell)}, not a JSON list. Write one, or set `label_separator`.")
    names = tuple(_parse_class_name(part, where) for part in parts)
    if len(set(names)) < len(names):
        raise InputError(
            f"{where}: labels is {excerpt(cell)}, with a repeated label. Give each once; or if these are 0-1 vectors, "
            "give all of them the same length."
        )
    return names


def _split_set(cell: Any, separator: str) -> Any:
    """Return the items of a cell with a set of labels, as a list; another type if the cell is invalid."""
    if not isinstance(cell, str):
        return cell
    if separator:
        return [part.strip() for part in cell.split(separator) if part.strip()]
    try:
        return json.loads(cell) if cell.strip() else []
    except (ValueError, RecursionError):
        return None


def _parse_flags(values: Any, *, strings: bool) -> list[bool] | None:
    """Return the values of a 0-1 vector (with `strings`, also of "0", "true", ...); None for other `values`."""
    flags = _FLAGS | (_FLAG_STRINGS if strings else {})
    is_flat = isinstance(values, list) and all(isinstance(value, int | float | str) for value in values)
    keys = [value.strip().lower() if isinstance(value, str) else value for value in values] if is_flat else []
    return [flags[key] for key in keys] if keys and all(key in flags for key in keys) else None


def _parse_value(cell: Any, where: str) -> float:
    try:
        value = float(cell)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not math.isfinite(value) or isinstance(cell, bool):
        raise InputError(f"{where}: label is {excerpt(cell)}, not a number such as 1.5. Correct or remove it.")
    return value


def _to_name(value: str, names: Mapping[str, str], where: str) -> str:
    if (name := names.get(value)) is not None:
        return name
    suggestions = nearest(value, names)
    hint = f"did you mean {suggestions[0]!r}?" if suggestions else f"known: {listing(names)}."
    raise InputError(f"{where}: label {excerpt(value)} is not in the training set or `labels`; {hint}")

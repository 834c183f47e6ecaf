"""Tables of labeled rows, stored by column, and requests for columns of files."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pretrain.common.errors import InputError
from pretrain.common.quoting import Quoting

Key = str | int
"""A column's name, or its index from 0."""

Converter = Callable[[list[Any], Callable[[int], str]], list[Any]]
"""Converts records to rows; the second argument returns the location of the record with a given index, for errors."""

Format = Literal["", "csv", "tsv", "jsonl", "json", "parquet"]


@dataclass(frozen=True)
class TableLayout:
    """Layout of a file of rows. Empty values are determined by its suffix."""

    format: Format = ""
    encoding: str = "utf-8"  # a byte-order mark is skipped
    delimiter: str = ""  # one character; "" means a comma, or a tab in .tsv
    quoting: Literal["auto"] | Quoting = "auto"  # auto: standard; in .tsv none, and no cell may start with a quote
    header: bool = True  # whether the first row has the column names
    convert: Converter | None = None  # converts JSON records of annotation tools


@dataclass(frozen=True)
class Table:
    """Columns of N cells: strings in CSV and TSV, any type in JSON and Parquet. A missing cell is None."""

    columns: dict[Key, list[Any]]  # the requested columns; optional columns only if they exist
    source: str  # the file or data set, for messages
    numbers: Sequence[int]  # [N], line or row number of each row, from 1
    separator: str  # text between source and number in messages, such as ":" before a line number
    classes: dict[Key, list[str]] = field(default_factory=dict)  # {column: class names}, if the data set defines them
    other_cells: Sequence[Mapping[str, Any]] = ()  # [N], each row's cells in all other columns by name, if requested

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, rows: Sequence[int]) -> Table:
        """Return a table of these rows only."""
        columns = {name: [cells[row] for row in rows] for name, cells in self.columns.items()}
        other_cells = [self.other_cells[row] for row in rows] if self.other_cells else ()
        return replace(self, columns=columns, numbers=[self.numbers[row] for row in rows], other_cells=other_cells)

    def where(self, row: int) -> str:
        """Return the file, and the line or row number of `row`, for messages."""
        return f"{self.source}{self.separator}{self.numbers[row]}"


@dataclass(frozen=True)
class RequestedColumns:
    """The columns to read from a file, and other names that they may have in it."""

    columns: Sequence[Key]
    optional: Collection[Key] = ()  # columns that may be missing
    aliases: Mapping[Key, str] = field(default_factory=dict)  # {column: another name that it may have}
    read_all: bool = False  # also read all other columns
    skip_if_repeated: Collection[Key] = ()  # columns that count as missing if several in the file have this name

    def resolve(self, names: Sequence[Any], source: str) -> dict[Key, str]:
        """Return {column: its name among `names`}, without missing optional ones."""
        present: dict[Key, str] = {}
        for column in self.columns:
            if (name := self.find_unique(column, names, source)) is not None:
                present[column] = str(name)
            elif column not in self.optional:
                raise InputError(f"{source}: no column {column!r}; it has {listing(names)}.")
        return present

    def find_unique(self, column: Key, names: Sequence[Any], source: str) -> Key | None:
        """Return the column's name among `names`, None if missing; `InputError` if several columns have that name."""
        name = self.find(column, names)
        if name is None or names.count(name) == 1:
            return name
        if column in self.skip_if_repeated:
            return None
        raise InputError(f"{source}: column {name!r} occurs {names.count(name)} times. Rename all but one.")

    def find(self, column: Key, names: Collection[Any]) -> Key | None:
        """Return the column's name or alias among `names`; None if it is missing."""
        if column in names:
            return column
        alias = self.aliases.get(column)
        return alias if alias in names else None


def listing(names: Collection[Any]) -> str:
    """Join names with commas, for a message: at most 20; names with surrounding spaces are quoted."""
    shortened = [str(name)[:40] if str(name) == str(name).strip() else repr(str(name)) for name in names]
    return ", ".join(shortened[:20]) + (", ..." if len(shortened) > 20 else "")


def excerpt(value: Any) -> str:
    """Format a value as JSON for a message, at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""Tables of labeled rows, stored by column, and requests for their columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pretrain.common.errors import InputError
from pretrain.common.quoting import Quoting

Key = str | int
"""A column's name, or its number from 0."""

ReadForms = Callable[[list[Any], Callable[[int], str]], list[Any]]
"""Converts records to rows; the second argument returns the location of a record."""

Format = Literal["", "csv", "tsv", "jsonl", "json", "parquet"]


@dataclass(frozen=True)
class TableFormat:
    """Format of a file. Empty values are determined by its suffix."""

    format: Format = ""
    encoding: str = "utf-8"  # a UTF-8 byte-order mark is skipped
    delimiter: str = ""  # one character; "" is a comma, in .tsv a tab
    quoting: Literal["auto"] | Quoting = "auto"  # auto: standard; in .tsv none, and no cell may begin with a quote
    header: bool = True
    forms: ReadForms | None = None  # of annotation tools, in JSON


@dataclass(frozen=True)
class Table:
    """Columns of N cells: strings from text files, otherwise the types of the format. A missing cell is None."""

    columns: dict[Key, list[Any]]  # the requested columns; optional columns only if they exist
    source: str  # the file or data set, for messages
    numbers: Sequence[int]  # [N], line or row number of each row, from 1
    separator: str  # between source and number in messages: ":" before a line
    classes: dict[Key, list[str]] = field(default_factory=dict)  # names of the classes that a data set defines
    others: Sequence[Mapping[str, Any]] = ()  # [N], the cells of all other columns, if they were requested

    def __len__(self) -> int:
        return len(self.numbers)

    def select(self, rows: Sequence[int]) -> Table:
        """Return a table of these rows only."""
        columns = {name: [cells[row] for row in rows] for name, cells in self.columns.items()}
        others = [self.others[row] for row in rows] if self.others else ()
        return replace(self, columns=columns, numbers=[self.numbers[row] for row in rows], others=others)

    def where(self, row: int) -> str:
        """Return file and line (or row) of a row, for messages."""
        return f"{self.source}{self.separator}{self.numbers[row]}"


@dataclass(frozen=True)
class RequestedColumns:
    """The requested columns, and other names that they may have in a file."""

    columns: Sequence[Key]
    optional: Collection[Key] = ()
    aliases: Mapping[Key, str] = field(default_factory=dict)
    others: bool = False  # also read all other columns
    if_unique: Collection[Key] = ()  # columns that count as missing if a table has several of them

    def resolve(self, names: Sequence[Any], source: str) -> dict[Key, str]:
        """Return {column: its name among `names`}, without missing optional ones."""
        present: dict[Key, str] = {}
        for column in self.columns:
            if (name := self.find_unique(column, names, source)) is not None:
                present[column] = str(name)
            elif column not in self.optional:
                raise InputError(f"{source}: no column {column!r}; it has {listed(names)}.")
        return present

    def find_unique(self, column: Key, names: Sequence[Any], source: str) -> Key | None:
        """Return `name` in a table, whose `names` may repeat; `InputError` if the column's name does."""
        name = self.find(column, names)
        if name is None or names.count(name) == 1:
            return name
        if column in self.if_unique:
            return None
        raise InputError(f"{source}: column {name!r} occurs {names.count(name)} times. Rename all but one.")

    def find(self, column: Key, names: Collection[Any]) -> Key | None:
        """Return the name of the column among `names`; None if it is missing."""
        if column in names:
            return column
        alias = self.aliases.get(column)
        return alias if alias in names else None


def listed(names: Collection[Any]) -> str:
    """Format names for a message, at most 20."""
    # Names with surrounding spaces are quoted.
    shown = [str(name)[:40] if str(name) == str(name).strip() else repr(str(name)) for name in names]
    return ", ".join(shown[:20]) + (", ..." if len(shown) > 20 else "")


def shown(value: Any) -> str:
    """Format a value as JSON for a message, at most 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."

"""What a check has found: a row with a mark, and rows as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

PASS, WARN, FAIL = "pass", "warn", "fail"
_COLOURS = {PASS: "green", WARN: "yellow", FAIL: "red"}
_EACH = 4  # up to so many nodes that pass have a line each, where they differ


@dataclass(frozen=True)
class Row:
    """One finding. `advice` says what to do, or what follows, where the mark is not pass; `where` is a node's name."""

    what: str
    found: str
    mark: str = PASS
    advice: str = ""
    where: str = ""


def below(value: float, warn: float, fail: float) -> str:
    """The mark of a value that should be large."""
    return FAIL if value < fail else WARN if value < warn else PASS


def above(value: float, warn: float, fail: float) -> str:
    """The mark of a value that should be small."""
    return FAIL if value > fail else WARN if value > warn else PASS


def show(rows: Sequence[Row], console: Console) -> None:
    """Print rows as a table, advice below what needs it. Of many nodes that pass, the first stands for all."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    placed = any(row.where for row in rows)
    for column in ("", "what", *(["where"] if placed else []), "found"):
        table.add_column(column, overflow="fold")
    for row in _shortened(rows) if placed else rows:
        advice = f"\n[{_COLOURS[row.mark]}]{escape(row.advice)}[/]" if row.mark != PASS else ""
        table.add_row(
            f"[{_COLOURS[row.mark]}]{row.mark}[/]", escape(row.what), *([escape(row.where)] if placed else []),
            escape(row.found) + advice,
        )  # fmt: skip
    console.print(table)


def to_json(rows: Iterable[Row]) -> str:
    """An array with an object for each row."""
    return json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False)


def _shortened(rows: Sequence[Row]) -> Iterator[Row]:
    for _, group in groupby(rows, key=lambda row: row.what):
        alike = list(group)
        passing = [row for row in alike if row.mark == PASS]
        same = len({row.found for row in passing}) == 1
        if len(passing) > (1 if same else _EACH):
            found = passing[0].found
            if not same:
                found += f" ({passing[0].where}; --json has the others)"
            yield Row(passing[0].what, found, where=so_many_nodes(len(passing)))
            alike = [row for row in alike if row.mark != PASS]
        yield from alike


def so_many_nodes(count: int) -> str:
    """So many of them, in words."""
    return f"{count} node" + "s" * (count != 1)

"""Findings of checks, which are the rows of the table that `doctor` prints."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pretrain.common.wording import counted

PASS, WARN, FAIL = "pass", "warn", "fail"
_COLORS = {PASS: "green", WARN: "yellow", FAIL: "red"}
_MAX_NAMES = 3  # maximum number of node names in a row
_WHERE_WIDTH = 16  # width of the column `where`: one address


@dataclass(frozen=True)
class Finding:
    """The finding of the check `what` on the node `where` ("": here). `advice` is shown unless the mark is pass."""

    what: str
    found: str
    mark: str = PASS
    advice: str = ""
    where: str = ""


def mark_if_low(value: float, warn: float, fail: float) -> str:
    """Return the mark of a value that should be at least `warn`, and must be at least `fail`."""
    return FAIL if value < fail else WARN if value < warn else PASS


def mark_if_high(value: float, warn: float, fail: float) -> str:
    """Return the mark of a value that should be at most `warn`, and must be at most `fail`."""
    return FAIL if value > fail else WARN if value > warn else PASS


def show(rows: Sequence[Finding], console: Console) -> None:
    """Print findings as a table, with advice for warnings and failures. Nodes that pass a check share one row."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    has_nodes = any(row.where for row in rows)
    table.add_column()
    table.add_column("what", overflow="fold")
    if has_nodes:
        table.add_column("where", overflow="fold", max_width=_WHERE_WIDTH)
    table.add_column("found", overflow="fold")
    for row in _merge_passing(rows) if has_nodes else rows:
        advice = f"\n[{_COLORS[row.mark]}]{escape(row.advice)}[/]" if row.mark != PASS else ""
        table.add_row(
            f"[{_COLORS[row.mark]}]{row.mark}[/]",
            escape(row.what),
            *([escape(row.where)] if has_nodes else []),
            escape(row.found) + advice,
        )
    console.print(table)


def _join_names(names: Sequence[str]) -> str:
    """Join the first few names, and say how many more there are."""
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _merge_passing(rows: Sequence[Finding]) -> Iterator[Finding]:
    """Yield one row for all nodes that pass a check, with the first node's finding, and one per failure or warning."""
    for _, rows_of_check in groupby(rows, key=lambda row: row.what):
        groups: dict[tuple[str, str], list[Finding]] = {}
        for row in rows_of_check:
            groups.setdefault(("", "") if row.mark == PASS else (row.found, row.advice), []).append(row)
        for merged_rows in groups.values():
            first, differs = merged_rows[0], len({row.found for row in merged_rows}) > 1
            found = f"{first.found} ({first.where}; --json has the others)" if differs else first.found
            names = [row.where for row in merged_rows]
            where = counted(len(names), "node") if len(names) > 1 and first.mark == PASS else _join_names(names)
            yield replace(first, found=found, where=where)

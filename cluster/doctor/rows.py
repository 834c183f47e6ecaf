"""The finding of a check: a row with a mark; rows as a table or as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pretrain.common.wording import counted

PASS, WARN, FAIL = "pass", "warn", "fail"
_COLORS = {PASS: "green", WARN: "yellow", FAIL: "red"}
_MAX_NAMES = 3
_WHERE_COLUMNS = 16  # an address; further ones are wrapped


@dataclass(frozen=True)
class Finding:
    """One finding. `advice` says what to do, or what follows, if the mark is not pass; `where` is a node's name."""

    what: str
    found: str
    mark: str = PASS
    advice: str = ""
    where: str = ""


def mark_if_low(value: float, warn: float, fail: float) -> str:
    """Return the mark of a value that should be large."""
    return FAIL if value < fail else WARN if value < warn else PASS


def mark_if_high(value: float, warn: float, fail: float) -> str:
    """Return the mark of a value that should be small."""
    return FAIL if value > fail else WARN if value > warn else PASS


def show(rows: Sequence[Finding], console: Console) -> None:
    """Print rows as a table, with advice unless they passed. Only one of many passing nodes is shown."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    has_nodes = any(row.where for row in rows)
    table.add_column()
    table.add_column("what", overflow="fold")
    if has_nodes:
        table.add_column("where", overflow="fold", max_width=_WHERE_COLUMNS)
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
    """Yield one row for all nodes that pass a check, with the first node's finding; one row per other finding."""
    for _, group in groupby(rows, key=lambda row: row.what):
        by_finding: dict[tuple[str, str], list[Finding]] = {}
        for row in group:
            by_finding.setdefault(("", "") if row.mark == PASS else (row.found, row.advice), []).append(row)
        for alike in by_finding.values():
            first, differ = alike[0], len({row.found for row in alike}) > 1
            found = f"{first.found} ({first.where}; --json has the others)" if differ else first.found
            merged = len(alike) > 1 and first.mark == PASS
            where = counted(len(alike), "node") if merged else _join_names([row.where for row in alike])
            yield replace(first, found=found, where=where)

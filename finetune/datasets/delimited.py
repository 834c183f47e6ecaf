"""CSV, TSV, and lines of label and text, with the detection of how quotes are meant."""

from __future__ import annotations

import csv
import io
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from finetune.datasets.table import Format, Key, Quoting, Table, TableFormat, Wanted, listed, shown
from pretrain.common.errors import InputError
from pretrain.common.wording import counted

logger = logging.getLogger(__name__)


def read_delimited(
    path: Path,
    text: str,
    kind: Format,
    layout: TableFormat,
    wanted: Wanted,
    skipped: Callable[[str], None] | None,
) -> Table:
    """The columns `wanted` of the text of a .csv, .tsv or `lines` file; `skipped` as in `tables.read_table`."""
    quoting = _quoting(path, text, kind, layout)
    rows = _rows(path, text, kind, _delimiter(kind, layout), quoting)
    first_line, first = next(rows)
    names: list[str] = []
    if kind == "lines":
        names = ["label", "text"]
    elif layout.header:
        names = first
    if not names or kind == "lines":
        rows = _chain(first_line, first, rows)
    width = len(names) or len(first)
    positions = _positions(path, wanted, names, width)
    cells: list[list[str]] = [[] for _ in positions]
    lines = []
    filled = list(zip(cells, positions.values(), strict=True))
    for line, fields in rows:
        if len(fields) != width:
            if skipped is None:
                raise InputError(_ragged(path, line, len(fields), width, names, kind))
            skipped(f"{path}:{line}")
            continue
        lines.append(line)
        for column, position in filled:
            column.append(fields[position])
    shown = quoting if kind == "tsv" and '"' in text else None
    return Table(dict(zip(positions, cells, strict=True)), str(path), lines, ":", quoting=shown)


def _delimiter(kind: Format, layout: TableFormat) -> str:
    return layout.delimiter or ("\t" if kind == "tsv" else ",")


def _quoting(path: Path, text: str, kind: Format, layout: TableFormat) -> Quoting:
    if kind == "lines":
        return "none"
    if layout.quoting != "auto":
        return layout.quoting
    return "standard" if kind == "csv" else _quotingshown(path, text, _delimiter(kind, layout))


def _rows(path: Path, text: str, kind: Format, delimiter: str, quoting: Quoting) -> Iterator[tuple[int, list[str]]]:
    """(first line, fields) of each row that is not blank; in files of one column, also of blank rows between others."""
    if kind == "lines":
        yield from ((number, line.split(None, 1)) for number, line in enumerate(split_lines(text), 1) if line)
        return
    yield from _quoted_rows(path, text, delimiter) if quoting == "standard" else _bare_rows(text, delimiter)


def split_lines(text: str) -> list[str]:
    """Lines end with "\\n" or "\\r\\n"; a text may contain other characters that Python counts as line ends."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if not lines[-1] else lines


def _bare_rows(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Rows in which quotes are ordinary characters."""
    lines = split_lines(text)
    filled = [number for number, line in enumerate(lines) if line]
    lines = lines[: filled[-1] + 1]
    is_single = delimiter not in lines[filled[0]]
    for number, line in enumerate(lines, 1):
        if line or (is_single and number > filled[0]):
            yield number, line.split(delimiter)


def _quoted_rows(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Rows by RFC 4180."""
    csv.field_size_limit(sys.maxsize if sys.maxsize < 1 << 31 else (1 << 31) - 1)  # the default is 128 kB
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    first = 1
    try:
        for fields in reader:
            if fields:
                yield first, fields
            first = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"{path}:{first}: not CSV ({error}). Double the quotes inside quoted texts, or set `quoting: none`."
        ) from None


def _quotingshown(path: Path, text: str, delimiter: str) -> Quoting:
    """Whether the quotes of a .tsv file come from its writer (RFC 4180) or belong to its texts.

    GLUE's official files quote nothing, and many of their cells start with a quote; pandas and spreadsheets quote.
    A writer that quotes does so for every cell with a quote in it, so one bare quote shows that nothing is quoted.
    A doubled quote inside a cell, a fully quoted header or column, or rows that span lines show the opposite. A file
    that shows neither is read as it is, with a warning in the log.
    """
    if '"' not in text:
        return "none"
    rows = list(_bare_rows(text, delimiter))
    if len({len(fields) for _, fields in rows}) > 1:
        return "standard" if _is_rectangular(path, text, delimiter) else "none"
    quoted = [(line, cell) for line, fields in rows for cell in fields if '"' in cell]
    doubled = [(line, cell) for line, cell in quoted if _is_quoted(cell) and '""' in cell[1:-1]]
    is_bare = not all(_is_quoted(cell) for _, cell in quoted)
    throughout = [rows[0][1], *zip(*(fields for _, fields in rows[1:]), strict=True)]
    if not is_bare and (doubled or any(all(map(_is_quoted, cells)) for cells in throughout)):
        return "standard"
    if doubled or not is_bare:
        line, cell = (doubled or quoted)[0]
        logger.warning(
            "%s:%d: the cell %s looks quoted, but %s; quotes are read as part of the texts. If they are not, "
            "set `quoting: standard`.",
            path,
            line,
            shown(cell),
            "others have bare quotes" if is_bare else "nothing else shows that it is",
        )
    return "none"


def _is_quoted(cell: str) -> bool:
    """Whether the whole cell is quoted by RFC 4180."""
    inner = cell[1:-1].replace('""', "")
    return len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inner


def _is_rectangular(path: Path, text: str, delimiter: str) -> bool:
    """Whether, read by RFC 4180, all rows have the same number of cells."""
    try:
        return len({len(fields) for _, fields in _quoted_rows(path, text, delimiter)}) == 1
    except InputError:
        return False


def _chain(line: int, fields: list[str], rows: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, list[str]]]:
    yield line, fields
    yield from rows


def _positions(path: Path, wanted: Wanted, names: list[str], width: int) -> dict[Key, int]:
    """The position of each column in a row."""
    positions: dict[Key, int] = {}
    for column in wanted.columns:
        if isinstance(column, int) and 0 <= column < width:
            positions[column] = column
            continue
        name = wanted.single(column, names, f"{path}:1")
        if isinstance(name, str):
            positions[column] = names.index(name)
            continue
        if column not in wanted.optional:
            there = f"it has {listed(names)}" if names else f"its rows have {width}, numbered from 0"
            raise InputError(f"{path}:1: no column {column!r}; {there}. Set the column, `header` or `delimiter`.")
    return positions


def _ragged(path: Path, line: int, count: int, width: int, names: list[str], kind: Format) -> str:
    if kind == "lines":
        return f"{path}:{line}: a label without a text; expected a label, a blank and a text."
    origin = "the header has" if names else "the first row has"
    hint = (
        "Set `quoting: standard` if texts are quoted"
        if kind == "tsv"
        else "Quote texts that contain the delimiter, or set `delimiter`"
    )
    return f"{path}:{line}: {counted(count, 'column')}, but {origin} {width}. {hint}."

"""Reads CSV and TSV files."""

import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from finetune.tasks.datasets.table import Format, Key, RequestedColumns, Table, TableLayout, listing
from pretrain.common.errors import InputError
from pretrain.common.quoting import Quoting, QuotingError, bare_rows, quoted_rows, reject_quoted_cells
from pretrain.common.wording import counted

_DELIMITER_LINE = re.compile('"?sep=(.)"?\r?\n(?=\\s*\\S)')  # Excel's delimiter line, such as sep=;


def read_delimited(
    path: Path,
    text: str,
    file_format: Format,
    layout: TableLayout,
    requested: RequestedColumns,
    on_skipped: Callable[[str], None] | None,
) -> Table:
    """Parse the requested columns of `text`, the content of a file; `on_skipped` as in `tables.read_table`."""
    text, declared_delimiter = _split_declaration(text)
    delimiter = layout.delimiter or declared_delimiter or ("\t" if file_format == "tsv" else ",")
    quoting = _quoting(path, text, file_format, layout, delimiter)
    # Blank rows are skipped, but in a file with one column, blank rows between other rows are empty cells.
    rows = _quoted_rows(path, text, delimiter) if quoting == "standard" else bare_rows(iterate_lines(text), delimiter)
    first_line, first_row = next(rows)
    names = first_row if layout.header else []
    if not names:
        rows = itertools.chain([(first_line, first_row)], rows)
    width = len(first_row)
    positions = _positions(path, requested, names, width)
    cells: list[list[str]] = [[] for _ in positions]
    all_names = enumerate(names or range(width))
    other_positions = {str(name): index for index, name in all_names if index not in positions.values()}
    other_cells: list[dict[str, str]] = []
    line_numbers = []
    cells_and_positions = list(zip(cells, positions.values(), strict=True))
    for line, fields in rows:
        if len(fields) != width:
            if on_skipped is None:
                raise InputError(_width_error(path, line, len(fields), width, names, file_format))
            on_skipped(f"{path}:{line}")
            continue
        line_numbers.append(line)
        for column_cells, position in cells_and_positions:
            column_cells.append(fields[position])
        if requested.read_all:
            other_cells.append({name: fields[position] for name, position in other_positions.items()})
    return Table(dict(zip(positions, cells, strict=True)), str(path), line_numbers, ":", other_cells=other_cells)


def _split_declaration(text: str) -> tuple[str, str]:
    """Return (text without Excel's delimiter line, the delimiter declared there); without such a line, (text, "")."""
    match = _DELIMITER_LINE.match(text)
    return (text[match.end() - 1 :], match[1]) if match else (text, "")


def _quoting(path: Path, text: str, file_format: Format, layout: TableLayout, delimiter: str) -> Quoting:
    if layout.quoting != "auto":
        return layout.quoting
    if file_format == "tsv":
        reject_quoted_cells(iterate_lines(text), delimiter, path, "classification.quoting")
    return "standard" if file_format == "csv" else "none"


def iterate_lines(text: str) -> Iterable[str]:
    """Return the lines of `text` with their newlines, as `pretrain.common.quoting` expects them."""
    return io.StringIO(text, newline="")


def _quoted_rows(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield rows as RFC 4180 defines them."""
    try:
        yield from quoted_rows(iterate_lines(text), delimiter)
    except QuotingError as error:
        raise InputError(
            f"{path}:{error.line}: not CSV ({error.reason}). Double the quotes inside quoted cells, or set "
            "`quoting: none`."
        ) from None


def _positions(path: Path, requested: RequestedColumns, names: list[str], width: int) -> dict[Key, int]:
    """Return {column: its index in a row}, without missing optional columns."""
    positions: dict[Key, int] = {}
    for column in requested.columns:
        if isinstance(column, int) and 0 <= column < width:
            positions[column] = column
            continue
        name = requested.find_unique(column, names, f"{path}:1")
        if isinstance(name, str):
            positions[column] = names.index(name)
            continue
        if column not in requested.optional:
            existing = f"it has {listing(names)}" if names else f"each row has {width}, numbered from 0"
            advice = "Correct the column, or set `header` or `delimiter`."
            raise InputError(f"{path}:1: no column {column!r}; {existing}. {advice}")
    return positions


def _width_error(path: Path, line: int, count: int, width: int, names: list[str], file_format: Format) -> str:
    first = "header" if names else "first row"
    hint = (
        "Set `quoting: standard` if cells are quoted"
        if file_format == "tsv"
        else "Quote cells that contain the delimiter, or set `delimiter`"
    )
    return f"{path}:{line}: {counted(count, 'column')}, but the {first} has {width}. {hint}."

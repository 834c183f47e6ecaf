"""Reads rows of delimited text (CSV, TSV), in which quotes may enclose cells or belong to their content.

The input is an iterable of lines with any line terminator, as a stream opened with `newline=""` yields them.
"""

import csv
import sys
from collections.abc import Iterable, Iterator
from typing import Literal

from pretrain.common.errors import InputError

Quoting = Literal["standard", "none"]
"""standard: RFC 4180; none: quotes are ordinary characters."""


class QuotingError(ValueError):
    """The row that starts at `line` is not valid CSV by RFC 4180."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: not CSV ({reason})")
        self.line, self.reason = line, reason


def split_lines(lines: Iterable[str]) -> Iterator[str]:
    """Split at "\\n" and "\\r\\n" only; other characters that Python treats as line breaks may occur in a line."""
    parts: list[str] = []
    for part in lines:
        parts.append(part)
        if part.endswith("\n"):
            yield "".join(parts).removesuffix("\n").removesuffix("\r")
            parts.clear()
    if last := "".join(parts).removesuffix("\r"):
        yield last


def bare_rows(lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, cells) of each row; quotes are ordinary. Skips blank rows if there are several columns."""
    is_single_column = False
    blank: list[int] = []  # line numbers of blank rows in a single column, yielded if another row follows
    has_rows = False
    for number, line in enumerate(split_lines(lines), 1):
        if line:
            is_single_column = is_single_column if has_rows else delimiter not in line
            has_rows = True
            yield from ((blank_number, [""]) for blank_number in blank)
            blank.clear()
            yield number, line.split(delimiter)
        elif is_single_column:
            blank.append(number)


def quoted_rows(lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (first line's number, cells) of each row that is not blank, by RFC 4180. Raises `QuotingError`."""
    csv.field_size_limit(min(sys.maxsize, (1 << 31) - 1))  # the default is 128 kB
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    first_line = 1
    try:
        for cells in reader:
            if cells:
                yield first_line, cells
            first_line = reader.line_num + 1
    except csv.Error as error:
        raise QuotingError(first_line, str(error)) from None


def reject_quoted_cells(lines: Iterable[str], delimiter: str, path: object, setting: str) -> None:
    """Raise `InputError`, which names the `setting` to change, if a cell starts with a quote: its role is ambiguous."""
    for line, cells in bare_rows(lines, delimiter):
        if quoted := next((cell for cell in cells if cell.startswith('"')), ""):
            raise InputError(
                f"{path}:{line}: the cell {quoted[:60]} starts with a quote. Set {setting} to standard if quotes "
                "surround cells, or to none if they belong to the text; or save the file as .jsonl."
            )

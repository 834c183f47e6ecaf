"""Rows of delimited text, and whether the quotes of a .tsv file come from its writer or belong to its texts.

A text is given as its parts between line ends of any kind, as a stream opened with `newline=""` yields them.
"""

import csv
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

Quoting = Literal["standard", "none"]
"""standard: RFC 4180; none: quotes are ordinary characters."""


class QuotingDoubt(NamedTuple):
    """A cell that looks quoted in a file that is read as if nothing were."""

    line: int
    cell: str
    reason: str  # why it is read so


class QuotingError(ValueError):
    """Text that RFC 4180 does not allow, in the row that begins at `line`."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: not CSV ({reason})")
        self.line, self.reason = line, reason


def split_lines(text: Iterable[str]) -> Iterator[str]:
    """Lines end with "\\n" or "\\r\\n"; a text may contain other characters that Python counts as line ends."""
    parts: list[str] = []
    for part in text:
        parts.append(part)
        if part.endswith("\n"):
            yield "".join(parts).removesuffix("\n").removesuffix("\r")
            parts.clear()
    if last := "".join(parts).removesuffix("\r"):
        yield last


def bare_rows(text: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each row if quotes are ordinary characters. Blank rows count only between rows of one column."""
    is_single = False
    blank: list[int] = []  # lines after a row of one column, if another row follows
    seen = False
    for number, line in enumerate(split_lines(text), 1):
        if line:
            is_single = is_single if seen else delimiter not in line
            seen = True
            yield from ((place, [""]) for place in blank)
            blank.clear()
            yield number, line.split(delimiter)
        elif is_single:
            blank.append(number)


def quoted_rows(text: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """(first line, cells) of each row that is not blank, by RFC 4180. Raises `QuotingError`."""
    csv.field_size_limit(min(sys.maxsize, (1 << 31) - 1))  # the default is 128 kB
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    first = 1
    try:
        for cells in reader:
            if cells:
                yield first, cells
            first = reader.line_num + 1
    except csv.Error as error:
        raise QuotingError(first, str(error)) from None


def detect_quoting(opened: Callable[[], Iterable[str]], delimiter: str) -> tuple[Quoting, QuotingDoubt | None]:
    """How the quotes of the text that `opened` opens are meant, and a cell that speaks against it, if there is one.

    GLUE's official files quote nothing, and many of their cells start with a quote; pandas and spreadsheets quote.
    A writer that quotes does so for every cell with a quote in it, so one bare quote shows that nothing is quoted.
    A doubled quote inside a cell, a fully quoted header or column, or rows that span lines show the opposite. A file
    that shows neither is read as it is. The text is read once, or twice if its lines have different numbers of cells.
    """
    seen = _QuotesSeen()
    for line, cells in bare_rows(opened(), delimiter):
        seen.add(line, cells)
    if seen.first is None:
        return "none", None
    if seen.is_ragged:
        return "standard" if _is_rectangular(opened(), delimiter) else "none", None
    if not seen.is_bare and (seen.doubled or seen.header_is_quoted or seen.quoted_columns):
        return "standard", None
    if seen.is_bare:
        return "none", QuotingDoubt(*seen.doubled, "others have bare quotes") if seen.doubled else None
    return "none", QuotingDoubt(*seen.first, "nothing else shows that it is")


class _QuotesSeen:
    """What the rows of a text show if its quotes are taken as ordinary characters."""

    def __init__(self) -> None:
        self.is_ragged = False  # rows have different numbers of cells
        self.is_bare = False  # a cell has a quote that no writer who quotes would leave so
        self.first: tuple[int, str] | None = None  # line and cell of the first quote
        self.doubled: tuple[int, str] | None = None  # likewise, of the first quoted cell with a doubled quote in it
        self.header_is_quoted = False  # all its cells are
        self.quoted_columns: set[int] = set()  # those of which all cells below the header are quoted
        self._width = 0
        self._rows = 0

    def add(self, line: int, cells: list[str]) -> None:
        quoted = set()
        for column, cell in enumerate(cells):
            if '"' in cell:
                self.first = self.first or (line, cell)
                if not _is_quoted(cell):
                    self.is_bare = True
                    continue
                quoted.add(column)
                if '""' in cell[1:-1]:
                    self.doubled = self.doubled or (line, cell)
        if not self._rows:
            self._width, self.header_is_quoted = len(cells), len(quoted) == len(cells)
        self.quoted_columns = quoted if self._rows == 1 else self.quoted_columns & quoted
        self.is_ragged = self.is_ragged or len(cells) != self._width
        self._rows += 1


def _is_quoted(cell: str) -> bool:
    """Whether the whole cell is quoted by RFC 4180."""
    inner = cell[1:-1].replace('""', "")
    return len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inner


def _is_rectangular(text: Iterable[str], delimiter: str) -> bool:
    """Whether, read by RFC 4180, all rows have the same number of cells."""
    width = 0
    try:
        for _, cells in quoted_rows(text, delimiter):
            width = width or len(cells)
            if len(cells) != width:
                return False
    except QuotingError:
        return False
    return True

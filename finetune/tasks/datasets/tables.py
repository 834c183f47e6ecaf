"""Labeled rows as columns, from CSV, TSV, JSON and Parquet.

Nothing is skipped or guessed: a row that does not fit is an `InputError` with its file and line.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from finetune.tasks.datasets.arrow import read_parquet
from finetune.tasks.datasets.delimited import opened, read_delimited
from finetune.tasks.datasets.files import plain_suffix, read_text, refuse_spreadsheet
from finetune.tasks.datasets.surrogates import replaced
from finetune.tasks.datasets.table import Format, Key, ReadForms, RequestedColumns, Table, TableFormat, listed, shown
from pretrain.common.errors import InputError
from pretrain.common.quoting import split_lines

_FORMATS: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}

_BY_SUFFIX = TableFormat()
_OTHER_ENCODING = ", or set `encoding`, such as latin-1"


def read_table(
    path: Path | str,
    columns: Sequence[Key],
    *,
    layout: TableFormat = _BY_SUFFIX,
    optional: Collection[Key] = (),
    aliases: Mapping[Key, str] = MappingProxyType({}),
    spare: Collection[Key] = (),
    others: bool = False,
    skipped: Callable[[str], None] | None = None,
) -> Table:
    """The named `columns` of a file, plain or compressed (.gz, .bz2, .xz).

    Args:
        optional: those of `columns` that may be missing.
        aliases: other names of `columns`, used if a column is not under its own.
        spare: those of `optional` that count as missing if there are several; others are then an error.
        others: whether to read all other columns, too, as `Table.others`.
        skipped: called with the place of each row with a wrong number of columns, which is then left out;
            None makes such a row an error.

    Raises:
        InputError: no such file, unknown format, bytes that are not in the encoding, ragged rows, no such column or
            several of it.
    """
    path = Path(path).expanduser()
    kind = layout.format or _known_format(path)
    wanted = RequestedColumns(columns, optional, aliases, others, spare)
    if kind == "parquet":
        return read_parquet(path, wanted)
    text = read_text(path, layout.encoding, _OTHER_ENCODING)
    if not text.strip():
        raise InputError(f"{path}: empty file. Give a file with at least one row.")
    if kind in ("jsonl", "json"):
        return _read_json(path, text, kind, wanted, layout.forms)
    return read_delimited(path, text, kind, layout, wanted, skipped)


def read_texts(path: Path | str, encoding: str = "utf-8") -> Table:
    """The column `text` of a file with one text per line; an empty line is an empty text."""
    path = Path(path).expanduser()
    lines = list(split_lines(opened(read_text(path, encoding, _OTHER_ENCODING))))
    return Table({"text": lines}, str(path), range(1, 1 + len(lines)), ":")


def format_of(path: Path | str) -> Format:
    """The format by the file's suffix; "" if the suffix is unknown."""
    return _FORMATS.get(plain_suffix(Path(path)), "")


def _known_format(path: Path) -> Format:
    known = format_of(path)
    refuse_spreadsheet(path)
    if not known:
        raise InputError(
            f"{path}: unknown suffix {plain_suffix(path)!r}. Set `format`, or rename it to one of "
            f"{', '.join(_FORMATS)}."
        )
    return known


def json_values(path: Path, text: str, kind: Format) -> tuple[str, Iterator[tuple[int, Any]]]:
    """(separator of file and number in messages, (number, value) of each line or of each item of a .json list).

    `InputError` for a line that is not JSON.
    """
    whole = _parsed(text) if kind == "json" else None
    if isinstance(whole, list):
        return ": record ", enumerate(whole, 1)
    return ":", _line_records(path, text, whole)


def _read_json(path: Path, text: str, kind: Format, wanted: RequestedColumns, forms: ReadForms | None) -> Table:
    before, numbered = json_values(path, text, kind)
    values = list(numbered)
    places, records = [place for place, _ in values], [record for _, record in values]
    if forms:
        records = forms(records, lambda row: f"{path}{before}{places[row]}")
    for place, record in zip(places, records, strict=True):
        if not isinstance(record, dict):
            raise InputError(f"{path}{before}{place}: {shown(record)}, not an object with {listed(wanted.columns)}.")
    cells: dict[Key, list[Any]] = {}
    used = {name for record in records for column in wanted.columns if (name := wanted.name(column, record))}
    rest = [{key: value for key, value in one.items() if key not in used} for one in records if wanted.others]
    whole = json.loads(replaced(json.dumps(rest, ensure_ascii=False)))
    table = Table(cells, str(path), places, before, others=whole)
    for column in wanted.columns:
        names = [wanted.name(column, record) for record in records]
        values = [record.get(name) for record, name in zip(records, names, strict=True)]
        if column in wanted.optional and all(value is None for value in values):
            continue
        for row, (name, record) in enumerate(zip(names, records, strict=True)):
            if name is None and column not in wanted.optional:
                raise InputError(f"{table.where(row)}: no {column!r}; it has {listed(record)}.")
        cells[column] = values
    return table


def _parsed(text: str) -> Any:
    """The value of a .json file, a list of objects or one object; None if it has one object per line."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _line_records(path: Path, text: str, whole: Any) -> Iterator[tuple[int, Any]]:
    if whole is not None:
        yield 1, whole
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line and not line.isspace():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}:{number}: not JSON ({error}). Write one object on each line.") from None

"""Reads labeled rows of CSV, TSV, JSON and Parquet files as columns.

An invalid row raises `InputError` with its file and line; it is never skipped or repaired silently.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from finetune.tasks.datasets.arrow import read_parquet
from finetune.tasks.datasets.delimited import iterate_lines, read_delimited
from finetune.tasks.datasets.files import plain_suffix, read_text, reject_spreadsheet
from finetune.tasks.datasets.surrogates import replace_surrogates
from finetune.tasks.datasets.table import Converter, Format, Key, RequestedColumns, Table, TableLayout, excerpt, listing
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

_BY_SUFFIX = TableLayout()  # format determined by the suffix
_ENCODING_ADVICE = ", or set `encoding`, such as latin-1"


def read_table(
    path: Path | str,
    columns: Sequence[Key],
    *,
    layout: TableLayout = _BY_SUFFIX,
    optional: Collection[Key] = (),
    aliases: Mapping[Key, str] = MappingProxyType({}),
    skip_if_repeated: Collection[Key] = (),
    read_all: bool = False,
    on_skipped: Callable[[str], None] | None = None,
) -> Table:
    """Read the named `columns` of a file, plain or compressed (.gz, .bz2, .xz).

    Args:
        optional: subset of `columns` that may be missing.
        aliases: {column: another name that it may have}.
        skip_if_repeated: subset of `optional` that counts as missing if repeated; other repeated columns are errors.
        read_all: also read all other columns, as `Table.other_cells`.
        on_skipped: called with the location of each row with a wrong number of columns, which is then skipped; None
            makes such a row an error.

    Raises:
        InputError: no such file, unknown format, bytes invalid in the encoding, ragged rows, a missing or duplicate
            column.
    """
    path = Path(path).expanduser()
    file_format = layout.format or _expect_format(path)
    requested = RequestedColumns(columns, optional, aliases, read_all, skip_if_repeated)
    if file_format == "parquet":
        return read_parquet(path, requested)
    text = read_text(path, layout.encoding, _ENCODING_ADVICE)
    if not text.strip():
        raise InputError(f"{path}: empty file. At least one row is needed.")
    if file_format in ("jsonl", "json"):
        return _read_json(path, text, file_format, requested, layout.convert)
    if layout.convert and layout.header and "annotation_id" in text.partition("\n")[0]:
        table = read_delimited(path, text, file_format, layout, replace(requested, read_all=True), on_skipped)
        return _merge_annotators(table, layout.convert)
    return read_delimited(path, text, file_format, layout, requested, on_skipped)


def _merge_annotators(table: Table, convert: Converter) -> Table:
    """Merge each example's rows in Label Studio's CSV, one per annotator, into one with the label they agree on."""
    rows = [dict(zip(table.columns, row, strict=True)) for row in zip(*table.columns.values(), strict=True)]
    records = [{**other_cells, **row} for other_cells, row in zip(table.other_cells, rows, strict=True)]
    merged_rows = convert(records, table.where)
    return replace(table, columns={key: [row.get(key) for row in merged_rows] for key in table.columns})


def read_lines(path: Path | str, encoding: str = "utf-8") -> Table:
    """Read a file with one document per line as the column `text`; an empty line is an empty document."""
    path = Path(path).expanduser()
    lines = list(split_lines(iterate_lines(read_text(path, encoding, _ENCODING_ADVICE))))
    return Table({"text": lines}, str(path), range(1, 1 + len(lines)), ":")


def format_of(path: Path | str) -> Format:
    """Return the format for the file's suffix; "" if the suffix is unknown."""
    return _FORMATS.get(plain_suffix(Path(path)), "")


def _expect_format(path: Path) -> Format:
    file_format = format_of(path)
    reject_spreadsheet(path)
    if not file_format:
        raise InputError(
            f"{path}: unknown suffix {plain_suffix(path)!r}. Set `format`, or rename the file to one of "
            f"{', '.join(_FORMATS)}."
        )
    return file_format


def json_values(path: Path, text: str, file_format: Format) -> tuple[str, Iterator[tuple[int, Any]]]:
    """Parse a .jsonl file, or a .json file that is a list; `InputError` for invalid JSON.

    Returns (text between file and number in messages, iterator of (number, value) for each line or item).
    """
    document = _parse_document(text) if file_format == "json" else None
    if isinstance(document, list):
        return ": record ", enumerate(document, 1)
    return ":", _numbered_values(path, text, document)


def _read_json(
    path: Path, text: str, file_format: Format, requested: RequestedColumns, convert: Converter | None
) -> Table:
    separator, numbered_values = json_values(path, text, file_format)
    values = list(numbered_values)
    numbers, records = [number for number, _ in values], [record for _, record in values]
    if convert:
        records = convert(records, lambda row: f"{path}{separator}{numbers[row]}")
    for number, record in zip(numbers, records, strict=True):
        if not isinstance(record, dict):
            keys = listing(requested.columns)
            raise InputError(f"{path}{separator}{number}: found {excerpt(record)}; expected an object with {keys}.")
    cells: dict[Key, list[Any]] = {}
    other_cells: list[dict[str, Any]] = []
    if requested.read_all:
        used = {key for record in records for column in requested.columns if (key := requested.find(column, record))}
        others = [{key: value for key, value in record.items() if key not in used} for record in records]
        other_cells = json.loads(replace_surrogates(json.dumps(others, ensure_ascii=False)))
    table = Table(cells, str(path), numbers, separator, other_cells=other_cells)
    for column in requested.columns:
        names = [requested.find(column, record) for record in records]
        values = [record.get(name) for record, name in zip(records, names, strict=True)]
        if column in requested.optional and all(value is None for value in values):
            continue
        for row, (name, record) in enumerate(zip(names, records, strict=True)):
            if name is None and column not in requested.optional:
                raise InputError(f"{table.where(row)}: no {column!r}; it has {listing(record)}.")
        cells[column] = values
    return table


def _parse_document(text: str) -> Any:
    """Parse `text` as one JSON value; None if it is not one, such as one object per line."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _numbered_values(path: Path, text: str, document: Any) -> Iterator[tuple[int, Any]]:
    if document is not None:
        yield 1, document
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line and not line.isspace():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}:{number}: not JSON ({error}). Write one object on each line.") from None

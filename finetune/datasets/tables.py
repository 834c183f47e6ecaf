"""Labelled rows as columns, from CSV, TSV, JSON, Parquet, lines of label and text, and Hugging Face data sets.

Nothing is skipped and nothing guessed: a row that does not fit is an `InputError` with its file and line.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from finetune.datasets.files import plain_suffix, read_text
from pretrain.common.errors import InputError

logger = logging.getLogger(__name__)

Key = str | int
"""A column's name, or its number from 0 on."""

Format = Literal["", "csv", "tsv", "jsonl", "json", "parquet", "lines"]
"""lines: a label, a blank, and the text to the line's end, as TREC has it; its columns are `label` and `text`."""

_FORMATS: dict[str, Format] = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
}


_OTHER_ENCODING = ", or set `encoding`, such as latin-1"

Quoting = Literal["standard", "none"]
"""standard: RFC 4180; none: a quotation mark is a character as any other."""


@dataclass(frozen=True)
class TableFormat:
    """How a file is to be read; what is empty follows from the file's suffix."""

    format: Format = ""
    encoding: str = "utf-8"  # a byte order mark of UTF-8 is not text
    delimiter: str = ""  # one character; "" is a comma, of .tsv a tab
    quoting: Literal["auto"] | Quoting = "auto"  # auto: standard, of .tsv what the file shows
    header: bool = True


@dataclass(frozen=True)
class Table:
    """Columns of N cells: text from text files, otherwise what the format has. A missing cell is None."""

    columns: dict[Key, list[Any]]  # those asked for; of the optional ones those that are there
    source: str  # the file or data set, for messages
    places: Sequence[int]  # [N], the line or row of each, from 1 on
    place: str  # what stands between source and place: ":" before a line
    classes: dict[Key, list[str]] = field(default_factory=dict)  # names a data set says its columns' classes have
    quoting: Quoting | None = None  # of a .tsv with quotes: how they were read

    def __len__(self) -> int:
        return len(self.places)

    def where(self, row: int) -> str:
        return f"{self.source}{self.place}{self.places[row]}"


def read_table(
    path: Path | str,
    columns: Sequence[Key],
    *,
    layout: TableFormat = TableFormat(),
    optional: Collection[Key] = (),
    aliases: Mapping[Key, str] = MappingProxyType({}),
    skipped: Callable[[str], None] | None = None,
) -> Table:
    """The named `columns` of a file, plain or compressed (.gz, .bz2, .xz).

    Args:
        optional: those of `columns` that may be missing.
        aliases: names under which `columns` may stand where they do not stand under their own.
        skipped: is told the place of each row with another number of columns, which is then left out;
            None makes such a row an error.

    Raises:
        InputError: no such file, unknown format, bytes that are not in the encoding, ragged rows, no such column.
    """
    path = Path(path).expanduser()
    kind = layout.format or _format_of(path)
    wanted = _Wanted(columns, optional, aliases)
    if kind == "parquet":
        return _read_parquet(path, wanted)
    text = read_text(path, layout.encoding, _OTHER_ENCODING)
    if not text.strip():
        raise InputError(f"{path}: empty file. Give a file with at least one row.")
    if kind in ("jsonl", "json"):
        return _read_json(path, text, kind, wanted)
    return _read_delimited(path, text, kind, layout, wanted, skipped)


def read_texts(path: Path | str, encoding: str = "utf-8") -> Table:
    """The column `text` of a file with a text a line; an empty line is an empty text."""
    path = Path(path).expanduser()
    lines = _lines(read_text(path, encoding, _OTHER_ENCODING))
    return Table({"text": lines}, str(path), range(1, 1 + len(lines)), ":")


def format_of(path: Path | str) -> Format:
    """The format that the file's suffix says; "" if none."""
    return _FORMATS.get(plain_suffix(Path(path)), "")


def read_dataset(
    name: str,
    columns: Sequence[Key],
    *,
    subset: str = "",
    split: str = "train",
    revision: str = "",
    where: str = "dataset",
    optional: Collection[Key] = (),
) -> Table:
    """The named `columns` of one split of a folder written by save_to_disk, or of a data set on the hub.

    Numbers of classes become their names. `where` is the place in the config, for errors.
    """
    from pretrain.config import SourceConfig
    from pretrain.corpus.sources.huggingface import hub_dataset, saved_dataset

    wanted = _Wanted(columns, optional)
    source = SourceConfig(kind="huggingface", dataset=name, subset=subset, split=split, revision=revision)
    label = f"{name}[{split}]"
    folder = Path(name).expanduser()
    if folder.is_dir():
        if split != "train" and not (folder / "dataset_dict.json").exists():
            raise InputError(f"{name}: has no splits, so no {split!r}. Name a folder written by a DatasetDict.")
        source = source.model_copy(update={"dataset": str(folder)})
        dataset = saved_dataset(source)
        names = dataset.column_names
        found = list(wanted.among(names, label).values())
        values = dataset.with_format(None).select_columns(found)[:]
    else:
        if not revision:
            raise InputError(
                f"{where}.revision: empty, and {name} is no folder. A hub data set changes over time; give the "
                f"commit to read, as shown on https://huggingface.co/datasets/{name}/commits/main"
            )
        dataset = hub_dataset(source, where)
        rows = list(dataset)
        names = list(rows[0]) if rows else columns
        found = list(wanted.among(names, label).values())
        values = {column: [row.get(column) for row in rows] for column in found}
    return _with_classes(values, wanted.among(names, label), dataset.features or {}, label)


@dataclass(frozen=True)
class _Wanted:
    """Which columns are asked for, and under what names they may stand."""

    columns: Sequence[Key]
    optional: Collection[Key] = ()
    aliases: Mapping[Key, str] = field(default_factory=dict)

    def among(self, names: Sequence[Any], source: str) -> dict[Key, str]:
        """Column -> its name among `names`; optional ones may be left out."""
        found: dict[Key, str] = {}
        for column in self.columns:
            if (name := self.name(column, names)) is not None:
                found[column] = str(name)
            elif column not in self.optional:
                raise InputError(f"{source}: no column {column!r}; it has {_listed(names)}.")
        return found

    def name(self, column: Key, names: Collection[Any]) -> Key | None:
        """The one of `names` that the column stands under."""
        if column in names:
            return column
        alias = self.aliases.get(column)
        return alias if alias in names else None


# ---------------------------------------------------------------- text


def _format_of(path: Path) -> Format:
    found = format_of(path)
    if not found:
        raise InputError(
            f"{path}: its suffix {plain_suffix(path)!r} says no format. Set `format`, or name it one of "
            f"{', '.join(_FORMATS)}."
        )
    return found


def _read_delimited(
    path: Path,
    text: str,
    kind: Format,
    layout: TableFormat,
    wanted: _Wanted,
    skipped: Callable[[str], None] | None,
) -> Table:
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
    return "standard" if kind == "csv" else _quoting_shown(path, text, _delimiter(kind, layout))


def _rows(path: Path, text: str, kind: Format, delimiter: str, quoting: Quoting) -> Iterator[tuple[int, list[str]]]:
    """(line it begins on, fields) of each row that is not blank; of single columns, blank ones between others, too."""
    if kind == "lines":
        yield from ((number, line.split(None, 1)) for number, line in enumerate(_lines(text), 1) if line)
        return
    yield from _quoted_rows(path, text, delimiter) if quoting == "standard" else _bare_rows(text, delimiter)


def _lines(text: str) -> list[str]:
    """Lines end with "\\n" or "\\r\\n" alone: what else Python calls a line end may stand in a text."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if not lines[-1] else lines


def _bare_rows(text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Rows in which a quotation mark is a character as any other."""
    lines = _lines(text)
    filled = [number for number, line in enumerate(lines) if line]
    lines = lines[: filled[-1] + 1]
    is_single = delimiter not in lines[filled[0]]
    for number, line in enumerate(lines, 1):
        if line or (is_single and number > filled[0]):
            yield number, line.split(delimiter)


def _quoted_rows(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Rows as RFC 4180 has them."""
    csv.field_size_limit(sys.maxsize if sys.maxsize < 1 << 31 else (1 << 31) - 1)  # 128 kB otherwise
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    begin = 1
    try:
        for fields in reader:
            if fields:
                yield begin, fields
            begin = reader.line_num + 1
    except csv.Error as error:
        raise InputError(
            f"{path}:{begin}: not CSV ({error}). Double the quotes inside of quoted texts, or set `quoting: none`."
        ) from None


def _quoting_shown(path: Path, text: str, delimiter: str) -> Quoting:
    """Whether the quotes of a .tsv file were put there by its writer (RFC 4180) or belong to its texts.

    Official sets of GLUE quote nothing, and many of their cells begin with a quote; pandas and spreadsheets quote.
    A writer that quotes does so with every cell that has a quote in it, so one bare quote shows that none was
    written; a doubled quote inside, a header or a column that is quoted throughout, or lines that are rows only
    together show the opposite. A file that shows neither is taken as it stands, and that is logged.
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
            "%s:%d: the cell %s looks quoted, but %s; quotes are read as characters of the texts. If they are not, "
            "set `quoting: standard`.",
            path,
            line,
            _shown(cell),
            "others have bare quotes" if is_bare else "nothing else shows that it is",
        )
    return "none"


def _is_quoted(cell: str) -> bool:
    """Whether it is a whole cell as RFC 4180 quotes it."""
    inner = cell[1:-1].replace('""', "")
    return len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in inner


def _is_rectangular(path: Path, text: str, delimiter: str) -> bool:
    """Whether the rows of RFC 4180 have as many cells each."""
    try:
        return len({len(fields) for _, fields in _quoted_rows(path, text, delimiter)}) == 1
    except InputError:
        return False


def _chain(line: int, fields: list[str], rows: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, list[str]]]:
    yield line, fields
    yield from rows


def _positions(path: Path, wanted: _Wanted, names: list[str], width: int) -> dict[Key, int]:
    """Where in a row each column stands."""
    positions: dict[Key, int] = {}
    for column in wanted.columns:
        if isinstance(column, int) and 0 <= column < width:
            positions[column] = column
            continue
        name = wanted.name(column, names)
        if isinstance(name, str):
            if names.count(name) > 1:
                raise InputError(f"{path}:1: column {name!r} stands there {names.count(name)} times. Rename one.")
            positions[column] = names.index(name)
            continue
        if column not in wanted.optional:
            there = f"it has {_listed(names)}" if names else f"its rows have {width}, numbered from 0"
            raise InputError(f"{path}:1: no column {column!r}; {there}. Set the column, `header` or `delimiter`.")
    return positions


def _ragged(path: Path, line: int, found: int, width: int, names: list[str], kind: Format) -> str:
    if kind == "lines":
        return f"{path}:{line}: a label without a text; expected both, with a blank between."
    origin = "the header has" if names else "the first row has"
    hint = (
        "Set `quoting: standard` if texts are quoted"
        if kind == "tsv"
        else "Quote texts that hold the delimiter, or set `delimiter`"
    )
    return f"{path}:{line}: {found} columns where {origin} {width}. {hint}."


# ---------------------------------------------------------------- JSON


def _read_json(path: Path, text: str, kind: Format, wanted: _Wanted) -> Table:
    whole = _parsed(text) if kind == "json" else None
    is_list = isinstance(whole, list)
    places, records = [], []
    for place, record in enumerate(whole, 1) if is_list else _line_records(path, text, whole):
        if not isinstance(record, dict):
            at = f"{path}: record {place}" if is_list else f"{path}:{place}"
            raise InputError(f"{at}: {_shown(record)}, not an object with {_listed(wanted.columns)}.")
        places.append(place)
        records.append(record)
    cells: dict[Key, list[Any]] = {}
    table = Table(cells, str(path), places, ": record " if is_list else ":")
    for column in wanted.columns:
        names = [wanted.name(column, record) for record in records]
        values = [record.get(name) for record, name in zip(records, names, strict=True)]
        if column in wanted.optional and all(value is None for value in values):
            continue
        for row, (name, record) in enumerate(zip(names, records, strict=True)):
            if name is None and column not in wanted.optional:
                raise InputError(f"{table.where(row)}: no {column!r}; it has {_listed(record)}.")
        cells[column] = values
    return table


def _parsed(text: str) -> Any:
    """A whole .json file: a list of objects or one object; None of one object a line."""
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


# ---------------------------------------------------------------- Arrow


def _read_parquet(path: Path, wanted: _Wanted) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise InputError(f"{path}: {'a folder, not a file' if path.is_dir() else 'not found'}. Check the path.")
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            found = wanted.among(schema.names, str(path))
            table = file.read(list(found.values()))
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: not a Parquet file ({str(error).splitlines()[0]}).") from None
    values = {name: _arrow_values(path, table[name]) for name in found.values()}
    return _with_classes(values, found, _arrow_features(schema.metadata or {}), str(path))


def _with_classes(
    values: Mapping[str, list[Any]], found: Mapping[Key, str], features: Mapping[str, Any], source: str
) -> Table:
    """The columns `found` with the names of their classes in place of the numbers."""
    classes: dict[Key, list[str]] = {
        column: names for column, name in found.items() if (names := _class_names(features.get(name)))
    }
    named: dict[Key, list[Any]] = {
        column: _with_class_names(values[name], classes.get(column, [])) for column, name in found.items()
    }
    rows = len(next(iter(named.values()), []))
    return Table(named, source, range(1, 1 + rows), ": row ", classes)


def _arrow_values(path: Path, column: Any) -> list[Any]:
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        for row, value in enumerate(column, 1):  # noqa: B007
            try:
                value.as_py()
            except UnicodeDecodeError:
                break
        raise InputError(f"{path}: row {row}: bytes that are not UTF-8. Write the file anew.") from None


def _arrow_features(metadata: dict[bytes, bytes]) -> dict[str, Any]:
    """What `datasets` says of the columns in a Parquet file of its own; {} of others."""
    try:
        return json.loads(metadata[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}


def _class_names(feature: Any) -> list[str]:
    """The names of a feature's classes, or of those in its lists; [] of any other feature."""
    for _ in range(2):
        names = feature.get("names") if isinstance(feature, dict) else getattr(feature, "names", None)
        if names:
            return list(names)
        feature = feature.get("feature") if isinstance(feature, dict) else getattr(feature, "feature", None)
    return []


def _with_class_names(values: list[Any], names: list[str]) -> list[Any]:
    """Numbers as names; -1, which `datasets` writes where there is no label, as None."""

    def named(value: Any) -> Any:
        if isinstance(value, list):
            return [named(item) for item in value]
        return names[value] if isinstance(value, int) and 0 <= value < len(names) else None

    return [named(value) for value in values] if names else values


def _listed(names: Collection[Any]) -> str:
    shown = [str(name)[:40] for name in names]
    return ", ".join(shown[:20]) + (", ..." if len(shown) > 20 else "")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."

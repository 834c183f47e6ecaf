"""Labelled rows as columns, from CSV, TSV, JSON, Parquet, lines of label and text, and Hugging Face data sets.

Nothing is skipped and nothing guessed: a row that does not fit is an `InputError` with its file and line.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from finetune.sets.files import plain_suffix, read_text
from pretrain.errors import InputError

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


@dataclass(frozen=True)
class Layout:
    """How a file is to be read; what is empty follows from the file's suffix."""

    format: Format = ""
    encoding: str = "utf-8"  # a byte order mark of UTF-8 is not text
    delimiter: str = ""  # one character; "" is a comma, of .tsv a tab
    quoting: Literal["auto", "standard", "none"] = "auto"  # auto: standard, of .tsv none
    header: bool = True


@dataclass(frozen=True)
class Table:
    """Columns of N cells: text from text files, otherwise what the format has. A missing cell is None."""

    columns: dict[Key, list[Any]]  # those asked for; of the optional ones those that are there
    source: str  # the file or data set, for messages
    places: Sequence[int]  # [N], the line or row of each, from 1 on
    place: str  # what stands between source and place: ":" before a line
    classes: dict[Key, list[str]] = field(
        default_factory=dict
    )  # names a data set says its columns' classes have

    def __len__(self) -> int:
        return len(self.places)

    def where(self, row: int) -> str:
        return f"{self.source}{self.place}{self.places[row]}"


def read_table(
    path: Path | str,
    columns: Sequence[Key],
    *,
    layout: Layout = Layout(),
    optional: Collection[Key] = (),
    skipped: Callable[[str], None] | None = None,
) -> Table:
    """The named `columns` of a file, plain or compressed (.gz, .bz2, .xz).

    Args:
        optional: those of `columns` that may be missing.
        skipped: is told the place of each row with another number of columns, which is then left out;
            None makes such a row an error.

    Raises:
        InputError: no such file, unknown format, bytes that are not in the encoding, ragged rows, no such column.
    """
    path = Path(path).expanduser()
    kind = layout.format or _format_of(path)
    if kind == "parquet":
        return _read_parquet(path, columns, optional)
    text = read_text(path, layout.encoding, ", or set `encoding`, such as latin-1")
    if not text.strip():
        raise InputError(f"{path}: empty file. Give a file with at least one row.")
    if kind in ("jsonl", "json"):
        return _read_json(path, text, kind, columns, optional)
    return _read_delimited(path, text, kind, layout, columns, optional, skipped)


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
    from pretrain.config import Source
    from pretrain.corpus import sources

    source = Source(kind="huggingface", dataset=name, subset=subset, split=split, revision=revision)
    label = f"{name}[{split}]"
    folder = Path(name).expanduser()
    if folder.is_dir():
        if split != "train" and not (folder / "dataset_dict.json").exists():
            raise InputError(
                f"{name}: has no splits, so no {split!r}. Name a folder written by a DatasetDict."
            )
        source = source.model_copy(update={"dataset": str(folder)})
        dataset = sources.saved_dataset(source)
        names = dataset.column_names
        found = _known_columns(label, columns, optional, names)
        values = dataset.with_format(None).select_columns(found)[:]
    else:
        if not revision:
            raise InputError(
                f"{where}.revision: empty, and {name} is no folder. A hub data set changes over time; give the "
                f"commit to read, as shown on https://huggingface.co/datasets/{name}/commits/main"
            )
        dataset = sources.hub_dataset(source, where)
        rows = list(dataset)
        names = list(rows[0]) if rows else columns
        found = _known_columns(label, columns, optional, names)
        values = {column: [row.get(column) for row in rows] for column in found}
    return _with_classes(values, found, dataset.features or {}, label)


# ---------------------------------------------------------------- text


def _format_of(path: Path) -> Format:
    suffix = plain_suffix(path)
    if suffix not in _FORMATS:
        raise InputError(
            f"{path}: its suffix {suffix!r} says no format. Set `format`, or name it one of {', '.join(_FORMATS)}."
        )
    return _FORMATS[suffix]


def _read_delimited(
    path: Path,
    text: str,
    kind: Format,
    layout: Layout,
    columns: Sequence[Key],
    optional: Collection[Key],
    skipped: Callable[[str], None] | None,
) -> Table:
    rows = _rows(path, text, kind, layout)
    first_line, first = next(rows)
    names: list[str] = []
    if kind == "lines":
        names = ["label", "text"]
    elif layout.header:
        names = first
    if not names or kind == "lines":
        rows = _chain(first_line, first, rows)
    width = len(names) or len(first)
    positions = _positions(path, columns, optional, names, width)
    cells: list[list[str]] = [[] for _ in positions]
    lines = []
    wanted = list(zip(cells, positions.values(), strict=True))
    for line, fields in rows:
        if len(fields) != width:
            if skipped is None:
                raise InputError(_ragged(path, line, len(fields), width, names, kind))
            skipped(f"{path}:{line}")
            continue
        lines.append(line)
        for column, position in wanted:
            column.append(fields[position])
    return Table(dict(zip(positions, cells, strict=True)), str(path), lines, ":")


def _rows(path: Path, text: str, kind: Format, layout: Layout) -> Iterator[tuple[int, list[str]]]:
    """(line it begins on, fields) of each row that is not blank; of single columns, blank ones between others, too."""
    standard = kind == "csv" if layout.quoting == "auto" else layout.quoting == "standard"
    if kind == "lines" or not standard:
        delimiter = layout.delimiter or ("," if kind == "csv" else "\t")
        # Lines end with "\n" alone: what else Python calls a line end may stand in a text.
        lines = [line.removesuffix("\r") for line in text.split("\n")]
        filled = [number for number, line in enumerate(lines) if line]
        lines = lines[: filled[-1] + 1]
        is_single = kind != "lines" and delimiter not in lines[filled[0]]
        for number, line in enumerate(lines, 1):
            if line or (is_single and number > filled[0]):
                yield number, line.split(None, 1) if kind == "lines" else line.split(delimiter)
        return
    csv.field_size_limit(sys.maxsize if sys.maxsize < 1 << 31 else (1 << 31) - 1)  # 128 kB otherwise
    delimiter = layout.delimiter or ("\t" if kind == "tsv" else ",")
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


def _chain(
    line: int, fields: list[str], rows: Iterator[tuple[int, list[str]]]
) -> Iterator[tuple[int, list[str]]]:
    yield line, fields
    yield from rows


def _positions(
    path: Path, columns: Sequence[Key], optional: Collection[Key], names: list[str], width: int
) -> dict[Key, int]:
    """Where in a row each column stands."""
    positions: dict[Key, int] = {}
    for column in columns:
        if isinstance(column, int):
            if 0 <= column < width:
                positions[column] = column
                continue
        elif names.count(column) > 1:
            raise InputError(
                f"{path}:1: column {column!r} stands there {names.count(column)} times. Rename one."
            )
        elif column in names:
            positions[column] = names.index(column)
            continue
        if column not in optional:
            there = f"it has {_listed(names)}" if names else f"its rows have {width}, numbered from 0"
            raise InputError(
                f"{path}:1: no column {column!r}; {there}. Set the column, `header` or `delimiter`."
            )
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


def _read_json(
    path: Path, text: str, kind: Format, columns: Sequence[Key], optional: Collection[Key]
) -> Table:
    whole = _parsed(text) if kind == "json" else None
    is_list = isinstance(whole, list)
    places, records = [], []
    for place, record in enumerate(whole, 1) if is_list else _line_records(path, text, whole):
        if not isinstance(record, dict):
            at = f"{path}: record {place}" if is_list else f"{path}:{place}"
            raise InputError(f"{at}: {_shown(record)}, not an object with {_listed(columns)}.")
        places.append(place)
        records.append(record)
    cells: dict[Key, list[Any]] = {}
    table = Table(cells, str(path), places, ": record " if is_list else ":")
    for column in columns:
        values = [record.get(column) for record in records]
        if column in optional and all(value is None for value in values):
            continue
        for row, (value, record) in enumerate(zip(values, records, strict=True)):
            if value is None and column not in record:
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
                raise InputError(
                    f"{path}:{number}: not JSON ({error}). Write one object on each line."
                ) from None


# ---------------------------------------------------------------- Arrow


def _read_parquet(path: Path, columns: Sequence[Key], optional: Collection[Key]) -> Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise InputError(
            f"{path}: {'a folder, not a file' if path.is_dir() else 'not found'}. Check the path."
        )
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            found = _known_columns(str(path), columns, optional, schema.names)
            table = file.read(found)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: not a Parquet file ({str(error).splitlines()[0]}).") from None
    values = {column: _arrow_values(path, table[column]) for column in found}
    return _with_classes(values, found, _arrow_features(schema.metadata or {}), str(path))


def _with_classes(
    values: Mapping[str, list[Any]], columns: Sequence[str], features: Mapping[str, Any], source: str
) -> Table:
    """Columns with the names of their classes in place of the numbers."""
    classes: dict[Key, list[str]] = {
        column: names for column in columns if (names := _class_names(features.get(column)))
    }
    named: dict[Key, list[Any]] = {
        column: _with_class_names(values[column], classes.get(column, [])) for column in columns
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


def _known_columns(
    source: str, columns: Sequence[Key], optional: Collection[Key], names: Sequence[Any]
) -> list[str]:
    for column in columns:
        if column not in names and column not in optional:
            raise InputError(f"{source}: no column {column!r}; it has {_listed(names)}.")
    return [str(column) for column in columns if column in names]


def _listed(names: Collection[Any]) -> str:
    shown = [str(name)[:40] for name in names]
    return ", ".join(shown[:20]) + (", ..." if len(shown) > 20 else "")


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."

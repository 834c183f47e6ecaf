"""Writes predictions to JSON Lines, CSV or Parquet, depending on the file's suffix."""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.common.files import atomic_open

Row = Mapping[str, Any]


def json_line(value: Any) -> str:
    """Format a value as one line of JSON."""
    return json.dumps(value, ensure_ascii=False, default=str)  # str formats dates, which Parquet files contain


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """Write `rows` atomically, and return their number. In CSV, nested values are written as JSON."""
    count, suffix = 0, path.suffix.lower()
    if suffix == ".parquet":
        return _write_parquet(path, list(rows))
    if suffix in (".csv", ".tsv"):
        return _write_csv(path, list(rows), "\t" if suffix == ".tsv" else ",")
    with atomic_open(path, "w") as file:
        for row in rows:
            file.write(json_line(row) + "\n")
            count += 1
    return count


def _column_names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _write_csv(path: Path, rows: Sequence[Row], delimiter: str) -> int:
    with atomic_open(path, "w") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        names = _column_names(rows)
        writer.writerow(names)
        for row in rows:
            cells = (row.get(name) for name in names)
            writer.writerow([json_line(cell) if isinstance(cell, dict | list | bool) else cell for cell in cells])
    return len(rows)


def _write_parquet(path: Path, rows: Sequence[Row]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def column(values: list[Any]) -> Any:
        try:
            return pa.array(values)
        except pa.ArrowException:  # values of several types
            return pa.array([value if isinstance(value, str | None) else json_line(value) for value in values])

    table = pa.table({name: column([row.get(name) for row in rows]) for name in _column_names(rows)})
    with atomic_open(path) as file:
        pq.write_table(table, file)
    return len(rows)

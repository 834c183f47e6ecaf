"""Parquet files, cut into row groups."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError
from pretrain.corpus.inputs import Chunk, Input, Problems, Span, check_column, one_line
from pretrain.corpus.text_columns import ROWS_PER_READ, ColumnReader


class Reader(ColumnReader):
    """Rows of Parquet files."""

    suffixes = (".parquet",)
    text_share = 2.0  # columns are compressed, usually with Snappy

    def find(self, config_key: str) -> list[Input]:
        files = super().find(config_key)
        first = Path(files[0].paths[0])
        check_column(self.config, config_key, first, _column_names)
        _check_type(first, self.config.text_column, config_key)
        return files

    def cut(self, item: Input) -> Iterator[Span]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        problems = Problems()
        try:
            group_count = pq.read_metadata(item.paths[0]).num_row_groups
        except (OSError, pa.ArrowException) as error:
            group_count = 0
            problems.add(item.paths[0], f"broken file: {one_line(error)}")
        for group in range(group_count):
            yield Span(start=group, end=group + 1, bytes=item.bytes // group_count)
        if not group_count:
            yield Span(problems=problems.entries())

    def values(self, chunk: Chunk) -> Iterator[Any]:
        import pyarrow.parquet as pq

        if chunk.start == chunk.end:
            return
        with pq.ParquetFile(chunk.paths[0], memory_map=True) as file:
            column, names = self.config.text_column, file.schema_arrow.names
            if column not in names:
                raise InputError(f"{chunk.paths[0]}: no column {column!r}; it has {', '.join(names)}.")
            for batch in file.iter_batches(ROWS_PER_READ, row_groups=[chunk.start], columns=[column]):
                yield from _as_bytes(batch.column(0)).to_pylist()


def _as_bytes(column: Any) -> Any:
    """Convert a column of strings to bytes, which the base class validates; Arrow does not validate strings."""
    import pyarrow as pa

    dtype = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    is_text = pa.types.is_string(dtype) or pa.types.is_large_string(dtype) or pa.types.is_string_view(dtype)
    return column.cast(pa.large_binary()) if is_text else column


def _column_names(file: Path) -> list[str]:
    import pyarrow.parquet as pq

    return pq.read_schema(file).names


def _check_type(file: Path, column: str, config_key: str) -> None:
    """Raise `InputError` if a column cannot contain text, such as a column of lists. Unreadable files are skipped."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        dtype = pq.read_schema(file).field(column).type
    except (OSError, pa.ArrowException):
        return
    dtype = dtype.value_type if pa.types.is_dictionary(dtype) else dtype
    if not any(str(dtype).endswith(name) for name in ("string", "string_view", "binary", "binary_view", "null")):
        raise InputError(
            f"{config_key}.text_column: {column!r} in {file} is {dtype}, not text. Name or write a column of strings."
        )

"""Parquet files, cut into their row groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError
from pretrain.corpus.inputs import Input, Piece, Problems, Span, check_column, one_line
from pretrain.corpus.text_columns import ROWS_PER_READ, ColumnReader


class Reader(ColumnReader):
    """Rows of Parquet files, by row groups."""

    suffixes = (".parquet",)

    def find(self, where: str) -> list[Input]:
        files = super().find(where)
        check_column(self.config, where, Path(files[0].paths[0]), _column_names)
        return files

    def cut(self, item: Input) -> Iterator[Span]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        problems = Problems()
        try:
            groups = pq.read_metadata(item.paths[0]).num_row_groups
        except (OSError, pa.ArrowException) as error:
            groups = 0
            problems.add(item.paths[0], f"broken file: {one_line(error)}")
        for group in range(groups):
            yield Span(start=group, end=group + 1, bytes=item.bytes // groups)
        if not groups:
            yield Span(problems=problems.entries())

    def values(self, piece: Piece) -> Iterator[Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if piece.start == piece.end:
            return
        with pq.ParquetFile(piece.paths[0], memory_map=True) as file:
            column, names = self.config.text_column, file.schema_arrow.names
            if column not in names:
                raise InputError(f"{piece.paths[0]}: no column {column!r}; it has {', '.join(names)}.")
            for batch in file.iter_batches(ROWS_PER_READ, row_groups=[piece.start], columns=[column]):
                texts = batch.column(0)
                # Not validated by Arrow: as bytes, this reader reports bad bytes itself.
                yield from (texts.cast(pa.binary()) if pa.types.is_string(texts.type) else texts).to_pylist()


def _column_names(file: Path) -> list[str]:
    import pyarrow.parquet as pq

    return pq.read_schema(file).names

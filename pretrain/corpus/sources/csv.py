"""Files of comma- or tab-separated values with a header, read in order: quoted texts may hold line breaks."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from pretrain.common.wording import counted
from pretrain.corpus import inputs
from pretrain.corpus.inputs import COMPRESSED, BrokenInputError, Input, Piece, Span
from pretrain.corpus.text_columns import ColumnReader


class Reader(ColumnReader):
    """Rows of .csv and .tsv files. A file is read in order, by one process."""

    suffixes = (".csv", ".tsv")

    def find(self, where: str) -> list[Input]:
        files = super().find(where)
        inputs.check_column(self.config, where, Path(files[0].paths[0]), _column_names)
        return files

    def is_stream(self, item: Input) -> bool:
        return True

    def cut(self, item: Input) -> Iterator[Span]:
        return inputs.carried_spans(item, self._blocks(Path(item.paths[0])), [])

    def values(self, piece: Piece) -> Iterable[Any]:
        return piece.data

    def _blocks(self, path: Path) -> Iterator[tuple[list[bytes | None], int]]:
        """(texts of a block of rows as bytes, bytes of the file read so far)."""
        import pyarrow as pa

        bad_rows: list[str] = []
        with path.open("rb") as raw:
            try:
                for batch in _open_csv(path, raw, self.config.text_column, bad_rows):
                    yield batch.column(0).to_pylist(), raw.tell()
            except (ValueError, pa.ArrowException, *inputs.BROKEN) as error:
                if "Empty CSV" not in str(error):
                    raise BrokenInputError(f"broken file: {inputs.one_line(error)}") from None
        if bad_rows:
            raise BrokenInputError(f"{counted(len(bad_rows), 'row')} left out, the first with {bad_rows[0]}")


def _open_csv(path: Path, raw: IO[bytes], column: str, bad_rows: list[str]) -> Any:
    """A reader of record batches with only the text column, as bytes. Rows of another width go to `bad_rows`."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    def skip(row: Any) -> str:
        bad_rows.append(f"{counted(row.actual_columns, 'column')} instead of {row.expected_columns}")
        return "skip"

    stream = COMPRESSED[path.suffix](raw) if path.suffix in COMPRESSED else raw
    return arrow_csv.open_csv(
        pa.PythonFile(stream, "r"),
        read_options=arrow_csv.ReadOptions(block_size=inputs.PIECE_BYTES, use_threads=False),
        parse_options=arrow_csv.ParseOptions(
            delimiter=_delimiter(path), newlines_in_values=True, invalid_row_handler=skip
        ),
        convert_options=arrow_csv.ConvertOptions(
            include_columns=[column],
            column_types={column: pa.binary()},
            strings_can_be_null=False,
            check_utf8=False,
        ),
    )


def _column_names(file: Path) -> list[str]:
    with inputs.open_file(file) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        return next(csv.reader(text, delimiter=_delimiter(file)), [])


def _delimiter(path: Path) -> str:
    return "\t" if inputs.plain_suffix(path) == ".tsv" else ","

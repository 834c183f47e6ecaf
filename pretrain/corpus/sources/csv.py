"""Comma- or tab-separated files with a header, which are read in order, since quoted cells may contain line breaks."""

import contextlib
import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.quoting import Quoting, reject_quoted_cells
from pretrain.common.wording import counted
from pretrain.corpus import inputs, records
from pretrain.corpus.inputs import BrokenInputError, Chunk, Input, Problems, Span
from pretrain.corpus.streams import TextStream, open_text
from pretrain.corpus.text_columns import ColumnReader


class Reader(ColumnReader):
    """Rows of .csv and .tsv files. Each file is read by one process."""

    suffixes = (".csv", ".tsv")

    def find(self, config_key: str) -> list[Input]:
        found = super().find(config_key)
        inputs.check_column(self.config, config_key, Path(found[0].paths[0]), _column_names)
        return found

    def is_stream(self, item: Input) -> bool:
        return True

    def cut(self, item: Input) -> Iterator[Span]:
        problems = Problems()
        return inputs.data_spans(item, self._text_batches(Path(item.paths[0]), problems), [], problems)

    def values(self, chunk: Chunk) -> Iterable[Any]:
        return chunk.data

    def _text_batches(self, path: Path, problems: Problems) -> Iterator[tuple[list[bytes | None], int]]:
        """Yield (text column of a batch of rows, as bytes; number of bytes of the file read so far)."""
        import pyarrow as pa

        try:
            for batch, bytes_read in _batches(path, self.config.text_column, self._quoting(path), problems):
                yield batch.column(0).to_pylist(), bytes_read
        except (ValueError, pa.ArrowException, *inputs.READ_ERRORS) as error:
            if "Empty CSV" not in str(error):
                raise BrokenInputError(f"broken file: {inputs.one_line(error)}") from None

    def _quoting(self, path: Path) -> Quoting:
        """Return the quoting of a file. Raises `InputError` if it is ambiguous and must be configured."""
        if self.config.quoting != "auto":
            return self.config.quoting
        if _delimiter(path) == ",":
            return "standard"
        reject_quoted_cells(_lines(path), _delimiter(path), path, "`quoting` of its source")
        return "none"


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file up to the first damage, which is counted later, when the rows are read."""
    with contextlib.suppress(OSError), open_text(path) as stream:
        yield from io.TextIOWrapper(io.BufferedReader(stream), "utf-8-sig", "replace", newline="")


def _batches(path: Path, column: str, quoting: Quoting, problems: Problems) -> Iterator[tuple[Any, int]]:
    """Yield (record batch of the text column, bytes read so far). Rows with a wrong number of columns are `problems`.

    Arrow cannot read a row that is larger than its block size, nor continue where it failed. In this case, the file is
    read again from the start with larger blocks.
    """
    yielded_rows, block_bytes = 0, inputs.CHUNK_BYTES
    while True:
        row_count, skipped = 0, Problems()
        try:
            with path.open("rb") as raw:
                stream = TextStream(path, raw)
                for batch in _open_csv(path, stream, column, quoting, block_bytes, skipped):
                    new_rows = batch.slice(max(0, yielded_rows - row_count))
                    row_count += batch.num_rows
                    for smaller in _smaller_batches(new_rows) if block_bytes > inputs.CHUNK_BYTES else [new_rows]:
                        yield smaller, raw.tell()
            problems.extend(skipped.entries())
            if stream.fault:
                raise BrokenInputError(f"broken file: {stream.fault}")
            return
        except ValueError as error:
            if "straddling" not in str(error):
                problems.extend(skipped.entries())
                raise
        if block_bytes >= records.MAX_RECORD_BYTES:
            raise InputError(
                f"{path}: a row of more than {records.MAX_RECORD_BYTES >> 20} MB. Check that its quotes are closed."
            )
        yielded_rows, block_bytes = max(yielded_rows, row_count), 2 * block_bytes


def _smaller_batches(batch: Any) -> Iterator[Any]:
    """Split a batch into batches of about CHUNK_BYTES."""
    rows = max(1, batch.num_rows * inputs.CHUNK_BYTES // max(1, batch.nbytes))
    return (batch.slice(start, rows) for start in range(0, batch.num_rows, rows))


def _open_csv(
    path: Path, stream: TextStream, column: str, quoting: Quoting, block_bytes: int, skipped: Problems
) -> Any:
    """Open a reader of record batches of the text column, as bytes; `skipped` gets rows with a wrong column count."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    def skip(row: Any) -> str:
        difference = f"{counted(row.actual_columns, 'column')} instead of {row.expected_columns}"
        skipped.add(str(path), "row left out", difference)
        return "skip"

    is_quoted = quoting == "standard"
    return arrow_csv.open_csv(
        pa.PythonFile(stream, "r"),
        read_options=arrow_csv.ReadOptions(block_size=block_bytes, use_threads=False),
        parse_options=arrow_csv.ParseOptions(
            delimiter=_delimiter(path),
            quote_char='"' if is_quoted else False,
            newlines_in_values=is_quoted,
            invalid_row_handler=skip,
        ),
        convert_options=arrow_csv.ConvertOptions(
            include_columns=[column],
            column_types={column: pa.binary()},
            strings_can_be_null=False,
            check_utf8=False,
        ),
    )


def _column_names(file: Path) -> list[str] | None:
    with open_text(file) as stream:
        text = io.TextIOWrapper(io.BufferedReader(stream), encoding="utf-8-sig", newline="")
        try:
            return next(csv.reader(text, delimiter=_delimiter(file)), [])
        except csv.Error as error:  # a name longer than 128 kB or, in Python 3.10, a NUL, as in UTF-16
            return ["\0"] if "NUL" in str(error) else None


def _delimiter(path: Path) -> str:
    return "\t" if inputs.plain_suffix(path) == ".tsv" else ","

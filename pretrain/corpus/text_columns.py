"""Base class of sources that are tables with a column of text."""

from collections.abc import Iterable, Iterator
from typing import Any

from pretrain.corpus.inputs import Chunk, Problems, SourceReader, decode, one_line, without_surrogates

ROWS_PER_READ = 1000


class ColumnReader(SourceReader):
    """Reader of tables, one document per row. Subclasses implement `values`, which reads the text column."""

    def values(self, chunk: Chunk) -> Iterable[Any]:
        """Return the text column of a chunk, in order: str, or bytes that may not be UTF-8."""
        raise NotImplementedError

    def read(self, chunk: Chunk, problems: Problems) -> Iterator[str]:
        import pyarrow as pa

        path = chunk.paths[0]
        try:
            for value in self.values(chunk):
                if isinstance(value, bytes):
                    yield decode(value, path, 0, problems)
                elif isinstance(value, str):
                    yield without_surrogates(value, path, problems)
                else:
                    problems.add(path, f"row whose {self.config.text_column!r} is not text")
        except (OSError, pa.ArrowException) as error:
            problems.add(path, f"broken file: {one_line(error)}", f"rows or row group from {chunk.start} on")

"""Unchanged text files, one document each: code, tables, or other text in which line breaks matter."""

from collections.abc import Iterator
from pathlib import Path

from pretrain.corpus.inputs import Chunk, Input, Problems, SourceReader, grouped
from pretrain.corpus.sources.books import read_text


class Reader(SourceReader):
    """Files of a folder or glob, with any suffix."""

    def find(self, config_key: str) -> list[Input]:
        return grouped(self.find_files(config_key), config_key)

    def read(self, chunk: Chunk, problems: Problems) -> Iterator[str]:
        for path in chunk.paths:
            if text := read_text(Path(path), problems):
                yield text

"""Plain text with one document per line, such as OSCAR's files or the --line_by_line input of run_mlm.py."""

from collections.abc import Iterator

from pretrain.corpus.inputs import Chunk, Problems, decode
from pretrain.corpus.records import RecordReader


class Reader(RecordReader):
    """Lines that are not blank, one document each."""

    record_start = b"\n"
    previous_bytes = 1

    def read(self, chunk: Chunk, problems: Problems) -> Iterator[str]:
        text = decode(self.records(chunk, problems), chunk.paths[0], chunk.start, problems)
        return filter(str.strip, text.split("\n"))

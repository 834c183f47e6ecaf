"""Files of records that start with a marker, read in byte ranges, or in order if they are compressed."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from pretrain.common.errors import InputError
from pretrain.corpus import bzip2, inputs
from pretrain.corpus.inputs import BrokenInputError, Chunk, Input, Problems, SourceReader, Span, compression
from pretrain.corpus.streams import TextStream, is_utf16

MAX_RECORD_BYTES = 512 << 20  # maximum size of a record; a larger one means that the file has another format
BZIP2_CHUNK_BYTES = 2 << 20  # compressed bytes per chunk of a .bz2 file
STREAM_READ_BYTES = 1 << 18  # bytes per read of a file that is read in order


class RecordReader(SourceReader):
    """Reader of files of consecutive records. A kind of source defines the marker at the start of a record."""

    record_start: ClassVar[bytes]
    previous_bytes: ClassVar[int] = 0  # number of bytes of `record_start` that belong to the previous record
    splits_bzip2: ClassVar[bool] = False  # whether ranges of a .bz2 file of several streams are read separately

    def is_stream(self, item: Input) -> bool:
        path = Path(item.paths[0])
        return (bool(compression(path)) or is_utf16(path)) and not self._is_split_bzip2(path)

    def cut(self, item: Input) -> Iterator[Span]:
        path = Path(item.paths[0])
        if self.is_stream(item):
            return inputs.data_spans(item, self._record_batches(path), b"")
        return _byte_ranges(item, BZIP2_CHUNK_BYTES if compression(path) else inputs.CHUNK_BYTES)

    def records(self, chunk: Chunk, problems: Problems) -> bytes:
        """Return the complete records of a chunk, concatenated."""
        return chunk.data if chunk.data is not None else self._read_range(chunk, problems)

    def _is_split_bzip2(self, path: Path) -> bool:
        return self.splits_bzip2 and compression(path) == ".bz2" and bzip2.has_several_streams(path)

    def _record_batches(self, path: Path) -> Iterator[tuple[bytes, int]]:
        """Yield (complete records of about CHUNK_BYTES, bytes of the file read so far)."""
        buffer, searched = bytearray(), 0  # searched: number of bytes of `buffer` without the start of another record
        is_last = False
        with path.open("rb") as raw:
            stream = TextStream(path, raw)
            while not is_last:
                read = stream.read(STREAM_READ_BYTES)
                buffer += read
                is_last = not read
                if len(buffer) >= searched + inputs.CHUNK_BYTES and not is_last:
                    end = self.last_record_start(buffer)
                    if end > 0:
                        yield bytes(buffer[:end]), raw.tell()
                        del buffer[:end]
                    searched = len(buffer)
                if searched > MAX_RECORD_BYTES:
                    raise self._no_record_error(path)
            if buffer:
                yield bytes(buffer), raw.tell()
        if stream.fault:
            raise BrokenInputError(f"broken file: {stream.fault}")

    def _read_range(self, chunk: Chunk, problems: Problems) -> bytes:
        """Return the records that start in the chunk's range of the file."""
        path = Path(chunk.paths[0])
        if not path.stat().st_size:
            problems.add(str(path), "empty file")
            return b""
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            if compression(path) == ".bz2":
                return bzip2.read_records(text, chunk, self.record_start, problems)
            start, end = self.next_record_start(text, chunk.start), self.next_record_start(text, chunk.end)
            if end - start > MAX_RECORD_BYTES:
                raise self._no_record_error(path)
            return text[start:end]

    def last_record_start(self, text: bytearray) -> int:
        """Return the offset of the last record in `text`; 0 if it is the first one."""
        offset = text.rfind(self.record_start, 1)
        return offset + self.previous_bytes if offset > 0 else 0

    def next_record_start(self, text: mmap.mmap, position: int) -> int:
        """Return the offset of the first record at or after `position`; the length of the file if there is none."""
        if position == 0:
            return 0
        start = text.find(self.record_start, position - self.previous_bytes)
        return len(text) if start < 0 else start + self.previous_bytes

    def _no_record_error(self, path: Path) -> InputError:
        marker = self.record_start.decode().strip() or "line end"
        return InputError(
            f"{path}: no {marker!r} in {MAX_RECORD_BYTES >> 20} MB. Check that the file is of kind {self.config.kind}."
        )


def _byte_ranges(item: Input, size: int) -> Iterator[Span]:
    for start in range(0, max(item.bytes, 1), size):
        end = min(start + size, item.bytes)
        yield Span(start=start, end=end, bytes=end - start)

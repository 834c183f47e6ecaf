"""Read ranges of bzip2 files that consist of several independent streams, as Wikimedia and pbzip2 write them."""

import bz2
import mmap
import re
from pathlib import Path

from pretrain.corpus.inputs import Chunk, Problems, one_line

_STREAM = re.compile(rb"BZh[1-9]1AY&SY")  # stream header and the first block's magic, byte-aligned
_SEARCHED_BYTES = 64 << 20
_READ_BYTES = 1 << 20


def has_several_streams(path: Path) -> bool:
    """Return whether a second stream starts in the first 64 MB, so that ranges of the file can be read separately."""
    with path.open("rb") as file:
        return _STREAM.search(file.read(_SEARCHED_BYTES), 1) is not None


def read_records(raw: mmap.mmap, chunk: Chunk, record_start: bytes, problems: Problems) -> bytes:
    """Return the records of the streams that start in the chunk's range of the file `raw`."""
    first = _STREAM.search(raw, chunk.start)
    if not first or first.start() >= chunk.end:
        return b""
    streams, position = [], first.start()
    while position < min(chunk.end, len(raw)):
        stream, position = _next_stream(raw, position, chunk, problems)
        streams.append(stream)
    streams.append(_rest_of_record(raw, position, chunk, record_start, problems))
    data = b"".join(streams)
    start = 0 if chunk.start == 0 else data.find(record_start)
    return data[start:] if start >= 0 else b""


def _rest_of_record(raw: mmap.mmap, position: int, chunk: Chunk, record_start: bytes, problems: Problems) -> bytes:
    """Return the content of the streams from `position` on, up to the first record start."""
    rest = b""
    while position < len(raw):
        stream, position = _next_stream(raw, position, chunk, problems)
        rest += stream
        end = rest.find(record_start)
        if end >= 0:
            return rest[:end]
    return rest


def _next_stream(raw: mmap.mmap, position: int, chunk: Chunk, problems: Problems) -> tuple[bytes, int]:
    """Return the content of the stream at `position`, empty if it is damaged, and the position of the next stream."""
    try:
        return _read_stream(raw, position)
    except (OSError, EOFError, ValueError) as error:
        problems.add(chunk.paths[0], f"broken bzip2 stream: {one_line(error)}", f"byte {position}")
        next_start = _STREAM.search(raw, position + 1)
        return b"", next_start.start() if next_start else len(raw)


def _read_stream(raw: mmap.mmap, position: int) -> tuple[bytes, int]:
    """Return the content of the stream at `position`, and the position after it."""
    decompressor = bz2.BZ2Decompressor()
    contents = []
    while not decompressor.eof:
        read = raw[position : position + _READ_BYTES]
        if not read:
            raise EOFError("the file is cut off in the middle of a stream")
        contents.append(decompressor.decompress(read))
        position += len(read) - len(decompressor.unused_data)
    return b"".join(contents), position

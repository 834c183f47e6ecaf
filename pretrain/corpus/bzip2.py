"""Ranges of a bzip2 file of several streams, as Wikimedia and pbzip2 write: every stream is read by itself."""

import bz2
import mmap
import re
from pathlib import Path

from pretrain.corpus.inputs import Chunk, Problems, one_line

_STREAM = re.compile(rb"BZh[1-9]1AY&SY")  # stream header and the first block's magic, byte-aligned
_SEARCHED_BYTES = 64 << 20
_READ_BYTES = 1 << 20


def has_several_streams(path: Path) -> bool:
    """Whether a second stream begins in the first 64 MB: then any range of the file can be read by itself."""
    with path.open("rb") as file:
        return _STREAM.search(file.read(_SEARCHED_BYTES), 1) is not None


def read_records(text: mmap.mmap, chunk: Chunk, record_start: bytes, problems: Problems) -> bytes:
    """The records that begin in the streams that begin in [start, end) of the file `text`."""
    first = _STREAM.search(text, chunk.start)
    if not first or first.start() >= chunk.end:
        return b""
    parts, position = [], first.start()
    while position < min(chunk.end, len(text)):
        stream, position = _next_stream(text, position, chunk, problems)
        parts.append(stream)
    parts.append(_rest_of_record(text, position, chunk, record_start, problems))
    data = b"".join(parts)
    begin = 0 if chunk.start == 0 else data.find(record_start)
    return data[begin:] if begin >= 0 else b""


def _rest_of_record(text: mmap.mmap, position: int, chunk: Chunk, record_start: bytes, problems: Problems) -> bytes:
    """The bytes of the streams from `position` on, before the first record that begins in them."""
    rest = b""
    while position < len(text):
        stream, position = _next_stream(text, position, chunk, problems)
        rest += stream
        end = rest.find(record_start)
        if end >= 0:
            return rest[:end]
    return rest


def _next_stream(text: mmap.mmap, position: int, chunk: Chunk, problems: Problems) -> tuple[bytes, int]:
    """The stream at `position`, empty if it is broken, and where the next one begins."""
    try:
        return _read_stream(text, position)
    except (OSError, EOFError, ValueError) as error:
        problems.add(chunk.paths[0], f"broken bzip2 stream: {one_line(error)}", f"byte {position}")
        following = _STREAM.search(text, position + 1)
        return b"", following.start() if following else len(text)


def _read_stream(text: mmap.mmap, position: int) -> tuple[bytes, int]:
    """One whole stream and the position after it."""
    decompressor = bz2.BZ2Decompressor()
    parts = []
    while not decompressor.eof:
        read = text[position : position + _READ_BYTES]
        if not read:
            raise EOFError("the file ends in the middle of a stream")
        parts.append(decompressor.decompress(read))
        position += len(read) - len(decompressor.unused_data)
    return b"".join(parts), position

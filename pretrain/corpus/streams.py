"""Read files in order, up to the first damage: decompress them, and convert UTF-16 to UTF-8."""

import codecs
import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pretrain.corpus.inputs import COMPRESSED, READ_ERRORS, compression, one_line

READ_BYTES = 1 << 18
_BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class TextStream(io.RawIOBase):
    """The decompressed bytes of a file; UTF-16 with a byte-order mark is converted to UTF-8.

    Reading a damaged file does not raise: it returns the bytes before the damage, which `fault` describes.
    """

    def __init__(self, path: Path, raw: IO[bytes]) -> None:
        super().__init__()
        self.fault = ""
        self._stream: Any = COMPRESSED[compression(path)](raw) if compression(path) else raw
        self._buffer = b""
        self._decoder: codecs.IncrementalDecoder | None = None
        self._is_started = self._is_at_end = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self.read(len(buffer))
        buffer[: len(read)] = read
        return len(read)

    def read(self, size: int = -1) -> bytes:
        """Return `size` bytes, or fewer at the end of the file; if `size` is negative, all bytes."""
        reads, remaining = [], sys.maxsize if size < 0 else size
        while remaining and (read := self._read_some(remaining)):
            reads.append(read)
            remaining -= len(read)
        return reads[0] if len(reads) == 1 else b"".join(reads)

    def _read_some(self, max_bytes: int) -> bytes:
        """Return between 1 and `max_bytes` bytes, or b"" at the end of the file."""
        while not self._buffer and not self._is_at_end:
            self._buffer = self._read_next(max(len(_BYTE_ORDER_MARKS[0]), min(max_bytes, READ_BYTES)))
        result, self._buffer = self._buffer[:max_bytes], self._buffer[max_bytes:]
        return result

    def _read_next(self, max_bytes: int) -> bytes:
        try:
            # `read1`, since `read` of a compressed file would lose the bytes before the damage.
            read: bytes = self._stream.read1(max_bytes)
        except READ_ERRORS as error:
            self.fault, read = one_line(error), b""
        self._is_at_end = not read
        if not self._is_started and read.startswith(_BYTE_ORDER_MARKS):
            self._decoder = codecs.getincrementaldecoder("utf-16")("replace")
        self._is_started = True
        return self._decoder.decode(read, self._is_at_end).encode() if self._decoder else read


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[TextStream]:
    """Open a file for sequential reading as UTF-8. Raises `OSError` if it cannot be opened."""
    with path.open("rb") as raw:
        yield TextStream(path, raw)


def is_utf16(path: Path) -> bool:
    """Return whether an uncompressed file starts with a byte-order mark of UTF-16."""
    with contextlib.suppress(OSError), path.open("rb") as raw:
        return raw.read(2) in _BYTE_ORDER_MARKS
    return False

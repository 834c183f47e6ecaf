"""Files read in order: decompressed, UTF-16 as UTF-8, and up to where they are broken."""

import codecs
import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pretrain.corpus.inputs import BROKEN, COMPRESSED, compression, one_line

READ_BYTES = 1 << 18
_BYTE_ORDER_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


class TextStream(io.RawIOBase):
    """The bytes of a file, decompressed, as UTF-8 if it begins with a byte-order mark of UTF-16.

    Reading a broken file raises nothing: what comes before the fault is read, and `fault` then says what it is.
    """

    def __init__(self, path: Path, raw: IO[bytes]) -> None:
        super().__init__()
        self.fault = ""
        self._stream: Any = COMPRESSED[compression(path)](raw) if compression(path) else raw
        self._ready = b""
        self._decoder: codecs.IncrementalDecoder | None = None
        self._is_begun = self._is_ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        read = self.read(len(buffer))
        buffer[: len(read)] = read
        return len(read)

    def read(self, size: int = -1) -> bytes:
        """At most `size` bytes, fewer only at the end; all if it is negative."""
        parts, left = [], sys.maxsize if size < 0 else size
        while left and (part := self._some(left)):
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _some(self, most: int) -> bytes:
        """At least one byte and at most `most`; none at the end."""
        while not self._ready and not self._is_ended:
            self._ready = self._next(max(len(_BYTE_ORDER_MARKS[0]), min(most, READ_BYTES)))
        some, self._ready = self._ready[:most], self._ready[most:]
        return some

    def _next(self, most: int) -> bytes:
        try:
            # `read` would lose what it has read before the fault.
            read: bytes = self._stream.read1(most)
        except BROKEN as error:
            self.fault, read = one_line(error), b""
        self._is_ended = not read
        if not self._is_begun and read.startswith(_BYTE_ORDER_MARKS):
            self._decoder = codecs.getincrementaldecoder("utf-16")("replace")
        self._is_begun = True
        return self._decoder.decode(read, self._is_ended).encode() if self._decoder else read


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[TextStream]:
    """The file open for reading UTF-8 in order. Raises `OSError` if it cannot be opened."""
    with path.open("rb") as raw:
        yield TextStream(path, raw)


def is_utf16(path: Path) -> bool:
    """Whether a file that is not compressed begins with a byte-order mark of UTF-16."""
    with contextlib.suppress(OSError), path.open("rb") as raw:
        return raw.read(2) in _BYTE_ORDER_MARKS
    return False

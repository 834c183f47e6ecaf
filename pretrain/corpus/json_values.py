"""Files of JSON values that are not one a line: an array of objects, or indented objects one after the other."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from pretrain.corpus import inputs
from pretrain.corpus.inputs import BrokenInputError
from pretrain.corpus.streams import READ_BYTES, TextStream, open_text

_HEAD_BYTES = 1000
_SPREAD = re.compile(rb'(?:\xef\xbb\xbf)?\s*(?:\[\s*\{|\{\s*\n\s*")')
_OBJECT = re.compile(rb'(?:\xef\xbb\xbf)?[\s\[]*\{\s*"')
_BETWEEN = re.compile(r"[\s,\[\]\ufeff]*")
_ESCAPE = 6  # characters of the longest token that may be cut at the end of what is read, "\\ud83d"


def begins_with_object(path: Path) -> bool:
    """Whether the first thing in a file is a JSON object, alone or in an array. Raises `OSError`."""
    with open_text(path) as stream:
        return _OBJECT.match(stream.read(_HEAD_BYTES)) is not None


def is_spread(path: Path) -> bool:
    """Whether a file's objects are in an array or over several lines. Raises `OSError`."""
    with open_text(path) as stream:
        return _SPREAD.match(stream.read(_HEAD_BYTES)) is not None


def lines(path: Path) -> Iterator[tuple[bytes, int]]:
    """(values of about a chunk, one a line; bytes of the file read so far).

    Raises `BrokenInputError` where the file or a value cannot be read; all before it has been yielded.
    """
    with path.open("rb") as raw:
        stream = TextStream(path, raw)
        values: list[bytes] = []
        size, broken = 0, None
        try:
            for value in _values(stream):
                values.append(value)
                size += len(value)
                if size >= inputs.CHUNK_BYTES:
                    yield b"\n".join(values), raw.tell()
                    values, size = [], 0
        except BrokenInputError as error:
            broken = error
        if values:
            yield b"\n".join(values), raw.tell()
        if broken is not None:
            raise broken


def _values(stream: TextStream) -> Iterator[bytes]:
    """The text of one value after the other, without line ends, which JSON has only between its tokens."""
    decode, is_array = json.JSONDecoder().raw_decode, False
    text, place, is_ended, between = "", 0, False, ""
    while True:
        start, place = place, _next_place(text, place)
        between += text[start:place]
        try:
            if place == len(text):
                raise json.JSONDecodeError("no value", text, place)
            end = decode(text, place)[1]
        except (json.JSONDecodeError, RecursionError) as error:
            if is_ended and place == len(text) and not stream.fault:
                if is_array and "]" not in between:
                    raise BrokenInputError("JSON array without an end") from None
                return
            if is_ended or not _is_cut(error, text):
                raise BrokenInputError(_fault(stream, error, is_cut=_is_cut(error, text))) from None
            read = stream.read(max(READ_BYTES, len(text) - place))
            is_ended = not read
            text, place = text[place:] + read.decode("utf-8", "surrogateescape"), 0
            continue
        is_array = is_array or "[" in between
        between = ""
        yield text[place:end].replace("\n", " ").replace("\r", " ").encode("utf-8", "surrogateescape")
        place = end


def _next_place(text: str, place: int) -> int:
    between = _BETWEEN.match(text, place)
    return between.end() if between else place


def _is_cut(error: json.JSONDecodeError | RecursionError, text: str) -> bool:
    """Whether more text may mend the value."""
    if isinstance(error, RecursionError):
        return False
    return error.msg.startswith("Unterminated") or error.pos >= len(text) - _ESCAPE


def _fault(stream: TextStream, error: Exception, *, is_cut: bool) -> str:
    if stream.fault:
        return f"broken file: {stream.fault}"
    return "JSON that ends within a value" if is_cut else f"JSON that cannot be read: {inputs.one_line(error)}"

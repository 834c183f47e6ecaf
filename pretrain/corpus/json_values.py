"""Files of JSON values that are not one per line: an array of objects, or consecutive indented objects."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError
from pretrain.corpus import inputs
from pretrain.corpus.inputs import BrokenInputError
from pretrain.corpus.streams import TextStream, open_text

MAX_BYTES = 10**9  # maximum decompressed size of such a file, which is read into memory as a whole
_HEAD_BYTES = 1000
_FIRST_BYTES = 16 << 20  # number of bytes that are read to find the first value
_MULTILINE = re.compile(rb'(?:\xef\xbb\xbf)?\s*(?:\[\s*\{|\{\s*\n\s*")')
_OBJECT = re.compile(rb'(?:\xef\xbb\xbf)?[\s\[]*\{\s*"')
_SEPARATORS = re.compile(r"[\s,\[\]\ufeff]*")
_decode = json.JSONDecoder().raw_decode


def starts_with_object(path: Path) -> bool:
    """Return whether a file starts with a JSON object, alone or in an array. Raises `OSError`."""
    with open_text(path) as stream:
        return _OBJECT.match(stream.read(_HEAD_BYTES)) is not None


def is_multiline(path: Path) -> bool:
    """Return whether a file's objects are in an array or span several lines. Raises `OSError`."""
    with open_text(path) as stream:
        return _MULTILINE.match(stream.read(_HEAD_BYTES)) is not None


def first_value(path: Path) -> Any:
    """Return the first value of a file in any layout. Raises `OSError`, or `ValueError` for a long or damaged value."""
    with open_text(path) as stream:
        text = stream.read(_FIRST_BYTES).decode("utf-8", "replace")
    return _decode(text, len(_separators(text, 0)))[0]


def value_batches(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield (JSON values, one per line, about CHUNK_BYTES in all; approximate offset of their end in the file).

    Raises `BrokenInputError` if the file or a value cannot be read, after yielding all earlier values, and `InputError`
    if the file is too large.
    """
    with path.open("rb") as raw:
        stream = TextStream(path, raw)
        data, file_bytes = stream.read(MAX_BYTES + 1), raw.tell()
    if len(data) > MAX_BYTES:
        raise too_large_error(path)
    text, fault = data.decode("utf-8", "surrogateescape"), stream.fault and f"broken file: {stream.fault}"
    values: list[bytes] = []
    position = size = 0
    is_array = False
    while True:
        separators = _separators(text, position)
        position, is_array = position + len(separators), is_array or "[" in separators
        if position == len(text):
            break
        try:
            end = _decode(text, position)[1]
        except (json.JSONDecodeError, RecursionError) as error:
            fault = fault or f"JSON that cannot be read: {inputs.one_line(error)}"
            break
        # Raw line breaks can only occur between JSON tokens.
        line = text[position:end].replace("\n", " ").replace("\r", " ")
        values.append(line.encode("utf-8", "surrogateescape"))
        position, size = end, size + len(values[-1])
        if size >= inputs.CHUNK_BYTES:
            yield b"\n".join(values), file_bytes * position // len(text)
            values, size = [], 0
    if values:
        yield b"\n".join(values), file_bytes * position // len(text)
    if not fault and is_array and "]" not in separators:
        fault = "JSON array without an end"
    if fault:
        raise BrokenInputError(fault)


def too_large_error(path: Path) -> InputError:
    """Return the error for a file over `MAX_BYTES`."""
    return InputError(
        f"{path}: more than {MAX_BYTES // 10**9} GB of JSON that is not one object per line. Write it as JSONL."
    )


def _separators(text: str, position: int) -> str:
    match = _SEPARATORS.match(text, position)
    return match.group() if match else ""

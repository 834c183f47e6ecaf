"""Reads the .wandb files of offline runs: protobuf records in the log format of LevelDB, after a header of 7 bytes."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_FULL, _FIRST, _LAST = 1, 2, 4


def history(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Return (W&B's step, {key: JSON}) of each row in a .wandb file, which may be truncated within a record."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    rows = []
    for content in _records(path.read_bytes()):
        record: Any = Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            rows.append((record.history.step.num, values))
    return rows


def _records(data: bytes) -> Iterator[bytes]:
    offset, parts = 7, b""
    while offset + _HEADER.size <= len(data):
        left = _BLOCK - offset % _BLOCK
        if left < _HEADER.size:
            offset += left
            continue
        _, length, kind = _HEADER.unpack_from(data, offset)
        offset += _HEADER.size
        part = data[offset : offset + length]
        if not kind or len(part) < length:
            return
        offset += length
        parts = part if kind in (_FULL, _FIRST) else parts + part
        if kind in (_FULL, _LAST):
            yield parts

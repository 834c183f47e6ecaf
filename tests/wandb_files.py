"""Reads the .wandb files of offline runs: records of protobuf in the log format of LevelDB, behind 7 bytes."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 32768
_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_FULL, _FIRST, _LAST = 1, 2, 4


def history(path: Path) -> list[tuple[int, dict[str, str]]]:
    """(W&B's step, JSON of each value) of the rows in a .wandb file, which may end within a record."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    rows = []
    for content in _records(path.read_bytes()):
        record: Any = Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            rows.append((record.history.step.num, values))
    return rows


def _records(data: bytes) -> Iterator[bytes]:
    place, parts = 7, b""
    while place + _HEADER.size <= len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER.size:
            place += left
            continue
        _, length, kind = _HEADER.unpack_from(data, place)
        place += _HEADER.size
        part = data[place : place + length]
        if not kind or len(part) < length:
            return
        place += length
        parts = part if kind in (_FULL, _FIRST) else parts + part
        if kind in (_FULL, _LAST):
            yield parts

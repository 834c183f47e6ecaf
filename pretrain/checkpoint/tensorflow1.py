"""TensorFlow 1 checkpoints read without TensorFlow, as Google released BERT in: PREFIX.index and PREFIX.data-*-of-*.

The index is a LevelDB table from the name of a variable to its BundleEntryProto; data files hold raw values. Sources,
all in tensorflow/tensorflow: core/util/tensor_bundle/tensor_bundle.cc (the bundle), core/protobuf/tensor_bundle.proto
(entries), core/lib/io/{format,block}.cc (table), core/framework/types.proto (dtypes), core/lib/hash/crc32c.h (Mask).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pretrain.common.errors import InputError


class Variable(NamedTuple):
    """The location of one variable's values."""

    name: str
    shape: tuple[int, ...]
    dtype: int  # a key of `_DTYPES`, or a type that is not read, such as strings
    shard: int
    offset: int
    size: int  # bytes
    checksum: int  # masked CRC-32C of the bytes
    sliced: bool  # a partitioned variable, whose values have other keys

    @property
    def readable(self) -> bool:
        """Whether its type is known and its values are in one piece."""
        return self.dtype in _DTYPES and not self.sliced


class Checkpoint:
    """A checkpoint's variables by name; values are read on demand.

    Args:
        prefix: the path without `.index`, such as bert_model.ckpt.

    Raises:
        InputError: a file is missing, damaged or of a kind that is not read.
    """

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        self._index = prefix.with_name(f"{prefix.name}.index")
        self._shards = 1
        try:
            self.variables = {variable.name: variable for variable in self._entries(self._index.read_bytes())}
        except FileNotFoundError:
            raise InputError(f"{self._index}: not found. Give the folder of a TensorFlow checkpoint.") from None
        except (IndexError, ValueError, struct.error) as error:
            raise self._damaged(self._index, str(error)) from None

    def read(self, name: str) -> Tensor:
        """The values of a readable variable in its own shape and dtype, their checksum verified."""
        variable = self.variables[name]
        path = self._prefix.with_name(f"{self._prefix.name}.data-{variable.shard:05d}-of-{self._shards:05d}")
        try:
            with path.open("rb") as file:
                file.seek(variable.offset)
                content = file.read(variable.size)
        except FileNotFoundError:
            raise InputError(f"{path}: not found, but listed in {self._index.name}.") from None
        dtype = _DTYPES[variable.dtype]
        numel = int(np.prod(variable.shape, dtype=np.int64))
        if len(content) != variable.size or variable.size != numel * dtype.itemsize:
            raise self._damaged(path, f"{name} is {len(content)} bytes, not {numel} values")
        if masked(crc32c(content)) != variable.checksum:
            raise self._damaged(path, f"the checksum of {name} differs")
        return torch.frombuffer(bytearray(content), dtype=dtype).view(variable.shape)

    def _entries(self, index: bytes) -> Iterator[Variable]:
        for key, value in _table(index):
            if key:
                yield _variable(key.decode(), value)
            else:  # BundleHeaderProto
                header = _message(value)
                self._shards = _first(header, 1, 1)
                if _first(header, 2, 0) != 0:
                    raise InputError(
                        f"{self._index}: big-endian files are not supported. "
                        "Save the checkpoint again with TensorFlow on a little-endian machine."
                    )

    def _damaged(self, path: Path, reason: str) -> InputError:
        return InputError(f"{path}: damaged ({reason}). Download it again.")


def crc32c(content: bytes) -> int:
    """CRC-32C (Castagnoli) of `content`.

    One step per byte is too slow in Python for a gigabyte, so the bytes are laid out as the rows of a matrix whose
    checksums advance together; neighbors are then joined, since a CRC is linear: crc(a + b) is crc(a), moved past
    len(b) zero bytes, xor crc(b) (zlib's crc32_combine).
    """
    lanes = _LANES if len(content) > 16 * _LANES else 64
    columns = -(-len(content) // lanes)
    # From a state of zero, zero bytes in front change nothing.
    padded = np.zeros(lanes * columns, np.uint8)
    padded[len(padded) - len(content) :] = np.frombuffer(content, np.uint8)
    state, table = np.zeros(lanes, np.uint32), _byte_table()
    for bytes_of_lanes in np.ascontiguousarray(padded.reshape(lanes, columns).T):
        state = table[(state ^ bytes_of_lanes) & 0xFF] ^ (state >> 8)
    move = _zero_bytes(columns)
    while len(state) > 1:
        state = _apply(move, state[::2]) ^ state[1::2]
        move = _apply(move, move)
    # The true initial state is all ones, moved past the whole content.
    crc = int(state[0]) ^ int(_apply(_zero_bytes(len(content)), np.array([0xFFFFFFFF], np.uint32))[0])
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """A CRC as it is stored: rotated and shifted, so that CRCs of files that contain CRCs remain good ones."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


# ---- the table

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_BLOCK_TRAILER_BYTES = 5  # kind of compression, masked CRC


def _table(file: bytes) -> Iterator[tuple[bytes, bytes]]:
    """All (key, value) of a LevelDB table, ascending."""
    footer = file[-_FOOTER_BYTES:]
    if len(footer) < _FOOTER_BYTES or struct.unpack("<Q", footer[-8:])[0] != _MAGIC:
        raise ValueError("it does not end like the index of a TensorFlow checkpoint")
    position = 0
    for _ in range(2):  # offset and size of the meta-index, which is empty
        _, position = _varint(footer, position)
    for _, handle in _block(file, footer[position:]):
        yield from _block(file, handle)


def _block(file: bytes, handle: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(key, value) of the block at `handle`, two varints; keys share their beginnings."""
    offset, position = _varint(handle, 0)
    size, _ = _varint(handle, position)
    stored = file[offset : offset + size + _BLOCK_TRAILER_BYTES]
    if len(stored) != size + _BLOCK_TRAILER_BYTES:
        raise ValueError("it is truncated")
    if masked(crc32c(stored[: size + 1])) != struct.unpack("<I", stored[size + 1 :])[0]:
        raise ValueError("the checksum of a block differs")
    if stored[size] != 0:
        raise ValueError("its blocks are compressed, which TensorFlow itself does not do")
    restarts = struct.unpack("<I", stored[size - 4 : size])[0]
    end, position, key = size - 4 * (restarts + 1), 0, b""
    while position < end:
        shared, position = _varint(stored, position)
        added, position = _varint(stored, position)
        length, position = _varint(stored, position)
        key = key[:shared] + stored[position : position + added]
        position += added
        yield key, stored[position : position + length]
        position += length


# ---- protocol buffers

# DataType of core/framework/types.proto.
_DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    6: torch.int8,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    19: torch.float16,
}

_Message = dict[int, list[int | bytes]]  # field number -> its values


def _variable(name: str, entry: bytes) -> Variable:
    """BundleEntryProto."""
    fields = _message(entry)
    # TensorShapeProto: dim = 2, each with size = 1.
    shape = _message(_first_bytes(fields, 2))
    sizes = tuple(_first(_message(_as_bytes(dim)), 1, 0) for dim in shape.get(2, []))
    return Variable(
        name,
        sizes,
        dtype=_first(fields, 1, 0),
        shard=_first(fields, 3, 0),
        offset=_first(fields, 4, 0),
        size=_first(fields, 5, 0),
        checksum=_first(fields, 6, 0),
        sliced=7 in fields,
    )


def _message(content: bytes) -> _Message:
    """The fields of a protocol-buffer message: varints and fixed numbers as integers, the rest as bytes."""
    fields: _Message = {}
    position = 0
    while position < len(content):
        tag, position = _varint(content, position)
        kind = tag & 7
        if kind == 0:
            value, position = _varint(content, position)
        elif kind == 2:
            length, position = _varint(content, position)
            value, position = content[position : position + length], position + length
        elif kind in (1, 5):
            width = 8 if kind == 1 else 4
            value = int.from_bytes(content[position : position + width], "little")
            position += width
        else:
            raise ValueError(f"a field of kind {kind}")
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _first(fields: _Message, number: int, default: int) -> int:
    value = fields.get(number, [default])[0]
    if not isinstance(value, int):
        raise ValueError(f"field {number} is not a number")
    return value


def _first_bytes(fields: _Message, number: int) -> bytes:
    return _as_bytes(fields.get(number, [b""])[0])


def _as_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a message is a number")
    return value


def _varint(content: bytes, position: int) -> tuple[int, int]:
    """(number, position after it)."""
    value = shift = 0
    while True:
        byte = content[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


# ---- CRC-32C

_LANES = 1 << 13  # rows that advance together: enough to hide numpy's cost per call, few enough to stay in cache


@functools.cache
def _byte_table() -> np.ndarray:
    """uint32 [256]: the state after one byte."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ (table & 1) * np.uint32(0x82F63B78)
    return table


@functools.lru_cache(maxsize=64)
def _zero_bytes(count: int) -> np.ndarray:
    """uint32 [32]: what each bit of a state becomes after `count` zero bytes."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    power, result = _byte_table()[bits & 0xFF] ^ (bits >> 8), bits
    while count:
        if count & 1:
            result = _apply(power, result)
        power = _apply(power, power)
        count >>= 1
    return result


def _apply(matrix: np.ndarray, states: np.ndarray) -> np.ndarray:
    """The linear map whose columns are `matrix` (uint32 [32]) on each of `states` (uint32 [n])."""
    result = np.zeros_like(states)
    for bit in range(32):
        result ^= ((states >> np.uint32(bit)) & np.uint32(1)) * matrix[bit]
    return result

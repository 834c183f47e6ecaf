"""Files that are shared by the processes of a machine: arrays, locks, and sparse files."""

import ctypes
import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pretrain.common.errors import MachineError

_PUNCH_HOLE, _KEEP_SIZE = 0x02, 0x01  # flags of fallocate(2)


def shared_array(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Map a file as an array that processes share; a new file is filled with zeros."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Not sparse: writing to a hole of a mapped file raises SIGBUS if the disk is full.
        os.posix_fallocate(descriptor, 0, max(1, int(np.prod(shape)) * dtype.itemsize))
    finally:
        os.close(descriptor)
    return np.memmap(path, dtype, "r+", shape=shape) if all(shape) else np.zeros(shape, dtype)


def try_lock(descriptor: int) -> bool:
    """Try to lock a file for this process; return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_all(writes: Sequence[tuple[int, bytes, int]]) -> None:
    """Perform all writes (descriptor, content, offset)."""
    for descriptor, content, offset in writes:
        view = memoryview(content)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written


def punch_hole(descriptor: int, offset: int, length: int, folder: Path) -> None:
    """Free a range of a file in `folder`. Raises `MachineError` if the file system does not support this."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_int(_PUNCH_HOLE | _KEEP_SIZE), ctypes.c_int64(offset), ctypes.c_int64(length))
    if libc.fallocate(ctypes.c_int(descriptor), *arguments):
        error_code = ctypes.get_errno()
        if error_code in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise MachineError(
                f"{folder}: its file system cannot free parts of files, which corpus.cache needs. "
                "Set BERTRAIN_CACHE to a folder on a disk of this machine (ext4, xfs, btrfs or tmpfs)."
            )
        raise OSError(error_code, os.strerror(error_code))

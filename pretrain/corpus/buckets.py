"""External sorting: fixed-size rows are written to buckets on disk, which are then sorted one at a time."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pretrain.common.files import disk_errors

MAX_BUFFERED_ROWS = 1 << 18  # rows that are kept in memory before they are written


def bucket_of(hashes: np.ndarray, count: int) -> np.ndarray:
    """Map each uint64 hash to a bucket index in [0, count): uint64 [N]. Higher buckets have higher hashes."""
    return (hashes >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)


class Buckets:
    """A folder with a file of rows for each of `count` buckets. Files left by an interrupted run are deleted."""

    def __init__(self, folder: Path, dtype: np.dtype, count: int) -> None:
        self._folder, self._dtype, self._count = folder, dtype, count
        self._buffer: list[tuple[np.ndarray, np.ndarray]] = []
        self._buffered_rows = 0
        shutil.rmtree(folder, ignore_errors=True)

    def add(self, rows: np.ndarray, bucket_indices: np.ndarray) -> None:
        """Append each row to the bucket with the given index."""
        self._buffer.append((rows, bucket_indices))
        self._buffered_rows += len(rows)
        if self._buffered_rows >= MAX_BUFFERED_ROWS:
            self._flush()

    def drain(self) -> Iterator[np.ndarray]:
        """Yield the rows of each bucket, in the order in which they were added, and delete the bucket."""
        self._flush()
        for index in range(self._count):
            path = self._path(index)
            yield np.fromfile(path, self._dtype) if path.exists() else np.zeros(0, self._dtype)
            path.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _flush(self) -> None:
        if not self._buffer:
            return
        rows, bucket_indices = (np.concatenate(column) for column in zip(*self._buffer, strict=True))
        self._buffer, self._buffered_rows = [], 0
        order = np.argsort(bucket_indices, kind="stable")
        bounds = np.searchsorted(bucket_indices[order], np.arange(self._count + 1))
        with disk_errors(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            for index in np.flatnonzero(np.diff(bounds)).tolist():
                with self._path(index).open("ab") as file:
                    rows[order[bounds[index] : bounds[index + 1]]].tofile(file)

    def _path(self, index: int) -> Path:
        return self._folder / f"{index}.records"

"""Reads the files of a verified checkpoint, whoever wrote them, from a storage that may fail for a moment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pretrain.checkpoint.fragments import FragmentIndex
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import MANIFEST, parse_manifest

# Attempts to read a checkpoint when the storage fails, and the first wait between them, which doubles each time.
_READS, READ_WAIT_SECONDS = 6, 1.0
# Pages of a mapped file count as the process's memory until the file is closed.
_MOST_MAPPED_BYTES = 128 << 20
T = TypeVar("T")
logger = logging.getLogger(__name__)


def retried(path: Path, read: Callable[[], T]) -> T:
    """What `read` returns; its read errors are retried for half a minute. Raises `MachineError` after it.

    A missing file is one of them: machines that share a folder may see a name that another one made later than it.
    """
    attempt = 0
    while True:
        try:
            return read()
        except OSError as error:
            if attempt == _READS - 1 or isinstance(error, PermissionError):
                raise _unreadable(path, error) from error
            wait = READ_WAIT_SECONDS * 2**attempt
            logger.warning("%s: cannot be read (%s). Retrying in %.0f s.", path, error, wait)
            time.sleep(wait)
            attempt += 1


def _unreadable(path: Path, error: OSError) -> MachineError:
    return MachineError(
        f"{error.filename or path}: cannot be read ({error.strerror or error}). Check the storage and the file's "
        "permissions."
    )


def checkpoint_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, with retries."""
    path = checkpoint / MANIFEST
    return parse_manifest(retried(path, path.read_bytes), path)


class CheckpointReader:
    """Reads any range of any parameter, regardless of the ranks that wrote it. Use as a context manager.

    Files are opened with retries as `verify`.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._files: dict[str, Any] = {}
        self._mapped = 0  # bytes read since the files were opened
        self._checkpoint = checkpoint
        manifest = checkpoint_manifest(checkpoint)
        files = sorted(name for name in manifest["files"] if name.startswith("rank-"))
        self._fragments = FragmentIndex(manifest["fragments"], files)

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """Elements [start, start + numel) of the flattened `name`, fp32 [numel]; `InputError` if any is missing."""
        out, position, stop = torch.empty(numel), start, start + numel
        for fragment in self._fragments.covering(kind, name, start, stop):
            if not fragment.start <= position < fragment.stop:
                continue
            end = min(stop, fragment.stop)
            stored = self._file(fragment.file).get_slice(f"{kind}|{name}|{fragment.start}")
            out[position - start : end - start] = stored[position - fragment.start : end - fragment.start]
            self._mapped += out.element_size() * (end - position)
            position = end
        if position < stop:
            raise InputError(
                f"{self._checkpoint}: no {kind} of {name} from element {position}; the checkpoint belongs to another "
                "model or optimizer. Resume with the config of the run that wrote it."
            )
        return out

    def _file(self, name: str) -> Any:
        if self._mapped > _MOST_MAPPED_BYTES:
            self._close()
        if name not in self._files:
            path = self._checkpoint / name
            try:
                self._files[name] = retried(path, lambda: safe_open(path, framework="pt").__enter__())
            except SafetensorError as error:
                raise InputError(f"{path}: cannot be read ({error}). Use another checkpoint.") from None
        return self._files[name]

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        for file in self._files.values():
            file.__exit__(None, None, None)
        self._files, self._mapped = {}, 0

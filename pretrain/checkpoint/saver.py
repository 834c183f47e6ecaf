"""Checkpoints that do not hold up training: copied in memory, written by a thread while the next steps run.

The copy is the only part that a step waits for. A kill during the writing leaves the checkpoints before it as they
were; what is written has no name until all of it is there (`store.write`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint import store
from pretrain.common.errors import RunError

logger = logging.getLogger(__name__)

_FIRST_WAIT_SECONDS = 2.0  # between a failed try and the next; doubled each time


class Saver:
    """Saves the checkpoints of one run, at most one at a time. Every rank has one and calls it alike.

    Args:
        folder: of the checkpoints.
        group: the ranks. In the background its collectives come from another thread than training's, so it must not
            share a process group with them.
        keep_last: newest checkpoints to keep (`store.prune`).
        background: copy and return, or write at once.
        retry_seconds: how long to try again where the storage fails. A full disk is tried once more only.
    """

    def __init__(
        self, folder: Path, group: store.SavingGroup, *, keep_last: int, background: bool, retry_seconds: float
    ) -> None:
        self._folder, self._group, self._keep_last = folder, group, keep_last
        self._background, self._retry_seconds = background, retry_seconds
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.trouble = ""  # why a save had to wait for the storage; who tells of it clears it

    def save(self, step: int, fragments: Iterable[store.HeldFragment], state: dict[str, Any]) -> None:
        """Save what the fragments hold now. Raises what the save before it, or this one if not in background, met."""
        self.wait()
        if not self._background:
            self._write(step, store.take_shard(fragments, self._group), state)
            self._raise()
            return
        shard = store.take_shard(fragments, self._group, self._copy)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are asynchronous
        self._thread = threading.Thread(target=self._write, args=(step, shard, state), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing is being written any more; raises what went wrong meanwhile, on every rank alike."""
        self.settle()
        self._raise()

    def settle(self) -> None:
        """Return when nothing is being written any more, whatever came of it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def failed(self) -> bool:
        """Whether a save has failed for good; not on all ranks at the same moment."""
        return self._error is not None

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        copy = self._copies.get(key)
        if copy is None or copy.shape != tensor.shape:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._copies[key] = copy
        return copy.copy_(tensor, non_blocking=True)

    def _write(self, step: int, shard: store.CheckpointShard, state: dict[str, Any]) -> None:
        try:
            self._write_or_retry(step, shard, state)
            try:
                if self._group.rank == 0:
                    with contextlib.suppress(OSError):  # the next save prunes again
                        store.prune(self._folder, self._keep_last)
            finally:  # nobody begins the next one while the first rank still removes
                self._group.gather_objects(None)
        except BaseException as error:
            self._error = error

    def _write_or_retry(self, step: int, shard: store.CheckpointShard, state: dict[str, Any]) -> None:
        # All ranks meet the same error at the same try (`store.write`); how long that took they must not ask their
        # own clocks, so the waits are counted instead.
        waited, wait, said = 0.0, _FIRST_WAIT_SECONDS, ""
        while True:
            try:
                store.write(self._folder, step, shard, state, self._group)
                if waited:
                    self.trouble = f"{store.name_of(step)} had to wait {waited:.0f} s for the storage: {said}"
                return
            except RunError as error:  # a disk that has turned read-only may turn back, as a full one may
                full = "disk full" in str(error)
                if waited >= (_FIRST_WAIT_SECONDS if full else self._retry_seconds):
                    raise
                said = str(error)
                logger.warning("%s Trying again in %.0f s.", said, wait)
            time.sleep(wait)
            waited, wait = waited + wait, wait * 2

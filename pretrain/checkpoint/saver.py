"""Background checkpoints: the state is copied in memory, and a thread writes it while training continues.

Training waits for the copy only. A kill during the writing does not affect earlier checkpoints: a checkpoint gets its
name when it is complete (`store.write`).
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

_FIRST_WAIT_SECONDS = 2.0  # before the first retry; doubled each time


class Saver:
    """Saves the checkpoints of one run, one at a time. Every rank has a saver and makes the same calls.

    Args:
        folder: the folder of the checkpoints.
        group: the ranks. Background saves run its collectives in another thread than training, so it needs a process
            group of its own.
        keep_last: number of newest checkpoints to keep (`store.prune`).
        background: copy the state and return, instead of writing before returning.
        retry_seconds: how long to retry if the storage fails. A full disk is retried once.
    """

    def __init__(
        self, folder: Path, group: store.SavingGroup, *, keep_last: int, background: bool, retry_seconds: float
    ) -> None:
        self._folder, self._group, self._keep_last = folder, group, keep_last
        self._background, self._retry_seconds = background, retry_seconds
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # Why a save was delayed by the storage. Whoever reports it clears it.
        self.trouble = ""

    def save(self, step: int, fragments: Iterable[store.HeldFragment], state: dict[str, Any]) -> None:
        """Save the current state of the fragments. Raises the error of the previous save, or of a synchronous one."""
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
        """Wait until the save in progress ends. Raises its error, on every rank."""
        self.join()
        self._raise()

    def join(self) -> None:
        """Wait until the save in progress ends, without raising its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def failed(self) -> bool:
        """Whether a save has failed after its retries; ranks may learn this at different moments."""
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
            finally:  # no rank starts the next save while rank 0 still removes old checkpoints
                self._group.gather_objects(None)
        except BaseException as error:
            self._error = error

    def _write_or_retry(self, step: int, shard: store.CheckpointShard, state: dict[str, Any]) -> None:
        # All ranks get the same error at the same attempt (`store.write`), and all must decide alike. Their clocks may
        # differ, so the waits are added up instead.
        waited, wait, reason = 0.0, _FIRST_WAIT_SECONDS, ""
        while True:
            try:
                store.write(self._folder, step, shard, state, self._group)
                if waited:
                    self.trouble = f"{store.name_of(step)} was delayed {waited:.0f} s by the storage: {reason}"
                return
            except RunError as error:  # a read-only or full disk may recover
                full = "disk full" in str(error)
                if waited >= (_FIRST_WAIT_SECONDS if full else self._retry_seconds):
                    raise
                reason = str(error)
                logger.warning("%s Retrying in %.0f s.", reason, wait)
            time.sleep(wait)
            waited, wait = waited + wait, wait * 2

"""Saves checkpoints in the background: the state is copied in memory, and a thread writes it while training continues.

Training waits only for the copy. If the process is killed during a write, earlier checkpoints are unaffected: a
checkpoint gets its name when it is complete (`writing.write`).
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.checkpoint import store, writing
from pretrain.common.errors import MachineError, RunError
from pretrain.storage.runs import SAVE_RETRY_SECONDS, StoredRun

logger = logging.getLogger(__name__)

FIRST_WAIT_SECONDS = 2.0  # wait before the first retry; doubled each time


class Saver:
    """Saves the checkpoints of one run, one at a time. Every rank has a saver and makes the same calls.

    Args:
        folder: the folder of the checkpoints.
        group: the process group of all ranks. Training must use another one, since saves run collectives in a thread.
        keep_last: number of latest checkpoints to keep (`store.prune`).
        retry_seconds: how long to retry if the storage fails; a full disk is retried only once.
        stored_run: the run in an object store to which checkpoints are also saved, if any. A failure to store one is
            reported as `trouble` and does not stop the run; the next checkpoint is stored anyway.
    """

    def __init__(
        self,
        folder: Path,
        group: store.SavingGroup,
        *,
        keep_last: int,
        retry_seconds: float = SAVE_RETRY_SECONDS,
        stored_run: StoredRun | None = None,
    ) -> None:
        self._folder, self._group, self._keep_last = folder, group, keep_last
        self._retry_seconds, self._stored_run = retry_seconds, stored_run
        self._host_buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        # Message about a delay or failure of the storage; the caller clears it after reporting it.
        self.trouble = ""
        # Step and path of each checkpoint written since the caller last cleared the list.
        self.unreported: list[dict[str, Any]] = []

    def save(self, step: int, fragments: Iterable[writing.FragmentLike], state: dict[str, Any]) -> None:
        """Save the current state of the fragments. Raises the error of the previous save."""
        self.wait()
        shard = writing.take_shard(fragments, self._group, self._copy)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are asynchronous
        self._thread = threading.Thread(target=self._write, args=(step, shard, state), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the save in progress finishes. Raises its error, on every rank."""
        self.join()
        if self._error is not None:
            raise self._error

    def join(self) -> None:
        """Wait until the save in progress finishes, without raising its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def failed(self) -> bool:
        """Return whether a save has failed after its retries; ranks may briefly return different values."""
        return self._error is not None

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        buffer = self._host_buffers.get(key)
        if buffer is None or buffer.shape != tensor.shape:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._host_buffers[key] = buffer
        return buffer.copy_(tensor, non_blocking=True)

    def _write(self, step: int, shard: writing.CheckpointShard, state: dict[str, Any]) -> None:
        try:
            self._write_or_retry(step, shard, state)
            self.unreported.append({"step": step, "path": str(self._folder / store.name_of(step))})
            if self._stored_run is not None:
                self._store(self._stored_run, self._folder / store.name_of(step))
            try:
                if self._group.rank == 0:
                    with contextlib.suppress(OSError, MachineError):  # the next save tries again to prune
                        store.prune(self._folder, self._keep_last, self._folder / store.name_of(step))
            finally:  # no rank starts the next save while rank 0 still removes old checkpoints
                self._group.broadcast_object(None)
        except BaseException as error:
            self._error = error

    def _store(self, stored_run: StoredRun, checkpoint: Path) -> None:
        """Store the file that each rank wrote; then rank 0 stores the other files, the manifest last."""
        name, is_rank_0 = checkpoint.name, self._group.rank == 0
        actions: list[Callable[[], None]] = [
            lambda: stored_run.unpublish(name) if is_rank_0 else None,
            lambda: stored_run.put(checkpoint, [writing.shard_name(self._group)]),
            lambda: self._publish(stored_run, checkpoint) if is_rank_0 else None,
        ]
        try:
            for action in actions:
                store.agree(self._group, action)
        except RunError as error:
            self.trouble = f"{checkpoint.name} is not stored at {stored_run.address}, only in {self._folder}: {error}"
            logger.warning("%s", self.trouble)

    def _publish(self, stored_run: StoredRun, checkpoint: Path) -> None:
        stored_run.publish(checkpoint)
        try:
            names = stored_run.checkpoint_names()
            kept = [name for name in names if stored_run.state(name).get("kept")]
            stored_run.delete_except({*names[-self._keep_last :], *kept, checkpoint.name, stored_run.best()})
        except RunError as error:  # the next save tries again to delete them
            logger.warning("%s", error)

    def _write_or_retry(self, step: int, shard: writing.CheckpointShard, state: dict[str, Any]) -> None:
        # All ranks get the same error at the same attempt (`writing.write`), and must make the same decision. Their
        # clocks may differ, so the time is measured as the sum of the waits.
        waited, wait, reason = 0.0, FIRST_WAIT_SECONDS, ""
        while True:
            try:
                writing.write(self._folder, step, shard, state, self._group)
                if waited:
                    self.trouble = f"{store.name_of(step)} was delayed {waited:.0f} s by the storage: {reason}"
                return
            except RunError as error:  # a read-only or full disk may recover
                is_full = "disk full" in str(error)
                if waited >= (FIRST_WAIT_SECONDS if is_full else self._retry_seconds):
                    raise
                reason = str(error)
                logger.warning("%s Retrying in %.0f s.", reason, wait)
            time.sleep(wait)
            waited, wait = waited + wait, wait * 2

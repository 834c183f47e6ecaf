"""Measures how long each rank computes and waits for data, to find a rank that slows down the others.

A step takes equally long on all ranks, since they wait for one another. The times of forward passes show which rank is
slow. Within a forward pass a rank waits only for other ranks' weights. On CPUs with ZeRO 1 and 2 these waits are
subtracted; on GPUs and with ZeRO 3 they are not, and can hide a slow rank.
"""

import contextlib
import logging
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pretrain.common.records import make_event
from pretrain.run.task import Recorder
from pretrain.training.engine import Engine

logger = logging.getLogger(__name__)

# A rank is slow if its forward passes take at least this factor times the median of the others, plus these seconds.
_SLOW_FACTOR, _NOISE_SECONDS = 1.5, 0.005
# A slow rank is reported as a straggler after this many consecutive records, and at least this many seconds.
_MIN_RECORDS, _MIN_SECONDS = 3, 10.0
STALL_SECONDS = 5.0  # minimum duration of a wait for one batch that is recorded as an event


class RankTimes:
    """Times of this rank since the last record, in seconds; `lap` gathers them from all ranks for each record."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seconds, self._passes = 0.0, 0
        self._events: list[tuple[Any, Any]] = []  # CUDA events at the start and end of each forward pass
        self._slow: dict[int, _SlowRank] = {}
        self.waited = 0.0  # seconds of waiting for batches
        self._longest_wait = 0.0  # seconds of the longest wait for one batch

    @contextlib.contextmanager
    def timed_forward(self) -> Iterator[None]:
        """Time the block, which is one forward pass of this rank."""
        self._passes += 1
        if self._engine.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((start, end))
            return
        started, waited = time.perf_counter(), self._engine.usage().waited_seconds
        yield
        self._seconds += time.perf_counter() - started - (self._engine.usage().waited_seconds - waited)

    def add_wait(self, seconds: float) -> None:
        """Record that this rank waited `seconds` for one batch."""
        self._longest_wait = max(self._longest_wait, seconds)

    def lap(self, recorder: Recorder, step: int) -> dict[str, list[float]]:
        """Return each rank's seconds since the last record: the mean per forward pass, and the total of waits for data.

        A rank that remains a straggler is reported in the log and by an event. A long wait for a batch is an event,
        too, with the rank that waited longest. Every rank must call this.

        Args:
            recorder: records the events.
            step: the step of the record.
        """
        engine = self._engine
        if self._events:
            torch.cuda.synchronize()
            self._seconds = sum(start.elapsed_time(end) for start, end in self._events) / 1000
        table = torch.zeros(3, engine.world_size, dtype=torch.float64)
        table[:, engine.rank] = torch.tensor([self._seconds / max(1, self._passes), self.waited, self._longest_wait])
        engine.workers.sum_over_workers(table)
        self._seconds, self._passes, self.waited, self._longest_wait = 0.0, 0, 0.0, 0.0
        self._events.clear()
        forward, waited, longest = table.tolist()
        self.report_stragglers(forward, recorder, step)
        rank, seconds = max(enumerate(longest), key=lambda pair: pair[1])
        if seconds >= STALL_SECONDS:
            message = f"rank {rank} waited {seconds:.0f} s for a batch"
            recorder.log(make_event("data_stall", message, step=step, rank=rank, seconds=seconds))
        # With many ranks, these lists are most of a record. More digits would be noise.
        values = {"rank_forward_seconds": forward, "rank_wait_seconds": waited}
        return {name: [float(f"{value:.4g}") for value in seconds] for name, seconds in values.items()}

    def report_stragglers(self, forward: list[float], recorder: Recorder, step: int) -> None:
        """Record ranks whose forward passes (seconds, by rank) stay slow."""
        now, times = time.monotonic(), find_stragglers(forward, _SLOW_FACTOR)
        self._slow = {rank: self._slow.get(rank, _SlowRank(now)) for rank in sorted(times)}
        for rank, slow in self._slow.items():
            slow.records += 1
            if slow.is_reported or slow.records < _MIN_RECORDS or now - slow.since < _MIN_SECONDS:
                continue
            slow.is_reported = True
            message = f"rank {rank} takes {times[rank]:.1f} times as long as the others' median for a forward pass"
            logger.warning("step %d: %s", step, message)
            recorder.log(make_event("straggler", message, step=step, rank=rank))


@dataclass
class _SlowRank:
    """A rank that was slow in all of the last `records` records, since a time of `time.monotonic()`."""

    since: float
    records: int = 0
    is_reported: bool = False


def find_stragglers(seconds: list[float], factor: float) -> dict[int, float]:
    """Return {rank: ratio to the others' median} for ranks of at least `factor` times it plus `_NOISE_SECONDS`."""
    stragglers = {}
    for rank, duration in enumerate(seconds):
        others = [*seconds[:rank], *seconds[rank + 1 :]]
        median = statistics.median(others) if others else 0.0
        if median > 0 and duration >= factor * median + _NOISE_SECONDS:
            stragglers[rank] = duration / median
    return stragglers

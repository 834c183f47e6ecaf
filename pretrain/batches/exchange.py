"""Counts of all ranks, exchanged in the background, a step before the loss needs them (invariant 3).

Every rank counts only its sequences. Counts are integers, so their sums are the same on all ranks, in any order.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from typing import Protocol, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Counts:
    """Counts of the sequences of a step, of one rank or of all."""

    tokens: int
    masked: int  # tokens to predict
    labeled: int  # sequences of two segments whose relation is predicted


class AllRanks(Protocol):
    """All ranks of a run (`pretrain.training.engine.RankGroup`)."""

    def sum_and_largest(self, sums: list[int], largest: int) -> tuple[list[int], int]:
        """Return the sums over all ranks of `sums`, and the maximum of `largest`; every rank calls this."""
        ...


class Exchange:
    """Adds up the counts of all ranks in a thread, which outlives the loaders that use it.

    All ranks request the same exchanges in the same order, as the training loop requests steps. So an exchange whose
    loader was closed meanwhile completes all the same, and the ranks stay in step for the next one.
    """

    def __init__(self, ranks: AllRanks) -> None:
        self._ranks = ranks
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="counts", daemon=True)
        self.thread.start()

    def submit(self, counts: Counts, micro_batches: int, then: Callable[[Counts, int], T]) -> Future[T]:
        """Return a future of `then`, called in the thread with the summed counts and the maximum of micro-batches."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                sums, largest = self._ranks.sum_and_largest(list(astuple(counts)), micro_batches)
                future.set_result(then(Counts(*sums), largest))
            except BaseException as error:  # raised by whoever waits, whatever its class
                future.set_exception(error)

        self._requests.put(work)
        return future

    def close(self, seconds: float = 2.0) -> None:
        """Stop the thread after the exchanges requested so far; wait for it at most `seconds`."""
        self._requests.put(None)
        self.thread.join(seconds)

    def _run(self) -> None:
        while (work := self._requests.get()) is not None:
            work()

"""Sums counts over all ranks, in the background, a step before the loss needs them (invariant 3 in docs/invariants.md).

Every rank counts only its sequences. Counts are integers, so their sums do not depend on the order of the ranks.
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
    """Counts that normalize the losses of a step, for the sequences of one rank or of all."""

    tokens: int
    masked: int  # number of tokens to predict
    labeled: int  # number of sentence pairs with an NSP or SOP label


class AllRanks(Protocol):
    """All ranks of a run (`pretrain.training.engine.RankGroup`)."""

    def sum_and_largest(self, sums: list[int], largest: int) -> tuple[list[int], int]:
        """Return the sums of `sums` over all ranks, and the maximum of `largest`; every rank must call this."""
        ...


class Exchange:
    """Sums the counts of all ranks in a thread that outlives the loaders that use it.

    All ranks request the same exchanges in the same order, one per training step. An exchange completes even if its
    loader was closed in the meantime, so the ranks stay synchronized.
    """

    def __init__(self, ranks: AllRanks) -> None:
        self._ranks = ranks
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="counts", daemon=True)
        self.thread.start()

    def submit(self, counts: Counts, micro_batches: int, finish: Callable[[Counts, int], T]) -> Future[T]:
        """Request an exchange; return a future of the result of `finish(summed counts, maximum of micro_batches)`."""
        future: Future[T] = Future()

        def exchange() -> None:
            try:
                sums, largest = self._ranks.sum_and_largest(list(astuple(counts)), micro_batches)
                future.set_result(finish(Counts(*sums), largest))
            except BaseException as error:  # any exception is raised again in the thread that waits for the future
                future.set_exception(error)

        self._requests.put(exchange)
        return future

    def close(self, seconds: float = 2.0) -> None:
        """Stop the thread after the exchanges requested so far; wait for it at most `seconds`."""
        self._requests.put(None)
        self.thread.join(seconds)

    def _run(self) -> None:
        while (exchange := self._requests.get()) is not None:
            exchange()

"""Sums counts over all ranks in a background thread, one step before the loss needs them.

Each rank counts only its sequences. Integer sums do not depend on the order of ranks (invariant 3, docs/invariants.md).
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
    """Denominators of a step's mean losses, counted over the sequences of one rank or of all ranks."""

    tokens: int  # number of tokens without padding
    masked: int  # number of tokens to predict
    labeled: int  # number of sentence pairs with an NSP or SOP label


class AllRanks(Protocol):
    """All ranks of a run (`pretrain.training.engine.RankGroup`)."""

    def sum_and_max(self, to_sum: list[int], to_maximize: int) -> tuple[list[int], int]:
        """Return each of `to_sum` summed over all ranks, and the maximum of `to_maximize`; all ranks must call it."""
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

        def request() -> None:
            try:
                sums, max_micro_batches = self._ranks.sum_and_max(list(astuple(counts)), micro_batches)
                future.set_result(finish(Counts(*sums), max_micro_batches))
            except BaseException as error:  # raised again in the thread that waits for the future
                future.set_exception(error)

        self._requests.put(request)
        return future

    def close(self, timeout: float = 2.0) -> None:
        """Stop the thread after the exchanges requested so far; wait at most `timeout` seconds for it."""
        self._requests.put(None)
        self.thread.join(timeout)

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            request()

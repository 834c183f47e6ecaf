"""The processes that `prepare` hands its jobs to: of this machine, or a Ray cluster's tasks."""

from __future__ import annotations

import collections
import contextlib
import functools
import multiprocessing
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.common.errors import MachineError
from pretrain.corpus import stages
from pretrain.corpus.inputs import Piece


class Pool:
    """Runs jobs in processes of their own, or here if there is to be one; results come in the order of the jobs.

    With `address` the processes are a Ray cluster's, as many as it has cores where `processes` is 0.
    """

    def __init__(
        self, processes: int, settings: stages.PreparationSettings, tokenizer: Tokenizer | None, address: str
    ) -> None:
        self._processes = processes
        self._begin_with = settings, tokenizer
        self._address = address
        # Ray Data takes all jobs at once. They carry no text (`sources.cut`), so they may wait there.
        self._most_waiting = sys.maxsize if address else 3 * processes
        self._executor: Executor | None = None
        self._ending: threading.Thread | None = None

    def __enter__(self) -> Pool:
        if self._address:
            from cluster.pool import RayPool

            self._executor = RayPool(
                self._address,
                log=Path(self._begin_with[0].work) / "ray.log",
                processes=self._processes,
                initializer=stages.start_task,
                initargs=self._begin_with,
            )
        elif self._processes == 1:
            stages.start_process(*self._begin_with, child=False)
        else:
            context = multiprocessing.get_context(_start_method())
            self._executor = ProcessPoolExecutor(self._processes, context, stages.start_process, self._begin_with)
            with _without_tokenizers_threads():
                self._executor.submit(os.getpid)  # starts the processes now, before there are other threads
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if self._ending is not None:
            self._ending.join()
        elif self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def dismiss(self) -> None:
        """There are no more jobs: the processes end while this one goes on."""
        if self._executor is not None:
            self._ending = threading.Thread(target=self._executor.shutdown)
            self._ending.start()

    def begin(self, job: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Hand out a job, of which `result_of` has what comes of it; without processes it is done there."""
        with _killed_is_told():
            return self._executor.submit(job, *arguments) if self._executor else functools.partial(job, *arguments)

    def run(
        self,
        job: Callable[..., Any],
        items: Iterable[tuple[Any, ...]],
        known: Callable[..., Any] | None = None,
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """(arguments, result) for every tuple of arguments; where `known(*arguments)` has a result, it is taken."""
        waiting: collections.deque[tuple[tuple[Any, ...], Any]] = collections.deque()
        for item in items:
            result = known(*item) if known else None
            waiting.append((_without_data(item), self.begin(job, item) if result is None else result))
            while waiting and (len(waiting) > self._most_waiting or _is_ready(waiting[0][1])):
                item, result = waiting.popleft()
                yield item, result_of(result)
        while waiting:
            item, result = waiting.popleft()
            yield item, result_of(result)


def _start_method() -> str:
    """fork where that is safe: a forked process has everything imported, 0.3 s earlier than a spawned one.

    A fork takes only its own thread along, and a lock that another one holds stays locked. The threads of numpy's
    OpenBLAS, of Arrow and of `tokenizers` see to that themselves; those of Python, Ray or a hub's client do not, nor do
    macOS's own libraries.
    """
    alone = threading.active_count() == 1 and not {"ray", "datasets"} & sys.modules.keys()
    return "fork" if alone and sys.platform == "linux" else "spawn"


@contextlib.contextmanager
def _without_tokenizers_threads() -> Iterator[None]:
    """Say to `tokenizers` that forked processes shall have no threads; it would guess so, too, but warn of it."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def result_of(result: Any) -> Any:
    """What comes of a job that was begun; what was known beforehand is taken as it is."""
    if isinstance(result, functools.partial):
        return result()
    with _killed_is_told():
        return result.result() if isinstance(result, Future) else result


@contextlib.contextmanager
def _killed_is_told() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool:
        raise MachineError(
            "prepare: a preparation process was killed, most likely for want of memory. "
            "Set corpus.processes lower and run the same command again; it goes on where it was."
        ) from None


def _is_ready(result: Any) -> bool:
    return result.done() if isinstance(result, Future) else True


def _without_data(item: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments as they are remembered: the text a piece may carry is not."""
    return tuple(replace(part, data=None) if isinstance(part, Piece) else part for part in item)

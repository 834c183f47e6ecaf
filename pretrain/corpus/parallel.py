"""Processes that execute the functions of `stages`, on this machine or as tasks of a Ray cluster."""

from __future__ import annotations

import collections
import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.common.errors import MachineError, StoppedError
from pretrain.corpus import stages
from pretrain.corpus.inputs import Chunk


class Pool:
    """Executes calls in several processes, or in the current one if `processes` is 1; results are in call order.

    With `address`, the processes run on the Ray cluster there; if `processes` is 0, one runs per core of the cluster.
    """

    def __init__(
        self, processes: int, settings: stages.PreparationSettings, tokenizer: Tokenizer | None, address: str
    ) -> None:
        self._processes = processes
        self._initargs = settings, tokenizer
        self._address = address
        # On a cluster, all calls are pending at once; their arguments contain no text (`sources.cut`).
        self._max_pending = sys.maxsize if address else 3 * processes
        self._executor: Executor | None = None
        self._shutdown: threading.Thread | None = None

    def __enter__(self) -> Pool:
        if self._address:
            from cluster.workers.pool import RayPool

            self._executor = RayPool(
                self._address,
                log=Path(self._initargs[0].work_dir) / "ray.log",
                processes=self._processes,
                initializer=stages.start_task,
                initargs=self._initargs,
            )
        elif self._processes == 1:
            stages.start_process(*self._initargs, child=False)
        else:
            self._earlier_pids = _child_pids()
            context = _Spawn() if start_method() == "spawn" else multiprocessing.get_context("fork")
            self._executor = ProcessPoolExecutor(self._processes, context, stages.start_process, self._initargs)
            with _without_tokenizers_threads():
                self._executor.submit(os.getpid)  # start the processes now, before there are other threads
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        if self._shutdown is not None:
            self._shutdown.join()
        elif self._executor is not None:
            if error is not None and isinstance(self._executor, ProcessPoolExecutor):
                _stop_calls(_child_pids() - self._earlier_pids)
            self._executor.shutdown(cancel_futures=True)

    def finish(self) -> None:
        """Stop the processes in the background; no more calls may follow."""
        if self._executor is not None:
            self._shutdown = threading.Thread(target=self._executor.shutdown)
            self._shutdown.start()

    def submit(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Submit a call; `result_of` waits for its result, or executes the call if there are no other processes."""
        with _report_killed():
            if self._executor is None:
                return functools.partial(function, *arguments)
            if isinstance(self._executor, ProcessPoolExecutor):
                return self._executor.submit(stages.run_interruptible, function, *arguments)
            return self._executor.submit(function, *arguments)

    def run(
        self,
        function: Callable[..., Any],
        calls: Iterable[tuple[Any, ...]],
        find_result: Callable[..., Any] | None = None,
    ) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Yield (arguments, result) of each call; `find_result(*arguments)` returns an existing result, or None."""
        pending: collections.deque[tuple[tuple[Any, ...], Any]] = collections.deque()
        for arguments in calls:
            result = find_result(*arguments) if find_result else None
            pending.append((_without_data(arguments), self.submit(function, arguments) if result is None else result))
            while pending and (len(pending) > self._max_pending or _is_ready(pending[0][1])):
                arguments, result = pending.popleft()
                yield arguments, result_of(result)
        while pending:
            arguments, result = pending.popleft()
            yield arguments, result_of(result)


def _child_pids() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if child.pid}


def _stop_calls(pids: set[int]) -> None:
    """Interrupt the running calls, which could take hours, such as reading a shard of a data set."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, stages.STOP)


class _SpawnedProcess(SpawnProcess):
    """A process that does not import the user's script, so the script needs no `if __name__ == "__main__"`."""

    def start(self) -> None:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")  # without a file or a spec
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main


class _Spawn(SpawnContext):
    Process = _SpawnedProcess


def start_method() -> str:
    """Return "fork" if it is safe, else "spawn"; a forked process needs no imports, and so starts 0.3 s faster.

    A forked process only has the calling thread, and locks held by other threads are never released. OpenBLAS, Arrow
    and `tokenizers` handle this for their threads; Python, Ray, a hub's client, rensa and macOS's libraries do not.
    """
    is_single_threaded = threading.active_count() == 1 and not {"ray", "datasets", "rensa"} & sys.modules.keys()
    return "fork" if is_single_threaded and sys.platform == "linux" else "spawn"


@contextlib.contextmanager
def _without_tokenizers_threads() -> Iterator[None]:
    """Disable threads of `tokenizers` in forked processes, which it would also do by itself, but with a warning."""
    previous = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        os.environ.pop("TOKENIZERS_PARALLELISM")
        if previous is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = previous


def result_of(result: Any) -> Any:
    """Wait for the result of a call that was submitted with `Pool.submit`; return any other value as it is."""
    if isinstance(result, functools.partial):
        return result()
    with _report_killed():
        return result.result() if isinstance(result, Future) else result


@contextlib.contextmanager
def _report_killed() -> Iterator[None]:
    """Convert the error of a pool with a killed process to a `MachineError`."""
    try:
        yield
    except BrokenProcessPool:
        raise MachineError(
            "prepare: a preparation process was killed, most likely out of memory. "
            "Set corpus.processes lower and run the same command again; it resumes."
        ) from None


def _is_ready(result: Any) -> bool:
    return result.done() if isinstance(result, Future) else True


def _without_data(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments without the text that chunks may contain, to bound the memory."""
    return tuple(replace(each, data=None) if isinstance(each, Chunk) else each for each in arguments)


@contextlib.contextmanager
def stoppable(folder: Path) -> Iterator[None]:
    """Convert Ctrl-C and SIGTERM to a `StoppedError`; finished work remains on disk."""

    def stop(signum: int, frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, stop) if in_main else None
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedError(f"{folder}: stopped. Run the same command again; it resumes.") from None
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, previous)

"""The worker of a run with one worker on this machine: a child of the driver. Ray would start three servers for it.

`SingleWorker` has the interface of `actors.WorkerGroup`, so the supervisor restarts it after crashes, too.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection, wait
from typing import Any

from cluster.workers.actors import WorkerLocation, WorkersFailedError, assign_ranks
from cluster.workers.outcomes import WorkerError
from cluster.workers.request import Attempt
from cluster.workers.target import RankAssignment, run_worker

_EXIT_SECONDS = 10.0  # how long the process may take to exit after it has sent its outcome


class SingleWorker:
    """One worker process, which `run` starts. On exit, the context manager kills it."""

    locations = (WorkerLocation(node="", address="127.0.0.1", port=0, gpus=()),)

    def __init__(self) -> None:
        self._process: Any = None

    def run(self, attempt: Attempt) -> list[dict[str, str] | None]:
        """Call `cluster.workers.target.run_worker` in the process; return the list of its result.

        Raises `WorkersFailedError` with the `WorkerError` that it raised, or a `ChildProcessError` if the process died.
        """
        context = multiprocessing.get_context("spawn")  # a fork would inherit this process's threads
        receiver, sender = context.Pipe(duplex=False)
        (assignment,) = assign_ranks(self.locations)
        self._process = context.Process(target=_work, args=(attempt, assignment, sender), name="worker")
        self._process.start()
        sender.close()
        wait([receiver, self._process.sentinel])
        try:
            outcome = receiver.recv()
        except EOFError:
            self._process.join(_EXIT_SECONDS)
            raise WorkersFailedError({0: ChildProcessError(f"exit code {self._process.exitcode}")}) from None
        if isinstance(outcome, WorkerError):
            raise WorkersFailedError({0: outcome})
        self._process.join(_EXIT_SECONDS)
        return [outcome]

    def __enter__(self) -> SingleWorker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()


def _work(attempt: Attempt, assignment: RankAssignment, sender: Connection) -> None:
    # Ray sets this variable for its workers, too; torch reads it while it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", str(attempt.request.cpus_per_worker))
    try:
        sender.send(run_worker(attempt, assignment))
    except WorkerError as error:
        sender.send(error)

"""A `concurrent.futures` executor that runs jobs on a Ray cluster, through Ray Data.

As in training (`cluster.workers.launch`), Ray's driver is a child process in a separate session. Jobs and their
results pass through a pipe. The child makes one Ray Dataset of all waiting jobs, with one block per job. Ray Data
runs one task per job, on any node with a free core, and repeats it if its process or node dies.
"""

import contextlib
import functools
import itertools
import logging
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cluster.workers.driver import exit_with_parent, join_ray, set_token_variables
from cluster.workers.launch import check_address, end_session, last_line, start_session
from cluster.workers.outcomes import as_data, error_from, one_line
from cluster.workers.target import change_folder
from pretrain.common.errors import MachineError, RunError
from pretrain.common.files import append_open, disk_errors
from pretrain.common.packages import expect

logger = logging.getLogger(__name__)

_MAX_RETRIES = 3  # how often a job whose process died runs again; Ray Data's default is unlimited
_LEAVE_SECONDS = 10.0  # how long the child may take to leave the cluster when all jobs are done

# Environment variables of the driver, which owns the tasks and therefore controls their retries.
_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_oom_retries": str(_MAX_RETRIES),  # number of retries after running out of memory; default: unlimited
}
# Not `-m cluster.workers.pool`: the tasks could not find functions of `__main__`.
_DRIVER = "import sys; from cluster.workers.pool import main; main(int(sys.argv[1]), int(sys.argv[2]))"


@dataclass(frozen=True)
class PoolRequest:
    """The settings of the driver, which it receives before any job.

    Attributes:
        address: "host:port" of the cluster.
        processes: how many jobs run in parallel; 0 means one for each core of the cluster.
        working_dir: folder in which jobs resolve relative paths.
        setup: pickled (initializer, arguments of the initializer).
    """

    address: str
    processes: int
    working_dir: str
    setup: bytes


class RayPool(Executor):
    """Runs jobs on the Ray cluster at `address` ("host:port"), whose nodes must see the same files.

    A job is a module-level function with its arguments; they and the result must be picklable. It runs in this
    process's working directory, in a process that has called `initializer(*initargs)`. A job whose process dies runs
    again, at most 3 times, possibly while the first attempt still runs on another node: it must be idempotent. The
    child's output goes to `log`.

    Submitted jobs wait until a result is requested; then all of them go to Ray Data together. `result()` raises the
    `RunError` that the job raised, a `MachineError` if its process died every time or the cluster is lost, and a
    `RuntimeError` with the remote traceback for any other exception.

    Args:
        processes: how many jobs run in parallel; 0 means one for each core of the cluster.

    Raises:
        MachineError: the cluster does not respond within 10 s or has no cores.
    """

    def __init__(
        self,
        address: str,
        *,
        log: Path,
        processes: int = 0,
        initializer: Callable[..., None],
        initargs: tuple[Any, ...] = (),
    ) -> None:
        check_address(address)
        expect("scheduling.address", "ray")
        self._log = Path(log).absolute()
        self._ids = itertools.count()
        self._waiting: list[tuple[int, bytes]] = []
        self._futures: dict[int, Future[Any]] = {}
        self._closing = False
        self._error: RunError | None = None  # the error of the futures without a result, once the child has exited
        self._reader: threading.Thread | None = None
        self._start(PoolRequest(address, processes, str(Path.cwd()), pickle.dumps((initializer, initargs))))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Queue the job `fn(*args, **kwargs)`; if the pool dies, the future fails with a `RunError`."""
        job_id, future = next(self._ids), _LazyFuture(self._send_waiting)
        self._futures[job_id] = future
        self._waiting.append((job_id, pickle.dumps((fn, args, kwargs))))
        if self._error is not None:
            self._fail_pending()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster: with `cancel_futures` immediately, else after the jobs that were sent to Ray Data."""
        self._closing = True
        if not cancel_futures:
            with contextlib.suppress(OSError):
                self._connection.send(None)
            if self._reader is not None:
                self._reader.join()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(_LEAVE_SECONDS)
        self._kill()

    def _start(self, request: PoolRequest) -> None:
        """Start the child and wait until it has joined the cluster."""
        self._connection, child_end = Pipe()
        with disk_errors(self._log):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            log = append_open(self._log)
        with log, child_end:
            command = [sys.executable, "-c", _DRIVER, str(child_end.fileno()), str(os.getpid())]
            self._child = start_session(command, log, pass_fds=[child_end.fileno()])
        try:
            self._connection.send(request)
            tag, error = self._connection.recv()
            if tag == "error":
                raise error_from(error)
        except (EOFError, OSError):
            self._kill()
            raise self._exit_error() from None
        except BaseException:  # Ctrl-C, too
            self._kill()
            raise
        self._reader = threading.Thread(target=self._read, daemon=True, name="ray-pool")
        self._reader.start()

    def _kill(self) -> None:
        """Kill the child and all processes that it started. The cluster kills the tasks when their driver is gone."""
        end_session(self._child.pid)
        self._child.wait()
        if self._reader is not None:
            self._reader.join()  # it stops at the end of the pipe
        self._connection.close()

    def _send_waiting(self) -> None:
        """Send all waiting jobs to the child, which makes one Ray Dataset of them."""
        jobs, self._waiting = self._waiting, []
        if jobs:
            with contextlib.suppress(OSError):  # the child has exited, which the reader thread reports
                self._connection.send(jobs)

    def _read(self) -> None:
        """Set the futures' results as they arrive, until the child exits."""
        reported: RunError | None = None
        with contextlib.suppress(EOFError, OSError):
            while True:
                tag, data = self._connection.recv()  # the tag is "error" or the id of a job
                if tag == "error":
                    reported = error_from(data)
                else:
                    _set_outcome(self._futures.pop(tag), *pickle.loads(data))
        self._error = reported or self._exit_error()
        self._fail_pending()

    def _fail_pending(self) -> None:
        """Finish the futures without a result: cancel them if the pool is closing, else set its error."""
        with contextlib.suppress(KeyError):
            while True:
                _, future = self._futures.popitem()
                if self._closing:
                    future.cancel()
                else:
                    future.set_exception(self._error)

    def _exit_error(self) -> MachineError:
        code = self._child.wait()
        return MachineError(
            f"{self._log}: Ray's driver exited with code {code}; last line of its log: {last_line(self._log)!r}. "
            "Run the same command again; it resumes."
        )


class _LazyFuture(Future[Any]):
    """A future that sends the waiting jobs when its result is requested."""

    def __init__(self, send: Callable[[], None]) -> None:
        super().__init__()
        self._send_waiting = send

    def result(self, timeout: float | None = None) -> Any:
        self._send_waiting()
        return super().result(timeout)


def _set_outcome(future: Future[Any], tag: str, value: Any) -> None:
    if tag == "result":
        future.set_result(value)
    elif tag == "error":
        future.set_exception(error_from(value))
    else:
        future.set_exception(RuntimeError(f"a bug in a job on the cluster\n{value}"))


# ---------------------------------------------------------------- the child: Ray's driver


def main(descriptor: int, parent_pid: int) -> None:
    """Join the cluster that the first message names; then run each list of jobs, until None or the parent's exit."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    exit_with_parent(parent_pid)
    os.set_inheritable(descriptor, False)
    os.environ.update(_RAY_ENVIRONMENT)
    with Connection(descriptor) as connection:
        try:
            _serve(connection.recv(), connection)
        except EOFError:
            logger.info("the pool is closed")
        except RunError as error:
            connection.send(("error", as_data(error)))
    import ray

    ray.shutdown()  # the parent need not wait for this


def _serve(request: PoolRequest, connection: Connection) -> None:
    set_token_variables(request.address)  # Ray reads them when it is imported
    join_ray(request.address, lambda error: connection.send(("error", as_data(error))))
    import ray.data

    if ray.cluster_resources().get("CPU", 0) < 1:
        raise MachineError(
            f"The cluster at {request.address} has no CPU cores. Start its nodes with some (--num-cpus)."
        )
    ray.data.DataContext.get_current().enable_progress_bars = False
    connection.send(("ready", None))
    while (jobs := connection.recv()) is not None:
        for result in _run(jobs, request):
            connection.send(result)


def _run(jobs: list[tuple[int, bytes]], request: PoolRequest) -> Iterator[tuple[int, bytes]]:
    """Yield (id, pickled outcome) of every job, in the order in which they finish."""
    import ray.data
    from ray import exceptions

    dataset = ray.data.from_items(
        [{"id": job_id, "job": job} for job_id, job in jobs], override_num_blocks=len(jobs)
    ).map(
        functools.partial(_run_job, setup=request.setup, working_dir=request.working_dir),
        compute=ray.data.TaskPoolStrategy(request.processes or None),
        num_cpus=1,
        max_retries=_MAX_RETRIES,
    )
    # Each batch is one block, that is, one job; it arrives as soon as it is ready.
    batches: Iterable[Any] = dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=0)
    advice = "run the same command again; it resumes."
    try:
        for batch in batches:
            yield from zip(batch["id"].to_pylist(), batch["outcome"].to_pylist(), strict=True)
    except (
        exceptions.WorkerCrashedError,
        exceptions.OutOfMemoryError,
        exceptions.NodeDiedError,
    ) as error:
        logger.exception("a job's process died")
        raise MachineError(
            f"A job's process on the cluster at {request.address} died {_MAX_RETRIES + 1} times, most likely "
            f"out of memory ({type(error).__name__}). Set corpus.processes lower and {advice}"
        ) from None
    except exceptions.RayError as error:
        logger.exception("Ray Data failed")
        raise MachineError(
            f"The cluster at {request.address} could not run a job ({one_line(error)}). All its nodes need the "
            f"same .venv and the same files. Fix the cause and {advice}"
        ) from None


# ---------------------------------------------------------------- the tasks

_initialized_with: tuple[bytes, str] | None = None  # arguments of the last `_initialize` call in this process


def _run_job(row: dict[str, Any], setup: bytes, working_dir: str) -> dict[str, Any]:
    """Run the job of a dataset row. Errors are returned: an exception would make Ray Data stop the whole dataset."""
    try:
        _initialize(setup, working_dir)
        function, args, kwargs = pickle.loads(row["job"])
        outcome = ("result", function(*args, **kwargs))
    except RunError as error:
        outcome = ("error", as_data(error))
    except Exception:
        outcome = ("bug", traceback.format_exc())
    return {"id": row["id"], "outcome": pickle.dumps(outcome)}


def _initialize(setup: bytes, working_dir: str) -> None:
    """Initialize this process at its first task; Ray reuses it for further tasks."""
    global _initialized_with
    if _initialized_with != (setup, working_dir):
        change_folder(working_dir)
        initializer, arguments = pickle.loads(setup)
        initializer(*arguments)
        _initialized_with = setup, working_dir

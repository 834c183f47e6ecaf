"""Runs a function in worker processes. Raises the function's `RunError`, or a `MachineError` after too many crashes.

A child process (`cluster.workers.driver`) runs the workers, and Ray if it is needed, in a separate session. So this
process keeps its signal handlers and its terminal, Ctrl-C reaches only this process, an unreachable cluster cannot hang
it, and all processes that the child starts belong to its session and can be killed with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from cluster.workers.address import redact_credentials
from cluster.workers.outcomes import error_from
from cluster.workers.processes import DRIVER
from cluster.workers.request import DriverRequest, Launch, LaunchRequest
from pretrain.common.commands import program
from pretrain.common.errors import InputError, MachineError, StoppedError
from pretrain.common.files import append_open, disk_errors
from pretrain.common.packages import MARKER_FOLDERS, check_not_shadowed
from pretrain.common.worker import (
    JOB_VARIABLE,
    STOP_FILE,
    STOP_SIGNALS,
    Flag,
    TrainingRequest,
    clear_stop,
    stop_signals,
)

LOGS = "logs"
RAY_LOG = "ray.log"

_POLL_SECONDS = 0.25
_KILL_SECONDS = 5.0  # how long the killed processes of a session may take to disappear

# Ray opens its temporary folder to all users (mode 0777), so we put it in a private folder.
RAY_FOLDER = "ray"
# Maximum length of the private folder's parent path; the Unix sockets that Ray creates need paths of <= 107 bytes.
_MAX_PARENT_LENGTH = 36
_PROJECT = Path(__file__).resolve().parents[2]


def run(
    target: str,
    training: TrainingRequest,
    *,
    name: str,
    run_dir: Path | str,
    workers: int = 1,
    cpus_per_worker: int = 0,
    address: str = "",
    in_ray: bool = False,
    max_failures: int = 0,
    min_workers: int = 0,
    wait_for_nodes_seconds: float = 0.0,
    start_seconds: float = 0.0,
) -> None:
    """Call `target` ("package.module:function") with (`training`, Worker) in `workers` processes until they finish.

    Workers run in this process's working directory, so relative paths resolve to the same files. Their output goes to
    `run_dir`/logs/worker-<rank>.log and Ray's to `run_dir`/logs/ray.log.

    A `RunError` raised by a worker is raised again here, with its class and message, and never retried. If a worker
    fails in another way, all workers are restarted with `training.resume`, at most `max_failures` times in a row
    without a new checkpoint; then a `MachineError` names the worker's log and its last line. SIGTERM, SIGINT or SIGHUP
    to this process creates `run_dir`/stop and waits for the workers to finish; a second SIGINT kills everything
    immediately. Call it from the main thread: Python sets signal handlers only there; elsewhere, the old ones stay.

    Args:
        workers: the maximum number of processes.
        cpus_per_worker: number of cores per worker; 0 divides the cores among the workers.
        address: "host:port" of a Ray cluster, whose nodes must see the same files. Empty starts a local Ray, which only
            this run can use, and stops it when this function returns.
        in_ray: use Ray even for a single local worker, which is otherwise a child process of the driver.
        min_workers: minimum number of processes. The run uses as many workers as fit on the cluster: fewer when nodes
            are lost or drained, more when nodes join. 0 means `workers`.
        wait_for_nodes_seconds: how long each start of the workers waits for nodes, if too few workers fit.
        start_seconds: time limit for starting the workers after Ray has placed them; 0: grows with their number.

    Raises:
        MachineError: the workers do not fit on the machine or cluster, or no cluster responds within 10 s.
    """

    def make_request(launch: Launch) -> LaunchRequest:
        return LaunchRequest(
            launch=launch,
            target=target,
            name=name,
            address=address,
            max_failures=max_failures,
            use_gpu=None,
            training=training,
            workers=workers,
            min_workers=min_workers,
            cpus_per_worker=cpus_per_worker,
            in_ray=in_ray or workers > 1 or bool(address),
            wait_for_nodes_seconds=wait_for_nodes_seconds,
            start_seconds=start_seconds,
        )

    run_driver(DRIVER, make_request, address=address, run_dir=run_dir)


def run_driver(
    module: str,
    make_request: Callable[[Launch], DriverRequest],
    *,
    address: str,
    run_dir: Path | str,
    poll: Callable[[], None] | None = None,
) -> None:
    """Run the Ray driver `python -m MODULE request.pickle` until it exits; raise its error, if any.

    Signals have the same effects as in `run`.

    Args:
        make_request: called with the new launch; returns the request for the driver.
        poll: called about four times a second, in this thread; None: not called.
    """
    check_address(address)
    if sys.version_info < (3, 11):  # Python 3.10 ignores PYTHONSAFEPATH (see `environment`)
        check_not_shadowed(*MARKER_FOLDERS, path=[str(Path.cwd()), str(_PROJECT)])
    run_dir = Path(run_dir).absolute()
    with disk_errors(run_dir):
        (run_dir / LOGS).mkdir(parents=True, exist_ok=True)
        since = clear_stop(run_dir)
    with private_folder() as folder:
        launch = Launch(
            id=secrets.token_hex(8),
            run_dir=run_dir,
            working_dir=Path.cwd(),
            ray_dir=folder,
            outcome_path=folder / "outcome.json",
            since=since,
            launcher_pid=os.getpid(),
        )
        with disk_errors(run_dir), Signals(launch.stop_flag()) as signals:
            exit_code = _run_child(module, make_request(launch), signals, poll)
            _raise_outcome(launch, exit_code, signals.was_killed)


def _run_child(module: str, request: DriverRequest, signals: Signals, poll: Callable[[], None] | None) -> int | None:
    """Run the driver and return its exit code. Kill the remaining processes of its session."""
    folder = request.launch.ray_dir
    path = folder / "request.pickle"  # only this user can read or write the folder
    path.write_bytes(pickle.dumps(request))
    with append_open(request.launch.run_dir / LOGS / RAY_LOG) as log:
        child = start_session([interpreter(folder), "-m", module, str(path)], log)
        signals.on_second_sigint = lambda: end_session(child.pid)
        try:
            _wait(child, poll)
        finally:
            end_session(child.pid)
            child.wait()
    return child.returncode


def _wait(child: subprocess.Popen[bytes], poll: Callable[[], None] | None) -> None:
    if poll is None:
        child.wait()
        return
    while child.poll() is None:
        poll()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_SECONDS)
    poll()


def start_session(command: Sequence[str], log: Any, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Start a Ray driver as the leader of a new session, with its output in `log`."""
    with without_stop_signals():
        return subprocess.Popen(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=pass_fds,
        )


@contextlib.contextmanager
def without_stop_signals() -> Iterator[None]:
    """Mask the stop signals in all processes that are started inside the context, and in their children.

    A scheduler that stops a job signals all its processes, but only the launcher may react. A handler would not
    suffice: `ray.init` replaces it with one that exits the process.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def check_address(address: str) -> None:
    """Raise `InputError` for an address that Ray would accept although it is not host:port."""
    if address == "auto" or "://" in address or "@" in address:
        raise InputError(
            f"scheduling.address: {redact_credentials(address)!r} is not host:port. "
            "Give the head node's address, such as 10.0.0.5:6379."
        )


def end_session(session: int) -> None:
    """Kill every process of a session, given by its leader's id, except this process. Gives up after 5 s."""
    deadline = time.monotonic() + _KILL_SECONDS
    while (processes := _session_processes(session)) and time.monotonic() < deadline:
        for pid in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _session_processes(session: int) -> list[int]:
    """List the ids of a session's processes, except zombies and this process."""
    pids = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if (
                pid != os.getpid()
                and os.getsid(pid) == session
                and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            ):
                pids.append(pid)
    return pids


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a temporary folder for Ray, which only this user can read; remove it after the block."""
    parent = tempfile.gettempdir()
    if len(parent) > _MAX_PARENT_LENGTH or " " in parent:
        parent = "/tmp"
    with disk_errors(Path(parent)):
        folder = Path(tempfile.mkdtemp(prefix="bertrain-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def interpreter(folder: Path) -> str:
    """Return the path of this Python, or of a link to it in `folder` if the path has a space (Ray would split it)."""
    if " " not in sys.executable:
        return sys.executable
    path = Path(sys.executable)
    with contextlib.suppress(FileExistsError):
        (folder / "python").symlink_to(path.parent.parent)
    return str(folder / "python" / path.parent.name / path.name)


def environment() -> dict[str, str]:
    """Return this process's environment with this project first in PYTHONPATH, so that workers can import it.

    PYTHONSAFEPATH keeps Python from importing a stray `datasets.py` or `cluster/` in the working directory
    instead (from Python 3.11; 3.10 ignores it).
    """
    path = os.pathsep.join(filter(None, [str(_PROJECT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "BERTRAIN_PROGRAM": program()}


class Signals:
    """Context manager: the first of the `stop_signals` sets the stop flag; a later SIGINT kills everything immediately.

    A stop file in the folder of this scheduler job also sets the flag. Different scheduler jobs have different folders.
    If the flag cannot be written, for example during a storage outage, the write is retried.
    """

    def __init__(self, stop_flag: Flag):
        self.was_killed = False
        self.on_second_sigint: Callable[[], None] = lambda: None
        self._flag = stop_flag
        self._requested = False
        self._exited = threading.Event()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals():
                self._previous[number] = signal.signal(number, self._on_signal)
        if job := os.environ.get(JOB_VARIABLE):
            threading.Thread(target=self._set_flag, args=[Path(job) / STOP_FILE], daemon=True, name="job-stop").start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._exited.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._requested and number == signal.SIGINT:
            self.was_killed = True
            self.on_second_sigint()
        self._requested = True
        try:
            self._flag.set()
        except OSError as error:  # the run continues meanwhile
            threading.Thread(target=self._retry_set, args=[error], daemon=True, name="stop").start()

    def _retry_set(self, error: OSError) -> None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(
                f"{self._flag.path}: cannot be written now ({error.strerror}). The run stops when it can be written; "
                "Ctrl-C stops it immediately, without a checkpoint.",
                file=sys.stderr,
            )
        self._set_flag(Path())  # immediately, since the current folder exists

    def _set_flag(self, trigger: Path) -> None:
        """Set the stop flag as soon as the file `trigger` exists; retry a write that fails."""
        while not self._exited.wait(_POLL_SECONDS):
            with contextlib.suppress(OSError):
                if trigger.exists():
                    self._flag.set()
                    return


def _raise_outcome(launch: Launch, exit_code: int | None, was_killed: bool) -> None:
    """Raise the launch's error, if any."""
    if was_killed:
        raise StoppedError(f"{launch.run_dir}: stopped immediately, without a final checkpoint.{StoppedError.CONTINUE}")
    try:
        outcome = json.loads(launch.outcome_path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        log = launch.run_dir / LOGS / RAY_LOG
        raise MachineError(
            f"{log}: the driver of the workers exited with code {exit_code}; last line of its log: {last_line(log)!r}. "
            "Run the same command with --resume to continue."
        ) from None
    if outcome["error"] is not None:
        raise error_from(outcome["error"])


def last_line(path: Path) -> str:
    """Return the last non-empty line of a file, from its last 4 KiB; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")

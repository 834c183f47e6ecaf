"""Run a function in worker processes through Ray, and bring its end back: done, a `RunError`, or a crash.

Ray lives in a child process (`cluster.workers.driver`) in a session of its own. So this process keeps its signal
handlers and its terminal, Ctrl-C reaches nobody but us, an unreachable cluster cannot hang us, and everything
that was started is known by that session and can be ended by id.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from cluster.workers.address import without_password
from cluster.workers.worker import STOP_FILE, error_from, stop_flag
from pretrain.common.errors import InputError, MachineError, StoppedError
from pretrain.common.files import append_open, disk_errors
from pretrain.common.worker import Flag

LOGS = "logs"
RAY_LOG = "ray.log"

_POLL_SECONDS = 0.25

# Ray opens its temporary folder to all (mode 0777), so it gets one within a private folder.
RAY_FOLDER = "ray"
# It keeps unix sockets there, and their paths may have 107 bytes.
_LONGEST_TEMPORARY_FOLDER = 36
_PROJECT = Path(__file__).resolve().parents[2]


def run(
    target: str,
    payload: dict[str, Any],
    *,
    name: str,
    run_dir: Path | str,
    workers: int = 1,
    cpus_per_worker: int = 0,
    address: str = "",
    max_failures: int = 0,
    min_workers: int = 0,
    wait_for_nodes_seconds: float = 0.0,
) -> None:
    """Call `target` ("package.module:function") with (payload, Worker) in `workers` processes, to its end.

    `payload` must survive JSON. Workers run in this process's working directory, so relative paths mean the
    same there. Their output goes to `run_dir`/logs/worker-<rank>.log and Ray's to `run_dir`/logs/ray.log.
    `address` ("host:port") joins that Ray cluster, which must see the same files; empty starts a Ray of our
    own on this machine, closed to others and gone when this returns. `cpus_per_worker` 0 shares out the
    cores. With `min_workers` there are as many from it to `workers` as the cluster holds, fewer when nodes are lost or
    drained and more when they return. A cluster that holds fewer is given `wait_for_nodes_seconds`, at the start and
    later.

    A `RunError` raised in a worker is raised here, same class and message, and never retried. Any other end
    of a worker restarts all of them with payload["resume"] = True, at most `max_failures` times without a new
    checkpoint; then a `MachineError` names the worker's log and its last line. SIGTERM or SIGINT to this process creates
    `run_dir`/stop and waits for the workers to end themselves; a second SIGINT ends everything at once. Call
    from the main thread: elsewhere Python allows no signal handlers, and signals keep their old meaning.

    Raises `MachineError` when the machine or cluster cannot hold the workers, or is not reached within 10 s.
    """
    drive(
        "cluster.workers.driver",
        {
            "target": target,
            "payload": payload,
            "name": name,
            "workers": workers,
            "cpus_per_worker": cpus_per_worker,
            "address": address,
            "max_failures": max_failures,
            "min_workers": min_workers,
            "wait_for_nodes_seconds": wait_for_nodes_seconds,
        },
        run_dir=run_dir,
    )


def drive(
    module: str, request: dict[str, Any], *, run_dir: Path | str, poll: Callable[[Path], None] | None = None
) -> None:
    """Run a driver of Ray, `python -m MODULE request.json`, to its end and raise what ended it.

    The request is completed by what all drivers need: run_dir, working_dir, ray_dir, outcome, and `launch` and `since`,
    which tell this launch's stop file from one of another launch (`stop_flag`). `poll` is called
    about four times a second, in this thread, with the private folder `ray_dir`, where a driver may leave word.
    Signals are those of `run`.
    """
    check_address(request["address"])
    run_dir = Path(run_dir).absolute()
    with disk_errors(run_dir):
        (run_dir / LOGS).mkdir(parents=True, exist_ok=True)
        (run_dir / STOP_FILE).unlink(missing_ok=True)
        request = {
            **request,
            "run_dir": str(run_dir),
            "launch": secrets.token_hex(8),
            "since": _time_at(run_dir),
        }

    with (
        _private_folder() as folder,
        disk_errors(run_dir),
        append_open(run_dir / LOGS / RAY_LOG) as log,
        _Signals(stop_flag(request)) as signals,
    ):
        outcome = folder / "outcome.json"
        request = {
            **request,
            "working_dir": str(Path.cwd()),
            "ray_dir": str(folder),
            "outcome": str(outcome),
        }
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        child = subprocess.Popen(
            [_python(folder), "-m", module, str(folder / "request.json")],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        signals.on_second = lambda: end_session(child.pid)
        try:
            _wait(child, folder, poll)
        finally:
            end_session(child.pid)
            child.wait()
        _raise_outcome(outcome, run_dir, child.returncode, signals.ended_at_once)


def _wait(child: subprocess.Popen[bytes], folder: Path, poll: Callable[[Path], None] | None) -> None:
    if poll is None:
        child.wait()
        return
    while child.poll() is None:
        poll(folder)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_SECONDS)
    poll(folder)


def _time_at(folder: Path) -> int:
    """Now, by the clock that stamps the files of `folder`: a network file system has its own. Nanoseconds."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as file:
        return os.fstat(file.fileno()).st_mtime_ns


def check_address(address: str) -> None:
    """Refuse (`InputError`) what Ray would take for an address though it is not the host:port of a cluster."""
    if address == "auto" or "://" in address or "@" in address:
        raise InputError(
            f"scheduling.address: {without_password(address)!r} is not host:port. "
            "Name the head node's own address, such as 10.0.0.5:6379."
        )


def end_session(session: int) -> None:
    """Kill every process of the session that `session` leads, but not the caller. Gives up after 5 s."""
    deadline = time.monotonic() + 5
    while (members := _members(session)) and time.monotonic() < deadline:
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _members(session: int) -> list[int]:
    """The living processes of a session, without zombies and the caller."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
            if (
                pid != os.getpid()
                and os.getsid(pid) == session
                and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
            ):
                found.append(pid)
    return found


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder for Ray's session, readable by this user only, removed at the end."""
    place = tempfile.gettempdir()
    if len(place) > _LONGEST_TEMPORARY_FOLDER or " " in place:
        place = "/tmp"
    with disk_errors(Path(place)):
        folder = Path(tempfile.mkdtemp(prefix="bertrain-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _python(folder: Path) -> str:
    """Our interpreter; through a link in `folder` when its path has a space, at which Ray would split it."""
    if " " not in sys.executable:
        return sys.executable
    program = Path(sys.executable)
    (folder / "python").symlink_to(program.parent.parent)
    return str(folder / "python" / program.parent.name / program.name)


def environment() -> dict[str, str]:
    """Ours, with this project first on the path, so that workers find it wherever they start.

    PYTHONSAFEPATH keeps a stray `datasets.py` or `cluster/` in the user's folder from being imported instead
    (Python 3.11 on; 3.10 ignores it).
    """
    path = os.pathsep.join(filter(None, [str(_PROJECT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


class _Signals:
    """While entered, the first SIGTERM or SIGINT sets the stop flag; a SIGINT after it ends at once."""

    def __init__(self, stop: Flag):
        self.ended_at_once = False
        self.on_second: Callable[[], None] = lambda: None
        self._stop = stop
        self._asked = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._asked and number == signal.SIGINT:
            self.ended_at_once = True
            self.on_second()
        self._asked = True
        self._stop.set()


def _raise_outcome(outcome: Path, run_dir: Path, exit_code: int, ended_at_once: bool) -> None:
    """Return if the run is done, else raise what ended it."""
    if ended_at_once:
        raise StoppedError(
            f"{run_dir}: ended at once, without a last checkpoint. --resume continues from the newest one."
        )
    try:
        result = json.loads(outcome.read_text(encoding="utf-8"))
    except FileNotFoundError:
        log = run_dir / LOGS / RAY_LOG
        raise MachineError(
            f"{log}: Ray's driver ended with exit code {exit_code}; its last line: {last_line(log)!r}. "
            "Run the same command with --resume to go on."
        ) from None
    if result["error"] is not None:
        raise error_from(result["error"])


def last_line(path: Path) -> str:
    """The last non-empty line of a text file, from its last 4 KiB; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")

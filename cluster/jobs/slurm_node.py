"""Runs the Ray node of a SLURM job's cluster on one SLURM node. The first node also runs the job's command.

srun starts `python -m cluster.jobs.slurm_node ADDRESS CPUS GPUS COMMAND...` on each node (manifest slurm).
`ray symmetric-run` would do the same, but its nodes notice only after a minute that the command has finished, and `ray
stop` kills the Ray of other jobs, too. Here the Ray of each node stops with this process and leaves no temporary files.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import psutil

from cluster.workers.launch import RAY_FOLDER, end_session, last_line, without_stop_signals
from cluster.workers.local import NODE_LOG, start_node
from pretrain.common.errors import MachineError
from pretrain.common.worker import JOB_VARIABLE

_POLL_SECONDS = 0.5
_START_SECONDS = 300.0  # time within which the head's Ray must accept connections
_MAX_REFUSALS = 3  # number of refused connections in a row after which the head's Ray is assumed to have stopped
_CLEANUP_SECONDS = 10  # part of SLURM's KillWait that is reserved for the cleanup; then SLURM sends SIGKILL


def main(address: str, cpus: int, gpus: int, command: list[str]) -> int:
    """Run this node until the command on the first node finishes. Returns the exit code of this srun task.

    Any code but 0 means that the node failed. The command's own exit code goes into a file.
    """
    # Ray requires the same path on all nodes. No other job shares these nodes.
    folder = Path("/tmp") / f"bertrain-{os.environ['SLURM_JOB_ID']}"
    os.environ["TMPDIR"] = str(folder)  # so that files of libraries are removed, too
    grace = _Grace()
    with contextlib.ExitStack() as cleanup:
        try:
            _create_folder(folder)
            # Callbacks run in reverse order: the processes are killed, then their files are removed.
            cleanup.callback(_remove_folder, folder)
            if os.environ["SLURM_NODEID"] == "0":
                _run_head(folder, address, cpus, gpus, command, grace, cleanup)
            else:
                _run_node(folder, address, cpus, gpus, grace, cleanup)
        except MachineError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.exit_code
    return 0


class _Grace:
    """The time to save a checkpoint after SIGTERM, which all processes of a canceled, requeued or timed-out job get."""

    def __init__(self) -> None:
        self._signaled_at: float | None = None  # arrival of the first SIGTERM
        signal.signal(signal.SIGTERM, self._on_signal)
        self._seconds = max(1, _kill_wait() - _CLEANUP_SECONDS)

    def has_expired(self) -> bool:
        """Return whether the time has passed."""
        return self._signaled_at is not None and time.monotonic() > self._signaled_at + self._seconds

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signaled_at is None:
            self._signaled_at = time.monotonic()


def _kill_wait() -> int:
    """Return SLURM's KillWait in seconds, or the default if SLURM's commands are missing, as in a container."""
    if not shutil.which("scontrol"):
        return 30
    config = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"^KillWait *= *(\d+)", config, re.MULTILINE)
    return int(match[1]) if match else 30


def _run_head(
    folder: Path, address: str, cpus: int, gpus: int, command: list[str], grace: _Grace, cleanup: contextlib.ExitStack
) -> None:
    host, _, port = address.rpartition(":")
    options = ["--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false"]
    with without_stop_signals():
        ray = start_node(folder, cpus, [*options, f"--num-gpus={gpus}", f"--temp-dir={folder}/{RAY_FOLDER}"], cleanup)
    _await_head(address, grace, ray, folder)
    # A new session, so that all processes that the command starts can be killed.
    process = subprocess.Popen(command, start_new_session=True)
    cleanup.callback(end_session, process.pid)
    while process.poll() is None and not grace.has_expired():
        _check_ray(ray, folder)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_SECONDS)


def _run_node(folder: Path, address: str, cpus: int, gpus: int, grace: _Grace, cleanup: contextlib.ExitStack) -> None:
    _await_head(address, grace)
    if _has_finished():
        return
    with without_stop_signals():
        ray = start_node(folder, cpus, [f"--address={address}", f"--num-gpus={gpus}"], cleanup)
    refusals = 0
    while refusals < _MAX_REFUSALS and not grace.has_expired() and not _has_finished():
        refusals = refusals + 1 if _accepts_connection(address) is False else 0
        if refusals == 0:
            _check_ray(ray, folder)
        time.sleep(_POLL_SECONDS)


def _await_head(address: str, grace: _Grace, ray: subprocess.Popen[bytes] | None = None, folder: Path = Path()) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not _accepts_connection(address) and not _has_finished():
        if ray is not None:
            _check_ray(ray, folder)
        if time.monotonic() > deadline or grace.has_expired():
            raise MachineError(f"{os.uname().nodename}: Ray's head at {address} did not answer. See the first node.")
        time.sleep(_POLL_SECONDS)


def _has_finished() -> bool:
    """Return whether the command has finished, possibly before this node saw the head."""
    return (Path(os.environ[JOB_VARIABLE]) / "exit-code").exists()


def _accepts_connection(address: str) -> bool | None:
    """Return whether `address` accepts connections; None if unknown, for example after a timeout."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def _check_ray(ray: subprocess.Popen[bytes], folder: Path) -> None:
    if ray.poll() is not None:
        last = last_line(folder / NODE_LOG)
        raise MachineError(
            f"{os.uname().nodename}: Ray ended with exit code {ray.returncode}; its last line: {last!r}."
        )


def _create_folder(folder: Path) -> None:
    """Create the folder. First remove what earlier starts of this job left, and unused folders of other jobs.

    After the loss of another node SLURM may not have killed this node's processes, and a lost node has not cleaned up.
    """
    processes = [(process, process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    for path in {folder, *folder.parent.glob("bertrain-[0-9]*")}:
        users = [process for process, command in processes if any(f"{path}/" in argument for argument in command)]
        if path == folder:
            for process in users:
                with contextlib.suppress(ProcessLookupError):
                    end_session(os.getsid(process.pid))
        if (path == folder or not users) and path.exists() and path.stat().st_uid == os.getuid():
            _remove_folder(path)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise MachineError(f"{os.uname().nodename}: {folder} exists and is not yours. Have it deleted.") from None


def _remove_folder(folder: Path) -> None:
    """Remove the folder; Ray's killed processes may still write there for a moment."""
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))

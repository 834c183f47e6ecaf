"""One node of a SLURM job: its part of the job's Ray cluster. The first node also runs the job's command.

srun starts `python -m cluster.jobs.slurm_node ADDRESS CPUS GPUS COMMAND...` on each node (manifest slurm).
`ray symmetric-run` would do the same, but its nodes notice the end only after a minute, and `ray stop` ends the Ray of
other jobs, too. Here each node owns its Ray, which ends with it, and nothing stays in its temporary folder.
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
_START_SECONDS = 300.0  # for the head's Ray to accept connections
_REFUSALS = 3  # in a row: the head's Ray has ended
_CLEAN_SECONDS = 10  # of SLURM's KillWait, not for a checkpoint: what is killed cannot clean up


def main(address: str, cpus: int, gpus: int, command: list[str]) -> int:
    """Run this node until the command on the first node ends. Returns the exit code of srun's task.

    The command reports its own exit code elsewhere: any code but 0 is that of a node which failed.
    """
    # The same path on all nodes, as Ray wants it; a job has its nodes to itself.
    folder = Path("/tmp") / f"bertrain-{os.environ['SLURM_JOB_ID']}"
    os.environ["TMPDIR"] = str(folder)  # what libraries leave there goes, too
    term = _Term()
    with contextlib.ExitStack() as ends:
        try:
            _claim(folder)
            # Left from the last to the first: the processes end, then their files are removed.
            ends.callback(_remove, folder)
            if os.environ["SLURM_NODEID"] == "0":
                _lead(folder, address, cpus, gpus, command, term, ends)
            else:
                _follow(folder, address, cpus, gpus, term, ends)
        except MachineError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return error.exit_code
    return 0


class _Term:
    """When SIGTERM came; SLURM sends it to all processes of a job that is canceled, requeued or out of time."""

    def __init__(self) -> None:
        self._came: float | None = None
        signal.signal(signal.SIGTERM, self._on_signal)
        self._seconds = max(1, _kill_wait() - _CLEAN_SECONDS)

    def is_over(self) -> bool:
        """Whether the time to save a checkpoint has passed since."""
        return self._came is not None and time.monotonic() > self._came + self._seconds

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._came is None:
            self._came = time.monotonic()


def _kill_wait() -> int:
    """SLURM's setting, or its default where SLURM's commands are not at hand, as in a container."""
    if not shutil.which("scontrol"):
        return 30
    shown = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"^KillWait *= *(\d+)", shown, re.MULTILINE)
    return int(found[1]) if found else 30


def _lead(
    folder: Path, address: str, cpus: int, gpus: int, command: list[str], term: _Term, ends: contextlib.ExitStack
) -> None:
    host, _, port = address.rpartition(":")
    head = ["--head", f"--node-ip-address={host}", f"--port={port}", "--include-dashboard=false"]
    with without_stop_signals():
        ray = start_node(folder, cpus, [*head, f"--num-gpus={gpus}", f"--temp-dir={folder}/{RAY_FOLDER}"], ends)
    _await_head(address, term, ray, folder)
    # In a session of its own, with all that it starts.
    run = subprocess.Popen(command, start_new_session=True)
    ends.callback(end_session, run.pid)
    while run.poll() is None and not term.is_over():
        _check(ray, folder)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(_POLL_SECONDS)


def _follow(folder: Path, address: str, cpus: int, gpus: int, term: _Term, ends: contextlib.ExitStack) -> None:
    _await_head(address, term)
    if _is_over():
        return
    with without_stop_signals():
        ray = start_node(folder, cpus, [f"--address={address}", f"--num-gpus={gpus}"], ends)
    refusals = 0
    while refusals < _REFUSALS and not term.is_over() and not _is_over():
        refusals = refusals + 1 if _connects(address) is False else 0
        if refusals == 0:
            _check(ray, folder)
        time.sleep(_POLL_SECONDS)


def _await_head(address: str, term: _Term, ray: subprocess.Popen[bytes] | None = None, folder: Path = Path()) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not _connects(address) and not _is_over():
        if ray is not None:
            _check(ray, folder)
        if time.monotonic() > deadline or term.is_over():
            raise MachineError(f"{os.uname().nodename}: Ray's head at {address} did not answer. See the first node.")
        time.sleep(_POLL_SECONDS)


def _is_over() -> bool:
    """Whether the command has ended: it may do so before another node sees the head."""
    return (Path(os.environ[JOB_VARIABLE]) / "exit-code").exists()


def _connects(address: str) -> bool | None:
    """Whether something listens there; None if the network does not tell."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    return True


def _check(ray: subprocess.Popen[bytes], folder: Path) -> None:
    if ray.poll() is not None:
        last = last_line(folder / NODE_LOG)
        raise MachineError(
            f"{os.uname().nodename}: Ray ended with exit code {ray.returncode}; its last line: {last!r}."
        )


def _claim(folder: Path) -> None:
    """Make the folder. What earlier starts of this job left, and jobs of which nothing runs any more, is removed.

    After the loss of another node SLURM may not have ended this one's processes, nor a lost node have cleaned up.
    """
    words = [(process, process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    for one in {folder, *folder.parent.glob("bertrain-[0-9]*")}:
        users = [process for process, line in words if any(f"{one}/" in word for word in line)]
        if one == folder:
            for process in users:
                with contextlib.suppress(ProcessLookupError):
                    end_session(os.getsid(process.pid))
        if (one == folder or not users) and one.exists() and one.stat().st_uid == os.getuid():
            _remove(one)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        raise MachineError(f"{os.uname().nodename}: {folder} exists and is not yours. Have it deleted.") from None


def _remove(folder: Path) -> None:
    """Ray's processes may still write there for a moment after they were killed."""
    for _ in range(10):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))

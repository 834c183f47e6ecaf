"""Checks that nodes share a folder and its locks: the job holds a lock, and each node tries to take it."""

import contextlib
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from cluster.doctor.rows import FAIL, WARN, Finding
from cluster.workers.outcomes import one_line
from pretrain.common.errors import InputError, RunError
from pretrain.common.files import locked

SEEN_SECONDS = 5.0  # how long a network file system may take to show a new file to other nodes
_LOCKED = "locked by another"  # message of the error for a lock that another process holds
_WRITE_ADVICE = "Allow all nodes to write there, or give another shared folder with --dir."


@contextlib.contextmanager
def hold_lock(folder: Path) -> Iterator[tuple[str, Finding | None]]:
    """Hold a new lock file in `folder` during the block. Yield (name of the file, None), or ("", the failed check)."""
    name = f".doctor-{secrets.token_hex(8)}.lock"
    with contextlib.ExitStack() as stack:
        failure = None
        try:
            if not folder.is_dir():  # `locked` would create it
                raise InputError("is not a folder on this machine")
            stack.enter_context(locked(folder / name, _LOCKED))
            stack.callback((folder / name).unlink, missing_ok=True)
        except (OSError, RunError) as error:
            failure = Finding("storage", f"{folder}: {error}", FAIL, _WRITE_ADVICE)
        yield ("" if failure else name), failure


def try_lock(folder: Path, name: str) -> Finding:
    """Return the row of this machine: whether the lock that another process holds on the file `name` is seen here."""
    deadline = time.monotonic() + SEEN_SECONDS
    while not (folder / name).exists():
        if time.monotonic() > deadline:
            text = f"{folder}: a file of the head was not seen within {SEEN_SECONDS:.0f} s"
            advice = "Mount one network folder at this path on all nodes, or give one with --dir."
            return Finding("storage", text, FAIL, advice)
        time.sleep(0.1)
    try:
        with locked(folder / name, _LOCKED) as supported:
            text = "a lock of the head is not seen" if supported else "does not support locks"
    except (OSError, RunError) as error:
        if str(error) == _LOCKED:
            return Finding("storage", f"{folder}: shared, a lock of the head is seen")
        return Finding("storage", f"{folder}: {one_line(error)}", FAIL, _WRITE_ADVICE)
    advice = (
        "Mount it with locks that all nodes share (NFS: without nolock and local_lock; Lustre: -o flock). Without them "
        "a run that is still running can be started a second time, which damages its folder."
    )
    return Finding("storage", f"{folder}: {text}", WARN, advice)

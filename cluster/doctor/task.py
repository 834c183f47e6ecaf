"""What the checks of a cluster do on each of its nodes, in a process that lives from one check to the next."""

import contextlib
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from cluster.doctor import machine, nodes, reduce
from cluster.workers.outcomes import one_line
from cluster.workers.target import bind_gloo
from pretrain.common.errors import InputError, RunError
from pretrain.common.files import atomic_open, locked

SEEN_SECONDS = 5.0  # network file systems may show others' files a little later
_SEEN_POLL_SECONDS = 0.1
_TAKEN = "locked by another"


class Probe:
    """Lives on one node; `cluster.doctor.driver` calls its methods one after the other. They return plain data.

    Args:
        address: the node's, as Ray knows it.
        threads: the CPUs that Ray uses there.
        works: whether workers can be placed there, so that its speed matters.
        measures: as `check.check`.
    """

    def __init__(self, address: str, threads: int, works: bool, measures: str) -> None:
        self._address, self._threads, self._works, self._measures = address, threads, works, measures
        self._listener: socket.socket | None = None
        self._held = contextlib.ExitStack()

    def about(self) -> dict[str, Any]:
        """What is compared among nodes, and what gloo would use as this node's address."""
        import torch

        return {
            "versions": machine.versions(machine.measures_of(self._measures)),
            "cores": len(os.sched_getaffinity(0)),
            "gpus": torch.cuda.device_count(),
            "interface": os.environ.get("GLOO_SOCKET_IFNAME", ""),
            "own_name": _own_name(),
        }

    def clock(self) -> float:
        """This node's time, in seconds since 1970."""
        return time.time()

    def write_probe(self, folder: str, name: str, text: str) -> tuple[float, str]:
        """Write, flush, rename over and read back a file in `folder`; (seconds, error or empty)."""
        began = time.perf_counter()
        path = Path(folder) / name
        # It would be created here otherwise, and runs would not write to the shared folder.
        if not path.parent.is_dir():
            return 0.0, "is not a folder on this machine"
        try:
            for content in ("to be replaced", text):
                with atomic_open(path, "w") as file:
                    file.write(content)
            read_back = path.read_text(encoding="utf-8")
        except (OSError, RunError) as error:
            return 0.0, one_line(error)
        return (
            time.perf_counter() - began,
            "" if read_back == text else f"read {read_back!r} back, which is not what was written",
        )

    def see_probes(self, folder: str, texts: dict[str, str]) -> tuple[float, list[str]]:
        """(Seconds until this node saw all these files with their texts, names of the files that it did not see)."""
        began = time.perf_counter()
        while True:
            missing = [name for name, text in texts.items() if _read(Path(folder) / name) != text]
            waited = time.perf_counter() - began
            if not missing or waited > SEEN_SECONDS:
                return waited, missing
            time.sleep(_SEEN_POLL_SECONDS)

    def hold_lock(self, folder: str, name: str) -> str:
        """Hold the lock file `name` in `folder` until `release_lock`; the outcome: HELD, NO_LOCKS or an error."""
        return self._try_lock(Path(folder) / name, self._held)

    def try_lock(self, folder: str, name: str) -> str:
        """Try to lock a file that another node holds; the outcome: TAKEN is correct; HELD, NO_LOCKS or an error."""
        with contextlib.ExitStack() as stack:
            return self._try_lock(Path(folder) / name, stack)

    def release_lock(self, folder: str, name: str) -> None:
        """Release the lock of `hold_lock` and remove its file."""
        self._held.close()
        (Path(folder) / name).unlink(missing_ok=True)

    def _try_lock(self, path: Path, stack: contextlib.ExitStack) -> str:
        try:
            return nodes.HELD if stack.enter_context(locked(path, _TAKEN)) else nodes.NO_LOCKS
        except InputError as error:
            return nodes.TAKEN if str(error) == _TAKEN else one_line(error)
        except (OSError, RunError) as error:
            return one_line(error)

    def remove_probe(self, folder: str, name: str) -> None:
        """Delete the file of `write_probe`, if it is there."""
        (Path(folder) / name).unlink(missing_ok=True)

    def inspect(self, folder: str) -> machine.MachineFacts:
        """The facts of this machine; `folder` is the one whose disk is measured."""
        return machine.inspect(self._measures, Path(folder), self._threads, self._works)

    def listen(self) -> int:
        """Open a port, on this node's address only, at which the members of a process group find each other."""
        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        self._listener = socket.create_server((self._address, 0), family=family)
        return self._listener.getsockname()[1]

    def reduce(self, backend: str, rank: int, world: int, host: str, port: int) -> tuple[float, int] | str:
        """As `reduce.measure`, as member `rank` of a group whose first member listens at `host`; or the error."""
        from torch._C._distributed_c10d import TCPStore

        bind_gloo(self._address)
        limit = timedelta(seconds=reduce.TIMEOUT_SECONDS)
        listener = self._listener.detach() if rank == 0 and self._listener else None
        try:
            store = TCPStore(host, port, world, rank == 0, limit, master_listen_fd=listener)
            with reduce.group(backend, store, rank, world) as device:
                return reduce.measure(device)
        except (RuntimeError, OSError) as error:  # torch.distributed's are of the first kind
            return one_line(error)


def _own_name() -> str:
    """The address to which this machine's host name resolves; gloo listens there unless an interface is named."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        return one_line(error)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None

"""What runs inside a Ray worker: call the target with its `Worker` and carry its end out as plain data."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.common.errors import DivergedError, InputError, MachineError, RunError, StoppedError
from pretrain.common.files import open_regular
from pretrain.common.worker import Flag, Worker

_ERRORS: dict[str, type[RunError]] = {
    kind.__name__: kind for kind in (RunError, InputError, MachineError, DivergedError, StoppedError)
}
CRASH = "crash"
STOP_FILE = "stop"  # in the run folder: the run is to save and end
RESTART_FILE = "restart"  # likewise: the workers are to save and end, and will be started again


class WorkerEnd(Exception):
    """How a worker's target ended, as strings: user exceptions need not survive pickling, these do.

    `kind` is the class name of a `RunError`, or `CRASH` for everything else.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(kind, message)
        self.kind = kind
        self.message = message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


def one_line(error: BaseException) -> str:
    """An exception's class and message on one line of at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def error_from(data: dict[str, str]) -> RunError:
    """The `RunError` that {"kind": class name, "message": text} stands for."""
    return _ERRORS[data["kind"]](data["message"])


def stop_flag(request: Mapping[str, Any]) -> Flag:
    """Asks the whole launch to end. `touch` may set it, too: so does a pod's hook, or a user."""
    return Flag(Path(request["run_dir"]) / STOP_FILE, request["launch"], request["since"])


def restart_flag(request: Mapping[str, Any], attempt: int) -> Flag:
    """Asks the workers of one attempt of the launch to end."""
    return Flag(Path(request["run_dir"]) / RESTART_FILE, f"{request['launch']} {attempt}", since=None)


@dataclass(frozen=True)
class RankPlacement:
    """A worker among all of a start. `master` and `port` are where they meet."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str  # of its node, where the others reach it
    master: str
    port: int
    visible_gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them


def enter(request: dict[str, Any], place: RankPlacement) -> dict[str, str] | None:
    """Call the request's target in this worker. Returns None when it came to its end.

    A stop or divergence is agreed among all workers, so it is returned: each may finish its last words. Any
    other error may be this worker's alone while the others wait for it in a collective, so it is raised
    (`WorkerEnd`), which makes Ray end them all.
    """
    run_dir = Path(request["run_dir"])
    _log_to(run_dir / "logs" / f"worker-{place.rank}.log", request["attempt"])
    os.environ.update(MASTER_ADDR=place.master, MASTER_PORT=str(place.port))
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size))
    _listen_at(place.address)
    worker = Worker(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        threads=request["cpus_per_worker"],
        flags=(stop_flag(request), restart_flag(request, request["attempt"])),
    )
    try:
        if worker.stop_requested():
            # Seen by this rank alone: raised, so that Ray ends the others too.
            raise WorkerEnd("StoppedError", f"{run_dir}: stopped before the first step. --resume continues.")
        change_folder(request["working_dir"])
        _resolve(request["target"])(request["payload"], worker)
    except (StoppedError, DivergedError) as error:
        return {"kind": type(error).__name__, "message": str(error)}
    except WorkerEnd:
        raise
    except RunError as error:
        raise WorkerEnd(type(error).__name__, str(error)) from None
    except BaseException as error:
        traceback.print_exc()
        raise WorkerEnd(CRASH, one_line(error)) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return None


def _listen_at(address: str) -> None:
    """Have gloo use the interface of this address: it takes the one of the host's name, which may be loopback's."""
    import psutil

    for interface, places in psutil.net_if_addrs().items():
        if any(one.address == address for one in places):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def enter_trial(config: dict[str, int], request: dict[str, Any]) -> dict[str, str]:
    """Call the request's target for trial `config["number"]`, in a process of its own, for Ray Tune.

    A `RunError` is an end like any other and returned, {"kind": class name, "message": text}, empty where the target
    came to its end: so Tune repeats crashes (`WorkerEnd`) alone.
    """
    trial = request["trials"][config["number"]]
    run_dir = Path(trial["run_dir"])
    _log_to(run_dir / "logs" / "worker-0.log", 0)
    worker = Worker(threads=request["cpus_per_worker"], flags=(stop_flag(request),))
    try:
        if worker.stop_requested():
            raise StoppedError(f"{run_dir}: stopped before the first step.")
        change_folder(request["working_dir"])
        _resolve(request["target"])(trial["payload"], worker)
    except RunError as error:
        return {"kind": type(error).__name__, "message": str(error)}
    except BaseException as error:
        traceback.print_exc()
        raise WorkerEnd(CRASH, one_line(error)) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return {"kind": "", "message": ""}


def _resolve(target: str) -> Any:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def change_folder(working_dir: str, how: str = "Start from a folder") -> None:
    """Make it the current one; `how` begins the advice where this machine of the cluster has none such."""
    try:
        os.chdir(working_dir)
    except OSError as error:
        raise MachineError(
            f"{working_dir}: {error.strerror} on the cluster's machine {os.uname().nodename}. {how} that all machines of "
            "the cluster share."
        ) from None


def _log_to(path: Path, attempt: int) -> None:
    """Send this process's output to `path` from here on, whoever writes it: Python, C++ or a child."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = open_regular(path, os.O_WRONLY | os.O_APPEND)
    except RunError as error:
        raise WorkerEnd(type(error).__name__, str(error)) from None
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = _line_writer(1)
    sys.stderr = _line_writer(2)
    faulthandler.enable(file=sys.stderr)
    print(f"---- start {attempt + 1}, process {os.getpid()} on {os.uname().nodename}, {time.strftime('%F %T')}")


def _line_writer(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        os.fdopen(descriptor, "wb", buffering=0, closefd=False),  # type: ignore[arg-type]
        encoding="utf-8",
        errors="backslashreplace",
        write_through=True,
    )

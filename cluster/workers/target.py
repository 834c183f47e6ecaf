"""The code of each worker process: calls the target with its `Worker`, and returns the outcome as plain data."""

import contextlib
import faulthandler
import importlib
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.workers.gauges import Gauges
from cluster.workers.outcomes import CRASH, WorkerError, as_data, one_line
from cluster.workers.request import Attempt
from pretrain.common.addresses import RUNS_VARIABLE
from pretrain.common.errors import DivergedError, InputError, MachineError, RunError, StoppedError
from pretrain.common.files import disk_errors
from pretrain.common.interrupts import Interrupted
from pretrain.common.worker import STOP_SIGNALS, TrainingRequest, Worker

# Prefixes of network interfaces that do not connect nodes. By default NCCL uses the first one that is not loopback or
# Docker's, but other container bridges may have the same address on all nodes. NCCL still chooses among the rest.
_EXCLUDED_INTERFACES = "^lo,docker,br-,veth,virbr,cni,cali,podman"


@dataclass(frozen=True)
class RankAssignment:
    """The ranks of one worker in an attempt. All workers connect to rank 0 at `master` and `port`."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str  # address of this worker's node, for the other workers
    master: str  # address of rank 0's node
    port: int  # port of rank 0
    visible_gpus: tuple[str, ...] = ()  # entries of CUDA_VISIBLE_DEVICES


def run_worker(attempt: Attempt, assignment: RankAssignment) -> dict[str, str] | None:
    """Call the request's target in this worker. Returns None when the target has finished its work.

    All workers stop or diverge together; that error is returned as data, so that each worker can finish its log. Any
    other error, after which the others may wait in a collective, is raised as a `WorkerError`: Ray then kills them all.
    """
    request = attempt.request
    launch = request.launch
    with crashes_as_data():
        try:
            redirect_output(launch.run_dir / "logs" / f"worker-{assignment.rank}.log", attempt.number)
            os.environ.update(MASTER_ADDR=assignment.master, MASTER_PORT=str(assignment.port))
            os.environ.update(RANK=str(assignment.rank), WORLD_SIZE=str(assignment.world_size))
            os.environ[RUNS_VARIABLE] = str(launch.stored_runs)
            bind_gloo(assignment.address)
            if assignment.world_size > assignment.local_world_size:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", _EXCLUDED_INTERFACES)
            worker = Worker(
                rank=assignment.rank,
                world_size=assignment.world_size,
                local_rank=assignment.local_rank,
                local_world_size=assignment.local_world_size,
                threads=request.cpus_per_worker,
                flags=(launch.stop_flag(), attempt.restart_flag()),
            )
            if not request.in_ray:  # signals kill Ray's workers
                worker.handle_signals()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # blocked by `start_session`
            if worker.stop_requested():
                raise Interrupted
            change_folder(launch.working_dir)
            worker.interrupts.on_stuck = lambda: os._exit(StoppedError.exit_code)
            with worker.interrupts:
                resolve(request.target)(_with_gauges(attempt, worker), worker)
        except Interrupted:
            # Only this rank noticed the signal; the error makes Ray kill the others, too.
            raise WorkerError("StoppedError", f"{launch.run_dir}: {StoppedError.BETWEEN_STEPS}") from None
        except (StoppedError, DivergedError) as error:
            return as_data(error)
        except RunError as error:
            raise WorkerError(type(error).__name__, str(error)) from None
    return None


def _with_gauges(attempt: Attempt, worker: Worker) -> TrainingRequest:
    """Return the training request; on a cluster one worker of each node also serves the run's state to Prometheus."""
    request, training = attempt.request, attempt.training
    if not request.address or worker.local_rank:
        return training
    return replace(training, callbacks=(*training.callbacks, Gauges(request.name, attempt.number)))


@contextlib.contextmanager
def crashes_as_data() -> Iterator[None]:
    """Print the traceback of any exception but `WorkerError`, and raise a `WorkerError` instead. Flush the output."""
    try:
        yield
    except WorkerError:
        raise
    except BaseException as error:
        traceback.print_exc()
        raise WorkerError(CRASH, one_line(error)) from None
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def resolve(target: str) -> Any:
    """Return the function that "package.module:function" names."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def change_folder(working_dir: Path | str, advice: str = "Start from a folder") -> None:
    """Make `working_dir` the current folder.

    Args:
        advice: beginning of the advice in the `MachineError` that is raised if this machine has no such folder.
    """
    try:
        os.chdir(working_dir)
    except OSError as error:
        raise MachineError(
            f"{working_dir}: {error.strerror} on the cluster's machine {os.uname().nodename}. {advice} that all "
            "machines of the cluster share."
        ) from None


def redirect_output(path: Path, attempt: int) -> None:
    """Redirect all output of this process to `path`, including output of C++ libraries and child processes.

    Raises `InputError` if this machine cannot write there.
    """
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    try:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except InputError as error:
        raise InputError(f"{error} This is the machine {os.uname().nodename}.") from None
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = _line_writer(1)
    sys.stderr = _line_writer(2)
    faulthandler.enable(file=sys.stderr)
    print(f"---- start {attempt + 1}, process {os.getpid()} on {os.uname().nodename}, {time.strftime('%F %T')}")


def bind_gloo(address: str) -> None:
    """Make gloo use the interface of this address, unless the user has named one.

    By default gloo uses the interface of the host name, which may be loopback.
    """
    import psutil

    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _line_writer(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        os.fdopen(descriptor, "wb", buffering=0, closefd=False),  # type: ignore[arg-type]
        encoding="utf-8",
        errors="backslashreplace",
        write_through=True,
    )

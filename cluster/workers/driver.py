"""The child process of a launch: starts or joins Ray if it is needed, runs the workers, restarts them after crashes.

`cluster.workers.launch` starts it with the path of a pickled request. It exits after it has written the outcome, or is
killed with its session.
"""

import contextlib
import logging
import os
import pickle
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from cluster.workers.address import token_rejected_error
from cluster.workers.capacity import wait_for_capacity
from cluster.workers.launch import LOGS, RAY_FOLDER, RAY_LOG, STOP_SIGNALS, end_session
from cluster.workers.nodes import NodeSize, choose_cpus, choose_elastic_cpus, usable_nodes
from cluster.workers.outcomes import as_data, one_line
from cluster.workers.request import DriverRequest, Launch, LaunchRequest
from cluster.workers.supervisor import supervise
from pretrain.common.commands import program
from pretrain.common.errors import MachineError, RunError, StoppedError
from pretrain.common.extensions import ship_modules
from pretrain.common.files import write_json

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=DriverRequest)

# Time limits:
_CONNECT_SECONDS = 3.0  # for the port of the cluster to accept a connection
_RESPONSE_SECONDS = 6.0  # for Ray to respond at that port; the sum of both limits stays below 10 s
_JOIN_SECONDS = 60.0  # for a cluster that responds to accept this driver
_HEAD_SECONDS = 30.0  # for a busy head to list the nodes

_POLL_SECONDS = 0.5
_OBJECT_STORE_BYTES = 100 << 20  # nothing large passes through Ray; its minimum is 75 MiB

# One malloc arena for all threads, so that they reuse each other's freed memory (pretrain/common/memory.py).
_ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
# Environment variables of the driver, which Ray passes to its workers and to the other processes of a local Ray.
_RAY_ENVIRONMENT = {
    **_ONE_HEAP,
    "REPORTER_UPDATE_INTERVAL_MS": "600000",  # default: Ray measures the load of all processes every 5 s
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def main(request_path: str, handle: Callable[[Any], None]) -> None:
    """Call `handle` with the request pickled at this path, and write the outcome to the launch's outcome file."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # as `start_session` does
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    request: DriverRequest = pickle.loads(Path(request_path).read_bytes())
    exit_with_parent(request.launch.launcher_pid, request.launch.ray_dir)
    os.environ.update(_RAY_ENVIRONMENT)
    error: RunError | None = None
    try:
        handle(request)
    except RunError as caught:
        error = caught
    except Exception:
        _keep_ray_logs(request.launch)
        raise
    _write_outcome(request.launch, error)


def _run(request: LaunchRequest) -> None:
    """Start or join Ray if it is needed, run the workers until they finish, then leave Ray."""
    required = request.required_workers
    events: list[dict[str, Any]] = []

    def fit_to_nodes(find_sizes: Callable[[], Sequence[NodeSize]], nodes_name: str) -> LaunchRequest:
        if request.address:
            capacity = wait_for_capacity(request)
            events.extend(capacity.events())
            nodes = capacity.sizes
            if seconds := request.wait_for_nodes_seconds:
                nodes_name += f", after a wait of up to {seconds:.0f} s (scheduling.wait_for_nodes_seconds),"
        else:
            nodes = find_sizes()
        cpus = choose_elastic_cpus(nodes, required, request.workers, request.cpus_per_worker, nodes_name)
        return replace(request, cpus_per_worker=cpus, use_gpu=any(gpu for _, gpu in nodes))

    if not request.address:  # checked before torch and Ray are loaded
        choose_cpus([(_num_cores(), 0)], required, request.cpus_per_worker, _local_name())
    if request.in_ray:
        session = ray_session(request, fit_to_nodes)
    else:
        session = contextlib.nullcontext(fit_to_nodes(_local_sizes, _local_name()))
    with session as fitted:
        supervise(fitted, keep_logs=lambda: _keep_ray_logs(request.launch), events=events)


@contextlib.contextmanager
def ray_session(request: T, fit_to_nodes: Callable[[Callable[[], Sequence[NodeSize]], str], T]) -> Iterator[T]:
    """Start a local Ray or join the cluster at `request.address`; leave it at the end. Yields the fitted request.

    Args:
        fit_to_nodes: called with a function that returns the nodes' sizes, and a name of the nodes for messages.
            Returns the request with the values that depend on the nodes; raises `MachineError` if it does not fit.
            A local Ray starts with only the CPUs that the returned request needs.
    """
    set_token_variables(request.address)  # Ray reads them when it is imported
    import ray

    if request.address:
        with _exits_on_stop(request.launch):
            join_ray(request.address, lambda error: _write_outcome(request.launch, error))
        nodes_name = f"the cluster at {request.address}"
        fitted = fit_to_nodes(lambda: [(node.cpus, node.gpus) for node in usable_nodes(_HEAD_SECONDS)], nodes_name)
    else:
        fitted = fit_to_nodes(_local_sizes, _local_name())
        with _exits_on_stop(request.launch):
            _start_ray(fitted)
    try:
        yield fitted
    finally:
        ray.shutdown()


def _local_sizes() -> list[NodeSize]:
    return [(_num_cores(), _num_gpus())]


def set_token_variables(address: str) -> None:
    """For a local Ray, set a new token, which no file contains; for a cluster, let Ray use the user's token, if any."""
    if not address:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        return
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if "RAY_AUTH_TOKEN" in os.environ or file.exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _start_ray(request: DriverRequest) -> None:
    """Start a local Ray with only the cores that the request needs. Clients need this run's token."""
    import ray

    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # so that gradients stay on this machine
    os.environ["RAY_TMPDIR"] = str(request.launch.ray_dir)  # in which Ray makes `RAY_FOLDER`
    try:
        ray.init(
            address="local",
            num_cpus=min(_num_cores(), request.total_cpus),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
        )
        _trim_node()
    except Exception as error:
        logger.exception("ray.init")
        _keep_ray_logs(request.launch)
        raise MachineError(
            f"{request.launch.run_dir / LOGS / RAY_LOG}: Ray did not start on this machine ({one_line(error)}). "
            f"Ray's own logs are in the same folder; {program()} doctor checks the machine."
        ) from None


def _trim_node() -> None:
    """Stop Ray's log monitor, which polls the workers' logs ten times a second, since they are not printed here.

    At shutdown, kill Ray's other processes without SIGTERM, after which Ray would wait a second for each.
    """
    from ray._private.worker import global_worker  # there is no public API

    node: Any = global_worker.node
    kill = node.kill_all_processes
    node.kill_log_monitor(check_alive=False)
    node.kill_all_processes = lambda **_: kill(check_alive=False)


def join_ray(address: str, on_timeout: Callable[[MachineError], None]) -> None:
    """Join the cluster at `address`. Raises `MachineError` within 10 s if none responds, `InputError` for a bad token.

    A cluster that responds may take longer to accept this driver, for example on a busy machine. If Ray hangs, another
    thread calls `on_timeout` with the error and exits this process.
    """
    host, _, port = address.rpartition(":")
    advice = "Check scheduling.address, and that the cluster runs and accepts this machine."
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:  # OverflowError: a port beyond 65535
        raise MachineError(f"No Ray cluster answers at {address} ({one_line(error)}). {advice}") from None
    import ray
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]  # as `ray health-check` does
    from ray.exceptions import AuthenticationError

    no_ray = f"The server at {address} did not answer as Ray within {_RESPONSE_SECONDS:.0f} s. {advice}"
    too_slow = f"Ray at {address} did not accept this driver within {_JOIN_SECONDS:.0f} s. {advice}"
    try:
        with _exits_after(_RESPONSE_SECONDS, lambda: on_timeout(MachineError(no_ray))):
            GcsClient(address=address)
        time_limit = _exits_after(_JOIN_SECONDS, lambda: on_timeout(MachineError(too_slow)))
        with time_limit, tempfile.TemporaryDirectory(prefix="bertrain-") as scratch:
            ray.init(address=address, log_to_driver=False, runtime_env=_runtime_env(Path(scratch)))
    except AuthenticationError:
        raise token_rejected_error(address) from None
    except Exception as error:
        logger.exception("ray.init")
        raise MachineError(f"Ray at {address} did not accept this driver ({one_line(error)}). {advice}") from None


def _runtime_env(scratch: Path) -> dict[str, Any]:
    """Return the runtime environment in which workers find this project and the user's modules. In a Ray job it is
    empty: workers inherit the job's environment, and start sooner without a custom one."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        return {}
    return ship_modules({"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}, scratch)


@contextlib.contextmanager
def _exits_on_stop(launch: Launch) -> Iterator[None]:
    """Exit this process, after writing the outcome, if a stop is requested in the block: Ray cannot be interrupted."""
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            try:
                launch.check_stop()
            except StoppedError as stopped:
                try:
                    _write_outcome(launch, stopped)
                finally:
                    os._exit(stopped.exit_code)
            done.wait(_POLL_SECONDS)

    threading.Thread(target=watch, daemon=True, name="stop-watch").start()
    try:
        yield
    finally:
        done.set()


@contextlib.contextmanager
def _exits_after(seconds: float, on_timeout: Callable[[], None]) -> Iterator[None]:
    """Call `on_timeout` and exit this process if the block takes longer: Ray cannot be interrupted."""

    def give_up() -> None:
        try:
            on_timeout()
        finally:  # even if `on_timeout` fails
            os._exit(MachineError.exit_code)

    timer = threading.Timer(seconds, give_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _write_outcome(launch: Launch, error: RunError | None) -> None:
    write_json(launch.outcome_path, {"error": None if error is None else as_data(error)})


def _keep_ray_logs(launch: Launch) -> None:
    """Copy the local Ray's logs to the run's logs, since Ray's folder is removed when this process exits."""
    source = launch.ray_dir / RAY_FOLDER / "session_latest" / LOGS
    target = launch.run_dir / LOGS / "ray"
    with contextlib.suppress(OSError, shutil.Error):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _num_gpus() -> int:
    """Return the number of this machine's GPUs that torch sees; torch is not imported if there are none."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    import torch

    return torch.cuda.device_count()


def _local_name() -> str:
    return f"this machine ({socket.gethostname()})"


def exit_with_parent(parent_pid: int, folder: Path | None = None) -> None:
    """Once the parent process exits, kill this session and remove `folder`, so that a killed launcher leaves nothing.

    The parent may have exited already, since this process imports much before it calls this function.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(_POLL_SECONDS)
        end_session(os.getsid(0))
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(MachineError.exit_code)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


if __name__ == "__main__":
    main(sys.argv[1], _run)

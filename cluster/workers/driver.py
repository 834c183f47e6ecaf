"""The child process in which Ray's driver lives: start or join Ray, train, retry after crashes.

Started by `cluster.workers.launch` with the path of its request; ends with the outcome written, or killed with its
session.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.workers.group import train
from cluster.workers.launch import LOGS, RAY_FOLDER, end_session
from cluster.workers.nodes import nodes_fit, share_out, usable_nodes
from cluster.workers.placement import fewest_workers, wait_for_room
from cluster.workers.worker import one_line
from pretrain.common.errors import MachineError, RunError
from pretrain.common.files import write_json

logger = logging.getLogger(__name__)

_REACH_SECONDS = 3.0  # for the cluster's port to accept a connection
_ANSWER_SECONDS = 6.0  # for Ray to answer there; together they stay under 10
_JOIN_SECONDS = 60.0  # for a cluster that answers to let us in
_OBJECT_STORE_BYTES = 100 << 20  # we pass nothing large through Ray; its least is 75 MiB

# Memory that a worker's thread frees must serve the others again (pretrain/common/memory.py): one heap for all threads.
_ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
# Set in the driver, from where Ray hands them to its workers.
_RAY_ENVIRONMENT = {
    **_ONE_HEAP,
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def main(request_path: str, work: Callable[[dict[str, Any]], None]) -> None:
    """Do `work` with the request at this path and leave its outcome where the request says."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    die_with(os.getppid(), request["ray_dir"])
    # A job that is stopped signals all processes below it; the launcher above us says what comes of it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.environ.update(_RAY_ENVIRONMENT)
    error: RunError | None = None
    try:
        work(request)
    except RunError as caught:
        error = caught
    except Exception:
        _keep_ray_logs(request)
        raise
    _write_outcome(request, error)


def _train(request: dict[str, Any]) -> None:
    """Start or join Ray, run the workers to their end, and leave Ray again."""

    least = fewest_workers(request)

    def share(nodes: Sequence[tuple[int, int]], where: str) -> None:
        if request["address"]:
            nodes = wait_for_room(request).sizes
            where += f", after a wait of up to {request['wait_for_nodes_seconds']:.0f} s (scheduling.wait_for_nodes_seconds),"
        request["cpus_per_worker"] = share_out(nodes, least, request["workers"], request["cpus_per_worker"], where)
        request["use_gpu"] = any(gpu for _, gpu in nodes)

    if not request["address"]:  # said before torch and Ray are loaded
        nodes_fit([(_cores(), 0)], least, request["cpus_per_worker"], _here())
    with ray_of(request, share):
        train(request, use_gpu=request["use_gpu"], keep_logs=lambda: _keep_ray_logs(request))


@contextlib.contextmanager
def ray_of(
    request: dict[str, Any], share: Callable[[Sequence[tuple[int, int]], str], None]
) -> Iterator[list[tuple[int, int]]]:
    """A Ray of our own, or the cluster at request["address"], with its nodes' (CPUs, GPUs); left at the end.

    `share` gets the nodes and their name for messages, sets request["workers"] and request["cpus_per_worker"],
    and raises `MachineError` where they do not fit; a Ray of our own is started with just that many CPUs.
    """
    choose_token(request["address"])  # Ray reads it while it is imported
    import ray

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the import has set a handler of its own
    if request["address"]:
        join_ray(request["address"], lambda error: _write_outcome(request, error))
        nodes = [(node.cpus, node.gpus) for node in usable_nodes()]
        share(nodes, f"the cluster at {request['address']}")
    else:
        nodes = [(_cores(), _gpus())]
        share(nodes, _here())
        _start_ray(request)
    try:
        yield nodes
    finally:
        ray.shutdown()


def choose_token(address: str) -> None:
    """A Ray of our own gets its own token, kept in no file; a cluster gets the user's, where there is one."""
    if not address:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
        return
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if "RAY_AUTH_TOKEN" in os.environ or file.exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _start_ray(request: dict[str, Any]) -> None:
    """A Ray of our own with just the cores that are needed, open to nobody without this run's token."""
    import ray

    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gradients need not leave the machine
    try:
        ray.init(
            address="local",
            num_cpus=min(_cores(), request["workers"] * request["cpus_per_worker"]),
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            _temp_dir=f"{request['ray_dir']}/{RAY_FOLDER}",
        )
    except Exception as error:
        logger.exception("ray.init")
        _keep_ray_logs(request)
        raise MachineError(
            f"{_log(request)}: Ray did not start here ({one_line(error)}). "
            "Its own logs are beside this file; ./launch.sh doctor checks the machine."
        ) from None


def join_ray(address: str, last_word: Callable[[MachineError], None]) -> None:
    """Join the cluster at `address`, or say within 10 s that none can be reached there (`MachineError`).

    A cluster that answers may take longer to let us in, as on a busy machine. Where Ray hangs, this process ends;
    `last_word` is called with the error before that, in another thread.
    """
    host, _, port = address.rpartition(":")
    advice = "Check scheduling.address, and that the cluster runs and lets this machine in."
    try:
        socket.create_connection((host, int(port)), timeout=_REACH_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:  # the last of a port beyond 65535
        raise MachineError(f"No Ray cluster answers at {address} ({one_line(error)}). {advice}") from None
    import ray
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]  # as `ray health-check` asks

    no_ray = f"What answers at {address} spoke no Ray for {_ANSWER_SECONDS:.0f} s. {advice}"
    too_slow = f"Ray at {address} did not let us in for {_JOIN_SECONDS:.0f} s. {advice}"
    try:
        with _limit(_ANSWER_SECONDS, lambda: last_word(MachineError(no_ray))):
            GcsClient(address=address)
        with _limit(_JOIN_SECONDS, lambda: last_word(MachineError(too_slow))):
            ray.init(
                address=address,
                log_to_driver=False,
                runtime_env=_runtime_env(),
            )
    except Exception as error:
        logger.exception("ray.init")
        raise MachineError(f"Ray at {address} did not let us in ({one_line(error)}). {advice}") from None


def _runtime_env() -> dict[str, Any]:
    """Where the workers find this project. In a job they do by the cluster's own environment, as the job did; and
    workers without a special environment start sooner."""
    return {} if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ else {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}


@contextlib.contextmanager
def _limit(seconds: float, last_word: Callable[[], None]) -> Iterator[None]:
    """End this process where the block takes longer, since nothing interrupts Ray; `last_word` is called first."""

    def give_up() -> None:
        try:
            last_word()
        finally:  # though nobody may be there to hear it
            os._exit(MachineError.exit_code)

    timer = threading.Timer(seconds, give_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _write_outcome(request: dict[str, Any], error: RunError | None) -> None:
    data = None if error is None else {"kind": type(error).__name__, "message": str(error)}
    write_json(Path(request["outcome"]), {"error": data})


def _keep_ray_logs(request: dict[str, Any]) -> None:
    """Copy our own Ray's logs beside the run's, where they outlive it."""
    source = Path(request["ray_dir"]) / RAY_FOLDER / "session_latest" / LOGS
    kept = Path(request["run_dir"]) / LOGS / "ray"
    with contextlib.suppress(OSError, shutil.Error):
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(source, kept)


def _log(request: dict[str, Any]) -> Path:
    return Path(request["run_dir"]) / LOGS / "ray.log"


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _gpus() -> int:
    """GPUs of this machine that torch sees; torch is not loaded where there are none."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    import torch

    return torch.cuda.device_count()


def _here() -> str:
    return f"this machine ({socket.gethostname()})"


def die_with(parent: int, folder: str | None = None) -> None:
    """End this session and remove `folder` once `parent` is gone: a killed launcher leaves nothing behind."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        end_session(os.getsid(0))
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(MachineError.exit_code)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


if __name__ == "__main__":
    main(sys.argv[1], _train)

"""Sets up a worker for training: process group, watchdog, device, latest checkpoint, matmul peak."""

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretrain.checkpoint import store
from pretrain.common.addresses import RUNS_VARIABLE
from pretrain.common.errors import DivergedError, InputError, MachineError, StoppedError
from pretrain.common.files import allow_open_files, disk_errors
from pretrain.common.settings import changes, differences
from pretrain.common.thread_waits import sleep_when_contended
from pretrain.common.worker import Worker
from pretrain.config import ConfigT, RunConfig, SchedulingConfig, with_precision
from pretrain.config.objectives import OBJECTIVE_FILE_SETTINGS
from pretrain.model import precision
from pretrain.run import preflight
from pretrain.tracking import live
from pretrain.tracking.logs import quiet_logging
from pretrain.training.engine import Engine, broadcast_object, end_process_group, gather_objects
from pretrain.training.watchdog import Watchdog

_OTHER_FILES = 256  # number of open files of a worker besides connections of the store: libraries, shards, logs
_CONNECT_TIMEOUT = timedelta(minutes=30)  # time limit for all workers to connect
_COLLECTIVE_TIMEOUT = timedelta(hours=1)  # time limit of a collective; a rank may compile for half an hour before it
# The variables that configure torch's allocator of device memory.
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
# Settings with paths, which may differ between machines; `check_same_data` compares the contents of the files.
_PATHS = ("corpus.dir", "start_from", "adaptation.replay_corpus", *OBJECTIVE_FILE_SETTINGS)
_WORKER_SETTINGS = ("hang_seconds",)  # the settings of `scheduling` that workers read
# A restart rarely helps a worker that waits for a batch or for storage, so its limit is this multiple of hang_seconds.
_STALL_FACTOR = 10
# Settings that may differ between machines; all values of run_dir must lead to the same folder (`check_shared`).
_MACHINE_SPECIFIC = (
    "run_dir",
    *_PATHS,
    *(f"scheduling.{name}" for name in SchedulingConfig.model_fields if name not in _WORKER_SETTINGS),
)

# Names of the modules and functions of every run that only launch GPU kernels; see `Watchdog`.
LAUNCHING = ("pretrain.run.loop.launch_step", "pretrain.run.forward_backward")

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def worker_session(
    config: ConfigT, worker: Worker, *, resume: bool, launching: Sequence[str]
) -> Iterator[tuple[ConfigT, torch.device, Watchdog]]:
    """Set up a worker to train, or to `resume`: logging, process group, watchdog, device and seed.

    `launching` names the task's modules and functions that only launch GPU kernels; see `Watchdog`.

    Yields:
        (the config with its precision resolved, this worker's device, the watchdog to which the engine must report
        its progress).

    Raises:
        InputError: the workers have different configs, or do not share the run folder.
        MachineError: the device cannot compute in the run's precision, or the limit of open files is too low.
    """
    quiet_logging(config.folder / "logs" / f"training-{worker.rank}.log")
    if worker.rank == 0 and worker.world_size > 1:
        live.write_startup_stage(config.folder, live.CONNECT)
    with process_group(worker), make_watchdog(config, worker, launching) as watchdog:
        if worker.world_size > 1:
            world_group: Any = dist.group.WORLD
            world_group.set_timeout(collective_timeout(config))
        _check_same_config(config, resume)
        check_shared(config, worker)
        config, device = choose_device(config, worker)
        torch.manual_seed(config.seed)
        if worker.rank == 0:
            live.write_startup_stage(config.folder, live.LOAD)
        try:
            yield config, device, watchdog
        finally:
            if worker.rank == 0:
                live.end_startup(config.folder)


@contextlib.contextmanager
def process_group(worker: Worker) -> Iterator[None]:
    """Select the GPU and set up the process group; several workers connect at MASTER_ADDR.

    In the block, CPU kernels yield to other programs (`pretrain.common.thread_waits`).
    """
    os.environ["LOCAL_RANK"] = str(worker.local_rank)
    select_gpu(worker)
    if worker.threads:
        torch.set_num_threads(worker.threads)
    if dist.is_initialized():
        with sleep_when_contended():
            yield
        return
    needed = 2 * worker.world_size + _OTHER_FILES  # each rank connects to rank 0's store, for training and heartbeats
    if (allowed := allow_open_files(2 * worker.world_size)) < needed and worker.rank == 0 < worker.world_size - 1:
        raise MachineError(
            f"worker 0: the limit of open files is {allowed}, but {worker.world_size} workers need {needed}. Raise the "
            "hard limit of its machine (ulimit -Hn; LimitNOFILE of its service)."
        )
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if worker.world_size > 1:
        dist.init_process_group(backend, timeout=_CONNECT_TIMEOUT)
    else:
        local_store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=local_store, rank=0, world_size=1)
    all_ranks_exit = False
    try:
        with sleep_when_contended():
            yield
        all_ranks_exit = True
    except (StoppedError, DivergedError):  # every rank raises them after the same step
        all_ranks_exit = True
        raise
    finally:
        # Destroying NCCL's group is a collective: after an error of this rank alone it would block and hide the error.
        # The process exits without it.
        if all_ranks_exit or backend == "gloo" or worker.world_size == 1:
            end_process_group()


def collective_timeout(config: RunConfig) -> timedelta:
    """Return the time limit of collectives: above the watchdog's, since only the watchdog reports the cause."""
    return max(_COLLECTIVE_TIMEOUT, timedelta(seconds=2 * _STALL_FACTOR * config.scheduling.hang_seconds))


def select_gpu(worker: Worker) -> None:
    """Make this worker's GPU, if any, the current device; call this before any allocation or communication."""
    if not torch.cuda.is_available():
        return
    _use_expandable_segments()
    # In a process that sees a single GPU, that GPU has the index 0.
    index = worker.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    os.environ["LOCAL_RANK"] = str(index)  # DeepSpeed uses it as the GPU's index (_set_distributed_vars)


def choose_device(config: ConfigT, worker: Worker) -> tuple[ConfigT, torch.device]:
    """Return the config with its precision resolved, and this worker's device: the current GPU, or the CPU.

    `engine.precision: auto` becomes the same precision in all workers. The first start of a run chooses it, and writes
    it into the run's config.yaml, where restarts read it.

    Raises:
        MachineError: the device cannot compute in the requested precision.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    config = _resolve_precision(config, device, worker)
    check_device(config, device)
    if precision.allow_tf32(config.engine.precision, device):
        logger.info("matrix products of fp32 use TF32 tensor cores")
    return config, device


def _use_expandable_segments() -> None:
    """Let the segments of device memory grow, unless the user has configured the allocator.

    Batches of changing shapes leave gaps in segments of fixed sizes, which are counted as used. Call this before the
    first allocation. Setting the environment variable would be too late: torch reads it while it is loaded
    (c10/cuda/CUDACachingAllocator.cpp, BackendStaticInitializer).
    """
    if not any(os.environ.get(name) for name in _ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def check_device(config: RunConfig, device: torch.device) -> None:
    """Raise `MachineError` if the device cannot compute in the run's precision, or torch does not support it."""
    chosen = config.engine.precision
    advice = (
        "Continue a run on the kind of device that it was started on; for a new run, engine.precision: auto chooses "
        "the fastest precision here."
    )
    if device.type == "cpu":
        if chosen == "fp16":
            raise MachineError(f"engine.precision: fp16 needs a GPU (DeepSpeed does not support it on CPU). {advice}")
        return
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    found = f"{name} has {capability[0]}.{capability[1]}"
    if reason := precision.unsupported_feature(config.engine, capability):
        advice = advice if reason.startswith("engine.precision") else "Set it to false."
        raise MachineError(f"{reason}; {found}. {advice}")
    supported = [int(arch[3:]) for arch in torch.cuda.get_arch_list() if arch[3:].isdigit()]
    if supported and 10 * capability[0] + capability[1] < min(supported):
        raise MachineError(
            f"This torch ({torch.__version__}) does not support this GPU: it needs compute capability "
            f"{min(supported) / 10} or newer, but {found}. Install a build of it for an earlier CUDA."
        )


def _resolve_precision(config: ConfigT, device: torch.device, worker: Worker) -> ConfigT:
    # The precision that an earlier start resolved, which under torchrun only the first process reads.
    earlier_config = preflight.with_resolved_precision(config) if worker.rank == 0 else config
    resolved = gather_objects(earlier_config.engine.precision)[0]
    if resolved != "auto":
        return with_precision(config, resolved)
    choice = precision.choose_precision(gather_objects(precision.capabilities(device)))
    config = with_precision(config, choice.precision)
    if worker.rank == 0:
        logger.info("engine.precision: %s; %s", choice.precision, choice.reason)
        preflight.record_config(config)
    return config


def check_same_data(fingerprints: Mapping[str, str]) -> None:
    """Raise `InputError` on every rank if a rank's data differs from rank 0's.

    Args:
        fingerprints: setting -> fingerprint of the data at its path.
    """
    pairs = changes(broadcast_object(dict(fingerprints)), dict(fingerprints))
    differing = [f"{name} ({(rank0 or 'none')[:12]} -> {(own or 'none')[:12]})" for name, (rank0, own) in pairs.items()]
    _raise_if_any_differs(differing, "Give every machine the same files.")


def _check_same_config(config: RunConfig, resume: bool) -> None:
    """Raise `InputError` on every rank if a rank's settings differ from rank 0's, which can happen with torchrun."""
    # The settings are sent as plain data: if a rank runs another version, they may be unknown here.
    rank0_resume, rank0_settings = broadcast_object((resume, config.model_dump()))
    if config.engine.precision == "auto":  # rank 0 has the precision that an earlier start resolved
        config = with_precision(config, rank0_settings["engine"]["precision"])
    settings = config.model_dump()
    # `check_same_data` would not compare data that only one rank reads, and the ranks' collectives would not match.
    missing = [
        f"{name} ({rank0 or 'none'} -> {own or 'none'})"
        for name, (rank0, own) in changes(rank0_settings, settings).items()
        if name in _PATHS and not (rank0 and own)
    ]
    _raise_if_any_differs(
        [
            *differences(rank0_settings, settings, ignore=_MACHINE_SPECIFIC),
            *missing,
            *([f"--resume ({rank0_resume} -> {resume})"] if resume != rank0_resume else []),
        ],
        "Start all workers with the same config and overrides.",
    )


def _raise_if_any_differs(differing: Sequence[str], advice: str) -> None:
    """Raise `InputError` on every rank if a rank has `differing` settings or data, listed with both values."""
    for rank, (host, listed) in enumerate(gather_objects((socket.gethostname(), list(differing)))):
        if listed:
            raise InputError(f"worker {rank} on {host} differs from worker 0: {', '.join(listed)}. {advice}")


def check_shared(config: RunConfig, worker: Worker) -> None:
    """Raise `InputError` on every rank if a rank does not see rank 0's run folder, which checkpoints and stops need."""
    if worker.world_size == 1:
        return
    marker = config.folder.absolute() / f".seen-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        if worker.rank == 0:
            stack.callback(marker.unlink, missing_ok=True)
            with disk_errors(marker):
                marker.touch()
        marker = gather_objects(marker)[0]
        seen = gather_objects((config.folder / marker.name).exists())
    if False in seen:
        advice = f"Set {RUNS_VARIABLE} on all machines to one folder that they share, or run_dir to a path."
        raise InputError(
            f"run_dir: {config.address or marker.parent}: worker {seen.index(False)} does not see {marker.parent} of "
            f"worker 0. "
            f"{advice if config.address else 'Set it to a folder that all machines share.'}"
        )


def latest_checkpoint(checkpoints: Path, group: store.SavingGroup) -> Path | None:
    """Find the checkpoint to resume from, the same on all ranks. Each rank verifies some of its files.

    If a rank finds damage, rank 0 verifies all of it, then earlier checkpoints, until one is intact.

    Raises:
        RunError: the latest checkpoint cannot be read, all checkpoints are damaged, or a rank reads other content than
            rank 0.
    """

    def find_latest(verify_content: bool) -> str | None:
        store.remove_leftovers(checkpoints)
        latest = store.latest(checkpoints, set_aside=True, check_hashes=verify_content)
        return latest and latest.name

    def find_damage(checkpoint: Path) -> str | None:
        try:
            store.verify_rank_files(checkpoint, group.rank, group.world_size)
        except InputError as error:
            return str(error)
        return None

    name = store.agree(group, lambda: find_latest(False) if group.rank == 0 else None)
    if name is None:
        return None
    error = store.agree(group, lambda: find_damage(checkpoints / name), lambda errors: next(filter(None, errors), None))
    if error is not None:
        intact = store.agree(group, lambda: find_latest(True) if group.rank == 0 else None)
        if intact == name:
            raise MachineError(f"{error} Another machine reads the file correctly: check the storage.")
        name = intact
    return name and checkpoints / name


def make_watchdog(config: RunConfig, worker: Worker, launching: Sequence[str]) -> Watchdog:
    """Return the watchdog, which terminates this process if a rank hangs, even at startup, so that the run restarts."""
    return Watchdog(
        worker.rank,
        worker.world_size,
        config.folder / "logs",
        config.scheduling.hang_seconds,
        stall_seconds=_STALL_FACTOR * config.scheduling.hang_seconds,
        compiles=config.engine.compiled,
        on_gpu=torch.cuda.is_available(),
        launching=(*LAUNCHING, *launching),
    )


def total_matmul_peak(engine: Engine) -> float:
    """Measure the matmul peak of all workers together in the engine's precision, in FLOP/s."""
    device, dtype = str(engine.device), engine.settings.resolved_precision
    if engine.world_size == 1:
        return precision.matmul_peak(device, dtype)
    engine.workers.barrier()  # all measure simultaneously, as in training
    own_peak = precision.measure_matmul(device, dtype, concurrent=True)
    return engine.workers.sum_over_workers(torch.tensor([own_peak], dtype=torch.float64, device=engine.device)).item()

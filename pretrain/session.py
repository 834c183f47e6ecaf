"""What every worker does around its training, whatever it trains: process group, device, checkpoint, matmul peak."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pretrain.checkpoint import store
from pretrain.config import Engine as EngineSettings
from pretrain.config import Run
from pretrain.engine import Engine, end_process_group
from pretrain.errors import MachineError
from pretrain.files import raise_open_files_limit
from pretrain.watchdog import Watchdog
from pretrain.worker import Worker

_OTHER_FILES = 256  # that a worker has open: libraries, shards, logs, connections of collectives


@contextlib.contextmanager
def process_group(worker: Worker) -> Iterator[None]:
    """The workers' process group, where MASTER_ADDR says that there are others; else one of this process alone."""
    os.environ["LOCAL_RANK"] = str(worker.local_rank)
    if worker.threads:
        torch.set_num_threads(worker.threads)
    if dist.is_initialized():
        yield
        return
    _check_open_files(worker)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, timeout=timedelta(minutes=30))
    else:
        dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        end_process_group()


def _check_open_files(worker: Worker) -> None:
    """Rank 0 serves the store that the ranks meet in: each has a connection for training and one for its heartbeats."""
    allowed, needed = raise_open_files_limit(), 2 * worker.world_size + _OTHER_FILES
    if worker.rank == 0 < worker.world_size - 1 and allowed < needed:
        raise MachineError(
            f"worker 0: may open {allowed} files, and {worker.world_size} workers need {needed}. Raise the hard limit of "
            "its machine (ulimit -Hn; LimitNOFILE of its service)."
        )


def choose_device(settings: EngineSettings, worker: Worker) -> torch.device:
    """This worker's device; settings that it cannot serve are refused with the reason."""
    if torch.cuda.is_available():
        device = torch.device("cuda", worker.local_rank)
        torch.cuda.set_device(device)
        return device
    if settings.precision == "fp16":
        raise MachineError(
            "engine.precision: fp16 needs a GPU (DeepSpeed has none of it on CPU). Use bf16, which is also faster here."
        )
    return torch.device("cpu")


def newest_checkpoint(checkpoints: Path, engine: Engine) -> Path | None:
    """The checkpoint to resume from; rank 0 verifies and decides, so that all ranks take the same."""
    found = None
    if engine.rank == 0:
        store.remove_leftovers(checkpoints)
        found = store.newest(checkpoints, set_aside=True)
    name = engine.gather_objects(found and found.name)[0]
    return checkpoints / name if name else None


@contextlib.contextmanager
def watched(config: Run, worker: Worker) -> Iterator[Watchdog]:
    """Work that is ended, for whoever restarts it, when a rank hangs; from the process group on, so starts are, too."""
    with Watchdog(
        worker.rank, worker.world_size, config.folder / "logs", config.scheduling.hang_seconds,
        stall_seconds=config.scheduling.data_stall_seconds, compiles=config.engine.compile,
    ) as watchdog:  # fmt: skip
        yield watchdog


def matmul_peak(engine: Engine) -> float:
    """Measured matmul peak of all workers together at the engine's precision, FLOP/s: half a second."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[engine.settings.precision]
    size = 2048 if engine.device.type == "cpu" else 8192
    a = torch.randn(size, size, device=engine.device).to(dtype)
    torch.mm(a, a)
    engine.barrier()
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < 0.5:
        torch.mm(a, a)
        count += 1
        if engine.device.type == "cuda":
            torch.cuda.synchronize()
    mine = torch.tensor([2 * size**3 * count / (time.perf_counter() - began)], dtype=torch.float64)
    return engine.sum_over_workers(mine.to(engine.device)).item()

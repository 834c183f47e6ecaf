"""Measures the bandwidth of one all-reduce, among processes on this machine or among the nodes of a cluster."""

import multiprocessing
import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from typing import Any

from cluster.doctor.rows import FAIL, PASS, WARN, Finding
from cluster.workers.outcomes import one_line
from cluster.workers.target import bind_gloo

_TIMEOUT = timedelta(seconds=20)  # time limit for connecting the processes, and for each reduction
_BYTES = 64 << 20
# Minimum bytes/s between nodes: gigabit Ethernet, and more for GPUs. BERT-Base has 220 MB of gradients.
_MIN_RATE = {"gloo": 0.1e9, "nccl": 1e9}


def local_row() -> Finding:
    """Return the row for an all-reduce between two processes on this machine, or among all its GPUs."""
    import torch

    gpus = torch.cuda.device_count()
    backend, world = ("nccl", gpus) if gpus else ("gloo", 2)
    address, store = "127.0.0.1", serve_store("127.0.0.1")
    with ProcessPoolExecutor(world, mp_context=multiprocessing.get_context("spawn")) as pool:
        members = [pool.submit(reduce_time, backend, address, address, store.port, r, world, r) for r in range(world)]
        outcomes = [member.exception() or member.result() for member in members]
    return judge(backend, outcomes, "local processes", floor=0.0)


def serve_store(address: str) -> Any:
    """Serve the TCP store through which a process group connects, on a free port of this address only."""
    import torch.distributed as dist

    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address, port, is_master=True, timeout=_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def reduce_time(backend: str, address: str, host: str, port: int, rank: int, world: int, gpu: int = 0) -> float:
    """Return the seconds of one all-reduce of 64 MiB, as member `rank` of a group.

    Args:
        address: address of this machine for the other members.
        host: address at which `serve_store` listens on `port`.
        gpu: index of the GPU to use with NCCL.
    """
    import torch
    import torch.distributed as dist

    bind_gloo(address)
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # so that the timeout applies to NCCL
    store = dist.TCPStore(host, port, timeout=_TIMEOUT)  # pyright: ignore[reportPrivateImportUsage]
    device = f"cuda:{gpu}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(gpu)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_TIMEOUT)
    try:
        dist.all_reduce(torch.ones(1 << 18, device=device))  # opens the connections before the measurement
        numbers = torch.ones(_BYTES // 4, device=device)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(numbers)
        total = numbers[-1].item()  # waits for a GPU
        seconds = time.perf_counter() - start
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if total != world:
        raise RuntimeError(f"the sum of {world} ones is {total:g}")
    return seconds


def judge(backend: str, outcomes: Sequence[float | BaseException], members: str, floor: float | None = None) -> Finding:
    """Return the row for the seconds or errors of `reduce_time` in each member; it warns below `floor` bytes/s.

    The bus bandwidth is 2 (n-1)/n times the bytes, divided by the time, as in nccl-tests.
    """
    world, errors = len(outcomes), [one_line(error) for error in outcomes if isinstance(error, BaseException)]
    # A member that could not start reports the cause; the others report a timeout.
    errors.sort(key=lambda error: "timeout" in error.lower() or "timed out" in error.lower())
    if errors:
        advice = (
            f"Open all ports between the {members}; if they have several networks, set the common one in "
            f"{backend.upper()}_SOCKET_IFNAME on each."
        )
        return Finding("all-reduce", f"{backend} among {world} {members}: {errors[0]}", FAIL, advice)
    if world == 1:
        return Finding("all-reduce", f"{backend} starts; there is one GPU, hence no bandwidth")
    slowest = max(seconds for seconds in outcomes if not isinstance(seconds, BaseException))
    rate, min_rate = 2 * (world - 1) / world * _BYTES / slowest, _MIN_RATE[backend] if floor is None else floor
    advice = f"Below {min_rate / 1e9:g} GB/s the workers wait for each other: use a faster network, or larger batches."
    text = f"{rate / 1e9:.2f} GB/s bus bandwidth, {backend}, {world} {members}, {_BYTES >> 20} MiB"
    return Finding("all-reduce", text, WARN if rate < min_rate else PASS, advice)

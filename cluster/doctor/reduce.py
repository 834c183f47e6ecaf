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
_BYTES = 64 << 20  # size of the tensor to reduce
# Minimum bus bandwidth between nodes, in bytes/s: gigabit Ethernet for gloo. BERT-Base has 220 MB of gradients.
_MIN_RATE = {"gloo": 0.1e9, "nccl": 1e9}


def local_bandwidth() -> Finding:
    """Return the row for an all-reduce between two processes on this machine, or among all its GPUs."""
    import torch

    gpus = torch.cuda.device_count()
    backend, num_ranks = ("nccl", gpus) if gpus else ("gloo", 2)
    address, store = "127.0.0.1", serve_store("127.0.0.1")
    with ProcessPoolExecutor(num_ranks, mp_context=multiprocessing.get_context("spawn")) as pool:
        calls = [
            pool.submit(time_all_reduce, backend, address, address, store.port, rank, num_ranks, rank)
            for rank in range(num_ranks)
        ]
        outcomes = [call.exception() or call.result() for call in calls]
    return judge(backend, outcomes, "local processes", min_rate=0.0)


def serve_store(address: str) -> Any:
    """Serve the TCP store through which a process group connects, on a free port of this address only."""
    import torch.distributed as dist

    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        address, port, is_master=True, timeout=_TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def time_all_reduce(backend: str, address: str, host: str, port: int, rank: int, num_ranks: int, gpu: int = 0) -> float:
    """Return the seconds that an all-reduce of 64 MiB takes, as process `rank` of a process group.

    Args:
        address: address of this machine for the other processes.
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
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)
    try:
        dist.all_reduce(torch.ones(1 << 18, device=device))  # opens the connections before the measurement
        ones = torch.ones(_BYTES // 4, device=device)
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(ones)
        total = ones[-1].item()  # on a GPU, this waits for the result
        seconds = time.perf_counter() - start
        dist.barrier()
    finally:
        dist.destroy_process_group()
    if total != num_ranks:
        raise RuntimeError(f"the sum of {num_ranks} ones is {total:g}")
    return seconds


def judge(
    backend: str, outcomes: Sequence[float | BaseException], participants: str, min_rate: float | None = None
) -> Finding:
    """Return the row for an all-reduce among `participants`, which are "nodes" or "local processes".

    `outcomes` has what `time_all_reduce` returned or raised in each of them. The bus bandwidth is 2 (n-1)/n times the
    bytes, divided by the time, as in nccl-tests; below `min_rate` (None: the backend's minimum) the row is a warning.
    """
    count, errors = len(outcomes), [one_line(error) for error in outcomes if isinstance(error, BaseException)]
    # A process that could not start reports the cause; the others report a timeout.
    errors.sort(key=lambda error: "timeout" in error.lower() or "timed out" in error.lower())
    if errors:
        advice = (
            f"Open all ports between the {participants}; if they have several networks, set the common one in "
            f"{backend.upper()}_SOCKET_IFNAME on each."
        )
        return Finding("all-reduce", f"{backend} among {count} {participants}: {errors[0]}", FAIL, advice)
    if count == 1:
        return Finding("all-reduce", f"{backend} starts; with one GPU there is no bandwidth to measure")
    slowest = max(seconds for seconds in outcomes if not isinstance(seconds, BaseException))
    rate, min_rate = 2 * (count - 1) / count * _BYTES / slowest, _MIN_RATE[backend] if min_rate is None else min_rate
    advice = f"Below {min_rate / 1e9:g} GB/s the workers wait for each other: use a faster network, or larger batches."
    text = f"{rate / 1e9:.2f} GB/s bus bandwidth, {backend}, {count} {participants}, {_BYTES >> 20} MiB"
    return Finding("all-reduce", text, WARN if rate < min_rate else PASS, advice)

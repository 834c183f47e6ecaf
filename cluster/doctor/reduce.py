"""The bandwidth of all-reduce: among processes on this machine, or of a process group that the caller has made."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from cluster.doctor.rows import FAIL, PASS, WARN, Finding
from cluster.workers.launch import environment
from cluster.workers.outcomes import one_line

WHAT = "all-reduce"
TIMEOUT_SECONDS = 20.0  # for the processes of a group to connect, and for each reduction

_LARGEST_BYTES, _SMALLEST_BYTES = 64 << 20, 1 << 20
_EACH_SECONDS = 0.4  # the longest that one reduction should take
_REPEATS = 5
_HERE_SECONDS = 40.0
# Between nodes, bytes/s: one gigabit, and the least that GPU nodes should have. BERT-Base has 220 MB of gradients.
_SLOW = {"gloo": 0.1e9, "nccl": 1e9}


def row_here() -> Finding:
    """All-reduce between two processes on this machine, or among all its GPUs."""
    import torch

    gpus = torch.cuda.device_count()
    backend, world = ("nccl", gpus) if gpus else ("gloo", 2)
    try:
        outcome = _reduce_here(backend, world)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        advice = f"Workers on this machine must reach each other: check its firewall and {_interface(backend)}."
        return Finding(WHAT, f"{backend} among {world} processes here: {one_line(error)}", FAIL, advice)
    return Finding(WHAT, _text(backend, world, outcome, "processes here"))


def judge(backend: str, world: int, outcome: tuple[float, int] | str) -> Finding:
    """The row for the result of `measure` among nodes, or for its error."""
    if isinstance(outcome, str):
        advice = (
            "Open all ports between the nodes; if they have several networks, set the common one in "
            f"{_interface(backend)} on each."
        )
        return Finding(WHAT, f"{backend} among {world} nodes: {outcome}", FAIL, advice)
    slow = _SLOW[backend]
    advice = f"Below {slow / 1e9:g} GB/s the workers wait for each other: use a faster network, or larger batches."
    mark = WARN if outcome[0] < slow else PASS
    return Finding(WHAT, _text(backend, world, outcome, "nodes"), mark, advice)


def _text(backend: str, world: int, outcome: tuple[float, int], participants: str) -> str:
    rate, size = outcome
    if world == 1:  # a lone GPU
        return f"{backend} starts; there is one GPU, hence no bandwidth"
    return f"{rate / 1e9:.2f} GB/s bus bandwidth, {backend}, {world} {participants}, {size >> 20} MiB"


def _interface(backend: str) -> str:
    return f"{backend.upper()}_SOCKET_IFNAME"


def measure(device: str) -> tuple[float, int]:
    """Bus bandwidth of the process group in bytes/s, and the bytes of a reduction.

    It is 2 (n-1)/n of the bytes over the time, as in nccl-tests: the median of several reductions of 64 MiB, or of as
    many bytes as this network reduces in 0.4 s.
    """
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    _reduce(_SMALLEST_BYTES, device)  # opens the connections
    first = torch.tensor(_reduce(_SMALLEST_BYTES, device), device=device)
    dist.all_reduce(first, dist.ReduceOp.MAX)  # all processes must choose the same size
    reducible = _SMALLEST_BYTES * _EACH_SECONDS / first.item()
    size = int(min(max(reducible, _SMALLEST_BYTES), _LARGEST_BYTES)) & ~1023
    seconds = statistics.median(_reduce(size, device) for _ in range(_REPEATS))
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return 2 * (world - 1) / world * size / slowest.item(), size


@contextlib.contextmanager
def group(backend: str, store: Any, rank: int, world: int) -> Iterator[str]:
    """A process group of this process and others; the device to reduce on."""
    import torch
    import torch.distributed as dist

    device = "cpu" if backend == "gloo" else f"cuda:{torch.cuda.current_device()}"
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # so that the timeout holds for NCCL
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_SECONDS)
    )
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _reduce(size: int, device: str) -> float:
    """Seconds of one all-reduce of `size` bytes, which all processes start together."""
    import torch
    import torch.distributed as dist

    numbers = torch.ones(size // 4, device=device)
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(numbers)
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    if numbers[-1].item() != dist.get_world_size():
        raise RuntimeError(f"the sum of {dist.get_world_size()} ones is {numbers[-1].item():g}")
    return seconds


def _reduce_here(backend: str, world: int) -> tuple[float, int]:
    """Measure with `world` processes on this machine; the result of the first one."""
    variables = environment()
    if Path("/sys/class/net/lo").exists():
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as scratch:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "cluster.doctor.reduce", backend, str(rank), str(world), f"{scratch}/store"],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        try:
            outputs = [process.communicate(timeout=_HERE_SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError((errors.strip() or f"exited with code {process.returncode}").splitlines()[-1])
    rate, size = json.loads(outputs[0][0])
    return rate, size


def _main(backend: str, rank: int, world: int, store: str) -> None:
    import torch
    from torch._C._distributed_c10d import FileStore

    if backend == "nccl":
        torch.cuda.set_device(rank)
    with group(backend, FileStore(store, world), rank, world) as device:
        result = measure(device)
    if rank == 0:
        print(json.dumps(result))


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])

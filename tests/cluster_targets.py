"""Functions that Ray workers run in tests of cluster; each records its calls in the working directory."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from pretrain.common.errors import InputError, StoppedError
from pretrain.common.worker import TrainingRequest, Worker
from pretrain.run.session import process_group


def count_start(request: TrainingRequest, worker: Worker) -> int:
    """Record this start, and return the number of starts before it."""
    trace = Path(f"starts-{worker.rank}")
    before = trace.read_text().splitlines() if trace.exists() else []
    trace.write_text("\n".join([*before, f"resume={request.resume}"]))
    return len(before)


def killed_then_mistaken(request: TrainingRequest, worker: Worker) -> None:
    """Kill worker 1 on the first start; on the second, raise an `InputError` in it."""
    before = count_start(request, worker)
    print(f"rank {worker.rank} of {worker.world_size}, {worker.threads} threads")
    os.system("echo a child writes here too")
    process = psutil.Process()
    Path(f"title-{worker.rank}").write_text(process.cmdline()[0])
    raylet = process.parent()
    driver = raylet.parent() if raylet else None
    assert driver is not None
    Path(f"ray-{worker.rank}").write_text("\n".join(" ".join(one.cmdline()) for one in driver.children()))
    with process_group(worker):
        total = torch.ones(1)
        dist.all_reduce(total)
        Path(f"sum-{worker.rank}").write_text(str(int(total)))
        if worker.rank == 1:
            if before == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            raise InputError("corpus/: not there. Prepare it first.")
        dist.barrier()


def killed_alone(request: TrainingRequest, worker: Worker) -> None:
    """Kill the process on the first start; on the second, raise an `InputError`."""
    if count_start(request, worker) == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    ray = "ray" if "ray" in sys.modules else "no ray"
    Path("seen").write_text(f"{ray}, {worker.threads} threads")
    raise InputError("corpus/: not there. Prepare it first.")


def fails(request: TrainingRequest, worker: Worker) -> None:
    """Raise an unexpected error, every time."""
    count_start(request, worker)
    raise ZeroDivisionError("a bug\nin two lines")


def until_stopped(request: TrainingRequest, worker: Worker) -> None:
    """Run until a stop is requested."""
    count_start(request, worker)
    for _ in range(600):
        if any(flag.is_set() for flag in worker.flags):  # in training, ranks that do not check are told
            raise StoppedError("stopped at step 7. --resume continues.")
        time.sleep(0.1)


def deaf(request: TrainingRequest, worker: Worker) -> None:
    """Ignore all requests to stop."""
    count_start(request, worker)
    time.sleep(600)


def fine(request: TrainingRequest, worker: Worker) -> None:
    """Return at once."""
    count_start(request, worker)


def slow_step(hook: str, record: dict[str, Any]) -> None:
    """A callback that makes every step take at least two seconds."""
    if hook == "step_end":
        time.sleep(2)

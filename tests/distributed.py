"""Runs functions in several processes joined by gloo, as one of many simulated ranks, or as separate programs."""

import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).parents[1]


@dataclass
class Alone:
    """A process group of one worker, whose collectives return the values of that worker."""

    rank: int = 0
    world_size: int = 1

    def collect_objects(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]

    def all_to_all(self, values: torch.Tensor, sent_sizes: list[int], received_sizes: list[int]) -> torch.Tensor:
        return values


class Ranks:
    """The ranks of a run, as threads of this process."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self._values = world_size, {}
        self._barrier = threading.Barrier(world_size, timeout=30)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._barrier.wait()
        self._values[rank] = value
        self._barrier.wait()
        return [self._values[rank] for rank in range(self.world_size)]


class Rank:
    def __init__(self, rank: int, ranks: Ranks) -> None:
        self.rank, self.world_size, self._ranks = rank, ranks.world_size, ranks

    def collect_objects(self, value: Any) -> list[Any]:
        values = self._ranks.gather(self.rank, value)
        return [] if self.rank else values

    def broadcast_object(self, value: Any) -> Any:
        return self._ranks.gather(self.rank, value)[0]


class NullWatchdog:
    """A watchdog that does nothing."""

    def beat(self) -> None:
        pass

    def allow(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def awaiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def of_whole_tensors(optimizer: Any) -> Any:
    """Set the segments of an optimizer whose parameters are not flattened; return it."""
    from pretrain.training.optim import Muon, TensorwiseOptimizer, assign_tensor_ids, cut_segments, matrix_shapes

    named = {
        name: p for group in optimizer.param_groups for name, p in zip(group["names"], group["params"], strict=True)
    }
    ids = assign_tensor_ids(named)
    segments = {p: cut_segments(ids[name], p.numel(), 0, p.numel(), 0) for name, p in named.items()}
    if isinstance(optimizer, Muon):
        give_moments(optimizer).set_shards(segments, matrix_shapes({n: p.shape for n, p in named.items()}), Alone())
    elif isinstance(optimizer, TensorwiseOptimizer):
        give_moments(optimizer).set_segments(segments, max(one.stop for one in ids.values()), lambda _: None)
    return optimizer


def give_moments(optimizer: Any) -> Any:
    """Set the moments to zero, as the engine does; return the optimizer."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            kinds = ("exp_avg",) if group.get("orthogonal") else ("exp_avg", "exp_avg_sq")
            state = {kind: torch.zeros_like(parameter) for kind in kinds}
            optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **state}
    return optimizer


def engine_of(model: torch.nn.Module, optimizer: Any = None, decay: float = 0.01, **settings: Any) -> Any:
    """Return an `Engine` for a model, by default in fp32 and uncompiled; `settings` are fields of `EngineConfig`."""
    from pretrain.config import EngineConfig, OptimizerConfig
    from pretrain.training.engine import Engine
    from pretrain.training.optim import make_optimizer, parameter_groups

    choice = optimizer or OptimizerConfig()
    config = EngineConfig.model_validate({"precision": "fp32", "compile": False, **settings})
    return Engine(model, lambda named: make_optimizer(choice, parameter_groups(named, decay)), config, NullWatchdog())


def run_workers(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(*arguments)` on every rank of a new process group; return the results by rank.

    `function` must be importable. An exception in any process fails the caller with its traceback.
    """
    # Held here and not by rank 0: a free port chosen in advance may be taken by another test.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    return _start(range(world_size), (world_size, store.port), function, arguments)


def run_simulated(world_size: int, function: Callable[..., Any], *arguments: Any, rank: int = 0) -> Any:
    """Call `function(*arguments)` on one `rank` of many, in one process; collectives return without data."""
    (result,) = _start(range(rank, rank + 1), (world_size, 0), function, arguments)
    return result


class Program:
    """Like `subprocess.Popen` with pipes, but forked from a process that has imported torch: ten times as fast.

    The return value of `function` is the exit code.
    """

    def __init__(self, function: Callable[..., int | None], *arguments: Any, cwd: Path = ROOT, env: Any = os.environ):
        self._written = tempfile.TemporaryDirectory()
        passed = (self._written.name, cwd, dict(env), function, arguments)
        self._process = _context().Process(target=_program, args=passed)
        self._process.start()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        out, error = (Path(self._written.name, name).read_text() for name in ("stdout", "stderr"))
        return out, error


def run_program(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a `Program` to its end."""
    with Program(*arguments, **options) as program:
        out, error = program.communicate()
        return subprocess.CompletedProcess(arguments, program.returncode or 0, out, error)


def _program(folder: str, cwd: Path, environment: dict[str, str], function: Callable[..., Any], arguments: Any) -> None:
    for number, name in enumerate(("stdout", "stderr"), 1):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    code = function(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _context() -> Any:
    # Only if GPUs are hidden: a process that has queried GPUs cannot be forked to use them.
    preloaded = ["tests.preloaded"] if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._inductor.compile_fx", *preloaded])
    return context


def _start(ranks: range, world: tuple[int, int], function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    _context()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(  # pyright: ignore[reportPrivateImportUsage]
            _worker,
            (ranks, *world, folder, dict(os.environ), function, arguments),
            nprocs=len(ranks),
            start_method="forkserver",
        )
        return [pickle.loads((Path(folder) / str(rank)).read_bytes()) for rank in ranks]


def _worker(
    number: int,
    ranks: range,
    world_size: int,
    port: int,
    folder: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    rank = ranks[number]
    gc.freeze()  # DeepSpeed collects garbage often, and would scan all imported modules
    logging.disable(logging.WARNING)
    os.environ |= {**environment, "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    if port:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        dist.barrier()  # a function without collectives would end while others connect to its process
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        result = function(*arguments)
    finally:
        dist.destroy_process_group()
    (Path(folder) / str(rank)).write_bytes(pickle.dumps(result))
    # On a busy machine torch's threads sometimes abort while the interpreter shuts down ("terminate called
    # without an active exception", once in some hundred processes); there is nothing left to do here.
    os._exit(0)


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

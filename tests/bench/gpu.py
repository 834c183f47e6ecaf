"""`bench gpu`: training steps on this machine's GPU, and the limit of the roofline model.

One process without Ray trains one model at a time: our engine with ZeRO-1 on one worker, full sequences of random
tokens, no corpus. The limit is the shortest time of the kernels by the roofline model; `share` is this time divided by
the measured one. `host` is the time in which the host launches a step, `kernels` the time of its kernels
(torch.profiler). Host reads are the operations of one step at which the host waits for the GPU; the Python lines that
cause them are below the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pretrain.batches.batch import StepBatch
from pretrain.checkpoint.start import read_frozen
from pretrain.common.commands import positive_int, program
from pretrain.common.errors import InputError
from pretrain.common.worker import Worker
from pretrain.config import PretrainConfig
from pretrain.objectives import make_objective
from pretrain.objectives.masked import MaskedTokens
from pretrain.planning.roofline import Gpu, find_gpu, step_times
from pretrain.planning.work import phase_work
from pretrain.run import session
from pretrain.run.forward_backward import ForwardBackward
from pretrain.run.train import make_full_batch
from tests.bench import aligned
from tests.bench.baselines import bench_config
from tests.distributed import engine_of

_WARM_UP = 5  # number of steps that compile the model and allocate memory
BLOCKS = 5  # number of timed blocks of steps; after each, the host waits for the GPU
_LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Case:
    """A model to train at one sequence length."""

    name: str
    length: int
    tokens: int  # number of tokens per step, in one micro-batch
    vocabulary: int
    model: dict[str, Any] = field(default_factory=dict)

    def config(self, precision: str, *, graphs: bool = False) -> PretrainConfig:
        """Return the config of a run with these steps, with or without CUDA graphs."""
        config = bench_config("none", length=self.length, sequences=self.sequences, precision=precision, **self.model)
        engine = config.engine.model_copy(update={"cuda_graphs": graphs})
        return config.model_copy(update={"engine": engine})

    @property
    def sequences(self) -> int:
        return max(1, self.tokens // self.length)


def _both_lengths(name: str, tokens: int, vocabulary: int, **model: Any) -> tuple[Case, ...]:
    return tuple(Case(name, length, tokens, vocabulary, model) for length in (128, 512))


CASES = (
    *_both_lengths("bert-base", 32_768, 30_522, size="base"),
    *_both_lengths("bert-large", 16_384, 30_522, size="large"),
    *_both_lengths("modernbert-base", 32_768, 50_368, family="modernbert", size="base"),
)


def main(argv: list[str]) -> int:
    """Print a table, or JSON with `--json`.

    Raises:
        InputError: this machine has no GPU.
    """
    options = _parser().parse_args(argv)
    if not torch.cuda.is_available():
        raise InputError(
            f"bench gpu: torch {torch.__version__} finds no GPU here. Run it on a machine with one, and a torch for "
            "CUDA (`./launch.sh doctor` shows both)."
        )
    name = torch.cuda.get_device_name()
    cases = [
        dataclasses.replace(case, tokens=options.tokens or case.tokens) for case in CASES if case.name in options.models
    ]
    rows = []
    for number, case in enumerate(cases, 1):
        label = f"[{number}/{len(cases)}] {case.name}, {case.sequences} x {case.length} tokens"
        print(f"{label} ... ", end="", file=sys.stderr, flush=True)
        row = measure(case, options.steps, options.precision, find_gpu(name), graphs=options.graphs)
        print(row.get("failed") or f"{1e3 * row['seconds']:.1f} ms", file=sys.stderr, flush=True)
        rows.append(row)
    if options.json:
        print(json.dumps({"gpu": name, "torch": torch.__version__, "results": rows}))
    else:
        print(f"{name}, torch {torch.__version__}\n{table(rows)}")
    return 0


def measure(case: Case, steps: int, precision: str, gpu: Gpu | None, *, graphs: bool = False) -> dict[str, Any]:
    """Train and time one model, on the GPU if there is one.

    Returns:
        One row, as JSON values: `failed` instead of times if the model does not fit.
    """
    config = case.config(precision, graphs=graphs)
    row: dict[str, Any] = {"model": case.name, "length": case.length, "sequences": case.sequences}
    row["precision"] = config.engine.resolved_precision
    if gpu is not None and row["precision"] != "fp32":
        row |= _predicted(case, config, gpu)
    with session.process_group(Worker()):
        config, device = session.choose_device(config, Worker())
        try:
            row |= _timed(case, config, device, steps)
        except torch.OutOfMemoryError:
            row["failed"] = "does not fit into this GPU's memory"
    if device.type == "cuda":
        gc.collect()  # reference cycles keep the previous model in memory
        torch.cuda.empty_cache()
    if "limit_seconds" in row and "seconds" in row:
        row["share"] = row["limit_seconds"] / row["seconds"]
    return row


def host_reads(step: Callable[[], Any]) -> dict[str, int]:
    """Count how often `step` makes the host wait for the GPU, by Python line."""
    mode, synchronize, places = torch.cuda.get_sync_debug_mode(), torch.cuda.synchronize, list[str]()

    def record_caller(*arguments: Any, **options: Any) -> None:
        caller = sys._getframe(1)
        places.append(f"{caller.f_code.co_filename}:{caller.f_lineno}")
        synchronize(*arguments, **options)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        torch.cuda.synchronize = record_caller  # torch does not warn about this call
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            torch.cuda.synchronize = synchronize
    # c10/cuda/CUDAFunctions.cpp, warn_or_error_on_sync
    waits = [one for one in caught if "synchronizing CUDA operation" in str(one.message)]
    return dict(Counter([*places, *(f"{one.filename}:{one.lineno}" for one in waits)]))


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as text, followed by the Python lines where the host waited."""
    lines = [["model", "step", "ms", "host, ms", "kernels, ms", "tokens/s", "limit, ms", "share"]]
    lines[0] += ["limited by", "host reads", "memory, GiB"]
    lines += [_cells(row) for row in rows]
    places = sorted({place for row in rows for place in row.get("host_reads", {})})
    return "\n".join([*aligned(lines, (2, 3, 4, 5, 6, 7, 9, 10)), *(f"host read: {place}" for place in places)])


def _cells(row: dict[str, Any]) -> list[str]:
    limit = f"{1e3 * row['limit_seconds']:.1f}" if "limit_seconds" in row else "-"
    first = [row["model"], f"{row['sequences']} x {row['length']} {row['precision']}"]
    if "failed" in row:
        return [*first, "-", "-", "-", "-", limit, "-", row.get("limited_by", "-"), "-", row["failed"]]
    return [
        *first,
        *(f"{1e3 * row[name]:.1f}" for name in ("seconds", "host_seconds", "kernel_seconds")),
        f"{row['sequences'] * row['length'] / row['seconds']:,.0f}",
        limit,
        f"{row['share']:.2f}" if "share" in row else "-",
        row.get("limited_by", "-"),
        str(sum(row["host_reads"].values())),
        f"{row['memory_bytes'] / 2**30:.1f}",
    ]


def _predicted(case: Case, config: PretrainConfig, gpu: Gpu) -> dict[str, Any]:
    objective = make_objective(config, case.vocabulary)
    work = phase_work(config, config.phases[0], case.vocabulary, case.length)
    times = step_times(objective, config.phases[0], work, gpu, 1)
    times = dataclasses.replace(times, loader=0.0, host=0.0)  # no loader, and the host's time is measured
    return {"limit_seconds": times.limit, "limited_by": times.limited_by, "parts": dict(times.rows())}


def _timed(case: Case, config: PretrainConfig, device: torch.device, steps: int) -> dict[str, Any]:
    """Return the seconds of a step, the host reads of one step, and the device's peak memory."""
    on_gpu = device.type == "cuda"
    objective = MaskedTokens(config, case.vocabulary)
    objective.build(read_frozen)
    engine = engine_of(objective.model, config.optimizer, config.weight_decay(0), **config.engine.model_dump())
    engine.module.train()
    micro = make_full_batch(config, [case.length] * case.sequences, case.vocabulary)
    sizes = case.sequences, case.sequences * case.length, len(micro.masked_rows)
    batch = StepBatch((micro,), *sizes, epoch=0, first_sample=0).to(device)
    forward_backward, weights = ForwardBackward(engine, objective), objective.loss_weights(batch)

    def train() -> None:
        forward_backward.run(batch.micro_batches[0], weights, last=True)
        engine.step(_LEARNING_RATE)

    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    _seconds(train, _WARM_UP, on_gpu)
    times = [_seconds(train, steps, on_gpu) for _ in range(BLOCKS)]
    row = {"seconds": statistics.median(times), "spread_seconds": [min(times), max(times)]}
    row["host_seconds"], row["kernel_seconds"] = _host_and_kernels(train) if on_gpu else (row["seconds"], 0.0)
    row |= {"host_reads": host_reads(train) if on_gpu else {}, "memory_bytes": engine.usage().memory_bytes}
    engine.close()
    return row


def _seconds(train: Callable[[], None], steps: int, on_gpu: bool) -> float:
    """Return the mean seconds of these steps, until the last kernel on the GPU has ended."""
    if on_gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        train()
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def _host_and_kernels(train: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of a step on the host (with waits for a full launch queue), and the seconds of its kernels."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train()
        torch.cuda.synchronize()
    kernels = (one for one in profile.key_averages() if str(one.device_type).endswith("CUDA"))
    began = time.perf_counter()
    train()
    return time.perf_counter() - began, sum(one.self_device_time_total for one in kernels) / 1e6


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{program()} bench gpu", description=(__doc__ or "").split("\n")[0])
    models = list(dict.fromkeys(case.name for case in CASES))
    parser.add_argument("--models", nargs="+", choices=models, default=models, help="models (default: all)")
    parser.add_argument(
        "--steps", type=positive_int, default=10, help=f"steps of each of the {BLOCKS} timings (default: 10)"
    )
    parser.add_argument(
        "--precision",
        choices=["auto", "bf16", "fp16", "fp32"],
        default="auto",
        help="precision (default: auto, the fastest on this GPU)",
    )
    parser.add_argument(
        "--tokens", type=positive_int, help="tokens of a step (default: 32,768, or 16,384 of bert-large)"
    )
    parser.add_argument("--graphs", action="store_true", help="record passes as CUDA graphs (engine.cuda_graphs)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser

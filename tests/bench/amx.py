"""`bench amx`: the cost of bf16 matmuls on this CPU, for CPUs whose kernels are slow to generate (AMX).

`products` measures the rates of BERT's matmuls for forward, input gradient and weight gradient, the last one also with
its narrower operand transposed first. A round counts only if a square matmul in the same round reaches 0.8 of the
fastest one, because virtual machines share AMX. `kernels` measures from oneDNN's log how many milliseconds per step
oneDNN spends on generating kernels and on matmuls. `attention` compares C++ loops with batched matmuls. Each takes at
most ten minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from pretrain.common.children import run_program
from pretrain.common.commands import positive_int, program
from pretrain.common.errors import InputError, MachineError
from pretrain.model.kernels import grouped_op
from pretrain.model.kernels.layout import AttentionOptions, TokenLayout
from pretrain.model.kernels.products import weight_gradient_by_copy
from pretrain.model.positions import rotation

SHAPES = (8192, 256, 1024), (8192, 256, 768), (2048, 768, 3072), (2048, 768, 768), (600, 256, 8000)
_SQUARE, _MIN_SPEED = 2048, 0.8  # size of the square matmul; minimum relative speed for a round to count


def main(argv: list[str]) -> int:
    """Run one part and print its table."""
    parser = argparse.ArgumentParser(prog=f"{program()} bench amx", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=("products", "kernels", "attention"), help="what to measure")
    parser.add_argument("--threads", type=positive_int, default=1, help="threads (default: 1)")
    parser.add_argument(
        "--rounds", type=positive_int, default=9, help="products, attention: number of rounds; the median is printed"
    )
    parser.add_argument("--config", help="kernels: config of a run, whose corpus is prepared")
    parser.add_argument("--windows", nargs="+", default=["100-120", "1000-1020"], help="kernels: steps to measure")
    options = parser.parse_args(argv)
    if options.part == "kernels" and not options.config:
        raise InputError("bench amx kernels: --config is missing. Give the config of a run whose corpus is prepared.")
    torch.set_num_threads(options.threads)
    if options.part == "kernels":
        rows = kernels(options.config, options.windows)
    else:
        rows = (products if options.part == "products" else attention)(options.rounds)
    for row in rows:
        print(row, flush=True)
    return 0


def products(rounds: int) -> Iterator[str]:
    """Yield rows with the GFLOP/s of the matmuls of each shape."""
    square = torch.randn(_SQUARE, _SQUARE).bfloat16()
    for rows, width, inner in SHAPES:
        x, g, w = (torch.randn(*size).bfloat16() for size in ((rows, width), (rows, inner), (inner, width)))
        kinds: dict[str, Callable[[], Tensor]] = {
            "forward": lambda x=x, w=w: x @ w.T,
            "input gradient": lambda g=g, w=w: g @ w,
            "weight gradient": lambda g=g, x=x: g.T @ x,
            "weight gradient, transposed first": lambda g=g, x=x: weight_gradient_by_copy(g, x),
        }
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}  # seconds: of it, of the square
        for _ in range(rounds + 1):  # the first one generates the kernels
            for kind, product in kinds.items():
                found[kind].append((_seconds(product), _seconds(lambda: square @ square)))
        fastest = min(square_took for pairs in found.values() for _, square_took in pairs)
        work = 2e-9 * rows * width * inner
        for kind, pairs in found.items():
            kept = [took for took, square_took in pairs[1:] if fastest >= _MIN_SPEED * square_took]
            rate = f"{work / statistics.median(kept):,.0f}" if kept else "no round counts"
            yield f"{rows} x {width} x {inner}  {kind:36} {rate:>8} GFLOP/s  {len(kept)} of {rounds} rounds"
        yield f"{'':22}square matmul    {2e-9 * _SQUARE**3 / fastest:>23,.0f} GFLOP/s"


def attention(rounds: int) -> Iterator[str]:
    """Yield rows with the milliseconds of both passes of one layer, 8,192 tokens, 4 heads of 64, rotary."""
    for length, window in ((32, 0), (128, 0), (512, 0), (512, 64), (1024, 0), (2048, 0)):
        lengths = (length,) * (8192 // length)
        offsets = torch.arange(0, 8193, length, dtype=torch.int32)
        turns = rotation(torch.arange(length).repeat(len(lengths)), 64, 10_000.0)
        layout = TokenLayout(offsets, lengths, None, torch.zeros(8192, dtype=torch.int32), turns)
        options = AttentionOptions(4, fused=True, window=window)
        qkv = torch.randn(8192, 768).bfloat16().requires_grad_()

        def passes(qkv: Tensor = qkv, layout: TokenLayout = layout, options: AttentionOptions = options) -> Tensor:
            context = grouped_op.grouped_attention(qkv, None, layout, options)[0]
            context.backward(context.detach())
            return context

        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds + 1):  # the first one compiles
            for is_native, times in found.items():
                with unittest.mock.patch.object(grouped_op, "prefer_native_attention", lambda *_, on=is_native: on):
                    times.append(1e3 * _seconds(passes))
        medians = [statistics.median(times[1:]) for times in found.values()]
        yield f"length {length:5} window {window:3}  C++ {medians[0]:7.1f} ms  matmuls {medians[1]:7.1f} ms"


def _seconds(function: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def kernels(config: str, windows: Iterable[str]) -> Iterator[str]:
    """Yield a row for each range of steps: milliseconds per step, from oneDNN's log."""
    ranges = [tuple(map(int, window.split("-"))) for window in windows]
    code = f"from tests.bench.amx import train; train({config!r}, {max(last for _, last in ranges)})"
    done = run_program([sys.executable, "-c", code], {**os.environ, "ONEDNN_VERBOSE": "profile"})
    if done.returncode:
        raise MachineError(f"bench amx: training ended with exit code {done.returncode}: {done.stderr[-300:]}")
    step, spent = 0, {window: {"create": 0.0, "exec": 0.0} for window in ranges}
    for line in done.stdout.splitlines():
        if line.startswith("step "):
            step = int(line.split()[1])
        fields = line.split(",")
        if fields[0] == "onednn_verbose" and len(fields) > 5:
            kind = fields[3].partition(":")[0]
            for window in (one for one in ranges if one[0] <= step < one[1] and kind in spent[one]):
                spent[window][kind] += float(fields[-1])
    for (first, last), both in spent.items():
        each = {kind: total / (last - first) for kind, total in both.items()}
        yield f"steps {first} to {last}: {each['create']:.2f} ms a step for kernels, {each['exec']:.1f} for products"


def train(config: str, steps: int) -> None:
    """Train in this process, and print a line before each step."""
    from pretrain.batches.loader import Loader
    from pretrain.common import settings
    from pretrain.config import PretrainConfig
    from pretrain.corpus.shards import open_shards
    from pretrain.model.precision import resolve_local_precision
    from tests.bench.baselines import EngineTrainer, join_single_process_group

    run_config = resolve_local_precision(settings.load(config, PretrainConfig))[0]
    join_single_process_group(torch.device("cpu"))
    shards = open_shards(run_config.corpus.folder, "train")
    trainer = EngineTrainer(run_config, shards.vocabulary_size)
    for number, batch in zip(range(steps), Loader(shards, run_config, 0, rank=0, world_size=1), strict=False):
        print(f"step {number}", flush=True)
        trainer.train(batch, 1e-4)

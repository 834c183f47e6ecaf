"""`bench step`: training throughput of bertrain and of transformers' BERT on the same batches.

Baselines (`--peers`): transformers with scaled-dot-product attention, with or without torch.compile, autocast to the
same precision, torch's fused AdamW, batches padded to their longest sequence. They are compared with bertrain's engine
(DeepSpeed ZeRO-1 on one worker) on the same sequences without padding. Each trainer runs in a separate process, and
only one works at a time. Throughput counts the tokens of the sequences, never padding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pretrain.batches.loader import Loader
from pretrain.common.commands import positive_int, program
from pretrain.config import Precision
from pretrain.corpus.shards import open_shards
from pretrain.model.precision import measure_matmul
from pretrain.objectives import make_objective
from tests.bench.baselines import BARE, BASELINES, DEVICE, OURS, TrainerProcess, TrainerSpec, bench_config

LEARNING_RATE = 1e-4
WARM_UP = 3  # number of untimed steps, which compile the model and allocate memory


def main(argv: list[str]) -> int:
    """Run the comparison and print a table, or JSON with `--json`."""
    options = _parser().parse_args(argv)
    results = []
    for size, length in itertools.product(options.sizes, options.lengths):
        results.append(compare(size, length, options))
        if not options.json:
            print(_row(results[-1]), flush=True)
    if options.json:
        print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "results": results}))
    return 0


def compare(size: str, length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one model size at one sequence length; return medians over the timed steps, as JSON values.

    `mfu` is the model FLOPs utilization of our engine (`pretrain.run.metrics`).
    """
    shards = open_shards(Path(options.corpus), "train")
    sequences = max(1, options.tokens // length)
    config = bench_config(options.corpus, size, length, sequences, precision=options.precision)
    precision = config.engine.resolved_precision
    count = options.repeats + WARM_UP
    kinds = (OURS, *options.peers)
    timings = _measure({kind: TrainerSpec(kind, config, steps=count) for kind in kinds}, count, precision)
    loader = Loader(shards, config, 0, rank=0, world_size=1)
    steps = [next(loader) for _ in range(count)][WARM_UP:]
    loader.close()
    tokens = sum(step.tokens for step in steps)
    seconds = timings.seconds_per_token
    baselines = [kind for kind in options.peers if kind != BARE] or [BARE]
    # MFU divided by the FLOPs of a token.
    per_flop = sorted(1 / (time * peak) for time, peak in zip(seconds[OURS], timings.matmul_peaks, strict=True))
    model_flops = make_objective(config, shards.vocabulary_size).model_flops
    batches = [batch for step in steps for batch in step.micro_batches]
    flops_per_token = sum(model_flops(batch.lengths, len(batch.masked_rows)) for batch in batches) / tokens
    return {
        "size": size,
        "length": length,
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "precision": precision,
        "sequences_per_step": sequences,
        "mean_tokens": tokens / (sequences * options.repeats),
        "tokens_per_second": {kind: 1 / statistics.median(values) for kind, values in seconds.items()},
        "spread": {kind: [1 / max(values), 1 / min(values)] for kind, values in seconds.items()},
        "best_peer": min(baselines, key=lambda kind: statistics.median(seconds[kind])),
        "ratios": {kind: _ratio(seconds[kind], seconds[OURS]) for kind in options.peers},
        "loss": {kind: statistics.fmean(values) for kind, values in timings.losses.items()},
        "matmul_peak_gflops": statistics.median(timings.matmul_peaks) / 1e9,
        "mfu": flops_per_token * statistics.median(per_flop),
        "mfu_spread": [flops_per_token * per_flop[0], flops_per_token * per_flop[-1]],
    }


@dataclass
class _Timings:
    """Measurements of the timed steps, as {kind of trainer: values}."""

    seconds_per_token: dict[str, list[float]]
    losses: dict[str, list[float]]
    matmul_peaks: list[float] = field(default_factory=list)  # of the machine at each step, FLOP/s


def _measure(specs: dict[str, TrainerSpec], count: int, precision: Precision) -> _Timings:
    """Train `count` steps with every trainer in alternation; the first `WARM_UP` are not timed."""
    trainers = {kind: TrainerProcess(spec) for kind, spec in specs.items()}
    timings = _Timings({kind: [] for kind in trainers}, {kind: [] for kind in trainers})
    for number in range(count):
        for kind in sorted(trainers, reverse=bool(number % 2)):
            report = trainers[kind].train(LEARNING_RATE)
            if number >= WARM_UP:
                timings.seconds_per_token[kind].append(report.seconds / report.tokens)
                timings.losses[kind].append(report.loss)
        if number >= WARM_UP:
            # The machine's speed varies, so its matmul peak is measured with every step.
            timings.matmul_peaks.append(measure_matmul(DEVICE, precision))
    for trainer in trainers.values():
        trainer.close()
    return timings


def _ratio(baseline: Sequence[float], ours: Sequence[float]) -> list[float]:
    """Return [median, minimum, maximum] over the steps of the baseline's time divided by ours."""
    ratios = [a / b for a, b in zip(baseline, ours, strict=True)]
    return [statistics.median(ratios), min(ratios), max(ratios)]


def _row(result: dict[str, Any]) -> str:
    low, high = result["mfu_spread"]
    lines = [
        f"{result['size']} @ {result['length']}, mean {result['mean_tokens']:.0f} tokens: "
        f"ours {_rate(result, OURS)}, MFU {result['mfu']:.0%} ({low:.0%}-{high:.0%}) of "
        f"{result['matmul_peak_gflops']:.0f} GFLOP/s in {result['precision']}"
    ]
    for kind, (median, low, high) in result["ratios"].items():
        mark = "  fastest baseline" if kind == result["best_peer"] else ""
        lines.append(f"  {kind:<15} {_rate(result, kind)}   ratio {median:.2f} ({low:.2f}-{high:.2f}){mark}")
    return "\n".join(lines)


def _rate(result: dict[str, Any], kind: str) -> str:
    low, high = result["spread"][kind]
    return f"{result['tokens_per_second'][kind]:,.0f} tok/s ({low:,.0f}-{high:,.0f})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{program()} bench step", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", required=True, help="prepared corpus folder")
    parser.add_argument("--sizes", nargs="+", default=["mini"], help="model sizes (default: mini)")
    parser.add_argument("--lengths", nargs="+", type=positive_int, default=[512, 128], help="sequence lengths")
    parser.add_argument(
        "--tokens", type=positive_int, default=8192, help="approximate tokens per step, padding included"
    )
    parser.add_argument(
        "--repeats", type=positive_int, default=7, help="number of timed steps per trainer; the median is reported"
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        default=list(BASELINES),
        choices=(*BASELINES, BARE),
        help="baselines: variants of transformers; bare is our model in a plain torch loop",
    )
    parser.add_argument(
        "--precision",
        choices=["auto", "bf16", "fp16", "fp32"],
        default="auto",
        help="precision of all (default: auto, the fastest on this machine)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser

"""`bench step`: the same batches trained by ours and by transformers' BertForPreTraining, in turn.

The peer in every kind asked for (`--peers`): padded to the longest of the batch, eager or scaled-dot-product
attention, with torch.compile or without, autocast to the same precision, torch's fused AdamW; the ratio is to the fastest. Ours:
the product's own engine (DeepSpeed ZeRO-1 on one worker) over the same sequences without padding. Each has a process of
its own, and one works at a time. Useful tokens are those of the sequences; padding never counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pretrain.batches.loader import Loader, MicroBatch, StepBatch
from pretrain.bench.contestants import BARE, OURS, PEERS, Contestant, Entry, bench_config
from pretrain.config import PretrainConfig
from pretrain.corpus.shards import TokenShards, open_shards
from pretrain.estimate import executed_flops, step_flops
from pretrain.model.precision import measure_matmul

LEARNING_RATE = 1e-4
WARM_UP = 3  # steps that compile and fill the memory


def main(argv: list[str]) -> int:
    """Run the comparison and print a table, or JSON with `--json`."""
    parser = argparse.ArgumentParser(prog="./launch.sh bench step", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", required=True, help="prepared corpus folder: the real mix of lengths")
    parser.add_argument("--sizes", nargs="+", default=["mini"], help="model sizes (default: mini)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 128], help="sequence lengths")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per step before padding, about")
    parser.add_argument("--repeats", type=int, default=7, help="alternations; the median is reported")
    parser.add_argument(
        "--peers",
        nargs="+",
        default=["sdpa", "eager"],
        choices=(*PEERS, BARE),
        help="kinds of peer, all in turn; bare is our model in a plain torch loop",
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="hidden dropout of both; 0 switches it off")
    parser.add_argument(
        "--precision",
        choices=["auto", "bf16", "fp16", "fp32"],
        default="auto",
        help="of all of them (default: auto, what is fastest here)",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's default")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    results = []
    for size in options.sizes:
        for length in options.lengths:
            results.append(compare(size, length, options, device))
            if not options.json:
                print(_row(results[-1]), flush=True)
    if options.json:
        print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "results": results}))
    return 0


def compare(size: str, length: int, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """One model size at one sequence length: medians over alternations."""
    shards = open_shards(Path(options.corpus), "train")
    sequences = max(1, options.tokens // length)
    config = bench_config(
        options.corpus, size, length, sequences, precision=options.precision, hidden_dropout=options.dropout
    )
    precision = config.engine.settled_precision
    count = options.repeats + WARM_UP
    entries = {kind: Entry(kind, config, device.type, options.threads, count) for kind in (OURS, *options.peers)}
    contestants = {kind: Contestant(entry) for kind, entry in entries.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in contestants}  # per useful token
    losses: dict[str, list[float]] = {kind: [] for kind in contestants}
    peaks = []  # the machine's speed varies, so it is measured in every turn
    for number in range(count):
        for kind in sorted(contestants, reverse=bool(number % 2)):
            report = contestants[kind].train(LEARNING_RATE)
            if number >= WARM_UP:
                seconds[kind].append(report.seconds / report.tokens)
                losses[kind].append(report.loss)
        if number >= WARM_UP:
            peaks.append(measure_matmul(device.type, precision))
    for contestant in contestants.values():
        contestant.close()
    steps = _steps(shards, config, count)[WARM_UP:]
    tokens = sum(step.tokens for step in steps)
    shares = sorted(1 / (time * peak) for time, peak in zip(seconds[OURS], peaks, strict=True))  # per FLOP of a token
    executed = _flops(executed_flops, config, shards, steps) / tokens
    theirs = [kind for kind in options.peers if kind != BARE] or [BARE]
    best = min(theirs, key=lambda kind: statistics.median(seconds[kind]))
    ratios = {kind: _ratio(seconds[kind], seconds[OURS]) for kind in options.peers}
    return {
        "size": size,
        "length": length,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "precision": precision,
        "sequences_per_step": sequences,
        "mean_tokens": tokens / (sequences * options.repeats),
        "tokens_per_second": {kind: 1 / statistics.median(values) for kind, values in seconds.items()},
        "spread": {kind: [1 / max(values), 1 / min(values)] for kind, values in seconds.items()},
        "best_peer": best,
        "ratios": ratios,
        "loss": {kind: statistics.fmean(values) for kind, values in losses.items()},
        "matmul_peak_gflops": statistics.median(peaks) / 1e9,
        "peak_fraction": executed * statistics.median(shares),
        "peak_fraction_spread": [executed * shares[0], executed * shares[-1]],
        "model_flops_fraction": _flops(step_flops, config, shards, steps) / tokens * statistics.median(shares),
    }


def _ratio(peer: list[float], ours: list[float]) -> list[float]:
    """[median, lowest, highest] of the peer's time over ours, step by step."""
    ratios = [a / b for a, b in zip(peer, ours, strict=True)]
    return [statistics.median(ratios), min(ratios), max(ratios)]


def _steps(shards: TokenShards, config: PretrainConfig, count: int) -> list[StepBatch]:
    loader = Loader(shards, config, 0, rank=0, world_size=1)
    steps = [step for _, step in zip(range(count), loader, strict=False)]
    loader.close()
    return steps


def _flops(count: Callable[..., float], config: PretrainConfig, shards: TokenShards, steps: list[StepBatch]) -> float:
    batches: list[MicroBatch] = [batch for step in steps for batch in step.micro_batches]
    return sum(count(config, shards.vocabulary_size, b.lengths, len(b.masked_rows)) for b in batches)


def _row(result: dict[str, Any]) -> str:
    low, high = result["peak_fraction_spread"]
    lines = [
        f"{result['size']} @ {result['length']}, mean {result['mean_tokens']:.0f} tokens: "
        f"ours {_rate(result, OURS)}, {result['peak_fraction']:.0%} ({low:.0%}-{high:.0%}) of {result['matmul_peak_gflops']:.0f} GFLOP/s in {result['precision']}"
    ]
    for kind, (median, low, high) in result["ratios"].items():
        mark = "  the fastest peer" if kind == result["best_peer"] else ""
        lines.append(f"  {kind:<15} {_rate(result, kind)}   ratio {median:.2f} ({low:.2f}-{high:.2f}){mark}")
    return "\n".join(lines)


def _rate(result: dict[str, Any], kind: str) -> str:
    low, high = result["spread"][kind]
    return f"{result['tokens_per_second'][kind]:,.0f} tok/s ({low:,.0f}-{high:,.0f})"

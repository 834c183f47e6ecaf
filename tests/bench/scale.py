"""`bench scale`: what one rank does for a step, by the number of ranks, simulated in this process without a network.

Each rank trains 64 sequences, so the global batch grows with the ranks. Times are processor time, minima over steps.
The corpus is synthetic; a tenth of the sequences is short, as in a run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.batches import balancing
from pretrain.batches.loader import BatchMaker
from pretrain.batches.synthetic import VOCABULARY_SIZE, synthetic_corpus
from pretrain.checkpoint import store
from pretrain.checkpoint.fragments import packed
from pretrain.common.commands import positive_int, program
from pretrain.common.wording import aligned
from pretrain.config import ModelConfig
from pretrain.corpus.shards import TokenShards
from pretrain.model import parameters
from pretrain.training.engine import buckets
from pretrain.training.optim import parameter_groups
from tests.bench.baselines import validated

RANKS = (8, 64, 256, 1024, 4096)


def main(argv: list[str]) -> int:
    """Measure and print a table, or JSON with `--json`."""
    parser = argparse.ArgumentParser(prog=f"{program()} bench scale", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=positive_int, nargs="+", default=RANKS, help="numbers of simulated ranks")
    parser.add_argument("--sequences", type=positive_int, default=64, help="sequences of each rank in a step")
    parser.add_argument("--length", type=positive_int, default=128, help="sequence length")
    parser.add_argument("--repeats", type=positive_int, default=5, help="steps; the fastest is reported")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        shards = synthetic_corpus(Path(scratch))
        rows = [measure(shards, ranks, options.sequences, options.length, options.repeats) for ranks in options.ranks]
    print(json.dumps({"scale": rows}) if options.json else _table(rows))
    return 0


def measure(shards: TokenShards, ranks: int, each: int, length: int, repeats: int) -> dict[str, Any]:
    """The work of the middle one of `ranks` for a step of `each` sequences a rank; seconds and bytes."""
    sequences = ranks * each
    opened = time.process_time()
    maker = _maker(shards, ranks, each, length, whole_word=False)
    opened = time.process_time() - opened
    words = _maker(shards, ranks, each, length, whole_word=True)
    tracemalloc.start()
    maker.share(0, sequences)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "ranks": ranks,
        "sequences": sequences,
        "open_seconds": opened,
        "share_seconds": _fastest(lambda number: maker.share(number * sequences, sequences), repeats),
        "whole_word_seconds": _fastest(lambda number: words.share(number * sequences, sequences), repeats),
        "peak_bytes": peak,
        "tokens_max_over_mean": _imbalance(maker, sequences),
        **_manifest(ranks),
    }


def _maker(shards: TokenShards, ranks: int, each: int, length: int, *, whole_word: bool) -> BatchMaker:
    phase = {"sequence_length": length, "global_sequences": ranks * each, "steps": 10**9, "peak_learning_rate": 1e-4}
    config = validated(
        {
            "name": "bench",
            "corpus": {"dir": "nowhere"},
            "phases": [phase],
            "masking": {"whole_word": whole_word},
            "engine": {"micro_batch_tokens": each * length},
        }
    )
    return BatchMaker(shards, config, 0, seed=0, rank=ranks // 2, world_size=ranks)


def _fastest(work: Callable[[int], object], repeats: int) -> float:
    seconds = []
    for number in range(repeats + 1):
        start = time.process_time()
        work(number)
        seconds.append(time.process_time() - start)
    return min(seconds[1:])


def _imbalance(maker: BatchMaker, sequences: int) -> float:
    """Tokens of the rank with most, over the mean of all ranks."""
    loads = []
    for part in balancing.parts(sequences, maker.world_size):
        plan, assignment = maker.assign(0, part)
        rank = assignment.micro_batch % part.ranks
        loads.append(np.bincount(rank, weights=plan.lengths[assignment.descending], minlength=part.ranks))
    tokens = np.concatenate(loads)
    return float(tokens.max() / tokens.mean())


@dataclass(frozen=True)
class _Rank:
    rank: int
    world_size: int

    def collect_objects(self, value: Any) -> list[Any]:
        return [value]

    def first_object(self, value: Any) -> Any:
        return value


@dataclass(frozen=True)
class _Whole:
    """A parameter of which every rank holds all, without memory."""

    name: str
    start: int
    tensors: dict[str, Tensor]
    shared: bool = True


def _manifest(ranks: int) -> dict[str, int]:
    """The fragments listed for BERT-Base: whole on every rank, or cut as by ZeRO-1 and 2, or by ZeRO-3."""
    whole, cut = ([entry for rank in range(ranks) for entry in of(rank, ranks)] for of in (_whole, _cut))
    lists = {
        "manifest": packed(whole),
        "manifest_of_zero_1": packed(_bucket_fragments(ranks)),
        "manifest_of_zero_3": packed(cut),
    }
    entries = {f"{name}_entries": len(one) for name, one in lists.items()}
    return {**entries, **{f"{name}_bytes": len(json.dumps(one)) for name, one in lists.items()}}


def _whole(rank: int, ranks: int) -> list[dict[str, Any]]:
    held = [
        _Whole(one.name, 0, dict.fromkeys(("weight", "exp_avg", "exp_avg_sq"), torch.empty(1).expand(one.numel)))
        for one in _parameters()
    ]
    return [{**entry, "rank": rank} for entry in store.take_shard(held, _Rank(rank, ranks)).entries]


def _cut(rank: int, ranks: int) -> list[dict[str, Any]]:
    fragments = []
    for one in _parameters():
        part = -(-one.numel // ranks)
        start, stop = part * rank, min(one.numel, part * (rank + 1))
        if start < stop:
            kinds = ["weight", "exp_avg", "exp_avg_sq"]
            fragments.append({"name": one.name, "start": start, "numel": stop - start, "kinds": kinds, "rank": rank})
    return fragments


def _bucket_fragments(ranks: int) -> list[dict[str, Any]]:
    """ZeRO-1 and 2: every rank has an equal part of each bucket, so that parts do not end where parameters do."""
    named = [(one.name, torch.empty(one.shape, device="meta")) for one in _parameters()]
    optimizer = torch.optim.AdamW(parameter_groups(named, 0.01))
    buckets.divide_groups(optimizer, [name for name, _ in named], buckets.ENTRIES)
    fragments = []
    for group in optimizer.param_groups:
        part, begin = -(-sum(one.numel() for one in group["params"]) // ranks), 0
        for name, parameter in zip(group["names"], group["params"], strict=True):
            end = begin + parameter.numel()
            for rank in range(begin // part, -(-end // part)):
                start, stop = max(begin, rank * part), min(end, (rank + 1) * part)
                kinds = ["weight", "exp_avg", "exp_avg_sq"]
                fragments.append(
                    {"name": name, "start": start - begin, "numel": stop - start, "kinds": kinds, "rank": rank}
                )
            begin = end
    return fragments


def _parameters() -> list[parameters.Parameter]:
    """Those of BERT-Base."""
    model = ModelConfig.model_validate({"size": "base"})
    layers = [
        one._replace(name=f"encoder.layers.{number}.{one.name}")
        for number in range(model.layers)
        for one in parameters.layer_parameters(model, number)
    ]
    embedding = parameters.embedding_parameters(model, VOCABULARY_SIZE)
    heads = parameters.head_parameters(model, VOCABULARY_SIZE, True)
    return [*embedding, *layers, *parameters.final_parameters(model), *heads]


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["ranks", "sequences", "a share", "whole words", "max/mean", "memory", "open"]
    head += ["manifest of ZeRO-0", "of ZeRO-1 and 2", "of ZeRO-3"]
    lines = [head]
    for row in rows:
        times = (row[name] for name in ("share_seconds", "whole_word_seconds"))
        lines.append(
            [
                f"{row['ranks']:,}",
                f"{row['sequences']:,}",
                *(f"{1000 * seconds:.1f} ms" for seconds in times),
                f"{row['tokens_max_over_mean']:.4f}",
                f"{row['peak_bytes'] / 1e6:.1f} MB",
                f"{1000 * row['open_seconds']:.0f} ms",
                *(
                    f"{row[name + '_entries']:,} entries, {row[name + '_bytes'] / 1e6:.2f} MB"
                    for name in ("manifest", "manifest_of_zero_1", "manifest_of_zero_3")
                ),
            ]
        )
    return "\n".join(aligned(lines, range(len(head))))

"""`bench scale`: work of one rank to plan a step, by the number of ranks, simulated in this process without a network.

Each rank trains 64 sequences, so the global batch grows with the number of ranks. Times are minima of CPU time over
steps. The corpus is synthetic; a tenth of the sequences is short, as in a run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
import torch

from pretrain.batches import balancing
from pretrain.batches.loader import BatchMaker
from pretrain.common.commands import positive_int, program
from pretrain.corpus.shards import TokenShards
from tests.bench import aligned
from tests.bench.baselines import validated
from tests.bench.synthetic import synthetic_corpus

RANKS = (8, 64, 256, 1024, 4096)


def main(argv: list[str]) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog=f"{program()} bench scale", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=positive_int, nargs="+", default=RANKS, help="numbers of simulated ranks")
    parser.add_argument("--sequences", type=positive_int, default=64, help="sequences of each rank in a step")
    parser.add_argument("--length", type=positive_int, default=128, help="sequence length")
    parser.add_argument("--repeats", type=positive_int, default=5, help="steps; the fastest is reported")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        shards = synthetic_corpus(Path(scratch))
        rows = [measure(shards, ranks, options.sequences, options.length, options.repeats) for ranks in options.ranks]
    lines = [["ranks", "sequences", "a share", "max/mean", "memory"], *rows]
    print("\n".join(aligned(lines, range(len(lines[0])))))
    return 0


def measure(shards: TokenShards, ranks: int, each: int, length: int, repeats: int) -> list[str]:
    """Return the row for the middle one of `ranks`, for steps with `each` sequences per rank."""
    sequences = ranks * each
    phase = {"sequence_length": length, "global_sequences": sequences, "steps": 10**9, "peak_learning_rate": 1e-4}
    engine = {"micro_batch_tokens": each * length}
    config = validated({"name": "bench", "corpus": {"dir": "nowhere"}, "phases": [phase], "engine": engine})
    maker = BatchMaker(shards, config, 0, seed=0, rank=ranks // 2, world_size=ranks)
    tracemalloc.start()
    maker.make_share(0, sequences)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    seconds = []
    for number in range(1, repeats + 1):
        start = time.process_time()
        maker.make_share(number * sequences, sequences)
        seconds.append(time.process_time() - start)
    work = [f"{1000 * min(seconds):.1f} ms", f"{_imbalance(maker, sequences):.4f}", f"{peak / 1e6:.1f} MB"]
    return [f"{ranks:,}", f"{sequences:,}", *work]


def _imbalance(maker: BatchMaker, sequences: int) -> float:
    """Return the maximum number of tokens over ranks, divided by the mean."""
    loads = []
    for part in balancing.parts(sequences, maker.world_size):
        plan, assignment = maker.assign(0, part)
        rank = assignment.micro_batch_index % part.ranks
        loads.append(np.bincount(rank, weights=plan.lengths[assignment.descending], minlength=part.ranks))
    tokens = np.concatenate(loads)
    return float(tokens.max() / tokens.mean())

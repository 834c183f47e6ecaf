"""`bench quality`: ours and transformers train for the same wall time on the same text; who predicts better?

Both take turns of a few seconds in one process, so that a noisy machine disturbs both alike. Each sees the samples
of the same epoch in the same order, from the first one on; the faster one gets further. The learning rate
follows the share of the time that is used up, warm-up and linear decay, the same for both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pretrain.batches.loader import Loader, StepBatch, validation_batches
from pretrain.bench.contestants import Ours, Peer, alone
from pretrain.bench.step import PEERS
from pretrain.config import Corpus, Evaluation, Model, Phase, RunConfig
from pretrain.config import Engine as EngineSettings
from pretrain.corpus.shards import TokenShards, open_shards

TURN_SECONDS = 10.0
WARM_UP_SHARE = 0.1


def main(argv: list[str]) -> int:
    """Run the comparison and print held-out losses over time, or JSON with `--json`."""
    parser = argparse.ArgumentParser(prog="bench quality", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", required=True, help="prepared corpus folder")
    parser.add_argument("--size", default="mini", help="model size (default: mini)")
    parser.add_argument("--length", type=int, default=128, help="sequence length")
    parser.add_argument("--sequences", type=int, default=64, help="sequences per step")
    parser.add_argument("--minutes", type=float, default=10.0, help="training time of each")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate of both")
    parser.add_argument(
        "--peer",
        choices=PEERS,
        default="eager",
        help="kind of peer, as in `bench step`, which tells the fastest",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON at the end instead of lines on the way"
    )
    options = parser.parse_args(argv)
    alone(torch.device("cpu"))
    result = compare(options)
    if options.json:
        print(json.dumps(result))
    return 0


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Train both in turns; held-out MLM loss of each after every tenth of the time."""
    folder = Path(options.corpus)
    shards, config = open_shards(folder, "train"), _config(options)
    held_out = validation_batches(open_shards(folder, "validation"), config, 0, rank=0, world_size=1)
    torch.manual_seed(0)
    contestants = {
        "ours": Ours(config, shards.vocabulary_size),
        "transformers": Peer(config, shards.vocabulary_size, torch.device("cpu"), options.peer),
    }
    runners = {name: _Runner(it, shards, config, options) for name, it in contestants.items()}
    curve: list[dict[str, Any]] = []
    while not all(runner.done() for runner in runners.values()):
        for runner in runners.values():
            runner.take_turn()
        share = min(runner.share() for runner in runners.values())
        if share >= (len(curve) + 1) / 10:
            losses = {name: it.held_out_loss(held_out) for name, it in contestants.items()}
            curve.append({"minutes": share * options.minutes, **losses})
            if not options.json:
                words = "   ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
                print(f"{share * options.minutes:6.1f} min each   held-out MLM loss   {words}", flush=True)
    sequences = {name: runner.steps * options.sequences for name, runner in runners.items()}
    if not options.json:
        print(
            f"sequences seen: {sequences}; difference {curve[-1]['transformers'] - curve[-1]['ours']:.4f} nats"
        )
    return {"options": vars(options), "sequences": sequences, "curve": curve}


class _Runner:
    """One contestant's clock and place in the epoch."""

    def __init__(self, contestant: Any, shards: TokenShards, config: RunConfig, options: argparse.Namespace):
        self._contestant, self._options = contestant, options
        self._loader: Iterator[StepBatch] = iter(Loader(shards, config, 0, rank=0, world_size=1))
        self._seconds = self.steps = 0.0
        contestant.train(
            contestant.ready(next(self._loader)), 0.0
        )  # compiles; changes no weight and costs no time

    def share(self) -> float:
        return self._seconds / (60 * self._options.minutes)

    def done(self) -> bool:
        return self.share() >= 1

    def take_turn(self) -> None:
        began = time.perf_counter()
        while not self.done() and time.perf_counter() - began < TURN_SECONDS:
            ready = self._contestant.ready(next(self._loader))
            step_began = time.perf_counter()
            self._contestant.train(ready, self._rate())
            self._seconds += time.perf_counter() - step_began
            self.steps += 1

    def _rate(self) -> float:
        share = self.share()
        return self._options.rate * min(share / WARM_UP_SHARE, (1 - share) / (1 - WARM_UP_SHARE))


def _config(options: argparse.Namespace) -> RunConfig:
    return RunConfig(
        name="bench",
        corpus=Corpus(dir=options.corpus),
        model=Model(size=options.size),
        phases=(
            Phase(
                sequence_length=options.length, global_sequences=options.sequences, steps=1 << 30,
                peak_learning_rate=options.rate,
            ),
        ),
        engine=EngineSettings(zero_stage=1, micro_batch_tokens=options.sequences * options.length),
        evaluation=Evaluation(sequences=512),
    )  # fmt: skip

"""`bench quality`: held-out loss of ours and of transformers after equal training time on the same text.

The two trainers alternate every few seconds, so that load on the machine affects both alike. Both read the samples of
one epoch in the same order from the first one, so the faster trainer sees more samples. The learning rate depends on
the share of the training time used: warm-up, then linear decay, the same for both.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from pretrain.bench.baselines import BASELINES, OURS, TrainerProcess, TrainerSpec, bench_config
from pretrain.commands import program

TURN_SECONDS = 10.0
WARM_UP_SHARE = 0.1


def main(argv: list[str]) -> int:
    """Run the comparison and print held-out losses over time, or JSON with `--json`."""
    parser = argparse.ArgumentParser(prog=f"{program()} bench quality", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", required=True, help="prepared corpus folder")
    parser.add_argument("--size", default="mini", help="model size (default: mini)")
    parser.add_argument("--length", type=int, default=128, help="sequence length")
    parser.add_argument("--sequences", type=int, default=64, help="sequences per step")
    parser.add_argument("--minutes", type=float, default=10.0, help="training time of each trainer")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate of both trainers")
    parser.add_argument(
        "--peer",
        choices=BASELINES,
        default="eager",
        help="baseline: a variant of transformers; `bench step` shows which is fastest",
    )
    parser.add_argument("--json", action="store_true", help="print JSON at the end instead of progress lines")
    options = parser.parse_args(argv)
    result = compare(options)
    if options.json:
        print(json.dumps(result))
    return 0


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Train both in alternation. Returns the held-out MLM loss of each after every tenth of the time."""
    config = bench_config(options.corpus, options.size, options.length, options.sequences, rate=options.rate)
    kinds = {OURS: OURS, "transformers": options.peer}
    trainers = {name: TrainerProcess(TrainerSpec(kind, config)) for name, kind in kinds.items()}
    runners = {name: _Runner(trainer, options) for name, trainer in trainers.items()}
    curve: list[dict[str, Any]] = []
    while not all(runner.done() for runner in runners.values()):
        for runner in runners.values():
            runner.train_for_a_while()
        share = min(runner.share() for runner in runners.values())
        if share >= (len(curve) + 1) / 10:
            losses = {name: trainer.held_out_loss() for name, trainer in trainers.items()}
            curve.append({"minutes": share * options.minutes, **losses})
            if not options.json:
                text = "   ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
                print(f"{share * options.minutes:6.1f} min each   held-out MLM loss   {text}", flush=True)
    sequences = {name: runner.steps * options.sequences for name, runner in runners.items()}
    if not options.json:
        print(f"sequences seen: {sequences}; difference {curve[-1]['transformers'] - curve[-1]['ours']:.4f} nats")
    return {"options": vars(options), "sequences": sequences, "curve": curve}


class _Runner:
    """A trainer with its training time and its step count."""

    def __init__(self, trainer: TrainerProcess, options: argparse.Namespace):
        self._trainer, self._options = trainer, options
        self._seconds, self.steps = 0.0, 0
        # Compiles the model. A learning rate of 0 leaves the weights unchanged, and the time is not counted.
        trainer.train(0.0)

    def share(self) -> float:
        return self._seconds / (60 * self._options.minutes)

    def done(self) -> bool:
        return self.share() >= 1

    def train_for_a_while(self) -> None:
        started = time.perf_counter()
        while not self.done() and time.perf_counter() - started < TURN_SECONDS:
            self._seconds += self._trainer.train(self._rate()).seconds
            self.steps += 1

    def _rate(self) -> float:
        share = self.share()
        return self._options.rate * min(share / WARM_UP_SHARE, (1 - share) / (1 - WARM_UP_SHARE))

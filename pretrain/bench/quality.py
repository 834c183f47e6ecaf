"""`bench quality`: ours and transformers train for the same wall time on the same text; who predicts better?

Both take turns of a few seconds, so that a noisy machine disturbs both alike. Each sees the samples
of the same epoch in the same order, from the first one on; the faster one gets further. The learning rate
follows the share of the time that is used up, warm-up and linear decay, the same for both.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from pretrain.bench.contestants import OURS, PEERS, Contestant, Entry, bench_config

TURN_SECONDS = 10.0
WARM_UP_SHARE = 0.1


def main(argv: list[str]) -> int:
    """Run the comparison and print held-out losses over time, or JSON with `--json`."""
    parser = argparse.ArgumentParser(prog="./launch.sh bench quality", description=(__doc__ or "").split("\n")[0])
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
    parser.add_argument("--json", action="store_true", help="print JSON at the end instead of lines on the way")
    options = parser.parse_args(argv)
    result = compare(options)
    if options.json:
        print(json.dumps(result))
    return 0


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Train both in turns; held-out MLM loss of each after every tenth of the time."""
    config = bench_config(options.corpus, options.size, options.length, options.sequences, rate=options.rate)
    kinds = {OURS: OURS, "transformers": options.peer}
    contestants = {name: Contestant(Entry(kind, config)) for name, kind in kinds.items()}
    runners = {name: _Runner(it, options) for name, it in contestants.items()}
    curve: list[dict[str, Any]] = []
    while not all(runner.done() for runner in runners.values()):
        for runner in runners.values():
            runner.take_turn()
        share = min(runner.share() for runner in runners.values())
        if share >= (len(curve) + 1) / 10:
            losses = {name: it.held_out_loss() for name, it in contestants.items()}
            curve.append({"minutes": share * options.minutes, **losses})
            if not options.json:
                words = "   ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
                print(f"{share * options.minutes:6.1f} min each   held-out MLM loss   {words}", flush=True)
    sequences = {name: runner.steps * options.sequences for name, runner in runners.items()}
    if not options.json:
        print(f"sequences seen: {sequences}; difference {curve[-1]['transformers'] - curve[-1]['ours']:.4f} nats")
    return {"options": vars(options), "sequences": sequences, "curve": curve}


class _Runner:
    """One contestant's clock."""

    def __init__(self, contestant: Contestant, options: argparse.Namespace):
        self._contestant, self._options = contestant, options
        self._seconds, self.steps = 0.0, 0
        contestant.train(0.0)  # compiles; changes no weight and costs no time

    def share(self) -> float:
        return self._seconds / (60 * self._options.minutes)

    def done(self) -> bool:
        return self.share() >= 1

    def take_turn(self) -> None:
        began = time.perf_counter()
        while not self.done() and time.perf_counter() - began < TURN_SECONDS:
            self._seconds += self._contestant.train(self._rate()).seconds
            self.steps += 1

    def _rate(self) -> float:
        share = self.share()
        return self._options.rate * min(share / WARM_UP_SHARE, (1 - share) / (1 - WARM_UP_SHARE))

"""`bench quality`: held-out loss of ours and of transformers after equal training time on the same text.

The two trainers alternate every few seconds, so that load on the machine affects both alike. Both read the samples of
one epoch in the same order from the first one, so the faster trainer sees more samples. The learning rate depends on
the share of the training time used: warm-up, then linear decay, the same for both.

With --recipe, ours trains as a config says: its model, optimizer, masking, batch and peak rate. transformers trains
BERT or ModernBERT with AdamW, --sequences and --rate, on the same kind of sequences, 15 % masked. Both are scored on
the same held-out masks. A few steps of ours are timed first, since its weight decay and masking may depend on the
length of the run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from typing import Any

from pretrain.bench.baselines import BASELINES, OURS, TrainerProcess, TrainerSpec, bench_config
from pretrain.commands import positive_int, program
from pretrain.common.errors import InputError
from pretrain.config import PretrainConfig, load_config
from pretrain.corpus.shards import open_shards
from pretrain.model.precision import resolve_here

TURN_SECONDS = 10.0
WARM_UP_SHARE = 0.1
_TIMED_STEPS = 20


def main(argv: list[str]) -> int:
    """Run the comparison and print held-out losses over time, or JSON with `--json`."""
    parser = argparse.ArgumentParser(prog=f"{program()} bench quality", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", required=True, help="prepared corpus folder")
    parser.add_argument("--size", default="mini", help="model size (default: mini)")
    parser.add_argument("--length", type=positive_int, default=128, help="sequence length")
    parser.add_argument("--sequences", type=positive_int, default=64, help="sequences per step")
    parser.add_argument("--minutes", type=float, default=10.0, help="training time of each trainer")
    parser.add_argument("--rate", type=float, default=1e-3, help="peak learning rate of both trainers")
    parser.add_argument(
        "--peer",
        choices=BASELINES,
        default="eager",
        help="baseline: a variant of transformers; `bench step` shows which is fastest",
    )
    parser.add_argument("--recipe", metavar="CONFIG", help="ours: train as this YAML file of a pretraining says")
    parser.add_argument(
        "--peer-family", choices=("bert", "modernbert"), default="bert", help="architecture of transformers' model"
    )
    parser.add_argument("--json", action="store_true", help="print JSON at the end instead of progress lines")
    options = parser.parse_args(argv)
    if not 0 < options.minutes < math.inf:
        raise InputError(f"--minutes: {options.minutes:g}; expected a number above 0.")
    result = compare(options)
    if options.json:
        print(json.dumps(result))
    return 0


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Train both in alternation. Returns the held-out MLM loss of each after every tenth of the time."""
    ours, theirs = _configs(options)
    if not open_shards(theirs.corpus.folder, "validation").shards:
        raise InputError(
            f"--corpus: {options.corpus}: has no held-out text. Prepare one with corpus.validation_fraction."
        )
    if options.recipe:
        ours = _of_length(ours, max(2, round(60 * options.minutes / _step_seconds(ours))))
        if not options.json:
            print(f"ours: a run of {ours.total_steps:,} steps; weight decay is {ours.weight_decay:.3g}", flush=True)
    specs = {"ours": TrainerSpec(OURS, ours, held_out=theirs), "transformers": TrainerSpec(options.peer, theirs)}
    trainers = {name: TrainerProcess(spec) for name, spec in specs.items()}
    runners = {name: _Runner(trainer, options.minutes, specs[name].config) for name, trainer in trainers.items()}
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
    sequences = {name: runner.steps * specs[name].config.phases[0].global_sequences for name, runner in runners.items()}
    if not options.json:
        print(f"sequences seen: {sequences}; difference {curve[-1]['transformers'] - curve[-1]['ours']:.4f} nats")
    return {"options": vars(options), "sequences": sequences, "curve": curve}


def _configs(options: argparse.Namespace) -> tuple[PretrainConfig, PretrainConfig]:
    """What ours and transformers train: one config, or that of --recipe and a baseline on the same sequences."""
    theirs = bench_config(
        options.corpus,
        options.size,
        options.length,
        options.sequences,
        rate=options.rate,
        family=options.peer_family,
        max_positions=max(512, options.length),
    )
    if not options.recipe:
        return theirs, theirs
    recipe = load_config(options.recipe)
    _check_recipe(options.recipe, recipe)
    phase = recipe.phases[0].model_copy(
        update={"steps": theirs.phases[0].steps, "sequence_length": options.length, "ramp_from": 0, "ramp_steps": 0}
    )
    ours = recipe.model_copy(update={"corpus": theirs.corpus, "phases": (phase,), "evaluation": theirs.evaluation})
    return resolve_here(ours)[0], theirs.model_copy(update={"pairs": recipe.pairs})


def _check_recipe(path: str, recipe: PretrainConfig) -> None:
    """Raise `InputError` for settings that `EngineTrainer` lacks, or whose loss is not that of a masked token."""
    for name, value in (
        ("start_from", recipe.start_from),
        ("distillation.teacher", recipe.distillation.teacher),
        ("electra.generator_width", recipe.electra.is_on),
        ("averaging.share", recipe.averaging.share),
    ):
        if value:
            raise InputError(
                f"--recipe: {path}: {name} is set; this benchmark trains masked language modelling from random "
                "weights, and scores the last ones. Give a recipe without it."
            )


def _of_length(config: PretrainConfig, steps: int) -> PretrainConfig:
    """The config with another number of steps, over which its weight decay and its masking are reckoned."""
    return config.model_copy(update={"phases": (config.phases[0].model_copy(update={"steps": steps}),)})


def _step_seconds(config: PretrainConfig) -> float:
    """Seconds of one step of ours, the median of a few."""
    trainer = TrainerProcess(TrainerSpec(OURS, config))
    trainer.train(0.0)  # compiles the model
    seconds = statistics.median(trainer.train(0.0).seconds for _ in range(_TIMED_STEPS))
    trainer.close()
    return seconds


class _Runner:
    """A trainer with its training time and its step count. It ends with its time, or with the steps of its config."""

    def __init__(self, trainer: TrainerProcess, minutes: float, config: PretrainConfig) -> None:
        self._trainer, self._minutes = trainer, minutes
        self._peak, self._most = config.phases[0].peak_learning_rate, config.total_steps
        self._seconds, self.steps = 0.0, 0
        # Compiles the model. A learning rate of 0 leaves the weights unchanged, and the time is not counted.
        trainer.train(0.0)

    def share(self) -> float:
        return max(self._seconds / (60 * self._minutes), (self.steps + 1) / self._most)  # one step was untimed

    def done(self) -> bool:
        return self.share() >= 1

    def train_for_a_while(self) -> None:
        started = time.perf_counter()
        while not self.done() and time.perf_counter() - started < TURN_SECONDS:
            self._seconds += self._trainer.train(self._rate()).seconds
            self.steps += 1

    def _rate(self) -> float:
        share = self.share()
        return self._peak * min(share / WARM_UP_SHARE, (1 - share) / (1 - WARM_UP_SHARE))

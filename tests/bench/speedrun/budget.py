"""Converts a FLOP budget to steps; the phases of a config keep their proportions.

The cost of a sequence is measured on batches of the prepared corpus, whose sequences differ in length. FLOPs are
the objective's `executed_flops` and `pretrain.planning.work.optimizer_flops`: of training, not of evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.batches.loader import BatchMaker
from pretrain.common.errors import InputError
from pretrain.config import ModelConfig, PhaseConfig, PretrainConfig
from pretrain.corpus.shards import open_shards
from pretrain.objectives import make_objective
from pretrain.planning import pace, work

MAX_EPOCHS = 10.0
TOLERANCE = 0.01  # maximum difference between the FLOPs of a run and its budget, as a share of the budget
_MEASURED = 4096  # number of sequences of each phase to measure, evenly spaced


@dataclass(frozen=True)
class SequenceCost:
    """Mean FLOPs and tokens per sequence of one phase, and its number of samples per epoch."""

    flops: float
    tokens: float
    samples_per_epoch: int


@dataclass(frozen=True)
class Plan:
    """A run that spends a budget."""

    phases: tuple[PhaseConfig, ...]  # phases of the config, scaled to the budget
    phase_flops: tuple[float, ...]  # FLOPs of each phase; the sum is within `TOLERANCE` of the budget
    phase_tokens: tuple[float, ...]  # number of tokens of each phase
    epochs: float  # number of passes over the corpus

    @property
    def flops(self) -> float:
        return sum(self.phase_flops)

    @property
    def tokens(self) -> float:
        return sum(self.phase_tokens)

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def sequences(self) -> int:
        return sum(phase.sequences for phase in self.phases)

    def flops_of(self, tokens: float) -> float:
        """Return the FLOPs of the first `tokens` of the run; further tokens cost as much as in the last phase."""
        *earlier, last = zip(self.phase_flops, self.phase_tokens, strict=True)
        flops = 0.0
        for phase_flops, phase_tokens in earlier:
            read = min(tokens, phase_tokens)
            flops, tokens = flops + read * phase_flops / phase_tokens, tokens - read
        return flops + tokens * last[0] / last[1]


def measured_costs(config: PretrainConfig, teacher: ModelConfig | None) -> list[SequenceCost]:
    """Return the cost per sequence of each phase, measured on batches of the config's prepared corpus."""
    shards = open_shards(config.corpus.folder, "train")
    rows = config.model.rows(shards.vocabulary_size)
    counted = make_objective(config, rows, teacher)
    costs = []
    for number, phase in enumerate(config.phases):
        maker = BatchMaker(shards, config, number, seed=config.seed, rank=0, world_size=1)
        maker.check_batch()
        flops, tokens, sequences, size = 0.0, 0, 0, phase.global_sequences
        parts = max(1, min(_MEASURED // size, phase.sequences // size))
        for part in range(parts):
            step = maker.make((phase.sequences - size) * part // max(1, parts - 1), size)
            tokens, sequences = tokens + step.tokens, sequences + step.sequences
            flops += sum(counted.executed_flops(batch.real_lengths, batch.targets) for batch in step.micro_batches)
        costs.append(SequenceCost(flops / sequences, tokens / sequences, maker.samples_per_epoch))
    return costs


def plan_budget(config: PretrainConfig, budget: float, costs: Sequence[SequenceCost]) -> Plan:
    """Return the config's phases, scaled to cost `budget` FLOPs.

    Raises `InputError` if steps are too large to meet the budget within `TOLERANCE`, or the text would be read more
    than `MAX_EPOCHS` times.
    """
    plan = _plan(pace.scale(config, budget / _plan(config, costs).flops), costs)
    if abs(plan.flops - budget) > TOLERANCE * budget:
        raise InputError(
            f"--budget {budget:g}: {plan.steps:,} steps come to {plan.flops:.4g} FLOP, not within {TOLERANCE:.0%}. "
            "Raise the budget, or lower phases.*.global_sequences."
        )
    if plan.epochs > MAX_EPOCHS:
        raise InputError(
            f"--budget {budget:g}: {plan.steps:,} steps read the text {plan.epochs:.1f} times; {MAX_EPOCHS:g} are "
            f"allowed, which cost {budget * MAX_EPOCHS / plan.epochs:.3g} FLOP. Lower the budget, or train a larger "
            "model."
        )
    return plan


def _plan(config: PretrainConfig, costs: Sequence[SequenceCost]) -> Plan:
    pairs = list(zip(config.phases, costs, strict=True))
    return Plan(
        config.phases,
        tuple(phase.sequences * cost.flops + phase.steps * work.optimizer_flops(config) for phase, cost in pairs),
        tuple(phase.sequences * cost.tokens for phase, cost in pairs),
        sum(phase.sequences / cost.samples_per_epoch for phase, cost in pairs),
    )

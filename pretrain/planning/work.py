"""The work of a run: sequences, tokens and FLOPs of its phases, by arithmetic alone. No torch is needed.

`pretrain/model/cost.py` has the FLOPs of an architecture. Here are those of a run's objective: with a teacher or a
generator, with what the backward pass computes again, and with the optimizer's. All counts are of matrix products, 2
FLOPs for each multiply-add. They depend on the config and the text, never on the machine: no padding is counted, and a
local layer counts the keys within its windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.config import ModelConfig, PhaseConfig, PretrainConfig
from pretrain.model import cost

# Mean tokens of a sequence by its length, where no corpus is prepared that tells.
ASSUMED_FILL = 0.8


def models(config: PretrainConfig) -> list[ModelConfig]:
    """The architectures that the run trains: the model's, and that of ELECTRA's generator."""
    return [config.model, *([config.electra.generator(config.model)] if config.electra.is_on else [])]


def expected_length(phase: PhaseConfig) -> float:
    """Mean tokens per sequence that are assumed without a prepared corpus; short documents have a lower mean."""
    return phase.sequence_length * ASSUMED_FILL


@dataclass(frozen=True)
class Flops:
    """FLOPs of one forward and backward pass over sequences, counted in three ways.

    Args of each: `lengths`, the tokens of each sequence; `masked`, the tokens to predict. Both models of ELECTRA count,
    and the forward pass of a distillation's teacher, if its shape is given.
    """

    config: PretrainConfig
    vocabulary: int  # rows of the word embeddings
    teacher: ModelConfig | None = None

    def useful(self, lengths: Sequence[float], masked: float) -> float:
        """As `cost.flops`: no padding, no recomputation, and the last layer whole."""
        config = self.config
        if config.electra.is_on:
            return cost.electra_flops(config.model, config.electra, self.vocabulary, lengths, masked)
        own = cost.flops(config.model, self.vocabulary, lengths, masked, config.pairs.has_classifier)
        return own + self._of_teacher(lengths, masked)

    def of_models(self, lengths: Sequence[float], masked: float) -> float:
        """What MFU counts: as `useful`, without the rows that the last layers skip."""
        config = self.config
        if config.electra.is_on:
            return self.useful(lengths, masked)
        if not config.distillation.teacher:
            return cost.executed_flops(config.model, self.vocabulary, lengths, masked, config.pairs.has_classifier)
        own = cost.encoder_flops(config.model, lengths, self._rows(lengths, masked))
        pairs = len(lengths) if config.pairs.has_classifier else 0
        return own + cost.head_flops(config.model, self.vocabulary, masked, pairs) + self._of_teacher(lengths, masked)

    def executed(self, lengths: Sequence[float], masked: float) -> float:
        """What is executed: `of_models`, and what the backward pass computes again.

        What an optimizer step adds is in `optimizer_flops`.
        """
        checkpointing = self.config.engine.activation_checkpointing
        return self.of_models(lengths, masked) + self._again(lengths, masked, checkpointing=checkpointing)

    def repeated(self, lengths: Sequence[float], masked: float) -> float:
        """What activation checkpointing adds to `executed`; 0 without it."""
        if not self.config.engine.activation_checkpointing:
            return 0.0
        with_it, without = (self._again(lengths, masked, checkpointing=one) for one in (True, False))
        return with_it - without

    def _again(self, lengths: Sequence[float], masked: float, *, checkpointing: bool) -> float:
        """What the backward pass computes again."""
        config, rows = self.config, self._rows(lengths, masked)
        again = cost.recomputed_flops(config.model, lengths, rows, checkpointing=checkpointing)
        if config.electra.is_on:
            generator = config.electra.generator(config.model)
            again += cost.recomputed_flops(generator, lengths, masked, checkpointing=checkpointing)
        return again

    def _rows(self, lengths: Sequence[float], masked: float) -> float:
        """Query positions of the last layer of the model that is trained."""
        config = self.config
        pooled = config.pairs.has_classifier and config.model.pooling != "cls"
        if config.distillation.teacher:
            every_row = config.distillation.cosine_weight > 0 or config.pairs.has_classifier
            return sum(lengths) if every_row else masked
        return sum(lengths) if config.electra.is_on or pooled else masked + len(lengths)

    def _of_teacher(self, lengths: Sequence[float], masked: float) -> float:
        if self.teacher is None:
            return 0.0
        every_row = self.config.distillation.cosine_weight > 0
        return cost.teacher_flops(self.teacher, self.vocabulary, lengths, masked, every_row=every_row)


def optimizer_flops(config: PretrainConfig) -> float:
    """FLOPs of the matrix products of one optimizer step, over all workers: Muon's. Other optimizers have none."""
    if config.optimizer.name != "muon":
        return 0.0
    return float(sum(cost.orthogonalization_flops(model) for model in models(config)))


@dataclass(frozen=True)
class Work:
    """Totals of one phase."""

    steps: int
    sequences: int
    tokens: float
    mean_length: float
    masked: float  # predicted tokens of a mean sequence
    flops: float  # useful
    executed: float  # with the optimizer's
    repeated: float  # of these, what activation checkpointing adds


def phase_work(
    config: PretrainConfig,
    phase: PhaseConfig,
    vocabulary: int,
    mean_length: float | None = None,
    teacher: ModelConfig | None = None,
) -> Work:
    """Sequences, tokens and FLOPs of a phase; all lengths are assumed to equal the mean."""
    mean = min(mean_length or expected_length(phase), phase.sequence_length)
    number = next(n for n, one in enumerate(config.phases) if one is phase)
    share = sum(config.masking_shares(number)) / 2
    most = phase.max_predictions or round(share * phase.sequence_length)
    masked = min(share * mean, most)
    sequences = phase.sequences
    flops = Flops(config, vocabulary, teacher)
    useful, repeated = (sequences * count([mean], masked) for count in (flops.useful, flops.repeated))
    executed = sequences * flops.executed([mean], masked) + phase.steps * optimizer_flops(config)
    return Work(phase.steps, sequences, sequences * mean, mean, masked, useful, executed, repeated)

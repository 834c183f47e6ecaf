"""Settings of the schedule: optimizer, phases with their learning rates, evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pretrain.common.sections import LocalPath, Section


class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["adamw", "stable_adamw", "lamb", "muon"] = Field(
        default="adamw",
        description="Optimizer. adamw (Loshchilov and Hutter 2019); stable_adamw clips updates per tensor (Wortsman et "
        "al. 2023; ModernBERT's; set engine.gradient_clip_norm to 0); lamb scales updates per tensor, for large "
        "batches (You et al. 2020); muon orthogonalizes the momentum of the layers' matrices and uses adamw for the "
        "rest (Jordan et al. 2024, Liu et al. 2025).",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay rate of the first moment.")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="Decay rate of the second moment.")
    epsilon: float = Field(default=1e-6, gt=0, description="Number added to the square root of the second moment.")
    weight_decay: float = Field(
        default=0.01, ge=0, description="Decoupled weight decay. Biases and LayerNorm are exempt. 0 disables it."
    )

    muon_lr_scale: float = Field(
        default=1.0,
        gt=0,
        description="Only for muon: learning rate of the layers' matrices, as a multiple of the phase's. Updates are "
        "as large as with adamw, so 1 suits most runs.",
    )

    @model_validator(mode="after")
    def _check_muon(self) -> OptimizerConfig:
        if self.name != "muon" and self.muon_lr_scale != 1:
            raise ValueError(f"muon_lr_scale has no effect with name: {self.name}. Remove it, or set name: muon")
        return self


class PretrainOptimizerConfig(OptimizerConfig):
    """The optimizer of a pretraining run."""

    decay_timescale: float = Field(
        default=0.0,
        ge=0,
        description="Weight decay given as its timescale, a fraction of the steps up to the end of the phase: after "
        "that many steps at the peak rate, the decay has multiplied the layers' matrices by 1/e (Wang and Aitchison "
        "2024). It suits runs of any length, whereas a longer run needs a smaller weight_decay. A timescale below one "
        "step is treated as one step. A value above 0 replaces weight_decay.",
    )

    def decay_over(self, phases: Sequence[PhaseConfig]) -> float:
        """Return the decoupled weight decay of the last of `phases`, from `weight_decay` or `decay_timescale`.

        In a step at the learning rate r, a decay d multiplies weights by 1 - d r (Wang and Aitchison 2024,
        arXiv:2405.13698, section 3). The timescale assumes the peak rate of each phase in all of its steps.
        """
        if not self.decay_timescale:
            return self.weight_decay
        summed_rates = sum(phase.steps * phase.peak_learning_rate for phase in phases)
        highest_rate = max(phase.peak_learning_rate for phase in phases) * max(1.0, self.muon_lr_scale)
        # With a larger decay, a step could change the sign of a weight, and increase it.
        return min(1 / (self.decay_timescale * summed_rates * self.muon_lr_scale), 1 / highest_rate)


class PhaseConfig(Section):
    """A part of training with one sequence length and one learning-rate schedule."""

    sequence_length: int = Field(ge=8, description="Maximum length of a sequence in tokens, special tokens included.")
    global_sequences: int = Field(ge=1, le=1 << 20, description="Sequences per optimizer step, over all workers.")
    ramp_from: int = Field(
        default=0,
        ge=0,
        description="Sequences per step at the start; a divisor of global_sequences. Batches grow by this number at a "
        "time, with equally many steps at each size (ModernBERT, Warner et al. 2024). 0: no ramp.",
    )
    ramp_steps: int = Field(
        default=0, ge=0, description="Steps until batches have global_sequences: at least one per size, at most steps."
    )
    steps: int = Field(ge=1, le=10**9, description="Optimizer steps of this phase.")
    peak_learning_rate: float = Field(gt=0, description="Learning rate at the end of the warm-up.")
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Number of steps of linear warm-up, at most steps. The n-th has n/warmup_steps of the peak rate. "
        "0 starts at the peak rate.",
    )
    decay: Literal["linear", "polynomial", "1-sqrt", "constant"] = Field(
        default="linear",
        description="Decay of the learning rate after the warm-up. polynomial has power 0.5, as in NVIDIA's recipe "
        "for LAMB; 1-sqrt (Hägele et al. 2024) is the decay of ModernBERT's last phase.",
    )
    decay_steps: int = Field(
        default=0,
        ge=0,
        description="Number of steps at the end of the phase in which the learning rate decays; before them it stays "
        "at the peak (warm-up, stable, decay). 0 decays from the end of the warm-up on.",
    )
    final_learning_rate: float = Field(
        default=0.0, ge=0, description="Learning rate at the end of the phase; unused if decay is constant."
    )
    max_predictions: int = Field(
        default=0,
        ge=0,
        description="Maximum masked tokens per sequence. 0 means sequence_length x the current masking probability.",
    )
    weights: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="Weights of sources in this phase by their names on the corpus card, instead of "
        "corpus.sources.*.weight, such as {wiki: 2, books: 0.5}. 0 drops a source; unnamed sources keep theirs. "
        "Evaluations keep the weights of the corpus.",
    )
    temperature: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="A source gets tokens in proportion to weight x size^temperature. With 1, weights are epochs; with "
        "0, shares of the tokens, such as {wiki: 0.7, books: 0.3}, and unnamed sources are dropped; values between "
        "favor small sources (0.3 is XLM-R's).",
    )
    max_epochs: float = Field(
        default=0.0,
        ge=0,
        description="Maximum epochs of a source from the start of the run to the end of this phase. A source that "
        "reaches it is replaced by the others, in proportion; if weights name it, this is an error. 0: no limit.",
    )
    masking_probability: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of each sequence's tokens to predict in this phase; 0.3 and then 0.15 is Ettin's schedule. "
        "0 means masking.probability.",
    )
    final_masking_probability: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the tokens to predict at the end of the phase: it changes linearly, such as from 0.3 to "
        "0.15 (Ankner et al. 2023). 0 keeps the share.",
    )
    weight_decay: float | None = Field(
        default=None, ge=0, description="Weight decay of this phase. Empty means the optimizer's."
    )
    averaged_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of steps at the end of the phase whose weights are averaged, such as 0.2 (Izmailov et al. "
        "2018). Their checkpoints contain the mean in fp32; export --averaged exports it. 0 disables it.",
    )
    rotary_base: float = Field(
        default=0.0,
        ge=0,
        description="Rotary base in this phase, raised with sequence_length to extend the context: ModernBERT goes "
        "from 1e4 to 1.6e5 (Warner et al. 2024). 0 means the model's. Exports have the last phase's.",
    )
    local_rotary_base: float = Field(
        default=0.0, ge=0, description="Rotary base of local layers in this phase. 0 means the model's."
    )

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Return the batch sizes of this phase in sequences per step, ascending."""
        if not self.ramp_from:
            return (self.global_sequences,)
        return tuple(range(self.ramp_from, self.global_sequences + 1, self.ramp_from))

    @property
    def sequences(self) -> int:
        """Return the total number of sequences of the phase."""
        return self.first_sample(self.steps)

    def sequences_at(self, step: int) -> int:
        """Return the number of sequences in the batch of the 0-based `step`."""
        if step >= self.ramp_steps:
            return self.global_sequences
        return self.ramp_from * (1 + step * (len(self.batch_sizes) - 1) // self.ramp_steps)

    def first_sample(self, step: int) -> int:
        """Return the index of the first sample in the 0-based `step`: the number of sequences before that step."""
        ramp_step = min(step, self.ramp_steps)
        ramp_sizes = self.batch_sizes[:-1]
        starts = [-(-i * self.ramp_steps // len(ramp_sizes)) for i in range(len(ramp_sizes))] + [self.ramp_steps]
        ramp_sequences = sum(
            size * (min(ramp_step, end) - min(ramp_step, start))
            for size, start, end in zip(ramp_sizes, starts, starts[1:], strict=False)
        )
        return ramp_sequences + (step - ramp_step) * self.global_sequences

    @model_validator(mode="after")
    def _check_ramp(self) -> PhaseConfig:
        if bool(self.ramp_from) != bool(self.ramp_steps):
            raise ValueError(
                f"ramp_from ({self.ramp_from}) and ramp_steps ({self.ramp_steps}) go together; set both, or none"
            )
        if not self.ramp_from:
            return self
        if self.ramp_from >= self.global_sequences or self.global_sequences % self.ramp_from:
            raise ValueError(
                f"ramp_from ({self.ramp_from}) must divide global_sequences ({self.global_sequences}) and be smaller"
            )
        if not len(self.batch_sizes) - 1 <= self.ramp_steps <= self.steps:
            raise ValueError(
                f"ramp_steps ({self.ramp_steps}) must be at least {len(self.batch_sizes) - 1}, one for each size from "
                f"ramp_from on, and at most steps ({self.steps})"
            )
        return self

    @model_validator(mode="after")
    def _check_steps(self) -> PhaseConfig:
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must not exceed steps ({self.steps})")
        if self.decay_steps and self.decay == "constant":
            raise ValueError(f"decay_steps ({self.decay_steps}) has no effect with decay: constant. Set it to 0")
        if self.decay_steps and self.warmup_steps + self.decay_steps > self.steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and decay_steps ({self.decay_steps}) must not exceed steps "
                f"({self.steps}) together"
            )
        return self


class ProbesConfig(Section):
    """Scores of checkpoints, measured by a separate process during the run."""

    texts: tuple[LocalPath, ...] = Field(
        default=(),
        description="Files or folders of held-out text, as in evaluate-pretrained --texts: loss per masked token.",
    )
    common_words: bool = Field(default=False, description="Also score common English words in texts: bits per word.")
    blimp: LocalPath = Field(
        default="", description="Folder with BLiMP's .jsonl files; the first 20 pairs of each are scored."
    )
    threads: int = Field(default=1, ge=1, description="CPU cores of the launching machine to use, at lowest priority.")

    @property
    def is_on(self) -> bool:
        """Return whether checkpoints are scored."""
        return bool(self.texts or self.blimp)

    @model_validator(mode="after")
    def _check_texts(self) -> ProbesConfig:
        if self.common_words and not self.texts:
            raise ValueError("common_words needs texts, in which it scores the words. Add some")
        return self


class EvaluationConfig(Section):
    """Evaluation on held-out sequences during pretraining."""

    every_steps: int = Field(
        default=1000, ge=1, description="Optimizer steps between evaluations, and between checkpoints that are scored."
    )
    sequences: int = Field(default=1024, ge=1, description="Number of held-out sequences, the same in each evaluation.")
    probes: ProbesConfig = Field(default=ProbesConfig(), description="Scores of checkpoints during the run.")

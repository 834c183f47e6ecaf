"""Settings of the schedule: optimizer, phases with their learning rates, evaluation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pretrain.common.settings import Section


class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["adamw", "stable_adamw", "lamb", "muon"] = Field(
        default="adamw",
        description="Optimizer. adamw (Loshchilov and Hutter 2019); stable_adamw clips updates per tensor (Wortsman et "
        "al. 2023, ModernBERT's; use it with engine.gradient_clip_norm: 0); lamb scales updates per tensor, for large "
        "batches (You et al. 2020); muon orthogonalises the momentum of the layers' matrices and takes adamw for the "
        "rest (Jordan et al. 2024, Liu et al. 2025).",
    )
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay rate of the first moment.")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="Decay rate of the second moment.")
    epsilon: float = Field(default=1e-6, gt=0, description="Added to the square root of the second moment.")
    weight_decay: float = Field(
        default=0.01, ge=0, description="Decoupled weight decay. Biases and LayerNorm are exempt. 0 disables it."
    )

    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Only muon: decay rate of the momentum.")
    muon_rate: float = Field(
        default=1.0,
        gt=0,
        description="Only muon: learning rate of the layers' matrices, as a multiple of the phase's. Updates are as "
        "large as those of adamw, so 1 suits most runs.",
    )


class PhaseConfig(Section):
    """A part of training with one sequence length and one learning-rate schedule."""

    sequence_length: int = Field(ge=8, description="Length of the longest sequence in tokens, special tokens included.")
    global_sequences: int = Field(ge=1, description="Sequences per optimizer step, over all workers.")
    steps: int = Field(ge=1, description="Optimizer steps of this phase.")
    peak_learning_rate: float = Field(gt=0, description="Learning rate at the end of the warm-up.")
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Steps of linear warm-up, at most steps. Step n of them has n/warmup_steps of the peak rate. "
        "0 starts at the peak rate.",
    )
    decay: Literal["linear", "polynomial", "1-sqrt", "constant"] = Field(
        default="linear",
        description="Decay of the learning rate after the warm-up. 1-sqrt is that of ModernBERT's last phase (Hägele "
        "et al. 2024).",
    )
    decay_steps: int = Field(
        default=0,
        ge=0,
        description="Last steps of the phase, in which the learning rate decays; before them it stays at the peak "
        "(warm-up, stable, decay). 0 decays from the end of the warm-up on.",
    )
    decay_power: float = Field(
        default=0.5, gt=0, description="Exponent of the polynomial decay. NVIDIA's LAMB recipe uses 0.5."
    )
    final_learning_rate: float = Field(
        default=0.0, ge=0, description="Learning rate at the end of the phase; unused if decay is constant."
    )
    max_predictions: int = Field(
        default=0,
        ge=0,
        description="Most masked tokens per sequence. 0 means masking.probability x sequence_length.",
    )

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


class EvaluationConfig(Section):
    """Evaluation on held-out sequences during pretraining."""

    every_steps: int = Field(default=1000, ge=1, description="Optimizer steps between evaluations.")
    sequences: int = Field(default=1024, ge=1, description="Held-out sequences per evaluation, always the same ones.")

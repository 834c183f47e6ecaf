"""Settings of the schedule: optimizer, phases with their learning rates, evaluation."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pretrain.common.settings import Section


class OptimizerConfig(Section):
    """The optimizer."""

    name: Literal["adamw", "lamb"] = Field(default="adamw", description="Optimizer.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay rate of the first moment.")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="Decay rate of the second moment.")
    epsilon: float = Field(default=1e-6, gt=0, description="Added to the square root of the second moment.")
    weight_decay: float = Field(
        default=0.01, ge=0, description="Decoupled weight decay. Biases and LayerNorm are exempt. 0 disables it."
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
    decay: Literal["linear", "polynomial", "constant"] = Field(
        default="linear", description="Decay of the learning rate after the warm-up."
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
    masking_probability: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of each sequence's tokens to predict in this phase; 0.3 and then 0.15 is Ettin's schedule. "
        "0 follows masking.",
    )
    causal_share: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of the sequences in which every token is predicted from those before it, with causal "
        "attention; the others are masked. GPT-BERT has 1/16 to 1/8 (Charpentier and Samuel 2024); 1 makes a causal "
        "phase, such as a first one before a masked one. It needs pairs.objective: none.",
    )

    @property
    def sequences(self) -> int:
        """Sequences of the whole phase."""
        return self.steps * self.global_sequences

    @model_validator(mode="after")
    def _check_steps(self) -> PhaseConfig:
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must not exceed steps ({self.steps})")
        return self


class EvaluationConfig(Section):
    """Evaluation on held-out sequences during pretraining."""

    every_steps: int = Field(default=1000, ge=1, description="Optimizer steps between evaluations.")
    sequences: int = Field(default=1024, ge=1, description="Held-out sequences per evaluation, always the same ones.")

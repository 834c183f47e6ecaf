"""Settings of objectives besides masked language modelling: a teacher to learn from."""

from __future__ import annotations

from itertools import pairwise

from pydantic import Field, model_validator

from pretrain.common.settings import LocalPath, Section


class DistillationConfig(Section):
    """Knowledge distillation (Sanh et al. 2019, "DistilBERT", arXiv:1910.01108, section 2)."""

    teacher: LocalPath = Field(
        default="",
        description="Folder of the teacher: a released model, an export or a run, with the corpus's vocabulary and a "
        "head for masked language modelling. Empty trains without a teacher.",
    )
    initialise: bool = Field(
        default=True,
        description="Begin with the teacher's embeddings, heads and some of its layers. false begins with random "
        "weights; the teacher may then have another shape.",
    )
    layers: tuple[int, ...] = Field(
        default=(),
        description="The teacher's layer, counted from 0, that each layer of the student begins with. Empty spreads "
        "them evenly from the first to the last: 0, 2, 4, 7, 9, 11 for 6 of 12, as DistilBERT.",
    )
    temperature: float = Field(
        default=2.0, gt=0, description="Temperature by which both models' scores are divided for the soft targets."
    )
    soft_weight: float = Field(
        default=5.0,
        ge=0,
        description="Weight of the divergence from the teacher's predictions at the masked tokens.",
    )
    mlm_weight: float = Field(default=2.0, ge=0, description="Weight of the masked language modelling loss.")
    cosine_weight: float = Field(
        default=1.0,
        ge=0,
        description="Weight of the cosine distance between the last hidden states of both models. It needs equal "
        "widths; 0 leaves it out.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> DistillationConfig:
        if not self.soft_weight + self.mlm_weight + self.cosine_weight:
            raise ValueError("soft_weight, mlm_weight and cosine_weight are all 0: nothing would be learned")
        if self.layers and not self.initialise:
            raise ValueError(f"layers ({list(self.layers)}) has no effect with initialise: false. Remove one of them")
        if self.layers and (self.layers[0] < 0 or any(later <= layer for layer, later in pairwise(self.layers))):
            raise ValueError(f"layers ({list(self.layers)}) must be numbers from 0 in ascending order")
        return self

"""Settings of objectives besides masked language modeling: distillation and ELECTRA."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

from pydantic import Field, model_validator

from pretrain.common.sections import Location, Section
from pretrain.config.model import ModelConfig

OBJECTIVE_FILE_SETTINGS = ("distillation.teacher",)
"""Settings that are paths of objectives' files. A resumed run may change them, since it compares the contents."""


class DistillationConfig(Section):
    """Knowledge distillation (Sanh et al. 2019, "DistilBERT", arXiv:1910.01108, section 2)."""

    teacher: Location = Field(
        default="",
        description="Folder or address of the teacher: a released model, an export or a run, with the corpus's "
        "vocabulary and a head for masked language modeling. Empty trains without a teacher.",
    )
    initialize: bool = Field(
        default=True,
        description="Start from the teacher's embeddings, heads and some of its layers. false starts from random "
        "weights; the teacher may then have another shape. With another hidden width, the cosine loss is omitted.",
    )
    layers: tuple[int, ...] = Field(
        default=(),
        description="For each layer of the student, the 0-based index of the teacher's layer that initializes it. "
        "Empty spreads them evenly from first to last: 0, 2, 4, 7, 9, 11 for 6 of 12 layers, as in DistilBERT.",
    )

    @model_validator(mode="after")
    def _check_together(self) -> DistillationConfig:
        if self.layers and not self.initialize:
            raise ValueError(f"layers ({list(self.layers)}) has no effect with initialize: false. Remove one of them")
        if self.layers and (self.layers[0] < 0 or any(later <= layer for layer, later in pairwise(self.layers))):
            raise ValueError(f"layers ({list(self.layers)}) must be numbers from 0 in ascending order")
        return self


class ElectraConfig(Section):
    """Replaced-token detection (Clark et al. 2020, "ELECTRA", arXiv:2003.10555, section 2)."""

    generator_width: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Width of the generator as a share of the model's; the model becomes the discriminator. ELECTRA "
        "uses 0.25, for its base size 1/3. 0: no generator, and the model itself predicts masked tokens.",
    )
    generator_depth: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Number of layers of the generator as a share of the model's. DeBERTa-v3 uses 0.5 at full width.",
    )
    rtd_weight: float = Field(default=50.0, ge=0, description="Weight of the discriminator's loss; DeBERTa-v3's is 10.")
    embeddings: Literal["shared", "disentangled"] = Field(
        default="shared",
        description="shared uses one set of tables for both models. disentangled adds trained differences to the "
        "generator's words and positions, which get no gradient from the discriminator (DeBERTa-v3).",
    )

    @property
    def is_on(self) -> bool:
        """Return whether a run trains a generator and a discriminator."""
        return self.generator_width > 0

    def generator(self, model: ModelConfig) -> ModelConfig:
        """Return the generator's shape for the discriminator `model` (google-research/electra, get_generator_config).

        The heads are as wide as the discriminator's if the generator's width allows that, and the embeddings have the
        discriminator's width. Raises `ValueError` if the generator's settings are inconsistent, such as rotary
        positions with an odd head width.
        """
        hidden, embedding = max(1, round(model.hidden * self.generator_width)), model.embedding or model.hidden
        heads = max(1, hidden // model.head_width)
        while hidden % heads:
            heads -= 1
        changes = {
            "size": "custom",
            "layers": max(1, round(model.layers * self.generator_depth)),
            "hidden": hidden,
            "heads": heads,
            "kv_heads": 0,
            "intermediate": max(1, round(model.intermediate * hidden / model.hidden)),
            "embedding": embedding if embedding != hidden else 0,
            "attention_init": "normal",
        }
        return ModelConfig.model_validate({**model.model_dump(), **changes})

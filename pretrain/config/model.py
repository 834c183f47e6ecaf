"""Settings of the model: the shape of the encoder, dropout and initialisation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from pretrain.common.settings import Section

# The widths and lengths up to which the dropout seeds are distinct in int32 (model/hash_rng.py, ALONG).
MAX_WIDTH = 8192

# google-research/bert README.md (the 24 smaller models) and Devlin et al. section 3: layers, hidden, heads.
_SIZES = {
    "mini": (4, 256, 4),
    "small": (4, 512, 8),
    "medium": (8, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
}


class ModelConfig(Section):
    """Shape of the encoder. `size` provides the values that are not given."""

    size: Literal["mini", "small", "medium", "base", "large", "custom"] = Field(
        default="base",
        description="Standard BERT size, which sets layers, hidden and heads. custom needs all three.",
    )
    layers: int = Field(default=0, ge=0, description="Number of Transformer layers. 0 takes it from size.")
    hidden: int = Field(
        default=0, ge=0, le=MAX_WIDTH, description="Hidden size; a multiple of heads. 0 takes it from size."
    )
    heads: int = Field(default=0, ge=0, description="Number of attention heads. 0 takes it from size.")
    intermediate: int = Field(default=0, ge=0, description="Width of the feed-forward layers. 0 means 4 x hidden.")
    max_positions: int = Field(
        default=512,
        ge=8,
        le=MAX_WIDTH,
        description="Number of learned position embeddings: the longest sequence in tokens.",
    )
    embedding: int = Field(
        default=0,
        ge=0,
        le=MAX_WIDTH,
        description="Width of the embeddings, if they are projected to hidden as in ELECTRA. 0 means hidden. "
        "Only for released models: pretraining needs 0.",
    )
    # The default is that of google-research/bert modeling.py, layer_norm; torch and RoBERTa use 1e-5.
    layer_norm_eps: float = Field(
        default=1e-12, gt=0, le=0.1, description="Epsilon of LayerNorm, added to the variance."
    )
    hidden_dropout: float = Field(
        default=0.1,
        ge=0,
        lt=1,
        description="Dropout probability after the embeddings, the attention output and the feed-forward layers. "
        "0 disables it.",
    )
    attention_dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Dropout probability of the attention weights. 0 disables it. "
        "On CUDA the attention kernel generates the random numbers.",
    )
    init_std: float = Field(
        default=0.02,
        gt=0,
        description="Standard deviation of the initial weights, a normal distribution truncated at two deviations.",
    )
    attention_init: Literal["normal", "neighbours"] = Field(
        default="normal",
        description="Initialisation of attention. normal is BERT's. neighbours initialises the heads to attend to "
        "adjacent tokens, which helps short runs; it needs an even head width.",
    )
    norm: str = Field(default="layer_norm", description="Norm of embeddings, layers and heads: layer_norm.")
    activation: str = Field(default="gelu", description="Activation of the feed-forward network: gelu, relu or tanh.")

    @model_validator(mode="before")
    @classmethod
    def _fill_from_size(cls, values: Any) -> Any:
        if isinstance(values, dict):
            values = dict(values)
            size = values.get("size", "base")
            shape = _SIZES.get(size, (0, 0, 0)) if isinstance(size, str) else (0, 0, 0)
            for key, value in zip(("layers", "hidden", "heads"), shape, strict=True):
                if not values.get(key):
                    values[key] = value
            if not values.get("intermediate") and isinstance(values.get("hidden"), int):
                values["intermediate"] = 4 * values["hidden"]
        return values

    @model_validator(mode="after")
    def _check_shape(self) -> ModelConfig:
        if min(self.layers, self.hidden, self.heads) < 1:
            raise ValueError("size: custom needs layers, hidden and heads")
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if self.attention_init == "neighbours" and self.embedding not in (0, self.hidden):
            raise ValueError(
                f"attention_init: neighbours needs embedding ({self.embedding}) to be 0 or hidden ({self.hidden})"
            )
        if self.attention_init == "neighbours" and self.hidden // self.heads % 2:
            raise ValueError(
                f"attention_init: neighbours needs an even head width, not {self.hidden // self.heads} (hidden / heads)"
            )
        return self

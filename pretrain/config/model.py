"""Settings of the model: the shape of the encoder, dropout and initialization."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from pretrain.common.kinds import did_you_mean
from pretrain.common.sections import Section
from pretrain.config.families import FAMILY_SETTINGS, FAMILY_TITLES, SIZES, PublishedSize

# Up to this width, the column offsets of dropout seeds fit into int32 (model/kernels/hash_rng.py, COLUMN_STEP).
MAX_WIDTH = 8192
# More layers than any encoder has (Wang et al. 2022, DeepNet: 1,000), to find a typo before the model is built.
MAX_LAYERS = 1024
MAX_ROWS = 1 << 24  # maximum number of rows of the word embeddings
# Head widths that torch's flash kernel supports without padding (pytorch,
# transformers/cuda/flash_attn/flash_api.cpp, mha_varlen_fwd).
FLASH_WIDTHS = range(8, 257, 8)
Positions = Literal["learned", "sinusoidal", "rotary", "rotary_interleaved", "relative", "disentangled", "none"]


class ModelConfig(Section):
    """Shape of the encoder. `family` and `size` provide the missing values."""

    family: Literal["bert", "roberta", "modernbert", "eurobert", "nomic_bert", "gte", "deberta"] = Field(
        default="bert",
        description="Architecture: sets the parts of the block, from norm to pooling. Each part can be replaced. "
        "roberta is BERT's architecture in the layout of RoBERTa and XLM-R.",
    )
    size: str = Field(
        default="base",
        description="Published size of the family, which sets layers, hidden, heads and intermediate: mini, small, "
        "medium, base, large, for modernbert also ettin-17m to ettin-1b, for deberta xsmall. custom needs layers, "
        "hidden and heads.",
    )
    layers: int = Field(
        default=0, ge=0, le=MAX_LAYERS, description="Number of Transformer layers. 0 takes it from size."
    )
    hidden: int = Field(
        default=0, ge=0, le=MAX_WIDTH, description="Hidden size; a multiple of heads. 0 takes it from size."
    )
    heads: int = Field(default=0, ge=0, le=MAX_WIDTH, description="Number of attention heads. 0 takes it from size.")
    intermediate: int = Field(
        default=0,
        ge=0,
        le=16 * MAX_WIDTH,
        description="Width of the feed-forward layers. 0 takes it from size; with custom it is 4 x hidden, or 1.5 x "
        "hidden if gated.",
    )
    max_positions: int = Field(
        default=512,
        ge=8,
        le=4 * MAX_WIDTH,
        description="Maximum length of a sequence in tokens; the number of learned position embeddings.",
    )
    embedding: int = Field(
        default=0,
        ge=0,
        le=MAX_WIDTH,
        description="Width of the embeddings, if they are projected to hidden. The transform of the MLM head projects "
        "back, so the decoder can be tied (Lan et al. 2020, ALBERT, section 3.1). 0 means hidden.",
    )
    # The default of google-research/bert (modeling.py, layer_norm); torch and RoBERTa use 1e-5.
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
        description="Standard deviation of the initial weights: a normal distribution truncated at two deviations.",
    )
    attention_init: Literal["normal", "neighbors"] = Field(
        default="normal",
        description="Initialization of attention. normal is BERT's. neighbors initializes the heads to attend to "
        "adjacent tokens, which helps short runs; it needs an even head width, and with rotary positions "
        "attention_bias: true.",
    )
    vocabulary_rows: int = Field(
        default=0,
        ge=0,
        le=MAX_ROWS,
        description="Number of rows of the word embeddings and of the decoder. Rows beyond the vocabulary's entries "
        "are padding, for example to a multiple of 64, which is faster on GPUs. 0 means no padding.",
    )
    recursions: int = Field(
        default=1,
        ge=1,
        le=MAX_LAYERS,
        description="How often the stack of layers is applied, with the same weights (Dehghani et al. 2019, Universal "
        "Transformers; Lan et al. 2020, ALBERT). FLOPs grow with it, parameters do not.",
    )
    norm: str = Field(
        default="layer_norm",
        description="Norm of embeddings, layers and heads: layer_norm, layer_norm_no_bias, rms_norm or rms_norm_bias.",
    )
    norm_placement: Literal["post", "pre"] = Field(
        default="post",
        description="post normalizes the sum with the residual, as in BERT. pre normalizes the input of attention and "
        "of the feed-forward network, and the output of the last layer.",
    )
    embedding_norm: bool = Field(
        default=True,
        description="Normalize the embeddings. With it, the first layer of a pre-norm model has no norm before "
        "attention.",
    )
    token_types: bool = Field(default=True, description="Add an embedding of the token's segment (first or second).")
    positions: Positions = Field(
        default="learned",
        description="Position encoding. learned and sinusoidal are added to the embeddings. rotary rotates halves of "
        "queries and keys, rotary_interleaved adjacent pairs. relative adds a learned bias per head and distance (T5). "
        "disentangled adds products of queries and keys with embeddings of the distance (He et al. 2021, DeBERTa).",
    )
    rotary_base: float = Field(
        default=0.0, ge=0, description="Base of the rotary frequencies; required for rotary positions, otherwise 0."
    )
    local_rotary_base: float = Field(default=0.0, ge=0, description="Rotary base of local layers. 0 takes rotary_base.")
    relative_buckets: int = Field(
        default=0,
        ge=0,
        le=MAX_WIDTH,
        description="Number of buckets for distances: for relative, in both directions together (T5: 32); for "
        "disentangled, in each direction (DeBERTa-v3: 256, LTG-BERT: 32), where 0 means one bucket per distance.",
    )
    relative_max_distance: int = Field(
        default=0,
        ge=0,
        le=MAX_WIDTH,
        description="Distances of at least this many tokens share a bucket (T5: 128, DeBERTa-v3: 512).",
    )
    relative_terms: Literal["both", "c2p", "p2c"] = Field(
        default="both",
        description="Terms of disentangled positions. c2p: the query times the distance's key; p2c: the distance's "
        "query times the key. Scores are divided by sqrt(head width x (1 + number of terms)).",
    )
    relative_norm: bool = Field(default=False, description="Normalize the embeddings of disentangled positions.")
    relative_projections: bool = Field(
        default=False,
        description="Project the embeddings of disentangled positions with separate matrices. Otherwise they share the "
        "matrices of the tokens' queries and keys, as in DeBERTa-v3.",
    )
    local_attention: int = Field(
        default=0,
        ge=0,
        description="Width in tokens of local layers' attention window, half on each side. 0 makes every layer global.",
    )
    global_every: int = Field(
        default=1,
        ge=1,
        description="Every n-th layer attends globally, starting with the first; the others are local. 1 makes every "
        "layer global.",
    )
    kv_heads: int = Field(
        default=0, ge=0, description="Number of key and value heads, each shared by several query heads. 0 means heads."
    )
    activation: str = Field(
        default="gelu", description="Activation of the feed-forward network: gelu, relu, silu or tanh."
    )
    gated: bool = Field(
        default=False,
        description="Multiply the activation by a second projection: GeGLU with gelu, SwiGLU with silu.",
    )
    attention_bias: bool = Field(default=True, description="Biases of query, key, value and attention output.")
    ffn_in_bias: bool = Field(default=True, description="Bias of the first projection of the feed-forward network.")
    ffn_out_bias: bool = Field(default=True, description="Bias of the output projection of the feed-forward network.")
    mlm_transform: bool = Field(default=True, description="Dense layer, activation and norm before the decoder.")
    mlm_transform_bias: bool = Field(default=True, description="Bias of the dense layer before the decoder.")
    decoder_bias: bool = Field(default=True, description="Bias of the decoder, one number per token of the vocabulary.")
    tied_decoder: bool = Field(default=True, description="Use the word embeddings as the decoder's weight.")
    pooling: Literal["cls", "mean", "max"] = Field(
        default="cls",
        description="Input of the next-sentence and classification heads: the first token, or the mean or maximum.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_family(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        family, size = values.get("family", "bert"), values.get("size", "base")
        if family not in FAMILY_SETTINGS or not isinstance(size, str):  # validation of the fields will reject these
            return values
        values = {**FAMILY_SETTINGS[family], **values}
        if size in SIZES[family]:
            for key, value in SIZES[family][size]._asdict().items():
                if not values.get(key) and not (key == "intermediate" and _sets_hidden(values, SIZES[family][size])):
                    values[key] = value
        hidden = values.get("hidden")
        if not values.get("intermediate") and isinstance(hidden, int):
            values["intermediate"] = 4 * hidden if not values.get("gated") else hidden * 3 // 2
        return values

    @model_validator(mode="after")
    def _check_shape(self) -> ModelConfig:
        sizes = SIZES[self.family]
        if self.size != "custom" and self.size not in sizes:
            known = [*sizes, "custom"]
            raise ValueError(
                f"size: unknown size {self.size!r} for family {self.family}, which has {', '.join(known)}; "
                f"{did_you_mean(self.size, known) or 'choose one.'}"
            )
        if min(self.layers, self.hidden, self.heads) < 1:
            raise ValueError("size: custom needs layers, hidden and heads")
        if self.hidden % self.heads:
            raise ValueError(f"hidden ({self.hidden}) must be a multiple of heads ({self.heads})")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self

    @model_validator(mode="after")
    def _check_embedding(self) -> ModelConfig:
        if self.embedding not in (0, self.hidden) and not self.mlm_transform:
            raise ValueError(
                f"embedding ({self.embedding}) needs mlm_transform: true, which projects hidden ({self.hidden}) to the "
                "decoder's width"
            )
        return self

    @model_validator(mode="after")
    def _check_attention_init(self) -> ModelConfig:
        if self.attention_init != "neighbors":
            return self
        if self.positions.startswith("rotary"):  # the heads are initialized through biases of queries and keys
            if not self.attention_bias:
                raise ValueError("attention_init: neighbors needs attention_bias: true where positions are rotary")
        elif self.positions == "learned":
            self._check_learned_neighbors()
        else:
            raise ValueError(f"attention_init: neighbors needs learned or rotary positions, not {self.positions}")
        if self.kv_heads not in (0, self.heads):
            raise ValueError(f"attention_init: neighbors needs kv_heads: 0, not {self.kv_heads}")
        if self.hidden // self.heads % 2:
            raise ValueError(
                f"attention_init: neighbors needs an even head width, not {self.hidden // self.heads} (hidden / heads)"
            )
        return self

    def _check_learned_neighbors(self) -> None:
        """Check the settings on which the initialization from rows of the position embeddings depends."""
        if self.embedding not in (0, self.hidden):
            raise ValueError(
                f"attention_init: neighbors needs embedding ({self.embedding}) to be 0 or hidden ({self.hidden}) "
                "where positions are learned"
            )
        if self.recursions > 1:
            raise ValueError(
                f"attention_init: neighbors needs recursions: 1 where positions are learned, not {self.recursions}"
            )

    @model_validator(mode="after")
    def _check_positions(self) -> ModelConfig:
        """Refuse settings without effect, which belong to another family or are a mistake."""
        is_rotary = self.positions.startswith("rotary")
        if is_rotary and not self.rotary_base:
            raise ValueError(f"positions: {self.positions} needs rotary_base, such as 10000")
        if is_rotary and self.hidden // self.heads % 2:
            raise ValueError(f"positions: {self.positions} needs an even head width (hidden / heads)")
        has_distances = self.positions in ("relative", "disentangled")
        has_effect = {
            "rotary_base": is_rotary,
            "local_rotary_base": is_rotary,
            "relative_buckets": has_distances,
            "relative_max_distance": has_distances,
            "relative_terms": self.disentangled,
            "relative_norm": self.disentangled,
            "relative_projections": self.disentangled,
        }
        for key, key_has_effect in has_effect.items():
            default = type(self).model_fields[key].default
            if not key_has_effect and getattr(self, key) != default:
                value = f"{default}".lower().removesuffix(".0")
                raise ValueError(
                    f"{key} has no effect with positions: {self.positions}. Remove it, or set it to {value}"
                )
        return self

    @model_validator(mode="after")
    def _check_buckets(self) -> ModelConfig:
        buckets, max_distance = self.relative_buckets, self.relative_max_distance
        if self.positions == "relative" and not (buckets and max_distance):
            raise ValueError("positions: relative needs relative_buckets and relative_max_distance, such as 32 and 128")
        if self.positions == "relative" and (buckets % 4 or 4 * max_distance <= buckets):
            raise ValueError(
                f"relative_buckets ({buckets}) must be a multiple of 4, and relative_max_distance ({max_distance}) "
                "more than a quarter of it"
            )
        if self.disentangled and not max_distance:
            raise ValueError("positions: disentangled needs relative_max_distance, such as 512")
        if self.disentangled and buckets and (buckets < 4 or 2 * (max_distance - 1) <= buckets):
            raise ValueError(
                f"relative_buckets ({buckets}) must be 0 or at least 4, and relative_max_distance ({max_distance}) "
                "more than half of it, plus 1"
            )
        return self

    @model_validator(mode="after")
    def _check_windows(self) -> ModelConfig:
        if bool(self.local_attention) != (self.global_every > 1):
            raise ValueError(
                f"local_attention ({self.local_attention}) and global_every ({self.global_every}) go together: "
                "0 and 1 for global attention only, or for example 128 and 3"
            )
        if self.local_rotary_base and not self.local_attention:
            raise ValueError("local_rotary_base has no effect without local_attention. Remove it, or set it to 0")
        if self.local_attention % 2:
            raise ValueError(f"local_attention ({self.local_attention}) must be even: half of it is on each side")
        if self.local_attention > self.max_positions:
            raise ValueError(
                f"local_attention ({self.local_attention}) exceeds max_positions ({self.max_positions}): "
                "choose a smaller window, or global attention with 0 and global_every: 1"
            )
        return self

    @property
    def family_title(self) -> str:
        """Return the family's name in prose."""
        return FAMILY_TITLES[self.family]

    @property
    def fits_flash_attention(self) -> bool:
        """Return whether all attention can run in torch's flash kernel, which cannot add biases to scores."""
        return self.positions not in ("relative", "disentangled") and self.hidden // self.heads in FLASH_WIDTHS

    @property
    def disentangled(self) -> bool:
        """Return whether attention scores contain products with embeddings of the distance."""
        return self.positions == "disentangled"

    @property
    def relative_span(self) -> int:
        """Return the number of embeddings per direction of disentangled positions, half of all rows; 0 without them."""
        return (self.relative_buckets or self.relative_max_distance) if self.disentangled else 0

    @property
    def score_terms(self) -> int:
        """Return the number of products in a score: query times key, and products with embeddings of the distance."""
        return 1 + self.disentangled * (2 if self.relative_terms == "both" else 1)

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    def rows(self, entries: int) -> int:
        """Return the number of rows of the word embeddings and the decoder for a vocabulary with this many entries."""
        return max(entries, self.vocabulary_rows)

    def window(self, layer: int) -> int:
        """Return how many tokens on each side a token attends to in a 0-based layer; 0 if it attends to all."""
        return 0 if layer % self.global_every == 0 else self.local_attention // 2

    def rotary_base_of(self, layer: int) -> float:
        """Return the base of the rotary frequencies in a 0-based layer; 0 without rotary positions."""
        return self.local_rotary_base or self.rotary_base if self.window(layer) else self.rotary_base

    def with_rotary_bases(self, base: float, local_base: float) -> ModelConfig:
        """Return the model with other rotary bases (`base`, and `local_base` of local layers); 0 keeps a base."""
        bases = {"rotary_base": base, "local_rotary_base": local_base}
        return self.model_copy(update={name: value for name, value in bases.items() if value})

    @property
    def depth(self) -> int:
        """Return the number of layers that a token passes through."""
        return self.layers * self.recursions

    def has_attention_norm(self, layer: int) -> bool:
        """Return whether a layer has an attention norm: an embedding norm replaces the first, unless layers recur."""
        return layer > 0 or self.norm_placement == "post" or not self.embedding_norm or self.recursions > 1


def _sets_hidden(values: dict[str, Any], size: PublishedSize) -> bool:
    """Return whether a config replaces the size's hidden width; the feed-forward width then depends on the new one."""
    return values.get("hidden") not in (None, 0, size.hidden)

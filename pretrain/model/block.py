"""A Transformer layer, and the arithmetic of the embeddings, as pure functions.

The encoder calls them on unpadded batches, the padded encoder (`padded.py`) on padded ones; nothing else defines a
layer. A layer has no submodules, and everything after its attention is one pure function (`after_attention`). So
torch.compile compiles that once for all layers of a model, and ZeRO-3 gathers a layer's parameters once, outside of it.

Shape letters: T tokens (the padded encoder has sequences times tokens), R query positions, E width of the embeddings,
H hidden width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.config import ModelConfig
from pretrain.model.activations import get_activation
from pretrain.model.attention import ProjectionWeights, self_attention
from pretrain.model.compile import maybe_compile
from pretrain.model.initialization import create_parameters
from pretrain.model.kernels.hash_rng import hash_dropout
from pretrain.model.kernels.layout import AttentionOptions, TokenLayout
from pretrain.model.kernels.native import prefer_native
from pretrain.model.kernels.products import linear_product
from pretrain.model.kernels.rounding import num_padding_rows, pad_rows
from pretrain.model.norms import get_norm
from pretrain.model.parameters import layer_parameters


class Layer(nn.Module):
    """One Transformer layer.

    Args:
        shape: the model's config.
        index: index of the layer; determines whether its attention is local, and whether a norm precedes it.
        compile: fuse the operations between the matmuls with torch.compile.
    """

    # Query, key and value, stacked for one matmul. With fewer key and value heads: q_weight and kv_weight instead.
    qkv_weight: nn.Parameter  # [3H, H]

    def __init__(self, shape: ModelConfig, index: int, compile: bool) -> None:
        super().__init__()
        self.shape, self.fused = shape, compile
        self.window, self.rotary_base = shape.window(index), shape.rotary_base_of(index)
        self.norm_first = shape.norm_placement == "pre" and shape.has_attention_norm(index)
        self.functions = BlockFunctions.of(shape)
        self.apply_norm = maybe_compile(apply_norm, compile, ("M",))
        self.after_attention = prefer_native(maybe_compile(after_attention, compile, ("M",) * 3), shape, compile)
        create_parameters(self, layer_parameters(shape, index), shape.init_std)

    def forward(self, hidden_TH: Tensor, layout: TokenLayout) -> Tensor:
        """Map [T, H] to [T, H], or to [R, H] at `layout.queries`, plus padding rows."""
        shape, training, functions = self.shape, self.training, self.functions
        normed_TH = hidden_TH
        if self.norm_first:
            normed_TH = self.apply_norm(hidden_TH, norm_weights(self, "attention_norm", functions), functions)
        options = AttentionOptions(shape.heads, shape.attention_dropout if training else 0.0, self.fused, self.window)
        context_TH = self_attention(normed_TH, ProjectionWeights.of(self, shape), layout, options)
        seeds_T = layout.seeds
        if layout.queries is not None:  # the context is [R, H] already
            queries_R = pad_rows(layout.queries, padding := num_padding_rows(len(layout.queries), hidden_TH))
            hidden_TH, seeds_T, context_TH = (
                hidden_TH.index_select(0, queries_R),
                seeds_T[queries_R],
                pad_rows(context_TH, padding),
            )
        weights, dropout = LayerWeights.of(self, functions), shape.hidden_dropout if training else 0.0
        return self.after_attention(context_TH, hidden_TH, seeds_T, weights, functions, dropout)


class BlockFunctions(NamedTuple):
    """The functions that a layer applies between its matmuls, and their settings."""

    norm: Callable[..., Tensor]  # as `norms.Norm.function`
    activation: Callable[[Tensor], Tensor]
    eps: float  # epsilon of the norm
    norm_kinds: tuple[str, ...]  # kinds of the norm's parameters, such as weight, in the order of its arguments
    pre_norm: bool = False  # whether norms precede attention and feed-forward network, instead of following the sums
    gated: bool = False  # whether the activation is multiplied by a second projection

    @classmethod
    def of(cls, model: ModelConfig) -> BlockFunctions:
        """Return the functions that a config names. Raises `InputError` for an unknown name."""
        return cls(
            norm_function(model.norm),
            activation_function(model.activation),
            model.layer_norm_eps,
            tuple(get_norm(model.norm).parameters),
            model.norm_placement == "pre",
            model.gated,
        )


def norm_function(name: str) -> Callable[..., Tensor]:
    """Return the `norms.Norm.function` that `model.norm` names. Raises `InputError` for an unknown name."""
    return get_norm(name).function or layer_norm


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function that `model.activation` names. Raises `InputError` for an unknown name."""
    # BERT's GELU uses the error function (Hendrycks & Gimpel 2016, arXiv:1606.08415), not the tanh approximation.
    return get_activation(name).function or F.gelu


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm (Ba et al. 2016, arXiv:1607.06450): mean 0 and variance 1, then scaled and shifted."""
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)


class EmbeddingWeights(NamedTuple):
    """The parameters of `embed`."""

    token_type: Tensor | None  # [2, E]
    norm: tuple[Tensor, ...] | None  # as `norms.Norm.parameters`, each [E]

    @classmethod
    def of(cls, embeddings: Any, model: ModelConfig, functions: BlockFunctions) -> EmbeddingWeights:
        """Return the weights of a module with the parameters of `parameters.embedding_parameters`."""
        token_type = embeddings.token_type if model.token_types else None
        return cls(token_type, norm_weights(embeddings, "norm", functions) if model.embedding_norm else None)


class LayerWeights(NamedTuple):
    """The parameters of `after_attention`, in the order in which it uses them."""

    attention_out_weight: Tensor  # [H, H]
    attention_out_bias: Tensor | None
    attention_norm: tuple[Tensor, ...]  # as `norms.Norm.parameters`, each [H]; () in a pre-norm model
    ffn_in_weight: Tensor  # [F, H]; if gated [2F, H]: the activation's rows, then the gate's
    ffn_in_bias: Tensor | None
    ffn_out_weight: Tensor  # [H, F]
    ffn_out_bias: Tensor | None
    ffn_norm: tuple[Tensor, ...]

    @classmethod
    def of(cls, layer: Any, functions: BlockFunctions) -> LayerWeights:
        """Return the weights of a module with the parameters of `parameters.layer_parameters`."""
        ffn_in = "gated_in" if functions.gated else "ffn_in"
        return cls(
            layer.attention_out_weight,
            getattr(layer, "attention_out_bias", None),
            () if functions.pre_norm else norm_weights(layer, "attention_norm", functions),
            getattr(layer, f"{ffn_in}_weight"),
            getattr(layer, f"{ffn_in}_bias", None),
            layer.ffn_out_weight,
            getattr(layer, "ffn_out_bias", None),
            norm_weights(layer, "ffn_norm", functions),
        )


def norm_weights(module: Any, name: str, functions: BlockFunctions) -> tuple[Tensor, ...]:
    """Return the parameters of the norm `name` of a module, in the order of the norm's arguments."""
    return tuple(getattr(module, f"{name}_{kind}") for kind in functions.norm_kinds)


def embed(
    words_TE: Tensor,
    positions_TE: Tensor | None,
    token_types_T: Tensor | None,
    seeds_T: Tensor | None,
    weights: EmbeddingWeights,
    functions: BlockFunctions,
    dropout: float,
) -> Tensor:
    """Return the normalized sum of the embeddings [T, E]; without `token_types_T` every token has type 0."""
    summed_TE = words_TE.float()
    if positions_TE is not None:
        summed_TE = summed_TE + positions_TE.float()
    if weights.token_type is not None:
        # Cast to fp32 before the broadcast, so that the gradient is summed in fp32.
        type0_E, type1_E = weights.token_type.float()
        types_TE = type0_E if token_types_T is None else torch.where(token_types_T[..., None] == 0, type0_E, type1_E)
        summed_TE = summed_TE + types_TE
    if weights.norm is not None:
        summed_TE = functions.norm(summed_TE, *weights.norm, eps=functions.eps)
    return hash_dropout(summed_TE, seeds_T, 0, dropout).to(words_TE.dtype)


def apply_norm(hidden_TH: Tensor, weights: tuple[Tensor, ...], functions: BlockFunctions) -> Tensor:
    """Normalize [T, H], for a pre-norm model: before each attention and after the last layer."""
    return functions.norm(hidden_TH.float(), *weights, eps=functions.eps).to(hidden_TH.dtype)


def after_attention(
    context_TH: Tensor,
    hidden_TH: Tensor,
    seeds_T: Tensor | None,
    weights: LayerWeights,
    functions: BlockFunctions,
    dropout: float,
) -> Tensor:
    """Apply the output projection and the feed-forward network, each with its residual sum and norm: [T, H]."""
    w, dtype = weights, hidden_TH.dtype
    attended_TH = linear(context_TH, w.attention_out_weight, w.attention_out_bias)
    attended_TH = hidden_TH + hash_dropout(attended_TH, seeds_T, 1, dropout)
    if functions.pre_norm:
        normed_TH = functions.norm(attended_TH, *w.ffn_norm, eps=functions.eps).to(dtype)
    else:
        normed_TH = attended_TH = functions.norm(attended_TH, *w.attention_norm, eps=functions.eps).to(dtype)
    inner_TF = feed_forward_inner(linear(normed_TH, w.ffn_in_weight, w.ffn_in_bias), functions)
    output_TH = linear(inner_TF.to(dtype), w.ffn_out_weight, w.ffn_out_bias)
    output_TH = attended_TH + hash_dropout(output_TH, seeds_T, 2, dropout)
    if functions.pre_norm:
        return output_TH.to(dtype)
    return functions.norm(output_TH, *w.ffn_norm, eps=functions.eps).to(dtype)


def feed_forward_inner(projected: Tensor, functions: BlockFunctions) -> Tensor:
    """Apply the activation, [T, F] -> [T, F], or [T, 2F] -> [T, F] with a gate (Shazeer 2020, arXiv:2002.05202)."""
    if not functions.gated:
        return functions.activation(projected)
    activated_TF, gate_TF = projected.chunk(2, dim=-1)
    return functions.activation(activated_TF) * gate_TF


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x @ weight.T + bias in fp32: [..., in] -> [..., out]; the caller rounds it.

    Compiled code adds the bias when it loads the product. On CPU, `F.linear` writes the bias to every row before the
    matmul, which adds an eighth to the time of a BERT-Base matmul (docs/benchmarks/lab-notes.md).
    """
    sums = linear_product(x, weight).float()
    return sums if bias is None else sums + bias.float()

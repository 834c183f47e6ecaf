"""The arithmetic of the embeddings and of a Transformer layer around its attention, as pure functions.

The encoder calls them over unpadded batches, its padded twin (`padded.py`) over padded ones; nothing else defines a
layer. Shape letters: T tokens (the padded twin has sequences times tokens), E width of the embeddings, H hidden width,
F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.config import ModelConfig
from pretrain.model.activations import get_activation
from pretrain.model.kernels.hash_rng import hash_dropout
from pretrain.model.norms import get_norm


class BlockFunctions(NamedTuple):
    """What a model computes between its matrix products."""

    norm: Callable[..., Tensor]  # as `norms.Norm.function`
    activation: Callable[[Tensor], Tensor]
    eps: float  # of the norm
    pre_norm: bool = False  # whether norms come before attention and feed-forward network, not after the residual sums
    gated: bool = False  # whether the activation is multiplied by a second projection

    @classmethod
    def of(cls, model: ModelConfig) -> BlockFunctions:
        """The functions that a config names. Raises `InputError` for an unknown name."""
        norm, activation = get_norm(model.norm).function, get_activation(model.activation).function
        pre_norm = model.norm_placement == "pre"
        return cls(norm, activation, model.layer_norm_eps, pre_norm, model.gated)


class EmbeddingWeights(NamedTuple):
    """The parameters of `embed`."""

    token_type: Tensor | None  # [2, E]
    norm: tuple[Tensor, ...] | None  # as `norms.Norm.parameters`, each [E]

    @classmethod
    def of(cls, embeddings: Any, model: ModelConfig) -> EmbeddingWeights:
        """Those of a module whose parameters are `parameters.embedding_parameters`."""
        token_type = embeddings.token_type if model.token_types else None
        return cls(token_type, norm_weights(embeddings, "norm", model) if model.embedding_norm else None)


class LayerWeights(NamedTuple):
    """The parameters of `after_attention`, in the order of its arithmetic."""

    attention_out_weight: Tensor  # [H, H]
    attention_out_bias: Tensor | None
    attention_norm: tuple[Tensor, ...]  # as `norms.Norm.parameters`, each [H]; () in pre-norm
    ffn_in_weight: Tensor  # [F, H]; gated [2F, H], first what the activation is applied to
    ffn_in_bias: Tensor | None
    ffn_out_weight: Tensor  # [H, F]
    ffn_out_bias: Tensor | None
    ffn_norm: tuple[Tensor, ...]

    @classmethod
    def of(cls, layer: Any, model: ModelConfig) -> LayerWeights:
        """Those of a module whose parameters are `parameters.layer_parameters`."""
        ffn_in = "gated_in" if model.gated else "ffn_in"
        return cls(
            layer.attention_out_weight,
            getattr(layer, "attention_out_bias", None),
            norm_weights(layer, "attention_norm", model) if model.norm_placement == "post" else (),
            getattr(layer, f"{ffn_in}_weight"),
            getattr(layer, f"{ffn_in}_bias", None),
            layer.ffn_out_weight,
            getattr(layer, "ffn_out_bias", None),
            norm_weights(layer, "ffn_norm", model),
        )


def norm_weights(module: Any, name: str, model: ModelConfig) -> tuple[Tensor, ...]:
    """The parameters of the norm `name` of a module, in the order in which the norm takes them."""
    return tuple(getattr(module, f"{name}_{kind}") for kind in get_norm(model.norm).parameters)


def embed(
    words_TE: Tensor,
    positions_TE: Tensor | None,
    token_types_T: Tensor | None,
    keys_T: Tensor | None,
    weights: EmbeddingWeights,
    functions: BlockFunctions,
    dropout: float,
) -> Tensor:
    """[T, E] normalized sum of the embeddings; without `token_types_T` every token has type 0."""
    summed_TE = words_TE.float()
    if positions_TE is not None:
        summed_TE = summed_TE + positions_TE.float()
    if weights.token_type is not None:
        # Before they are spread, so that their gradient is summed in fp32.
        first_E, second_E = weights.token_type.float()
        types_TE = first_E if token_types_T is None else torch.where(token_types_T[..., None] == 0, first_E, second_E)
        summed_TE = summed_TE + types_TE
    if weights.norm is not None:
        summed_TE = functions.norm(summed_TE, *weights.norm, eps=functions.eps)
    return hash_dropout(summed_TE, keys_T, 0, dropout).to(words_TE.dtype)


def apply_norm(hidden_TH: Tensor, weights: tuple[Tensor, ...], functions: BlockFunctions) -> Tensor:
    """[T, H] normalized, as before the attention of a pre-norm model and after its last layer."""
    return functions.norm(hidden_TH.float(), *weights, eps=functions.eps).to(hidden_TH.dtype)


def after_attention(
    context_TH: Tensor,
    hidden_TH: Tensor,
    keys_T: Tensor | None,
    weights: LayerWeights,
    functions: BlockFunctions,
    dropout: float,
) -> Tensor:
    """Output projection, residual sum, feed-forward network and its residual sum, with a norm of each: [T, H]."""
    w, dtype = weights, hidden_TH.dtype
    attended_TH = linear(context_TH, w.attention_out_weight, w.attention_out_bias)
    attended_TH = hidden_TH + hash_dropout(attended_TH, keys_T, 1, dropout)
    if functions.pre_norm:
        normed_TH = functions.norm(attended_TH, *w.ffn_norm, eps=functions.eps).to(dtype)
    else:
        normed_TH = attended_TH = functions.norm(attended_TH, *w.attention_norm, eps=functions.eps).to(dtype)
    inner_TF = feed_forward_inner(linear(normed_TH, w.ffn_in_weight, w.ffn_in_bias), functions)
    output_TH = linear(inner_TF.to(dtype), w.ffn_out_weight, w.ffn_out_bias)
    output_TH = attended_TH + hash_dropout(output_TH, keys_T, 2, dropout)
    if functions.pre_norm:
        return output_TH.to(dtype)
    return functions.norm(output_TH, *w.ffn_norm, eps=functions.eps).to(dtype)


def feed_forward_inner(projected: Tensor, functions: BlockFunctions) -> Tensor:
    """The activation, [T, F] of [T, F]; or times the gate, [T, F] of [T, 2F] (Shazeer 2020, arXiv:2002.05202)."""
    if not functions.gated:
        return functions.activation(projected)
    activated_TF, gate_TF = projected.chunk(2, dim=-1)
    return functions.activation(activated_TF) * gate_TF


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias in fp32: [..., in] -> [..., out], to be rounded by what follows.

    For code that is compiled: the bias joins the pass that reads the product. `F.linear` on CPU writes it out to
    every row before the matmul, which costs an eighth of the matmul's time at BERT-Base (docs/benchmarks/lab-notes.md).
    """
    sums = F.linear(x, weight).float()
    return sums if bias is None else sums + bias.float()

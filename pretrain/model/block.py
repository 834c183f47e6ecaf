"""The arithmetic of the embeddings and of a Transformer layer past its attention, as pure functions.

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
from pretrain.model.hash_rng import hash_dropout
from pretrain.model.norms import get_norm


class BlockFunctions(NamedTuple):
    """What a model computes between its matrix products."""

    norm: Callable[..., Tensor]  # as `norms.Norm.function`
    activation: Callable[[Tensor], Tensor]
    eps: float  # of the norm

    @classmethod
    def of(cls, model: ModelConfig) -> BlockFunctions:
        """The functions that a config names. Raises `InputError` for an unknown name."""
        return cls(get_norm(model.norm).function, get_activation(model.activation).function, model.layer_norm_eps)


class EmbeddingWeights(NamedTuple):
    """The parameters of `embed`."""

    token_type: Tensor  # [2, E]
    norm: tuple[Tensor, ...]  # as `norms.Norm.parameters`, each [E]

    @classmethod
    def of(cls, embeddings: Any, model: ModelConfig) -> EmbeddingWeights:
        """Those of a module whose parameters are `parameters.embedding_parameters`."""
        return cls(embeddings.token_type, norm_weights(embeddings, "norm", model))


class LayerWeights(NamedTuple):
    """The parameters of `after_attention`, in the order of its arithmetic."""

    attention_out_weight: Tensor  # [H, H]
    attention_out_bias: Tensor
    attention_norm: tuple[Tensor, ...]  # as `norms.Norm.parameters`, each [H]
    ffn_in_weight: Tensor  # [F, H]
    ffn_in_bias: Tensor
    ffn_out_weight: Tensor  # [H, F]
    ffn_out_bias: Tensor
    ffn_norm: tuple[Tensor, ...]

    @classmethod
    def of(cls, layer: Any, model: ModelConfig) -> LayerWeights:
        """Those of a module whose parameters are `parameters.layer_parameters`."""
        return cls(
            layer.attention_out_weight,
            layer.attention_out_bias,
            norm_weights(layer, "attention_norm", model),
            layer.ffn_in_weight,
            layer.ffn_in_bias,
            layer.ffn_out_weight,
            layer.ffn_out_bias,
            norm_weights(layer, "ffn_norm", model),
        )


def norm_weights(module: Any, name: str, model: ModelConfig) -> tuple[Tensor, ...]:
    """The parameters of the norm `name` of a module, in the order in which the norm takes them."""
    return tuple(getattr(module, f"{name}_{kind}") for kind in get_norm(model.norm).parameters)


def embed(
    words_TE: Tensor,
    positions_TE: Tensor,
    token_types_T: Tensor | None,
    keys_T: Tensor | None,
    weights: EmbeddingWeights,
    functions: BlockFunctions,
    dropout: float,
) -> Tensor:
    """[T, E] normalised sum of the three embeddings; without `token_types_T` every token has type 0."""
    first_E, second_E = weights.token_type.float()  # before they are spread, so that their gradient is summed in fp32
    types_TE = first_E if token_types_T is None else torch.where(token_types_T[..., None] == 0, first_E, second_E)
    summed_TE = words_TE.float() + positions_TE.float() + types_TE
    normed_TE = functions.norm(summed_TE, *weights.norm, eps=functions.eps)
    return hash_dropout(normed_TE, keys_T, 0, dropout).to(words_TE.dtype)


def after_attention(
    context_TH: Tensor,
    hidden_TH: Tensor,
    keys_T: Tensor | None,
    weights: LayerWeights,
    functions: BlockFunctions,
    dropout: float,
) -> Tensor:
    """Output projection, residual and norm, then the feed-forward network with its own: [T, H]."""
    w, dtype = weights, hidden_TH.dtype
    attended_TH = linear(context_TH, w.attention_out_weight, w.attention_out_bias)
    attended_TH = hidden_TH + hash_dropout(attended_TH, keys_T, 1, dropout)
    attended_TH = functions.norm(attended_TH, *w.attention_norm, eps=functions.eps).to(dtype)
    inner_TF = functions.activation(linear(attended_TH, w.ffn_in_weight, w.ffn_in_bias)).to(dtype)
    output_TH = linear(inner_TF, w.ffn_out_weight, w.ffn_out_bias)
    output_TH = attended_TH + hash_dropout(output_TH, keys_T, 2, dropout)
    return functions.norm(output_TH, *w.ffn_norm, eps=functions.eps).to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x @ weight.T + bias in fp32: [..., in] -> [..., out], to be rounded by what follows.

    For code that is compiled: the bias joins the pass that reads the product. `F.linear` on CPU writes it out to
    every row before the matmul, which costs an eighth of the matmul's time at BERT-Base (docs/benchmarks/lab-notes.md).
    """
    return F.linear(x, weight).float() + bias.float()

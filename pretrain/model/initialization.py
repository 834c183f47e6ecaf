"""Initial values of the parameters: BERT's, and optionally attention heads that attend to adjacent tokens.

With BERT's values every head attends to all tokens equally. A small run then stays on a long plateau, where it
predicts masked tokens only from word frequencies: it must first learn, position by position, which tokens are adjacent.
`attend_to_adjacent_tokens` gives each head one offset to attend to, as in a trained BERT (Clark et al. 2019, "What Does
BERT Look At?", section 3.1); `attend_to_adjacent_tokens_by_rotation` is for rotary positions. Only initial values
differ; the architecture is the same, and all parameters are trained. The idea of initializing attention as it is after
training is from Trockman & Kolter (2023, "Mimetic Initialization of Self-Attention Layers").
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.config import ModelConfig
from pretrain.model.parameters import Parameter
from pretrain.model.positions import join_pairs

# Initial scale of position embeddings relative to words and token types, which act as noise: positions have two thirds
# of an embedding's squared norm.
POSITION_SCALE = 2.0
# Initial score of a head at its offset; the mean score is 0. With 128 tokens, half of the attention goes there.
PEAK_SCORE = 5.0
# The peak score with rotary positions, and the lowest frequency that is then used, in radians per token.
ROTARY_PEAK_SCORE, MIN_FREQUENCY = 8.0, 0.2


def create_parameters(module: nn.Module, parameters: Iterable[Parameter], std: float) -> None:
    """Register `parameters` in `module`, fp32; matrices are normal with standard deviation `std` times `scale`."""
    for parameter in parameters:
        if parameter.initial == "normal":
            values = normal(std * parameter.scale, *parameter.shape)
        else:
            fill = torch.zeros if parameter.initial == "zeros" else torch.ones
            values = nn.Parameter(fill(parameter.shape))
        module.register_parameter(parameter.name, values)


def normal(std: float, *size: int) -> nn.Parameter:
    """Sample a normal distribution with this `std`, truncated at two (google-research/bert, create_initializer)."""
    weight = torch.empty(*size)
    if weight.is_meta:  # random values of meta tensors would import sympy, which takes a second
        return nn.Parameter(weight)
    flat = weight.normal_().view(-1)
    # Values beyond two deviations are sampled again: four times as fast as torch's trunc_normal_, which inverts a
    # distribution function.
    outside = (flat.abs() > 2).nonzero()[:, 0]
    while outside.numel():
        flat[outside] = torch.randn(outside.numel())
        outside = outside[flat[outside].abs() > 2]
    return nn.Parameter(weight.mul_(std))


def initialize_neighbors(shape: ModelConfig, embeddings: Any, layers: Iterable[Any]) -> None:
    """Initialize heads of a model with `attention_init: neighbors`, in place.

    Args:
        shape: the model's config.
        embeddings, layers: modules with the parameters of `parameters.py`; `layers` are the encoder's lower half.
    """
    if shape.positions == "learned":
        weights = [layer.qkv_weight for layer in layers]
        attend_to_adjacent_tokens(embeddings.position, weights, shape.heads, shape.init_std)
        return
    interleaved = shape.positions == "rotary_interleaved"
    for layer in layers:
        attend_to_adjacent_tokens_by_rotation(layer.qkv_bias, shape.heads, layer.rotary_base, interleaved=interleaved)


@torch.no_grad()
def attend_to_adjacent_tokens(position_PH: Tensor, qkv_weights: Iterable[Tensor], heads: int, std: float) -> None:
    """Fill the position embeddings and add to the layers' stacked projections [3H, H], in place.

    Position embeddings are cosines and sines of K = H/2 frequencies between 0 and pi, each with a phase, sampled from
    torch's generator. They are far apart, and a shift by one position is a rotation (Vaswani et al. 2017, section 3.5).
    Without phases the first position, [CLS], would be ones and zeros, whose mean the LayerNorm subtracts.
    Queries are initialized to the position itself, and keys to the position that a head attends from. The heads attend
    to the tokens 1 before, 1 after, 2 before, 2 after and so on.

    Args:
        position_PH: the position embeddings, fp32 [P, H].
        qkv_weights: stacked query, key and value weights of each layer to initialize, fp32 [3H, H]: the lower half of
            the encoder, since in the layers above, [CLS] must attend to the whole sequence.
        heads: number of attention heads, whose width is even.
        std: standard deviation of the initial word embeddings.
    """
    positions, hidden = position_PH.shape
    width = hidden // heads
    frequency_K = torch.rand(hidden // 2) * math.pi
    phase_K = torch.rand(hidden // 2) * (2 * math.pi)
    angle_PK = torch.arange(positions)[:, None] * frequency_K + phase_K
    waves_PH = torch.stack([angle_PK.cos(), angle_PK.sin()], dim=-1).flatten(1)
    position_PH.copy_(waves_PH * (math.sqrt(2) * POSITION_SCALE * std))

    # The positions' share of the variance, which the norm scales to 1. Words and token types weigh 1 each.
    share = POSITION_SCALE**2 / (POSITION_SCALE**2 + 2)
    # A head's score at its offset is gain^2 * width * share / sqrt(width).
    gain = math.sqrt(PEAK_SCORE / (math.sqrt(width) * share))
    offset_K = torch.tensor([_attended_offset(head) for head in range(heads)]).repeat_interleave(width // 2)
    cosine_K, sine_K = gain * torch.cos(frequency_K * offset_K), gain * torch.sin(frequency_K * offset_K)
    even_K = torch.arange(0, hidden, 2)
    odd_K = even_K + 1
    for weight in qkv_weights:
        queries_HH, keys_HH = weight[:hidden], weight[hidden : 2 * hidden]
        queries_HH.diagonal().add_(gain)
        keys_HH[even_K, even_K] += cosine_K
        keys_HH[even_K, odd_K] += sine_K
        keys_HH[odd_K, even_K] -= sine_K
        keys_HH[odd_K, odd_K] += cosine_K


@torch.no_grad()
def attend_to_adjacent_tokens_by_rotation(qkv_bias: Tensor, heads: int, base: float, *, interleaved: bool) -> None:
    """Fill the biases of a layer's queries and keys, in place, with the offsets of `attend_to_adjacent_tokens`.

    A bias is the same for all tokens until it is rotated by their positions. The query bias is a vector with the fast
    frequencies only, and the key bias is this vector rotated back by the head's offset, so they match at this distance:
    the score is the mean of cos(f (distance - offset)) over the frequencies f, times `ROTARY_PEAK_SCORE`.

    Args:
        qkv_bias: biases of queries, keys and values of all heads, stacked: fp32 [3H].
        heads: number of attention heads.
        base: base of the layer's rotary frequencies.
        interleaved: as in `positions.rotation`.
    """
    hidden = len(qkv_bias) // 3
    width = hidden // heads
    frequency_K = base ** -(torch.arange(0, width, 2) / width)
    is_fast_K = frequency_K >= MIN_FREQUENCY
    gain_K = is_fast_K * math.sqrt(ROTARY_PEAK_SCORE * math.sqrt(width) / int(is_fast_K.sum()))
    angle_NK = -frequency_K * torch.tensor([_attended_offset(head) for head in range(heads)])[:, None]
    query_D = join_pairs(gain_K, torch.zeros_like(gain_K), interleaved=interleaved)
    key_ND = join_pairs(gain_K * angle_NK.cos(), gain_K * angle_NK.sin(), interleaved=interleaved)
    qkv_bias[:hidden] = query_D.repeat(heads)
    qkv_bias[hidden : 2 * hidden] = key_ND.flatten()


def _attended_offset(head: int) -> int:
    """Return -1, 1, -2, 2, ... for heads 0, 1, 2, 3, ..."""
    distance = head // 2 + 1
    return distance if head % 2 else -distance

"""What encoder and heads are both made of: initialisation, LayerNorm, dropout and compilation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pretrain.model.attention.dispatch import ALONG, keep_mask


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x @ weight.T + bias in fp32: [..., in] -> [..., out], to be rounded by what follows.

    For code that is compiled: the bias joins the pass that reads the product. `F.linear` on CPU writes it out to
    every row before the matmul, which costs an eighth of the matmul's time at BERT-Base (BENCHMARKS.md).
    """
    return F.linear(x, weight).float() + bias.float()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)


def hash_dropout(x_TH: Tensor, keys_T: Tensor, use: int, dropout: float) -> Tensor:
    """Inverted dropout whose draw is a pure function of the token's key, the `use` and the feature."""
    if dropout == 0:
        return x_TH
    along_H = torch.arange(x_TH.shape[1], device=x_TH.device, dtype=torch.int32) * ALONG
    keep_TH = keep_mask((keys_T[:, None] ^ (use * 0x27D4EB2F)) + along_H, dropout)
    return torch.where(keep_TH, x_TH * (1 / (1 - dropout)), 0.0)


def normal(std: float, *size: int) -> nn.Parameter:
    """Normal with deviation `std`, truncated at two (google-research/bert modeling.py, create_initializer)."""
    weight = torch.randn(*size)
    flat = weight.view(-1)
    # What lies outside is drawn again: four times as fast as torch's trunc_normal_, which inverts a distribution function.
    outside = (flat.abs() > 2).nonzero()[:, 0] if weight.device.type != "meta" else flat[:0]
    while outside.numel():
        flat[outside] = torch.randn(outside.numel())
        outside = outside[flat[outside].abs() > 2]
    return nn.Parameter(weight.mul_(std))


def zeros(size: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size))


def ones(size: int) -> nn.Parameter:
    return nn.Parameter(torch.ones(size))

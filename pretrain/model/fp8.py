"""Matrix products of the layers in FP8, for GPUs from Hopper on. Everything else stays in bf16.

Each row of an operand is scaled by a power of two of its own, so that its largest entry fits e4m3. So a token's
result depends on no other token (invariant 1 holds), and scaling itself rounds nothing. The gradient of a weight
sums over thousands of tokens and stays a product of bf16. This is torchao's recipe "rowwise_with_gw_hp", its most
accurate one (torchao/float8/config.py, Float8LinearRecipeName).

Shape letters: T tokens, I inputs and O outputs of the product, both multiples of `FP8_MULTIPLE`; R rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_TYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(_TYPE).max
_LEAST = 1e-12  # scales of rows that are all zeros remain finite


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`F.linear(x, weight)` with FP8 operands: bf16 [T, I] and [O, I] -> bf16 [T, O]."""
    product: Any = _Linear.apply(x, weight)
    return product


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        # Hopper sums fewer bits of forward products, which is faster and accurate enough for activations.
        return _product(x_TI, weight_OI, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad_TO,), (x_TI, weight_OI) = grads, ctx.saved_tensors
        return _product(grad_TO, weight_OI.T, fast=False), grad_TO.T @ x_TI


def _product(x_RI: Tensor, y_OI: Tensor, *, fast: bool) -> Tensor:
    """bf16 [R, O], `x @ y.T`."""
    (x8_RI, x_scale_R1), (y8_OI, y_scale_O1) = _in_rows(x_RI), _in_rows(y_OI)
    # Not F.scaled_mm: torch.compile cannot trace it before torch 2.13.
    return torch.ops.aten._scaled_mm.default(
        x8_RI, y8_OI.T, x_scale_R1, y_scale_O1.T, out_dtype=x_RI.dtype, use_fast_accum=fast
    )


def _in_rows(x_RI: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [R, I], fp32 [R, 1] that its rows have to be multiplied by). A row with NaN or infinity becomes NaN."""
    top_R1 = x_RI.abs().amax(-1, keepdim=True).float()
    scale_R1 = (_LARGEST / top_R1.clamp_min(_LEAST)).log2().floor().exp2()
    return (x_RI.float() * scale_R1).to(_TYPE).contiguous(), scale_R1.reciprocal()

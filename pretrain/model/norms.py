"""The norms that `model.norm` can select: function and parameters of each. BERT's LayerNorm is in `block.py`.

Cost estimates read this table without torch, so a norm imports torch itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from pretrain.common.errors import InputError
from pretrain.common.kinds import not_one_of

if TYPE_CHECKING:
    from torch import Tensor

Initial = Literal["normal", "zeros", "ones"]


class Norm(NamedTuple):
    """A norm over the last axis.

    Attributes:
        function: `function(x, *parameters, eps)` with x [..., width], fp32 in every precision; returns the same shape
            and dtype. None means BERT's LayerNorm, `block.layer_norm`.
        parameters: initial values by kind, such as "weight", in the order of the arguments. Each parameter is a vector
            [width], named after its norm and its kind: `ffn_norm_weight`.
        saved: number of tensors of x's size that torch keeps for the backward pass of an uncompiled layer.
    """

    function: Callable[..., Tensor] | None
    parameters: Mapping[str, Initial]
    saved: int = 1


def layer_norm_no_bias(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`block.layer_norm` without bias."""
    import torch.nn.functional as F

    return F.layer_norm(x, weight.shape, weight.to(x.dtype), None, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467): root mean square 1, then scaled."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(x.dtype)


def rms_norm_bias(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """RMSNorm with a bias."""
    return rms_norm(x, weight, eps) + bias.to(x.dtype)


NORMS: dict[str, Norm] = {
    "layer_norm": Norm(None, {"weight": "ones", "bias": "zeros"}),
    "layer_norm_no_bias": Norm(layer_norm_no_bias, {"weight": "ones"}),
    "rms_norm": Norm(rms_norm, {"weight": "ones"}, saved=2),
    "rms_norm_bias": Norm(rms_norm_bias, {"weight": "ones", "bias": "zeros"}, saved=2),
}


def get_norm(name: str) -> Norm:
    """Return the norm that `model.norm` names. Raises `InputError` for an unknown name."""
    if name not in NORMS:
        raise InputError(f"model.norm: {not_one_of(name, NORMS)}")
    return NORMS[name]

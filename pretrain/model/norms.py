"""The norms that `model.norm` can select: function and parameters of each. BERT's LayerNorm is in `block.py`.

Cost estimates import this module without torch, so each function imports torch when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from pretrain.common.errors import InputError
from pretrain.common.kinds import unknown_name_message

if TYPE_CHECKING:
    from torch import Tensor

Initial = Literal["normal", "zeros", "ones"]


class Norm(NamedTuple):
    """A norm over the last axis.

    Attributes:
        function: `function(x, *parameters, eps)` with x [..., width], which is fp32 in all runs; returns the same
            shape and dtype. None means BERT's LayerNorm, `block.layer_norm`.
        parameters: initial value of each parameter, such as "weight", in the order of the arguments. Each is a vector
            [width], whose full name includes the norm: `ffn_norm_weight`.
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
    """RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467) scales x to a root mean square of 1, then by `weight`."""
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
        raise InputError(f"model.norm: {unknown_name_message(name, NORMS)}")
    return NORMS[name]

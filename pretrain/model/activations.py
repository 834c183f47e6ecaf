"""The activations that `model.activation` and the heads can select. BERT's GELU is in `block.py`.

Cost estimates read this table without torch, so an activation imports torch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from pretrain.common.errors import InputError
from pretrain.common.kinds import unknown_name_message

if TYPE_CHECKING:
    from torch import Tensor


class Activation(NamedTuple):
    """An elementwise activation.

    Attributes:
        function: maps a tensor to one of the same shape and dtype. None means BERT's GELU, `block.activation_function`.
        saves_input: whether torch keeps the input for the backward pass, rather than the output.
        released_names: its names in config.json of released models; exports use the first.
    """

    function: Callable[[Tensor], Tensor] | None
    saves_input: bool
    released_names: tuple[str, ...] = ()


def relu(x: Tensor) -> Tensor:
    """max(x, 0), elementwise."""
    return x.relu()


def silu(x: Tensor) -> Tensor:
    """SiLU, also called Swish (Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2)."""
    import torch.nn.functional as F

    return F.silu(x)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent, elementwise."""
    return x.tanh()


ACTIVATIONS: dict[str, Activation] = {
    # transformers' gelu_python is the same function.
    "gelu": Activation(None, saves_input=True, released_names=("gelu", "gelu_python")),
    "relu": Activation(relu, saves_input=False, released_names=("relu",)),
    "silu": Activation(silu, saves_input=True, released_names=("silu", "swish")),
    "tanh": Activation(tanh, saves_input=False, released_names=("tanh",)),
}


def get_activation(name: str) -> Activation:
    """Return the activation that `model.activation` names. Raises `InputError` for an unknown name."""
    if name not in ACTIVATIONS:
        raise InputError(f"model.activation: {unknown_name_message(name, ACTIVATIONS)}")
    return ACTIVATIONS[name]

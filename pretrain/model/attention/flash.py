"""torch's varlen flash kernel on CUDA, for half precision.

Shape letters: T tokens, R query positions, S sequences, N heads, D width of a head.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from pretrain.common.errors import MachineError
from pretrain.config import FLASH_WIDTHS
from pretrain.model.attention.layout import AttentionOptions, TokenLayout, query_boundaries

# What has the kernels of `torch.nn.attention`'s registry.
_PACKAGES = {"fa3": "FlashAttention-3 (its module flash_attn_interface)", "fa4": "the package flash-attn-4"}


def has_flash(hidden: Tensor, heads: int) -> bool:
    """Whether the kernel takes hidden states [T, H] of this device, dtype and width of a head."""
    if not hidden.is_cuda or hidden.dtype == torch.float32:
        return False
    return _device_has_it(hidden.device) and hidden.shape[1] // heads in FLASH_WIDTHS


def use_kernel(name: str) -> None:
    """Let this process compute flash attention with another kernel that torch knows: fa3 or fa4.

    Raises `MachineError` if its package is not installed, or this torch has no such choice.
    """
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None:
        raise MachineError(
            f"engine.flash_attention: {name}: torch {torch.__version__} offers no other kernels. Set it to torch."
        )
    try:
        activate(name.upper())
    except (ImportError, RuntimeError, ValueError) as error:
        raise MachineError(
            f"engine.flash_attention: {name}: cannot be used here ({error}). Install {_PACKAGES[name]}, or set it to "
            "torch."
        ) from error


def flash_attention(qkv: Tensor, layout: TokenLayout, options: AttentionOptions) -> Tensor:
    """[R, H] context from [T, 3H]; dropout comes from the device's generator."""
    if layout.rows is not None and (options.window or options.causal):
        # The kernel counts distances from the ends of queries and keys, as if the queries were neighbours.
        return flash_attention(qkv, layout._replace(rows=None), options).index_select(0, layout.rows)
    q_RND, k_TND, v_TND = qkv.unflatten(-1, (3, options.heads, -1)).unbind(1)
    cu_queries = layout.cu_seqlens
    if layout.rows is not None:
        q_RND, cu_queries = q_RND.index_select(0, layout.rows), query_boundaries(layout.rows, layout.cu_seqlens)
    right = 0 if options.causal else options.window
    window = {"window_size_left": options.window, "window_size_right": right} if options.window else {}
    # The op below torch.nn.attention.varlen, called directly because that wrapper has no dropout.
    context_RND = torch.ops.aten._flash_attention_forward(
        q_RND,
        k_TND,
        v_TND,
        cu_queries,
        layout.cu_seqlens,
        layout.max_seqlen,
        layout.max_seqlen,
        options.dropout,
        options.causal,
        False,
        **window,
    )[0]
    return context_RND.flatten(1)


@functools.cache
def _device_has_it(device: torch.device) -> bool:
    """Ampere or newer."""
    return torch.cuda.get_device_capability(device) >= (8, 0)

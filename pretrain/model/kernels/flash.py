"""torch's varlen flash kernel on CUDA, for half precision.

Shape letters: T tokens, R query positions, S sequences, N heads, D width of a head.
"""

import functools

import torch
from torch import Tensor

from pretrain.config import FLASH_WIDTHS
from pretrain.model.kernels.layout import AttentionOptions, TokenLayout, query_boundaries


def has_flash(hidden: Tensor, heads: int) -> bool:
    """Return whether the kernel supports hidden states [T, H] of this device, dtype and head width."""
    if not hidden.is_cuda or hidden.dtype == torch.float32:
        return False
    return _is_ampere(hidden.device) and hidden.shape[1] // heads in FLASH_WIDTHS


def flash_attention(qkv: Tensor, layout: TokenLayout, options: AttentionOptions) -> Tensor:
    """Compute the context [R, H] from [T, 3H]; dropout uses the device's generator."""
    if layout.rows is not None and options.window:
        # The kernel measures distances from the last query and the last key, as if the queries were adjacent.
        return flash_attention(qkv, layout._replace(rows=None), options).index_select(0, layout.rows)
    q_RND, k_TND, v_TND = qkv.unflatten(-1, (3, options.heads, -1)).unbind(1)
    cu_queries = layout.cu_seqlens
    if layout.rows is not None:
        q_RND, cu_queries = q_RND.index_select(0, layout.rows), query_boundaries(layout.rows, layout.cu_seqlens)
    window = dict.fromkeys(("window_size_left", "window_size_right"), options.window) if options.window else {}
    # The op that torch.nn.attention.varlen wraps; the wrapper has no dropout.
    context_RND = torch.ops.aten._flash_attention_forward(
        q_RND,
        k_TND,
        v_TND,
        cu_queries,
        layout.cu_seqlens,
        layout.max_seqlen,
        layout.max_seqlen,
        options.dropout,
        False,  # is_causal
        False,
        **window,
    )[0]
    return context_RND.flatten(1)


@functools.cache
def _is_ampere(device: torch.device) -> bool:
    """Return whether a GPU is Ampere or newer."""
    return torch.cuda.get_device_capability(device) >= (8, 0)

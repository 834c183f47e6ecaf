"""torch's varlen flash kernel on CUDA, for half precision.

Shape letters: T tokens, R query positions, S sequences, N heads, D width of a head.
"""

import functools

import torch
from torch import Tensor

from pretrain.config import FLASH_WIDTHS
from pretrain.model.kernels.layout import AttentionOptions, TokenLayout, query_boundaries


def has_flash(hidden: Tensor, heads: int) -> bool:
    """Return whether the kernel supports the device, dtype and head width of `hidden` [T, H]."""
    if not hidden.is_cuda or hidden.dtype == torch.float32:
        return False
    return _is_ampere_or_newer(hidden.device) and hidden.shape[1] // heads in FLASH_WIDTHS


def flash_attention(qkv: Tensor, layout: TokenLayout, options: AttentionOptions) -> Tensor:
    """Compute the context [R, H] from [T, 3H]; dropout uses the device's random number generator."""
    if layout.queries is not None and options.window:
        # The kernel assumes adjacent queries that end with the last key, so its windows would be wrong.
        return flash_attention(qkv, layout._replace(queries=None), options).index_select(0, layout.queries)
    q_RND, k_TND, v_TND = qkv.unflatten(-1, (3, options.heads, -1)).unbind(1)
    cu_queries = layout.cu_seqlens
    if layout.queries is not None:
        q_RND, cu_queries = q_RND.index_select(0, layout.queries), query_boundaries(layout.queries, layout.cu_seqlens)
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
        False,  # return_debug_mask
        **window,
    )[0]
    return context_RND.flatten(1)


@functools.cache
def _is_ampere_or_newer(device: torch.device) -> bool:
    """Return whether a GPU is Ampere or newer."""
    return torch.cuda.get_device_capability(device) >= (8, 0)

"""Attention with torch's varlen flash kernel on CUDA, in half precision.

Shape letters: T tokens, R query positions, N heads, D width of a head, H = N * D.
"""

import functools

import torch
from torch import Tensor

from pretrain.config import FLASH_WIDTHS
from pretrain.model.kernels.layout import AttentionOptions, TokenLayout, query_boundaries


def supports_flash(hidden: Tensor, heads: int) -> bool:
    """Return whether the kernel supports the device, dtype and head width of `hidden` [T, H]."""
    if not hidden.is_cuda or hidden.dtype == torch.float32:
        return False
    return _is_ampere_or_newer(hidden.device) and hidden.shape[1] // heads in FLASH_WIDTHS


def flash_attention(qkv: Tensor, layout: TokenLayout, options: AttentionOptions) -> Tensor:
    """Compute the attention output [R, H] from `qkv` [T, 3H]; dropout uses the device's torch generator."""
    if layout.queries is not None and options.window:
        # The kernel assumes contiguous queries, the last one aligned with the last key: with a subset of queries, its
        # sliding windows would be misplaced. So compute all outputs, then select.
        return flash_attention(qkv, layout._replace(queries=None), options).index_select(0, layout.queries)
    q_RND, k_TND, v_TND = qkv.unflatten(-1, (3, options.heads, -1)).unbind(1)
    cu_seqlens_q = layout.cu_seqlens
    if layout.queries is not None:
        q_RND, cu_seqlens_q = q_RND.index_select(0, layout.queries), query_boundaries(layout.queries, layout.cu_seqlens)
    window_sizes = {"window_size_left": options.window, "window_size_right": options.window} if options.window else {}
    # The op that torch.nn.attention.varlen wraps; the wrapper has no dropout.
    output_RND = torch.ops.aten._flash_attention_forward(
        q_RND,
        k_TND,
        v_TND,
        cu_seqlens_q,
        layout.cu_seqlens,
        layout.max_seqlen,
        layout.max_seqlen,
        options.dropout,
        False,  # is_causal
        False,  # return_debug_mask
        **window_sizes,
    )[0]
    return output_RND.flatten(1)


@functools.cache
def _is_ampere_or_newer(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)

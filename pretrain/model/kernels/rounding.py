"""Rounds up the number of rows in bf16 matmuls on a CPU.

oneDNN generates code for each matmul shape, which takes 0.4 to 1.4 ms with AVX-512 and 2 to 50 ms with AMX: about the
time of the matmul itself. The number of tokens of unpadded batches varies from step to step. torch's fp32 matmuls need
no code generation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.model.kernels.layout import Tokens, UnpaddedBatch

_MIN_MULTIPLE, _MAX_SHARE = 16, 1 / 16  # smallest multiple to which rows are rounded; maximum share of padding rows
LENGTH_MULTIPLE = 8  # attention groups are padded to multiples of it: 31 shapes instead of 221 in 20 typical steps


def num_padding_rows(num_rows: int, like: Tensor) -> int:
    """Return the number of rows to add to `num_rows` rows, for matmuls in the dtype and on the device of `like`."""
    if not compiles_each_shape(like):
        return 0
    return -num_rows % max(_MIN_MULTIPLE, 1 << max(0, int(num_rows * _MAX_SHARE).bit_length() - 1))


def compiles_each_shape(like: Tensor) -> bool:
    """Return whether oneDNN generates code for each matmul shape in the dtype and on the device of `like`."""
    return like.is_cpu and like.dtype != torch.float32


def pad_rows(x: Tensor, rows: int, value: int = 0) -> Tensor:
    """Append `rows` rows of `value` to `x`."""
    return F.pad(x, (*(0, 0) * (x.dim() - 1), 0, rows), value=value) if rows else x


def pad_tokens(batch: UnpaddedBatch, like: Tensor) -> UnpaddedBatch:
    """Append padding sequences, none longer than the longest sequence, if matmuls in the dtype of `like` need them."""
    tokens = len(batch.input_ids)
    padding = num_padding_rows(tokens, like)
    if not padding:
        return batch
    count = -(-padding // max(batch.lengths))
    lengths = tuple((padding + index) // count for index in range(count))
    ends = tokens + torch.tensor(lengths).cumsum(0)
    return Tokens(
        pad_rows(batch.input_ids, padding),
        pad_rows(batch.token_types, padding),
        torch.cat([batch.positions, *map(torch.arange, lengths)]),
        torch.cat([batch.cu_seqlens, ends.int()]),
        pad_rows(batch.token_keys, padding),
        (*batch.lengths, *lengths),
    )

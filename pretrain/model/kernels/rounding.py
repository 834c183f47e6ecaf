"""Rounds up the number of rows in bf16 matrix products on a CPU.

oneDNN generates code for each shape of a product, which takes 0.4 to 1.4 ms with AVX-512 and 2 to 50 ms with AMX, as
long as the product itself. The number of tokens of unpadded batches changes in each step. torch's fp32 products need
no code generation.

Shape letters: T tokens, S sequences.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.model.kernels.layout import Tokens, UnpaddedBatch

_MIN_MULTIPLE, _MAX_SHARE = 16, 1 / 16  # smallest multiple to which rows are rounded; maximum share of padding rows
LENGTH_MULTIPLE = 8  # divides the padded lengths of groups: 31 distinct shapes instead of 221 in 20 steps


def rows_to_pad(rows: int, like: Tensor) -> int:
    """Return the number of rows to add to `rows`, for products in the dtype and on the device of `like`."""
    if not compiles_each_shape(like):
        return 0
    return -rows % max(_MIN_MULTIPLE, 1 << max(0, int(rows * _MAX_SHARE).bit_length() - 1))


def compiles_each_shape(like: Tensor) -> bool:
    """Return whether oneDNN generates code for each shape of products in the dtype and on the device of `like`."""
    return like.is_cpu and like.dtype != torch.float32


def pad_rows(x: Tensor, rows: int, value: int = 0) -> Tensor:
    """Append `rows` rows of `value` to `x`."""
    return F.pad(x, (*(0, 0) * (x.dim() - 1), 0, rows), value=value) if rows else x


def pad_tokens(batch: UnpaddedBatch, like: Tensor) -> UnpaddedBatch:
    """Append padding sequences, none longer than the longest sequence, if products in the dtype of `like` need them."""
    tokens = len(batch.input_ids)
    padding = rows_to_pad(tokens, like)
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

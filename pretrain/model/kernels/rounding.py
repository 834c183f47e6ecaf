"""Rounds up the rows of matrix products in bf16 on a CPU.

oneDNN generates code for each shape of a product: 0.4 to 1.4 ms with AVX-512, 2 to 50 ms with AMX, as much as the
product itself takes. The number of tokens of unpadded batches changes in each step. torch's fp32 products are not
generated for a shape.

Shape letters: T tokens, S sequences.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.model.kernels.layout import Tokens, UnpaddedBatch

_MIN_MULTIPLE, _MAX_SHARE = 16, 1 / 16  # the smallest multiple of rows; the largest share of rows that rounding adds
LENGTH_MULTIPLE = 8  # of padded lengths of sequences in bf16: 31 shapes instead of 221 in 20 steps


def missing_rows(rows: int, like: Tensor) -> int:
    """Return the number of rows to add to `rows` in products of the dtype and device of `like`."""
    if not compiles_each_shape(like):
        return 0
    return -rows % max(_MIN_MULTIPLE, 1 << max(0, int(rows * _MAX_SHARE).bit_length() - 1))


def compiles_each_shape(like: Tensor) -> bool:
    """Return whether products of this dtype and device are oneDNN's."""
    return like.is_cpu and like.dtype != torch.float32


def add_rows(x: Tensor, rows: int, value: int = 0) -> Tensor:
    """Append so many rows of `value` to `x`."""
    return F.pad(x, (*(0, 0) * (x.dim() - 1), 0, rows), value=value) if rows else x


def with_round_tokens(batch: UnpaddedBatch, like: Tensor) -> UnpaddedBatch:
    """Append sequences of filler, none longer than the longest, if products of the dtype of `like` need them."""
    tokens = len(batch.input_ids)
    more = missing_rows(tokens, like)
    if not more:
        return batch
    count = -(-more // max(batch.lengths))
    lengths = tuple((more + number) // count for number in range(count))
    ends = tokens + torch.tensor(lengths).cumsum(0)
    return Tokens(
        add_rows(batch.input_ids, more),
        add_rows(batch.token_types, more),
        torch.cat([batch.positions, *map(torch.arange, lengths)]),
        torch.cat([batch.cu_seqlens, ends.int()]),
        add_rows(batch.token_keys, more),
        (*batch.lengths, *lengths),
    )

"""Batching of tensors for `torch._foreach_*`.

On a GPU, one operation takes a list of tensors: BERT-Large has nearly 500 tensors, and launching a dozen kernels for
each takes longer than running them. On a CPU, without kernel launches, an operation takes one tensor, so that values
that the next operation reads are still in the cache.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

foreach: Any = torch  # untyped, because torch's type stubs lack `_foreach_*`

BATCH_ENTRIES = 1 << 25  # maximum number of entries per operation on a GPU, whose temporaries take up to 128 MB each


def uses_foreach(tensor: Tensor) -> bool:
    """Return whether operations on this tensor's device should take lists of tensors."""
    return not tensor.is_cpu


def batches(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Yield slices of `tensors`, one per operation: one tensor, or on a GPU up to `BATCH_ENTRIES` entries."""
    start, entries = 0, 0
    for index, tensor in enumerate(tensors):
        if index > start and (not uses_foreach(tensor) or entries + tensor.numel() > BATCH_ENTRIES):
            yield slice(start, index)
            start, entries = index, 0
        entries += tensor.numel()
    if tensors:
        yield slice(start, len(tensors))


def single_or_list(scalars: Sequence[Tensor]) -> Any:
    """Return one tensor if all `scalars` are the same object, which makes `_foreach_*` faster; else the list."""
    return scalars[0] if all(scalar is scalars[0] for scalar in scalars) else list(scalars)

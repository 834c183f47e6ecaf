"""Operations on lists of tensors.

On a GPU, operations take lists of tensors (`torch._foreach_*`): BERT-Large has nearly 500 tensors, and launching a
dozen kernels for each takes longer than running them. On a CPU, without kernel launches, operations take one tensor at
a time, so that values that are read again are still in the cache.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

foreach: Any = torch  # for `torch._foreach_*`, which its type stubs do not export

BATCH_ENTRIES = 1 << 25  # per operation on a GPU: each temporary takes up to 128 MB


def in_lists(tensor: Tensor) -> bool:
    """Return whether operations on this tensor's device take lists, as on a GPU."""
    return not tensor.is_cpu


def batches(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Yield slices of `tensors`, one per operation; they bound the size of its temporaries."""
    start, entries = 0, 0
    for number, tensor in enumerate(tensors):
        if number > start and (not in_lists(tensor) or entries + tensor.numel() > BATCH_ENTRIES):
            yield slice(start, number)
            start, entries = number, 0
        entries += tensor.numel()
    if tensors:
        yield slice(start, len(tensors))


def common(scalars: Sequence[Tensor]) -> Any:
    """Return the tensor if all are the same object, which is fastest for operations on lists; else their list."""
    return scalars[0] if all(scalar is scalars[0] for scalar in scalars) else list(scalars)

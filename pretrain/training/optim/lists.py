"""Operations on many tensors at a time.

On a GPU an operation takes lists of tensors (`torch._foreach_*`): BERT-Large has nearly 500, and to launch a dozen
kernels for each takes longer than to run them. On a CPU, where nothing is launched, it is one tensor at a time: what is
read again is still in the cache.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

foreach: Any = torch  # for `torch._foreach_*`, which its type stubs do not export

ENTRIES_AT_ONCE = 1 << 25  # that one operation steps on a GPU: each temporary takes up to 128 MB


def in_lists(tensor: Tensor) -> bool:
    """Whether an operation takes many tensors where this one is: on a GPU, where each kernel has to be launched."""
    return not tensor.is_cpu


def together(tensors: Sequence[Tensor]) -> Iterator[slice]:
    """Slices of `tensors`: those that one operation takes, which makes temporaries of their size."""
    begin, entries = 0, 0
    for number, tensor in enumerate(tensors):
        if number > begin and (not in_lists(tensor) or entries + tensor.numel() > ENTRIES_AT_ONCE):
            yield slice(begin, number)
            begin, entries = number, 0
        entries += tensor.numel()
    if tensors:
        yield slice(begin, len(tensors))


def common(scalars: Sequence[Tensor]) -> Any:
    """The one tensor that they all are, which operations on many tensors take fastest; else the list of them."""
    return scalars[0] if all(scalar is scalars[0] for scalar in scalars) else list(scalars)

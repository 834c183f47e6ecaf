"""torch.compile and its settings: the only place that touches them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Inductor's own launcher of kernels holds Python's lock while a GPU's queue is full, so the threads that report
# heartbeats stand still; Triton's does not. Inductor reads the variable when it is imported.
os.environ.setdefault("TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER", "0")

# Whether this torch supports axes whose size the compiler must not rely on; older versions were not tested.
MARKS_UNKNOWN_SIZES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
# Sizes that the compiler assumes for such axes; its fusion decisions depend on them.
_TYPICAL = {"C": 2, "G": 8, "B": 64, "Q": 128, "L": 128, "T": 1024}


@functools.cache
def program(function: Callable[..., Any], fused: bool) -> Callable[..., Any]:
    """`function`, compiled once for all sizes of batches when `fused`."""
    if not fused:
        return function
    compiled = torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        _configure()
        return compiled(*arguments, **keywords)

    return call


def program_of_any_size(function: Callable[..., Any], axes: tuple[str, ...], fused: bool) -> Callable[..., Any]:
    """`program(function, fused)`, compiled once for sizes of 1 and all others on some leading axes of its arguments.

    torch.compile takes a size of 1 for a constant. It would compile again, in the middle of training, when a group has
    a single sequence or each of its sequences a single query.

    Args:
        axes: for each argument the letters of those axes, keys of `_TYPICAL`; "" for an argument without any.
    """
    compiled = program(function, fused)
    if not fused or not MARKS_UNKNOWN_SIZES:
        return compiled
    known = set()  # sizes compiled so far: marks matter only at compilation, and cost as much as a small kernel

    def call(*arguments: Any) -> Any:
        # The compiler takes the number of threads for a constant, too, and compiles again for another.
        variant = (torch.get_num_threads(), *(x.dtype if isinstance(x, Tensor) else x for x in arguments))
        if variant not in known:
            known.add(variant)
            for argument, letters in zip(arguments, axes, strict=False):
                if isinstance(argument, Tensor):
                    _mark_unknown(argument, letters)
        return compiled(*arguments)

    return call


_configured = threading.local()


def _configure() -> None:
    """Apply the settings, once in each thread: torch keeps them apart, and CUDA's backward pass has its own thread."""
    if hasattr(_configured, "done"):
        return
    _configured.done = True
    # Sizes that happen to be equal in the first batch must not be taken for one size: that compiles again later.
    torch.fx.experimental._config.use_duck_shape = False  # pyright: ignore[reportAttributeAccessIssue]
    torch._dynamo.config.recompile_limit = 32
    torch._dynamo.config.specialize_float = True
    # Results of cheap elementwise operations are recomputed in the backward pass: faster, and half the memory.
    torch._functorch.config.aggressive_recomputation = True  # pyright: ignore[reportAttributeAccessIssue]


def _mark_unknown(x: Tensor, letters: str) -> None:
    for axis, letter in enumerate(letters):
        torch._dynamo.decorators.mark_unbacked(x, axis, hint_override=_TYPICAL[letter])
    if letters and x._base is not None:  # the compiler reads its sizes, too
        for axis in range(x._base.dim()):
            torch._dynamo.decorators.mark_unbacked(x._base, axis, hint_override=_TYPICAL["B"])

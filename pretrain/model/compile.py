"""torch.compile and its settings: the only place that touches them."""

import contextlib
import functools
import itertools
import os
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretrain.common import commands

# Inductor's own launcher of kernels holds Python's lock while a GPU's queue is full, so the threads that report
# heartbeats stand still; Triton's does not. Inductor reads the variable when it is imported.
os.environ.setdefault("TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER", "0")

# Whether this torch supports axes whose size the compiler must not rely on; older versions were not tested.
MARKS_UNKNOWN_SIZES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
# Sizes that the compiler assumes for the axes of a batch, by their letters: how it vectorizes, runs in parallel and
# splits sums depends on them. Otherwise it takes those of the first call, and its cache on disk hands the code of a
# short text, which runs in one thread, to later runs with large batches.
_TYPICAL = {"G": 8, "B": 64, "Q": 128, "L": 128, "K": 1024, "T": 1024, "M": 8192}
_EQUAL = "KM"  # letters that stand for the same size in all arguments of a call
_LINKING_SECONDS = 10.0  # more than a linker takes, and less than the next start of a run until it compiles


@functools.cache
def program(function: Callable[..., Any], fused: bool, axes: tuple[str, ...]) -> Callable[..., Any]:
    """`function`, compiled when `fused`, once for all sizes of batches.

    Args:
        axes: for each of the first arguments, the letters of its leading axes, keys of `_TYPICAL`, whose size the
            compiled code does not rely on, not even if it is 1. It relies on the sizes of these arguments' other axes,
            which are the model's. The letters of a tuple are those of each of its tensors. Parameters need none.
    """
    if not fused:
        return function
    known = set()  # variants compiled so far: marks matter only at compilation, and cost as much as a small kernel

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        _configure()
        # The compiler takes the number of threads for a constant, too, and compiles again for another.
        kinds = (_kind(x, letters) for x, letters in itertools.zip_longest(arguments, axes, fillvalue=""))
        variant = (torch.get_num_threads(), torch.is_grad_enabled(), *kinds)
        if variant not in known:
            known.add(variant)
            for argument, letters in zip(arguments, axes, strict=False):
                for x in argument if isinstance(argument, tuple) else (argument,):
                    if isinstance(x, Tensor):
                        _mark_axes(x, letters)
        integers = tuple(x if type(x) is int else None for x in arguments)
        compiled = compiled_function(function, integers)
        try:
            return compiled(*arguments)
        except RuntimeError as error:
            if not _forget_killed(error):
                raise
        return compiled(*arguments)

    return call


def _forget_killed(error: RuntimeError) -> bool:
    """Whether a signal ended g++. It was to the process group, as torchrun's, whose stop saves this step first."""
    cause = getattr(error, "inner_exception", None)
    if getattr(cause and cause.__cause__, "returncode", 0) >= 0:
        return False
    from torch._inductor.utils import clear_caches

    clear_caches()  # they have the failure
    return True


@functools.cache
def compiled_function(function: Callable[..., Any], integers: tuple[int | None, ...]) -> Callable[..., Any]:
    """The program of `function` in which these arguments are constants; it takes all of them and reads the others.

    The compiler would take an integer for another size that varies. On a GPU, divisions by it in the addresses of
    elements then cost more than to read them: the rotation of heads took forty times as long as its memory traffic.
    """

    def inner(*arguments: Any, integers: tuple[int | None, ...] = integers) -> Any:
        return function(*(x if n is None else n for x, n in zip(arguments, integers, strict=True)))

    # Dynamo relies on the value of an integer if it is the default of a function that is inlined.
    @functools.wraps(function)
    def with_constants(*arguments: Any) -> Any:
        return inner(*arguments)

    return torch.compile(with_constants if any(n is not None for n in integers) else function, dynamic=True)


def _kind(argument: Any, letters: str) -> Any:
    """What the compiler compiles again for: of a tensor its type and the sizes of the model's axes."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.requires_grad, argument.is_inference(), argument.shape[len(letters) :]
    return tuple(_kind(x, letters) for x in argument) if isinstance(argument, tuple) else argument


@functools.cache
def remove_unfinished(folder: Path) -> None:
    """Delete libraries in Inductor's cache that a killed linker left unfinished: every later run would fail on them.

    Inductor's compiler writes them where they are loaded from. A file of the last seconds may be another process's.
    """
    for path in folder.glob("*/*.so"):
        with contextlib.suppress(OSError):
            state = path.stat()
            if time.time() - state.st_mtime > _LINKING_SECONDS and not _is_whole(path, state.st_size):
                path.unlink()


def _is_whole(library: Path, size: int) -> bool:
    """Whether an ELF file (64 bits) has its last part, the table of sections, which its header names."""
    with library.open("rb") as file:
        header = file.read(64)
    if len(header) < 64:
        return False
    (begin,), (each, count) = struct.unpack_from("<Q", header, 0x28), struct.unpack_from("<HH", header, 0x3A)
    return 0 < begin <= size - each * count


_configured = threading.local()


def _configure() -> None:
    """Apply the settings, once in each thread: torch keeps them apart, and CUDA's backward pass has its own thread."""
    if hasattr(_configured, "done"):
        return
    _configured.done = True
    commands.compiles.set()
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    for folder in [Path(given)] if given else Path(tempfile.gettempdir()).glob("torchinductor_*"):
        remove_unfinished(folder)
    # Sizes that happen to be equal in the first batch must not be taken for one size: that compiles again later.
    torch.fx.experimental._config.use_duck_shape = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.compiler.config.recompile_limit = 32
    torch._dynamo.config.specialize_float = True
    # Results of cheap elementwise operations are recomputed in the backward pass: faster, and half the memory.
    torch._functorch.config.aggressive_recomputation = True  # pyright: ignore[reportAttributeAccessIssue]


def _mark_axes(x: Tensor, letters: str) -> None:
    for axis in range(len(letters), x.dim()):
        torch._dynamo.mark_static(x, axis)
    if not MARKS_UNKNOWN_SIZES:
        return
    mark = torch._dynamo.decorators.mark_unbacked
    for axis, letter in enumerate(letters):
        mark(x, axis, hint_override=_TYPICAL[letter], shape_id=letter if letter in _EQUAL else None)
    if letters and x._base is not None:  # the compiler reads its sizes, too
        for axis in range(x._base.dim()):
            mark(x._base, axis, hint_override=_TYPICAL["B"])

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

# Inductor's kernel launcher holds the GIL while a GPU's queue is full, which blocks the heartbeat threads; Triton's
# does not. Inductor reads the variable when it is imported.
os.environ.setdefault("TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER", "0")

# Whether torch supports unbacked sizes, whose values compiled code does not assume; older versions were not tested.
SUPPORTS_UNBACKED_SIZES = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
# Sizes that the compiler assumes for the axes of a batch, by letter: its vectorization, parallelization and
# splitting of sums depend on them. Otherwise it assumes the sizes of the first call, and its cache on disk would give
# the single-threaded code of a short batch to later runs with large batches.
_ASSUMED_SIZES = {"G": 8, "B": 64, "Q": 128, "L": 128, "K": 1024, "T": 1024, "M": 8192}
_EQUAL_SIZES = "KM"  # letters that mean the same size in all arguments of a call
# No linker is assumed to be writing a file that is older than this; a restarted run takes longer until it compiles.
_LINKING_SECONDS = 10.0


@functools.cache
def maybe_compile(function: Callable[..., Any], fused: bool, axes: tuple[str, ...]) -> Callable[..., Any]:
    """Return `function`, compiled once for all batch sizes if `fused`.

    Args:
        axes: for each of the first arguments, the letters of its leading axes, keys of `_ASSUMED_SIZES`. The compiled
            code does not rely on their sizes, not even on a size of 1; it does rely on the sizes of other axes, which
            the model determines. The letters of a tuple apply to each of its tensors. Parameters need no letters.
    """
    if not fused:
        return function
    seen_variants = set()  # marking axes again would have no effect, and take as long as a small kernel

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        _configure()
        # The compiler also treats the number of threads as a constant, and recompiles if it changes.
        keys = (_recompile_key(x, letters) for x, letters in itertools.zip_longest(arguments, axes, fillvalue=""))
        variant = (torch.get_num_threads(), torch.is_grad_enabled(), *keys)
        if variant not in seen_variants:
            seen_variants.add(variant)
            for argument, letters in zip(arguments, axes, strict=False):
                for x in argument if isinstance(argument, tuple) else (argument,):
                    if isinstance(x, Tensor):
                        _mark_axes(x, letters)
        integers = tuple(x if type(x) is int else None for x in arguments)
        compiled = compiled_function(function, integers)
        try:
            return compiled(*arguments)
        except RuntimeError as error:
            if not _clear_if_killed(error):
                raise
        return compiled(*arguments)

    return call


def _clear_if_killed(error: RuntimeError) -> bool:
    """Clear the caches and return True if a signal killed g++: torchrun also signals g++, but the step must finish."""
    cause = getattr(error, "inner_exception", None)
    if getattr(cause and cause.__cause__, "returncode", 0) >= 0:
        return False
    from torch._inductor.utils import clear_caches

    clear_caches()  # they contain the failed compilation
    return True


@functools.cache
def compiled_function(function: Callable[..., Any], integers: tuple[int | None, ...]) -> Callable[..., Any]:
    """Compile `function` with these integer arguments as constants. The result also takes them, but ignores them.

    The compiler would treat an integer as a dynamic size. On a GPU, dividing by it in address computations costs more
    than reading the elements: the rotation of heads took forty times as long as its memory traffic.
    """

    def inner(*arguments: Any, integers: tuple[int | None, ...] = integers) -> Any:
        return function(*(x if n is None else n for x, n in zip(arguments, integers, strict=True)))

    # Dynamo treats an integer as a constant if it is a default argument of an inlined function.
    @functools.wraps(function)
    def with_constants(*arguments: Any) -> Any:
        return inner(*arguments)

    return torch.compile(with_constants if any(n is not None for n in integers) else function, dynamic=True)


def _recompile_key(argument: Any, letters: str) -> Any:
    """Return what recompiles a function if it differs: for a tensor, its dtype and sizes of axes without letters."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.requires_grad, argument.is_inference(), argument.shape[len(letters) :]
    return tuple(_recompile_key(x, letters) for x in argument) if isinstance(argument, tuple) else argument


@functools.cache
def remove_unfinished_libraries(folder: Path) -> None:
    """Delete libraries in Inductor's cache that a killed linker left unfinished: every later run would fail on them.

    Inductor's linker writes directly to the cache. Another process may still be writing a recent file.
    """
    for path in folder.glob("*/*.so"):
        with contextlib.suppress(OSError):
            status = path.stat()
            if time.time() - status.st_mtime > _LINKING_SECONDS and not _is_complete(path, status.st_size):
                path.unlink()


def _is_complete(library: Path, size: int) -> bool:
    """Return whether a 64-bit ELF file contains its last part, the section table, whose offset is in the header."""
    with library.open("rb") as file:
        header = file.read(64)
    if len(header) < 64:
        return False
    (offset,), (entry_size, count) = struct.unpack_from("<Q", header, 0x28), struct.unpack_from("<HH", header, 0x3A)
    return 0 < offset <= size - entry_size * count


_configured = threading.local()


def _configure() -> None:
    """Apply the settings once per thread: torch's are per thread, and CUDA's backward pass runs in another one."""
    if hasattr(_configured, "done"):
        return
    _configured.done = True
    commands.compilation_started.set()
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    for folder in [Path(cache)] if cache else Path(tempfile.gettempdir()).glob("torchinductor_*"):
        remove_unfinished_libraries(folder)
    # Sizes that happen to be equal in the first batch must not be treated as one size, which would recompile later.
    torch.fx.experimental._config.use_duck_shape = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.compiler.config.recompile_limit = 32
    torch._dynamo.config.specialize_float = True
    # Results of cheap elementwise operations are recomputed in the backward pass: faster, and half the memory.
    torch._functorch.config.aggressive_recomputation = True  # pyright: ignore[reportAttributeAccessIssue]


def _mark_axes(x: Tensor, letters: str) -> None:
    for axis in range(len(letters), x.dim()):
        torch._dynamo.mark_static(x, axis)
    if not SUPPORTS_UNBACKED_SIZES:
        return
    mark = torch._dynamo.decorators.mark_unbacked
    for axis, letter in enumerate(letters):
        mark(x, axis, hint_override=_ASSUMED_SIZES[letter], shape_id=letter if letter in _EQUAL_SIZES else None)
    if letters and x._base is not None:  # the compiler also reads the sizes of a view's base
        for axis in range(x._base.dim()):
            mark(x._base, axis, hint_override=_ASSUMED_SIZES["B"])

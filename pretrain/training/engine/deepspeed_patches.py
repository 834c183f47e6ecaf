"""Functions that use or replace private names of DeepSpeed (docs/decisions/0158-private-names.md).

The other files of this folder use DeepSpeed's public interface: its engine's methods, the tensors that it passes to our
optimizer, and its optimizer wrapper's `step`. After an upgrade of DeepSpeed, the tests report removed names; review the
remaining ones in its source, and update `CHECKED_VERSION`.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

CHECKED_VERSION = "0.19.8"  # the version of DeepSpeed whose source was read for all names below

# Prefixes of modules in whose functions a rank waits for other ranks. `GATHERING_MODULES` (ZeRO 3) only match the
# innermost frame, since the `wait` of a gathered parameter's handle has no Python frame.
COLLECTIVE_MODULES = "deepspeed.comm"
GATHERING_MODULES = "deepspeed.runtime.zero.partition"

_PART_MULTIPLE = 8  # divisor of the number of entries in each rank's part of the weights


def import_deepspeed() -> Any:
    """Import DeepSpeed, configured not to use C++ and CUDA ops that it would have to compile first."""
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires the variable even for one process
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with without_nvml():
        import deepspeed
        import deepspeed.ops
        import deepspeed.runtime.engine

        deepspeed.accelerator.get_accelerator()
    if not torch.cuda.is_available():
        # Disable the shared-memory collectives for CPU. On a GPU, reading this list would compile all ops.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    optimizer: Any = deepspeed.runtime.engine.DeepSpeedZeroOptimizer
    optimizer.nccl_start_alignment_factor = property(lambda _: _PART_MULTIPLE, lambda *_: None)
    return deepspeed


@contextlib.contextmanager
def without_nvml() -> Iterator[None]:
    """Make DeepSpeed query free memory through torch: with NVML it parses CUDA_VISIBLE_DEVICES as numbers."""
    saved_modules = {name: sys.modules[name] for name in ("pynvml",) if name in sys.modules}
    sys.modules["pynvml"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["pynvml"]
        sys.modules.update(saved_modules)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Make `torch.compile` return functions unchanged inside the context.

    DeepSpeed always imports its Muon, which we do not use. Its compiled functions load 570 modules of the compiler in
    1.2 s of CPU time.
    """
    compile, torch.compile = torch.compile, lambda model=None, **_: model or (lambda function: function)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile  # type: ignore[assignment]


def use_world_group() -> None:
    """Make DeepSpeed use the group of all ranks."""
    import deepspeed.utils.groups

    deepspeed.utils.groups._WORLD_GROUP = dist.group.WORLD


def replace_gradient_sums(optimizer: Any, add: Callable[[nn.Parameter, int], None]) -> None:
    """Make stage 1 or 2 call only `add` for each gradient, with its parameter and the index of its group."""
    for name, replacement in (("process_gradients", add), ("independent_gradient_partition_epilogue", lambda: None)):
        if not hasattr(optimizer, name):  # renamed, so a replacement would have no effect
            raise RuntimeError(f"{type(optimizer).__name__} of DeepSpeed has no {name}, which {CHECKED_VERSION} has")
        setattr(optimizer, name, replacement)


def stage3_weights(parameter: Any) -> Tensor:
    """Return this rank's part of the weights that the model computes with, 1-D, padding included."""
    return parameter.ds_tensor.data.view(-1)

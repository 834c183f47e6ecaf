"""The functions that read or replace private names of DeepSpeed (docs/decisions/0158-private-names.md).

The rest of this folder uses what DeepSpeed makes public: its engine's methods, the tensors that it gives our optimizer
to step, and a wrapper's `step`. When DeepSpeed is upgraded, the tests report the names that are gone; read the others
again in its source and raise `CHECKED`.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

CHECKED = "0.19.8"  # the version of DeepSpeed whose source was read for all names below

# Prefixes of modules in whose functions a rank waits for others. In ZeRO 3 only the innermost frame is in the second,
# since handles of gathered parameters have a `wait` without a frame.
COLLECTIVE_MODULES = "deepspeed.comm"
GATHERING_MODULES = "deepspeed.runtime.zero.partition"

_PART_ENTRIES = 8  # that a rank's part of the weights is a multiple of


# ---- the library


def import_deepspeed() -> Any:
    """DeepSpeed, configured not to use the ops that it would have to compile first."""
    os.environ.setdefault("LOCAL_RANK", "0")  # it requires the variable even for one process
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with without_nvml():
        import deepspeed
        import deepspeed.ops
        import deepspeed.runtime.engine

        deepspeed.accelerator.get_accelerator()
    if not torch.cuda.is_available():
        # Its shared-memory collectives for CPU. To read the list tests all ops by compiling, so a GPU's start leaves it
        # alone.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    optimizer: Any = deepspeed.runtime.engine.DeepSpeedZeroOptimizer
    optimizer.nccl_start_alignment_factor = property(lambda _: _PART_ENTRIES, lambda *_: None)
    return deepspeed


@contextlib.contextmanager
def without_nvml() -> Iterator[None]:
    """Let DeepSpeed ask torch for free memory: with NVML it takes the entries of CUDA_VISIBLE_DEVICES for numbers."""
    found = {name: sys.modules[name] for name in ("pynvml",) if name in sys.modules}
    sys.modules["pynvml"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["pynvml"]
        sys.modules.update(found)


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """While the context lasts, `torch.compile` returns functions as they are.

    With every optimizer DeepSpeed imports its Muon, which we do not use. Its kernels load 570 modules of the compiler,
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


# ---- ZeRO


def replace_gradient_sums(wrapper: Any, add: Callable[[nn.Parameter, int], None]) -> None:
    """Make stage 1 or 2 hand each gradient to `add`, with its parameter and its group's number, and do no more."""
    for name, replacement in (("process_gradients", add), ("independent_gradient_partition_epilogue", lambda: None)):
        if not hasattr(wrapper, name):  # to set it would have no effect
            raise RuntimeError(f"{type(wrapper).__name__} of DeepSpeed has no {name}, which {CHECKED} has")
        setattr(wrapper, name, replacement)


def weights_of_stage_3(parameter: Any) -> Tensor:
    """This rank's part of the weights that the model computes with, 1-D, padding included."""
    return parameter.ds_tensor.data.view(-1)

"""Every private name of DeepSpeed that we read or replace, and the functions that do so.

The rest of this folder uses what DeepSpeed makes public: its engine's methods, the tensors that it gives our optimizer
to step, and a wrapper's `step`. When DeepSpeed is upgraded, the tests report the names in `PRIVATE_NAMES` that are
gone; read the others again in its source and raise `CHECKED`.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

CHECKED = "0.19.8"  # the version of DeepSpeed whose source was read for all names below

_STAGES_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"


class PrivateName(NamedTuple):
    """A name that DeepSpeed does not document.

    Attributes:
        owner: "module" or "module:Class" that defines or assigns the name.
        name: the attribute.
        buys: what we have of it, with a figure.
        checked: the version of DeepSpeed that has the name with the meaning we rely on.
    """

    owner: str
    name: str
    buys: str
    checked: str = CHECKED


PRIVATE_NAMES = (
    PrivateName(
        "deepspeed.ops",
        "__compatible_ops__",
        "on a CPU, 18 to 25 s of the first start, in which an op would be compiled",
    ),
    PrivateName(
        "deepspeed.utils.groups",
        "_WORLD_GROUP",
        "one group of all ranks instead of two: on GPUs a communicator of NCCL, on CPUs a connection to each rank; "
        "DeepSpeed's own would also end waits after torch's 10 or 30 minutes, whatever the run's limit is",
    ),
    PrivateName(
        _STAGES_1_AND_2,
        "process_gradients",
        "fp32 sums of gradients: some 50 bytes of memory traffic for each entry, 30 of the 154 ms of a fine-tuning "
        "step on a CPU; one rounding, where gloo has one for each worker",
    ),
    PrivateName(
        _STAGES_1_AND_2,
        "independent_gradient_partition_epilogue",
        "4 bytes of zeros, written for each entry of this rank's part after each backward pass",
    ),
    PrivateName(
        _STAGES_1_AND_2,
        "nccl_start_alignment_factor",
        "parts of the weights begin at 16 bytes, which copies and NCCL move at once: without it not those of 0.1 % of "
        "BERT-Large's entries, of 57 % with 3 workers; and another padding rounds the norm otherwise, by 5e-9",
    ),
    PrivateName(
        "deepspeed.runtime.zero.partition_parameters",
        "ds_tensor",
        "each rank reads its own part of a checkpoint in stage 3, 1/N of the bytes, and has the weights bit for bit",
    ),
)

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

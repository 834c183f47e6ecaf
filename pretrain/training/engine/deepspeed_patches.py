"""Every private name of DeepSpeed that we read or replace, and the functions that do so.

DeepSpeed's public interface hides the master weights, the norm of the gradients and the sums of the gradients. The rest
of this folder calls the functions below and never uses such a name itself. When DeepSpeed is upgraded, the
tests report the names in `PRIVATE_NAMES` that are gone; read the others again in its source and raise `CHECKED`.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

CHECKED = "0.19.8"  # the version of DeepSpeed whose source was read for all names below

_ENGINE = "deepspeed.runtime.engine"
_STAGE_0 = "deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer"
_STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_FRAGMENTS = "deepspeed.utils.tensor_fragment"
_MAPPINGS = "deepspeed.utils.mixed_precision_linkage"
_PARTITIONS = "deepspeed.runtime.zero.partition_parameters"
_SCALERS = "deepspeed.runtime.fp16.loss_scaler"


class PrivateName(NamedTuple):
    """A name that DeepSpeed does not document.

    Attributes:
        owner: "module" or "module:Class" that defines or assigns the name.
        name: the attribute.
        why: what we need it for.
        checked: the version of DeepSpeed that has the name with the meaning we rely on.
    """

    owner: str
    name: str
    why: str
    checked: str = CHECKED


PRIVATE_NAMES = (
    PrivateName(
        "deepspeed.ops", "__compatible_ops__", "turn off an op that takes 18 to 25 s to compile; doctor lists it"
    ),
    PrivateName("deepspeed.git_version_info", "installed_ops", "doctor lists the ops that were installed compiled"),
    PrivateName(
        f"{_ENGINE}:DeepSpeedEngine", "_do_optimizer_sanity_check", "choose ZeRO's own stage 1 for bf16 weights"
    ),
    PrivateName(_ENGINE, "BFLOAT16", "the choice that we replace"),
    PrivateName(_ENGINE, "ZERO_OPTIMIZATION", "the class that we choose instead"),
    PrivateName(_STAGE_0, "fp32_groups", "master weights of stage 0 in half precision"),
    PrivateName(_STAGE_0, "fp16_groups", "the parameters that belong to them"),
    PrivateName(_STAGE_0, "loss_scale_config", "the loss scaler's state of stage 0"),
    *(
        PrivateName(_STAGE_0, name, "as those of stages 1 and 2, for a step of ours")
        for name in ("overflow", "_global_grad_norm", "_update_scale")
    ),
    PrivateName(_STAGE_1_AND_2, "single_partition_of_fp32_groups", "master weights of stages 1 and 2"),
    PrivateName(_STAGE_1_AND_2, "update_lp_params", "gather the weights of stages 1 and 2 from their owners"),
    PrivateName(_STAGE_1_AND_2, "nccl_start_alignment_factor", "replaced: entries that a rank's part is a multiple of"),
    PrivateName("deepspeed.utils.groups", "_WORLD_GROUP", "no second group of all ranks"),
    PrivateName("deepspeed.accelerator.cuda_accelerator", "pynvml", "it cannot read UUIDs of GPUs"),
    PrivateName(_MAPPINGS, "_hp_mapping", "location of a parameter's master weights, stages 1 and 2"),
    PrivateName(_FRAGMENTS, "hp_fragment_address", "the same, within this rank's master weights"),
    PrivateName(_FRAGMENTS, "lp_fragment_address", "the same, within the parameter"),
    PrivateName(_STAGE_3, "fp32_partitioned_groups_flat", "master weights of stage 3"),
    PrivateName(_STAGE_3, "get_local_fp32_param", "location of a parameter's master weights, stage 3"),
    PrivateName(_PARTITIONS, "ds_tensor", "this rank's part of a parameter, stage 3"),
    PrivateName(_PARTITIONS, "ds_numel", "entries of that part, padding included, and of the whole parameter"),
    PrivateName(_STAGE_1_AND_2, "loss_scaler", "the loss scaler's state of stages 1 and 2"),
    PrivateName(_STAGE_3, "loss_scaler", "the loss scaler's state of stage 3"),
    PrivateName(f"{_SCALERS}:DynamicLossScaler", "raise_error_at_min_scale", "the loop ends such a run itself"),
    *(
        PrivateName(f"{_SCALERS}:DynamicLossScaler", name, "a checkpoint keeps the loss scaler's state")
        for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "scale_window")
    ),
    PrivateName(_STAGE_1_AND_2, "averaged_gradients", "gradients that the norm is taken of"),
    PrivateName(_STAGE_1_AND_2, "scaled_global_norm", "replaced by our norm"),
    PrivateName(_STAGE_1_AND_2, "has_overflow", "replaced: our norm shows whether all gradients are finite"),
    PrivateName(_STAGE_3, "averaged_gradients", "gradients that the norm is taken of"),
    PrivateName(_STAGE_3, "_get_norm_groups", "replaced by our norm"),
    PrivateName(_STAGE_3, "has_overflow", "replaced: our norm shows whether all gradients are finite"),
    PrivateName(_STAGE_1_AND_2, "bit16_groups", "parameters, by optimizer group"),
    PrivateName(_STAGE_1_AND_2, "bit16_groups_flat", "their weights, one tensor for each group"),
    PrivateName(_STAGE_1_AND_2, "communication_data_type", "the type that gradients are sent in"),
    PrivateName(_STAGE_1_AND_2, "process_gradients", "replaced: a gradient is added to our sums"),
    PrivateName(
        _STAGE_1_AND_2, "independent_gradient_partition_epilogue", "replaced: our sums are sent by the backward pass"
    ),
    PrivateName(_STAGE_1_AND_2, "overflow", "whether a step was left out, which a step of ours tells DeepSpeed"),
    PrivateName(_STAGE_1_AND_2, "_global_grad_norm", "the norm of the gradients, which a step of ours tells DeepSpeed"),
    PrivateName(_STAGE_1_AND_2, "_update_scale", "advances the loss scaler"),
)

# Prefixes of modules in whose functions a rank waits for others. In ZeRO 3 only the innermost frame is in the second,
# since handles of gathered parameters have a `wait` without a frame.
COLLECTIVE_MODULES = "deepspeed.comm"
GATHERING_MODULES = "deepspeed.runtime.zero.partition"

_PART_ENTRIES = 8  # that a rank's part of the weights is a multiple of
_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "scale_window")


# ---- the library


def import_deepspeed() -> Any:
    """DeepSpeed, configured not to use the ops that it would have to compile first."""
    os.environ.setdefault("LOCAL_RANK", "0")  # it requires the variable even for one process
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops
    import deepspeed.runtime.engine

    _leave_muon_uncompiled()
    if not torch.cuda.is_available():
        # Its shared-memory collectives for CPU take 18 to 25 s of C++ compilation at the first start. To read the list
        # tests all ops by compiling, so a GPU's start leaves it alone.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _choose_zero_for_bf16(deepspeed.runtime.engine)
    _align_parts(deepspeed.runtime.engine.DeepSpeedZeroOptimizer)
    _do_without_nvml()
    return deepspeed


def _leave_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, which we do not use, without the compiler that it would load for its kernels (3 s)."""
    name = "deepspeed.runtime.zero.muon.original_muon"
    if name in sys.modules:
        return
    from deepspeed.runtime import compiler

    compile, compiler.compile = compiler.compile, lambda *_, **__: lambda function: function
    try:
        importlib.import_module(name)
    finally:
        compiler.compile = compile


def use_world_group() -> None:
    """Make DeepSpeed use the group of all ranks.

    It would make another one of them, which costs a communicator of NCCL and has its default timeout of 10 minutes.
    """
    import deepspeed.utils.groups

    deepspeed.utils.groups._WORLD_GROUP = dist.group.WORLD


def deepspeed_ops() -> tuple[dict[str, bool], tuple[str, ...]]:
    """DeepSpeed's compiled ops, each with whether it could be compiled here, and those that were installed compiled."""
    deepspeed = import_deepspeed()
    from deepspeed.git_version_info import installed_ops

    compatible = {name: can for name, can in deepspeed.ops.__compatible_ops__.items() if name in installed_ops}
    return compatible, tuple(name for name, built in installed_ops.items() if built)


def _choose_zero_for_bf16(module: Any) -> None:
    """Make DeepSpeed use its own ZeRO-1 also if weights are bf16 and gradients are summed in fp32.

    Only in that case it uses `BF16_Optimizer`, which sends all gradients to every worker (1.5 times the bytes) and
    keeps them twice. The class that it uses for fp16 and fp32 does the same arithmetic.
    """
    choose = module.DeepSpeedEngine._do_optimizer_sanity_check
    if hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def choose_zero(engine: Any, optimizer: Any) -> Any:
        chosen = choose(engine, optimizer)
        return module.ZERO_OPTIMIZATION if chosen == module.BFLOAT16 and engine.zero_optimization() else chosen

    module.DeepSpeedEngine._do_optimizer_sanity_check = choose_zero


def _align_parts(optimizer: Any) -> None:
    """Make each rank's part of the weights begin at 16 bytes in half precision, where DeepSpeed is content with 4.

    Copies of parts and NCCL move 16 bytes at once.
    """
    optimizer.nccl_start_alignment_factor = property(lambda _: _PART_ENTRIES, lambda *_: None)


def _do_without_nvml() -> None:
    """Make DeepSpeed ask torch for free memory: it takes the entries of CUDA_VISIBLE_DEVICES for numbers."""
    accelerator = sys.modules.get("deepspeed.accelerator.cuda_accelerator")
    if accelerator is not None:
        accelerator.pynvml = None  # pyright: ignore[reportAttributeAccessIssue]


def _replace(wrapper: Any, name: str, value: Callable[..., Any]) -> None:
    """Replace a method of DeepSpeed's optimizer; setting a missing name would have no effect."""
    if not hasattr(wrapper, name):
        raise RuntimeError(f"{type(wrapper).__name__} of DeepSpeed has no {name}, which {CHECKED} has")
    setattr(wrapper, name, value)


# ---- master weights


def masters_of_stage_0(wrapper: Any) -> list[Tensor]:
    """Half precision: the fp32 weights of each parameter, in the order of the optimizer's groups."""
    return [parameter for group in wrapper.fp32_groups for parameter in group]


def parameters_of_stage_0(wrapper: Any) -> list[nn.Parameter]:
    """Half precision: the parameters that `masters_of_stage_0` belong to, in the same order."""
    return [parameter for group in wrapper.fp16_groups for parameter in group]


def masters_of_stages_1_and_2(wrapper: Any) -> list[Tensor]:
    """This rank's fp32 weights, 1-D, one tensor for each optimizer group."""
    return list(wrapper.single_partition_of_fp32_groups)


def gather_weights_of_stages_1_and_2(wrapper: Any) -> None:
    """Give every rank the whole weights, cast from the master weights of all ranks."""
    wrapper.update_lp_params()


def masters_of_stage_3(wrapper: Any) -> list[Tensor]:
    """This rank's fp32 weights, 1-D, one tensor for each sub-group of parameters."""
    return list(wrapper.fp32_partitioned_groups_flat)


class MasterPiece(NamedTuple):
    """The location of a piece of a parameter's master weights on a rank."""

    start: int  # of the piece, in the flattened parameter
    offset: int  # of the piece, in the rank's flat tensor
    numel: int


def piece_of_stages_1_and_2(parameter: nn.Parameter) -> MasterPiece | None:
    """The piece in this rank's tensor of the parameter's group; None if other ranks hold all of it."""
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    held = mapping.hp_fragment_address
    return MasterPiece(mapping.lp_fragment_address.start, held.start, held.numel)


def piece_of_stage_3(wrapper: Any, parameter: Any, rank: int, flats: list[Tensor]) -> tuple[Tensor, MasterPiece] | None:
    """The flat tensor and the piece in it; None if this rank's part of the parameter is padding."""
    master = wrapper.get_local_fp32_param(parameter)
    start, held = part_of_stage_3(parameter, rank)
    if not held:
        return None
    storage = master.untyped_storage().data_ptr()
    flat = next(flat for flat in flats if flat.untyped_storage().data_ptr() == storage)
    return flat, MasterPiece(start, master.storage_offset() - flat.storage_offset(), held)


def part_of_stage_3(parameter: Any, rank: int) -> tuple[int, int]:
    """(start, entries) of the part of a flattened parameter that `rank` holds, padding left out."""
    part = parameter.ds_tensor.ds_numel
    start = rank * part
    return start, max(0, min(part, parameter.ds_numel - start))


def weights_of_stage_3(parameter: Any) -> Tensor:
    """This rank's part of the weights that the model computes with, 1-D, padding included."""
    return parameter.ds_tensor.data.view(-1)


# ---- the loss scale of fp16


class LossScaler:
    """DeepSpeed's fp16 loss scaler."""

    def __init__(self, wrapper: Any) -> None:
        self._scaler = _scaler_of(wrapper)
        if hasattr(self._scaler, "raise_error_at_min_scale"):
            self._scaler.raise_error_at_min_scale = False  # the loop ends such a run, and names its checkpoint

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {key: getattr(self._scaler, key) for key in _SCALER_FIELDS if hasattr(self._scaler, key)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        for key, value in state.items():
            if key in _SCALER_FIELDS:
                setattr(self._scaler, key, value)


def _scaler_of(wrapper: Any) -> Any:
    """Stage 0 keeps it under another name than ZeRO does."""
    return getattr(wrapper, "loss_scaler", None) or getattr(wrapper, "loss_scale_config", None)


# ---- the norm of the gradients


def gradients_of_zero(wrapper: Any) -> Iterator[Tensor]:
    """This rank's gradients, flattened, of any stage but 0."""
    return (gradient.reshape(-1) for group in wrapper.averaged_gradients.values() for gradient in group)


def replace_norm_of_stages_1_and_2(wrapper: Any, norm: Callable[[], Tensor]) -> None:
    """Make ZeRO use `norm`, and decide by it whether all gradients are finite."""
    _replace(wrapper, "scaled_global_norm", norm)
    _replace(wrapper, "has_overflow", lambda *_, **__: False)


def replace_norm_of_stage_3(wrapper: Any, norm: Callable[[], Tensor]) -> None:
    """As `replace_norm_of_stages_1_and_2`."""
    _replace(wrapper, "_get_norm_groups", lambda: [norm()])
    _replace(wrapper, "has_overflow", lambda *_, **__: False)


# ---- the sums of the gradients, stages 1 and 2, and the step, stages 0 to 2


def sent_type(wrapper: Any) -> torch.dtype:
    """The type that gradients are sent in, by default that of the model's weights."""
    return wrapper.communication_data_type


def weights_of_stages_1_and_2(wrapper: Any) -> Iterator[tuple[list[nn.Parameter], Tensor]]:
    """(parameters, the flat tensor that holds their weights) of each optimizer group."""
    return zip(wrapper.bit16_groups, wrapper.bit16_groups_flat, strict=True)


def replace_gradient_sums(wrapper: Any, add: Callable[[nn.Parameter, int], None]) -> None:
    """Make ZeRO hand each gradient to `add`, with its parameter and the number of its group, and do no more with it."""
    _replace(wrapper, "process_gradients", add)
    _replace(wrapper, "independent_gradient_partition_epilogue", lambda: None)


def replace_step(wrapper: Any, step: Callable[[], tuple[bool, Tensor]]) -> None:
    """Make DeepSpeed's optimizer of stages 0 to 2 call `step`.

    It returns whether it stepped, and the norm of the gradients with their loss scale. A step that is left out on the
    device counts as one: DeepSpeed's own count of skipped steps lacks it.
    """

    def take_step(*_: Any) -> None:
        scale = _scaler_of(wrapper).cur_scale
        applied, norm = step()
        wrapper.overflow = not applied
        wrapper._global_grad_norm = norm / scale if applied else torch.inf
        wrapper._update_scale(not applied)

    _replace(wrapper, "step", take_step)

"""DeepSpeed's JSON config, derived from the run's config."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from pretrain.config import EngineConfig
from pretrain.training.engine import state_layouts
from pretrain.training.engine.buckets import BUCKET_ENTRIES

logger = logging.getLogger(__name__)

_NEVER = 1 << 60  # a number of steps that no run reaches


def deepspeed_config(settings: EngineConfig, world_size: int) -> dict[str, Any]:
    """Return DeepSpeed's config for `settings`; the user's `engine.deepspeed` section overrides it, key by key."""
    uses_half, layout = settings.precision != "fp32", state_layouts.layout_class(settings)
    uses_gradient_sums = state_layouts.uses_gradient_sums(settings)
    config: dict[str, Any] = {
        # The loader decides the number and sizes of micro-batches, so these three values only have to be consistent.
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": _NEVER,
        # This timer would synchronize with the device in every forward pass and step.
        "timers": {"throughput": {"enabled": False}},
        # If the state layout clips gradients, DeepSpeed must not: that would cost another collective.
        "gradient_clipping": settings.gradient_clip_norm if layout.deepspeed_clips else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": settings.zero_stage,
            "contiguous_gradients": True,
            "overlap_comm": torch.cuda.is_available() and not uses_gradient_sums,
            # Align weights to 16 bytes for cuBLAS's fast kernels; compiled code copies unaligned weights in each call.
            "parameter_alignment": True,
            "reduce_bucket_size": BUCKET_ENTRIES,
            # If the user's section makes DeepSpeed sum gradients in stages 1 and 2, it sends each only to its owner,
            # which takes half the bytes of an all-reduce.
            "use_multi_rank_bucket_allreduce": False,
            # In stage 3, gather small parameters together with others, not one by one.
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": BUCKET_ENTRIES,
        },
        settings.precision if uses_half else "fp16": {"enabled": uses_half},
    }
    if settings.precision == "bf16":
        config["bf16"]["check_grad_overflow"] = True
    if uses_half and layout.has_sum_buffer:
        # A sum over many micro-batches in bf16, with 8 bits of precision, would lose the later gradients.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    merged = _merge(config, settings.deepspeed)
    if uses_gradient_sums or (
        settings.precision == "bf16"
        and settings.zero_stage == 1
        and not merged["zero_optimization"].get("offload_optimizer")
    ):
        # `GradientSums` are fp32 regardless of this setting. With fp32 here and bf16 in stage 1, DeepSpeed would use
        # its BF16_Optimizer, which sends all gradients to every worker and stores them twice.
        data_types = merged.pop("data_types", {})
        if not uses_gradient_sums and data_types.get("grad_accum_dtype") == "fp32":
            logger.warning(
                "engine.deepspeed: with these settings, DeepSpeed sums gradients in bf16; zero_stage 2 sums in fp32."
            )
    if settings.precision == "fp16":
        merged["fp16"]["loss_scale"] = 1.0  # the engine uses `LossScale` instead
    return merged


def _merge(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in overrides.items():
        current = merged.get(key)
        merged[key] = _merge(current, value) if isinstance(current, dict) and isinstance(value, dict) else value
    return merged

"""DeepSpeed's JSON, derived from the run's config."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from pretrain.config import EngineConfig
from pretrain.training.engine import state_layouts
from pretrain.training.engine.buckets import ENTRIES

logger = logging.getLogger(__name__)

_NEVER_STEPS = 1 << 60


def deepspeed_config(settings: EngineConfig, world_size: int) -> dict[str, Any]:
    """Return DeepSpeed's JSON for `settings`; the user's `deepspeed:` section overrides it, key by key."""
    half, layout = settings.precision != "fp32", state_layouts.layout_class(settings)
    own_sums = state_layouts.has_own_sums(settings)
    config: dict[str, Any] = {
        # Micro-batches have as many tokens as fit and steps as many micro-batches as they need: these three
        # only have to agree with one another.
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": _NEVER_STEPS,
        # The timer waits for the device in every forward pass and step.
        "timers": {"throughput": {"enabled": False}},
        # If the layout clips, clipping again would cost a collective.
        "gradient_clipping": settings.gradient_clip_norm if layout.deepspeed_clips else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": settings.zero_stage,
            "contiguous_gradients": True,
            "overlap_comm": torch.cuda.is_available() and not own_sums,
            # Align weights to 16 bytes, as cuBLAS's fast kernels need; compiled code would copy others at each call.
            "parameter_alignment": True,
            "reduce_bucket_size": ENTRIES,
            # If the user's section selects DeepSpeed's sums in stages 1 and 2, a gradient is sent to its owner only,
            # half the bytes of an all-reduce.
            "use_multi_rank_bucket_allreduce": False,
            # Stage 3: small parameters are gathered together with the others, not one by one.
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": ENTRIES,
        },
        settings.precision if half else "fp16": {"enabled": half},
    }
    if settings.precision == "bf16":
        config["bf16"]["check_grad_overflow"] = True
    if half and layout.has_sum_buffer:
        # A sum of many micro-batches with 8 bits of mantissa would lose the later ones.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    merged = _merge(config, settings.deepspeed)
    if own_sums or (
        settings.precision == "bf16"
        and settings.zero_stage == 1
        and not merged["zero_optimization"].get("offload_optimizer")
    ):
        # Our sums are fp32 whatever this says. With fp32 here and bf16 in stage 1, DeepSpeed would use its
        # BF16_Optimizer, which sends all gradients to every worker and keeps them twice.
        types = merged.pop("data_types", {})
        if not own_sums and types.get("grad_accum_dtype") == "fp32":
            logger.warning(
                "engine.deepspeed: with these settings, DeepSpeed sums gradients in bf16; zero_stage 2 sums in fp32."
            )
    if settings.precision == "fp16":
        merged["fp16"]["loss_scale"] = 1.0  # the engine uses `LossScale` instead
    return merged


def _merge(config: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged

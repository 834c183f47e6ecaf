"""Resolves `engine.cuda_graphs: auto`: uses CUDA graphs if the roofline model expects them to shorten a step."""

import math
from collections.abc import Sequence

from pretrain.config import PretrainConfig
from pretrain.objectives import make_objective
from pretrain.planning.memory import memory_bytes
from pretrain.planning.roofline import find_gpu, step_times
from pretrain.planning.work import phase_work


def choose_graphs(
    config: PretrainConfig,
    vocabulary_size: int,
    lengths: Sequence[float | None],
    gpus: Sequence[str],
    memory: float = math.inf,
) -> tuple[bool, str]:
    """Return (whether to record passes as CUDA graphs, the reason). The precision must already be resolved.

    `gpus` are the names of the workers' GPUs as the driver reports them, and `memory` is the smallest GPU's memory in
    bytes. `lengths` are the mean sequence lengths of the phases in tokens; for None, a length is assumed.
    """
    if config.engine.cuda_graphs != "auto":
        return config.engine.cuda_graphs, "as configured"
    unknown_gpus = [f"the dry run does not know {name}" for name in gpus if find_gpu(name) is None]
    precision_note = "" if config.engine.precision == "bf16" else f"recording needs bf16, not {config.engine.precision}"
    deepspeed_note = "engine.deepspeed is set" if config.engine.deepspeed else ""
    if obstacle := config.graph_obstacle or precision_note or deepspeed_note or "".join(unknown_gpus[:1]):
        return False, obstacle
    bytes_by_use = memory_bytes(with_graphs(config, True), config.engine.zero_stage, len(gpus), "cuda")
    if (total := sum(bytes_by_use.values())) > memory:
        return False, f"CUDA graphs would need {total / 1e9:.1f} GB, and the smallest GPU has {memory / 1e9:.1f} GB"
    variants = (with_graphs(config, enabled) for enabled in (False, True))
    launched_ms, recorded_ms = (_expected_ms(variant, vocabulary_size, lengths, gpus) for variant in variants)
    times = f"a step is expected to take {launched_ms:,.1f} ms without CUDA graphs and {recorded_ms:,.1f} ms with them"
    return recorded_ms < launched_ms, times


def with_graphs(config: PretrainConfig, enabled: bool) -> PretrainConfig:
    """Return `config` with `engine.cuda_graphs` set to `enabled`."""
    return config.model_copy(update={"engine": config.engine.model_copy(update={"cuda_graphs": enabled})})


def _expected_ms(
    config: PretrainConfig, vocabulary_size: int, lengths: Sequence[float | None], gpus: Sequence[str]
) -> float:
    """Return the expected milliseconds of an average step; if GPUs differ, all wait for the slowest."""
    slowest = min((gpu for name in gpus if (gpu := find_gpu(name))), key=lambda gpu: gpu.peak_flops)
    objective, total = make_objective(config, vocabulary_size), 0.0
    for phase, length in zip(config.phases, lengths, strict=True):
        work = phase_work(config, phase, vocabulary_size, length)
        total += 1e3 * phase.steps * step_times(objective, phase, work, slowest, len(gpus)).expected
    return total / config.total_steps

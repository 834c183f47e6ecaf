"""Measures a device's matmul throughput, and chooses the precision of training and inference.

This module resolves `engine.precision: auto` from the devices of all workers. bf16 has the range of fp32 and needs no
loss scaling. But CPUs without bf16 arithmetic emulate it at a fraction of their fp32 rate, and GPUs before Ampere do
not support it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pretrain.common.measured import cached_rate
from pretrain.config import ConfigT, EngineConfig, Precision, with_precision

if TYPE_CHECKING:
    import torch

SECONDS = 0.25  # duration of one matmul measurement
_FIRST_SIZE, _MAX_SIZE = 128, {"cpu": 2048, "cuda": 8192}  # smallest and largest width of the square matrices
_MIN_PRODUCT_SECONDS = 5e-3  # minimum duration of a product, so that its launch time is negligible
_TRIES = 4  # number of products of one size before a larger size is tried
_NOISE_RATIO = 0.9  # rates whose ratio is above this count as equal (measurement noise)
_MIN_BF16_RATIO = 0.5  # minimum ratio of a CPU's bf16 rate to its fp32 rate for inference in bf16


class DeviceCapabilities(NamedTuple):
    """The capabilities of one device."""

    name: str
    capability: tuple[int, int] | None  # CUDA's compute capability; None on CPU
    bf16_rate: float = 0.0  # matmul throughput in bf16 on one thread, FLOP/s; not measured on CUDA
    fp32_rate: float = 0.0  # likewise in fp32


class PrecisionChoice(NamedTuple):
    """A precision and why it was chosen, as text for the log."""

    precision: Precision
    reason: str


def torch_dtype(precision: str) -> torch.dtype:
    """The torch dtype of a resolved `engine.precision`."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


def measure_matmul(
    device: str, precision: Precision, seconds: float = SECONDS, threads: int = 0, *, concurrent: bool = False
) -> float:
    """Measure the throughput of square matmuls on one device: the highest FLOP/s within `seconds`.

    Slower products may have been delayed by other programs on the same cores. The size doubles until a product takes
    milliseconds on one thread, so a device that is slow in this precision is measured as quickly as a fast one.

    Args:
        threads: number of CPU threads; 0 keeps torch's setting. Load on other cores disturbs one thread least.
        concurrent: other workers measure at the same time, so the median product is used instead of the fastest.
            Virtual cores share the AMX unit of a physical core; the fastest product may have had it to itself.
    """
    import torch

    dtype, previous_threads = torch_dtype(precision), torch.get_num_threads()

    def product(a: torch.Tensor) -> float:
        started = time.perf_counter()
        torch.mm(a, a)
        if a.is_cuda:
            torch.cuda.synchronize(a.device)
        return time.perf_counter() - started

    size, largest = _FIRST_SIZE, _MAX_SIZE[torch.device(device).type]
    torch.set_num_threads(1)
    try:
        while True:
            generator = torch.Generator(device).manual_seed(0)  # cached rates must not change a run's random state
            a = torch.randn(size, size, generator=generator, device=device).to(dtype)
            fastest = min(product(a) for _ in range(_TRIES))  # the first one may initialize a library
            if fastest >= _MIN_PRODUCT_SECONDS or size == largest:
                break
            size *= 2
        torch.set_num_threads(threads or previous_threads)
        durations, deadline = [], time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            durations.append(product(a))
    finally:
        torch.set_num_threads(previous_threads)
    return 2 * size**3 / (statistics.median(durations) if concurrent else min(fastest, *durations))


@functools.cache
def matmul_peak(device: str, precision: Precision) -> float:
    """Return the result of `measure_matmul`; for a CPU, it is cached on disk for all processes."""
    if device != "cpu":
        return measure_matmul(device, precision)
    import torch

    return cached_rate(f"{precision}, {torch.get_num_threads()} threads", lambda: measure_matmul(device, precision))


@functools.cache
def single_thread_peak(precision: Precision) -> float:
    """Return the matmul throughput on one thread of this CPU in FLOP/s, cached on disk."""
    return cached_rate(f"{precision}, 1 thread", lambda: measure_matmul("cpu", precision, threads=1))


def is_faster_in_fp32(bf16: float, fp32: float) -> bool:
    """Return whether a device with this matmul throughput (FLOP/s) should compute in fp32."""
    return bf16 < _NOISE_RATIO * fp32


def capabilities(device: torch.device) -> DeviceCapabilities:
    """Return the capabilities of this process's device. On CPU both rates are measured, or read from the cache."""
    import torch

    if device.type == "cuda":
        return DeviceCapabilities(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    return DeviceCapabilities("this CPU", None, single_thread_peak("bf16"), single_thread_peak("fp32"))


def choose_precision(devices: Sequence[DeviceCapabilities]) -> PrecisionChoice:
    """Choose the precision for workers with these devices; if they differ, one that all support."""
    weakest = min((x for x in devices if x.capability), key=lambda x: x.capability or (), default=None)
    if weakest is not None and weakest.capability is not None:
        return _choose_gpu_precision(weakest.name, weakest.capability)
    bf16, fp32 = (sum(getattr(x, name) for x in devices) for name in ("bf16_rate", "fp32_rate"))
    rates = f"{bf16 / 1e9:,.3g} GFLOP/s in bf16, {fp32 / 1e9:,.3g} in fp32 (matmuls; sum over workers, one thread each)"
    return PrecisionChoice("fp32" if is_faster_in_fp32(bf16, fp32) else "bf16", f"measured {rates}")


def _choose_gpu_precision(name: str, capability: tuple[int, int]) -> PrecisionChoice:
    gpu = f"{name} has compute capability {capability[0]}.{capability[1]}"
    if capability >= (8, 0):
        return PrecisionChoice("bf16", f"{gpu}, which supports bf16")
    if capability >= (7, 0):
        return PrecisionChoice("fp16", f"{gpu}: it has tensor cores for fp16, not for bf16; the loss is scaled")
    return PrecisionChoice("fp32", f"{gpu}: no tensor cores")


def allow_tf32(precision: str, device: torch.device) -> bool:
    """Let an fp32 run use TF32 tensor cores for its matrix products if the GPU has them (Ampere and newer).

    Returns whether it uses them. In other precisions, fp32 products, such as in the heads, do not use TF32.
    """
    import torch

    if device.type != "cuda":
        return False
    uses_tf32 = precision == "fp32" and torch.cuda.get_device_capability(device) >= (8, 0)
    torch.set_float32_matmul_precision("high" if uses_tf32 else "highest")
    return uses_tf32


def unsupported_feature(engine: EngineConfig, capability: tuple[int, int]) -> str:
    """Describe a feature that the settings need and a GPU of this compute capability lacks; "" if none."""
    if engine.precision == "bf16" and capability < (8, 0):
        return "engine.precision: bf16 needs compute capability 8.0"
    if engine.cuda_graphs is True and engine.precision != "bf16":
        return f"engine.cuda_graphs needs bf16, and this run computes in {engine.precision}"
    return ""


def choose_local_precision() -> PrecisionChoice:
    """Choose the precision for this machine, as its workers would."""
    import torch

    if not torch.cuda.is_available():
        return choose_precision([capabilities(torch.device("cpu"))])
    return choose_precision([capabilities(torch.device("cuda", index)) for index in range(torch.cuda.device_count())])


def resolve_local_precision(config: ConfigT) -> tuple[ConfigT, str]:
    """Return (config with its precision chosen for this machine, the reason)."""
    if config.engine.precision != "auto":
        return config, "as configured"
    choice = choose_local_precision()
    return with_precision(config, choice.precision), choice.reason


def resolve_precision(config: ConfigT, hardware: str = "") -> tuple[ConfigT, str]:
    """Return (config with its precision chosen for `hardware` such as "V100", or for this machine; the reason)."""
    address = config.scheduling.address
    if config.engine.precision != "auto" or not (address or hardware) or hardware == "here":
        return resolve_local_precision(config)
    if not hardware:
        return with_precision(config, "bf16"), f"assumed; the nodes of {address} decide when the run starts"
    choice: Precision = "fp16" if hardware.upper().endswith("V100") else "bf16"
    return with_precision(config, choice), f"supported by {hardware}"


def inference_precision(training_precision: Precision, device: torch.device) -> PrecisionChoice:
    """Choose the precision of inference: the same as in training, unless the device is slow in it or lacks it.

    Below half its fp32 rate, a CPU counts as slow in bf16; the margin keeps noise from changing the choice, and scores.
    """
    if training_precision == "fp32":
        return PrecisionChoice("fp32", "as trained")
    measured = capabilities(device)
    best = choose_precision([measured])
    if device.type == "cuda":
        is_supported = best.precision == training_precision or (training_precision, best.precision) == ("fp16", "bf16")
    else:
        is_supported = training_precision == "bf16" and measured.bf16_rate > _MIN_BF16_RATIO * measured.fp32_rate
    if is_supported:
        return PrecisionChoice(training_precision, "as trained")
    return PrecisionChoice(best.precision, f"trained in {training_precision}, but {best.reason}")

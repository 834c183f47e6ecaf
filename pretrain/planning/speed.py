"""How long a machine trains a config: GPUs by the roofline model, this machine by measurement.

Here, a step is its matrix products and what lies between them. The products of each size are timed alone, since narrow
ones run at a lower rate. The rest is proportional to the bytes that it moves (`roofline.step_bytes`); a few steps of a
real run say how many of them take a second. Without that run, products are assumed to be a fixed share of a step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pretrain.config import ModelConfig, Precision, PretrainConfig
from pretrain.model.parameters import layer_parameters
from pretrain.model.precision import torch_dtype
from pretrain.objectives import objective_of
from pretrain.planning.estimate import ASSUMED_MFU, Cluster, used_devices
from pretrain.planning.memory import Device
from pretrain.planning.roofline import REACHED, step_bytes, step_times
from pretrain.planning.work import Work, vocabulary_size

if TYPE_CHECKING:
    import torch

_ROWS = 512  # of a timed product
_TRIES, _SECONDS = 3, 0.1  # of a product: at least so many, and until so long; the fastest counts


class Speed(Protocol):
    """How fast a machine is."""

    @property
    def source(self) -> str:
        """Where the figures come from, as a sentence."""
        ...

    def seconds(self, config: PretrainConfig, work: Sequence[Work]) -> float:
        """Seconds of all steps of the config, whose phases have the work `work`."""
        ...


@dataclass(frozen=True)
class Roofline:
    """The limit of GPUs, at the share of it that public trainers reached."""

    cluster: Cluster

    @property
    def source(self) -> str:
        return f"{self.cluster.name}: by arithmetic, at {REACHED:.2f} of the limit that `--on` computes"

    def seconds(self, config: PretrainConfig, work: Sequence[Work]) -> float:
        objective, gpu = objective_of(config, vocabulary_size(config)), self.cluster.gpu
        assert gpu is not None
        steps = [
            one.steps * step_times(objective, phase, one, gpu, self.cluster.workers).limit
            for phase, one in zip(config.phases, work, strict=True)
        ]
        return sum(steps) / REACHED


@dataclass
class ThisMachine:
    """This machine. Rates of products are kept by width."""

    device: Device
    precision: Precision
    calibration: Calibration | None = None
    _rates: dict[tuple[int, ...], float] = field(default_factory=dict)

    @property
    def source(self) -> str:
        if self.calibration is None:
            return f"this machine: products timed here, assumed to be {ASSUMED_MFU[self.device]:.0%} of a step"
        return f"this machine: products timed here, and steps of {self.calibration.shape} in a run"

    def seconds(self, config: PretrainConfig, work: Sequence[Work]) -> float:
        products = sum(one.executed for one in work) / self.rate(config, work)
        if self.calibration is None:
            return products / ASSUMED_MFU[self.device]
        return self.calibration.products * products + self.calibration.byte * _bytes(config, work)

    def calibrate(self, config: PretrainConfig, work: Work, seconds: float) -> None:
        """Take a step of the config's first phase, which has the work `work`, to last `seconds`."""
        first = config.model_copy(update={"phases": config.phases[:1]})
        products = work.executed / work.steps / self.rate(config, [work])
        rest = seconds - products
        shape = f"{config.model.layers}x{config.model.hidden}"
        if rest < 0:  # the run was faster than its products alone, such as by other threads
            self.calibration = Calibration(shape, seconds / products, 0.0)
        else:
            self.calibration = Calibration(shape, 1.0, rest / (_bytes(first, [work]) / work.steps))

    def rate(self, config: PretrainConfig, work: Sequence[Work]) -> float:
        """FLOP/s of the products of a config, all cores or workers' GPUs together; each width is timed once."""
        model = config.model
        masked = sum(one.sequences * one.masked for one in work) / sum(one.tokens for one in work)
        share = round(masked, 3)
        key = (model.hidden, model.intermediate, model.heads, model.depth, round(1000 * share))
        if key not in self._rates:
            self._rates[key] = self._measure(model, vocabulary_size(config), share)
        return self._rates[key] * used_devices(config)

    def _measure(self, model: ModelConfig, vocabulary: int, masked: float) -> float:
        matrices = [one.shape for one in layer_parameters(model, model.layers - 1) if len(one.shape) == 2]
        times = product_times([*matrices, (vocabulary, model.embedding or model.hidden)], self.device, self.precision)
        shares = [*[float(model.depth)] * len(matrices), masked]
        entries = [shape[0] * shape[1] for shape in [*matrices, (vocabulary, model.embedding or model.hidden)]]
        flops = sum(6 * share * entry for share, entry in zip(shares, entries, strict=True))
        return flops / sum(share * one for share, one in zip(shares, times, strict=True))


@dataclass(frozen=True)
class Calibration:
    """What a timed run says.

    Attributes:
        shape: LAYERSxHIDDEN of the run.
        products: seconds of a step's products in the run, for each second that they take alone.
        byte: seconds for each byte that the rest of a step moves.
    """

    shape: str
    products: float
    byte: float


def product_times(shapes: Sequence[Sequence[int]], device: Device, precision: Precision) -> list[float]:
    """Seconds for each row of the three products of matrices (outputs, inputs), forward and backward.

    On CPU, processor time of one thread, divided by the cores: so other programs disturb it least.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cores = len(os.sched_getaffinity(0)) if device == "cpu" else 1
    try:
        return [_product_time(shape, device, torch_dtype(precision)) / cores for shape in shapes]
    finally:
        torch.set_num_threads(threads)


def _product_time(shape: Sequence[int], device: Device, dtype: torch.dtype) -> float:
    import torch

    outputs, inputs = shape
    x = torch.randn(_ROWS, inputs, device=device).to(dtype)
    y = torch.randn(_ROWS, outputs, device=device).to(dtype)
    weight = torch.randn(outputs, inputs, device=device).to(dtype)
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    clock = time.perf_counter if device == "cuda" else time.thread_time

    def run() -> float:
        wait()
        began = clock()
        torch.mm(x, weight.t())
        torch.mm(y, weight)
        torch.mm(y.t(), x)
        wait()
        return clock() - began

    run()  # the first one may initialize a library
    times: list[float] = []
    while len(times) < _TRIES or sum(times) < _SECONDS:
        times.append(run())
    return min(times) / _ROWS


def _bytes(config: PretrainConfig, work: Sequence[Work]) -> float:
    """What all steps move beside their products, by all workers together."""
    objective = objective_of(config, vocabulary_size(config))
    return sum(one.steps * step_bytes(objective, phase, one, 1) for phase, one in zip(config.phases, work, strict=True))

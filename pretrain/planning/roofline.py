"""A roofline model: the minimum time of a training step on GPUs, by arithmetic alone, without torch.

Four activities overlap, and the longest is the limit:

    device    runs matrix products, attention and the kernels between them, one after another
    host      runs Python and autograd, and launches kernels
    network   sends gradients to their owners, and weights back; with CUDA graphs, only after the passes
    loader    prepares this rank's share of the next batch, in one thread

Every constant has its source next to it. A test compares the model with published results.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from pretrain.config import PhaseConfig, PretrainConfig
from pretrain.model import cost
from pretrain.model.parameters import Parameter, head_parameters, layer_parameters
from pretrain.objectives import MaskedTokens, Objective, make_objective
from pretrain.planning.work import Work, optimizer_flops


class Gpu(NamedTuple):
    """A GPU model in a common eight-GPU machine; rates are per GPU and direction."""

    peak_flops: float  # FLOP/s of dense tensor cores at bf16 (V100: fp16)
    memory_rate: float  # bytes/s of its memory
    link_rate: float  # bytes/s to the GPUs of the same machine
    network_rate: float  # bytes/s to other machines
    product_share: float  # share of the peak that the best matrix product reaches
    attention_share: float  # share of the peak that attention over long sequences reaches with a head size of 64
    capability: tuple[int, int]  # CUDA's compute capability


# Rates are from data sheets. Networks: DGX-1 has 4 cards of 100 Gb/s for 8 GPUs; DGX A100 has 200 Gb/s and DGX H100 has
# 400 Gb/s per GPU. product_share: measured by mamf-finder.py (stas00/ml-engineering, compute/accelerator, August 2026);
# 0.8 for GPUs that it does not list. attention_share: flash attention 2, forward and backward (Dao 2023, figures 4 and
# 7: 171 TFLOP/s on A100, about 300 on H100); B200 is assumed equal to H100; for V100, unsupported, 0.2 is a guess.
GPUS = {
    "V100": Gpu(125e12, 0.9e12, 150e9, 6.25e9, 0.8, 0.2, (7, 0)),
    "A100": Gpu(312e12, 2.039e12, 300e9, 25e9, 0.869, 0.55, (8, 0)),
    "L4": Gpu(121e12, 0.3e12, 32e9, 12.5e9, 0.8, 0.55, (8, 9)),
    "L40S": Gpu(362e12, 0.864e12, 32e9, 25e9, 0.8, 0.55, (8, 9)),
    "RTX4090": Gpu(165e12, 1.008e12, 32e9, 12.5e9, 0.8, 0.55, (8, 9)),
    "H100": Gpu(989e12, 3.35e12, 450e9, 50e9, 0.803, 0.30, (9, 0)),
    "H200": Gpu(989e12, 4.8e12, 450e9, 50e9, 0.803, 0.30, (9, 0)),
    "B200": Gpu(2250e12, 8e12, 900e9, 50e9, 0.776, 0.30, (10, 0)),
}
GPUS_PER_MACHINE = 8
REACHED_SHARE = 0.64  # median share of the limit that published training runs reached (tests/published_speeds.py)
# Overhead of a matrix product. On an H100, one of 256 x 256 x 256 takes 5.2 us, and one of 1024 x 1024 x 1024 takes
# 9.1 us, of which 2.7 us follow from the best rate (openxla/xla, matmul_interpolator_data.h).
_KERNEL_SECONDS = 5e-6
_MEMORY_SHARE = 0.9  # share of the memory rate that kernels reach: a copy on an H100 reaches 3.0 of 3.35 TB/s
# Length at which attention reaches half of `attention_share`: the tiles of flash attention have 64 to 128 rows. In Dao
# 2023, the rate at length 512 is 0.8 of the rate at 16,384.
_ATTENTION_LENGTH = 128
# Number of values that kernels between the products read and write, per value that a compiled layer saves for backward.
# Counted per token for BERT's layer of width H: the activation 8 H forward and 12 H backward, two norms 6 H and 8 H,
# bias gradients 9 H; together 43 H, and 11 H are saved.
_TRAFFIC = 4
_LOGITS_TRAFFIC = 3  # memory accesses per logit: the loss reads it, and its gradient is written and read
_OPTIMIZER_BYTES = 30  # bytes per parameter: AdamW in fp32 reads 16 and writes 12, and writes a bf16 weight of 2
_SUM_BYTES = 10  # bytes read and written per entry of a bf16 gradient that is added to an fp32 sum
# The host's time per layer of a micro-batch, forward and backward, and per step for everything else: fitted to
# steps of BERT-Base and -Large without CUDA graphs on an H200 (tests/planning/test_roofline.py). With recorded passes,
# only the time per step remains.
LAYER_SECONDS, REST_SECONDS = 3.0e-3, 5.2e-3
_UNCOMPILED_SECONDS = 75 * 6e-6  # added time per uncompiled layer: 75 more kernels (733 instead of 434 in 4 layers)
_FILLER_FACTOR = 1.02  # tokens of recorded passes, including filler, per token of text (docs/decisions/0129-*)
# Number of kernels in a round of Muon, for matrices of one shape (five iterations of three products, and copies), and
# number of entries per round and worker (tests/launches.py).
MUON_KERNELS, MUON_ENTRIES = 28, 1 << 24
MUON_LAUNCH_SECONDS = 20e-6  # host time per kernel: 14 us of Python (on a Zen 4), and the launch
_NETWORK_SHARE = 0.8  # share of the link rate that nccl-tests reaches (stas00/ml-engineering, network)
# Assumed duration of a small collective, within one machine and between machines.
_COLLECTIVE_SECONDS = (25e-6, 60e-6)
BUCKET = 10_000_000  # entries of a gradient bucket (engine/buckets.py)
# Loader: (maximum number of ranks, seconds to plan a step), and seconds per token; measured on an EPYC (Zen 5) core.
_PLANNING_SECONDS = ((8, 3e-3), (64, 10e-3), (math.inf, 15e-3))
_TOKEN_SECONDS = 1e-7


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one optimizer step on one rank."""

    products: float  # matrix products
    attention: float
    memory: float  # kernels between the products, sums of gradients and the optimizer
    host: float  # Python and kernel launches
    network: float  # collectives
    loader: float  # preparation of the next batch
    exposed: float = 0.0  # part of `network` that does not overlap with kernels

    @property
    def device(self) -> float:
        """The GPU's kernels, one after another."""
        return self.products + self.attention + self.memory

    @property
    def limit(self) -> float:
        """The shortest time of a step."""
        return self._longest_part(self.device)

    @property
    def expected(self) -> float:
        """The likely time of a step, if kernels reach `REACHED_SHARE` of their limit."""
        return self._longest_part(self.device / REACHED_SHARE)

    def _longest_part(self, device: float) -> float:
        return max(device + self.exposed, self.host, self.network, self.loader)

    @property
    def limited_by(self) -> str:
        """The name of the longest activity or, if that is the device, of the longest part of its work."""
        overlapped = max(("host", "network", "loader"), key=lambda name: getattr(self, name))
        if getattr(self, overlapped) == self.limit:
            return overlapped
        return max(("products", "attention", "memory"), key=lambda name: getattr(self, name))

    def rows(self) -> list[tuple[str, float]]:
        """Return (name, seconds) of each part."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def find_gpu(name: str) -> Gpu | None:
    """Return the entry of `GPUS` for a name that the driver reports, or None if the GPU is unknown."""
    for key, gpu in GPUS.items():
        words = "[ -]?".join(re.findall("[A-Z]+|[0-9]+", key))
        if re.search(rf"\b{words}\b", name.upper()):
            return gpu
    return None


def step_times(objective: Objective, phase: PhaseConfig, work: Work, gpu: Gpu, workers: int) -> StepTimes:
    """Return the parts of an average step of a phase on `workers` GPUs.

    Args:
        objective: objective of the run; all its models are assumed to compute at the rate of the run's model.
        work: work of the phase, from `pretrain.planning.work.phase_work`.
    """
    config, vocabulary_size = objective.config, objective.vocabulary
    batch = MeanBatch.of(config, phase, work, workers)
    factor = _all_models_factor(objective, work)
    itemsize = 4 if config.engine.precision == "fp32" else 2
    muon = optimizer_flops(config) / workers / (gpu.product_share * gpu.peak_flops)
    network = _network_seconds(config, objective.trained * itemsize, batch.micro_batches, gpu, workers)
    return StepTimes(
        products=factor * batch.micro_batches * _product_seconds(config, vocabulary_size, batch, gpu, itemsize) + muon,
        attention=factor * batch.micro_batches * _attention_seconds(config, batch, gpu),
        memory=_step_bytes(objective, batch, work, workers) / (_MEMORY_SHARE * gpu.memory_rate),
        host=_host_seconds(config, batch.micro_batches, workers),
        network=network,
        loader=_loader_seconds(batch, workers),
        exposed=network if config.engine.cuda_graphs is True else 0.0,
    )


def _step_bytes(objective: Objective, batch: MeanBatch, work: Work, workers: int) -> float:
    """Return the bytes that a rank's kernels read and write in a step, except in products and attention."""
    config = objective.config
    itemsize = 4 if config.engine.precision == "fp32" else 2
    shards = workers if config.engine.zero_stage else 1
    kernel_bytes = _memory_bytes(config, objective.vocabulary, batch, itemsize) * batch.micro_batches
    update_bytes = objective.trained * (_SUM_BYTES * batch.micro_batches + _OPTIMIZER_BYTES / shards)
    return _all_models_factor(objective, work) * kernel_bytes + update_bytes


def _all_models_factor(objective: Objective, work: Work) -> float:
    """Return the FLOPs of all models of the objective, divided by the FLOPs of masked language modeling."""
    baseline = MaskedTokens(objective.config, objective.vocabulary)
    flops, baseline_flops = (o.executed_flops([work.mean_length], work.masked) for o in (objective, baseline))
    return flops / baseline_flops


@dataclass(frozen=True)
class MeanBatch:
    """A rank's micro-batches in an average step, which are all alike."""

    micro_batches: int  # number of micro-batches
    length: float  # mean number of tokens per sequence
    sequences: float  # number of sequences per micro-batch
    masked: float  # number of tokens to predict per micro-batch

    @property
    def tokens(self) -> float:
        return self.sequences * self.length

    @property
    def last_rows(self) -> float:
        """Number of query positions in the last layer."""
        return min(self.tokens, self.masked + self.sequences)

    @classmethod
    def of(cls, config: PretrainConfig, phase: PhaseConfig, work: Work, workers: int) -> MeanBatch:
        rank_sequences = work.sequences / work.steps / workers
        tokens = rank_sequences * work.mean_length
        count = max(1, math.ceil(tokens / max(config.engine.micro_batch_tokens, phase.sequence_length)))
        sequences = rank_sequences / count * (_FILLER_FACTOR if config.engine.cuda_graphs is True else 1)
        return cls(count, work.mean_length, sequences, sequences * work.masked)


def _product_seconds(config: PretrainConfig, vocabulary_size: int, batch: MeanBatch, gpu: Gpu, itemsize: int) -> float:
    """Return the seconds that the matrix products of a micro-batch take, forward and backward."""
    recomputes = config.engine.activation_checkpointing

    def seconds(rows: float, outputs: int, inputs: int) -> float:
        values = rows * inputs + inputs * outputs + rows * outputs
        flop_rate, byte_rate = gpu.product_share * gpu.peak_flops, _MEMORY_SHARE * gpu.memory_rate
        return _KERNEL_SECONDS + max(2 * rows * outputs * inputs / flop_rate, itemsize * values / byte_rate)

    # The backward pass has two products of the same size, for the gradients of the input and of the weight.
    layer_seconds = sum((4 if recomputes else 3) * seconds(*product) for product in layer_products(config, batch))
    return layer_seconds + sum(3 * seconds(*product) for product in head_products(config, vocabulary_size, batch))


def layer_products(config: PretrainConfig, batch: MeanBatch) -> Iterator[tuple[float, int, int]]:
    """Yield (rows, outputs, inputs) of each matrix product of the layers; the last layer computes fewer rows."""
    model = config.model
    for depth in range(model.depth):
        for parameter in _matrices(layer_parameters(model, depth % model.layers)):
            is_last = depth == model.depth - 1 and parameter.name.partition("_")[0] not in ("qkv", "q", "kv")
            yield batch.last_rows if is_last else batch.tokens, *parameter.shape  # pyright: ignore[reportReturnType]


def head_products(config: PretrainConfig, vocabulary_size: int, batch: MeanBatch) -> Iterator[tuple[float, int, int]]:
    """Yield (rows, outputs, inputs) of each matrix product of the heads; the decoder's comes last."""
    model = config.model
    for parameter in _matrices(head_parameters(model, vocabulary_size, config.pairs.has_classifier)):
        if parameter.name != "decoder":
            rows = batch.masked if parameter.name.startswith("mlm") else batch.sequences
            yield rows, *parameter.shape  # pyright: ignore[reportReturnType]
    yield batch.masked, vocabulary_size, model.embedding or model.hidden


def _matrices(parameters: tuple[Parameter, ...]) -> Iterator[Parameter]:
    return (parameter for parameter in parameters if len(parameter.shape) == 2)


def _attention_seconds(config: PretrainConfig, batch: MeanBatch, gpu: Gpu) -> float:
    """Return the seconds of a micro-batch's attention, forward and backward; the backward pass recomputes scores."""
    model, total = config.model, 0.0
    for depth in range(model.depth):
        window = model.window(depth % model.layers)
        visible_keys = min(batch.length, 2 * window + 1) if window else batch.length
        rate = gpu.attention_share * gpu.peak_flops * visible_keys / (visible_keys + _ATTENTION_LENGTH)
        total += 14 * model.hidden * batch.tokens * visible_keys / rate
    return total


def _memory_bytes(config: PretrainConfig, vocabulary_size: int, batch: MeanBatch, itemsize: int) -> float:
    """Return the bytes that kernels between the products of a micro-batch read and write."""
    tokens, rows = round(batch.tokens), round(batch.last_rows)
    saved_bytes = cost.activation_bytes(
        config.model, tokens, rows, itemsize=itemsize, compiled=True, checkpointing=False, native=False
    )
    saved_bytes -= cost.working_bytes(config.model, tokens, itemsize)
    return _TRAFFIC * saved_bytes + _LOGITS_TRAFFIC * itemsize * batch.masked * vocabulary_size


def _host_seconds(config: PretrainConfig, micro_batches: int, workers: int) -> float:
    """Return the host's seconds for a step."""
    models = make_objective(config).shapes
    seconds_per_layer = LAYER_SECONDS + (0 if config.engine.compiled else _UNCOMPILED_SECONDS)
    layer_seconds = micro_batches * sum(model.depth for model in models) * seconds_per_layer
    muon_seconds = 0.0
    if config.optimizer.name == "muon":
        shapes = Counter(matrix.shape for model in models for matrix in cost.hidden_matrices(model))
        rounds = (math.ceil(count * math.prod(shape) / (MUON_ENTRIES * workers)) for shape, count in shapes.items())
        muon_seconds = MUON_KERNELS * sum(rounds) * MUON_LAUNCH_SECONDS
    return (0 if config.engine.cuda_graphs is True else layer_seconds) + REST_SECONDS * len(models) + muon_seconds


def _network_seconds(config: PretrainConfig, model_bytes: float, micro_batches: int, gpu: Gpu, workers: int) -> float:
    """Return the seconds of a step's collectives for `model_bytes` of parameters (Rajbhandari et al. 2020, section 7).

    A ring over several machines crosses each boundary once for all GPUs of a machine, so it can use all of the
    machine's network cards.
    """
    if workers == 1:
        return 0.0
    stage = config.engine.zero_stage
    sent_bytes = model_bytes * {0: 2, 1: 2, 2: micro_batches + 1, 3: 2 * micro_batches}[stage]
    crosses_machines = workers > GPUS_PER_MACHINE
    rate = min(gpu.link_rate, GPUS_PER_MACHINE * gpu.network_rate) if crosses_machines else gpu.link_rate
    collectives = sent_bytes / 2 / BUCKET
    transfer_seconds = sent_bytes * (workers - 1) / workers / (_NETWORK_SHARE * rate)
    return transfer_seconds + collectives * _COLLECTIVE_SECONDS[crosses_machines]


def _loader_seconds(batch: MeanBatch, workers: int) -> float:
    planning_seconds = next(seconds for max_ranks, seconds in _PLANNING_SECONDS if workers <= max_ranks)
    return planning_seconds + _TOKEN_SECONDS * batch.tokens * batch.micro_batches

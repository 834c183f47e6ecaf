"""Counts the collectives of one optimizer step by ZeRO stage and number of ranks, to compare with the ZeRO paper.

Also counts the collectives of a start and of a resume, and the bytes that a rank reads of a checkpoint to resume.

One process acts as rank 0 among ranks that do not exist: torch's fake process group returns at once and sends nothing.
The calls that libraries make to torch's process group are counted, the last layer before NCCL or gloo.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.config import ModelConfig
from tests.batches_by_hand import make_batch

RANKS = (8, 64, 256, 1024)
_VOCABULARY = 30_522
_LENGTHS = (7, 12, 20)  # lengths of the sequences of a micro-batch; no collective depends on them
_METHODS = ("reduce", "gather", "scatter", "broadcast", "alltoall", "all_to_all", "barrier", "send", "recv")


class Call(NamedTuple):
    """A collective: its name at the process group, its type, and the bytes that each worker sends on average."""

    name: str
    dtype: torch.dtype
    sent: float


def formula_bytes(stage: int, parameters: int, width: int, workers: int, micro_batches: int) -> float:
    """Return the bytes that each of `workers` sends in one optimizer step; `width` is the size of a gradient or weight.

    Rajbhandari et al., ZeRO (arXiv:1910.02054), section 7, in its unit, a (workers - 1) / workers of all parameters:
    plain data parallelism reduces and gathers gradients (2); stages 1 and 2 reduce gradients and gather weights (2).
    Stage 3 reduces gradients and gathers weights twice (3), or once (2) where, as here, all of them may stay live
    between forward and backward. The paper has one micro-batch; stages 2 and 3 keep no whole gradient for the next.
    """
    unit = width * parameters * (workers - 1) / workers
    return unit * {0: 2, 1: 2, 2: micro_batches + 1, 3: 2 * micro_batches}[stage]


def listen(calls: list[Call]) -> None:
    """Record every collective of this process in `calls`, from all methods of process groups."""
    group = torch._C._distributed_c10d.ProcessGroup  # pyright: ignore[reportAttributeAccessIssue]
    for name in dir(group):
        if any(word in name for word in _METHODS):
            setattr(group, name, _noted(name, getattr(group, name), calls))


def _noted(name: str, method: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        tensors = [found for argument in (*arguments, *options.values()) if (found := _tensors_in(argument))]
        dtype = tensors[0][0].dtype if tensors else torch.bool
        calls.append(Call(name, dtype, _sent_bytes(name, tensors or [[]], dist.get_world_size())))
        return method(self, *arguments, **options)

    return call


def _sent_bytes(name: str, tensors: list[list[Tensor]], workers: int) -> float:
    """Return the bytes that the best algorithm sends for a collective, from the size of its largest argument."""
    whole = max(sum(t.numel() * t.element_size() for t in argument) for argument in tensors)
    return whole * (2 if name.startswith("allreduce") else 1) * (workers - 1) / workers


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in _tensors_in(part)] if isinstance(value, list | tuple) else []


def count(size: str, stage: int, ranks: int, micro_batches: int) -> dict[str, Any]:
    """Return counts for a step in bf16, as rank 0 of `ranks` that do not exist."""
    found = _count(ModelConfig.model_validate({"size": size}), stage, micro_batches)
    weights = [call for call in found.step if call.dtype == torch.bfloat16]
    sent = sum(call.sent for call in weights)
    return {
        "stage": stage,
        "ranks": ranks,
        "micro_batches": micro_batches,
        "collectives": Counter(call.name for call in weights),
        "scalars": len(found.step) - len(weights),
        "bytes": sent,
        "formula": formula_bytes(stage, found.parameters, 2, ranks, micro_batches),
        "start_collectives": Counter(call.name for call in found.start),
        "start_bytes": sum(call.sent for call in found.start),
        "resume_collectives": Counter(call.name for call in found.resume),
        "resume_sent_bytes": sum(call.sent for call in found.resume),
        "resume_bytes": found.read_bytes,
        "state_bytes": 3 * 4 * found.parameters,
    }


class _Counted(NamedTuple):
    """The collectives of creating the engine, of a step and of a resume, and the bytes that a rank reads to resume."""

    parameters: int
    start: list[Call]
    step: list[Call]
    resume: list[Call]
    read_bytes: int


class _CountingReader:
    """A reader of a checkpoint of zeros, which counts the bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        zeros = torch.zeros(numel)
        self.bytes += zeros.nbytes
        return zeros


def _count(shape: ModelConfig, stage: int, micro_batches: int) -> _Counted:
    """Record the collectives of this process, whose process group must exist."""
    from pretrain.model.heads import PretrainingModel
    from tests.distributed import engine_of

    model = PretrainingModel(shape, _VOCABULARY)
    calls: list[Call] = []
    listen(calls)
    engine = engine_of(model, zero_stage=stage, precision="bf16")
    start = list(calls)
    for _ in range(3):  # ZeRO-3 compares the workers' orders of modules in the first two
        calls.clear()
        for number in range(micro_batches):
            losses = engine.forward(make_batch(_LENGTHS))
            engine.backward(losses.mlm_loss / 100 + losses.nsp_loss / 10, last=number == micro_batches - 1)
        engine.step(1e-3)
    step, reader = list(calls), _CountingReader()
    calls.clear()
    engine.load(reader)
    return _Counted(sum(size.numel() for size in engine.shapes.values()), start, step, list(calls), reader.bytes)

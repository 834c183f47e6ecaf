"""Counts the kernels that an optimizer step would launch on a GPU, using the meta device."""

import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.config import ModelConfig, OptimizerConfig
from pretrain.model.heads import PretrainingModel
from pretrain.training.engine.gradient_sums import global_norm
from pretrain.training.optim import (
    Muon,
    TensorwiseOptimizer,
    assign_tensor_ids,
    cut_segments,
    make_optimizer,
    matrix_shapes,
    parameter_groups,
)
from tests.distributed import Alone, of_whole_tensors

VOCABULARY = 30_522
# Maximum number of tensors per multi-tensor kernel, for 1, 2, ... lists; a kernel also takes at most 320 chunks of 2^16
# entries (aten/src/ATen/native/cuda/MultiTensorApply.cuh).
_TENSORS, _CHUNKS, _CHUNK = (110, 64, 48, 36, 30), 320, 1 << 16
_NO_KERNEL = {"empty", "empty_like", "new_empty", "new_empty_strided", "detach", "_unsafe_view"}


class Launches(TorchDispatchMode):
    """Counts operations by name, except views; operations on lists count once per launched kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name.startswith("_foreach_"):
            new = [result] if isinstance(result, (list, tuple)) and name != "_foreach_norm" else []
            self.counts[name] += _of_lists([x for x in (*args, *new) if isinstance(x, (list, tuple))])
        elif not func.is_view and name not in _NO_KERNEL and not name.startswith("_record_function"):
            self.counts[name] += 1
        return result


def _of_lists(lists: list[Any]) -> int:
    """Return the number of kernels for an operation on lists: one per tensor if shapes at an index differ."""
    first = lists[0]
    if any(x.shape != y.shape for other in lists[1:] for x, y in zip(first, other, strict=True)):
        return len(first)
    chunks = sum(math.ceil(x.numel() / _CHUNK) for x in first)
    return max(math.ceil(len(first) / _TENSORS[len(lists) - 1]), math.ceil(chunks / _CHUNKS))


def of_step(settings: OptimizerConfig, *, flat: bool, size: str = "large") -> Launches:
    """Count the launches of one optimizer step of BERT of this size on one worker.

    Args:
        flat: whether each group is one flat tensor, as in ZeRO-1, or has separate parameters, as in stage 0.
    """
    named = _parameters(size)
    optimizer = make_optimizer(settings, parameter_groups(named.items(), 0.01))
    segments: dict[Tensor, list[Any]] = {}
    ids = assign_tensor_ids(named)
    for group in optimizer.param_groups:
        if flat:
            group["params"] = [_joined(group, named, ids, segments)]
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
            kinds = ("exp_avg",) if group.get("orthogonal") else ("exp_avg", "exp_avg_sq")
            state = {kind: torch.empty_like(parameter) for kind in kinds}
            optimizer.state[parameter] = {"step": torch.empty((), device="meta"), **state}
    if not flat:
        of_whole_tensors(optimizer)
    elif isinstance(optimizer, TensorwiseOptimizer):
        optimizer.set_segments(segments, max(one.stop for one in ids.values()), lambda _: None)
    elif isinstance(optimizer, Muon):
        optimizer.set_shards(segments, matrix_shapes({name: x.shape for name, x in named.items()}), Alone())
    optimizer.found_inf = torch.empty((), device="meta")  # type: ignore[attr-defined]
    optimizer.step()  # allocates state
    with Launches() as launches:
        optimizer.step()
    return launches


def of_norm(size: str = "large") -> Launches:
    """Count the launches of the norm of the gradients, which are views of flat sums, one per parameter."""
    gradients = [parameter.view(-1) for parameter in _parameters(size).values()]
    with torch.no_grad(), Launches() as launches:
        global_norm(gradients)
    return launches


def _parameters(size: str) -> dict[str, torch.nn.Parameter]:
    with torch.device("meta"):
        model = PretrainingModel(ModelConfig.model_validate({"size": size}), VOCABULARY)
    return dict(model.named_parameters())


def _joined(
    group: dict[str, Any],
    named: dict[str, torch.nn.Parameter],
    ids: dict[str, range],
    segments: dict[Tensor, list[Any]],
) -> torch.nn.Parameter:
    """Return the flat parameter of a group; add its segments to `segments`."""
    numels = {name: named[name].numel() for name in group["names"]}
    flat = torch.nn.Parameter(torch.empty(sum(numels.values()), device="meta"))
    segments[flat], at = [], 0
    for name, numel in numels.items():
        segments[flat] += cut_segments(ids[name], numel, 0, numel, at)
        at += numel
    return flat

"""Buckets: optimizer groups small enough to be sent while a pass through the model goes on.

ZeRO gives each rank one range of every group's flat weights. With one group of all matrices, the ranges of all ranks
are complete only after the last gradient. With a group per bucket, each rank has a range of every bucket, so a bucket
can be sent as soon as the backward pass has left it, and its weights gathered just before the forward pass needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ENTRIES = 10_000_000  # of a bucket, 20 MB in half precision: larger ones save no time


def divide_groups(optimizer: torch.optim.Optimizer, entries: int) -> None:
    """Replace each group of `optimizer` by buckets of at most `entries`, in the order of the backward pass.

    A parameter is never divided; a larger one is a bucket of its own.
    """
    optimizer.param_groups = [bucket for group in optimizer.param_groups for bucket in _buckets(group, entries)]


def _buckets(group: Mapping[str, Any], entries: int) -> Iterator[dict[str, Any]]:
    names: list[str] = []
    parameters: list[Tensor] = []
    size = 0
    for name, parameter in zip(reversed(group["names"]), reversed(group["params"]), strict=True):
        if parameters and size + parameter.numel() > entries:
            yield {**group, "names": names, "params": parameters}
            names, parameters, size = [], [], 0
        names.append(name)
        parameters.append(parameter)
        size += parameter.numel()
    yield {**group, "names": names, "params": parameters}


class WeightGather:
    """Gathers the weights of every bucket from their owners, while the model's forward pass already runs.

    Buckets are gathered in the order in which the forward pass reads them. Each block of the model (a member of a
    ModuleList, such as a layer) waits for its own buckets before it runs, and the model for those of all that is in no
    block.
    """

    def __init__(self, model: nn.Module, buckets: Sequence[tuple[Sequence[nn.Parameter], Tensor]]) -> None:
        """`buckets` has (parameters, their flat weights) of each; a flat holds equal parts of all ranks."""
        self._flats = [flat for _, flat in buckets]
        self._pending: dict[int, Any] = {}  # by the number of the bucket
        if dist.get_world_size() == 1:
            self._order: list[int] = []
            return
        bucket_of = {id(p): number for number, (parameters, _) in enumerate(buckets) for p in parameters}
        blocks = [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
        inside = {id(p) for block in blocks for p in block.parameters()}
        outside = {bucket_of[id(p)] for p in model.parameters() if id(p) not in inside}
        needed = [(model, outside)]
        needed += [(block, {bucket_of[id(p)] for p in block.parameters()}) for block in blocks]
        self._order = list(dict.fromkeys(number for _, numbers in needed for number in sorted(numbers)))
        for module, numbers in needed:
            module.register_forward_pre_hook(lambda *_, numbers=frozenset(numbers): self._wait(numbers))

    def start(self) -> None:
        """Begin to gather all weights, from the part of each that this rank has updated."""
        for number in self._order:
            flat = self._flats[number]
            own = flat.view(dist.get_world_size(), -1)[dist.get_rank()]
            self._pending[number] = dist.all_gather_into_tensor(flat, own, async_op=True)

    def finish(self) -> None:
        """Wait until all weights are in place."""
        self._wait(frozenset(self._order))

    def _wait(self, numbers: frozenset[int]) -> None:
        for number in [one for one in self._pending if one in numbers]:
            self._pending.pop(number).wait()

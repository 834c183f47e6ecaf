"""Buckets: optimizer groups so small that their communication overlaps with the forward and backward pass.

ZeRO gives each rank one range of every group's flat weights. With a single group of all matrices, a rank's range may be
incomplete until the last gradient. With one group per bucket, each rank has a range of every bucket. So a bucket is
sent once the backward pass has filled it, and its weights are gathered just before they are used.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_ENTRIES = 10_000_000  # maximum number of entries in a bucket: 20 MB in half precision; more save no time
# torch 2.13 renamed all_gather_into_tensor and deprecated the old name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def divide_groups(optimizer: torch.optim.Optimizer, forward_order: Sequence[str], max_entries: int) -> None:
    """Replace the groups of `optimizer` by buckets, in the order in which the backward pass completes them.

    A parameter is never divided; one that is larger than a bucket gets a separate bucket.

    Args:
        optimizer: an optimizer whose param groups have an entry `names`, one name per parameter.
        forward_order: the names of all parameters, in the order in which the forward pass uses them.
        max_entries: maximum number of entries of a bucket.
    """
    depth = {name: index for index, name in enumerate(forward_order)}
    buckets = [bucket for group in optimizer.param_groups for bucket in _split_group(group, depth, max_entries)]
    optimizer.param_groups = sorted(buckets, key=lambda bucket: -min(depth[name] for name in bucket["names"]))


def _split_group(group: Mapping[str, Any], depth: Mapping[str, int], max_entries: int) -> Iterator[dict[str, Any]]:
    names: list[str] = []
    parameters: list[Tensor] = []
    entries = 0
    pairs = zip(group["names"], group["params"], strict=True)
    for name, parameter in sorted(pairs, key=lambda pair: -depth[pair[0]]):
        if parameters and entries + parameter.numel() > max_entries:
            yield {**group, "names": names, "params": parameters}
            names, parameters, entries = [], [], 0
        names.append(name)
        parameters.append(parameter)
        entries += parameter.numel()
    yield {**group, "names": names, "params": parameters}


class WeightGather:
    """Gathers the weights of every bucket from their owners during the model's forward pass.

    Buckets are gathered in the order of the forward pass. Each block of the model (a member of a ModuleList, such as a
    layer) waits for its buckets before it runs; the model waits for the buckets outside of all blocks.

    Attributes:
        waited_seconds: time that this process has waited; 0 on a GPU, where the device waits.
    """

    def __init__(self, model: nn.Module, buckets: Sequence[tuple[Sequence[nn.Parameter], Tensor]]) -> None:
        """`buckets` are pairs (parameters, their flat weights); flat weights have one equal part per rank."""
        self._flats = [flat for _, flat in buckets]
        self._pending: dict[int, Any] = {}  # handles of running collectives, by index of the bucket
        self.waited_seconds = 0.0
        if dist.get_world_size() == 1:
            self._gather_order: list[int] = []
            return
        bucket_of = {id(p): index for index, (parameters, _) in enumerate(buckets) for p in parameters}
        blocks = [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]
        in_blocks = {id(p) for block in blocks for p in block.parameters()}
        outside_blocks = {bucket_of[id(p)] for p in model.parameters() if id(p) not in in_blocks}
        needed_buckets = [(model, outside_blocks)]
        needed_buckets += [(block, {bucket_of[id(p)] for p in block.parameters()}) for block in blocks]
        self._gather_order = list(dict.fromkeys(index for _, indices in needed_buckets for index in sorted(indices)))
        for module, indices in needed_buckets:
            module.register_forward_pre_hook(lambda *_, indices=frozenset(indices): self._wait(indices))

    def start(self) -> None:
        """Start gathering all weights, after this rank has updated its part of each bucket."""
        for index in self._gather_order:
            flat = self._flats[index]
            part = flat.view(dist.get_world_size(), -1)[dist.get_rank()]
            self._pending[index] = all_gather(flat, part, async_op=True)

    def finish(self) -> None:
        """Wait until all weights are gathered."""
        self._wait(frozenset(self._gather_order))

    def _wait(self, indices: frozenset[int]) -> None:
        started = time.perf_counter()
        for index in [i for i in self._pending if i in indices]:
            self._pending.pop(index).wait()
        self.waited_seconds += time.perf_counter() - started

"""All ranks of a run, and their collectives."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class RankGroup:
    """All ranks of the run, and the process group for their collectives (by default torch's default group).

    Attributes:
        rank: this rank.
        world_size: number of ranks.
        device: device whose tensors the backend can send.
    """

    rank: int
    world_size: int
    device: torch.device
    _group: Any = None

    def new_cpu_group(self, timeout: timedelta) -> RankGroup:
        """Return a separate CPU group of the same ranks, for the collectives of another thread."""
        cpu = torch.device("cpu")
        if self.world_size == 1:
            return RankGroup(self.rank, self.world_size, cpu)
        return RankGroup(self.rank, self.world_size, cpu, dist.new_group(backend="gloo", timeout=timeout))

    def sum_over_workers(self, values: Tensor) -> Tensor:
        """Sum `values`, on any device, over all ranks in place, and return them."""
        if self.world_size > 1:
            on_device = values.to(self.device)  # NCCL supports only GPUs
            dist.all_reduce(on_device, group=self._group)
            if on_device is not values:
                values.copy_(on_device)
        return values

    def sum_and_max(self, to_sum: list[int], to_maximize: int) -> tuple[list[int], int]:
        """Return each of `to_sum` summed over all ranks, and the maximum of `to_maximize`, on every rank."""
        if self.world_size == 1:
            return to_sum, to_maximize
        maximum = torch.tensor([to_maximize], device=self.device)
        dist.all_reduce(maximum, dist.ReduceOp.MAX, group=self._group)
        return self.sum_over_workers(torch.tensor(to_sum)).tolist(), int(maximum)

    def all_to_all(self, values: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> Tensor:
        """Send each rank r the next `sent_sizes[r]` entries of 1-D `values`; return `received_sizes[r]` from each."""
        on_device = values.to(self.device)
        if self.world_size == 1:
            return on_device
        received = on_device.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, on_device, received_sizes, sent_sizes, group=self._group)
        return received

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.world_size > 1:
            dist.barrier(self._group)

    def gather_objects(self, value: Any) -> list[Any]:
        """Gather one small JSON-like value per rank, on every rank."""
        return gather_objects(value, self._group)

    def collect_objects(self, value: Any) -> list[Any]:
        """Gather one small JSON-like value per rank on rank 0; return an empty list on the other ranks."""
        if self.world_size == 1:
            return [value]
        collected: list[Any] = [] if self.rank else [None] * self.world_size
        dist.gather_object(value, None if self.rank else collected, group=self._group, group_dst=0)
        return collected

    def broadcast_object(self, value: Any) -> Any:
        """Broadcast the small JSON-like value of rank 0 to every rank."""
        return broadcast_object(value, self._group)


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Gather one small JSON-like value per rank of `group` (by default all), on every rank."""
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return [value]
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_object(value: Any, group: Any = None) -> Any:
    """Broadcast the small JSON-like value of rank 0 of `group` (by default all) to every rank."""
    values = [value]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def end_process_group() -> None:
    """Destroy the process group, including DeepSpeed's, so that this process can start another run."""
    if "deepspeed" in sys.modules and sys.modules["deepspeed"].comm.is_initialized():
        sys.modules["deepspeed"].comm.destroy_process_group()
    else:
        dist.destroy_process_group()

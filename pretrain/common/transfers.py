"""Copies between the host and its device for which the host does not wait."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

K = TypeVar("K")


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`, copied without waiting for the work queued there."""
    if device.type != "cuda":
        return host.to(device)
    pinned = host if host.is_pinned() else host.pin_memory()
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True)
class PendingCopy:
    """A copy of a tensor in host memory, which may not be there yet."""

    _values: Tensor
    _arrived: torch.cuda.Event | None  # None if it is there

    def wait(self) -> Tensor:
        """The copy, when it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def to_host(values: Tensor) -> PendingCopy:
    """Copy `values` to the host when the work queued on their device is done."""
    if values.is_cpu:
        return PendingCopy(values, None)
    there = values.to("cpu", non_blocking=True)  # into pinned memory
    arrived = torch.cuda.Event(blocking=True)  # the thread that waits sleeps
    arrived.record()
    return PendingCopy(there, arrived)


def arrivals(copies: Iterable[tuple[K, PendingCopy]]) -> Iterator[tuple[K, Tensor]]:
    """Each copy with its key, waited for when the next one has been launched: so the device always has work."""
    before: tuple[K, PendingCopy] | None = None
    for one in copies:
        if before is not None:
            yield before[0], before[1].wait()
        before = one
    if before is not None:
        yield before[0], before[1].wait()

"""Asynchronous copies between host and device."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

K = TypeVar("K")


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device` without waiting for the work that is queued on it."""
    if device.type != "cuda":
        return host.to(device)
    pinned = host if host.is_pinned() else host.pin_memory()
    return pinned.to(device, non_blocking=True)


@dataclass(frozen=True)
class PendingCopy:
    """A copy of a tensor to host memory that may not be finished."""

    _values: Tensor
    _arrived: torch.cuda.Event | None  # None if the copy is finished

    def wait(self) -> Tensor:
        """Wait for the copy, and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def to_host(values: Tensor) -> PendingCopy:
    """Start to copy `values` to the host; the copy runs after the work that is queued on their device."""
    if values.is_cpu:
        return PendingCopy(values, None)
    copy = values.to("cpu", non_blocking=True)  # into pinned memory
    arrived = torch.cuda.Event(blocking=True)  # a waiting thread sleeps
    arrived.record()
    return PendingCopy(copy, arrived)


def arrivals(copies: Iterable[tuple[K, PendingCopy]]) -> Iterator[tuple[K, Tensor]]:
    """Yield each key with its finished copy. The next copy is launched before the wait, to keep the device busy."""
    previous: tuple[K, PendingCopy] | None = None
    for current in copies:
        if previous is not None:
            yield previous[0], previous[1].wait()
        previous = current
    if previous is not None:
        yield previous[0], previous[1].wait()

"""Copies between the host and its device for which the host does not wait."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`, copied without waiting for the work queued there."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


@dataclass(frozen=True)
class OnItsWay:
    """A copy of a tensor in host memory, which may not be there yet."""

    _values: Tensor
    _arrived: torch.cuda.Event | None  # None if it is there

    def wait(self) -> Tensor:
        """The copy, when it is there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values


def to_host(values: Tensor) -> OnItsWay:
    """Copy `values` to the host when the work queued on their device is done."""
    if values.is_cpu:
        return OnItsWay(values, None)
    there = values.to("cpu", non_blocking=True)  # into pinned memory
    arrived = torch.cuda.Event(blocking=True)  # the thread that waits sleeps
    arrived.record()
    return OnItsWay(there, arrived)

"""The weights that a training begins with, as the engine reads them."""

from collections.abc import Mapping

import torch
from torch import Tensor


class InitialWeights:
    """A reader for `Engine.load`: given weights, and moments of zero.

    DeepSpeed takes its master weights from a rounded copy of the model; these are exact.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = {name: weight.detach().clone().view(-1) for name, weight in weights.items()}

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        return self._weights[name][start : start + numel] if kind == "weight" else torch.zeros(numel)

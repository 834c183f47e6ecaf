"""Forward and backward pass of a micro-batch, as a CUDA graph or not, for the loop and the warm-up step."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.training.engine import Engine


def seed_device(engine: Engine, seed: int, start: int) -> None:
    """Seed the device's generator, for the dropout of flash attention: differently on each rank and at each start."""
    if engine.device.type == "cuda":
        state = np.random.SeedSequence([seed, engine.rank, start]).generate_state(1, np.uint64)
        torch.cuda.manual_seed(int(state[0]) >> 1)


class ForwardBackward:
    """The passes of a training's micro-batches."""

    def __init__(
        self,
        engine: Engine,
        task: Any,
        timed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Prepare passes of `task`, a `TrainingTask` or an objective.

        `timed` wraps the work that a rank does without waiting for others: the forward pass, or a whole CUDA graph.
        """
        self._engine, self._task, self._timed = engine, task, timed

    def run(self, micro_batch: Any, weights: Sequence[float], *, last: bool) -> Tensor:
        """Add a micro-batch's gradients and return its totals, with a CUDA graph if possible. `last`: of the step."""
        if not self._engine.records_passes:
            return self.launch(micro_batch, weights, last=last)
        return self._engine.recorded_pass(micro_batch, weights, self._loss_and_totals, last=last, timed=self._timed)

    def launch(self, micro_batch: Any, weights: Sequence[float], *, last: bool) -> Tensor:
        """Do the same as `run`, without a CUDA graph."""
        with self._timed():
            output = self._engine.forward(micro_batch)
        self._engine.backward(self._task.loss(output, weights), last=last)
        return self._task.totals(output).detach()

    def _loss_and_totals(self, output: Any, weights: Tensor) -> tuple[Tensor, Tensor]:
        return self._task.loss(output, weights), self._task.totals(output)

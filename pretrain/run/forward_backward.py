"""Runs the forward and backward pass of a micro-batch, with or without a CUDA graph."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pretrain.training.engine import Engine


def seed_device(engine: Engine, seed: int, salt: int) -> None:
    """Seed the device's generator, for the dropout of flash attention: differently on each rank and for each salt."""
    if engine.device.type == "cuda":
        state = np.random.SeedSequence([seed, engine.rank, salt]).generate_state(1, np.uint64)
        torch.cuda.manual_seed(int(state[0]) >> 1)


class ForwardBackward:
    """Runs the passes of micro-batches."""

    def __init__(
        self,
        engine: Engine,
        task: Any,
        timer: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Prepare the passes for `task`, a `TrainingTask` or an objective.

        `timer` returns a context manager that times what a rank does without waiting for others: the forward pass, or
        a whole CUDA graph.
        """
        self._engine, self._task, self._timer = engine, task, timer

    def run(self, micro_batch: Any, weights: Sequence[float], *, last: bool) -> Tensor:
        """Accumulate a micro-batch's gradients and return its totals. `last`: whether it is the last of the step."""
        if not self._engine.uses_cuda_graphs:
            return self.run_without_graph(micro_batch, weights, last=last)
        return self._engine.graphed_pass(micro_batch, weights, self._loss_and_totals, last=last, timer=self._timer)

    def run_without_graph(self, micro_batch: Any, weights: Sequence[float], *, last: bool) -> Tensor:
        """Do the same as `run`, always without a CUDA graph."""
        with self._timer():
            output = self._engine.forward(micro_batch)
        self._engine.backward(self._task.loss(output, weights), last=last)
        return self._task.totals(output).detach()

    def _loss_and_totals(self, output: Any, weights: Tensor) -> tuple[Tensor, Tensor]:
        return self._task.loss(output, weights), self._task.totals(output)

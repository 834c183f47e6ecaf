"""A test step of the largest batch before training, so that too large a batch fails in the first minute."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint import writing
from pretrain.common.errors import MachineError
from pretrain.run.forward_backward import ForwardBackward
from pretrain.run.progress import Progress, checkpoint_state, restore
from pretrain.run.task import S, TrainingTask
from pretrain.training.engine import WARMUP_PASSES, Engine


def warmup_step(
    engine: Engine,
    task: TrainingTask[S],
    progress: Progress,
    checkpoints: Path,
    extra_state: dict[str, Any],
    resumed_from: Path | None,
) -> None:
    """Take a step with the largest micro-batch, then restore the checkpoint of `progress`.

    The training state is then bitwise equal to that checkpoint. It is `resumed_from`, which need not be restored
    before; in a new run, it is the checkpoint of step 0, which is written here first.

    Raises:
        MachineError: the largest micro-batch does not fit on the device.
    """
    checkpoint = resumed_from
    if checkpoint is None:
        state = checkpoint_state(engine, progress, extra_state)
        checkpoint = writing.save(checkpoints, progress.step, engine.fragments(), state, engine.workers)
    engine.module.train()
    step, forward_backward = task.largest_step(), ForwardBackward(engine, task)
    weights = task.loss_weights(step)
    try:
        # A second micro-batch needs memory in addition to the first one's gradients; a resumed run has tested this.
        last_flags = (True,) if progress.step else (False, True)
        if engine.uses_cuda_graphs:  # they keep their memory while other shapes run without graphs
            for _ in range(WARMUP_PASSES + 1):
                _take_step(engine, forward_backward.run, step.micro_batches[0], weights, last_flags)
        _take_step(engine, forward_backward.run_without_graph, step.micro_batches[0], weights, last_flags)
    except torch.OutOfMemoryError as error:
        raise MachineError(
            "engine.micro_batch_tokens: the largest micro-batch does not fit on the device. Lower it, or use a higher "
            "engine.zero_stage or engine.activation_checkpointing."
        ) from error
    restore(engine, checkpoint)


def _take_step(
    engine: Engine, run: Callable[..., Any], micro_batch: Any, weights: Sequence[float], last_flags: Sequence[bool]
) -> None:
    for last in last_flags:
        run(micro_batch, weights, last=last)
    engine.step(learning_rate=0.0)

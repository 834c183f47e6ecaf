"""Takes a test step with the largest micro-batch before training, to find out at once whether memory suffices."""

from collections.abc import Callable
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
    """Take a test step with the largest micro-batch, then load the checkpoint that the run starts from.

    This checkpoint is `resumed_from`; in a new run, it is the checkpoint of step 0, which this function writes before
    the test step. Afterwards the training state is bitwise equal to it.

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
    # Two micro-batches, because the second must fit next to the first one's gradients; a resumed run passed this test
    # when it first started.
    is_last_per_micro_batch = (True,) if progress.step else (False, True)

    def take_step(run_pass: Callable[..., Any]) -> None:
        for is_last in is_last_per_micro_batch:
            run_pass(step.micro_batches[0], weights, last=is_last)
        engine.step(learning_rate=0.0)

    try:
        if engine.uses_cuda_graphs:  # recorded graphs keep their memory while passes of other shapes run without graphs
            for _ in range(WARMUP_PASSES + 1):
                take_step(forward_backward.run)
        take_step(forward_backward.run_without_graph)
    except torch.OutOfMemoryError as error:
        raise MachineError(
            "engine.micro_batch_tokens: the largest micro-batch does not fit on the device. Lower it, raise "
            "engine.zero_stage, or enable engine.activation_checkpointing."
        ) from error
    restore(engine, checkpoint)

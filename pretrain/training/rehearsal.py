"""The trial step of the largest batch, before training: too large a batch fails in the first minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pretrain.checkpoint import store
from pretrain.common.errors import MachineError
from pretrain.training.engine import Engine
from pretrain.training.progress import Progress, checkpoint_state, restore
from pretrain.training.task import S, TrainingTask


def rehearse(
    engine: Engine, task: TrainingTask[S], progress: Progress, checkpoints: Path, extra_state: dict[str, Any]
) -> None:
    """Step the largest micro-batch, with a checkpoint written before and read back after.

    Leaves the training state bitwise as the checkpoint of `progress` has it. A fresh start writes that checkpoint
    first, as step 0. A resumed run need not have been restored before.

    Raises:
        MachineError: the largest micro-batch does not fit the device.
    """
    checkpoint = checkpoints / store.name_of(progress.step)
    if checkpoint not in store.list_checkpoints(checkpoints):
        state = checkpoint_state(engine, progress, extra_state)
        store.save(checkpoints, progress.step, engine.fragments(), state, engine)
    engine.module.train()
    step = task.largest()
    try:
        # A second micro-batch needs memory besides the first one's gradients; a resumed run has tested that before.
        for last in (True,) if progress.step else (False, True):
            output = engine.forward(step.micro_batches[0])
            engine.backward(task.loss(output, task.loss_weights(step)), last=last)
        engine.step(learning_rate=0.0)
    except torch.OutOfMemoryError as error:
        raise MachineError(
            "engine.micro_batch_tokens: the largest micro-batch does not fit the device. Lower it, or use a higher "
            "engine.zero_stage or engine.activation_checkpointing."
        ) from error
    restore(engine, checkpoint)

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
    resumed: Path | None,
) -> None:
    """Take a step with the largest micro-batch, then restore the checkpoint of `progress`.

    The training state is then bitwise equal to that checkpoint: the one that the run is `resumed` from, which need not
    have been restored before, or else one that is written here first, as step 0.

    Raises:
        MachineError: the largest micro-batch does not fit on the device.
    """
    checkpoint = resumed
    if checkpoint is None:
        state = checkpoint_state(engine, progress, extra_state)
        checkpoint = writing.save(checkpoints, progress.step, engine.fragments(), state, engine.workers)
    engine.module.train()
    step, forward_backward = task.largest(), ForwardBackward(engine, task)
    weights = task.loss_weights(step)
    try:
        # A second micro-batch needs memory in addition to the first one's gradients; a resumed run has tested this.
        lasts = (True,) if progress.step else (False, True)
        if engine.records_passes:  # CUDA graphs keep their memory while other shapes are launched
            for _ in range(WARMUP_PASSES + 1):
                _take_step(engine, forward_backward.run, step.micro_batches[0], weights, lasts)
        _take_step(engine, forward_backward.launch, step.micro_batches[0], weights, lasts)
    except torch.OutOfMemoryError as error:
        raise MachineError(
            "engine.micro_batch_tokens: the largest micro-batch does not fit on the device. Lower it, or use a higher "
            "engine.zero_stage or engine.activation_checkpointing."
        ) from error
    restore(engine, checkpoint)


def _take_step(
    engine: Engine, run: Callable[..., Any], micro_batch: Any, weights: Sequence[float], lasts: Sequence[bool]
) -> None:
    for last in lasts:
        run(micro_batch, weights, last=last)
    engine.step(learning_rate=0.0)

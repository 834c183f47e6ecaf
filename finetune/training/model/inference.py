"""Computes the logits for `evaluate`, `predict` and the scores of a finished run."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finetune.tasks.base import Task
from finetune.training.model.batches import Batches, LabeledBatch
from finetune.training.model.task_model import Output, TaskModel
from pretrain.checkpoint.released import ReleasedModel
from pretrain.common.thread_waits import one_thread
from pretrain.common.transfers import arrivals, to_host
from pretrain.config import Precision
from pretrain.model.precision import torch_dtype


def inference_model(
    task: Task[Any],
    released: ReleasedModel,
    weights: Mapping[str, Tensor],
    device: torch.device,
    precision: Precision,
    *,
    compile: bool = False,
) -> TaskModel:
    """Create a model with the checkpoint's architecture, `task`'s head and these weights, in evaluation mode.

    Args:
        weights: fp32 tensors by the parameter names of `TaskModel`.
        precision: precision of the model, to which the weights are rounded.
    """
    with torch.device("meta"):  # skips random initialization, which would take most of the time
        model = TaskModel.of(task, released, compile=compile)
    with one_thread():
        # Copies have torch's memory alignment. Without them, results would depend on a tensor's alignment in its file.
        copies = {name: tensor.to(device, torch_dtype(precision), copy=True) for name, tensor in weights.items()}
    model.load_state_dict(copies, assign=True)
    return model.eval()


def predict_logits(
    forward: Callable[[LabeledBatch], Output],
    batches: Batches,
    num_outputs: int,
    device: torch.device,
    gather: Callable[[Any], list[Any]] = lambda local: [local],
) -> np.ndarray:
    """Return the logits of every query position of a set, float32 [R, C], on all ranks.

    The windows of each forward pass are the same for any number of ranks, so the logits do not depend on that number.
    """
    by_length = batches.batches_by_length()
    pending = ((batch.query_indices, to_host(forward(batch.to(device)).logits.float())) for batch in by_length)
    local_results = [(query_indices, values.numpy().copy()) for query_indices, values in arrivals(pending)]
    logits = np.zeros((len(batches.windows.queries), num_outputs), np.float32)
    for results in gather(local_results):  # one list per rank
        for query_indices, values in results:
            logits[query_indices] = values
    return logits

"""Models whose heads nobody trained: to compute with, and saved as a run saves its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from finetune.tasks.base import Head, Objective
from finetune.tasks.registry import make_task
from finetune.training.config import FinetuneConfig
from finetune.training.model.task_model import TaskModel
from finetune.training.saved import SetResult, save_model
from pretrain.checkpoint.released import ReleasedModel, read_released
from pretrain.checkpoint.released_writer import write_released


def task_model(released: ReleasedModel, head: Head, objective: Objective, outputs: int) -> TaskModel:
    return TaskModel(released.model, released.vocabulary_size, head, objective, outputs, released.task_head(head))


def write_like(
    released: ReleasedModel, out: Path, purpose: Head, head: dict[str, Tensor], tokenizer: Path, **config: Any
) -> Path:
    """The released model with this head, in its own layout; `config` changes config.json."""
    parts: dict[str, Any] = {"family": released.family, "model": released.model, "backbone": released.backbone}
    written = {**released.config, **config}
    write_released(out, **parts, head=head, purpose=purpose, config=written, tokenizer_folder=tokenizer, card="")
    return out


def save_untrained(folder: Path, name: str, section: dict[str, Any], predicted: dict[str, Any] | None = None) -> Path:
    """A finished run from `folder`/bert with random weights; scored on the dev set if all of it was `predicted` so."""
    values = {"name": name, "run_dir": str(folder / name), "start_from": str(folder / "bert"), "max_length": 32}
    config = FinetuneConfig.model_validate({**values, "engine": {"precision": "fp32"}, **section})
    task = make_task(config.task_settings)
    examples, released = task.read_train(), read_released(folder / "bert")
    torch.manual_seed(1)
    model = task_model(released, task.head, task.objective, task.outputs)
    with torch.no_grad():
        for parameter in model.parameters():  # else all predictions would be nearly the same
            parameter.add_(torch.randn_like(parameter) * 0.3)
    results = {}
    if predicted is not None:
        held_out = task.read_held_out()["dev"]
        results["dev"] = SetResult.of(task, held_out, [predicted] * len(held_out))
    said: dict[str, Any] = {"chosen_on": "dev" if results else "", "results": results, "digest": "", "step": 7}
    save_model(config, task, released, model.state_dict(), training_examples=len(examples), **said)
    return folder / name

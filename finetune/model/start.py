"""What a fine-tuning begins with: which of a checkpoint's tensors it takes, and the table that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.config import FinetuneConfig

if TYPE_CHECKING:
    from torch import Tensor

    from finetune.tasks.base import Task
    from pretrain.checkpoint.released import Released


def initial_state(config: FinetuneConfig, task: Task[Any], released: Released) -> dict[str, Tensor]:
    """The checkpoint's tensors that the task's model begins with, by the names of `finetune.model.task_model.TaskModel`.

    All others are initialised at random.
    """
    heads = {f"head.{name}": tensor for name, tensor in released.head.items()}
    return {
        name: tensor
        for name, tensor in {**released.backbone, **heads}.items()
        if not _why_left_out(name, config, task, released)
    }


def start_table(config: FinetuneConfig, task: Task[Any], released: Released) -> str:
    """`fate_table` of this fine-tuning, and the parts of its head that the checkpoint does not fill, if any."""
    from pretrain.checkpoint.released import fate_table

    fates = [
        fate
        if fate.fate.startswith("left out") or not (reason := _why_left_out(fate.fate, config, task, released))
        else fate._replace(fate=f"left out: {reason}")
        for fate in released.fates
    ]
    filled = initial_state(config, task, released)
    parts = ("head.dense", "head.out") if task.head == "sequence" else ("head.out",)
    empty = [f"{part}.*" for part in parts if f"{part}_weight" not in filled]
    return "\n".join([fate_table(fates), *([f"initialised at random: {', '.join(empty)}"] if empty else [])])


def _why_left_out(name: str, config: FinetuneConfig, task: Task[Any], released: Released) -> str:
    """Why a fine-tuning does not begin with our parameter `name` of the checkpoint; "" where it does."""
    if config.random_weights:
        return "initialised at random (random_weights)"
    part, _, rest = name.partition(".")
    again = config.training.reinitialised_layers
    if part == "layers" and int(rest.split(".")[0]) >= released.model.layers - again:
        return f"initialised at random (training.reinitialised_layers: {again})"
    if part == "heads":
        return "a head of pretraining"
    if rest.startswith("dense_") and part == "head":
        if task.head != "sequence":
            return f"the head of {config.task_name} has one layer alone"
        if config.training.reinitialise_pooler:
            return "initialised at random (training.reinitialise_pooler)"
    if rest.startswith("out_") and part == "head" and not _same_outputs(task, released):
        return "an output layer of another task or of other labels"
    return ""


def _same_outputs(task: Task[Any], released: Released) -> bool:
    """Whether the checkpoint's output layer gives what this task learns: the very same labels, a value, or a span."""
    weight = released.head.get("out_weight")
    if weight is None or len(weight) != task.outputs:
        return False
    classes = released.config.get("architectures") or ()
    if task.head == "spans":
        return any(name.endswith("ForQuestionAnswering") for name in classes)
    if task.objective == "value":
        # A single output without a problem_type is a value to transformers, too (modeling_bert.py, forward).
        kind = released.config.get("problem_type") or "regression"
        return kind == "regression" and any(name.endswith("ForSequenceClassification") for name in classes)
    names = {int(number): name for number, name in (released.config.get("id2label") or {}).items()}
    return bool(names) and tuple(names[n] for n in sorted(names)) == task.labels

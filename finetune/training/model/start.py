"""Starts a fine-tuning: chooses the tensors to load from a checkpoint, and shows them to the user in a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from finetune.training.config import FinetuneConfig
from pretrain.common.errors import InputError
from pretrain.storage.runs import fetched_model

if TYPE_CHECKING:
    from torch import Tensor

    from finetune.tasks.base import Task
    from finetune.tasks.datasets.text import TextEncoder
    from pretrain.checkpoint.released import ReleasedModel
    from pretrain.config import ModelConfig

# Product of tokens in the whole training, layers and hidden size. Below this, compilation takes longer than it saves on
# a CPU (docs/benchmarks/lab-notes.md).
_MIN_WORK = 2e9
_SAMPLE_SIZE = 256  # number of examples from which the number of tokens is estimated


def is_short(
    config: FinetuneConfig, task: Task[Any], examples: Sequence[Any], encoder: TextEncoder, shape: ModelConfig
) -> bool:
    """Return whether training is too short to benefit from compilation, or from a warm-up step on the largest batch.

    Depends only on config and data, so that the result is the same after a resume. Always false on a GPU, where the
    benefit has not been measured.
    """
    import torch

    if torch.cuda.is_available():
        return False
    sample = examples[:_SAMPLE_SIZE]
    windows = task.windows(sample, encoder, training=True)
    units = max(1, windows.training_examples)
    total_units = units * len(examples) // max(1, len(sample))
    steps = config.filled(shape.hidden, total_units).total_steps(total_units)
    tokens = steps * config.training.examples_per_step * len(windows.ids) / units
    return tokens * shape.layers * shape.hidden < _MIN_WORK


def read_start(config: FinetuneConfig) -> tuple[ReleasedModel, TextEncoder]:
    """Read the checkpoint to start from, and its tokenizer as an encoder of windows with the config's length.

    Raises:
        InputError: the checkpoint is damaged, has no tokenizer, or belongs to an unknown family.
    """
    from finetune.tasks.datasets.text import TextEncoder
    from pretrain.checkpoint.released import read_released
    from pretrain.checkpoint.tokenizer import read_tokenizer

    folder = fetched_model(config.start_from)
    released = read_released(folder)
    tokenizer = read_tokenizer(folder, released.vocabulary_size)
    return released, TextEncoder(tokenizer, config.max_length, segments=released.token_types > 1)


def initial_state(config: FinetuneConfig, task: Task[Any], released: ReleasedModel) -> dict[str, Tensor]:
    """Return the checkpoint's tensors that the task's model loads, by the parameter names of `TaskModel`.

    All other parameters are initialized randomly.
    """
    heads = {f"head.{name}": tensor for name, tensor in released.head.items()}
    return {
        name: tensor
        for name, tensor in {**released.backbone, **heads}.items()
        if not _skip_reason(name, config, task, released)
    }


def fits_output_layer(config: FinetuneConfig, task: Task[Any], released: ReleasedModel) -> bool:
    """Return whether the output layer is new and is initialized by `finetune.training.model.output_layer`.

    False if the encoder's weights are random, since their features are useless.
    """
    is_new = "head.out_weight" not in initial_state(config, task, released)
    return not config.random_weights and is_new


def start_table(config: FinetuneConfig, task: Task[Any], released: ReleasedModel) -> str:
    """Return the `mapping_table` of this fine-tuning, followed by lines on the parts of its head that are new."""
    from pretrain.checkpoint.mapping import LEFT_OUT, mapping_table

    mapping = [
        tensor._replace(target=f"{LEFT_OUT}{reason}")
        if tensor.is_read and (reason := _skip_reason(tensor.target, config, task, released))
        else tensor
        for tensor in released.mapping
    ]
    loaded = initial_state(config, task, released)
    head = released.task_head(task.head)
    is_fitted = fits_output_layer(config, task, released)
    parts = {"head.dense": head.activation, "head.norm": head.norm, "head.out": not is_fitted}
    missing = [f"{part}.*" for part, is_used in parts.items() if is_used and f"{part}_weight" not in loaded]
    lines = [mapping_table(mapping), *([f"initialized at random: {', '.join(missing)}"] if missing else [])]
    if task.head == "sequence" and head.pooling != "cls":
        lines.append(f"pooling: {head.pooling} of all tokens")
    if is_fitted:
        lines.append("head.out.*: fitted to the frozen encoder's features")
    return "\n".join(lines)


def _skip_reason(name: str, config: FinetuneConfig, task: Task[Any], released: ReleasedModel) -> str:
    """Return the reason why the parameter `name` is not loaded from the checkpoint; "" if it is loaded."""
    if config.random_weights:
        return "initialized at random (random_weights)"
    part, _, rest = name.partition(".")
    if part == "heads":
        return "pretraining heads"
    if rest.startswith(("dense_", "norm_")) and part == "head" and not released.task_head(task.head).activation:
        return f"the head of {config.task_name} has only one layer"
    if rest.startswith("out_") and part == "head" and not _has_same_outputs(config, task, released):
        return "an output layer of another task or of other labels"
    return ""


def _has_same_outputs(config: FinetuneConfig, task: Task[Any], released: ReleasedModel) -> bool:
    """Return whether the checkpoint's output layer predicts what this task needs: its labels, a value, or a span."""
    weight = released.head.get("out_weight")
    if weight is None or len(weight) != task.outputs:
        return False
    architectures = released.config.get("architectures") or ()
    if task.head == "spans":
        return any(name.endswith("ForQuestionAnswering") for name in architectures)
    if task.objective == "value":
        # transformers also treats a single output without a problem_type as a regression (modeling_bert.py, forward).
        problem = released.config.get("problem_type") or "regression"
        return problem == "regression" and any(name.endswith("ForSequenceClassification") for name in architectures)
    label_map = released.config.get("id2label") or {}
    try:
        names = {int(index): name for index, name in label_map.items()}
    except (AttributeError, ValueError):
        raise InputError(
            f"{config.start_from}: id2label in config.json is {label_map!r:.60}; expected a label for "
            "each index from 0. Correct it, or remove it to train a new output layer."
        ) from None
    return bool(names) and tuple(names[index] for index in sorted(names)) == task.labels

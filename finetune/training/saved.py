"""Reads and writes fine-tuned models: Hugging Face folders, with config and task state in `finetune.json`.

runs/NAME/model/       config.json model.safetensors tokenizer.json ... README.md finetune.json manifest.json
runs/NAME/scores.json  scores of every labeled dev and test set, the model's training step, and the set that chose it
runs/NAME/predictions/SET.jsonl, and files for the task's official scorers
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from finetune.tasks.base import Task
from finetune.training.card import CardFacts, interval_text, model_card
from finetune.training.config import FinetuneConfig
from finetune.training.folders import MODEL, SETTINGS, model_folder
from finetune.training.rows import write_rows
from pretrain.common.errors import InputError, version_mismatch
from pretrain.common.files import atomic_open, check_outputs_differ, is_stream, write_json
from pretrain.common.run_files import SCORES
from pretrain.common.wording import score_title, shown_scores
from pretrain.storage.runs import fetched_model

if TYPE_CHECKING:
    from torch import Tensor

    from pretrain.checkpoint.released import ReleasedModel

logger = logging.getLogger(__name__)

PREDICTIONS = "predictions"  # name of the folder of predictions in a run folder
FORMAT = 1  # version of finetune.json

_PROBLEM_TYPES = {  # {objective: `problem_type` in config.json}
    "classes": "single_label_classification",
    "labels": "multi_label_classification",
    "value": "regression",
}
# {objective: activation of a CrossEncoder}. Its default for a single logit is a sigmoid (sentence-transformers 6.2,
# cross_encoder/model.py, get_default_activation_fn); a softmax is an option of its `predict`.
_ACTIVATIONS = {"classes": "linear.Identity", "labels": "activation.Sigmoid", "value": "linear.Identity"}


@dataclass(frozen=True)
class SetResult:
    """The finished model's predictions on a set, with scores if the set is labeled."""

    examples: Sequence[Any]
    predictions: list[dict[str, Any]]
    scores: dict[str, float]
    details: dict[str, Any]

    @classmethod
    def of(cls, task: Task[Any], examples: Sequence[Any], predictions: list[dict[str, Any]]) -> SetResult:
        """Score the predictions with the task; the details include the confidence interval of its metric."""
        if not task.is_labeled(examples):
            return cls(examples, predictions, {}, {})
        scores = task.score(examples, predictions) | task.calibration(examples, predictions)
        details = task.details(examples, predictions)
        if interval := task.interval(examples, predictions):
            details = {**details, "interval": list(interval)}
        return cls(examples, predictions, scores, details)


@dataclass(frozen=True)
class SavedModel:
    """The content of `finetune.json`."""

    config: FinetuneConfig
    state: dict[str, Any]  # state of the task
    scores: dict[str, dict[str, float]]


def save_model(
    config: FinetuneConfig,
    task: Task[Any],
    released: ReleasedModel,
    weights: Mapping[str, Tensor],
    *,
    step: int,
    results: Mapping[str, SetResult],
    chosen_on: str,
    training_examples: int,
    digest: str,
    temperature: float = 1.0,
) -> None:
    """Write predictions, scores and, last, the model to the run folder; the model marks the run as complete.

    Args:
        weights: tensors by the parameter names of `finetune.training.model.task_model.TaskModel`.
        step: training step at which the weights were saved.
        results: results of every dev and test set, by its name.
        chosen_on: name of the set that selected this step and tuned the task; "" if there was none.
        training_examples: number of examples in the training set.
        digest: digest of the training data and of all scored data.
        temperature: divisor of the logits, already applied to the weights.
    """
    for name, result in results.items():
        write_predictions(config.folder / PREDICTIONS / f"{name}.jsonl", task, result.examples, result.predictions)
    from pretrain.checkpoint.layouts import BERTRAIN, needs_custom_code, unsupported_parts

    facts = CardFacts(
        family=released.family,
        shape=released.model,
        parameters=sum(tensor.numel() for tensor in weights.values()),
        step=step,
        chosen_on=chosen_on,
        examples={"train": training_examples, **{name: len(result.examples) for name, result in results.items()}},
        scores={name: result.scores for name, result in results.items() if result.scores},
        details={name: result.details for name, result in results.items() if result.details},
        unsupported=unsupported_parts(released.model) if released.family == BERTRAIN.family else "",
        temperature=temperature,
        includes_code=task.head == "sequence" and needs_custom_code(released.family, released.model, released.config),
    )
    summary = {"metric": task.metric, "step": step, "chosen_on": chosen_on, "data": digest, "temperature": temperature}
    write_json(config.folder / SCORES, {**summary, "scores": facts.scores, "details": facts.details})
    _write_model(config, task, released, weights, facts)


def _write_model(
    config: FinetuneConfig, task: Task[Any], released: ReleasedModel, weights: Mapping[str, Tensor], facts: CardFacts
) -> None:
    from pretrain.checkpoint.released_writer import write_released

    settings = {
        "format": FORMAT,
        "config": config.model_dump(mode="json"),
        "state": task.state(),
        "scores": facts.scores,
    }
    write_released(
        config.folder / MODEL,
        family=released.family,
        model=released.model,
        backbone={name: tensor for name, tensor in weights.items() if not name.startswith("head.")},
        head={name.removeprefix("head."): tensor for name, tensor in weights.items() if name.startswith("head.")},
        purpose=task.head,
        config={**_without_stale_keys(released.config), **_label_settings(task)},
        tokenizer_folder=fetched_model(config.start_from),
        card=model_card(config, task, facts),
        extra={SETTINGS: json.dumps(settings, indent=2, ensure_ascii=False)},
        sentence_files=released.sentence_files,
    )


def load_saved(folder: Path) -> SavedModel:
    """Read config, state and scores of the model in `folder`, which may be a run folder."""
    path = model_folder(folder) / SETTINGS
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return SavedModel(FinetuneConfig.model_validate(values["config"]), values["state"], values["scores"])
    except ValidationError:
        raise InputError(version_mismatch(path, "Fine-tune again.")) from None
    except (ValueError, KeyError) as error:
        raise InputError(f"{path}: damaged ({' '.join(str(error).split())[:200]}). Fine-tune again.") from None


def write_predictions(
    path: Path,
    task: Task[Any],
    examples: Sequence[Any],
    predictions: Sequence[Mapping[str, Any]],
    inputs: Iterable[Path | str] = (),
) -> None:
    """Write `prediction_rows` to `path` and, unless it is a pipe, the task's `scorer_files` next to it.

    Raises `InputError` before anything is written if one of these files is one of `inputs`.
    """
    contents = {} if is_stream(path) else task.scorer_files(examples, predictions)
    files = {path.with_name(path.stem + suffix): content for suffix, content in contents.items()}
    check_outputs_differ([path, *files], inputs)
    write_rows(path, prediction_rows(task, examples, predictions))
    for scorer_file, content in files.items():
        with atomic_open(scorer_file, "w") as file:
            file.write(content)


def prediction_rows(
    task: Task[Any], examples: Sequence[Any], predictions: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each example: columns of its file that the task does not use, then its record and prediction.

    Columns of the file keep their names. Keys of records and predictions that equal one are renamed, with a warning.
    """
    file_columns = {name for example in examples for name in task.unused_columns(example)}
    rows = [{**task.record(example), **prediction} for example, prediction in zip(examples, predictions, strict=True)]
    keys = dict.fromkeys(key for row in rows for key in row)
    names: dict[str, str] = {}  # {key: name of its column}
    for key in keys:
        configured = task.columns.get(key, key)
        unique = configured if key in file_columns and configured not in {*file_columns, *keys} else key
        while unique in file_columns or unique in names.values():
            unique = f"predicted_{unique}"
        names[key] = unique
    if renamed := [f"{key} to {name}" for key, name in names.items() if name != key]:
        logger.warning("the file has columns of the same names, so predictions rename %s", ", ".join(renamed))
    for example, row in zip(examples, rows, strict=True):
        yield {**task.unused_columns(example), **{names[key]: value for key, value in row.items()}}


def result_lines(task: Task[Any], name: str, scores: Mapping[str, float], details: Mapping[str, Any]) -> list[str]:
    """Format the scores of the set `name` for the terminal, with the task's remarks on `details` as warnings."""
    remarks = [f"  warning: {name}: {remark}" for remark in task.result_remarks(details)]
    interval = {task.metric: interval_text(details)}
    shown = shown_scores(scores, task.metric).items()
    line = ", ".join(f"{score_title(key, task.positive)} {value:.4f}{interval.get(key, '')}" for key, value in shown)
    return [f"{name}: {line}", *remarks]


# Keys in config.json of the initial checkpoint that do not apply to the fine-tuned model.
_STALE_KEYS = (
    "architectures",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    "finetuning_task",
    "sentence_transformers",
    "sbert_ce_default_activation_function",
    "_name_or_path",
)


def _without_stale_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _STALE_KEYS}


def _label_settings(task: Task[Any]) -> dict[str, Any]:
    """Return config.json's settings for labels. A regression has one output, which also needs a label in the maps."""
    if task.head == "spans":
        return {}
    names = task.labels or tuple(f"LABEL_{index}" for index in range(task.outputs))
    maps = {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }
    if task.head != "sequence":
        return maps
    activation = {"activation_fn": f"torch.nn.modules.{_ACTIVATIONS[task.objective]}"}
    return maps | {"problem_type": _PROBLEM_TYPES[task.objective], "sentence_transformers": activation}

"""The command `evaluate`: scores a fine-tuned model on labeled files, and writes metrics.json and predictions."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from finetune.artifacts.predictor import Predictor
from finetune.tasks.base import Task
from finetune.tasks.datasets.files import plain_stem
from finetune.training.folders import MODEL, model_folder
from finetune.training.saved import PREDICTIONS, SetResult, result_lines, write_predictions
from pretrain.common.errors import InputError
from pretrain.common.files import write_json
from pretrain.common.run_files import SCORES

_METRICS = "metrics.json"


def evaluate(model: Path, file: str | None, out: Path | None, **options: Any) -> str:
    """Score a model, write metrics.json and predictions, and return the scores as lines.

    Args:
        model: folder of a fine-tuned model, or of its run.
        file: labeled file to score on; None: the dev sets and labeled test sets of the model's config.
        out: folder to write to; None: evaluation/ in the run folder, or NAME-evaluation/ next to an export NAME.
        options: options of `Predictor`.

    Raises:
        InputError: there is no model or no labeled set, or `out` has a metrics.json that `evaluate` did not write.
    """
    folder = model_folder(model)
    predictor = Predictor(folder, **options)
    out = out or _evaluation_folder(folder)
    metrics = _read_metrics(out / _METRICS)
    task = predictor.task
    examples_by_set = {plain_stem(Path(file)): task.read_file(file)} if file else _labeled_sets(task)
    scored_file = str(Path(file).expanduser().resolve()) if file else None
    if not examples_by_set:
        raise InputError(f"{folder}: its config names no labeled dev or test set. Give a labeled file.")
    lines = []
    for name, examples in examples_by_set.items():
        result = SetResult.of(task, examples, predictor.predict(examples))
        name = _unused_name(name, scored_file, metrics)
        metrics[name] = {"scores": result.scores, "details": result.details, "file": scored_file}
        path = out / PREDICTIONS / f"{name}.jsonl"
        write_predictions(path, task, examples, result.predictions, inputs=[scored_file] if scored_file else [])
        lines += result_lines(task, name, result.scores, result.details)
    write_json(out / _METRICS, metrics)
    if predictor.precision != predictor.config.engine.precision:
        lines.append(f"Computed in {predictor.precision}: {predictor.precision_reason}.")
    return "\n".join([*lines, f"{out}: {_METRICS} and predictions written"])


def _evaluation_folder(folder: Path) -> Path:
    """Return the default folder for results: in the run folder, or next to an export, which must not change."""
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    is_run_model = folder.name == MODEL and (folder.parent / SCORES).is_file()
    return folder.parent / ("evaluation" if is_run_model else f"{folder.name}-evaluation")


def _labeled_sets(task: Task[Any]) -> dict[str, list[Any]]:
    """Return the examples of the config's dev sets and labeled test sets, by name."""
    test_sets = {name: examples for name, examples in task.test_sets().items() if task.is_labeled(examples)}
    return {**task.read_held_out(), **test_sets}


def _read_metrics(path: Path) -> dict[str, Any]:
    """Read the metrics of earlier evaluations; {} if there are none."""
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}). Remove it, or choose another --out.") from None
    if not isinstance(metrics, dict) or not all(isinstance(entry, dict) for entry in metrics.values()):
        raise InputError(f"{path}: not written by evaluate. Choose another --out.")
    return metrics


def _unused_name(name: str, scored_file: str | None, metrics: Mapping[str, Any]) -> str:
    """Return `name`, with a suffix -2, -3, ... if `metrics` has results of another file under this name."""
    candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(name for name in candidates if name not in metrics or metrics[name].get("file") == scored_file)

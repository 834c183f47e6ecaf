"""A fine-tuning as the command line sees it: what is checked before a worker starts, and what is said at the end."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.artifacts.card import repeated_remark
from finetune.artifacts.saved import (
    MODEL,
    PREDICTIONS,
    SCORES,
    SetResult,
    load_saved,
    model_folder,
    write_predictions,
)
from finetune.config import FinetuneConfig, changed_for_resume, load_config
from finetune.datasets.files import plain_stem
from finetune.datasets.text import TextEncoder
from finetune.model.start import start_table
from finetune.tasks.base import Task, data_digest
from finetune.tasks.registry import make_task
from pretrain import preflight
from pretrain.common.errors import InputError
from pretrain.common.files import MANIFEST, write_json
from pretrain.config import ModelConfig

if TYPE_CHECKING:
    from pretrain.checkpoint.released import Released


_METRICS = "metrics.json"


@dataclass(frozen=True)
class FinetunePlan:
    """What is known before training."""

    examples: int
    units: int  # what a step counts: examples, or their windows where nothing joins these
    held_out: dict[str, int]
    labels: tuple[str, ...]
    steps: int
    fates: str  # of the checkpoint's tensors
    family: str
    parameters: int
    model: ModelConfig  # the checkpoint's shape


def is_finished(config: FinetuneConfig, resume: bool) -> bool:
    """Whether the run folder holds a finished model; one that is not to be resumed is refused."""
    finished = (config.folder / MODEL / MANIFEST).is_file()
    if finished and not resume:
        raise InputError(
            f"{config.folder}: already holds a finished model. Choose another name or run_dir, or remove it."
        )
    if finished:
        check_same(config, over=True)
    return finished


def check_same(config: FinetuneConfig, *, over: bool) -> None:
    """Raise `InputError` if the run in the folder has other settings; `over`: and will not go on with new ones."""
    path = config.folder / preflight.CONFIG_FILE
    if not path.is_file():
        return
    before = load_config(path)
    others = changed_for_resume(before, config)
    if Path(before.start_from).resolve() != Path(config.start_from).resolve():
        others.append(f"start_from ({before.start_from} -> {config.start_from})")
    patience = before.training.patience, config.training.patience
    if over and patience[0] != patience[1]:
        others.append(f"training.patience ({patience[0]} -> {patience[1]})")
    if others:
        raise InputError(
            f"{path}: was run with other settings: {', '.join(others)}. Choose another name or run_dir, or remove it."
        )


def digest(config: FinetuneConfig, *, test_sets: bool = True) -> str:
    """`data_digest` of what the files say now; `test_sets`: whether labelled ones are scored, too."""
    _, encoder = _read_start(config)
    task = make_task(config.task_settings)
    training = task.windows(task.read_train(), encoder, training=True)
    scored = task.read_held_out()
    tests = task.read_test() if test_sets else {}
    scored |= {name: members for name, members in tests.items() if task.is_labelled(members)}
    windows = {name: task.windows(members, encoder, training=False) for name, members in scored.items()}
    return data_digest(task.labels, training, windows)


def plan(config: FinetuneConfig, alone: bool, *, test_sets: bool = True) -> FinetunePlan:
    """Read the files and the checkpoint; everything of the user's that is wrong comes out here, in seconds.

    `test_sets`: whether they are predicted at the end. Raises `InputError` and `MachineError`.
    """
    if not config.start_from:
        raise InputError("--from: name the folder of a checkpoint to start from (or set start_from in the config).")
    task = make_task(config.task_settings)
    examples = task.read_train()
    held_out = task.read_held_out()
    if test_sets:
        task.read_test()
    if not alone and not config.scheduling.address:
        from cluster.workers.nodes import nodes_fit

        cores = len(os.sched_getaffinity(0))
        nodes_fit([(cores, 0)], config.scheduling.workers, config.scheduling.cpus_per_worker, "this machine")

    released, encoder = _read_start(config)
    check_fit(config, released.model)
    units = len(examples)
    if task.head != "sequence":
        units = task.windows(examples, encoder, training=True).training_examples
    return FinetunePlan(
        examples=len(examples),
        units=units,
        held_out={name: len(members) for name, members in held_out.items()},
        labels=task.labels,
        steps=config.total_steps(units),
        fates=start_table(config, task, released),
        family=released.family,
        parameters=sum(tensor.numel() for tensor in released.backbone.values()),
        model=released.model,
    )


def _read_start(config: FinetuneConfig) -> tuple[Released, TextEncoder]:
    """The checkpoint to start from, and its tokenizer with windows of the config's length."""
    from pretrain.checkpoint.released import read_released
    from pretrain.checkpoint.tokenizer import read_tokenizer

    released = read_released(Path(config.start_from))
    tokenizer = read_tokenizer(Path(config.start_from), released.vocabulary_size)
    return released, TextEncoder(tokenizer, config.max_length, segments=released.token_types > 1)


def check_fit(config: FinetuneConfig, model: ModelConfig) -> None:
    """Raise `InputError` if settings ask for more positions or layers than the checkpoint has."""
    if config.max_length > model.max_positions:
        raise InputError(
            f"max_length: {config.max_length}, but {config.start_from} has {model.max_positions} positions. Lower it to that."
        )
    if config.training.reinitialised_layers > model.layers:
        raise InputError(
            f"training.reinitialised_layers: {config.training.reinitialised_layers}, but {config.start_from} has "
            f"{model.layers} layers. Lower it to that or less."
        )


def describe_start(config: FinetuneConfig, plan: FinetunePlan) -> str:
    """What a run begins with, for the terminal."""
    sets = ", ".join(f"{count:,} in {name}" for name, count in plan.held_out.items()) or "none held out"
    shown = ", ".join(plan.labels[:8]) + (", ..." if len(plan.labels) > 8 else "")
    windows = f" in {plan.units:,} windows" if plan.units != plan.examples else ""
    lines = [
        describe_checkpoint(config, plan),
        f"{config.task_name}: {plan.examples:,} examples{windows} to train on, {sets}; {plan.steps:,} steps",
    ]
    if plan.labels:
        lines.append(f"  {len(plan.labels)} labels: {shown}")
    lines += [f"  remark: {repeated_remark(*pair)}" for pair in config.repeated_sets()]
    return "\n".join(lines)


def describe_checkpoint(config: FinetuneConfig, plan: FinetunePlan) -> str:
    """Whose weights a run begins with, and what becomes of each."""
    lines = [
        f"{config.start_from}: {plan.family}, {plan.parameters / 1e6:.1f} M parameters"
        + (", weights drawn anew" if config.random_weights else ""),
        *(f"  {line}" for line in plan.fates.splitlines()),
    ]
    return "\n".join(lines)


def describe(config: FinetuneConfig, plan: FinetunePlan) -> str:
    """The dry run: the resolved config and what a run would begin with."""
    from pretrain.common.settings import dump
    from pretrain.estimate import settle_precision

    config, why = settle_precision(config)
    settings = "\n".join(f"  {line}" for line in dump(config).splitlines())
    precision = f"Precision\n  {config.engine.precision}: {why}"
    return f"Resolved config\n{settings}\n\n{precision}\n\n{describe_start(config, plan)}"


def begin(config: FinetuneConfig, resume: bool, command: Sequence[str]) -> FinetuneConfig:
    """Check the run folder and write config and environment into it; returns the config as the run began with it."""
    preflight.check_run_folder(config, resume, changed_for_resume)
    config = preflight.as_begun(config) if resume else config
    preflight.record_run(config, command)
    return config


def summary(config: FinetuneConfig) -> str:
    """Scores and places, after training."""
    saved = load_saved(config.folder)
    lines = [f"{name}: {_scores(values)}" for name, values in saved.scores.items()]
    lines.append(f"{config.folder / MODEL}: finished. {next_command(config)}")
    return "\n".join(lines)


def next_command(config: FinetuneConfig) -> str:
    """What to do with a finished model."""
    given = " ".join(f"--{name} ..." for name in make_task(config.task_settings).input_fields)
    return f"Next: ./launch.sh predict {config.folder} {given}"


def evaluate(model: Path, file: str | None, out: Path | None, precision: str) -> str:
    """Score the model, write metrics.json and predictions, and say the scores."""
    from finetune import load

    folder = model_folder(model)
    predictor = load(folder, precision=precision)
    out = out or _evaluation_folder(folder)
    metrics = _read_metrics(out / _METRICS)
    sets = {plain_stem(Path(file)): predictor.task.read_file(file)} if file else _labelled_sets(predictor.task)
    source = str(Path(file).expanduser().resolve()) if file else None
    if not sets:
        raise InputError(f"{folder}: its config names no labelled dev or test set. Give a labelled file.")
    lines = []
    for name, examples in sets.items():
        result = SetResult.of(predictor.task, examples, predictor.predict(examples))
        name = _free_name(name, source, metrics)
        metrics[name] = {"scores": result.scores, "details": result.details, "file": source}
        write_predictions(out / PREDICTIONS / f"{name}.jsonl", predictor.task, examples, result.predictions)
        lines.append(f"{name}: {_scores(result.scores)}")
    write_json(out / _METRICS, metrics)
    if predictor.precision != predictor.config.engine.precision:
        lines.append(f"Computed in {predictor.precision}: {predictor.precision_reason}.")
    return "\n".join([*lines, f"{out}: {_METRICS} and predictions written"])


def _evaluation_folder(folder: Path) -> Path:
    """Beside the model: in its run folder, or, since an export may be replaced, next to it under its name."""
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    is_run = folder.name == MODEL and (folder.parent / SCORES).is_file()
    return folder.parent / ("evaluation" if is_run else f"{folder.name}-evaluation")


def _labelled_sets(task: Task[Any]) -> dict[str, list[Any]]:
    """The dev sets of the config, and those of its test sets that have labels."""
    tests = {name: members for name, members in task.read_test().items() if task.is_labelled(members)}
    return {**task.read_held_out(), **tests}


def _read_metrics(path: Path) -> dict[str, Any]:
    """What earlier evaluations found; {} before the first."""
    try:
        metrics = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}). Remove it, or choose another --out.") from None
    if not isinstance(metrics, dict) or not all(isinstance(one, dict) for one in metrics.values()):
        raise InputError(f"{path}: holds no metrics of evaluate. Choose another --out.")
    return metrics


def _free_name(name: str, source: str | None, metrics: Mapping[str, Any]) -> str:
    """`name`, or with -2, -3, ... behind it where another file than `source` was scored under that."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(one for one in names if one not in metrics or metrics[one].get("file") == source)


def _scores(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in scores.items())

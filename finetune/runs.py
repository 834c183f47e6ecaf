"""A fine-tuning as the command line sees it: what is checked before a worker starts, and what is said at the end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config import FinetuneConfig, changed_for_resume, load_config
from finetune.saved import MODEL, PREDICTIONS, load_saved, model_folder, write_records
from finetune.start import start_table
from finetune.task import data_digest
from finetune.tasks import make_task
from finetune.text import TextEncoder
from pretrain import preflight
from pretrain.config import Model
from pretrain.errors import InputError
from pretrain.files import MANIFEST, write_json

if TYPE_CHECKING:
    from pretrain.checkpoint.released import Released


@dataclass(frozen=True)
class Plan:
    """What is known before training."""

    examples: int
    units: int  # what a step counts: examples, or their windows where nothing joins these
    held_out: dict[str, int]
    labels: tuple[str, ...]
    steps: int
    fates: str  # of the checkpoint's tensors
    family: str
    parameters: int
    model: Model  # the checkpoint's shape


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


def digest(config: FinetuneConfig) -> str:
    """`data_digest` of what the files say now."""
    _, encoder = _read_start(config)
    task = make_task(config)
    training = task.windows(task.read_train(), encoder, training=True)
    held_out = {
        name: task.windows(members, encoder, training=False) for name, members in task.read_held_out().items()
    }
    return data_digest(task.labels, training, held_out)


def plan(config: FinetuneConfig, alone: bool, *, test_sets: bool = True) -> Plan:
    """Read the files and the checkpoint; everything of the user's that is wrong comes out here, in seconds.

    `test_sets`: whether they are predicted at the end. Raises `InputError` and `MachineError`.
    """
    if not config.start_from:
        raise InputError(
            "--from: name the folder of a checkpoint to start from (or set start_from in the config)."
        )
    task = make_task(config)
    examples = task.read_train()
    held_out = task.read_held_out()
    if test_sets:
        task.read_test()
    if not alone and not config.scheduling.address:
        from cluster.nodes import nodes_fit

        cores = len(os.sched_getaffinity(0))
        nodes_fit([(cores, 0)], config.scheduling.workers, config.scheduling.cpus_per_worker, "this machine")

    released, encoder = _read_start(config)
    check_fit(config, released.model)
    units = len(examples)
    if task.head != "sequence":
        units = task.windows(examples, encoder, training=True).units
    return Plan(
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


def check_fit(config: FinetuneConfig, model: Model) -> None:
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


def describe_start(config: FinetuneConfig, plan: Plan) -> str:
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
    return "\n".join(lines)


def describe_checkpoint(config: FinetuneConfig, plan: Plan) -> str:
    """Whose weights a run begins with, and what becomes of each."""
    lines = [
        f"{config.start_from}: {plan.family}, {plan.parameters / 1e6:.1f} M parameters"
        + (", weights drawn anew" if config.random_weights else ""),
        *(f"  {line}" for line in plan.fates.splitlines()),
    ]
    return "\n".join(lines)


def describe(config: FinetuneConfig, plan: Plan) -> str:
    """The dry run: the resolved config and what a run would begin with."""
    from pretrain.estimate import settle_precision
    from pretrain.settings import dump

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
    given = " ".join(f"--{name} ..." for name in make_task(config).asks)
    return f"Next: ./launch.sh predict {config.folder} {given}"


def evaluate(model: Path, file: str | None, out: Path | None, precision: str) -> str:
    """Score the model, write metrics.json and predictions, and say the scores."""
    from finetune import load

    folder = model_folder(model)
    predictor = load(folder, precision=precision)
    sets = {Path(file).stem: predictor.task.read_file(file)} if file else predictor.task.read_held_out()
    if not sets:
        raise InputError(f"{folder}: its config names no dev set. Give a labelled file.")
    out = out or folder.parent / "evaluation"
    result: dict[str, Any] = {}
    lines = []
    for name, examples in sets.items():
        predictions = predictor.predict(examples)
        scores = predictor.task.score(examples, predictions)
        result[name] = {
            "scores": scores,
            "details": predictor.task.details(examples, predictions),
            "file": file,
        }
        write_records(out / PREDICTIONS / f"{name}.jsonl", predictions)
        lines.append(f"{name}: {_scores(scores)}")
    write_json(out / "metrics.json", result)
    if predictor.precision != predictor.config.engine.precision:
        lines.append(f"Computed in {predictor.precision}: {predictor.precision_reason}.")
    return "\n".join([*lines, f"{out}: metrics.json and predictions written"])


def _scores(scores: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in scores.items())

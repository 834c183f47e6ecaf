"""Checks a fine-tuning run and describes it before it starts, and summarizes it at its end."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from finetune.tasks.base import Task, data_digest
from finetune.tasks.datasets.text import TextEncoder
from finetune.training.card import repeated_remark
from finetune.training.config import FinetuneConfig, forbidden_changes
from finetune.training.model.start import is_short, read_start, start_table
from finetune.training.saved import MODEL, load_saved, result_lines
from pretrain.common.commands import program
from pretrain.common.errors import InputError
from pretrain.common.files import MANIFEST
from pretrain.common.records import read_records
from pretrain.common.run_files import CONFIG_FILE, SCORES
from pretrain.common.settings import load_recorded
from pretrain.common.wording import counted, score_title
from pretrain.config import ModelConfig
from pretrain.run import launch
from pretrain.storage.runs import fetched_model

# Training was too short if the mean loss of its last fifth is below _MAX_RATIO times the mean of the fifth before, and
# above _MIN_RATIO times the first loss.
_MAX_RATIO, _MIN_RATIO = 0.93, 0.2
_MAX_INTERVAL = 0.1  # maximum width of a score's confidence interval: about 250 examples at an accuracy of 0.8


@dataclass(frozen=True)
class FinetunePlan:
    """Facts about a run before it trains."""

    examples: int  # number of training examples
    units: int  # number of examples or, if the task does not combine an example's windows, of windows
    tokens: int  # number of tokens in all training examples; 0 if they are not tokenized before training
    held_out: dict[str, int]  # number of examples of each held-out set
    labels: tuple[str, ...]
    steps: int
    is_short: bool  # whether the training is too short for compilation (`start.is_short`)
    key_mapping: str  # result of `start_table`, followed by warnings about lengths
    family: str
    parameters: int  # number of parameters of the encoder
    model: ModelConfig  # shape of the encoder


# ---------------------------------------------------------------- checked before the start


def is_finished(config: FinetuneConfig, resume: bool) -> bool:
    """Return whether the run folder contains the finished model of this run.

    Raises:
        InputError: the folder contains a finished model and `resume` is off, or its run had other settings.
    """
    finished = has_model(config)
    if finished and not resume:
        raise InputError(
            f"{config.folder}: already has a finished model. Choose another name or run_dir, or remove it."
        )
    if finished:
        check_same_settings(config, finished=True)
    return finished


def has_model(config: FinetuneConfig) -> bool:
    """Return whether the run folder contains a finished model."""
    return (config.folder / MODEL / MANIFEST).is_file()


def check_same_settings(config: FinetuneConfig, *, finished: bool) -> None:
    """Raise `InputError` if the run in the config's folder has other settings.

    If that run has `finished`, training.patience must be the same, too.
    """
    path = config.folder / CONFIG_FILE
    if not path.is_file():
        return
    recorded = load_recorded(path, FinetuneConfig)
    changes = forbidden_changes(recorded, config)
    if Path(recorded.start_from).resolve() != Path(config.start_from).resolve():
        changes.append(f"start_from ({recorded.start_from} -> {config.start_from})")
    old_patience, new_patience = recorded.training.patience, config.training.patience
    if finished and old_patience != new_patience:
        changes.append(f"training.patience ({old_patience} -> {new_patience})")
    if changes:
        raise InputError(f"{path}: the run had other settings: {', '.join(changes)}. Choose another name or run_dir.")


def plan(config: FinetuneConfig, in_process: bool) -> FinetunePlan:
    """Read the data files and the checkpoint, to report the user's mistakes in seconds, before training starts.

    Args:
        config: config of the run.
        in_process: whether training runs in this process, so no separate workers have to fit on the machine.

    Raises:
        InputError: a file, the checkpoint or a setting is missing or wrong.
        MachineError: the workers do not fit on this machine.
    """
    if not config.start_from:
        raise InputError("--from: missing. Give the folder of the initial checkpoint, or set start_from in the config.")
    launch.check_callbacks_and_workers(config, in_process)
    task = config.make_task()
    examples = task.training_set()
    held_out = task.read_held_out()
    task.test_sets()
    released, encoder = read_start(config)
    check_max_length(config, released.model)
    task.check(encoder)
    units, tokens = _count_units_and_tokens(config, task, examples, encoder)
    from pretrain.checkpoint.sentence_transformers import length_warnings

    return FinetunePlan(
        examples=len(examples),
        units=units,
        tokens=tokens,
        held_out={name: len(members) for name, members in held_out.items()},
        labels=task.labels,
        steps=config.filled(released.model.hidden, units).total_steps(units),
        is_short=is_short(config, task, examples, encoder, released.model),
        key_mapping="\n".join(
            [start_table(config, task, released), *length_warnings(fetched_model(config.start_from), config.max_length)]
        ),
        family=released.family,
        parameters=sum(tensor.numel() for tensor in released.backbone.values()),
        model=released.model,
    )


def _count_units_and_tokens(
    config: FinetuneConfig, task: Task[Any], examples: Sequence[Any], encoder: TextEncoder
) -> tuple[int, int]:
    """Return `units` and `tokens` of the plan. Cutting windows is slow, so windows are cut only if necessary.

    Raises:
        InputError: an example does not fit into a micro-batch.
    """
    from finetune.training.model.batches import Batches

    workers, budget = config.scheduling.workers, config.engine.micro_batch_tokens
    if task.head == "sequence" and task.max_windows * config.max_length * min(workers, 2) <= budget:
        return len(examples), 0
    windows = task.windows(examples, encoder, training=True)
    Batches(windows, seed=config.seed, budget=budget, rank=0, world_size=workers).check(
        f"{config.task_name}, training set"
    )
    return windows.training_examples, len(windows.ids)


def check_max_length(config: FinetuneConfig, model: ModelConfig) -> None:
    """Raise `InputError` if the settings need more positions than the checkpoint has."""
    if config.max_length > model.max_positions:
        raise InputError(
            f"max_length: {config.max_length}, but {config.start_from} has {model.max_positions} positions. "
            "Lower it to that."
        )


def current_data_digest(config: FinetuneConfig) -> str:
    """Compute the `data_digest` of the data files as they are now, including labeled test sets."""
    _, encoder = read_start(config)
    task = config.make_task()
    training = task.windows(task.training_set(), encoder, training=True)
    scored = task.read_held_out()
    scored |= {name: members for name, members in task.test_sets().items() if task.is_labeled(members)}
    windows = {name: task.windows(members, encoder, training=False) for name, members in scored.items()}
    return data_digest(task.labels, training, windows)


# ---------------------------------------------------------------- printed before the start


def describe(config: FinetuneConfig, plan: FinetunePlan, *, show_config: bool = False) -> str:
    """Describe, for --dry-run, the data, the precision and the checkpoint, and with `show_config` the full config."""
    from pretrain.common.settings import dump
    from pretrain.model.precision import resolve_precision

    config, reason = resolve_precision(config)
    precision = f"precision {config.engine.precision}: {reason}"
    parts = [f"{_describe_data(config, plan)}\n{precision}", describe_checkpoint(config, plan)]
    if show_config:
        parts.append("\n".join(["Resolved config", *(f"  {line}" for line in dump(config).splitlines())]))
    return "\n\n".join(parts)


def describe_start(config: FinetuneConfig, plan: FinetunePlan) -> str:
    """Describe the checkpoint, the data and the number of steps."""
    return f"{describe_checkpoint(config, plan)}\n{_describe_data(config, plan)}"


def _describe_data(config: FinetuneConfig, plan: FinetunePlan) -> str:
    labels = ", ".join(plan.labels[:8]) + (", ..." if len(plan.labels) > 8 else "")
    examples = counted(plan.examples, "training example")
    tokens = f" of {plan.tokens:,} tokens" if plan.tokens else ""
    windows = f" in {counted(plan.units, 'window')}" if plan.units != plan.examples else ""
    compile_note = ", too few to compile the model" if plan.is_short and config.engine.compile == "auto" else ""
    lines = [
        f"{config.task_name}: {examples}{windows}{tokens}, {counted(plan.steps, 'step')}{compile_note}",
        f"  {_describe_held_out(config, plan)}",
    ]
    if plan.labels:
        positive = config.make_task().positive if len(plan.labels) == 2 else ""
        f1_class = f"; f1 is for {positive}" if positive else ""
        lines.append(f"  {counted(len(plan.labels), 'label')}: {labels}{f1_class}")
    lines += [f"  note: {repeated_remark(*pair)}" for pair in config.repeated_sets()]
    return "\n".join(lines)


def _describe_held_out(config: FinetuneConfig, plan: FinetunePlan) -> str:
    """Describe the sets that select the checkpoint, or state that there are none."""
    share = getattr(config.task_settings, "dev_share", None)
    if not plan.held_out:
        hint = f"{config.task_name}.dev" + ("" if share is None else f" or {config.task_name}.dev_share")
        return f"no held-out set: the last checkpoint is kept. To keep the best one by a score, set {hint}."
    sets = ", ".join(f"{name} ({counted(count, 'example')})" for name, count in plan.held_out.items())
    origin = f", {share:.3g} of each class of the training set (dev_share)" if share else ""
    return f"held out: {sets}{origin}"


def describe_checkpoint(config: FinetuneConfig, plan: FinetunePlan) -> str:
    """Describe the checkpoint that the run starts from, and its key mapping."""
    lines = [
        f"{config.start_from}: {plan.family}, {plan.parameters / 1e6:.1f} M parameters"
        + (", weights re-initialized at random" if config.random_weights else ""),
        *(f"  {line}" for line in plan.key_mapping.splitlines()),
    ]
    return "\n".join(lines)


# ---------------------------------------------------------------- printed at the end


def summary(config: FinetuneConfig) -> str:
    """Return a summary with scores, warnings and the model's folder."""
    saved = load_saved(config.folder)
    try:
        record = json.loads((config.folder / SCORES).read_text(encoding="utf-8"))
        details, chosen_on, step = record["details"], record["chosen_on"], record["step"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{config.folder / SCORES}: damaged ({error}). Restore it, or fine-tune again.") from None
    task = config.make_task(saved.state)
    lines = [
        line
        for name, scores in saved.scores.items()
        for line in result_lines(task, name, scores, details.get(name, {}))
    ]
    records, interval = read_records(config.folder), details.get(chosen_on, {}).get("interval")
    lines += run_remarks(records, task.metric, step, task.positive)
    lines += selection_remarks(records, task.metric, interval)
    lines.append(f"{config.folder / MODEL}: finished.")
    return "\n".join(lines)


def run_remarks(records: Sequence[Mapping[str, Any]], metric: str, step: int, positive: str = "") -> list[str]:
    """Return lines: the frozen linear model's score, and warnings if training did not improve on it or was too short.

    `records` are from metrics.jsonl; the checkpoint of `step` was selected by `metric`.
    """
    evaluations = [record for record in records if record.get("split") == "validation" and metric in record]
    losses = [record["loss"] for record in records if "lr" in record]
    lines = []
    if evaluations and evaluations[0]["step"] == 0:
        frozen_score, best_score = evaluations[0][metric], max(record[metric] for record in evaluations)
        lines.append(f"frozen linear model, before training: {score_title(metric, positive)} {frozen_score:.4f}")
        if best_score <= frozen_score != 1:
            kept = f"step {step:,} was kept for its lower held-out loss" if step else "the linear model was kept"
            lines.append(
                f"  warning: training did not improve on it, and {kept}. Lower training.learning_rate, or train on "
                "more examples."
            )
    length = max(2, len(losses) // 5)
    if len(losses) >= 3 * length:
        earlier_loss, last_loss = mean(losses[-2 * length : -length]), mean(losses[-length:])
        if _MIN_RATIO * losses[0] < last_loss < _MAX_RATIO * earlier_loss:
            lines.append(
                f"  warning: the loss is still falling ({earlier_loss:.3f} to {last_loss:.3f} in the last steps). "
                "Train longer (training.epochs)."
            )
    return lines


def selection_remarks(records: Sequence[Mapping[str, Any]], metric: str, interval: Sequence[float] | None) -> list[str]:
    """Return a warning if the dev set is too small to select a checkpoint.

    It is if the confidence `interval` of its score is wider than 0.1, and wider than the range of checkpoint scores.
    """
    scores = [record[metric] for record in records if record.get("split") == "validation" and metric in record]
    if interval is None or not scores or interval[1] - interval[0] <= max(_MAX_INTERVAL, max(scores) - min(scores)):
        return []
    return [
        f"  warning: the dev set is too small to select a checkpoint: {metric} has the 95 % interval {interval[0]:.2f} "
        f"to {interval[1]:.2f}, and the checkpoints scored {min(scores):.2f} to {max(scores):.2f}. Give a larger set, "
        "or use --folds 5."
    ]


def next_command(config: FinetuneConfig) -> str:
    """Return the command that predicts with a finished model."""
    fields = " ".join(f"--{name} ..." for name in config.make_task().input_fields)
    imports = f" --import {config.task['kind']}" if config.task else ""
    return f"Next: {program()} predict {shlex.quote(str(config.address or config.folder))} {fields}{imports}"

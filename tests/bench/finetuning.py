"""`bench finetune`: compares our fine-tuning with the Hugging Face Trainer, alternating for each seed.

The baseline is the usual setup of transformers: its model for the task and `Trainer`, with autocast to the config's
precision, fused AdamW and dynamic padding, and the same checkpoint, features, steps, batch size, learning rates and
settings of AdamW. It truncates long documents to the first window, as the public scripts do. The same code scores both:
ours at its best evaluation, the baseline after its last step. Each run is a separate process.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from finetune.tasks.registry import make_task
from finetune.training.config import FinetuneConfig, load_config
from finetune.training.saved import SCORES
from pretrain.common.children import run_program
from pretrain.common.commands import local_string, parse_path, positive_int, program
from pretrain.common.errors import InputError, MachineError
from pretrain.common.records import is_training, read_records
from pretrain.common.settings import dump
from pretrain.model.precision import resolve_local_precision
from pretrain.storage.runs import fetched_model
from tests.bench import environment

OURS, BASELINE = "ours", "trainer"
_WARM_UP = 0.1  # share of the steps that the speed excludes, because they compile and allocate


def main(argv: Sequence[str]) -> int:
    """Run the comparison, and print a line per run and a summary."""
    parser = argparse.ArgumentParser(prog=f"{program()} bench finetune", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("config", type=parse_path, metavar="CONFIG", help="fine-tuning config")
    parser.add_argument("--from", dest="start_from", type=local_string, metavar="DIR", help="initial checkpoint")
    parser.add_argument("--seeds", type=positive_int, default=3, help="number of runs of each side (default: 3)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a setting")
    parser.add_argument("--peer", metavar="RESULT", help=argparse.SUPPRESS)  # this process is the baseline
    options = parser.parse_args(argv)
    overrides = [*options.set, *([f"start_from={json.dumps(options.start_from)}"] if options.start_from else [])]
    config, _ = resolve_local_precision(load_config(options.config, overrides))
    if options.peer:
        Path(options.peer).write_text(json.dumps(_train_baseline(config)))
        return 0
    print(summary(compare(config, options.seeds)))
    return 0


def compare(config: FinetuneConfig, seeds: int) -> dict[str, list[dict[str, Any]]]:
    """Return {"ours": [run, ...], "trainer": [run, ...]} with run = {"metric", "score", "examples_per_second"}.

    Raises:
        InputError: the config has settings that the Trainer lacks, no dev set, or a checkpoint that transformers lacks.
        MachineError: a package of the baseline is missing.
    """
    _check(config)
    config = config.model_copy(update={"start_from": str(_start_folder(config))})
    runs: dict[str, list[dict[str, Any]]] = {OURS: [], BASELINE: []}
    with tempfile.TemporaryDirectory(prefix="bench-finetune-") as folder:
        for seed in range(config.seed, config.seed + seeds):
            for kind, run in ((OURS, _run_ours), (BASELINE, _run_baseline)):
                runs[kind].append(run(config, seed, Path(folder) / f"{kind}-{seed}"))
                print(_line(kind, seed, runs[kind][-1]), flush=True)
    return runs


def _check(config: FinetuneConfig) -> None:
    """Raise `InputError` if the Trainer does not support the config, or there is no set to score."""
    training = config.training
    weighted = getattr(config.task_settings, "class_weights", "none")
    smoothed = getattr(config.task_settings, "label_smoothing", 0)
    for name, value, needed in (
        ("optimizer.name", config.optimizer.name, "adamw"),
        ("training.layer_decay", training.layer_decay, 1),
        ("training.patience", training.patience, 0),
        ("random_weights", config.random_weights, False),
        (f"{config.task_name}.class_weights", weighted, "none"),
        (f"{config.task_name}.label_smoothing", smoothed, 0),
    ):
        if value != needed:
            raise InputError(f"bench finetune: {name}: {value}; the Trainer has no such setting. Set it to {needed}.")
    if not make_task(config.task_settings).read_held_out():
        raise InputError("bench finetune: the config has no dev set. Set one; scores are compared on it.")


def _start_folder(config: FinetuneConfig) -> Path:
    """Return the folder of the initial checkpoint. Raises the errors of `compare` if the baseline cannot use it."""
    from pretrain.checkpoint.released import unsupported_in_transformers
    from pretrain.checkpoint.tokenizer import is_run, released_folder

    if not config.start_from:
        raise InputError("bench finetune: --from: missing. Give the folder of the initial checkpoint.")
    folder = released_folder(fetched_model(config.start_from))
    if is_run(folder):
        reason = "is a run: export it"
    else:
        reason = (part := unsupported_in_transformers(folder)) and f"has {part}: give another checkpoint"
    if reason:
        raise InputError(f"bench finetune: {folder}: transformers cannot load it. It {reason}.")
    for name in ("accelerate", "transformers"):  # the Trainer needs both
        if importlib.util.find_spec(name) is None:
            raise MachineError(f"bench finetune: {name} is missing. Install the extra: pip install -e .[bench].")
    return folder


def _line(kind: str, seed: int, run: dict[str, Any]) -> str:
    return f"{kind:<8} seed {seed}   {run['metric']} {run['score']:.4f}   {run['examples_per_second']:8.1f} examples/s"


def summary(result: dict[str, Any]) -> str:
    lines = []
    for kind in (OURS, BASELINE):
        scores, rates = ([run[key] for run in result[kind]] for key in ("score", "examples_per_second"))
        spread = f" ± {statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
        lines.append(
            f"{kind:<8} {statistics.fmean(scores):.4f}{spread}   {statistics.median(rates):,.1f} examples/s "
            f"({min(rates):,.1f}-{max(rates):,.1f})"
        )
    pairs = zip(result[OURS], result[BASELINE], strict=True)
    ratios = [ours["examples_per_second"] / theirs["examples_per_second"] for ours, theirs in pairs]
    lines.append(f"ratio    {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
    lines.append(f"scores: {OURS} at the best of its evaluations, {BASELINE} after its last step")
    return "\n".join(lines)


def _run_ours(config: FinetuneConfig, seed: int, folder: Path) -> dict[str, Any]:
    path = write_run_config(config, seed, folder)
    _call(["finetune.cli", "finetune", str(path), "--no-ray"])
    scores = json.loads((folder / SCORES).read_text())
    training = [record for record in read_records(folder) if is_training(record)]
    warm = next(record for record in training if record["step"] >= _WARM_UP * training[-1]["step"])
    last = training[-1]
    # If there is only one record, only the speed of the whole run is known.
    examples, seconds = (last[key] - (warm[key] if warm is not last else 0) for key in ("samples", "seconds"))
    return {
        "metric": scores["metric"],
        "score": next(iter(scores["scores"].values()))[scores["metric"]],
        "examples_per_second": examples / seconds,
    }


def _run_baseline(config: FinetuneConfig, seed: int, folder: Path) -> dict[str, Any]:
    path = write_run_config(config, seed, folder)
    result = folder.with_suffix(".json")
    _call(["tests.bench", "finetune", str(path), "--peer", str(result)])
    return json.loads(result.read_text())


def write_run_config(config: FinetuneConfig, seed: int, folder: Path) -> Path:
    path = folder.with_suffix(".yaml")
    tracking = config.tracking.model_copy(update={"wandb": "off"})  # the Trainer is not tracked, either
    path.write_text(dump(config.model_copy(update={"seed": seed, "run_dir": str(folder), "tracking": tracking})))
    return path


def _call(arguments: list[str]) -> None:
    done = run_program([sys.executable, "-m", *arguments], environment())
    if done.returncode:
        raise MachineError(f"bench finetune: `{' '.join(arguments)}` failed: {done.stderr.strip()[-400:]}")


def _train_baseline(config: FinetuneConfig) -> dict[str, Any]:
    import torch
    import transformers

    from finetune.tasks.datasets.text import TextEncoder
    from pretrain.checkpoint.tokenizer import read_tokenizer

    torch.manual_seed(config.seed)
    task = make_task(config.task_settings)
    examples = task.read_train()
    held_out = next(iter(task.read_held_out().values()))
    classes = {
        "sequence": transformers.AutoModelForSequenceClassification,
        "tokens": transformers.AutoModelForTokenClassification,
        "spans": transformers.AutoModelForQuestionAnswering,
    }
    outputs = {} if task.head == "spans" else {"num_labels": task.outputs}
    model = classes[task.head].from_pretrained(config.start_from, **outputs)
    # RoBERTa has one token type, DistilBERT none.
    segments = getattr(model.config, "type_vocab_size", 0) > 1
    encoder = TextEncoder(read_tokenizer(Path(config.start_from)), config.max_length, segments=segments)
    windows = task.windows(examples, encoder, training=True)
    steps = config.total_steps(windows.training_examples)
    features = _features(windows, task.head)
    pad = model.config.pad_token_id or 0
    collate = functools.partial(collate_windows, pad=pad, segments=segments, tags=task.head == "tokens")
    clock = _make_clock(transformers)
    trainer = transformers.Trainer(
        model=model,
        args=trainer_arguments(config, steps),
        train_dataset=features,  # pyright: ignore[reportArgumentType]
        data_collator=collate,
        callbacks=[clock],
    )
    trainer.train()
    windows = task.windows(held_out, encoder, training=False)
    logits = _predict(trainer, windows, task.head, task.outputs)
    task.tune(held_out, windows, logits)
    predictions = task.decode(held_out, windows, logits)
    return {
        "metric": task.metric,
        "score": task.score(held_out, predictions)[task.metric],
        "examples_per_second": clock.rate(config.training.examples_per_step),
    }


def trainer_arguments(config: FinetuneConfig, steps: int) -> Any:
    """Return TrainingArguments with our schedule and optimizer settings."""
    import torch
    import transformers

    settings = config.training
    return transformers.TrainingArguments(
        output_dir=str(config.folder / "trainer"),
        per_device_train_batch_size=settings.examples_per_step,
        learning_rate=settings.learning_rate,
        max_steps=steps,
        warmup_steps=round(settings.warmup_share * steps),
        lr_scheduler_type="linear",
        weight_decay=config.optimizer.weight_decay,
        adam_beta1=config.optimizer.beta1,
        adam_beta2=config.optimizer.beta2,
        adam_epsilon=config.optimizer.epsilon,
        max_grad_norm=config.engine.gradient_clip_norm,
        bf16=config.engine.precision == "bf16",
        fp16=config.engine.precision == "fp16",
        optim="adamw_torch_fused",
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        seed=config.seed,
        disable_tqdm=True,
        logging_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        per_device_eval_batch_size=32,
    )


def _make_clock(transformers: Any) -> Any:
    class Clock(transformers.TrainerCallback):
        """Records the end time of each step."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

        def rate(self, batch: int) -> float:
            first = int(_WARM_UP * len(self.ends))
            return batch * (len(self.ends) - 1 - first) / (self.ends[-1] - self.ends[first])

    return Clock()


def _features(windows: Any, head: str) -> list[dict[str, Any]]:
    """Return the features of each example, as in the public scripts: lists of ids, token types and labels."""
    features = []
    first_query = np.searchsorted(windows.queries, windows.starts)  # of each window
    for number in range(len(windows)):
        if head == "sequence" and number and windows.examples[number] == windows.examples[number - 1]:
            continue  # truncated
        begin, end = windows.starts[number], windows.starts[number + 1]
        rows = slice(first_query[number], first_query[number + 1])
        one = {"input_ids": windows.ids[begin:end].tolist(), "token_type_ids": windows.types[begin:end].tolist()}
        labels = windows.labels[rows]
        if head == "sequence":
            one["labels"] = labels[0].tolist()
        elif head == "tokens":
            tags = np.full(end - begin, -100)
            tags[windows.queries[rows] - begin] = labels
            one["labels"] = tags.tolist()
        else:
            one["start_positions"], one["end_positions"] = (int(labels[:, column].argmax()) for column in (0, 1))
        features.append(one)
    return features


def collate_windows(features: list[dict[str, Any]], pad: int, *, segments: bool, tags: bool) -> dict[str, Any]:
    """Pad to the longest sequence of the batch; omit token_type_ids if the model has no token types.

    With `tags`, each token has a label.
    """
    import torch

    longest = max(len(one["input_ids"]) for one in features)

    def padded(values: list[list[int]], pad: int) -> torch.Tensor:
        return torch.tensor([value + [pad] * (longest - len(value)) for value in values])

    ids = [one["input_ids"] for one in features]
    batch = {"input_ids": padded(ids, pad), "attention_mask": padded([[1] * len(value) for value in ids], 0)}
    if segments:
        batch["token_type_ids"] = padded([one["token_type_ids"] for one in features], 0)
    for name in ("labels", "start_positions", "end_positions"):
        if name in features[0]:
            values = [one[name] for one in features]
            batch[name] = padded(values, -100) if tags else torch.tensor(values)
    return batch


def _predict(trainer: Any, windows: Any, head: str, outputs: int) -> np.ndarray:
    """Return the logits of the query positions, float32 [R, C]."""
    bounds = list(itertools.pairwise(windows.starts))
    features = [
        {"input_ids": windows.ids[a:b].tolist(), "token_type_ids": windows.types[a:b].tolist()} for a, b in bounds
    ]
    raw = trainer.predict(features).predictions
    raw = np.stack(raw, -1) if head == "spans" else raw
    logits = np.zeros((len(windows.queries), outputs), np.float32)
    first_query = np.searchsorted(windows.queries, windows.starts)
    for number, (begin, _) in enumerate(bounds):
        rows = slice(first_query[number], first_query[number + 1])
        logits[rows] = raw[number] if head == "sequence" else raw[number][windows.queries[rows] - begin]
    return logits

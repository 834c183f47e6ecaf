"""Runs the whole demo: pretrains on Python docstrings, then fine-tunes on three labeled sets extracted from them.

Each task is fine-tuned from the pretrained weights and from random ones, with the same data and steps. The difference
in scores is the benefit of pretraining.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.training import api as finetuning
from finetune.training.saved import MODEL
from finetune.workflows.demo.data import write_sets
from pretrain.common.commands import default_workers
from pretrain.common.errors import InputError, StoppedError
from pretrain.common.files import MANIFEST, checkpoint_names, write_json
from pretrain.common.packages import expect
from pretrain.common.run_files import ENVIRONMENT_FILE, SCORES
from pretrain.common.settings import as_overrides
from pretrain.reporting.report import FINETUNED
from pretrain.run import api as pretraining

_CONFIG = "tiny"
_DEFAULT_MINUTES = 6.0  # for pretraining
STARTS = {"pretrained": False, "random": True}  # {name of the initial weights: value of the setting random_weights}
DATA = "labeled"  # folder of the labeled sets, in the run folder
_COUNTS = "counts.json"  # sizes of the labeled sets, written after all of them
_NUM_EXAMPLES = 4  # number of examples of each task that the report shows, with predictions
_MAX_CHARACTERS = 320  # maximum length of an example in the report


@dataclass(frozen=True)
class DemoTask:
    """A task of the demo, which is fine-tuned from each of `STARTS`."""

    name: str
    title: str
    section: str  # the task's section of the config


TASKS = (
    DemoTask("packages", "Which package is a passage from?", "classification"),
    DemoTask("names", "Which words are code names?", "entities"),
    DemoTask("returns", "What does the function return?", "questions"),
)


def run(arguments: argparse.Namespace) -> None:
    """Run all stages and write the report; raises the error of the first stage that fails."""
    arguments.workers = arguments.workers or default_workers()
    expect("demo", "deepspeed", "pyarrow", *(["ray"] if arguments.workers > 1 else []))
    started = time.monotonic()
    try:
        _pretrain(arguments)
        _finetune(arguments)
    except StoppedError as error:
        raise error.for_rerun() from None
    from pretrain.reporting import report

    _print_title(5 + len(TASKS), "report")
    path = report.write_report([arguments.run_dir], arguments.run_dir / "report.html")
    print(report.summary([arguments.run_dir]))
    print(f"\nAll stages took {time.monotonic() - started:.0f} s.")
    print(f"Curves, corpus card, fill-mask examples and scores: {path.resolve().as_uri()}")


def _print_title(stage: int, title: str) -> None:
    print(f"\n[{stage}/{5 + len(TASKS)}] {title}", flush=True)


def _pretrain(arguments: argparse.Namespace) -> None:
    """Prepare, pretrain and export, or continue where an earlier demo stopped."""
    folder: Path = arguments.run_dir
    if arguments.fresh and folder.exists():
        if not (folder / ENVIRONMENT_FILE).is_file():
            raise InputError(f"{folder}: not a run folder, so --fresh does not delete it. Choose another --run-dir.")
        shutil.rmtree(folder)
    if checkpoint_names(folder):
        print(f"{folder}: resuming from the latest checkpoint (--fresh starts a new run)")
    values = {
        "name": "demo",
        "run_dir": folder,
        "corpus.dir": arguments.data_dir,
        "scheduling.workers": arguments.workers,
    }
    settings = [*as_overrides(values), *arguments.set]
    _print_title(1, "tokenizing text into shards")
    # A new corpus would differ if packages have been installed since the earlier demo, and the run could not resume.
    if (arguments.data_dir / MANIFEST).is_file():
        print(f"{arguments.data_dir}: using the corpus made by an earlier demo")
    else:
        print(pretraining.prepare(_CONFIG, overrides=settings))
    _print_title(2, "training")
    sets_steps = any(value.startswith("phases.0.steps=") for value in arguments.set)
    minutes = _DEFAULT_MINUTES if arguments.minutes is None else arguments.minutes
    run = pretraining.train(_CONFIG, overrides=settings, minutes=None if sets_steps else minutes or None, resume=True)
    _print_title(3, "export")
    print(pretraining.export(run, folder / "export"))


def _finetune(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.run_dir
    data = folder / DATA
    _print_title(4, f"extracting three labeled sets from the corpus: {data}")
    # Written only once, like the corpus: other packages may be installed when the demo runs again.
    if not (data / _COUNTS).is_file():
        write_json(data / _COUNTS, write_sets(data))
    counts = json.loads((data / _COUNTS).read_text(encoding="utf-8"))
    for stage, task in enumerate(TASKS, 5):
        sizes = counts[task.name]
        _print_title(stage, f"{task.title} ({sizes['train']:,} examples, {sizes['dev']:,} held out)")
        for start in STARTS:
            print(f"\n      {_model_title(task, start)}", flush=True)
            try:
                _finetune_once(task, start, folder, data)
            finally:  # a report of an unfinished demo shows the scores that exist
                write_json(folder / FINETUNED, [_result(each, folder, counts[each.name]) for each in TASKS])
        print(f"      {_score_line(_result(task, folder, sizes))}", flush=True)


def _model_title(task: DemoTask, start: str) -> str:
    """Return the title of a fine-tuning, such as "packages, from pretrained weights (1 of 6)"."""
    number = TASKS.index(task) * len(STARTS) + list(STARTS).index(start) + 1
    return f"{task.name}, from {start} weights ({number} of {len(TASKS) * len(STARTS)})"


def _finetune_once(task: DemoTask, start: str, folder: Path, data: Path) -> None:
    """Fine-tune one model, unless an earlier demo has finished it."""
    run_folder = folder / "finetuned" / f"{task.name}-{start}"
    if (run_folder / MODEL / MANIFEST).is_file():
        print("      finished by an earlier demo", flush=True)
        return
    settings = {
        "name": f"demo-{task.name}-{start}",
        "run_dir": run_folder,
        "start_from": folder / "export",
        "random_weights": STARTS[start],
        f"{task.section}.train": data / f"{task.name}-train.jsonl",
        f"{task.section}.dev": data / f"{task.name}-dev.jsonl",
    }
    print(finetuning.train(f"demo/{task.name}", overrides=settings, resume=True, no_ray=True))


# ---------------------------------------------------------------- results


def _result(task: DemoTask, folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """Return a task's part of the report: the finished models' scores, and predictions of the pretrained model."""
    runs = {start: folder / "finetuned" / f"{task.name}-{start}" for start in STARTS}
    finished_runs = {start: run for start, run in runs.items() if (run / MODEL / MANIFEST).is_file()}
    scores = {start: json.loads((run / SCORES).read_text("utf-8")) for start, run in finished_runs.items()}
    metric = next((record["metric"] for record in scores.values()), "")
    examples = []
    if "pretrained" in finished_runs:
        predictions = _read_lines(finished_runs["pretrained"] / "predictions" / "dev.jsonl")
        examples = _examples(task, predictions, _read_lines(folder / DATA / f"{task.name}-dev.jsonl"))
    return {
        "title": task.title,
        "metric": metric.replace("_", " "),
        "train": sizes["train"],
        "dev": sizes["dev"],
        "scores": {start: record["scores"]["dev"][metric] for start, record in scores.items()},
        "examples": examples,
    }


def _score_line(result: dict[str, Any]) -> str:
    pretrained, random = (result["scores"][start] for start in STARTS)
    return f"{result['metric']} {pretrained:.3f} from pretrained weights, {random:.3f} from random weights"


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _examples(task: DemoTask, predictions: list[dict[str, Any]], labeled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a few short held-out examples with their predictions: {"pieces": [[text, mark]], "note": ...}."""
    make_example = {"packages": _package_example, "names": _names_example, "returns": _returns_example}[task.name]
    examples = (
        make_example(prediction, record)
        for prediction, record in zip(predictions, labeled, strict=True)
        if len(record.get("context", record.get("text", ""))) <= _MAX_CHARACTERS
    )
    return [example for example, _ in zip(examples, range(_NUM_EXAMPLES), strict=False)]


def _package_example(prediction: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    note = f"{prediction['label']} ({prediction['score']:.0%}); truth: {record['label']}"
    return {"pieces": [[record["text"], ""]], "note": note}


def _names_example(prediction: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    predicted = [(entity["start"], entity["end"]) for entity in prediction["entities"]]
    truth = {(entity["start"], entity["end"]) for entity in record["entities"]}
    note = f"{len(truth.intersection(predicted))} of {len(truth)} found, {len(set(predicted) - truth)} wrong"
    return {"pieces": _pieces(record["text"], predicted), "note": note}


def _returns_example(prediction: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    spans = [(prediction["start"], prediction["end"])] if prediction["answer"] else []
    note = f"{record['question']} Truth: {record['answers']['text'][0]}"
    return {"pieces": _pieces(record["context"], spans), "note": note}


def _pieces(text: str, spans: Sequence[tuple[int, int]]) -> list[list[str]]:
    """Split `text` into pairs [piece, mark]; the mark is "found" for pieces in `spans`, else ""."""
    pieces, position = [], 0
    for start, end in sorted(spans):
        pieces += [[text[position:start], ""], [text[start:end], "found"]]
        position = end
    return [piece for piece in [*pieces, [text[position:], ""]] if piece[0]]

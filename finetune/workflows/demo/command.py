"""The whole demo: pretrain on the embedded corpus, then fine-tune on three labeled sets extracted from it.

Each model is trained from the pretrained weights and from random ones, with the same data and steps. The difference
in scores shows what pretraining adds.
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

from finetune.training import api
from finetune.training.saved import MODEL
from finetune.workflows.demo import stages as pretraining
from finetune.workflows.demo.data import write_sets
from pretrain.common.errors import StoppedError
from pretrain.common.files import MANIFEST, checkpoint_names, write_json
from pretrain.common.run_files import SCORES
from pretrain.reporting.report import FINETUNED

STARTS = {"pretrained": False, "random": True}  # name -> value of the setting random_weights
DATA = "labeled"  # folder of the labeled sets, in the run folder
_COUNTS = "counts.json"  # of the labeled sets, written after all of them
_SHOWN = 4  # predictions of each task in the report
_LONGEST = 320  # characters of a text in the report


@dataclass(frozen=True)
class DemoTask:
    """A fine-tuning of the demo."""

    name: str
    title: str
    section: str  # of the config


TASKS = (
    DemoTask("packages", "Which package is a passage from?", "classification"),
    DemoTask("names", "Which words are code names?", "entities"),
    DemoTask("returns", "What does the function return?", "questions"),
)


def run(arguments: argparse.Namespace) -> None:
    """Run the demo with its options and write its report; raises the error of the first stage that fails."""
    pretraining.fill_in(arguments)
    started = time.monotonic()
    more = len(_tasks(arguments)) + 1
    try:
        pretraining.run_stages(arguments, more_stages=more)
        _finetune(arguments)
    except StoppedError as error:
        raise error.again() from None
    pretraining.finish(arguments, started, more_stages=more)


def _tasks(arguments: argparse.Namespace) -> tuple[DemoTask, ...]:
    return TASKS[:1] if arguments.quick else TASKS


def _finetune(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.run_dir
    data, tasks = folder / DATA, _tasks(arguments)
    total = pretraining.STAGES + len(tasks) + 1
    print(f"\n[{pretraining.STAGES}/{total}] extracting three labeled sets from the corpus: {data}", flush=True)
    # Written once, as the corpus is: other packages may be installed when the demo runs again.
    if not (data / _COUNTS).is_file():
        write_json(data / _COUNTS, write_sets(data))
    counts = json.loads((data / _COUNTS).read_text(encoding="utf-8"))
    for number, task in enumerate(tasks, pretraining.STAGES + 1):
        sizes = counts[task.name]
        print(f"\n[{number}/{total}] {task.title} ({sizes['train']:,} examples, {sizes['dev']:,} held out)", flush=True)
        for start in STARTS:
            print(f"\n      {_model_title(task, start, tasks)}", flush=True)
            try:
                _train(task, start, folder, data)
            finally:  # a report of an unfinished demo shows the scores that exist
                write_json(folder / FINETUNED, [_result(one, folder, counts[one.name]) for one in tasks])
        print(f"      {_line(_result(task, folder, sizes))}", flush=True)


def _model_title(task: DemoTask, start: str, tasks: Sequence[DemoTask]) -> str:
    """Which of the fine-tunings runs, such as "packages, from pretrained weights (1 of 6)"."""
    number = tasks.index(task) * len(STARTS) + list(STARTS).index(start) + 1
    return f"{task.name}, from {start} weights ({number} of {len(tasks) * len(STARTS)})"


def _train(task: DemoTask, start: str, folder: Path, data: Path) -> None:
    """Fine-tune, unless an earlier demo finished this model."""
    target = folder / "finetuned" / f"{task.name}-{start}"
    if (target / MODEL / MANIFEST).is_file():
        print("      finished by an earlier demo", flush=True)
        return
    resume = bool(checkpoint_names(target))
    if not resume:
        shutil.rmtree(target, ignore_errors=True)
    settings = {
        "name": f"demo-{task.name}-{start}",
        "run_dir": target,
        "start_from": folder / "export",
        "random_weights": STARTS[start],
        f"{task.section}.train": data / f"{task.name}-train.jsonl",
        f"{task.section}.dev": data / f"{task.name}-dev.jsonl",
    }
    print(api.train(f"demo/{task.name}", overrides=settings, resume=resume, no_ray=True))


# ---------------------------------------------------------------- results


def _result(task: DemoTask, folder: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """What the report shows of a task: scores of the finished models, and examples once the first has finished."""
    runs = {start: folder / "finetuned" / f"{task.name}-{start}" for start in STARTS}
    finished = {start: run for start, run in runs.items() if (run / MODEL / MANIFEST).is_file()}
    scores = {start: json.loads((run / SCORES).read_text("utf-8")) for start, run in finished.items()}
    metric = next((one["metric"] for one in scores.values()), "")
    examples = []
    if "pretrained" in finished:
        predictions = _read_lines(finished["pretrained"] / "predictions" / "dev.jsonl")
        examples = _examples(task, predictions, _read_lines(folder / DATA / f"{task.name}-dev.jsonl"))
    return {
        "title": task.title,
        "metric": metric.replace("_", " "),
        "train": sizes["train"],
        "dev": sizes["dev"],
        "scores": {start: one["scores"]["dev"][metric] for start, one in scores.items()},
        "examples": examples,
    }


def _line(result: dict[str, Any]) -> str:
    pretrained, random = (result["scores"][start] for start in STARTS)
    return f"{result['metric']} {pretrained:.3f} from pretrained weights, {random:.3f} from random weights"


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _examples(task: DemoTask, predictions: list[dict[str, Any]], gold: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A few short held-out texts with their predictions: {"pieces": [[text, mark]], "note": ...}."""
    show = {"packages": _package_example, "names": _names_example, "returns": _returns_example}[task.name]
    short = (
        show(prediction, row)
        for prediction, row in zip(predictions, gold, strict=True)
        if len(row.get("context", row.get("text", ""))) <= _LONGEST
    )
    return [example for example, _ in zip(short, range(_SHOWN), strict=False)]


def _package_example(prediction: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    note = f"{prediction['label']} ({prediction['score']:.0%}); truth: {row['label']}"
    return {"pieces": [[row["text"], ""]], "note": note}


def _names_example(prediction: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    predicted = [(one["start"], one["end"]) for one in prediction["entities"]]
    truth = {(one["start"], one["end"]) for one in row["entities"]}
    note = f"{len(truth.intersection(predicted))} of {len(truth)} found, {len(set(predicted) - truth)} wrong"
    return {"pieces": _pieces(row["text"], predicted), "note": note}


def _returns_example(prediction: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    spans = [(prediction["start"], prediction["end"])] if prediction["answer"] else []
    note = f"{row['question']} Truth: {row['answers']['text'][0]}"
    return {"pieces": _pieces(row["context"], spans), "note": note}


def _pieces(text: str, spans: Sequence[tuple[int, int]]) -> list[list[str]]:
    """[text, "found" or ""] from the first character to the last; `spans` are marked "found"."""
    pieces, at = [], 0
    for start, end in sorted(spans):
        pieces += [[text[at:start], ""], [text[start:end], "found"]]
        at = end
    return [piece for piece in [*pieces, [text[at:], ""]] if piece[0]]

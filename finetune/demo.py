"""The demo, whole: pretraining on the embedded corpus, then three fine-tunings on labels that it carries itself.

Each is trained from the pretrained weights and from random ones, with the same data and steps: the difference is what
pretraining is worth.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from finetune.artifacts.saved import MODEL, SCORES
from pretrain import demo as pretraining
from pretrain.common.files import MANIFEST, write_json
from pretrain.reporting.report import FINETUNED

_CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "finetune"
TASKS = {
    "packages": "Which package does a passage come from?",
    "names": "Which words are code names?",
    "returns": "What does the function return?",
}
STARTS = {"pretrained": False, "random": True}
_COUNTS = "counts.json"  # of the labelled sets, written when all are there
_SHOWN = 4  # predictions of each task in the report


def main(argv: Sequence[str]) -> int:
    """Run the demo with these command-line arguments; returns the exit code of the first stage that fails."""
    arguments = pretraining.parser().parse_args(argv)
    began = time.monotonic()
    code = pretraining.run(arguments, more_stages=len(TASKS) + 1)
    if code:
        return code
    code = _finetune(arguments)
    if code:
        return code
    pretraining.report(arguments, began)
    return 0


def _finetune(arguments: argparse.Namespace) -> int:
    from finetune.__main__ import main as command_line
    from finetune.demo_data import write_sets

    run: Path = arguments.run_dir
    data, folder = run / "labelled", run / "finetuned"
    total = pretraining.STAGES + len(TASKS) + 1
    print(f"\n[{pretraining.STAGES}/{total}] three labelled sets out of the corpus: {data}", flush=True)
    # Made once, as the corpus is: the packages installed may be others when the demo is run again.
    if not (data / _COUNTS).is_file():
        write_json(data / _COUNTS, write_sets(data))
    counts = json.loads((data / _COUNTS).read_text(encoding="utf-8"))
    results = []
    for number, (task, title) in enumerate(TASKS.items(), pretraining.STAGES + 1):
        sizes = counts[task]
        print(
            f"\n[{number}/{total}] {title} ({sizes['train']:,} examples, {sizes['dev']:,} held out)",
            flush=True,
        )
        for start, random_weights in STARTS.items():
            target = folder / f"{task}-{start}"
            if not (target / MODEL / MANIFEST).is_file():
                shutil.rmtree(target, ignore_errors=True)
                settings = {
                    "name": f"demo-{task}-{start}",
                    "run_dir": target,
                    "start_from": run / "export",
                    "random_weights": str(random_weights).lower(),
                    f"{_section(task)}.train": data / f"{task}-train.jsonl",
                    f"{_section(task)}.dev": data / f"{task}-dev.jsonl",
                }
                words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
                code = command_line(["finetune", str(_CONFIGS / "demo" / f"{task}.yaml"), "--no-ray", *words])
                if code:
                    return code
        results.append(_result(task, title, folder, data, sizes))
        print(f"      {_line(results[-1])}", flush=True)
    write_json(run / FINETUNED, results)
    return 0


def _section(task: str) -> str:
    return {"packages": "classification", "names": "entities", "returns": "questions"}[task]


def _result(task: str, title: str, folder: Path, data: Path, sizes: dict[str, int]) -> dict[str, Any]:
    """What the report shows of one task."""
    scores = {start: json.loads((folder / f"{task}-{start}" / SCORES).read_text(encoding="utf-8")) for start in STARTS}
    metric = scores["pretrained"]["metric"]
    return {
        "title": title,
        "metric": metric.replace("_", " "),
        "train": sizes["train"],
        "dev": sizes["dev"],
        "scores": {start: one["scores"]["dev"][metric] for start, one in scores.items()},
        "examples": _examples(
            task, folder / f"{task}-pretrained" / "predictions" / "dev.jsonl", data / f"{task}-dev.jsonl"
        ),
    }


def _line(result: dict[str, Any]) -> str:
    pretrained, drawn = (result["scores"][start] for start in STARTS)
    return f"{result['metric']} {pretrained:.3f} from pretrained weights, {drawn:.3f} from random ones"


def _examples(task: str, predictions: Path, gold: Path) -> list[dict[str, Any]]:
    """A few held-out texts as pieces of text with what was predicted of them: {"pieces": [[text, mark]], "note": ...}."""
    made, rows = (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in (predictions, gold)
    )
    shown = []
    for prediction, row in zip(made, rows, strict=True):
        if len(row.get("context", row.get("text", ""))) > 320:
            continue
        if task == "packages":
            note = f"{prediction['label']} ({prediction['score']:.0%}); truth: {row['label']}"
            shown.append({"pieces": [[row["text"], ""]], "note": note})
        elif task == "names":
            found = [(one["start"], one["end"]) for one in prediction["entities"]]
            truth = {(one["start"], one["end"]) for one in row["entities"]}
            note = f"{len(truth.intersection(found))} of {len(truth)} found, {len(set(found) - truth)} wrong"
            shown.append({"pieces": _pieces(row["text"], found), "note": note})
        else:
            spans = [(prediction["start"], prediction["end"])] if prediction["answer"] else []
            note = f"{row['question']} Truth: {row['answers']['text'][0]}"
            shown.append({"pieces": _pieces(row["context"], spans), "note": note})
        if len(shown) == _SHOWN:
            break
    return shown


def _pieces(text: str, spans: Sequence[tuple[int, int]]) -> list[list[str]]:
    """[text, "found" or ""] from the first character to the last."""
    pieces, at = [], 0
    for start, end in sorted(spans):
        pieces += [[text[at:start], ""], [text[start:end], "found"]]
        at = end
    return [piece for piece in [*pieces, [text[at:], ""]] if piece[0]]

"""For every kind of task, `evaluate` reproduces a finished run's scores on the same file to the last digit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from labeled_batches import ROWS, make_batch
from tiny_checkpoints import make_bert, write_reviews

import finetune
from finetune.artifacts.evaluation import evaluate
from finetune.training import train
from finetune.training.model.task_model import TaskModel
from pretrain.checkpoint.layouts import TaskHead
from pretrain.config import ModelConfig
from tests.distributed import run_workers
from tests.starts import Start, make_starts

WORDS = ["the", "film", "book", "plot", "was", "good", "great", "bad", "awful", "and"]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(count: int) -> list[list[str]]:
    """Sentences of 3 to 9 words, all different."""
    return [[WORDS[(n * 7 + k * (n + 3)) % len(WORDS)] for k in range(3 + n % 7)] for n in range(count)]


def sections(root: Path) -> dict[str, dict[str, Any]]:
    """One task of each kind over the same sentences."""
    sentences = texts(48)
    values = [{"text": " ".join(s), "label": sum(map(len, s)) / len(s)} for s in sentences]
    tagged = [{"tokens": s, "tags": ["B-X" if len(word) > 4 else "O" for word in s]} for s in sentences]
    asked = []
    for number, words in enumerate(sentences):
        context = " ".join(words)
        answers = {"text": [words[2]], "answer_start": [len(" ".join(words[:2])) + 1]}
        asked.append({"id": str(number), "question": "what was good", "context": context, "answers": answers})
    made = {}
    for name, rows in (("value", values), ("tags", tagged), ("answers", asked)):
        made[name] = {"train": write(root / f"{name}.jsonl", rows), "dev": write(root / f"{name}-dev.jsonl", rows[::2])}
    return {
        "regression": {"classification": {**made["value"], "problem_type": "regression"}},
        "entities": {"entities": made["tags"]},
        "questions": {"questions": {**made["answers"], "max_question_tokens": 7, "stride": 7}},
        "classification": {"classification": {"train": str(root / "train.jsonl"), "dev": str(root / "dev.jsonl")}},
    }


def config(root: Path, name: str, precision: str, task: dict[str, Any]) -> dict[str, Any]:
    values = {"name": name, "run_dir": str(root / name), "start_from": str(root / "bert"), "max_length": 32, **task}
    values["training"] = {"examples_per_step": 16, "learning_rate": 3e-3, "steps": 4}
    values["engine"] = {"precision": precision, "compile": False, "micro_batch_tokens": 160}
    return {**values, "tracking": {"wandb": "off"}}


def starts(given: list[Start]) -> list[str]:
    return make_starts(train.main, given)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scores")
    make_bert(root / "bert")
    write_reviews(root, train=32, dev=16)
    given = sections(root)
    one = [Start(config(root, name, "fp32", task)) for name, task in given.items()]
    half = Start(config(root, "half", "bf16", given["regression"]))
    assert run_workers(1, starts, [*one, half]) == [[""] * 5]
    assert run_workers(2, starts, [Start(config(root, "two", "fp32", given["regression"]))]) == [[""], [""]]
    return root


@pytest.mark.parametrize("name", ["regression", "entities", "questions", "classification", "two", "half"])
def test_evaluate_gives_the_scores_and_predictions_of_training(root: Path, tmp_path: Path, name: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the workers had
    try:
        evaluate(root / name, None, tmp_path, precision="bf16" if name == "half" else "auto")
    finally:
        torch.set_num_threads(threads)
    measured = json.loads((tmp_path / "metrics.json").read_text())["dev"]["scores"]
    kept = json.loads((root / name / "scores.json").read_text())["scores"]["dev"]
    assert measured == {key: value for key, value in kept.items() if key != "loss"}
    made, said = (folder / "predictions/dev.jsonl" for folder in (tmp_path, root / name))
    assert made.read_text() == said.read_text()


def test_a_regression_in_bf16_gives_as_many_values_as_pairs(root: Path) -> None:
    """Outputs that are rounded to bf16 would be a dozen values between 1 and 2."""
    model = finetune.load(root / "half", precision="bf16")
    made = {one["value"] for one in model([" ".join(words) for words in texts(48)])}
    assert len(made) > 40


def test_heads_compute_in_fp32() -> None:
    shape = ModelConfig(size="custom", layers=1, hidden=16, heads=2, max_positions=20)
    model = TaskModel(shape, ROWS, "tokens", "classes", 3, TaskHead()).eval().bfloat16()
    batch = make_batch(has_segments=False, head="tokens")
    with torch.no_grad():
        made = model(batch).logits
        hidden = model.encode(batch, batch.query_positions)
    assert made.dtype == torch.float32
    head = dict(model.head.named_parameters())
    expected = hidden.double() @ head["out_weight"].double().T + head["out_bias"].double()
    torch.testing.assert_close(made.double(), expected, rtol=1e-5, atol=1e-6)


def test_scoring_at_the_end_is_progress_to_the_watchdog() -> None:
    """Large sets take longer than the whole end of a run may be silent: each micro-batch counts."""
    beats: list[int] = []
    batches = [SimpleNamespace(query_indices=np.array([number])) for number in range(3)]
    for batch in batches:
        batch.to = lambda _, batch=batch: batch
    cut = SimpleNamespace(batches_by_length=lambda: iter(batches), windows=SimpleNamespace(queries=np.arange(3)))
    job: Any = SimpleNamespace(
        _make_batches=lambda *_: cut,
        _device=torch.device("cpu"),
        task=SimpleNamespace(outputs=2),
        _engine=SimpleNamespace(
            workers=SimpleNamespace(gather_objects=lambda mine: [mine]),
            watch=SimpleNamespace(beat=lambda: beats.append(len(beats))),
        ),
    )
    model: Any = lambda batch: SimpleNamespace(logits=torch.zeros(1, 2))  # noqa: E731
    windows: Any = None
    assert train.Finetuning.logits(job, model, windows).shape == (3, 2)
    assert beats == [0, 1, 2]

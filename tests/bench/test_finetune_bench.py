"""What fine-tuning is compared with: the public scripts' features and the Trainer, for every family of checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from chaos import ROOT
from tiny_checkpoints import make_bert, make_distilbert, make_roberta, write_reviews

from finetune.training.config import load_config
from pretrain.checkpoint import released
from pretrain.common.errors import InputError, MachineError
from tests.bench import finetuning

# Earlier trainings in this process leave them set (pretrain/run/session.py). accelerate would then wait for ranks.
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def write_config(root: Path, **values: Any) -> Path:
    path = root / "run.yaml"
    settings = {"name": "run", "run_dir": str(root / "run"), "max_length": 32, "tracking": {"wandb": "off"}, **values}
    path.write_text(yaml.safe_dump(settings))
    return path


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_the_trainer_learns_from_every_family(tmp_path: Path, family: str) -> None:
    """RoBERTa has one type of segment, DistilBERT none, and each its own padding."""
    bert = make_bert(tmp_path / "bert")
    makers = {
        "bert": lambda: bert,
        "roberta": lambda: make_roberta(tmp_path / "roberta", bert),
        "distilbert": lambda: make_distilbert(tmp_path / "distilbert", bert),
    }
    path = write_config(
        tmp_path,
        start_from=str(makers[family]()),
        classification=write_reviews(tmp_path, train=160, dev=40),
        training={"examples_per_step": 16, "learning_rate": 3e-3, "epochs": 12.0},
    )
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "tests.bench", "finetune", str(path), "--peer", str(output)]
    alone = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    scores = json.loads(output.read_text())
    assert scores["metric"] == "accuracy"
    assert scores["score"] > 0.6, "better than guessing"
    assert scores["examples_per_second"] > 0


def test_the_trainer_has_our_optimizer_and_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    training = {"preset": "roberta", "warmup_share": 0.1}
    path = write_config(
        tmp_path, start_from="unused", classification=write_reviews(tmp_path, train=4, dev=4), training=training
    )
    config = load_config(path)
    given = finetuning.trainer_arguments(config, 100)
    assert (given.adam_beta1, given.adam_beta2) == (config.optimizer.beta1, config.optimizer.beta2) == (0.9, 0.98)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = transformers.get_scheduler(given.lr_scheduler_type, optimizer, given.warmup_steps, 100)
    rates = []
    for _ in range(100):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:10] == pytest.approx([step / 10 for step in range(10)])
    assert rates[10:] == pytest.approx([1 - step / 90 for step in range(90)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"training": {"layer_decay": 0.9}}, "training.layer_decay: 0.9; the Trainer has no such setting. Set it to 1"),
        ({"optimizer": {"name": "lamb"}}, "optimizer.name: lamb; the Trainer has no such setting. Set it to adamw"),
        ({"random_weights": True}, "random_weights: True; the Trainer has no such setting. Set it to False"),
        ({"class_weights": "balanced"}, "classification.class_weights: balanced; .* Set it to none"),
        ({"dev": None}, r"no dev set\. Set one"),
        ({"start_from": "run"}, "It is a run: export it"),
        ({"start_from": "own"}, r"It has model\.norm"),
        ({"start_from": ""}, "--from: missing"),
        ({"start_from": "bert"}, r"is missing\. Install the extra"),  # of a package
    ],
)
def test_what_cannot_be_compared_is_refused_before_training(tmp_path, monkeypatch, values, message) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finetuning, "run_program", lambda _: pytest.fail("trained"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    start = values.get("start_from", "unused")
    if start == "run":
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
        (tmp_path / "run" / "config.yaml").write_text("name: pretrained\n")
    elif start in ("own", "bert"):
        make_bert(tmp_path / start)
        monkeypatch.setattr(released, "why_not_transformers", lambda _: "model.norm" if start == "own" else "")
    reviews = {**write_reviews(tmp_path, train=4, dev=4)}
    reviews |= {name: values.pop(name) for name in ("class_weights", "dev") if name in values}
    reviews = {name: value for name, value in reviews.items() if value is not None}
    config = load_config(write_config(tmp_path, **{"start_from": start, "classification": reviews, **values}))
    with pytest.raises((InputError, MachineError), match=message):
        finetuning.compare(config, 1)


def test_only_tags_of_tokens_are_padded() -> None:
    """A label set may have as many labels as the first text has tokens."""
    sets = [{"input_ids": [1] * tokens, "labels": [1.0, 0.0, 0.0]} for tokens in (3, 4)]
    assert finetuning.collate_windows(sets, 0, segments=False, tags=False)["labels"].shape == (2, 3)
    tagged = [{"input_ids": [1] * tokens, "labels": [2] * tokens} for tokens in (3, 4)]
    collated = finetuning.collate_windows(tagged, 0, segments=False, tags=True)
    assert collated["labels"].tolist() == [[2, 2, 2, -100], [2, 2, 2, 2]]


def test_runs_of_the_benchmark_are_not_tracked(tmp_path: Path) -> None:
    reviews = write_reviews(tmp_path, train=4, dev=4)
    tracking = {"wandb": "online", "log_every_steps": 7}
    config = load_config(write_config(tmp_path, start_from="unused", classification=reviews, tracking=tracking))
    written = load_config(finetuning.write_result(config, 3, tmp_path / "ours-3"))
    assert (written.tracking.wandb, written.tracking.log_every_steps, written.seed) == ("off", 7, 3)

"""Whole fine-tuning runs: exact resume, any number of workers, the best checkpoint, and the model that comes out."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from tiny_checkpoints import make_bert, make_roberta, write_reviews

import finetune
from finetune.cli import main
from finetune.training import runs, train
from finetune.training.config import PRESETS, FinetuneConfig, TrainingConfig
from finetune.training.train import layered_groups
from pretrain.checkpoint import store
from pretrain.checkpoint.released import read_released
from pretrain.common.errors import InputError
from pretrain.common.files import verify_manifest
from pretrain.common.settings import dump
from pretrain.run import launch
from pretrain.training.optim import learning_rate
from tests.distributed import run_workers
from tests.starts import Start, make_starts, records, with_changes
from tests.tasks.refusals import refused

UNSTEADY = 0.08  # a rate at which the last evaluation is not the best


def settings(root: Path, name: str, **changes: Any) -> dict[str, Any]:
    """A fine-tuning of 30 steps in fp32 that logs every step and evaluates three times."""
    values = {"name": name, "run_dir": str(root / name), "start_from": str(root / "bert"), "max_length": 32}
    values |= {"classification": {"train": str(root / "train.jsonl"), "dev": str(root / "dev.jsonl")}}
    values |= {"training": {"examples_per_step": 16, "learning_rate": 1e-2, "epochs": 3.0}}
    values |= {"engine": {"precision": "fp32", "compile": False, "micro_batch_tokens": 160, "zero_stage": 1}}
    return with_changes(values | {"tracking": {"log_every_steps": 1, "wandb": "off"}}, changes)


def config_of(root: Path, name: str, **changes: Any) -> FinetuneConfig:
    return FinetuneConfig.model_validate(settings(root, name, **changes))


def starts(given: list[Start]) -> list[str]:
    return make_starts(train.main, given)


def starts_on_own_disks(folders: list[Path], given: list[Start]) -> list[str]:
    """Starts whose relative paths lead into a folder of each rank."""
    os.chdir(folders[dist.get_rank()])
    return starts(given)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one worker (whole, stopped and resumed, patient, at ZeRO 3, from random weights) and of two."""
    root = tmp_path_factory.mktemp("finetune")
    make_bert(root / "bert")
    make_roberta(root / "roberta", root / "bert")
    write_reviews(root, train=160, dev=40)
    cut, edited = settings(root, "cut"), settings(root, "edited")
    lines = (root / "train.jsonl").read_text().splitlines(keepends=True)
    (root / "reversed.jsonl").write_text("".join(reversed(lines)))
    (root / "test.jsonl").write_text("".join(lines[:20]))
    test = {"classification__test": str(root / "test.jsonl")}
    given = [
        Start(settings(root, "whole")),
        Start(cut, stop_at=7),
        Start(cut, resume=True),
        Start(edited, stop_at=7),
        Start(settings(root, "edited", classification__train=str(root / "reversed.jsonl")), resume=True),
        Start(settings(root, "edited", classification__dev=str(root / "test.jsonl")), resume=True),
        Start(settings(root, "edited", seed=9), resume=True),
        Start(settings(root, "zero3", engine__zero_stage=3)),
        Start(settings(root, "patient", training__patience=1, training__learning_rate=1e-30)),
        Start(settings(root, "random", random_weights=True, training__epochs=1.0)),
        Start(settings(root, "unsteady", training__learning_rate=UNSTEADY, checkpoint__every_steps=7)),
        Start(settings(root, "tested", training__epochs=1.0, **test)),
        Start(settings(root, "one-type", start_from=str(root / "roberta"), training__epochs=1.0)),
    ]
    outcomes, stopped = run_workers(1, starts, given)[0], "StoppedError: stopped at step 7"
    assert [one[:31] for one in outcomes if "InputError" not in one] == ["", stopped, "", stopped, *[""] * 6]
    assert "step-00000007: the files of classification, or the tokenizer" in outcomes[4]
    assert "step-00000007: the dev set of classification" in outcomes[5]
    assert "step-00000007: the run was started with other settings: seed (0 -> 9)" in outcomes[6]
    assert run_workers(2, starts, [Start(settings(root, "two"))]) == [[""], [""]]
    return root


def test_a_resumed_run_ends_in_the_same_bits(root: Path) -> None:
    whole, cut = root / "whole", root / "cut"
    assert [(r["step"], r["loss"]) for r in records(cut)] == [(r["step"], r["loss"]) for r in records(whole)]
    assert (cut / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()


@pytest.mark.parametrize("other", ["two", "zero3"])
def test_losses_do_not_depend_on_workers_or_stage(root: Path, other: str) -> None:
    expected = [r["loss"] for r in records(root / "whole")]
    assert len(expected) == 30
    assert [r["loss"] for r in records(root / other)] == pytest.approx(expected, rel=1e-4)
    held_out = [r["loss"] for r in records(root / "whole", "validation")]
    assert [r["loss"] for r in records(root / other, "validation")] == pytest.approx(held_out, rel=1e-3)
    accuracies = [[r["accuracy"] for r in records(root / name, "validation")] for name in (other, "whole")]
    assert accuracies[0] == accuracies[1]


def test_it_learns_and_keeps_the_best_evaluation(root: Path) -> None:
    scores = json.loads((root / "whole/scores.json").read_text())
    evaluated = {r["step"]: r["accuracy"] for r in records(root / "whole", "validation")}
    assert sorted(evaluated) == [0, 10, 20, 30]  # before training: the frozen linear model
    assert scores["scores"]["dev"]["accuracy"] == evaluated[scores["step"]] == max(evaluated.values()) > 0.9


def test_a_labeled_test_set_is_scored(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = root / "tested"
    said = json.loads((folder / "scores.json").read_text())
    assert (list(said["scores"]), list(said["details"]), said["chosen_on"]) == (["dev", "test"],) * 2 + ("dev",)
    config = config_of(root, "tested", classification__test=str(root / "test.jsonl"), training__epochs=1.0)
    assert re.search(
        r"^test: accuracy \d\.\d{4} \(95 %: \d\.\d{4} to \d\.\d{4}\), ", runs.summary(config), re.MULTILINE
    )
    # A run that is put beside others is of the same test set, too.
    assert said["data"] == runs.current_data_digest(config)
    lines = [json.loads(line) for line in (folder / "predictions/test.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (root / "test.jsonl").read_text().splitlines()]
    assert [(line["text"], line["gold"]) for line in lines] == [(row["text"], row["label"]) for row in rows]
    right = sum(line["label"] == line["gold"] for line in lines) / len(lines)
    assert said["scores"]["test"]["accuracy"] == pytest.approx(right)
    card = (folder / "model/README.md").read_text()
    assert "The score on `dev` chose the checkpoint, so it is optimistic" in card
    assert "`test` did not influence that choice" in card
    for name in ("dev", "test"):
        low, high = said["details"][name]["interval"]
        assert f"| {said['scores'][name]['accuracy']:.4f} (95 %: {low:.4f} to {high:.4f}) |" in card
    assert f"The logits were divided by {said['temperature']:.3f}, which fits the probabilities to `dev`" in card
    assert said["temperature"] != 1
    made = [json.loads(line) for line in (folder / "predictions/dev.jsonl").read_text().splitlines()]
    logits = np.log([list(one["scores"].values()) for one in made])
    true = [list(one["scores"]).index(one["gold"]) for one in made]

    def loss(factor: float) -> float:
        return float(np.mean(np.logaddexp.reduce(factor * logits, 1) - factor * logits[range(len(true)), true]))

    assert loss(1) == pytest.approx(said["scores"]["dev"]["nll"])
    assert loss(1) < loss(said["temperature"])  # as the weights were before
    assert main(["evaluate", str(folder), "--precision", "fp32"]) == 0
    assert "\ntest: accuracy" in capsys.readouterr().out
    measured = json.loads((folder / "evaluation/metrics.json").read_text())
    assert measured["test"]["scores"] == pytest.approx(said["scores"]["test"])


def test_the_best_evaluation_is_kept_between_checkpoints(root: Path) -> None:
    """Checkpoints at 7, 14, 21 and 28, evaluations at 10, 20 and 30."""
    scores = json.loads((root / "unsteady/scores.json").read_text())
    evaluated = {r["step"]: r["accuracy"] for r in records(root / "unsteady", "validation")}
    assert evaluated[30] < max(evaluated.values())
    assert scores["scores"]["dev"]["accuracy"] == evaluated[scores["step"]] == max(evaluated.values())


def test_a_damaged_best_checkpoint_becomes_no_model(tmp_path: Path) -> None:
    make_bert(tmp_path / "bert")
    write_reviews(tmp_path, train=160, dev=40)
    config = settings(tmp_path, "run", training__learning_rate=UNSTEADY)
    assert run_workers(1, starts, [Start(config, stop_at=21)])[0][0].startswith("StoppedError: stopped at step 21")
    best = store.best(tmp_path / "run/checkpoints")
    assert best is not None
    shard = next(best.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    assert run_workers(1, starts, [Start(config, resume=True)]) == [[""]]
    evaluated = {r["step"]: r["accuracy"] for r in records(tmp_path / "run", "validation")}
    assert evaluated[store.step_of(best)] == max(evaluated.values())
    scores = json.loads((tmp_path / "run/scores.json").read_text())
    assert scores["step"] != store.step_of(best)
    assert scores["scores"]["dev"]["accuracy"] == evaluated[scores["step"]]


def test_a_model_of_one_token_type_stays_one(root: Path) -> None:
    """It was trained with the first type alone; a second row that differed would be used by predict."""
    assert read_released(root / "one-type/model").token_types == 1


def test_records_that_are_there_are_predicted_before_others_come(root: Path) -> None:
    model = finetune.load(root / "whole", precision="fp32")
    answered: list[dict[str, Any]] = []

    def records_on_demand() -> Iterator[str]:
        for number in range(4):
            deadline = time.monotonic() + 60
            while len(answered) < number:
                assert time.monotonic() < deadline, f"no answer to record {number}"
                time.sleep(0.01)
            yield "the film was good"

    for made in model.stream(records_on_demand(), live=True):
        answered.append(made)
    assert len(answered) == 4


def test_a_finished_run_holds_a_proven_model_and_no_checkpoints(root: Path) -> None:
    assert not (root / "whole/checkpoints").exists()
    listed = verify_manifest(root / "whole/model")["files"]
    assert {"finetune.json", "model.safetensors", "config.json", "README.md"} <= listed.keys()


def test_patience_ends_a_run_that_gains_nothing_and_random_weights_start_elsewhere(root: Path) -> None:
    assert [r["step"] for r in records(root / "patient", "validation")] == [0, 10]
    assert records(root / "patient")[-1]["step"] == 10
    assert records(root / "random")[0]["loss"] != records(root / "whole")[0]["loss"]


def test_the_model_predicts_what_was_scored(root: Path) -> None:
    model = finetune.load(root / "whole", precision="fp32")
    rows = [json.loads(line) for line in (root / "dev.jsonl").read_text().splitlines()]
    kept = [json.loads(line) for line in (root / "whole/predictions/dev.jsonl").read_text().splitlines()]
    made = model([row["text"] for row in rows])
    assert [one["label"] for one in made] == [one["label"] for one in kept]
    assert [one["score"] for one in made] == pytest.approx([one["score"] for one in kept], abs=1e-5)
    assert model(rows[0]["text"])["label"] == made[0]["label"]


def test_predictions_stream_in_order(root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    # A byte order mark and "\r\n" as on Windows; an empty line among objects is nothing.
    mixed = b"\xef\xbb\xbf" + json.dumps({"id": "b", "text": "awful"}).encode()
    mixed += b"\r\n\r\nthe\rplot\r\nthe film was good\n\n"
    assert predict_lines(root, mixed, tmp_path) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(line.get("id"), line["text"]) for line in lines]
    assert found == [("b", "awful"), (None, "the\rplot"), (None, "the film was good")]
    assert {line["label"] for line in lines} <= {"positive", "negative"}
    assert predict_lines(root, b'{"text": "a"}\n\n{"tex": "b"}\n', tmp_path) == 2
    assert "lines:3: no 'text'" in capsys.readouterr().err, "empty lines count"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b'{"tex": "b"}', "lines:3: no 'text'"),
        (b'{"text": ', "lines:3: not valid JSON"),
        (b'{"text": "\xe9t\xe9"}', "lines:3: not UTF-8"),
    ],
)
def test_the_lines_before_a_bad_one_are_answered(root, tmp_path, capsys, bad, message) -> None:
    content = b'{"text": "good"}\n{"text": "bad"}\n' + bad + b'\n{"text": "good"}\n'
    assert predict_lines(root, content, tmp_path) == 2
    printed = capsys.readouterr()
    assert [json.loads(line)["text"] for line in printed.out.splitlines()] == ["good", "bad"]
    assert message in printed.err
    out = tmp_path / "out.jsonl"
    assert predict_lines(root, content, tmp_path, "--out", str(out)) == 2
    assert out.read_text() == printed.out
    printed = capsys.readouterr()
    assert printed.out == f"{out}: 2 predictions\n"
    assert message in printed.err
    out.write_text("of an earlier command")
    assert predict_lines(root, bad, tmp_path, "--out", str(out)) == 2
    assert out.read_text() == "of an earlier command"


def test_a_missing_model_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    code = """
import sys
from finetune.cli import main
for words in (["predict", "nowhere", "--text", "a"], ["evaluate", "nowhere"], ["export", "nowhere", "out"]):
    assert main(words) == 2
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True).returncode == 0


def predict_lines(root: Path, content: bytes, folder: Path, *options: str) -> int:
    """The exit code of `predict` on a pipe with this content."""
    pipe = folder / "lines"
    pipe.unlink(missing_ok=True)
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    code = main(["predict", str(root / "whole"), str(pipe), "--precision", "fp32", *options])
    writer.join()
    return code


def test_standard_input_is_utf8_whatever_the_locale(root: Path) -> None:
    command = [sys.executable, "-m", "finetune.cli", "predict", str(root / "whole")]
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    result = subprocess.run(command, input=b"\xe9t\xe9\n", capture_output=True, env=environment, check=False)
    assert (result.returncode, result.stdout) == (2, b"")
    assert b"standard input:1: not UTF-8" in result.stderr


def test_a_bad_test_set_is_reported_before_training(root: Path, tmp_path: Path) -> None:
    config = config_of(root, "test", classification__test=str(tmp_path / "typo.jsonl"))
    refused("typo", runs.plan, config, in_process=True)


@pytest.mark.parametrize("arguments", [["--dry-run"], ["--resume", "--set", "name=whole"]])
def test_torchruns_other_processes_end_with_the_first(root, tmp_path, monkeypatch, arguments) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "_train", lambda *_, **__: pytest.fail("it trains"))
    (tmp_path / "task.yaml").write_text(json.dumps(settings(root, "whole")))
    assert main(["finetune", str(tmp_path / "task.yaml"), *arguments]) == 0


def test_workers_with_other_files_are_refused(tmp_path: Path) -> None:
    disks = [tmp_path / "disk-0", tmp_path / "disk-1"]
    for seed, disk in enumerate(disks):
        write_reviews(disk)
        make_bert(disk / "same")
        make_bert(disk / "other", seed=seed)
        lines = (disk / "train.jsonl").read_text()
        (disk / "turned.jsonl").write_text("".join(lines.splitlines(keepends=True)[:: 1 - 2 * seed]))
        (disk / "renamed.jsonl").write_text(lines.replace("negative", ("negative", "poor")[seed]))
    given = []
    for start, name in (("other", "train"), ("same", "turned"), ("same", "renamed"), ("same", "train")):
        task = {"classification": {"train": f"{name}.jsonl", "dev_share": 0.2}, "start_from": start}
        given.append(Start(settings(tmp_path, f"run-{len(given)}", training__epochs=0.5, **task)))
    outcomes = run_workers(2, starts_on_own_disks, disks, given)
    assert outcomes[0] == outcomes[1]
    for name, outcome in zip(("start_from", "classification", "classification"), outcomes[0], strict=False):
        assert re.match(rf"InputError: worker 1 on \S+ differs from worker 0: {name} \(\w{{12}} -> \w{{12}}\)", outcome)
    assert outcomes[0][3] == ""


def test_a_fine_tuned_run_can_be_the_initial_checkpoint(root: Path) -> None:
    assert runs.plan(config_of(root, "next", start_from=str(root / "whole")), in_process=True).family == "bert"
    (root / "edited/config.yaml").write_text(dump(config_of(root, "edited")))
    unfinished = config_of(root, "next", start_from=str(root / "edited"))
    refused("edited: an unfinished fine-tuning run", runs.plan, unfinished, in_process=True)


def test_what_to_do_next_names_what_the_model_asks(root: Path) -> None:
    reviews = config_of(root, "whole")
    assert runs.next_command(reviews) == f"Next: ./launch.sh predict {root}/whole --text ..."
    spaced = reviews.model_copy(update={"run_dir": "my runs/a"})
    assert runs.next_command(spaced) == "Next: ./launch.sh predict 'my runs/a' --text ..."
    pairs = config_of(root, "whole", classification__pair_column="second")
    assert runs.next_command(pairs).endswith("--text ... --pair ...")
    asked = {**settings(root, "whole"), "questions": {"train": "train.json"}}
    del asked["classification"]
    assert runs.next_command(FinetuneConfig.model_validate(asked)).endswith("--question ... --context ...")


def test_a_finished_run_is_not_resumed_with_other_settings(root: Path, tmp_path: Path) -> None:
    config = config_of(root, "whole")
    (root / "whole/config.yaml").write_text(dump(config))
    assert runs.is_finished(config, resume=True)
    longer = config.training.model_copy(update={"epochs": 9.0})
    with pytest.raises(InputError, match=r"other settings: training\.epochs"):
        runs.is_finished(config.model_copy(update={"training": longer}), resume=True)


def test_a_dry_run_shows_the_plan_first_and_the_config_on_request(root: Path, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "task.yaml"
    path.write_text(json.dumps(settings(root, "whole")))
    for options, state in (
        ([], "finished already"),
        (["--resume"], "finished already"),
        (["--set", f"run_dir={root / 'other'}", "--show-config"], "new"),
    ):
        assert main(["finetune", str(path), "--dry-run", *options]) == 0
        lines = capsys.readouterr().out.splitlines()
        folder = root / ("other" if state == "new" else "whole")
        assert lines[0] == f"{folder}: {state}"
        assert re.fullmatch(r"classification: \d+ training examples of [\d,]+ tokens, \d+ steps", lines[1])
        assert lines[2].startswith("  held out: dev (")
        assert ("Resolved config" in lines) == ("--show-config" in options)
        assert len(lines) < 20 or "Resolved config" in lines
    assert not (root / "other").exists()


OTHER = ["finetune", "{config}", "--set", "name=other"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "nowhere", "--text", "a"], "nowhere/finetune.json: not found"),
        (["finetune", "{config}"], "already has a finished model"),
        ([*OTHER, "--from", "nowhere"], "nowhere: no such folder"),
        ([*OTHER, "--set", "max_length=96"], "max_length: 96, but .* has 64 positions"),
        (["finetune", "{config}", "--set", "trainng.epochs=2"], "did you mean training"),
        (["finetune", "{config}", "--set", "entities.train=x"], "exactly one task is needed"),
        (["finetune", "{config}", "--workers", "17"], "every worker needs an example"),
    ],
)
def test_mistakes_are_reported_in_one_line(root, tmp_path, capsys, arguments, message) -> None:
    values = settings(root, "whole")
    if "name=other" in arguments:
        del values["run_dir"]
    config = tmp_path / "task.yaml"
    config.write_text(yaml.safe_dump(values))
    given = [part.format(config=config) for part in arguments]
    assert main([*given, "--no-ray"] if given[0] == "finetune" and "17" not in given else given) == 2
    assert re.search(message, capsys.readouterr().err)


def test_another_models_tokenizer_is_refused_before_training(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "bert", tmp_path / "bert")
    tokenizer = tmp_path / "bert/vocab.txt"
    assert tokenizer.is_file()
    (tmp_path / "bert/tokenizer.json").unlink(missing_ok=True)
    tokenizer.write_text(tokenizer.read_text() + "".join(f"more{n}\n" for n in range(999)))
    config = config_of(root, "larger", start_from=str(tmp_path / "bert"))
    refused("bert: the tokenizer has ids up to", runs.plan, config, in_process=True)


def untold(**values: Any) -> FinetuneConfig:
    return FinetuneConfig.model_validate({"name": "x", "classification": {"train": "x"}, **values})


def test_layers_learn_slower_the_deeper_they_lie() -> None:
    config = untold(training={"layer_decay": 0.5})
    names = ["embeddings.word", "layers.0.qkv_weight", "layers.0.qkv_bias", "layers.1.ffn_in_weight", "head.out_weight"]
    groups = layered_groups(config, [(name, torch.zeros(2)) for name in names], 2)
    scales = {name: group["lr_scale"] for group in groups for name in group["names"]}
    assert scales == dict(zip(names, [0.125, 0.25, 0.25, 0.5, 1.0], strict=True))
    assert {name: group["weight_decay"] for group in groups for name in group["names"]}["layers.0.qkv_bias"] == 0


def test_the_rate_rises_and_falls_as_transformers_has_it() -> None:
    from transformers import get_linear_schedule_with_warmup

    config = untold(training={"learning_rate": 1.0, "steps": 50})
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    # Without the step of rate 0 that theirs begins with.
    schedule = get_linear_schedule_with_warmup(optimizer, 5, 51)
    optimizer.step()
    schedule.step()
    for step in range(50):
        assert learning_rate([config.phase(1)], step) == pytest.approx(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()


def test_presets_fill_what_is_not_given() -> None:
    training = TrainingConfig.model_validate({"preset": "stable", "epochs": 5.0})
    assert (training.epochs, training.learning_rate) == (5.0, PRESETS["stable"]["learning_rate"])
    training = TrainingConfig.model_validate({"preset": "stable", "warmup_share": 0.0})
    assert (training.epochs, training.warmup_share) == (PRESETS["stable"]["epochs"], 0.0)


@pytest.mark.parametrize(
    ("changes", "short", "said", "compiled"),
    [
        ({}, True, ", 30 steps, too few to compile the model\n", False),
        ({"engine__compile": True}, True, ", 30 steps\n", True),
        ({"training__steps": 10**9}, False, ", 1,000,000,000 steps\n", True),
    ],
)
def test_a_training_is_compiled_if_that_pays(root, changes, short, said, compiled) -> None:
    config = config_of(root, "new", **{"engine__compile": "auto", **changes})
    plan = runs.plan(config, in_process=True)
    assert plan.is_short == short
    assert said in runs.describe_start(config, plan)
    assert (train.uncompiled(config) if short else config).engine.compiled == compiled


def test_a_short_training_has_no_warmup_step(root: Path) -> None:
    config = settings(root, "quick", training__epochs=0.1)
    outcome = run_workers(1, starts_without_warmup_step, [Start(config)])
    assert outcome == [[""]]


def starts_without_warmup_step(given: list[Start]) -> list[str]:
    from pretrain.run import run

    run.warmup_step = lambda *_: pytest.fail("tried")  # type: ignore[assignment]
    return starts(given)

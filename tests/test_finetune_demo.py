"""The demo's fine-tunings: which commands run, what the report gets, and what an earlier demo spares."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from finetune.__main__ import build_parser, main
from finetune.workflows.demo import command as demo
from pretrain.common.yaml_text import parse
from pretrain.reporting import report
from pretrain.reporting.report import FINETUNED

ROWS = {
    "packages": {"text": "a short text", "label": "json"},
    "names": {"text": "call dumps or loads", "entities": [{"start": 5, "end": 10}, {"start": 14, "end": 19}]},
    "returns": {
        "question": "What does dumps return?",
        "context": "It returns a string.",
        "answers": {"text": ["a string"]},
    },
}
PREDICTED = {
    "packages": {"label": "ast", "score": 0.25},
    "names": {"entities": [{"start": 5, "end": 10}, {"start": 0, "end": 4}]},
    "returns": {"answer": "a string", "start": 11, "end": 19},
}


class Commands:
    """Stands in for both command lines: keeps what it is called with, and leaves what a fine-tuning leaves."""

    def __init__(self, fails_at: str = "", code: int = 4) -> None:
        self.seen: list[list[str]] = []
        self.fails_at, self.code = fails_at, code

    def __call__(self, argv: Sequence[str]) -> int:
        self.seen.append(list(argv))
        settings = settings_of(argv)
        if settings.get("name") == self.fails_at:
            return self.code
        if argv[0] == "finetune":
            folder, task = Path(settings["run_dir"]), settings["name"].split("-")[1]
            score = 0.5 if settings["random_weights"] else 0.75
            for file, content in {
                "model/manifest.json": {},
                "scores.json": {"metric": "exact_match", "scores": {"dev": {"exact_match": score}}},
                "predictions/dev.jsonl": PREDICTED[task],
            }.items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(json.dumps(content) + "\n")
        return 0

    @property
    def names(self) -> list[str]:
        """The runs that were fine-tuned."""
        return [settings_of(argv)["name"] for argv in self.seen if argv[0] == "finetune"]


def settings_of(argv: Sequence[str]) -> dict[str, Any]:
    """The settings that --set gives, as a config reads them."""
    given = (value.partition("=") for word, value in pairwise(argv) if word == "--set")
    return {key: parse(value, "--set")[1] for key, _, value in given}


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """The demo's options, in a folder of its own, with labeled sets of one row and no report."""

    def write_sets(folder: Path) -> dict[str, dict[str, int]]:
        folder.mkdir(parents=True, exist_ok=True)
        for name, row in ROWS.items():
            (folder / f"{name}-dev.jsonl").write_text(json.dumps(row) + "\n")
        return {name: {"train": 3, "dev": 1} for name in ROWS}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "write_sets", write_sets)
    monkeypatch.setattr(report, "write_report", lambda run, out: out)
    monkeypatch.setattr(report, "summary", lambda run: "the summary")
    return build_parser().parse_args(["demo", "--workers", "1"])


def test_each_task_is_trained_from_pretrained_and_from_random_weights(
    arguments: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    pretrain, finetune = Commands(), Commands()
    assert demo.run(arguments, pretrain, finetune) == 0
    assert [argv[0] for argv in pretrain.seen] == ["prepare", "pretrain", "export"]
    expected = [f"demo-{name}-{start}" for name in ROWS for start in ("pretrained", "random")]
    assert finetune.names == expected
    for argv in finetune.seen:
        assert Path(argv[1]).is_file()
        assert settings_of(argv)["start_from"] == "runs/demo/export"
    assert settings_of(finetune.seen[2])["entities.train"] == "runs/demo/labeled/names-train.jsonl"
    out = capsys.readouterr().out
    assert "[1/8] tokenizing" in out
    assert "[7/8] What does the function return? (3 examples, 1 held out)" in out
    assert "exact match 0.750 from pretrained weights, 0.500 from random weights" in out
    titles = [line.strip() for line in out.splitlines() if "(3 of 6)" in line or "(4 of 6)" in line]
    assert titles == ["names, from pretrained weights (3 of 6)", "names, from random weights (4 of 6)"]
    assert "[8/8] report\nthe summary" in out
    results = json.loads((Path("runs/demo") / FINETUNED).read_text())
    assert [one["scores"] for one in results] == 3 * [{"pretrained": 0.75, "random": 0.5}]
    assert [one["examples"][0] for one in results] == [
        {"pieces": [["a short text", ""]], "note": "ast (25%); truth: json"},
        {
            "pieces": [["call", "found"], [" ", ""], ["dumps", "found"], [" or loads", ""]],
            "note": "1 of 2 found, 1 wrong",
        },
        {
            "pieces": [["It returns ", ""], ["a string", "found"], [".", ""]],
            "note": "What does dumps return? Truth: a string",
        },
    ]


def test_a_quick_demo_is_one_task_on_a_small_text(
    arguments: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = build_parser().parse_args(["demo", "--quick"])
    pretrain, finetune = Commands(), Commands()
    assert demo.run(arguments, pretrain, finetune) == 0
    given = settings_of(pretrain.seen[1])
    assert (given["run_dir"], given["corpus.dir"]) == ("runs/demo-quick", "data/demo-quick")
    assert (given["scheduling.workers"], given["engine.compile"]) == (1, False)
    assert Path(given["corpus.sources.0.path"], "argparse.py").is_file()
    assert "--minutes" not in pretrain.seen[1]
    assert finetune.names == ["demo-packages-pretrained", "demo-packages-random"]
    out = capsys.readouterr().out
    assert "packages, from random weights (2 of 2)" in out
    assert "[6/6] report\nthe summary" in out


def test_a_demo_may_be_in_any_folder(arguments: argparse.Namespace, tmp_path: Path) -> None:
    """YAML would see a comment in one and a key in the other."""
    arguments.run_dir, arguments.data_dir = tmp_path / "a #b", tmp_path / "c: d"
    pretrain, finetune = Commands(), Commands()
    assert demo.run(arguments, pretrain, finetune) == 0
    given = settings_of(pretrain.seen[1])
    assert (given["run_dir"], given["corpus.dir"]) == (str(tmp_path / "a #b"), str(tmp_path / "c: d"))
    assert (tmp_path / "a #b/finetuned/returns-random/model/manifest.json").is_file()
    assert settings_of(finetune.seen[0])["start_from"] == str(tmp_path / "a #b/export")


def test_a_failed_demo_continues_with_the_unfinished_models(
    arguments: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.run(arguments, Commands(), Commands(fails_at="demo-names-random")) == 4
    results = json.loads((Path("runs/demo") / FINETUNED).read_text())
    assert [one["scores"] for one in results] == [{"pretrained": 0.75, "random": 0.5}, {"pretrained": 0.75}, {}]
    assert [len(one["examples"]) for one in results] == [1, 1, 0]
    capsys.readouterr()
    again = Commands()
    assert demo.run(arguments, Commands(), again) == 0
    assert again.names == ["demo-names-random", "demo-returns-pretrained", "demo-returns-random"]
    out = capsys.readouterr().out
    assert "names, from pretrained weights (3 of 6)\n      finished by an earlier demo\n" in out


def test_a_stopped_fine_tuning_is_resumed(arguments: argparse.Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(arguments, Commands(), Commands(fails_at="demo-names-random", code=75)) == 75
    assert "Run the same command again to continue it" in capsys.readouterr().out
    manifest = Path("runs/demo/finetuned/names-random/checkpoints/step-00000165/manifest.json")
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    again = Commands()
    assert demo.run(arguments, Commands(), again) == 0
    assert manifest.is_file()
    assert ["--resume" in argv for argv in again.seen] == [True, False, False]


def test_nothing_is_fine_tuned_if_pretraining_fails(arguments: argparse.Namespace) -> None:
    finetune = Commands()
    assert demo.run(arguments, Commands(fails_at="demo"), finetune) == 4
    assert finetune.seen == []


def test_a_remote_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--run-dir", "s3://bucket/run"]) == 2
    assert "is a remote address; only local paths are supported." in capsys.readouterr().err

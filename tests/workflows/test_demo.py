"""The demo's fine-tunings: which functions are called, what the report gets, and what an earlier demo spares."""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from finetune.cli import build_parsers
from finetune.workflows.demo import stages as demo
from finetune.workflows.demo.data import named_docstrings
from pretrain.common.errors import DivergedError, RunError, StoppedError
from pretrain.common.examples import examples
from pretrain.common.settings import as_overrides
from pretrain.common.yaml_text import parse
from pretrain.reporting import report
from pretrain.reporting.report import FINETUNED
from tests.tasks.refusals import refused

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


class Calls(list[tuple[str, dict[str, Any]]]):
    """Stands in for the functions of both packages: keeps (function, settings), leaves what a fine-tuning leaves."""

    def __init__(self, fails_at: str = "", error: RunError | None = None) -> None:
        super().__init__()
        self.fails_at, self.error = fails_at, error or DivergedError("it diverged")

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Calls:
        for name in ("prepare", "train", "export"):
            monkeypatch.setattr(f"pretrain.run.api.{name}", functools.partial(self.keep, name))
        monkeypatch.setattr("finetune.training.api.train", functools.partial(self.keep, "finetune"))
        return self

    def keep(self, function: str, config: Any, *_: Any, overrides: Any = (), **options: Any) -> Any:
        given = (text.partition("=") for text in as_overrides(overrides))
        settings = {key: parse(value, "--set")[1] for key, _, value in given}
        self.append((function, {**settings, **options}))
        if settings.get("name") == self.fails_at:
            raise self.error
        if function == "finetune":
            assert examples()[config].is_file()
            folder, task = Path(settings["run_dir"]), settings["name"].split("-")[1]
            score = 0.5 if settings["random_weights"] else 0.75
            scores = {"metric": "exact_match", "scores": {"dev": {"exact_match": score}}}
            left = {"model/manifest.json": {}, "scores.json": scores, "predictions/dev.jsonl": PREDICTED[task]}
            for file, content in left.items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / file).write_text(json.dumps(content) + "\n")
        return SimpleNamespace(trained=True)

    def of(self, function: str) -> list[dict[str, Any]]:
        """The settings with which a function was called, each time."""
        return [given for name, given in self if name == function]

    @property
    def names(self) -> list[str]:
        """The runs that were fine-tuned."""
        return [given["name"] for given in self.of("finetune")]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls().install(monkeypatch)


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
    return build_parsers()[0].parse_args(["demo", "--workers", "1"])


def test_docstrings_are_found_in_every_block_outer_ones_first() -> None:
    blocks = ("try:", "except ImportError:", "else:", "finally:", "for x in y:", "match x:\n  case 1:")
    inner = [f'{block}\n   def f{number}():\n    """{number}"""' for number, block in enumerate(blocks)]
    source = "\n".join([*inner, 'class A:\n  """A"""\n  async def g(self):\n    """g"""', 'def last():\n  """last"""'])
    names = ["A", "last", *(f"f{number}" for number in (0, 2, 3, 4)), "g", "f1", "f5"]  # as `ast.walk`
    assert named_docstrings(source.encode()) == [(name.removeprefix("A"), name.removeprefix("f")) for name in names]
    assert named_docstrings(b'"""') == []


def test_each_task_is_trained_from_pretrained_and_from_random_weights(arguments, calls, capsys) -> None:
    demo.run(arguments)
    assert [function for function, _ in calls[:3]] == ["prepare", "train", "export"]
    expected = [f"demo-{name}-{start}" for name in ROWS for start in ("pretrained", "random")]
    assert calls.names == expected
    assert {given["start_from"] for given in calls.of("finetune")} == {"runs/demo/export"}
    assert calls.of("finetune")[2]["entities.train"] == "runs/demo/labeled/names-train.jsonl"
    out = capsys.readouterr().out
    assert "[1/8] tokenizing" in out
    assert "[7/8] What does the function return? (3 examples, 1 held out)" in out
    assert "exact match 0.750 from pretrained weights, 0.500 from random weights" in out
    titles = [line.strip() for line in out.splitlines() if "(3 of 6)" in line or "(4 of 6)" in line]
    assert titles == ["names, from pretrained weights (3 of 6)", "names, from random weights (4 of 6)"]
    assert "[8/8] report\nthe summary" in out
    results = json.loads((Path("runs/demo") / FINETUNED).read_text())
    assert [one["scores"] for one in results] == 3 * [{"pretrained": 0.75, "random": 0.5}]
    assert [(one["examples"][0]["pieces"], one["examples"][0]["note"]) for one in results] == [
        ([["a short text", ""]], "ast (25%); truth: json"),
        ([["call", "found"], [" ", ""], ["dumps", "found"], [" or loads", ""]], "1 of 2 found, 1 wrong"),
        ([["It returns ", ""], ["a string", "found"], [".", ""]], "What does dumps return? Truth: a string"),
    ]


def test_a_demo_may_be_in_any_folder(arguments: argparse.Namespace, calls: Calls, tmp_path: Path) -> None:
    """YAML would see a comment in one and a key in the other."""
    arguments.run_dir, arguments.data_dir = tmp_path / "a #b", tmp_path / "c: d"
    demo.run(arguments)
    (given,) = calls.of("train")
    assert (given["run_dir"], given["corpus.dir"]) == (str(tmp_path / "a #b"), str(tmp_path / "c: d"))
    assert (tmp_path / "a #b/finetuned/returns-random/model/manifest.json").is_file()
    assert calls.of("finetune")[0]["start_from"] == str(tmp_path / "a #b/export")


def test_a_failed_demo_continues_with_the_unfinished_models(arguments, monkeypatch, capsys) -> None:
    Calls(fails_at="demo-names-random").install(monkeypatch)
    with pytest.raises(DivergedError):
        demo.run(arguments)
    results = json.loads((Path("runs/demo") / FINETUNED).read_text())
    assert [one["scores"] for one in results] == [{"pretrained": 0.75, "random": 0.5}, {"pretrained": 0.75}, {}]
    assert [len(one["examples"]) for one in results] == [1, 1, 0]
    capsys.readouterr()
    again = Calls().install(monkeypatch)
    demo.run(arguments)
    assert again.names == ["demo-names-random", "demo-returns-pretrained", "demo-returns-random"]
    out = capsys.readouterr().out
    assert "names, from pretrained weights (3 of 6)\n      finished by an earlier demo\n" in out


def test_a_stopped_fine_tuning_is_resumed(arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    Calls("demo-names-random", StoppedError(f"at step 165.{StoppedError.CONTINUE}")).install(monkeypatch)
    with pytest.raises(StoppedError, match=r"^at step 165\. Run the same command again to continue\.$"):
        demo.run(arguments)
    manifest = Path("runs/demo/finetuned/names-random/checkpoints/step-00000165/manifest.json")
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    again = Calls().install(monkeypatch)
    demo.run(arguments)
    assert manifest.is_file()
    assert all(given["resume"] for given in again.of("finetune"))


def test_nothing_is_fine_tuned_if_pretraining_fails(arguments: argparse.Namespace, monkeypatch: Any) -> None:
    calls = Calls(fails_at="demo").install(monkeypatch)
    with pytest.raises(DivergedError):
        demo.run(arguments)
    assert [function for function, _ in calls] == ["prepare"]


def test_an_earlier_run_is_continued_unless_it_is_to_be_fresh(arguments: argparse.Namespace, calls: Calls) -> None:
    checkpoint = Path("runs/demo/checkpoints/step-00000200")
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    demo.run(arguments)
    assert calls.of("train")[0]["resume"]
    assert checkpoint.exists()
    Path("runs/demo/config.yaml").write_text("")  # perhaps the user's own
    arguments.fresh = True
    refused("not a run folder", demo.run, arguments)
    Path("runs/demo/environment.json").write_text("")
    demo.run(arguments)
    assert not checkpoint.exists()


def test_an_earlier_corpus_and_given_steps_are_kept(arguments: argparse.Namespace, calls: Calls) -> None:
    Path("data/demo").mkdir(parents=True)
    Path("data/demo/manifest.json").write_text("{}")
    arguments.set = ["phases.0.steps=5"]
    demo.run(arguments)
    assert [function for function, _ in calls[:2]] == ["train", "export"]
    given = calls.of("train")[0]
    assert (given["corpus.dir"], given["scheduling.workers"], given["phases.0.steps"]) == ("data/demo", 1, 5)
    assert given["minutes"] is None

"""The pages of docs/extend that need no clone, followed from an empty folder: their files, configs and commands."""

from __future__ import annotations

import os
import random
import re
import shlex
import sys
from pathlib import Path

import pytest
from tiny_checkpoints import WORDS, make_bert

from finetune.cli import main
from tests.distributed import ROOT, run_program

EXTEND = ROOT / "docs/extend"
PAGES = sorted(EXTEND.glob("add-*.md"))
FILE = re.compile(r"`([\w/]+\.(?:py|yaml))`[^:]*:\n\n```(?:python|yaml)\n(.*?)^```", re.M | re.S)
PLAIN = "tracking.wandb=off engine.precision=fp32 engine.compile=false"
CORPUS = "corpus.vocabulary.size=300 corpus.validation_fraction=0.1"
SHORTER = {
    "prepare": f"{CORPUS} corpus.processes=1",
    "pretrain": f"{CORPUS} phases.0.steps=3 phases.0.global_sequences=8 evaluation.sequences=16 {PLAIN}",
    "finetune": f"training.steps=60 training.learning_rate=3e-3 max_length=32 {PLAIN}",
}
"""Settings that a page leaves to its reader: a model of a minute."""


def write_data(folder: Path) -> None:
    """What the reader of a page has: texts, and a released model."""
    draw = random.Random(0)
    sentences = [" ".join(draw.choices(WORDS, k=9)).capitalize() + "." for _ in range(2000)]
    for name, suffix in (("notes", "md"), ("books", "txt")):
        (folder / name).mkdir()
        for number in range(40):
            text = "\n\n".join(sentences[50 * number : 50 * number + 50])
            (folder / name / f"{number}.{suffix}").write_text(f"# Title\n\n{text}\n")
    lines = [" ".join(draw.choices(WORDS, k=1 + n % 9)) for n in range(90)]
    for name in ("train.txt", "dev.txt"):
        (folder / name).write_text("\n".join(lines) + "\n")
    rows = [f"{line},{'long' if len(line) > 20 else 'short'}" for line in lines]
    (folder / "train.csv").write_text("text,label\n" + "\n".join(rows) + "\n")
    make_bert(folder / "bert-base-uncased")


def run(folder: Path, words: list[str], *more: str) -> str:
    shorter = [word for setting in SHORTER.get(words[0], "").split() for word in ("--set", setting)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    done = run_program(main, [*words, *shorter, *more], cwd=folder, env=environment)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_followed_from_an_empty_folder(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = FILE.findall(text)
    assert [Path(name).suffix for name, _ in files] == [".py", ".yaml"]
    write_data(tmp_path)
    for name, content in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    ((block,),) = [re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)]
    shown = []
    for line in block.splitlines():
        words = shlex.split(line)[1:]
        # One page's objects go to a worker process, too.
        here = words[0] in ("pretrain", "finetune") and page.stem != "add-an-objective"
        shown.append(run(tmp_path, words, *["--no-ray"] * here))
    if page.stem == "add-an-objective":
        assert files[0][1] == (ROOT / "tests/toy_objective.py").read_text()
        assert "Places found" in shown[2]
    if page.stem == "add-a-source":
        assert "Title" not in (tmp_path / "corpora/notes/vocab.txt").read_text()
        assert "40 documents" in shown[0]
    if page.stem == "add-a-task":
        assert float(re.findall(r"spearman ([0-9.]+)", shown[2])[0]) > 0.6
    if page.stem == "add-a-metric":
        assert "balanced_accuracy" in shown[0]
        assert "balanced_accuracy" in shown[1]
        assert '"label"' in shown[2]


def test_the_callbacks_of_the_page_do_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pretrain.common import extensions
    from pretrain.run.callbacks import Callbacks

    monkeypatch.setenv(extensions.ENV_VAR, "{}")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    text = (EXTEND / "your-own-modules.md").read_text(encoding="utf-8")
    ((name, content),) = FILE.findall(text)
    (tmp_path / "hooked").mkdir()
    (tmp_path / "hooked" / Path(name).name).write_text(content)
    extensions.import_modules(["hooked.hooks:say"])
    worse = {"call": "hooked.hooks:StopIfWorse", "on_error": "stop", "factor": 1.2}
    callbacks = Callbacks(["hooked.hooks:say", worse])
    for step, loss in ((1, 5.0), (2, 5.9), (3, 6.1)):
        assert not callbacks.stop_reason
        callbacks.call("evaluation", {"step": step, "loss": loss})
    assert "the loss is 6.100, and was 5.000" in callbacks.stop_reason

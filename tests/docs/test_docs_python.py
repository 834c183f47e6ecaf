"""The Python of the pages and of `export`, run on tiny models under the names that it has there."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from corpora import SPECIALS, write_tokenizer
from tiny_checkpoints import WORDS, make_bert, write_reviews

from finetune.cli import main
from finetune.training import api as finetuning
from pretrain.checkpoint import hf
from pretrain.config import ModelConfig
from pretrain.model.heads import PretrainingModel
from pretrain.run import api
from tests.artifacts.untrained import save_untrained

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{number}")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if page.name != "hand-on.md"  # by test_hand_on.py
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S))
]


def export(folder: Path, family: str, *, next_sentence: bool) -> None:
    sizes = {"layers": 3, "hidden": 32, "heads": 4, "max_positions": 66}
    window = {"local_attention": 8} if family == "modernbert" else {}
    shape = ModelConfig.model_validate({"family": family, "size": "custom", **sizes, **window})
    vocabulary = [*SPECIALS, *WORDS, *"abcdefgh."]
    write_tokenizer(folder.parent, vocabulary)
    model = PretrainingModel(shape, len(vocabulary), next_sentence=next_sentence)
    hf.export(model.state_dict(), shape, folder.parent, folder, next_sentence=next_sentence, card="")


# All pages for one family, and for another those that load a model of it.
PLACES = [
    pytest.param(family, *block.values, id=f"{family}-{block.id}")
    for family in ("bert", "modernbert")
    for block in BLOCKS
    if family == "bert" or "my-bert" in str(block.values)
]


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    torch.manual_seed(0)
    export(folder / "my-bert", request.param, next_sentence=request.param == "bert")
    runs = folder / "runs"
    make_bert(runs / "bert")
    save_untrained(runs, "my-task", {"classification": write_reviews(folder)})
    phase = {"sequence_length": 32, "global_sequences": 4, "steps": 2, "peak_learning_rate": 1e-3}
    model = {"size": "custom", "layers": 1, "hidden": 16, "heads": 2, "max_positions": 32}
    corpus = {"dir": "corpus", "sources": [{"kind": "docstrings", "path": asyncio.__path__[0]}]}
    settings = {"name": "my-run", "corpus": corpus, "model": model, "phases": [phase], "engine": {"compile": False}}
    (folder / "my.yaml").write_text(json.dumps(settings))
    reviews = {"name": "reviews", "max_length": 16, "classification": write_reviews(folder), "training": {"steps": 2}}
    (folder / "my-task.yaml").write_text(json.dumps(reviews))
    (folder / "train.conll").write_text("the O\nfilm B-WORK\n\nit O\n")
    save_untrained(runs, "my-ner", {"entities": {"train": str(folder / "train.conll")}})
    return folder


@pytest.mark.parametrize(("place", "block"), PLACES, indirect=["place"])
def test_the_python_of_a_page_runs(block: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which is several times as fast as with workers."""
    if "from datatrove" in block:
        pytest.importorskip("datatrove", reason="has an environment of its own")
    monkeypatch.chdir(place)
    monkeypatch.setattr(api, "train", functools.partial(api.train, no_ray=True))
    monkeypatch.setattr(finetuning, "train", functools.partial(finetuning.train, no_ray=True))
    if "pretrain.train(" in block:
        api.prepare("my.yaml")
    exec(block, {"texts": ["a film", "the end"]})


@pytest.mark.parametrize(("family", "next_sentence"), [("bert", True), ("bert", False), ("deberta", True)])
def test_export_names_the_class_that_loads_all(family: str, next_sentence: bool, tmp_path: Path, monkeypatch, capsys):
    def made(run: Path, out: Path, *_: object, **__: object) -> str:
        export(out, family, next_sentence=next_sentence)
        return ""

    monkeypatch.setattr(hf, "export_run", made)
    (tmp_path / "run").mkdir()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    found = re.search(r"loads it with (\w+)\.from_pretrained\.", capsys.readouterr().out)
    assert found
    _, report = getattr(transformers, found[1]).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report

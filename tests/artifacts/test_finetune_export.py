"""Fine-tuned models taken along: equal logits in transformers and onnxruntime, whole folders, and the model card."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import yaml
from tiny_checkpoints import make_bert, write_reviews
from torch import Tensor

import finetune
from finetune.artifacts import export
from finetune.artifacts.padded import PaddedModel
from finetune.cli import main
from finetune.tasks.base import Head, Task
from finetune.tasks.registry import make_task
from finetune.training.card import CardFacts, model_card
from finetune.training.config import FinetuneConfig
from finetune.training.saved import SetResult
from pretrain.checkpoint.released import ReleasedModel
from pretrain.common.errors import MachineError
from pretrain.common.files import verify_manifest
from pretrain.config import ModelConfig
from tests import parity
from tests.artifacts.untrained import save_untrained
from tests.tasks.refusals import refused

transformers: Any = pytest.importorskip("transformers")

SHAPE = parity.ONNX_SHAPE
OBJECTIVES = dict(parity.HEADS.values())
ALL = [(family, head) for family in ("BERT", "DistilBERT", "RoBERTa", "ELECTRA") for head in OBJECTIVES]


def made(folder: Path, family: str, head: Head) -> tuple[ReleasedModel, dict[str, Tensor], Tensor]:
    """A model of transformers as we read it, padded inputs, and [R, C] of the model that is trained."""
    released = parity.read_back(parity.make_theirs(parity.CLASSES[head], family, SHAPE), folder)
    model = parity.task_model(released, head, OBJECTIVES[head]).eval()
    with torch.no_grad():
        expected = model(parity.task_batch(released, SHAPE, head)).logits
    assert expected.std() > 0.1
    return released, parity.inputs_of(parity.batch_for(released, SHAPE), released), expected


@pytest.mark.parametrize(
    ("family", "head"), [pytest.param(*each, marks=[] if each[0] == "BERT" else [pytest.mark.slow]) for each in ALL]
)
def test_onnxruntime_gives_our_logits(family: str, head: Head, tmp_path: Path, capfd: Any) -> None:
    import onnx
    import onnxruntime

    released, inputs, expected = made(tmp_path, family, head)
    model = PaddedModel(released, head).eval()
    capfd.readouterr()
    assert export.write_onnx(model, tmp_path / "model.onnx") < 1e-5
    assert capfd.readouterr().err == "", "torch.onnx is silent"
    session: Any = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [(value.name, value.type, value.shape) for value in session.get_inputs()] == [
        (name, "tensor(int64)", ["batch_size", "sequence_length"]) for name in model.inputs
    ]
    assert tuple(value.name for value in session.get_outputs()) == model.outputs
    fed = {name: inputs[name].numpy() for name in model.inputs}
    found = dict(zip(model.outputs, map(torch.from_numpy, session.run(None, fed)), strict=True))
    logits = parity.their_logits(lambda **_: SimpleNamespace(**found), inputs, head)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    # One sequence alone, and one of nothing but padding.
    one = session.run(None, {name: values[:1, : SHAPE.lengths[0]] for name, values in fed.items()})
    first = found[model.outputs[0]][0].flatten()
    torch.testing.assert_close(torch.from_numpy(one[0]).flatten(), first[: one[0].size])
    assert np.isfinite(session.run(None, {**fed, "attention_mask": 0 * fed["attention_mask"]})[0]).all()
    onnx.checker.check_model(tmp_path / "model.onnx", full_check=True)
    assert str(Path(export.__file__).parent).encode() not in (tmp_path / "model.onnx").read_bytes()
    model.out.out_bias += torch.nn.functional.one_hot(torch.tensor(1), len(model.out.out_bias))
    with pytest.raises(MachineError, match=r"computes logits that differ from torch's by 1\.0e\+00"):
        export.max_logit_difference(model, tmp_path / "model.onnx")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, its model not trained."""
    folder = tmp_path_factory.mktemp("runs")
    make_bert(folder / "bert")
    section = {"classification": write_reviews(folder), "engine": {"precision": "auto"}}
    return save_untrained(
        folder, "reviews", section, {"label": "negative", "scores": {"negative": 0.8, "positive": 0.2}}
    )


def test_an_export_is_the_model_whole(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "model" / "notes.txt").write_text("nothing of the model's")
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: in the Hugging Face layout\n"
    assert verify_manifest(tmp_path / "out") == verify_manifest(run / "model")
    (run / "model" / "notes.txt").unlink()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in (run / "model").iterdir()}
    texts = ["the film was good", "the book was very bad"]
    assert finetune.load(tmp_path / "out")(texts) == finetune.load(run)(texts)
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "again")]) == 0
    assert main(["export", str(run), str(tmp_path / "again")]) == 0  # an earlier one is replaced


def test_the_card_of_an_onnx_export_mentions_onnx(run: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(export, "write_onnx", lambda model, path: path.write_bytes(b"onnx") * 1e-7)
    assert main(["export", str(run / "model"), str(tmp_path / "out"), "--onnx"]) == 0
    said = capsys.readouterr()
    assert said.out.count("\n") == 1
    assert "model.onnx: opset 23, logits within" in said.out
    assert set(verify_manifest(tmp_path / "out")["files"]) == {*verify_manifest(run / "model")["files"], "model.onnx"}
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert card.startswith((run / "model" / "README.md").read_text(encoding="utf-8").rstrip())
    assert card.count("## ONNX") == 1
    assert "`input_ids`, `attention_mask`, `token_type_ids`" in card


def test_a_damaged_model_is_refused(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "model", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    refused(r"model\.safetensors: its SHA-256 differs", export.export, tmp_path / "model", tmp_path / "out")
    weights.unlink()
    refused(r"model\.safetensors: missing", export.export, tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_else_is_overwritten(run: Path, tmp_path: Path) -> None:
    refused("is the model itself", export.export, run, run / "model")
    shutil.copytree(run, tmp_path / "other")
    refused("is the model of a run", export.export, run, tmp_path / "other" / "model")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "precious.txt").write_text("mine")
    refused("exists and is not an export", export.export, run, tmp_path / "notes")
    # A corpus or a checkpoint has a manifest too.
    (tmp_path / "notes" / "manifest.json").write_text(json.dumps({"format": 1, "files": {"precious.txt": {}}}))
    refused("exists and is not an export", export.export, run, tmp_path / "notes")
    assert (tmp_path / "notes" / "precious.txt").read_text() == "mine"
    refused(r"finetune\.json: not found", export.export, tmp_path / "notes", tmp_path / "out")


def test_onnx_that_cannot_be_made_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxscript", None)
        with pytest.raises(
            MachineError, match=r"^--onnx: onnxscript not installed\. Run: .* install 'bertrain\[onnx\]'"
        ):
            export.export(run, tmp_path / "out", onnx=True)

    monkeypatch.setattr(export, "write_onnx", MagicMock(side_effect=MachineError("logits differ")))
    with pytest.raises(MachineError, match="logits differ"):
        export.export(run, tmp_path / "out", onnx=True)
    assert list(tmp_path.iterdir()) == []


def render(
    config: dict[str, Any], predictions: list[dict[str, Any]], *, scored: bool = True, chosen_on: str = "dev"
) -> str:
    """The card of a model that made these predictions on the dev set, and on the test set if there is one."""
    made = FinetuneConfig.model_validate({"name": "it", "start_from": "released/bert", **config})
    task: Task[Any] = make_task(made.task_settings)
    train, sets = task.read_train(), {**task.read_held_out(), **task.read_test()}
    for one in predictions:
        if "label" in one:
            one["scores"] = {name: float(name == one["label"]) for name in task.labels}
    results = {name: SetResult.of(task, members, predictions) for name, members in sets.items()}
    facts = CardFacts(
        family="bert",
        shape=ModelConfig(size="mini"),
        parameters=12345,
        step=300,
        chosen_on=chosen_on,
        examples={"train": len(train), **{name: len(members) for name, members in sets.items()}},
        scores={name: result.scores for name, result in results.items()} if scored else {},
        details={name: result.details for name, result in results.items()} if scored else {},
    )
    return model_card(made, task, facts)


def metadata(card: str) -> dict[str, Any]:
    """The front matter, which the hub's own library must understand."""
    from huggingface_hub import ModelCard

    values = yaml.safe_load(card.split("---\n")[1])
    parsed: Any = ModelCard(card).data
    assert parsed.library_name == "transformers"
    assert parsed.pipeline_tag == values["pipeline_tag"]
    return values


def tables(card: str) -> list[list[list[str]]]:
    """The Markdown tables by rows and cells; a row must have as many cells as its head, and blank lines be around."""
    found: list[list[list[str]]] = []
    before = ""
    for line in card.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not before.startswith("|"):
                assert before == "", line
                found.append([])
            found[-1].append(cells)
            assert len(cells) == len(found[-1][0]), line
        else:
            assert not before.startswith("|") or line == "", line
        before = line
    assert "\n\n\n" not in card
    return found


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def labeled(path: Path, labels: list[Any]) -> str:
    return write_lines(path, [{"text": f"text {n}", "label": label} for n, label in enumerate(labels)])


def test_the_card_of_a_classifier(tmp_path: Path) -> None:
    truth = ["a|b", "c", "c", "a|b", "d"]
    files = {"train": labeled(tmp_path / "train.jsonl", truth), "dev": labeled(tmp_path / "dev.jsonl", truth)}
    predicted = [{"label": label} for label in ("a|b", "c", "d", "c", "d")]
    card = render({"classification": files}, predicted)
    sets, scores, confusion, types = tables(card)
    assert sets[2:] == [[name, files[name].replace("_", "\\_"), "5"] for name in ("train", "dev")]
    assert scores[0] == ["", "dev"]
    assert ["accuracy", "0.6000 (95 %: 0.2000 to 1.0000)"] in scores
    assert ["brier", "0.8000"] in scores
    assert confusion[0] == ["", "a\\|b", "c", "d"]
    assert confusion[2:] == [["**a\\|b**", "1", "1", "0"], ["**c**", "0", "1", "1"], ["**d**", "0", "0", "1"]]
    assert types[3] == ["c", "0.5000", "0.5000", "0.5000", "2"]
    assert "best one by `accuracy` on `dev`" in card
    assert "The score on `dev` chose the checkpoint, so it is optimistic" in card
    assert "did not influence" not in card
    values = metadata(card)
    assert values["pipeline_tag"] == "text-classification"
    assert "base_model" not in values


def test_the_card_names_the_set_that_selected_the_model(tmp_path: Path) -> None:
    files = {name: labeled(tmp_path / f"{name}.jsonl", [["x"], ["y"]]) for name in ("train", "dev", "test")}
    chances = [{"scores": {"x": 0.9, "y": 0.2}}, {"scores": {"x": 0.7, "y": 0.8}}]
    sets = {"problem_type": "multi_label", "format": "jsonl"}
    card = render({"classification": {**files, **sets}}, chances)
    assert tables(card)[1][0] == ["", "dev", "test"]
    assert "The score on `dev` chose the checkpoint and the threshold, so it is optimistic" in card
    assert "`test` did not influence that choice." in card
    fixed = render({"classification": {**files, **sets, "threshold": 0.4}}, chances)
    assert "chose the checkpoint, so it is optimistic" in fixed
    # A set that is another one once more is no independent one.
    same = render({"classification": {**files, **sets, "test": files["dev"]}}, chances)
    assert "did not influence" not in same
    assert "Remark: test is the same file as dev: its examples selected the checkpoint" in same
    alone = render({"classification": {**files, **sets}}, chances, chosen_on="")
    assert "the last step: there was no dev set to choose a checkpoint with." in alone
    assert "optimistic" not in alone


def test_a_large_matrix_becomes_its_most_frequent_mistakes(tmp_path: Path) -> None:
    labels = [f"label{n:02}" for n in range(30)]
    files = {"train": labeled(tmp_path / "train.jsonl", labels), "dev": labeled(tmp_path / "dev.jsonl", labels)}
    card = render({"classification": files}, [{"label": labels[n // 2]} for n in range(30)])
    mistakes = tables(card)[2]
    assert len(mistakes) == 2 + 20
    assert mistakes[2] == ["label01", "label00", "1"]
    assert "matrix of 30 labels" in card


def test_the_cards_of_sets_of_labels_and_of_values(tmp_path: Path) -> None:
    sets = {"train": labeled(tmp_path / "a", [["x"], ["x", "y"]]), "dev": labeled(tmp_path / "b", [["x"], ["y"]])}
    more = {"problem_type": "multi_label", "format": "jsonl"}
    chances = [{"scores": {"x": 0.9, "y": 0.2}}, {"scores": {"x": 0.7, "y": 0.8}}]
    card = render({"classification": {**sets, **more}}, chances)
    assert tables(card)[2][2:] == [["x", "0.5000", "1.0000", "0.6667", "1"], ["y", "1.0000", "1.0000", "1.0000", "1"]]
    assert "threshold: 0.5000 (dev)." in card
    metadata(card)
    sets = {"train": labeled(tmp_path / "c", [1.0, 2.0]), "dev": labeled(tmp_path / "d", [1.0, 2.5, 3.0])}
    values = [{"value": value} for value in (1.0, 2.0, 3.5)]
    card = render({"classification": {**sets, "problem_type": "regression", "format": "jsonl"}}, values)
    assert "mean absolute error: 0.3333, mean squared error: 0.1667 (dev)." in card


def test_the_card_of_a_tagger(tmp_path: Path) -> None:
    rows = [{"tokens": ["Ann", "saw", "Rome"], "tags": ["B-PER", "O", "B-LOC"]}]
    files = {name: write_lines(tmp_path / f"{name}.jsonl", rows) for name in ("train", "dev")}
    card = render({"entities": files}, [{"tags": ["B-PER", "O", "O"]}])
    assert tables(card)[2][2:] == [["LOC", *["0.0000"] * 3, "1"], ["PER", *["1.0000"] * 3, "1"]]
    assert "sentences: 1, words: 3, entities: 2 (dev)." in card
    assert 'pipeline("token-classification", ".", aggregation_strategy="first")' in card
    assert metadata(card)["pipeline_tag"] == "token-classification"


def test_the_card_of_an_answerer(tmp_path: Path) -> None:
    def row(number: int, *answers: str) -> dict[str, Any]:
        context = "It was Ann who wrote it."
        starts = [context.index(answer) for answer in answers]
        given = {"text": list(answers), "answer_start": starts}
        return {"id": str(number), "question": "Who?", "context": context, "answers": given}

    rows = [row(1, "Ann"), row(2, "Ann who wrote"), row(3)]
    files = {name: write_lines(tmp_path / f"{name}.jsonl", rows) for name in ("train", "dev")}
    said = {"best_non_empty": "Ann"}
    scores = (1, -5.0), (2, -4.0), (3, 2.0)
    predictions = [said | {"id": str(n), "no_answer_score": score, "windows": n} for n, score in scores]
    card = render({"questions": {**files, "threshold": 0.0}}, predictions)
    kinds = tables(card)[2]
    assert kinds[2:] == [["HasAns", "0.5000", "0.7500", "2"], ["NoAns", "1.0000", "1.0000", "1"]]
    assert ["total", "3"] in tables(card)[1]
    assert ["NoAns\\_total", "1"] in tables(card)[1]
    assert "threshold: 0.0000 (dev)." in card
    assert metadata(card)["pipeline_tag"] == "question-answering"


def test_what_the_hub_knows_is_named(tmp_path: Path) -> None:
    files = {name: labeled(tmp_path / f"{name}.jsonl", ["x", "y"]) for name in ("train", "dev")}
    cache = "/data/hub/models--google-bert--bert-base-uncased/snapshots/86b5e0934494bd15c9632b12f734a8a67f723594"
    given = {"classification": files, "start_from": cache}
    predictions = [{"label": "x"}, {"label": "x"}]
    assert metadata(render(given, predictions))["base_model"] == "google-bert/bert-base-uncased"
    assert "base_model" not in metadata(render({**given, "random_weights": True}, predictions))
    card = render(given, predictions, scored=False)
    assert "this model has not been scored" in card
    assert len(tables(card)) == 1
    rows = [{"text": "a", "pair": "b", "label": "x"}, {"text": "c", "pair": "d", "label": "y"}]
    pairs = {name: write_lines(tmp_path / f"{name}-pairs.jsonl", rows) for name in ("train", "dev")}
    card = render({"classification": {**pairs, "pair_column": "pair"}}, predictions)
    assert 'model({"text": "A man sleeps.", "pair": "Somebody rests."})' in card

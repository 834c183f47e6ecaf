"""The steps of `guides/hand-on.md`, each run on a tiny model where its packages are installed."""

from __future__ import annotations

import csv
import json
import re
import shutil
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from tiny_checkpoints import make_bert, write_reviews

import finetune
from finetune.cli import main
from finetune.training import api
from pretrain.checkpoint.released import read_released
from tests.artifacts.untrained import save_untrained

PAGE = (Path(__file__).resolve().parents[2] / "docs/guides/hand-on.md").read_text("utf-8")
TEXTS = ["the film was good", "bad " * 20, "a very fine plot and an end", "it"]


def block(heading: str, language: str = "python") -> str:
    section = PAGE.partition(f"\n## {heading}")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.M | re.S)[0]


def run(heading: str, change: tuple[str, str] = ("", ""), **names: Any) -> dict[str, Any]:
    names["__name__"] = "__main__"
    exec(block(heading).replace(*change), names)
    return names


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_bert(tmp_path / "my-bert", positions=128)
    make_bert(tmp_path / "runs/bert")
    reviews = write_reviews(tmp_path)
    save_untrained(tmp_path / "runs", "my-task", {"classification": reviews})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_embedder_is_trained_and_setfit_starts_from_it(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library: Any = pytest.importorskip("sentence_transformers")
    for name, topics in (("squad", "abcdef"), ("other-squad", "ghij")):
        asked = {one: [{"id": f"{one}{n}", "question": f"{one} {n}"} for n in "12"] for one in topics}
        article = {"paragraphs": [{"context": f"{one} film", "qas": qas} for one, qas in asked.items()]}
        (place / f"{name}.json").write_text(json.dumps({"data": [article]}))
    made = run("Embeddings", ("num_train_epochs=1", "num_train_epochs=5"))
    assert len(made["pairs"]) == 12
    assert set(made["relevant"]["h2"]) == {"1"}
    before, after = (library.SentenceTransformer(one).encode("a film") for one in ("my-bert", "my-embedder"))
    assert abs(before - after).max() > 1e-4
    pytest.importorskip("setfit")
    few = run("Few labels: SetFit")["model"].predict(["great", "awful"])
    assert set(few) <= {"good", "bad"}


def test_lora_is_merged_into_a_model_that_starts_others(place: Path) -> None:
    pytest.importorskip("peft")
    made = run("LoRA: peft")
    merged = made["AutoModelForSequenceClassification"].from_pretrained("my-merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(**made["inputs"]).logits, made["lora"].eval()(**made["inputs"]).logits)
    name = "encoder.layer.0.attention.self.query.weight"
    start, end = (made["AutoModelForSequenceClassification"].from_pretrained(one) for one in ("my-bert", "my-merged"))
    assert not torch.equal(start.bert.get_parameter(name), end.bert.get_parameter(name))
    assert read_released(place / "my-merged").model.layers == 2


def test_int8_is_a_quarter_as_large_and_scored(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    assert main(["export", "runs/my-task", "my-model", "--onnx"]) == 0
    labels = ["negative", "positive"]
    predicted = [labels.index(one["label"]) for one in finetune.load("my-model", precision="fp32")(TEXTS)]
    capsys.readouterr()
    run("int8: onnxruntime", dev_texts=TEXTS, dev_labels=predicted)
    scores = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert (scores[0], scores[1] >= 0.75) == (1.0, True)
    assert (place / "my-model/int8.onnx").stat().st_size < 0.6 * (place / "my-model/model.onnx").stat().st_size


def test_fastapi_answers_clients_together_and_survives_errors(place: Path) -> None:
    testing: Any = pytest.importorskip("fastapi.testclient")
    made = run("Serve: FastAPI")
    model, sizes, gate = made["model"], [], threading.Event()

    def recorded(texts: list[str]) -> list[Any]:
        sizes.append(len(texts))
        gate.wait(20)
        if "boom" in texts:
            raise ValueError("boom")
        return model(texts)

    made["model"] = recorded
    with testing.TestClient(made["app"]) as client, ThreadPoolExecutor(12) as pool:
        replies = [pool.submit(client.post, "/predict", json={"text": TEXTS[n % 4]}) for n in range(12)]
        while sum(sizes) + made["waiting"].qsize() < 12:
            time.sleep(0.01)
        gate.set()
        for n, reply in enumerate(replies):
            assert reply.result().json()["label"] == model(TEXTS[n % 4])["label"]
        assert len(sizes) == 2
        assert client.post("/predict", json={"text": "boom"}).status_code == 500
        assert client.post("/predict", json={"text": "a" * 20_001}).status_code == 422
        assert client.post("/predict", json={"text": "good"}).json() == model("good")


@pytest.mark.slow
def test_ray_serve_answers_as_the_model_does(place: Path) -> None:
    serve: Any = pytest.importorskip("ray.serve")
    try:
        handle = serve.run(run("Serve: Ray Serve")["app"])
        replies = [handle.predict.remote(text) for text in TEXTS]
        labels = [reply.result()["label"] for reply in replies]
        assert labels == [one["label"] for one in finetune.load("runs/my-task")(TEXTS)]
        sent = urllib.request.Request("http://127.0.0.1:8000", json.dumps({"text": TEXTS[0]}).encode())
        assert json.load(urllib.request.urlopen(sent))["label"] == labels[0]
    finally:
        serve.shutdown()
        ray.shutdown()


def test_a_student_learns_the_teachers_labels(place: Path) -> None:
    tiny = {"training.steps": 2, "max_length": 16, "engine.precision": "fp32", "tracking.wandb": "off"}
    shutil.rmtree(place / "runs/my-task")
    teacher = {"name": "my-task", "classification": {"train": "train.jsonl", "dev": "dev.jsonl"}}
    learning = {"training.steps": 60, "training.learning_rate": 3e-3}
    api.train(teacher, start_from="my-bert", overrides={**tiny, **learning}, no_ray=True)
    predict, student = (line.split()[1:] for line in block("Distil", "sh").splitlines())
    texts = [json.loads(line)["text"] for line in (place / "train.jsonl").read_text().splitlines()]
    (place / "unlabeled.txt").write_text("\n".join(texts))
    assert main(predict) == 0
    rows = list(csv.DictReader((place / "labeled.csv").open(encoding="utf-8")))
    labels = [one["label"] for one in finetune.load("runs/my-task")(texts)]
    assert [(row["text"], row["label"]) for row in rows] == list(zip(texts, labels, strict=True))
    (place / student[1]).write_text(block("Distil", "yaml").replace("dev.csv", "dev.jsonl"))
    done = api.train(student[1], start_from="my-bert", overrides=tiny, no_ray=True)
    assert set(finetune.load(done)("good")["scores"]) == set(labels) == {"negative", "positive"}

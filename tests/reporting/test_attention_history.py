"""What the heads attend to is recorded during training, changes nothing in it, and is drawn in the report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import make_corpus
from html_page import Page

from pretrain.checkpoint import hf
from pretrain.common.settings import dump
from pretrain.config import ModelConfig, PretrainConfig
from pretrain.corpus.shards import open_shards
from pretrain.model.heads import PretrainingModel
from pretrain.reporting import report
from pretrain.reporting.attention import progress
from pretrain.reporting.attention.strips import percent
from pretrain.run.attention import history
from pretrain.run.attention.history import AttentionHistory, read_history, unpack_matrix
from tests.distributed import run_workers
from tests.starts import Start, pretraining, records, starts

STEPS = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpora") / "one", documents=30, vocabulary_size=300)


def settings(corpus: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    return pretraining(corpus, run_dir, [(32, 12, STEPS)], **{"evaluation__every_steps": 2, **changes})


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs by name, ZeRO stage 3 on two workers: with the history and without, and one that is stopped and resumed."""
    root = tmp_path_factory.mktemp("runs")
    names = ("with", "without", "broken")
    given = {name: settings(corpus, root / name, engine__zero_stage=3) for name in names}
    plan = [Start(given["with"])]
    plan += [Start(given["broken"], stop_at=3), Start(given["broken"], resume=True)]
    for outcomes in run_workers(2, starts, plan):
        assert [outcome.partition(":")[0] for outcome in outcomes] == ["", "StoppedError", ""]
    assert run_workers(2, starts_without, [Start(given["without"])]) == [[""], [""]]
    return {name: root / name for name in names}


def starts_without(given: Sequence[Start]) -> list[str]:
    """`starts` of runs that record no history."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionHistory, "record", lambda *_: None)
        return starts(given)


def weights_of(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / f"checkpoints/step-{STEPS:08d}").glob("*.safetensors")}


def test_recording_changes_neither_losses_nor_weights(runs: dict[str, Path]) -> None:
    assert not (runs["without"] / history.ATTENTION_HISTORY).exists()
    assert [one["step"] for one in read_history(runs["with"])["records"]] == [2, 4, 6]
    for split in ("train", "validation"):
        losses = [[one["loss"] for one in records(runs[name], split)] for name in ("with", "without")]
        assert losses[0] == losses[1]
    assert weights_of(runs["with"]) == weights_of(runs["without"])


def test_a_resumed_run_records_the_same(runs: dict[str, Path]) -> None:
    assert len({(runs[name] / history.ATTENTION_HISTORY).read_bytes() for name in ("broken", "with")}) == 1


def test_it_does_not_depend_on_workers_or_stage(runs: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    plain = settings(corpus, tmp_path / "plain")
    assert run_workers(1, starts, [Start(settings(corpus, tmp_path / "one"))]) == [[""]]
    assert run_workers(1, starts_without, [Start(plain)]) == [[""]]
    assert weights_of(tmp_path / "one") == weights_of(tmp_path / "plain")
    one, three = read_history(tmp_path / "one"), read_history(runs["with"])
    assert one["picture"] == three["picture"]
    for mine, theirs in zip(one["records"], three["records"], strict=True):
        for kind in history.RECORDED_KINDS:
            assert np.allclose(mine["shares"][kind], theirs["shares"][kind], atol=2e-4)


@pytest.fixture(scope="module")
def model() -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    shape = ModelConfig.model_validate({"size": "custom", "layers": 5, "hidden": 32, "heads": 8, "max_positions": 32})
    torch.manual_seed(0)
    state = PretrainingModel(shape, 300, next_sentence=True).state_dict()
    return shape, {name: tensor + 0.2 * torch.randn_like(tensor) for name, tensor in state.items()}


def test_a_record_has_shares_of_every_head_and_matrices_of_some(model: Any, corpus: Path, tmp_path: Path) -> None:
    shape, state = model
    written = AttentionHistory(tmp_path, shape, open_shards(corpus, "validation"))
    written.record(7, state)
    found = read_history(tmp_path)
    (record,) = found["records"]
    assert record["step"] == 7
    for kind in history.RECORDED_KINDS:
        shares = np.array(record["shares"][kind])
        assert shares.shape == (5, 8)
        assert 0 <= shares.min() <= shares.max() <= 1
    assert 0 < np.array(record["entropy"]).min() < found["even_entropy"] < np.log(33)
    assert len(record["matrices"]) == len(found["heads"]) == 24
    assert len({tuple(head) for head in found["heads"]}) == 24
    assert {layer for layer, _ in found["heads"]} == set(range(5))
    special = open_shards(corpus, "validation").special_ids
    assert (found["picture"][0], found["picture"][-1]) == (special["cls"], special["sep"])
    special_ids = set(special.values())
    for text in written._sequences:  # the picture ends with a separator of its own
        assert special_ids.isdisjoint(text[1:-1].tolist())
    for matrix in map(unpack_matrix, record["matrices"]):
        assert matrix.shape == (24, 24)
        assert np.allclose(matrix.sum(-1), 1, atol=24 / 510)


def test_matrices_are_those_of_the_model(model: Any, corpus: Path, tmp_path: Path) -> None:
    from pretrain.model.padded import PaddedEncoder

    shape, state = model
    AttentionHistory(tmp_path, shape, open_shards(corpus, "validation")).record(1, state)
    found, collected = read_history(tmp_path), []
    ids = torch.tensor([found["picture"]])
    with torch.no_grad():
        PaddedEncoder(shape, state).encode(ids, torch.ones_like(ids), None, attention=collected)
    for (layer, head), matrix in zip(found["heads"], found["records"][0]["matrices"], strict=True):
        assert np.allclose(unpack_matrix(matrix), collected[layer][0, head].numpy(), atol=0.5 / 255 + 1e-6)


def test_averaged_weights_do_not_replace_the_record_of_their_step(model: Any, corpus: Path, tmp_path: Path) -> None:
    shape, state = model
    written = AttentionHistory(tmp_path, shape, open_shards(corpus, "validation"))
    written.record(20, state)
    before = read_history(tmp_path)
    averaged = {name: tensor / 2 for name, tensor in state.items()}
    written.record(20, averaged)
    assert read_history(tmp_path) == before
    written.record(21, averaged)
    assert read_history(tmp_path)["records"][1]["shares"] != before["records"][0]["shares"]


def test_records_after_a_rollback_are_dropped_and_old_ones_thinned(model: Any, corpus: Path, tmp_path: Path) -> None:
    shape, state = model
    written = AttentionHistory(tmp_path, shape, open_shards(corpus, "validation"))
    for step in (10, 20, 30):
        written.record(step, state)
    written.rewind(20)
    assert [one["step"] for one in read_history(tmp_path)["records"]] == [10, 20]
    written.record(20, state)
    assert [one["step"] for one in read_history(tmp_path)["records"]] == [10, 20]
    assert read_history(tmp_path)["even_shares"]["self"] > 0
    many = [{"step": step} for step in range(10, 1010, 10)]
    thin_records = [one["step"] for one in history.thin_records(many)]
    assert (len(thin_records), thin_records[0], thin_records[-1]) == (32, 10, 1000)
    assert max(np.diff(thin_records)) <= 4 * min(np.diff(thin_records))


def test_a_file_that_cannot_be_written_or_read_stops_nothing(model: Any, corpus: Path, tmp_path: Path) -> None:
    shape, state = model
    (tmp_path / history.ATTENTION_HISTORY).mkdir()
    AttentionHistory(tmp_path, shape, open_shards(corpus, "validation")).record(1, state)
    assert read_history(tmp_path) == {}
    (tmp_path / history.ATTENTION_HISTORY).rmdir()
    (tmp_path / history.ATTENTION_HISTORY).write_text('{"format": 1, "rec')
    assert read_history(tmp_path) == {}


def test_the_report_draws_heads_and_kinds_over_the_steps(runs: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    for name in ("with", "without"):
        shutil.copytree(runs[name], tmp_path / name)
        config = PretrainConfig.model_validate(settings(corpus, tmp_path / name))
        (tmp_path / name / "config.yaml").write_text(dump(config))
    # Heads of so short a run hardly differ.
    found = read_history(runs["with"])
    found["records"][-1]["shares"]["previous"] = [[0.1, 0.2], [0.7, 0.4]]
    (tmp_path / "with" / history.ATTENTION_HISTORY).write_text(json.dumps(found))
    page = Page(report.write_report([tmp_path / "with"], tmp_path / "report.html").read_text())
    page.assert_stands_alone()
    assert page.html.count('<svg class="matrix"') == 3 * 3  # heads, evaluations
    titles = [curve["name"] for chart in page.charts for curve in chart]
    assert titles.count("mean of all heads") == len(history.RECORDED_KINDS) + 1
    kinds = [chart for chart in page.charts if chart[-1]["name"] == "mean of all heads"]
    strongest, mean = kinds[history.RECORDED_KINDS.index("previous")]
    assert strongest["name"] == "head 2-1"
    assert [curve["points"][-1][3] for curve in (strongest, mean)] == [percent(0.7), percent(0.35)]
    assert "Head 2-1: 70% to the previous token" in page.text
    assert 'id="heads"' not in page.html, "no export"
    hf.export_run(tmp_path / "with", tmp_path / "with" / "export")
    page = Page(report.write_report([tmp_path / "with"], tmp_path / "report.html").read_text())
    page.assert_stands_alone()
    assert 'id="heads"' in page.html
    assert "<h2>Attention</h2>" not in report.write_report([tmp_path / "without"], tmp_path / "no.html").read_text()


def test_a_picture_shades_the_fields_by_the_root_of_their_weight() -> None:
    svg = progress.matrix_svg(np.array([[1.0, 0.0], [0.25, 0.25]], np.float32), "two")
    assert '<path opacity="1.00" d="M0 0h1v1H0z"/>' in svg
    assert '<path opacity="0.50" d="M0 1h2v1H0z"/>' in svg
    assert svg.count("<path") == 2


def test_pictures_are_of_different_heads_for_different_kinds() -> None:
    heads = [[0, 0], [0, 1], [1, 0], [1, 1]]
    shares: dict[str, Any] = {kind: [[0.1, 0.1], [0.1, 0.1]] for kind in history.RECORDED_KINDS}
    shares["previous"] = [[0.9, 0.8], [0.1, 0.1]]
    shares["next"] = [[0.5, 0.4], [0.1, 0.1]]
    chosen = progress.distinct_heads(heads, shares, dict.fromkeys(history.RECORDED_KINDS, 0.1))
    assert chosen[:2] == [(0, "previous", 0.9), (1, "next", 0.4)]
    assert len({number for number, *_ in chosen}) == len({kind for _, kind, _ in chosen}) == 3

"""An objective is one file: a toy is trained, recorded, shown, planned, exported and read without another change."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from corpora import make_corpus

from pretrain.checkpoint import hf, store
from pretrain.checkpoint.released import read_released
from pretrain.config import PretrainConfig, load_config
from pretrain.objectives import REGISTRY, MaskedTokens, make_objective, objective_metrics
from pretrain.planning import estimate
from pretrain.reporting import report
from tests.distributed import run_workers
from tests.starts import Start, make_starts, pretraining, records
from tests.toy_objective import Places

STEPS = 3
ROWS = 300  # of the vocabulary


def is_places(config: PretrainConfig) -> bool:
    return config.name == "places"


def starts(given: list[Start]) -> list[str]:
    from pretrain.run import train

    REGISTRY["tests.toy_objective"] = is_places
    return make_starts(train.main, given)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY, "tests.toy_objective", is_places)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, stopped once."""
    root = tmp_path_factory.mktemp("toy")
    folder = root / "run"
    corpus = make_corpus(root / "corpus", documents=60, vocabulary_size=ROWS)
    values = pretraining(
        corpus, folder, [(32, 8, STEPS)], name="places", pairs__objective="none", evaluation__every_steps=1
    )
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    ((stopped, *resumed),) = run_workers(1, starts, [Start(values, stop_at=2), Start(values, resume=True)])
    assert stopped.startswith("StoppedError")
    assert resumed == [""]
    return folder


def test_it_is_trained_and_its_metrics_are_recorded(run: Path) -> None:
    trained = records(run)
    assert [one["step"] for one in trained] == [1, 2, 3]
    for one in (*trained, *records(run, "validation")):
        assert one["loss"] == pytest.approx(one["mlm_loss"] + one["place_loss"])
        assert 0 < one["place_accuracy"] < 1
    assert trained[-1]["place_loss"] < trained[0]["place_loss"]


def test_pages_show_its_metrics(run: Path) -> None:
    page = report.write_report([run], run / "report.html").read_text()
    assert ">Loss of places, nats<" in page
    assert page.count(">Places found<") == 2  # a chart and a tile
    last = records(run, "validation")[-1]
    assert f"Places found      {last['place_accuracy']:.1%}" in report.summary([run])
    assert list(objective_metrics())[-1] == "place_accuracy"


def test_its_cost_is_planned(run: Path) -> None:
    config = load_config(run / "config.yaml")
    places, plain = make_objective(config, ROWS), make_objective(config.model_copy(update={"name": "plain"}), ROWS)
    assert isinstance(places, Places)
    assert type(plain) is MaskedTokens
    more = places.useful_flops([32, 20], 8) - plain.useful_flops([32, 20], 8)
    assert more == 6 * places.head_size * 52
    assert places.trained - plain.trained == places.head_size
    flops = [step_flops(one) for one in (config, plain.config)]
    assert flops[0] == pytest.approx(flops[1] + more / 52 * config.phases[0].global_sequences * 25.6, rel=0.01)
    assert f"{places.trained:,}" in estimate.dry_run(config)


def step_flops(config: PretrainConfig) -> float:
    """Of the only phase, in the table of a dry run's work."""
    return float(estimate.dry_run(config, mean_length=25.6).partition("FLOP/step")[2].split()[0])


def test_its_model_is_exported_and_read(run: Path, tmp_path: Path) -> None:
    from transformers import BertForMaskedLM

    assert hf.export_run(run, tmp_path / "out") == ""
    BertForMaskedLM.from_pretrained(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "masked language modeling and positions" in card
    assert "| Places found |" in card
    assert read_released(run).backbone.keys() == read_released(tmp_path / "out").backbone.keys()
    state = store.read_weights(store.latest(run / "checkpoints") or Path())
    assert "place_weight" in state

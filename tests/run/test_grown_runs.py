"""Runs on several sources: those that go on when sources were added, and what they say of each."""

from pathlib import Path
from typing import Any

import pytest
from corpora import make_corpus

import pretrain
from pretrain.batches.loader import BatchMaker
from pretrain.batches.sampler import held_out_sampler
from pretrain.checkpoint import store
from pretrain.common.errors import InputError
from pretrain.common.files import checkpoint_names
from pretrain.common.run_files import read_fork
from pretrain.config import PretrainConfig, SourceConfig
from pretrain.corpus.prepare import prepare
from pretrain.corpus.shards import TokenShards, open_shards
from pretrain.run.fork import start_fork
from pretrain.run.train import _check_mixtures
from tests.corpus.test_growth import config, source, write_lines
from tests.corpus.test_prepare import text
from tests.distributed import run_workers
from tests.starts import Start, losses, pretraining, records, starts

NAMES = ("one", "two", "three", "four")
ZERO = {"three": 0.0, "four": 0.0}


@pytest.fixture
def sources(tmp_path: Path) -> list[SourceConfig]:
    return [
        source(write_lines(tmp_path / f"{name}.jsonl", [text(1000 * n + seed) for seed in range(50)]))
        for n, name in enumerate(NAMES)
    ]


@pytest.fixture
def corpus(tmp_path: Path, sources: list[SourceConfig]) -> Path:
    prepare(config(tmp_path / "corpus", *sources[:2]), quiet=True)
    return tmp_path / "corpus"


def settings(corpus: Path, run: Path, *phases: dict[str, Any]) -> dict[str, Any]:
    """Phases of 4 and 3 steps, with a checkpoint after each step."""
    values = pretraining(corpus, run, [(32, 8, 4), (64, 4, 3)], checkpoint__every_steps=1)
    values["corpus"]["vocabulary"] = {"size": 200}
    values["checkpoint"]["keep_last"] = 9
    for phase, own in zip(values["phases"], phases, strict=False):
        phase |= own
    return values


def train(values: dict[str, Any], **more: Any) -> str:
    ((error,),) = run_workers(1, starts, [Start(values, **more)])
    return error


def shards_of_others(sources: list[SourceConfig]) -> TokenShards:
    folder = Path(sources[0].path).parent / "others"
    prepare(config(folder, *sources[2:]), quiet=True)
    return open_shards(folder, "train")


def test_a_run_goes_on_with_a_grown_corpus(tmp_path: Path, corpus: Path, sources: list[SourceConfig]) -> None:
    whole = tmp_path / "whole"
    assert train(settings(corpus, whole)) == ""
    prepare(config(corpus, *sources), quiet=True)
    fork = tmp_path / "fork"
    values = {**settings(corpus, fork, {"weights": ZERO}, {"weights": ZERO}), "name": "child"}
    values["fork_from"] = f"{whole}@2"
    assert start_fork(PretrainConfig.model_validate(values))
    assert train(values, resume=True) == ""
    assert losses(fork) == losses(whole), "bit for bit, in the phase that has begun and in the next"
    other = tmp_path / "other"
    mixed = {"weights": {"one": 0, "two": 0, "three": 0.5, "four": 0.5}, "temperature": 0}
    values = {**settings(corpus, other, {"weights": ZERO}, mixed), "name": "other", "fork_from": f"{whole}@5"}
    assert start_fork(PretrainConfig.model_validate(values))
    error = train(values, resume=True)
    assert "has read one and two in phases.1, which now has no weight there" in error
    with pytest.raises(InputError, match=r"has read one and two in phases\.1"):
        pretrain.train(values, no_ray=True)
    assert not checkpoint_names(other)
    assert not read_fork(other)
    state = store.read_state(whole / "checkpoints" / store.name_of(5))
    with pytest.raises(InputError, match=r"has read one and two in phases\.0, which is missing or changed in"):
        _check_mixtures(state, whole, PretrainConfig.model_validate(values), shards_of_others(sources), [[], []])
    values["fork_from"], values["run_dir"] = f"{whole}@4", str(tmp_path / "third")
    assert start_fork(PretrainConfig.model_validate(values))
    assert train(values, resume=True) == ""
    assert losses(tmp_path / "third")[:4] == losses(whole)[:4]
    assert losses(tmp_path / "third")[4] != losses(whole)[4]
    state = store.read_state(tmp_path / "third/checkpoints" / store.name_of(7))
    assert [[name for name, *_ in phase] for phase in state["mixtures"]] == [["one", "two"], ["three", "four"]]
    assert state["validation_set"] == "phase 1, corpus grown 1 time"


CHANGED: list[tuple[list[dict[str, Any]], str]] = [
    ([{}, {}], "has not read three and four in phases.0, which has started. Set phases.0.weights: {three: 0, fo"),
    ([{"weights": {**ZERO, "two": 3}}, {}], "has read the sources of phases.0 in different shares than its weights"),
    ([{"weights": {**ZERO, "two": 0}}, {}], "has read two in phases.0, which now has no weight there"),
    ([{"weights": ZERO, "temperature": 0.5}, {}], "in different shares than its weights, temperature and max_epochs"),
]


def test_what_was_read_may_not_change(tmp_path: Path, corpus: Path, sources: list[SourceConfig]) -> None:
    run = tmp_path / "run"
    assert train(settings(corpus, run), stop_at=2)
    prepare(config(corpus, *sources), quiet=True)
    given = [settings(corpus, run, *phases) for phases in (*(phases for phases, _ in CHANGED), [{"weights": ZERO}, {}])]
    ((*errors, ended),) = run_workers(1, starts, [Start(values, resume=True) for values in given])
    for error, (_, message) in zip(errors, CHANGED, strict=True):
        assert message in error
    assert ended == ""


def test_adding_a_source_changes_no_sample(tmp_path: Path, corpus: Path, sources: list[SourceConfig]) -> None:
    def batches(*phases: dict[str, Any]) -> list[Any]:
        made = PretrainConfig.model_validate(settings(corpus, tmp_path / "run", *phases))
        maker = BatchMaker(open_shards(corpus, "train"), made, 0, seed=3, rank=0, world_size=1)
        steps = [maker.make(first, 8) for first in range(0, 400, 8)]
        return [[batch.input_ids.tolist(), batch.masked_rows.tolist()] for one in steps for batch in one.micro_batches]

    before = batches()
    prepare(config(corpus, *sources[:3]), quiet=True)
    assert batches({"weights": {"three": 0}}) == before
    prepare(config(corpus, *reversed(sources)), quiet=True)
    assert batches({"weights": ZERO}) == before
    assert batches() != before


def test_losses_of_sources_add_up_to_the_mean(tmp_path: Path) -> None:
    """By one worker and by three, of which a small source has fewer sequences than there are workers."""
    sizes: dict[str, Any] = {"documents": 40, "vocabulary_size": 300, "sources": 3, "validation_documents": 12}
    corpus = make_corpus(tmp_path / "corpus", **sizes, weights=(1.0, 1.0, 0.005))
    found = []
    for workers in (1, 3):
        values = pretraining(corpus, tmp_path / f"run-{workers}", [(32, 6, 2)])
        values["evaluation"] = {"every_steps": 2, "sequences": 200}
        assert run_workers(workers, starts, [Start(values)]) == [[""]] * workers
        (one,) = records(tmp_path / f"run-{workers}", "validation")
        found.append(one)
    alone, together = found
    names = [f"source_loss/source-{number}" for number in range(3)]
    assert [name for name in alone if name.startswith("source_loss/")] == names
    assert min(alone[name] for name in names) < alone["loss"] < max(alone[name] for name in names)
    counts = held_out_sampler(open_shards(corpus, "validation"), PretrainConfig.model_validate(values), 0).counts(200)
    assert 0 < counts[2] < 3 < 16 < counts[1]
    for name in (*names, "loss", "mlm_loss", "nsp_loss", "mlm_accuracy"):
        assert together[name] == pytest.approx(alone[name], abs=2e-5)

"""Weights of sources that change from phase to phase."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from corpora import make_corpus

from pretrain.batches.batch import StepBatch
from pretrain.batches.loader import BatchMaker, validation_batches
from pretrain.common.errors import InputError
from pretrain.config import PretrainConfig, load_config
from pretrain.corpus.shards import open_shards
from pretrain.run.preflight import check_corpus
from tests.starts import pretraining

OWN = (1.0, 2.0, 0.5)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora") / "three"
    return make_corpus(folder, documents=40, vocabulary_size=300, sources=3, weights=OWN)


def configured(corpus: Path, *weights: Mapping[str, float]) -> PretrainConfig:
    """A phase for each of `weights`."""
    values = pretraining(corpus, corpus / "run", [(32, 16, 4)] * len(weights))
    for phase, own in zip(values["phases"], weights, strict=True):
        phase["weights"] = dict(own)
    values["corpus"]["vocabulary"]["size"] = 1000
    return PretrainConfig.model_validate(values)


def maker(corpus: Path, config: PretrainConfig, phase: int, **more: Any) -> BatchMaker:
    return BatchMaker(open_shards(corpus, "train"), config, phase, **{"seed": 0, "rank": 0, "world_size": 1, **more})


def counts(made: BatchMaker) -> list[int]:
    """Samples of each source in an epoch."""
    return list(made.sampler.shares)


def same(ours: StepBatch, theirs: StepBatch) -> bool:
    pairs = zip(ours.micro_batches, theirs.micro_batches, strict=True)
    return all(a.input_ids.equal(b.input_ids) and a.masked_rows.equal(b.masked_rows) for a, b in pairs)


def test_a_phase_mixes_by_its_own_weights(corpus: Path) -> None:
    config = configured(corpus, {}, {"source-0": 3, "source-2": 0}, {"source-1": 0.25})
    first, second, third = (counts(maker(corpus, config, phase)) for phase in range(3))
    sizes = [first[0], first[1] // 2, 2 * first[2]]  # by the corpus's weights
    assert first == [sizes[0], 2 * sizes[1], first[2]]
    assert second == [3 * sizes[0], first[1], 0]
    assert third == [first[0], round(sizes[1] / 4), first[2]]


def test_the_corpus_own_weights_change_no_sample(corpus: Path) -> None:
    named = {f"source-{number}": weight for number, weight in enumerate(OWN)}
    plain, spelled = (maker(corpus, configured(corpus, given), 0) for given in ({}, named))
    assert all(same(plain.make(first, 16), spelled.make(first, 16)) for first in (0, 16, 4096))
    other = maker(corpus, configured(corpus, {"source-1": 1}), 0)
    assert not same(plain.make(0, 16), other.make(0, 16))


def test_a_sample_does_not_depend_on_the_workers(corpus: Path) -> None:
    config = configured(corpus, {"source-0": 4, "source-1": 0})
    whole = maker(corpus, config, 0).make(32, 16)
    parts = [maker(corpus, config, 0, rank=rank, world_size=3).make(32, 16) for rank in range(3)]
    lengths = [length for part in parts for batch in part.micro_batches for length in batch.lengths]
    assert sorted(lengths) == sorted(length for batch in whole.micro_batches for length in batch.lengths)
    assert {part.masked for part in parts} == {whole.masked}


def test_evaluations_keep_the_weights_of_the_corpus(corpus: Path) -> None:
    held_out = open_shards(corpus, "validation")
    plain, mixed = (
        validation_batches(held_out, configured(corpus, given), 0, rank=0, world_size=1)
        for given in ({}, {"source-0": 0.0, "source-1": 9.0})
    )
    assert all(same(a, b) for a, b in zip(plain, mixed, strict=True))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"source-7": 1}, "phases.1.weights: 'source-7' is not one of source-0, source-1, source-2; did you mean"),
        ({f"source-{n}": 0 for n in range(3)}, "phases.1.weights: leaves no source. Give one of source-0, source-1"),
    ],
)
def test_weights_that_cannot_be_are_refused(corpus: Path, weights: dict[str, float], message: str) -> None:
    config = configured(corpus, {}, weights)
    for check in (check_corpus, lambda config: maker(corpus, config, 1)):
        with pytest.raises(InputError) as caught:
            check(config)
        assert str(caught.value).startswith(message)


def test_weights_are_settings(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        f"name: trial\ncorpus: {{dir: {corpus}}}\nmodel: {{size: mini}}\n"
        "phases: [{sequence_length: 32, global_sequences: 8, steps: 3, peak_learning_rate: 1e-3, weights: {wiki: 2}}]\n"
    )
    assert load_config(tmp_path / "run.yaml", ["phases.0.weights.books=0.5"]).phases[0].weights == {
        "wiki": 2,
        "books": 0.5,
    }
    with pytest.raises(InputError, match=r"phases\.0\.weights\.wiki"):
        load_config(tmp_path / "run.yaml", ["phases.0.weights.wiki=-1"])

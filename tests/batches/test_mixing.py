"""Weights of sources that change from phase to phase."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import make_corpus, make_vocabulary, write_corpus

from pretrain.batches.batch import StepBatch
from pretrain.batches.loader import BatchMaker, validation_batches
from pretrain.batches.order import Mixture
from pretrain.common.errors import InputError
from pretrain.config import PretrainConfig
from pretrain.corpus.shards import open_shards
from pretrain.planning.text import phase_lines
from pretrain.run.preflight import check_corpus
from tests.starts import pretraining

OWN = (1.0, 2.0, 0.5)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora") / "three"
    return make_corpus(folder, documents=40, vocabulary_size=300, sources=3, weights=OWN)


def planned(corpus: Path, *phases: dict[str, Any], steps: int = 4) -> PretrainConfig:
    """Phases of 16 sequences a step."""
    values = pretraining(corpus, corpus / "run", [(32, 16, steps)] * len(phases))
    for phase, own in zip(values["phases"], phases, strict=True):
        phase |= own
    values["corpus"]["vocabulary"]["size"] = 1000
    return PretrainConfig.model_validate(values)


def configured(corpus: Path, *weights: Mapping[str, float]) -> PretrainConfig:
    return planned(corpus, *({"weights": dict(own)} for own in weights))


def maker(corpus: Path, config: PretrainConfig, phase: int, **more: Any) -> BatchMaker:
    return BatchMaker(open_shards(corpus, "train"), config, phase, **{"seed": 0, "rank": 0, "world_size": 1, **more})


def same(ours: StepBatch, theirs: StepBatch) -> bool:
    pairs = zip(ours.micro_batches, theirs.micro_batches, strict=True)
    return all(a.input_ids.equal(b.input_ids) and a.masked_rows.equal(b.masked_rows) for a, b in pairs)


def test_a_phase_mixes_by_its_own_weights(corpus: Path) -> None:
    config = configured(corpus, {}, {"source-0": 3, "source-2": 0}, {"source-1": 0.25})
    for phase, weights in enumerate(([1, 2, 0.5], [3, 2, 0], [1, 0.25, 0.5])):
        made = maker(corpus, config, phase).sampler
        asked = np.array(weights) * [source.samples for source in made.sources]
        shares = np.array(made.mix.shares)
        assert shares / shares.sum() == pytest.approx(asked / asked.sum(), rel=1e-6)
        assert made.samples_per_epoch == round(asked.sum())


def test_the_corpus_own_weights_change_no_sample(corpus: Path) -> None:
    named = {f"source-{number}": weight for number, weight in enumerate(OWN)}
    plain, spelled = (maker(corpus, configured(corpus, given), 0) for given in ({}, named))
    assert all(same(plain.make(first, 16), spelled.make(first, 16)) for first in (0, 16, 4096))
    other = maker(corpus, configured(corpus, {"source-1": 1}), 0)
    assert not same(plain.make(0, 16), other.make(0, 16))


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
        ({f"source-{n}": 0 for n in range(3)}, "phases.1.weights: all weights are 0. Give one of source-0, source-1"),
    ],
)
def test_weights_that_cannot_be_are_refused(corpus: Path, weights: dict[str, float], message: str) -> None:
    config = configured(corpus, {}, weights)
    for check in (check_corpus, lambda config: maker(corpus, config, 1)):
        with pytest.raises(InputError) as caught:
            check(config)
        assert str(caught.value).startswith(message)


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sources of 160, 40 and 10 documents, of which the second has long ones."""
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("corpora") / "uneven"

    def documents(count: int, sentences: int) -> list[list[np.ndarray]]:
        return [[random.integers(60, 290, 9) for _ in range(random.integers(1, sentences))] for _ in range(count)]

    splits = {"train": [(0, documents(160, 6)), (1, documents(40, 60)), (2, documents(10, 12))]}
    return write_corpus(folder, splits, make_vocabulary(300), weights=(1.0, 1.0, 1.0))


def read_tokens(made: BatchMaker, samples: int) -> np.ndarray:
    """Ordinary tokens that the first samples read of each source."""
    plan = made.sampler.plan(np.arange(samples))
    shards = np.array([shard.source for shard in made.sampler.shards.shards])
    return np.bincount(shards[plan.shard_a], plan.content_length, 3)


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ({"temperature": 0.0, "weights": {"source-0": 0.7, "source-2": 0.3}}, lambda size: np.array([0.7, 0.0, 0.3])),
        ({"temperature": 0.0}, lambda size: np.ones(3)),
        ({"temperature": 0.3}, lambda size: size**0.3),
        ({"temperature": 0.5, "weights": {"source-1": 2}}, lambda size: size**0.5 * np.array([1, 2, 1])),
        ({}, lambda size: size),
    ],
)
def test_shares_are_of_tokens(uneven: Path, phase: dict[str, Any], expected: Any) -> None:
    made = maker(uneven, planned(uneven, phase), 0)
    sizes = np.zeros(3)
    for shard in made.sampler.shards.shards:
        sizes[shard.source] += len(shard.tokens)
    read, wanted = read_tokens(made, 8_000), expected(sizes)
    assert read / read.sum() == pytest.approx(wanted / wanted.sum(), abs=0.01)
    shares = [one.token_share for one in made.sampler.readings(20_000)]
    assert shares == pytest.approx((wanted / wanted.sum())[wanted > 0].tolist(), abs=0.002)


def test_any_window_has_the_shares_to_within_a_few(uneven: Path) -> None:
    made = maker(uneven, planned(uneven, {"temperature": 0.3}), 0)
    parts = np.array(made.sampler.mix.shares) / sum(made.sampler.mix.shares)
    source, before = made.sampler._mixture.locate(np.arange(200_000))
    counts = np.cumsum(np.eye(3)[source], axis=0)
    for window in (7, 100, 5000):
        found = counts[window:] - counts[:-window]
        assert np.abs(found - window * parts).max() <= 2
    for number in range(3):
        own = before[source == number]
        assert (own == np.arange(len(own))).all(), "each of its samples in its order"


def test_a_cap_gives_the_rest_to_the_others(uneven: Path) -> None:
    phases = [{"temperature": 0.0, "max_epochs": 1}, {"temperature": 0.0, "max_epochs": 2}, {"temperature": 0.5}]
    config = planned(uneven, *phases, steps=10)
    first, second, third = (maker(uneven, config, number).sampler for number in range(3))
    one, two, three = first.readings(160)
    assert [reading.capped for reading in (one, two, three)] == [False, False, True]
    assert three.epochs == pytest.approx(1, abs=0.05)
    assert one.token_share == pytest.approx(two.token_share, abs=0.02)
    assert second.readings(160)[2].total_epochs == pytest.approx(2, abs=0.05)
    assert three.line.startswith("source-2 ")
    assert three.line.endswith("capped by max_epochs")
    assert third.mix.capped == (False, False, False)
    assert third.readings(160)[2].total_epochs > 2.5


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        (
            {"temperature": 0.0, "weights": {"source-0": 0.5, "source-2": 0.5}, "max_epochs": 2},
            r"phases\.0\.max_epochs \(2\): the weight of source-2 requires \d+ of its sequences, but only \d+ are left",
        ),
        ({"max_epochs": 0.01}, r"phases\.0\.max_epochs \(0\.01\): the phase reads 160 sequences, but its sources have"),
        ({"weights": {"source-0": 0}, "max_epochs": 0.1}, r"reads 160 sequences, but its sources have only \d+ left"),
    ],
)
def test_a_cap_that_cannot_be_kept_is_an_error(uneven: Path, phase: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        maker(uneven, planned(uneven, phase, steps=10), 0)


def test_the_dry_run_says_what_phases_read(uneven: Path) -> None:
    config = planned(uneven, {}, {"temperature": 0.0, "max_epochs": 1}, steps=10)
    first, second = phase_lines(open_shards(uneven, "train"), config)
    assert first.startswith("phases.0: source-0 ")
    assert "since the start of the run, capped by max_epochs" in second


def test_a_source_without_a_share_changes_no_sample() -> None:
    """Of whatever number of sources; it may have been added since."""
    for shares in ([5, 3], [7, 2, 4], [1, 2, 3, 4, 5, 6]):
        alone, samples = Mixture(shares), np.arange(1000)
        more = Mixture([*shares[:2], 0, *shares[2:], 0, 0])
        source, before = alone.locate(samples)
        other, its_before = more.locate(samples)
        assert (np.where(source < 2, source, source + 1) == other).all()
        assert (before == its_before).all()
        counts = more.counts(777)
        assert [*counts[:2], *counts[3 : 1 + len(shares)]] == alone.counts(777)

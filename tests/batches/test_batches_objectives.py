"""Objectives besides BERT's own: schedules of the masking share, spans, RoBERTa's inputs, sentence order."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from corpora import make_corpus
from numbered import SPECIAL, Text, numbered, random_documents, sampler

from pretrain.batches.loader import BatchMaker, validation_batches
from pretrain.config import PretrainConfig
from pretrain.corpus.shards import TokenShards, open_shards
from tests.batches.test_loader import global_batches, run_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus") / "c", documents=60, vocabulary_size=300)


@pytest.fixture(scope="module")
def shards(folder: Path) -> TokenShards:
    return open_shards(folder, "train")


def maker(shards: TokenShards, config: PretrainConfig, phase: int = 0) -> BatchMaker:
    return BatchMaker(shards, config, phase, seed=config.seed, rank=0, world_size=1)


def masked_share(shards: TokenShards, config: PretrainConfig, phase: int, step: int) -> float:
    """Of the batch of one step: masked tokens over all tokens."""
    batch = maker(shards, config, phase).make(24 * step, 24)
    return batch.masked / batch.tokens


def test_the_share_falls_linearly_over_the_steps_of_a_phase(shards: TokenShards) -> None:
    second = {"masking_probability": 0.2, "final_masking_probability": 0.15, "steps": 100}
    falls = [{"final_masking_probability": 0.2, "steps": 200}, second]
    config = run_config(phases=falls, masking={"probability": 0.3})
    assert config.masking_shares(0) == pytest.approx((0.3, 0.2))
    assert config.masking_shares(1) == pytest.approx((0.2, 0.15))
    for phase, step, expected in ((0, 0, 0.3), (0, 100, 0.25), (0, 199, 0.2), (1, 0, 0.2), (1, 99, 0.15)):
        assert masked_share(shards, config, phase, step) == pytest.approx(expected, abs=0.012)


def test_each_sequence_has_the_share_of_its_number(shards: TokenShards) -> None:
    config = run_config(steps=10, phases=[{"masking_probability": 0.5, "final_masking_probability": 0.1}])
    made = maker(shards, config)
    for number in (0, 60, 120, 239):
        batch = made.make(number, 1)
        length = batch.micro_batches[0].lengths[0]
        share = 0.5 - 0.4 * number / 240
        assert batch.masked == max(1, round(share * length))


def test_a_phase_keeps_a_share_of_its_own(shards: TokenShards) -> None:
    config = run_config(steps=5, phases=[{}, {"masking_probability": 0.05}], masking={"probability": 0.3})
    assert [config.masking_shares(phase) for phase in (0, 1)] == [(0.3, 0.3), (0.05, 0.05)]
    for phase, expected in ((0, 0.3), (1, 0.05)):
        for step in (0, 4):
            assert masked_share(shards, config, phase, step) == pytest.approx(expected, abs=0.012)
    falling = {"final_masking_probability": 0.1}
    config = run_config(steps=5, phases=[{"masking_probability": 0.5}, falling], masking={"probability": 0.2})
    assert [config.masking_shares(phase) for phase in (0, 1)] == [(0.5, 0.5), (0.2, 0.1)]
    assert (config.held_out_masking_share, config.largest_masking_share) == (pytest.approx(0.1), 0.5)


def test_held_out_sequences_are_masked_as_at_the_end_of_the_run(folder: Path) -> None:
    held_out = open_shards(folder, "validation")
    falls = [{"final_masking_probability": 0.15}] * 2
    constant = run_config(phases=[{}, {}], evaluation=30, masking={"probability": 0.15})
    falling = run_config(phases=falls, evaluation=30, masking={"probability": 0.4})
    for phase in (0, 1):
        both = (validation_batches(held_out, config, phase, rank=0, world_size=1) for config in (constant, falling))
        expected, found = (global_batches([batches]) for batches in both)
        assert found == expected


def test_data_past_the_end_of_a_phase_has_the_last_share(shards: TokenShards) -> None:
    """A rollback skips data, so that numbers continue past the phase's own."""
    config = run_config(phases=[{"masking_probability": 0.4, "final_masking_probability": 0.2}])
    assert masked_share(shards, config, 0, 9) == pytest.approx(0.2, abs=0.012)


def test_sentence_order_swaps_the_segments_of_one_document() -> None:
    """Lan et al. 2020, section 3.1: the same two neighboring segments, in order (0) or swapped (1)."""
    shards = numbered([random_documents(60, 1), random_documents(80, 2)])
    text, made = Text(shards), sampler(shards, 64, objective="sop")
    plan = made.plan(np.arange(3000))
    rows = made.gather(plan)
    assert made.special_tokens == 3
    for number, (begin, end) in enumerate(itertools.pairwise(rows.starts)):
        ids = rows.input_ids[begin:end]
        middle = np.flatnonzero(ids == SPECIAL["sep"])[0]
        a, b = ids[1:middle], ids[middle + 1 : -1]
        assert text.document[a[0]] == text.document[a[-1]] == text.document[b[0]] == text.document[b[-1]]
        assert (a[0] < b[0]) == (plan.label[number] != 1)
        first, second = (a, b) if a[0] < b[0] else (b, a)
        assert second[0] == first[-1] + 1
        assert np.array_equal(rows.token_types[begin:end], np.arange(len(ids)) > middle)
    labels = plan.label[plan.label >= 0]
    assert labels.mean() == pytest.approx(0.5, abs=0.05)


def test_one_document_is_enough_for_sentence_order() -> None:
    assert sampler(numbered([[[5, 5]]]), objective="sop").samples_per_epoch == 1


def packed(shards: TokenShards, length: int = 64, **pairs):
    return sampler(shards, length, objective="none", input_format="full_sentences", **pairs)


def packed_documents(made, samples: np.ndarray):
    """Each sample as the pieces between its separators, after checking its layout."""
    plan = made.plan(samples)
    rows = made.gather(plan)
    for number, (begin, end) in enumerate(itertools.pairwise(rows.starts)):
        ids = rows.input_ids[begin:end]
        assert len(ids) == plan.lengths[number] <= made.capacity + 2
        assert (ids[0], ids[-1]) == (SPECIAL["cls"], SPECIAL["sep"])
        assert np.array_equal(ids < 5, ~rows.ordinary[begin:end])
        assert not rows.token_types[begin:end].any()
        assert np.array_equal(rows.positions[begin:end], np.arange(len(ids)))
        separators = np.flatnonzero(ids == SPECIAL["sep"])
        yield ([ids[low + 1 : high] for low, high in itertools.pairwise((0, *separators))])


@pytest.mark.parametrize("length", [16, 64, 256])
def test_full_sentences_go_on_across_documents(length: int) -> None:
    """Liu et al. 2019, section 4.2: contiguous full sentences, a separator between documents, full up to a sentence."""
    documents = [random_documents(60, 1, longest=5), random_documents(80, 2, longest=30), [[3], [2], [300], [4]]]
    shards = numbered(documents)
    text, made = Text(shards), packed(shards, length, short_share=0.0)
    counts = []
    for pieces in packed_documents(made, np.arange(2 * made.samples_per_epoch)):
        counts.append(len(pieces))
        tokens = np.concatenate(pieces)
        assert np.array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens)))
        assert [len(set(text.document[piece])) for piece in pieces] == [1] * len(pieces)
        assert len({int(text.document[piece[0]]) for piece in pieces}) == len(pieces)
    assert max(counts) > (2 if length > 16 else 1)


def test_full_sentences_fill_sequences_with_short_documents() -> None:
    shards = numbered([[[5, 7]] * 2000])
    made = packed(shards, 128, short_share=0.0)
    alone = sampler(shards, 128, objective="none", short_share=0.0)
    assert made.samples_per_epoch < alone.samples_per_epoch / 5

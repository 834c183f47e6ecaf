"""Balancing and loading: the same global batch for any number of ranks (invariants 1, 2 and 3)."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from corpora import make_corpus

from pretrain.batches.batch import MicroBatch, StepBatch
from pretrain.batches.loader import BatchMaker, Loader, held_out_texts, validation_batches
from pretrain.common.errors import InputError
from pretrain.config import PretrainConfig
from pretrain.corpus.shards import TokenShards, open_shards
from pretrain.run.train import largest_lengths


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_corpus(
        tmp_path_factory.mktemp("corpus") / "c", documents=30, sources=2, weights=(1.0, 0.5), vocabulary_size=300
    )


@pytest.fixture(scope="module")
def shards(folder) -> TokenShards:
    return open_shards(folder, "train")


def run_config(*, length=64, sequences=24, steps=6, budget=512, evaluation=100, phases=None, **sections):
    """One phase, or one for each of `phases`, which say what differs in it."""
    phase = {"sequence_length": length, "global_sequences": sequences, "steps": steps, "peak_learning_rate": 1e-4}
    values = {
        "name": "test",
        "corpus": {"dir": "nowhere"},
        "phases": [{**phase, **changes} for changes in phases or [{}]],
        "engine": {"micro_batch_tokens": budget},
        "evaluation": {"sequences": evaluation},
    }
    return PretrainConfig.model_validate(values | sections)


def load(shards, config, *, world_size=1, start_step=0) -> list[list[StepBatch]]:
    """Every rank's batches."""
    loaders = [
        Loader(shards, config, 0, rank=rank, world_size=world_size, start_step=start_step) for rank in range(world_size)
    ]
    return [list(loader) for loader in loaders]


def contents(micro: MicroBatch) -> list[tuple]:
    """All there is to know about each sequence of a micro-batch."""
    masked = dict(zip(micro.masked_rows.tolist(), micro.masked_labels.tolist(), strict=True))
    result = []
    for number, (begin, end) in enumerate(itertools.pairwise(micro.cu_seqlens.tolist())):
        fields = (micro.input_ids, micro.token_types, micro.positions, micro.token_keys)
        labels = tuple(masked.get(row, -100) for row in range(begin, end))
        nsp = int(micro.nsp_labels[number]) if len(micro.nsp_labels) else -1
        result.append((*(tuple(field[begin:end].tolist()) for field in fields), labels, nsp))
    return result


def global_batches(ranks: list[list[StepBatch]]) -> list[Counter]:
    """Each step's sequences over all ranks, in no order."""
    return [
        Counter(one for batch in step for micro in batch.micro_batches for one in contents(micro))
        for step in zip(*ranks, strict=True)
    ]


def test_micro_batches_keep_their_contract(shards):
    config = run_config()
    for batch in load(shards, config)[0]:
        for micro in batch.micro_batches:
            total, count = sum(micro.lengths), len(micro.lengths)
            assert micro.lengths == tuple(sorted(micro.lengths))
            assert total <= 512
            assert micro.cu_seqlens.tolist() == [0, *itertools.accumulate(micro.lengths)]
            for field in (micro.input_ids, micro.token_types, micro.positions, micro.token_keys):
                assert field.shape == (total,)
            assert micro.nsp_labels.shape == (count,)
            assert micro.masked_rows.shape == micro.masked_labels.shape
            assert {micro.cu_seqlens.dtype, micro.token_keys.dtype} == {torch.int32}
            wide = (micro.input_ids, micro.token_types, micro.positions, micro.masked_rows, micro.masked_labels)
            assert {field.dtype for field in (*wide, micro.nsp_labels)} == {torch.int64}
            assert (micro.input_ids[micro.cu_seqlens[:-1].long()] == 2).all()
    without = load(shards, run_config(pairs={"objective": "none"}))[0]
    assert all(len(micro.nsp_labels) == 0 for batch in without for micro in batch.micro_batches)


FALLING = {"masking_probability": 0.3, "final_masking_probability": 0.15}
WAYS = {
    "tokens": {},
    "whole words": {"masking": {"scheme": "whole_words"}},
    "falling share": {"phases": [FALLING]},
    "falling share of words": {"phases": [FALLING], "masking": {"scheme": "whole_words"}},
    "sentence order": {"pairs": {"objective": "sop"}},
    "full sentences": {
        "pairs": {"objective": "none", "input_format": "full_sentences"},
        "masking": {"probability": 0.99},
    },
    "weights": {"phases": [{"weights": {"source-0": 4, "source-1": 0.5}}]},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_global_batch_is_the_same_for_any_world_micro_batch_and_restart(shards, way):
    reference = load(shards, run_config(**WAYS[way]))
    expected = global_batches(reference)
    assert [sum(step.values()) for step in expected] == [24] * 6
    for world_size, budget, start in ((2, 512, 0), (3, 256, 0), (1, 128, 2), (4, 64, 5), (24, 512, 3)):
        ranks = load(shards, run_config(budget=budget, **WAYS[way]), world_size=world_size, start_step=start)
        assert global_batches(ranks) == expected[start:]
        for step, batches in enumerate(zip(*ranks, strict=True), start):
            assert len({len(batch.micro_batches) for batch in batches}) == 1
            micros, alone = [micro for batch in batches for micro in batch.micro_batches], reference[0][step]
            sums = (sum(len(micro.input_ids) for micro in micros), sum(len(micro.masked_rows) for micro in micros))
            assert (sum(len(micro.lengths) for micro in micros), *sums) == (24, alone.tokens, alone.masked)
            for batch in batches:
                assert (batch.sequences, batch.tokens, batch.masked) == (24, *sums)
                assert (batch.epoch, batch.first_sample) == (alone.epoch, alone.first_sample)


def test_every_sample_of_an_epoch_exactly_once_at_any_number_of_workers(shards):
    per_epoch = BatchMaker(shards, run_config(), 0, seed=0, rank=0, world_size=1).samples_per_epoch
    steps = 2 * per_epoch // 24 + 1  # batches straddle the epochs
    config = run_config(steps=steps)
    one = [s for step in global_batches(load(shards, config)) for s in step.elements()]
    three = global_batches(load(shards, config, world_size=3))
    assert Counter(one) == sum(three, Counter())
    assert len(one) == 24 * steps
    # Token keys are unique to samples: none repeats in this epoch or the next.
    assert len({sample[3] for sample in one}) == len(one)
    batches = load(shards, config)[0]
    assert [batch.epoch for batch in batches] == [24 * step // per_epoch for step in range(steps)]
    alone = BatchMaker(shards, run_config(budget=64), 0, seed=0, rank=0, world_size=1)
    singles = Counter(s for i in range(len(one)) for m in alone.make(i, 1).micro_batches for s in contents(m))
    assert singles == Counter(one)


def test_seed_and_epoch_change_the_samples(shards):
    base, other = (global_batches(load(shards, run_config(seed=seed))) for seed in (0, 1))
    assert not sum(base, Counter()) & sum(other, Counter())


@pytest.mark.parametrize("budget", [120, 125, 128])
def test_the_rehearsed_micro_batch_is_as_large_as_any(shards, budget):
    config = run_config(budget=budget)
    largest = largest_lengths(config, 1)
    assert sum(largest) == budget
    assert max(sum(micro.lengths) for step in load(shards, config)[0] for micro in step.micro_batches) > budget - 8


def test_validation_batches_are_fixed(folder, shards, caplog):
    held_out = open_shards(folder, "validation")
    known = BatchMaker(held_out, run_config(), 0, seed=0, rank=0, world_size=1).samples_per_epoch
    expected = None
    for world_size, budget, seed in ((1, 512, 0), (1, 256, 7), (3, 512, 3), (1, 64, 0), (3, 64, 0), (13, 64, 0)):
        config = run_config(budget=budget, seed=seed, evaluation=50)
        ranks = [
            validation_batches(held_out, config, 0, rank=rank, world_size=world_size) for rank in range(world_size)
        ]
        batches = sum(global_batches(ranks), Counter())
        assert sum(batches.values()) == 50 == sum(batch.sequences for batch in ranks[0])
        assert expected in (None, batches)
        expected = batches
    everything = validation_batches(held_out, run_config(evaluation=10**6), 0, rank=0, world_size=1)
    assert sum(batch.sequences for batch in everything) == known
    assert validation_batches(replace(shards, shards=[]), run_config(), 0, rank=0, world_size=1) == []
    assert "not evaluated" not in caplog.text
    validation_batches(held_out, run_config(evaluation=1), 0, rank=0, world_size=1)
    assert "held-out text of source-0 is not evaluated" in caplog.text


def masked_share(shards: TokenShards, config: PretrainConfig, phase: int, step: int) -> float:
    """Of the batch of one step: masked tokens over all tokens."""
    batch = BatchMaker(shards, config, phase, seed=0, rank=0, world_size=1).make(24 * step, 24)
    return batch.masked / batch.tokens


def test_the_share_falls_linearly_over_the_steps_of_a_phase(shards):
    second = {"masking_probability": 0.2, "final_masking_probability": 0.15, "steps": 100}
    falls = [{"final_masking_probability": 0.2, "steps": 200}, second]
    config = run_config(phases=falls, masking={"probability": 0.3})
    assert config.masking_shares(0) == pytest.approx((0.3, 0.2))
    assert config.masking_shares(1) == pytest.approx((0.2, 0.15))
    for phase, step, expected in ((0, 0, 0.3), (0, 100, 0.25), (0, 199, 0.2), (1, 0, 0.2), (1, 99, 0.15)):
        assert masked_share(shards, config, phase, step) == pytest.approx(expected, abs=0.012)


def test_each_sequence_has_the_share_of_its_number(shards):
    config = run_config(steps=10, phases=[{"masking_probability": 0.5, "final_masking_probability": 0.1}])
    made = BatchMaker(shards, config, 0, seed=0, rank=0, world_size=1)
    for number in (0, 60, 120, 239):
        batch = made.make(number, 1)
        length = batch.micro_batches[0].lengths[0]
        share = 0.5 - 0.4 * number / 240
        assert batch.masked == max(1, round(share * length))


def test_a_phase_keeps_a_share_of_its_own(shards):
    config = run_config(steps=5, phases=[{}, {"masking_probability": 0.05}], masking={"probability": 0.3})
    assert [config.masking_shares(phase) for phase in (0, 1)] == [(0.3, 0.3), (0.05, 0.05)]
    for phase, expected in ((0, 0.3), (1, 0.05)):
        for step in (0, 4):
            assert masked_share(shards, config, phase, step) == pytest.approx(expected, abs=0.012)
    falling = {"final_masking_probability": 0.1}
    config = run_config(steps=5, phases=[{"masking_probability": 0.5}, falling], masking={"probability": 0.2})
    assert [config.masking_shares(phase) for phase in (0, 1)] == [(0.5, 0.5), (0.2, 0.1)]
    assert config.largest_masking_share == 0.5


def test_held_out_sequences_have_one_share_whatever_the_phases_say(folder):
    """So losses compare across the phases of a run, and with a fork that has others."""
    held_out = open_shards(folder, "validation")
    falls = [
        {"masking_probability": 0.3, "final_masking_probability": 0.1},
        {"masking_probability": 0.05, "max_predictions": 2},
    ]
    constant = run_config(phases=[{}, {}], evaluation=30, masking={"probability": 0.15})
    falling = run_config(phases=falls, evaluation=30, masking={"probability": 0.15})
    for phase in (0, 1):
        both = (validation_batches(held_out, config, phase, rank=0, world_size=1) for config in (constant, falling))
        expected, found = (global_batches([batches]) for batches in both)
        assert found == expected


def test_held_out_text_that_is_too_little_is_named(tmp_path):
    one = make_corpus(tmp_path / "one", documents=30, vocabulary_size=300, validation_documents=1)
    with pytest.raises(
        InputError, match=r"held-out text of .*: 1 document in its largest source, but .*hold out more documents"
    ):
        validation_batches(open_shards(one, "validation"), run_config(), 0, rank=0, world_size=1)


@pytest.mark.parametrize("budget", [512, 64])
def test_fewer_held_out_samples_than_ranks_are_evaluated_by_every_rank(folder, budget):
    held_out = open_shards(folder, "validation")
    config = run_config(budget=budget, evaluation=2)
    alone = validation_batches(held_out, config, 0, rank=0, world_size=1)
    ranks = [validation_batches(held_out, config, 0, rank=rank, world_size=5) for rank in range(5)]
    expected = global_batches([alone])
    assert [global_batches([batches]) for batches in ranks] == [expected] * 5
    # Losses are sums over all ranks, divided by these counts (invariant 3), so they are those of one rank.
    for batches in ranks:
        assert len(batches[0].micro_batches) == len(alone[0].micro_batches)
        assert (batches[0].sequences, batches[0].tokens) == (10, 5 * alone[0].tokens)
        assert batches[0].masked == 5 * alone[0].masked


def test_large_evaluations_come_in_parts(folder):
    held_out = open_shards(folder, "train")
    config = run_config(length=9, evaluation=5000, budget=4096)
    parts = validation_batches(held_out, config, 0, rank=1, world_size=3)
    assert sum(part.sequences for part in parts) == 5000
    assert len(parts) > 2
    for text in ("source-0", "source-1"):
        own = [part for part in parts if part.text == text]
        assert len(own) == sum(part.sequences for part in own) // 1024
        assert [part.first_sample for part in own[1:2]] == [part.sequences for part in own[:-1]][:1]


def test_batches_of_held_out_text_have_one_source_or_several_small_ones(folder):
    held_out = open_shards(folder, "validation")
    mixed = BatchMaker(held_out, run_config(), 0, seed=0, rank=0, world_size=1, held_out=True)
    counts = mixed.sampler.counts(60)
    for least, names in ((1, ["source-0", "source-1"]), (min(counts) + 1, ["source-0", "source-1"]), (99, None)):
        texts = held_out_texts(held_out, counts, least)
        assert [name for name, _ in texts] == (names or ["source-0 + source-1"])
        assert np.sum([own for _, own in texts], axis=0).tolist() == counts
    parts = validation_batches(held_out, run_config(evaluation=60), 0, rank=0, world_size=1)
    assert [part.text for part in parts] == ["source-0", "source-1"]
    assert sum(global_batches([parts]), Counter()) == sum(global_batches([[mixed.make(0, 60)]]), Counter())


def test_batches_that_cannot_be_are_refused(shards):
    cases = [
        (run_config(sequences=3), 4, r"\(3\) is less than the number of workers \(4\)"),
        (run_config(sequences=100_000), 1, "holds only"),
        (run_config(sequences=5, budget=64), 4, r"\(5\) is not a multiple of the workers \(4\)"),
    ]
    for config, world_size, message in cases:
        with pytest.raises(InputError, match=message) as caught:
            Loader(shards, config, 0, rank=0, world_size=world_size)
        assert str(caught.value).startswith("phases.0.global_sequences")
        assert "\n" not in str(caught.value)


def test_errors_of_the_background_thread_reach_the_consumer(shards):
    bad = replace(shards.shards[0], tokens=np.full(len(shards.shards[0].tokens), 9999, np.uint16))
    loader = Loader(replace(shards, shards=[bad, *shards.shards[1:]]), run_config(), 0, rank=0, world_size=1)
    with pytest.raises(InputError, match="token id 9999"):
        list(loader)
    assert not loader.thread.is_alive()


def test_closing_stops_the_thread_and_waiting_is_counted(shards):
    loader = Loader(shards, run_config(steps=10**6), 0, rank=0, world_size=1, prefetch=1)
    next(loader)
    assert loader.stall_seconds > 0
    loader.close()
    assert not loader.thread.is_alive()
    assert list(loader) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a GPU")
def test_pinned_batches_are_the_same_ones(shards: TokenShards) -> None:
    plain, pinned = (Loader(shards, run_config(), 0, rank=0, world_size=1, pin_memory=on) for on in (False, True))
    for first, second in itertools.islice(zip(plain, pinned, strict=True), 2):
        for one, other in zip(first.micro_batches, second.micro_batches, strict=True):
            assert other.input_ids.is_pinned()
            assert torch.equal(one.input_ids, other.to(torch.device("cuda")).input_ids.cpu())


def test_threads_pin_on_the_gpu_of_the_one_that_trains(shards: TokenShards, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[str, int]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: chosen.append((threading.current_thread().name, gpu)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)
    loader = Loader(shards, run_config(), 0, rank=0, world_size=1, pin_memory=True)
    next(loader)
    loader.close()
    assert set(chosen) == {("loader-0", 3)}

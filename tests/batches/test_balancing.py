"""Balancing in two levels, and counts that ranks exchange (invariants 1, 2 and 3)."""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from corpora import make_corpus
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pretrain.batches import balancing
from pretrain.batches.balancing import Assignment, balance
from pretrain.batches.batch import StepBatch
from pretrain.batches.exchange import Exchange
from pretrain.batches.loader import BatchMaker, Loader
from pretrain.checkpoint.writing import merge_entries
from pretrain.config import ModelConfig, PretrainConfig
from pretrain.corpus.shards import TokenShards, open_shards
from pretrain.model.heads import PretrainingModel
from pretrain.training.engine import RankGroup, buckets
from pretrain.training.optim import parameter_groups
from tests.batches.test_loader import contents, global_batches, run_config
from tests.bench import scale
from tests.distributed import run_workers

SECTIONS = {
    "tokens": {},
    "whole words": {"masking": {"scheme": "whole_words"}},
    "one segment": {"pairs": {"objective": "none"}},
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> TokenShards:
    folder = make_corpus(tmp_path_factory.mktemp("corpus") / "c", documents=30, vocabulary_size=300)
    return open_shards(folder, "train")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of about 12 sequences."""
    monkeypatch.setattr(balancing, "PART_SEQUENCES", 12)


def micro_batches(assignment: Assignment, ranks: int) -> list[np.ndarray]:
    return [assignment.members(number) for number in range(ranks * assignment.micro_batches)]


def config(name: str, **more) -> PretrainConfig:
    return run_config(sequences=48, **SECTIONS[name], **more)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), world_size=st.integers(1, 9), longest=st.integers(1, 128), slots=st.integers(1, 9))
def test_dealing_is_complete_near_even_and_within_budget(data, world_size, longest, slots):
    lengths = np.array(data.draw(st.lists(st.integers(1, longest), min_size=world_size, max_size=150)), dtype=np.int64)
    budget = max(longest, lengths.max()) * slots
    assume(slots >= 2 or len(lengths) % world_size == 0)
    assignment = micro_batches(balance(lengths, world_size, budget), world_size)
    assert sorted(np.concatenate(assignment).tolist()) == list(range(len(lengths)))
    loads = np.array([lengths[members].sum() for members in assignment])
    assert loads.min() > 0
    assert loads.max() <= budget
    # LPT: taking the last sequence off the fullest leaves it no fuller than the emptiest.
    assert loads.max() - loads.min() <= lengths.max()
    smallest = lengths[assignment[int(loads.argmax())]].min()
    assert loads.max() - smallest <= loads.min()
    assert all((np.diff(lengths[members]) >= 0).all() for members in assignment)


def test_dealing_takes_no_more_micro_batches_than_needed():
    for lengths, ranks, budget, expected in (
        (np.full(64, 128), 2, 4096, 1),
        (np.full(65, 128), 2, 4096, 2),
        (np.full(8, 100), 8, 100, 1),
        (np.full(5, 39), 2, 100, 2),  # 195 tokens, but three of 39 do not fit into 100
    ):
        assert balance(lengths, ranks, budget).micro_batches == expected
    even = np.random.default_rng(0).integers(20, 129, 4096)
    loads = np.array([even[members].sum() for members in micro_batches(balance(even, 8, 8192), 8)])
    assert loads.max() - loads.min() <= even.min()


def one_by_one(lengths: np.ndarray, count: int) -> list[list[int]]:
    """Graham's rule with a queue of bins, one sequence at a time."""
    bins: list[list[int]] = [[] for _ in range(count)]
    queue = [(0, number) for number in range(count)]
    for index in np.argsort(-lengths, kind="stable").tolist():
        load, number = queue[0]
        heapq.heapreplace(queue, (load + int(lengths[index]), number))
        bins[number].insert(0, index)
    return bins


@pytest.mark.parametrize(("count", "ranks"), [(1, 1), (300, 7), (3000, 40), (3000, 100), (3000, 3000), (3000, 1999)])
@pytest.mark.parametrize("short", [0.0, 0.1, 1.0])
def test_dealing_many_at_once_is_dealing_one_by_one(count: int, ranks: int, short: float) -> None:
    random = np.random.default_rng(count + ranks)
    full = np.minimum(128, random.integers(60, 256, count))
    lengths = np.where(random.random(count) < short, random.integers(5, 129, count), full)
    assignment = balance(lengths, ranks, 1 << 40)
    assert [members.tolist() for members in micro_batches(assignment, ranks)] == one_by_one(lengths, ranks)


@settings(max_examples=300, deadline=None)
@given(world_size=st.integers(1, 5000), each=st.integers(1, 200), rest=st.integers(0, 4999))
def test_parts_hold_every_rank_and_every_sequence_once(world_size: int, each: int, rest: int) -> None:
    sequences = world_size * each + rest % world_size
    made = balancing.parts(sequences, world_size)
    assert [part.first_sample for part in made] == [0, *np.cumsum([part.sequences for part in made])[:-1]]
    assert [part.first_rank for part in made] == [0, *np.cumsum([part.ranks for part in made])[:-1]]
    assert sum(part.sequences for part in made) == sequences
    assert sum(part.ranks for part in made) == world_size
    for part in made:
        assert part.ranks * sequences // world_size <= part.sequences <= -(-part.ranks * sequences // world_size)
        for rank in {part.first_rank, part.first_rank + part.ranks - 1}:
            assert balancing.part_of(rank, sequences, world_size) == part


@pytest.mark.parametrize(("sequences", "world_size"), [(64, 1), (12_000, 64), (65_536, 1)])
def test_batches_of_small_jobs_are_one_part(sequences: int, world_size: int) -> None:
    assert balancing.parts(sequences, world_size) == [balancing.BatchPart(0, sequences, 0, world_size)]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), world_size=st.integers(2, 12), longest=st.integers(1, 64), slots=st.integers(1, 5))
def test_no_micro_batch_is_empty_with_as_many_as_another_part(data, world_size, longest, slots) -> None:
    sizes = st.integers(world_size, 200)
    sequences = data.draw(sizes) if slots > 1 else world_size * data.draw(st.integers(1, 20))
    count = data.draw(st.integers(1, world_size))
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    made = [balancing.balanced_part(number, count, sequences, world_size) for number in range(count)]
    # Parts may differ as much as they like: some have full sequences only, others many short ones.
    shortest = random.integers(1, longest + 1, count)
    lengths = [random.integers(low, longest + 1, part.sequences) for low, part in zip(shortest, made, strict=True)]
    most = max(balance(one, part.ranks, slots * longest).micro_batches for one, part in zip(lengths, made, strict=True))
    for one, part in zip(lengths, made, strict=True):
        assignment = balance(one, part.ranks, slots * longest, micro_batches=most)
        assert assignment.micro_batches == most
        assert min(len(members) for members in micro_batches(assignment, part.ranks)) > 0


def test_parts_of_the_usual_size_are_balanced_within_one_per_cent() -> None:
    """1,024 ranks with 64 sequences each: a tenth short, the others cut by the ends of their documents."""
    random = np.random.default_rng(0)
    made = balancing.parts(65_536, 1024)
    loads = []
    for part in made:
        full = np.minimum(512, random.integers(60, 1500, part.sequences))
        lengths = np.where(random.random(part.sequences) < 0.1, random.integers(5, 513, part.sequences), full)
        assignment = micro_batches(balance(lengths, part.ranks, 1 << 20), part.ranks)
        loads += [int(lengths[members].sum()) for members in assignment]
    assert len(loads) == 1024
    assert max(loads) / np.mean(loads) <= 1.01


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize(("world_size", "budget"), [(2, 512), (3, 128), (5, 256), (48, 64)])
@pytest.mark.usefixtures("small_parts")
def test_parts_change_no_sample_and_no_count(shards: TokenShards, name: str, world_size: int, budget: int) -> None:
    settings = config(name, budget=budget)
    alone = BatchMaker(shards, config(name), 0, seed=0, rank=0, world_size=1)
    makers = [BatchMaker(shards, settings, 0, seed=0, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert balancing.number_of_parts(48, world_size) > 1
    for first in (0, 10**6):
        expected, made = alone.make(first, 48), [maker.make(first, 48) for maker in makers]
        assert global_batches([[batch] for batch in made]) == global_batches([[expected]])
        assert {counted(batch) for batch in made} == {counted(expected)}
        most = len(made[0].micro_batches)
        assert {len(batch.micro_batches) for batch in made} == {most}
        shares = [maker.make_share(first, 48, micro_batches=most) for maker in makers]
        assert [everything(share) for share in shares] == [everything(batch) for batch in made]
        sums = np.array([astuple(share.counts) for share in shares]).sum(0)
        assert tuple(sums) == (expected.tokens, expected.masked, expected.labeled)


def counted(batch: StepBatch) -> tuple[int, ...]:
    return (batch.sequences, batch.tokens, batch.masked, batch.labeled, batch.epoch)


def everything(made) -> list[Counter]:
    return [Counter(contents(micro)) for micro in made.micro_batches]


def test_a_rank_plans_its_own_part_alone(shards: TokenShards, small_parts: None) -> None:
    maker = BatchMaker(shards, config("tokens"), 0, seed=0, rank=2, world_size=4)
    planned: list[int] = []
    plan = maker.sampler.plan
    maker.sampler.plan = lambda samples: planned.extend(samples.tolist()) or plan(samples)
    maker.make_share(96, 48)
    assert planned == list(range(96 + 24, 96 + 36))


class Together:
    """Ranks that are threads of this process."""

    def __init__(self, world_size: int) -> None:
        self._barrier = threading.Barrier(world_size)
        self._given: list[tuple[list[int], int]] = []

    def sum_and_max(self, to_sum: list[int], to_maximize: int) -> tuple[list[int], int]:
        self._given.append((to_sum, to_maximize))
        self._barrier.wait(60)
        result = [sum(values) for values in zip(*(sums for sums, _ in self._given), strict=True)]
        most = max(largest for _, largest in self._given)
        if self._barrier.wait(60) == 0:
            self._given.clear()
        self._barrier.wait(60)
        return result, most


def uneven(shards: TokenShards, name: str, world_size: int) -> PretrainConfig:
    """A config by which parts of the first step need different numbers of micro-batches: some are assigned again."""
    for budget in range(128, 520, 8):
        made = config(name, budget=budget)
        # Most sequences are short, so that parts differ.
        made = made.model_copy(update={"pairs": made.pairs.model_copy(update={"short_share": 0.9})})
        maker = BatchMaker(shards, made, 0, seed=0, rank=0, world_size=world_size)
        if len({maker.assign(0, part)[1].micro_batches for part in balancing.parts(48, world_size)}) > 1:
            return made
    raise AssertionError("parts always need the same number")


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.usefixtures("small_parts")
def test_exchanged_counts_are_those_that_a_rank_finds_alone(shards: TokenShards, name: str) -> None:
    world_size = 3
    settings = uneven(shards, name, world_size)
    ranks = Together(world_size)
    exchanges = [Exchange(ranks) for _ in range(world_size)]

    def load(rank: int) -> list[StepBatch]:
        place = {"rank": rank, "world_size": world_size, "exchange": exchanges[rank]}
        first = Loader(shards, settings, 0, **place)
        begun = [next(first) for _ in range(3)]
        first.close()  # with an exchange under way
        return begun + list(Loader(shards, settings, 0, start_step=3, **place))

    with ThreadPoolExecutor(world_size) as pool:
        made = list(pool.map(load, range(world_size)))
    for rank, batches in enumerate(made):
        maker = BatchMaker(shards, settings, 0, seed=0, rank=rank, world_size=world_size)
        expected = [maker.make(step * 48, 48) for step in range(6)]
        assert [counted(batch) for batch in batches] == [counted(batch) for batch in expected]
        assert [everything(batch) for batch in batches] == [everything(batch) for batch in expected]
    for exchange in exchanges:
        exchange.close()
        assert not exchange.thread.is_alive()


def test_an_error_in_the_exchange_reaches_the_consumer(shards: TokenShards, small_parts: None) -> None:
    class Broken:
        def sum_and_max(self, to_sum: list[int], to_maximize: int) -> tuple[list[int], int]:
            raise RuntimeError("connection closed")

    loader = Loader(shards, config("tokens"), 0, rank=0, world_size=3, exchange=Exchange(Broken()))
    with pytest.raises(RuntimeError, match="connection closed"):
        next(loader)
    assert not loader.thread.is_alive()


def exchange_on_this_rank() -> tuple[list[int], int]:
    group = RankGroup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), dist.new_group(backend="gloo"))
    return group.sum_and_max([10**15 + dist.get_rank(), 1], 5 - dist.get_rank())


def test_processes_add_up_exactly(tmp_path: Path) -> None:
    assert run_workers(2, exchange_on_this_rank) == [([2 * 10**15 + 1, 2], 5)] * 2


def bucket_fragments(ranks: int) -> list[dict[str, Any]]:
    """Of BERT-Base in ZeRO-1: every rank has an equal part of each bucket, whose ends are not those of parameters."""
    model = ModelConfig.model_validate({"size": "base"})
    with torch.device("meta"):
        named = list(PretrainingModel(model, 30_522, True).named_parameters())
    optimizer = torch.optim.AdamW(parameter_groups(named, 0.01))
    buckets.divide_groups(optimizer, [name for name, _ in named], buckets.BUCKET_ENTRIES)
    fragments = []
    for group in optimizer.param_groups:
        part, begin = -(-sum(one.numel() for one in group["params"]) // ranks), 0
        for name, parameter in zip(group["names"], group["params"], strict=True):
            end = begin + parameter.numel()
            for rank in range(begin // part, -(-end // part)):
                start, stop = max(begin, rank * part), min(end, (rank + 1) * part)
                kept = {"kinds": ["weight", "exp_avg", "exp_avg_sq"], "rank": rank}
                fragments.append({"name": name, "start": start - begin, "numel": stop - start, **kept})
            begin = end
    return fragments


def test_a_manifest_of_buckets_does_not_grow_with_the_ranks() -> None:
    few, many = (len(merge_entries(bucket_fragments(ranks))) for ranks in (64, 4096))
    assert few <= many < 2 * few


def test_bench_scale_measures_every_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--sequences", "4", "--length", "32", "--repeats", "1"]
    assert scale.main(["--ranks", "2", "4", *options]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:2] for row in rows] == [["2", "8"], ["4", "16"]]
    assert all(1 <= float(row[4]) < 2 for row in rows)

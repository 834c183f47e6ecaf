"""What a run reads where something changes: every token k or k + 1 times, for one k a source (invariant 1).

Tokens are numbered, so that all of them are followed through the loaders of a run: its phases, rollbacks, forks and
numbers of workers, just before, at and after the end of a phase, and in a later epoch.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numbered import NEXT, SINGLE, Text, numbered, times_read

from pretrain.batches.blocks import OpenWindow, SourceOrder
from pretrain.batches.loader import Loader
from pretrain.batches.mixing import plan_mix
from pretrain.batches.order import Mixture
from pretrain.batches.sampler import Rollback, make_rollback, phase_sampler, phase_samplers
from pretrain.config import PretrainConfig
from pretrain.corpus.shards import TokenShards
from pretrain.planning.text import phase_lines, phase_readings

LENGTH, BATCH = 64, 8
EPOCH = 128  # steps that read about an epoch of the sources together
FIRST = 57  # steps of the first phase; a window of a source ends some steps later
CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a larger weight": {"weights": {"s0": 3}},
    "a share": {"weights": {"s1": 0.7}},
    "a source alone": {"weights": {"s1": 0}},
    "a source added": {"weights": {"s2": 1}},
    "temperature": {"temperature": 0.3},
    "a larger batch": {"global_sequences": 60 * BATCH, "steps": 2},
    "a ramp": {"global_sequences": 4 * BATCH, "ramp_from": BATCH, "ramp_steps": 9},
    "masks": {"masking_probability": 0.3, "final_masking_probability": 0.1},
}
ENDS = {"before": FIRST - 1, "at": FIRST, "after": FIRST + 1, "later": FIRST + 2 * EPOCH}


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.batches.sampler.WINDOW_BLOCKS", 12)
    monkeypatch.setattr("pretrain.corpus.blocks.BLOCK_TOKENS", 700)


@pytest.fixture(scope="module")
def shards() -> TokenShards:
    """Three sources of 27,000, 18,000 and 9,000 tokens; the third is there for phases that name it."""
    random = np.random.default_rng(0)
    texts = [[random.integers(2, 30, 12).tolist() for _ in range(count)] for count in (140, 95, 47)]
    made = numbered(texts, sources=[0, 1, 2], weights=(1.0, 1.0, 1.0))
    return replace(made, fingerprints=("a", "b", "c"))


def planned(*phases: dict[str, Any], **pairs: Any) -> PretrainConfig:
    plain = {"sequence_length": LENGTH, "global_sequences": BATCH, "peak_learning_rate": 1e-3, "steps": 40}
    made = [plain | phase | {"weights": {"s2": 0} | phase.get("weights", {})} for phase in phases]
    corpus = {"dir": "nowhere", "vocabulary": {"size": 1000}}
    engine = {"micro_batch_tokens": 4 * LENGTH}
    values = {"name": "x", "corpus": corpus, "phases": made, "pairs": pairs or SINGLE, "engine": engine}
    return PretrainConfig.model_validate(values)


def reads(
    shards: TokenShards,
    config: PretrainConfig,
    start: int = 0,
    end: int | None = None,
    rollback: Rollback | None = None,
) -> np.ndarray:
    """How often the steps from `start` to `end` read each token."""
    times, before = np.zeros(shards.vocabulary_size - 5, np.int64), 0
    for phase, settings in enumerate(config.phases):
        steps = (max(start - before, 0), min((config.total_steps if end is None else end) - before, settings.steps))
        if steps[0] < steps[1]:
            made = phase_sampler(shards, config, phase, seed=0, rollback=rollback)
            times += times_read(shards, made, np.arange(*map(settings.first_sample, steps)))
        before += settings.steps
    return times


def loaded(
    shards: TokenShards, config: PretrainConfig, start: int, end: int, rollback: Rollback | None, workers: int
) -> np.ndarray:
    """The same through the workers' loaders, where labels stand in place of masks."""
    times, first = np.zeros(shards.vocabulary_size, np.int64), 0
    for phase, settings in enumerate(config.phases):
        steps = range(max(start - first, 0), min(end - first, settings.steps))
        for rank in range(workers if len(steps) else 0):
            place: dict[str, Any] = {"rank": rank, "world_size": workers}
            loader = Loader(shards, config, phase, start_step=steps.start, rollback=rollback, **place)
            for _, step in zip(steps, loader, strict=False):
                for batch in step.micro_batches:
                    ids = batch.input_ids.numpy().copy()
                    ids[batch.masked_rows.numpy()] = batch.masked_labels.numpy()
                    np.add.at(times, ids, 1)
            loader.close()
        first += settings.steps
    return times[5:]


def check_epochs(shards: TokenShards, times: np.ndarray) -> None:
    sources = Text(shards).source[5:]
    for source in range(len(shards.sources)):
        own = times[sources == source]
        assert own.max() - own.min() <= 1, f"source {source}: {np.bincount(own)}"


@pytest.mark.parametrize(
    ("change", "end"), [(change, list(ENDS)[(n + m) % 4]) for n, change in enumerate(CHANGES) for m in (0, 2)]
)
def test_a_phase_continues_each_source_where_it_was_read_to(shards: TokenShards, change: str, end: str) -> None:
    config = planned({"steps": ENDS[end]}, CHANGES[change], {"steps": 30}, CHANGES[change], {})
    times = reads(shards, config)
    check_epochs(shards, times)
    assert times.sum() > 27_000


@pytest.mark.parametrize("change", ["a larger weight", "a larger batch"])
def test_sentence_pairs_continue_alike(shards: TokenShards, change: str) -> None:
    check_epochs(shards, reads(shards, planned({"steps": FIRST}, CHANGES[change], {"steps": 50}, **NEXT)))


# Every change across the end of the phase, and about half of them at each other place.
@pytest.mark.parametrize(
    ("change", "checkpoint", "failed"),
    [(change, -7, 2) for change in CHANGES]
    + [
        (change, *((-7, -1), (-7, 0), (0, 1), (1, 2))[(n + m) % 4])
        for n, change in enumerate(CHANGES)
        for m in range(1 + n % 2)
    ],
)
def test_a_rollback_reads_nothing_again(shards: TokenShards, change: str, checkpoint: int, failed: int) -> None:
    """Of the steps around the end of the first phase; a second failure follows, and the next phase."""
    config = planned({"steps": FIRST}, CHANGES[change], {"steps": 70})
    checkpoint, failed = FIRST + checkpoint, FIRST + failed
    times = reads(shards, config, 0, failed)
    first = make_rollback(shards, config, checkpoint, failed, None)
    again = checkpoint + 1  # fails, too, before another checkpoint
    times += reads(shards, config, checkpoint, again, first)
    second = make_rollback(shards, config, checkpoint, again, first)
    check_epochs(shards, times + reads(shards, config, checkpoint, None, second))
    mixes = [phase_sampler(shards, config, 2, seed=0, rollback=one).mix for one in (None, first, second)]
    assert mixes[0] == mixes[1] == mixes[2]


@pytest.mark.parametrize("change", ["a larger weight", "a source added", "a larger batch"])
@pytest.mark.parametrize("step", [FIRST - 1, FIRST, FIRST + 1])
def test_a_fork_loses_nothing(shards: TokenShards, change: str, step: int) -> None:
    parent = planned({"steps": FIRST}, {"weights": {"s0": 2}})
    begun = [phase.model_dump() for phase in parent.phases]
    begun = [begun[0] | {"steps": min(step, FIRST)}, *([begun[1] | {"steps": step - FIRST}] if step > FIRST else [])]
    fork = planned(*begun, CHANGES[change], {"steps": 30})
    check_epochs(shards, reads(shards, parent, 0, step) + reads(shards, fork, step))


def test_loaders_of_any_number_of_workers_read_this(shards: TokenShards, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(5, shards.vocabulary_size))])
    )
    shards = replace(shards, folder=tmp_path)
    config = planned({"steps": 6}, {"weights": {"s0": 3}, "global_sequences": 3 * BATCH, "steps": 6})
    first = make_rollback(shards, config, 4, 8, None)
    for start, end, rollback in ((0, 8, None), (4, 12, first)):
        expected = reads(shards, config, start, end, rollback)
        for workers in (1, 3):
            assert np.array_equal(loaded(shards, config, start, end, rollback, workers), expected)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("length", [32, 128])
def test_at_another_length_the_open_window_alone_is_left_out(shards: TokenShards, length: int, end: str) -> None:
    config = planned({"steps": ENDS[end]}, {"sequence_length": length, "steps": 25}, {"steps": 2 * EPOCH})
    left, of_source = np.zeros(2, int), Text(shards).source[5:]
    for readings in phase_readings(shards, config):
        left += [one.skipped_tokens for one in readings]
    times: dict[tuple[int, int], np.ndarray] = {}  # (source, epoch) -> reads of each token
    before: Any = [None] * 3
    for phase, made in zip(config.phases, phase_samplers(shards, config, seed=0), strict=True):
        after = made.progress_after(phase.sequences)
        for source, its in enumerate(made.sources[:2]):
            samples = np.arange(its.next_sample(before[source]), after[source].sample)  # type: ignore[union-attr]
            for epoch in np.unique(samples // its.samples).tolist():
                read = times_read(shards, its, samples[samples // its.samples == epoch])
                times[source, epoch] = times.get((source, epoch), 0) + read
        before = after
    for source in range(2):
        assert all(read.max() == 1 for (number, _), read in times.items() if number == source)
        complete = [
            read[of_source == source]
            for (number, epoch), read in times.items()
            if number == source and (source, epoch + 1) in times
        ]
        assert sum(int((read == 0).sum()) for read in complete if len(read)) == left[source]
    assert 0 < left.sum() <= 2 * 2 * 12 * 700  # two changes, at windows of 12 blocks together, which blocks round up
    assert (
        sum(
            "tokens skipped: a window cannot be continued at another sequence_length" in line
            for line in phase_lines(shards, config)
        )
        >= 1
    )


def test_the_cache_holds_the_windows_that_a_batch_reads() -> None:
    for blocks, window in ((10, 12), (40, 12), (47, 12), (300, 100)):
        for first, last in ((0, 0), (0, 5), (3, blocks // 2), (blocks - 3, blocks), (blocks - 9, blocks - 4)):
            counts, opened = np.full(blocks, 10), OpenWindow(1, first, last) if last else None
            order = SourceOrder(counts, np.uint64(3), window, opened)
            most, batch = sum(map(len, order.largest_window_group())), 10 * min(window, blocks)
            begin = order.first_sample(1, first)
            found = []
            for sample in range(begin, begin + 25 * blocks):
                epochs, windows, _ = order.locate(np.arange(sample, sample + batch, 10))
                read = set(zip(epochs.tolist(), windows.tolist(), strict=True))
                found.append(sum(len(order.blocks(*one)) for one in read))
            assert max(found) == most


@pytest.mark.parametrize("weight", [0.001, 0.7, 1.0])
@pytest.mark.parametrize("count", [1, 2, 199, 999])
def test_shares_hold_for_any_number_of_sources(count: int, weight: float) -> None:
    """Small sources of 10 sequences beside a large one, of which a weight may ask for less than one in an epoch."""
    names = [f"s{number}" for number in range(count + 1)]
    described = [{"name": name, "weight": weight if number else 1.0} for number, name in enumerate(names)]
    corpus = replace(numbered([[[9]]]), sources=described)
    samples = [20_000, *[10] * count]
    for phase in (None, planned({"max_epochs": 1000.0, "steps": 9}).phases[0].model_copy(update={"weights": {}})):
        mix = plan_mix(corpus, phase, samples, [0] * len(samples), "phases.0")
        asked = np.array(samples) * [one["weight"] for one in described]
        asked /= asked.sum()
        read = np.array(Mixture(mix.shares).counts(200_000)) / 200_000
        assert np.abs(read - asked).max() < 1e-3
        assert abs(read[1:].sum() - asked[1:].sum()) < 1e-3

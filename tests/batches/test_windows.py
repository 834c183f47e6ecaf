"""The order of samples across phases, windows and workers, and what an epoch reads (invariant 1)."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from corpora import make_corpus
from numbered import NEXT, SINGLE, epoch, numbered, random_documents, sampler

from pretrain.batches.loader import BatchMaker
from pretrain.batches.reading import count_reading
from pretrain.batches.sampler import Sampler
from pretrain.batches.source import Machine
from pretrain.config import PretrainConfig
from pretrain.corpus.prepare import prepare
from pretrain.corpus.shards import TokenShards, open_shards
from pretrain.planning.text import reading_counter


def phases(*lengths_and_steps: tuple[int, int], **pairs: Any) -> PretrainConfig:
    """A config with phases of 8 sequences a step."""
    made = [
        {"sequence_length": length, "global_sequences": 8, "steps": steps, "peak_learning_rate": 1e-3}
        for length, steps in lengths_and_steps
    ]
    return PretrainConfig.model_validate({"name": "x", "corpus": {"dir": "nowhere"}, "phases": made, "pairs": pairs})


@pytest.mark.parametrize("pairs", [SINGLE, NEXT], ids=["single", "nsp"])
def test_the_workers_of_a_run_read_every_token_once_together(tmp_path, pairs):
    """Labels in place of masks give back the text: an epoch of 1 to 7 workers has every document's tokens once."""
    shards = open_shards(make_corpus(tmp_path / "c", documents=16, vocabulary_size=300), "train")
    config = phases((64, 500), **pairs)
    wanted = np.bincount(np.concatenate([shard.tokens for shard in shards.shards]), minlength=300)
    wanted[:5] = 0
    for world_size in (1, 2, 3, 7):
        makers = [BatchMaker(shards, config, 0, seed=0, rank=rank, world_size=world_size) for rank in range(world_size)]
        found, first, epoch = np.zeros(300, int), 0, makers[0].samples_per_epoch
        while first < epoch:
            # The last batch is what is left of the epoch, or more sequences by one if there were fewer than workers.
            sequences = epoch - first if epoch - first < 16 + world_size else 16
            for batch in (micro for maker in makers for micro in maker.make(first, sequences).micro_batches):
                ids = batch.input_ids.numpy().copy()
                ids[batch.masked_rows.numpy()] = batch.masked_labels.numpy()
                found += np.bincount(ids, minlength=300)
            first += sequences
        assert np.array_equal(found[5:], wanted[5:])


def test_how_often_tokens_are_read_is_counted():
    shards = numbered([random_documents(60, 1), [[1]] * 50, [[1, 1]] * 50], sources=[0, 0, 1], weights=(1.0, 1.0))
    shards = replace(shards, sources=[{"name": "a", "weight": 1.0}, {"name": "b", "weight": 1.0}])
    tokens = sum(len(shard.tokens) for shard in shards.shards)
    single, pairs = (count_reading(shards, phases((64, 1), **kind), 64) for kind in (SINGLE, NEXT))
    assert (single.tokens, single.reads, single.unread, single.twice) == (tokens, 1.0, 0.0, 0.0)
    assert pairs.unread == pytest.approx(50 / tokens)
    assert pairs.reads == 1 - pairs.unread
    assert 0.9 < pairs.labeled <= 1
    assert f"{pairs.labeled:.1%} have a sentence-pair label." in pairs.line
    assert "label" not in single.line
    made = sampler(shards, 64, **SINGLE)
    assert single.mean_length == pytest.approx(made.plan(epoch(made)).lengths.mean())


def test_the_card_says_how_often_a_token_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"Number {n} is a text. {'word ' * (n % 300)}It ends."}) for n in range(0, 300, 4)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = {"kind": "jsonl", "path": "a.jsonl"}
    corpus = {"dir": "c", "sources": [source], "vocabulary": {"size": 300}, "min_document_words": 0}
    config = PretrainConfig.model_validate({**phases((64, 1), (32, 1), **SINGLE).model_dump(), "corpus": corpus})
    prepare(config, quiet=True, count_readings=reading_counter(config))
    readings = json.loads((tmp_path / "c/card.json").read_text())["readings"]
    assert [one["sequence_length"] for one in readings] == [32, 64]
    assert all((one["reads"], one["unread"], one["twice"]) == (1.0, 0.0, 0.0) for one in readings)
    assert readings[0]["tokens"] == sum(len(shard.tokens) for shard in open_shards(tmp_path / "c", "train").shards)
    assert "| 64 | doc_sentences | 1.000 | 0.00% | 0.00% |" in (tmp_path / "c/card.md").read_text()


def window_reads(made: Sampler, shards: TokenShards, batch: int, block: int) -> list[int]:
    """How many blocks' worth of text each batch of an epoch touches."""
    whole = range(0, made.samples_per_epoch - batch, batch)
    return [len(np.unique(made.plan(np.arange(batch) + first).start_a // block)) for first in whole]


def test_samples_are_shuffled_within_windows_that_hold_a_batch():
    shards = numbered([[[10] * 20] * 500])  # 100,000 tokens: 100 blocks
    made = sampler(shards, 64, more={"block_tokens": 1000, "window_blocks": 5}, **SINGLE)
    assert max(window_reads(made, shards, 50, 1000)) <= 2 * 2 * 5  # two windows at most; blocks move to document ends
    large = sampler(shards, 64, more={"block_tokens": 1000, "window_blocks": 5, "batch_size": 400}, **SINGLE)
    assert min(window_reads(large, shards, 400, 1000)) >= 20
    begins = [made.plan(epoch(made, number)).start_a for number in range(2)]
    assert abs(np.corrcoef(begins[0], begins[1])[0, 1]) < 0.25  # mostly that of 100 blocks
    assert abs(np.corrcoef(begins[0], np.arange(len(begins[0])))[0, 1]) < 0.25


class Streamed(TokenShards):
    """Shards that are here, for what depends on whether they are."""

    @property
    def is_streamed(self) -> bool:
        return True


@pytest.mark.parametrize(("machines", "pairs"), [(2, NEXT), (4, SINGLE), (8, NEXT), (16, SINGLE)])
def test_machines_share_the_blocks_of_a_window_and_make_the_same_batch(machines, pairs, tmp_path, monkeypatch):
    """Four machines and more read four different parts of a window of 64 blocks, of almost the same size."""
    monkeypatch.setattr("pretrain.corpus.blocks.BLOCK_TOKENS", 2000)
    shards = open_shards(make_corpus(tmp_path / "c", documents=500, vocabulary_size=300), "train")
    config, batch = phases((64, 40), **pairs), 512 * machines
    phase = config.phases[0].model_copy(update={"global_sequences": batch})
    config = config.model_copy(update={"phases": (phase,)})
    place: dict[str, Any] = {"seed": 0, "world_size": 2 * machines, "machines": machines}
    makers = [BatchMaker(Streamed(**vars(shards)), config, 0, rank=rank, **place) for rank in range(2 * machines)]
    whole = BatchMaker(shards, config, 0, seed=0, rank=0, world_size=1)
    read: list[set[int]] = [set() for _ in range(machines)]
    for first in (0, batch):
        assert all(maker.needs_exchange(batch) for maker in makers)
        owned = np.bincount(makers[0].sampler.owners(np.arange(batch) + first), minlength=machines)
        assert np.abs(owned - 512).max() <= 20
        made = [maker.make_share(first, batch) for maker in makers]
        tokens = [sum(sum(batch.real_lengths) for batch in share.micro_batches) for share in made]
        assert max(tokens) < 1.08 * min(tokens)
        here, there = (
            np.sort(np.concatenate([b.token_keys.numpy() for one in some for b in one.micro_batches]))
            for some in (made, [whole.make(first, batch)])
        )
        assert np.array_equal(here, there)
        for rank, maker in enumerate(makers):
            own = maker.sampler.owners(np.arange(batch) + first) == rank // 2
            read[rank // 2] |= set(whole.sampler.plan(np.flatnonzero(own) + first).start_a.tolist())
    groups = min(machines, 4)
    for one in range(machines):
        for other in range(one):
            overlap = len(read[one] & read[other]) / len(read[one])
            assert overlap < 0.3 or one % groups == other % groups


@pytest.mark.parametrize("machines", [2, 3, 8])
def test_machines_divide_the_text_of_each_of_several_sources(machines: int) -> None:
    shards = numbered([[[10] * 20] * 500] * 3, sources=[0, 1, 2], weights=(1.0,) * 3)  # 100 blocks each
    more = {"block_tokens": 1000, "window_blocks": 63}
    made = sampler(shards, 64, more=more | {"machine": Machine(0, machines)}, **SINGLE)
    plain = sampler(shards, 64, more=more, **SINGLE)
    batch = made.samples_per_epoch // 5  # about one window of 21 blocks of each source
    owners, plan = made.owners(np.arange(batch)), plain.plan(np.arange(batch))
    assert np.abs(np.bincount(owners, minlength=machines) / batch * machines - 1).max() < 0.05
    blocks = plan.shard_a * 1000 + plan.start_a // 1000
    for machine in range(machines):
        of_source = [len(set(blocks[(owners == machine) & (plan.shard_a == one)].tolist())) for one in range(3)]
        assert max(of_source) <= 2 * 21 / machines + 6  # of two windows at most; blocks move to document ends
    for stretch in np.array_split(owners, 4):
        assert np.abs(np.bincount(stretch, minlength=machines) / len(stretch) * machines - 1).max() < 0.15


def test_text_that_is_here_is_divided_among_all_ranks_alike(tmp_path):
    """Machines that fetch nothing need not read different text, and then their tokens differ less."""
    shards = open_shards(make_corpus(tmp_path / "c", documents=60, vocabulary_size=300), "train")
    config = phases((64, 40), **SINGLE)
    phase = config.phases[0].model_copy(update={"global_sequences": 1024})
    config = config.model_copy(update={"phases": (phase,)})
    place: dict[str, Any] = {"seed": 0, "world_size": 2, "machines": 2}
    makers = [BatchMaker(shards, config, 0, rank=rank, **place) for rank in range(2)]
    tokens = [sum(sum(one.real_lengths) for one in maker.make(0, 1024).micro_batches) for maker in makers]
    assert abs(tokens[0] - tokens[1]) <= 64

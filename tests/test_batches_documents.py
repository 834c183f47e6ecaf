"""Where the samples of documents are found, whatever of it is kept in memory (invariant 1)."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from pretrain.batches import documents as document_tables
from pretrain.batches.documents import DocumentTable
from pretrain.batches.pairs import Sampler
from pretrain.config import PairsConfig
from pretrain.corpus.shards import Shard, TokenShards

REACH, LEAST_SENTENCES = 10, 2
SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}


def shards_of(random: np.random.Generator, documents: list[int], sources: list[int]) -> TokenShards:
    """Shards of so many documents each, without tokens; a third of the documents have no samples."""
    shards = []
    for count, source in zip(documents, sources, strict=True):
        lengths = random.choice((3, 10, 25, 26), size=3 * count)
        sentences = np.concatenate(([0], np.cumsum(lengths)))
        ends = np.concatenate(([0], np.cumsum(random.integers(1, 4, count))))
        table = np.stack((ends, sentences[ends]), axis=1).astype(np.uint64)
        shards.append(
            Shard("train", "train", source, np.zeros(sentences[-1], np.uint16), sentences.astype(np.uint64), table)
        )
    described = [{"name": f"s{number}", "weight": 1.0} for number in range(max(sources) + 1)]
    return TokenShards(Path("nowhere"), "fingerprint", 1000, SPECIAL, described, shards)


def expected(shards: TokenShards, reach: int = REACH) -> list[list[tuple[int, int, int]]]:
    """For each source, (document, sample within it, samples it has) of every sample, document by document."""
    found, number = [], 0
    for source in range(len(shards.sources)):
        found.append([])
        for shard in (shard for shard in shards.shards if shard.source == source):
            for sentences, tokens in np.diff(shard.documents.astype(np.int64), axis=0).tolist():
                samples = max(1, (2 * tokens + reach) // (2 * reach)) if sentences >= LEAST_SENTENCES else 0
                found[-1] += [(number, index, samples) for index in range(samples)]
                number += 1
    return found


def keep_groups(monkeypatch: pytest.MonkeyPatch, documents: int, group: int) -> None:
    """Let tables of `documents` documents keep where samples begin for groups of `group` of them."""
    monkeypatch.setattr(document_tables, "_GROUPS", -(-documents // group))


@pytest.mark.parametrize("group", [1, 2, 8, 32])
@pytest.mark.parametrize(
    ("documents", "sources"),
    [([200], [0]), ([40, 1, 63, 64, 65], [2, 0, 0, 2, 2]), ([1, 0, 31, 0, 33, 0], [0, 0, 1, 1, 0, 1])],
)
def test_samples_are_found_in_groups_of_any_size(monkeypatch, documents, sources, group):
    shards = shards_of(np.random.default_rng(0), documents, sources)
    keep_groups(monkeypatch, sum(documents), group)
    monkeypatch.setattr(document_tables, "_ROWS", 32)
    monkeypatch.setattr(document_tables, "_COUNTED_AT_ONCE", 96)  # several times for one call
    table = DocumentTable(shards, REACH, least_sentences=LEAST_SENTENCES)
    assert table._group == group
    samples = expected(shards)
    assert table.samples == [len(of_source) for of_source in samples]
    asked = [(source, slot) for source, of_source in enumerate(samples) for slot in range(len(of_source))]
    source, slot = np.random.default_rng(1).permutation(asked).T
    found = table.find(source, np.ascontiguousarray(slot))
    assert [column.dtype for column in found] == [np.int64] * 3
    wanted = [samples[of][at] for of, at in zip(source, slot, strict=True)]
    assert np.array_equal(np.stack(found, axis=1), wanted)


@pytest.mark.parametrize("group", [1, 32])
def test_sources_of_more_samples_than_32_bits_count(monkeypatch, group):
    shards = shards_of(np.random.default_rng(2), [70, 70], [0, 1])
    keep_groups(monkeypatch, 140, group)
    for shard in shards.shards:
        shard.documents[30:, 1] += np.uint64(1 << 36)  # of one document
        shard.documents[30:, 0] += np.uint64(2)
    table = DocumentTable(shards, REACH, least_sentences=LEAST_SENTENCES)
    huge = np.diff(shards.shards[1].documents.astype(np.int64), axis=0)[29, 1]
    before = len(expected(TokenShards(**{**vars(shards), "shards": [short(shards.shards[1], 29)]}))[1])
    count = (2 * huge + REACH) // (2 * REACH)
    assert count > 1 << 32
    found = table.find(np.array([1, 1, 1]), before + np.array([-1, 0, count - 1]))
    assert found[0][0] < 70 + 29
    assert [column[1:].tolist() for column in found] == [[70 + 29] * 2, [0, count - 1], [count] * 2]


def short(shard: Shard, documents: int) -> Shard:
    """A shard's first documents."""
    return Shard(**{**vars(shard), "documents": shard.documents[: documents + 1]})


@pytest.mark.parametrize("pairs", [{}, {"objective": "none", "input_format": "full_sentences"}])
def test_samples_do_not_depend_on_the_groups(monkeypatch, pairs):
    shards = shards_of(np.random.default_rng(3), [500, 300, 77], [0, 1, 0])
    chosen = np.random.default_rng(4).integers(0, 10**9, 2000)
    plans = []
    for group in (1, 4, 32):
        keep_groups(monkeypatch, 877, group)
        made = Sampler(shards, PairsConfig.model_validate(pairs), sequence_length=32, seed=0, phase=0)
        plans.append(made.plan(chosen))
    for plan in plans[1:]:
        for name, value in vars(plans[0]).items():
            assert np.array_equal(getattr(plan, name), value)


def test_a_large_corpus_takes_an_eighth_of_a_byte_for_each_document(monkeypatch):
    """4 bytes for 32 documents are all that numpy keeps."""
    count = 1 << 19
    ends = np.arange(count + 1, dtype=np.uint64)
    table = np.stack((2 * ends, 20 * ends), axis=1)
    shard = Shard("train", "train", 0, np.zeros(5, np.uint16), 10 * np.arange(5, dtype=np.uint64), table)
    shards = TokenShards(Path("nowhere"), "fingerprint", 1000, SPECIAL, [{"weight": 1.0}], [shard])
    monkeypatch.setattr(document_tables, "_GROUPS", 1 << 10)
    tracemalloc.start()
    made = DocumentTable(shards, REACH, least_sentences=LEAST_SENTENCES)
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert made.samples == [2 * count]
    assert count / 8 <= kept < count / 8 + 20_000

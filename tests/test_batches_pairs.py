"""Samples: what is cut from which document (invariants 1 and 4).

The corpora here number their tokens, so every token of a sample says where it came from.
"""

from __future__ import annotations

import itertools
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corpora import make_corpus, shard_arrays
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.batches import documents as document_tables
from pretrain.batches.pairs import Sampler, _truncation
from pretrain.common.errors import InputError
from pretrain.config import PairsConfig
from pretrain.corpus.shards import Shard, TokenShards, open_shards

SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}


def numbered(documents_by_shard, *, sources=None, weights=(1.0,)) -> TokenShards:
    """Shards of documents given as lists of sentence lengths; token i of the corpus has id i + 5."""
    next_id = itertools.count(len(SPECIAL))
    shards = []
    for number, documents in enumerate(documents_by_shard):
        tokens = [[np.array([next(next_id) for _ in range(n)]) for n in document] for document in documents]
        source = sources[number] if sources else 0
        shards.append(Shard(f"train-{number:05d}", "train", source, **shard_arrays(tokens, np.uint32)))
    described = [{"name": f"s{i}", "weight": weight} for i, weight in enumerate(weights)]
    return TokenShards(Path("nowhere"), "fingerprint", next(next_id), SPECIAL, described, shards)


def random_documents(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 50, random.integers(1, longest)).tolist() for _ in range(count)]


def sampler(shards: TokenShards, length: int = 128, *, seed: int = 0, phase: int = 0, **pairs) -> Sampler:
    return Sampler(shards, PairsConfig.model_validate(pairs), sequence_length=length, seed=seed, phase=phase)


class Text:
    """Where each numbered token stands: its document and its sentence."""

    def __init__(self, shards: TokenShards) -> None:
        document, sentence, source = ([np.full(5, -1)] for _ in range(3))
        documents = sentences = 0
        for shard in shards.shards:
            counts = np.diff(shard.documents.astype(np.int64), axis=0)
            lengths = np.diff(shard.sentences.astype(np.int64))
            document.append(np.repeat(np.arange(len(counts)) + documents, counts[:, 1]))
            sentence.append(np.repeat(np.arange(len(lengths)) + sentences, lengths))
            source.append(np.full(len(shard.tokens), shard.source))
            documents += len(counts)
            sentences += len(lengths)
        self.document, self.sentence, self.source = map(np.concatenate, (document, sentence, source))
        self.documents = documents


def sequences(made: Sampler, samples: np.ndarray):
    """(A, B, label) of each sample, after checking the layout of special tokens, types and positions."""
    plan = made.plan(samples)
    rows = made.gather(plan)
    for number, (begin, end) in enumerate(itertools.pairwise(rows.starts)):
        ids, types = rows.input_ids[begin:end], rows.token_types[begin:end]
        separators = np.flatnonzero(ids == SPECIAL["sep"])
        assert ids[0] == SPECIAL["cls"]
        assert separators[-1] == len(ids) - 1
        assert len(separators) == (2 if made.pairs.next_sentence else 1)
        specials = np.isin(np.arange(len(ids)), np.append(separators, 0))
        assert np.array_equal(specials, ids < 5)
        assert np.array_equal(specials, ~rows.ordinary[begin:end])
        assert np.array_equal(types, np.arange(len(ids)) > separators[0])
        assert np.array_equal(rows.positions[begin:end], np.arange(len(ids)))
        assert (rows.sequence[begin:end] == number).all()
        assert len(ids) == plan.lengths[number] <= made.room + made.special_tokens
        yield ids[1 : separators[0]], ids[separators[0] + 1 : -1], plan.label[number]


@pytest.mark.parametrize("length", [16, 64, 256])
def test_pairs_are_what_their_label_says(length):
    shards = numbered([random_documents(60, 1), random_documents(80, 2)])
    text, made = Text(shards), sampler(shards, length)
    for a, b, label in sequences(made, np.arange(made.samples_per_epoch)):
        assert len(a) > 0
        assert len(b) > 0
        assert np.array_equal(a, np.arange(a[0], a[0] + len(a)))
        assert np.array_equal(b, np.arange(b[0], b[0] + len(b)))
        assert np.ptp(text.document[a]) == np.ptp(text.document[b]) == 0
        same = text.document[a[0]] == text.document[b[0]]
        assert same == (label == 0)
        if label == 0:
            # Nothing lies between but what truncation took, and then there is no room.
            assert a[-1] < b[0]
            assert text.sentence[b[0]] - text.sentence[a[-1]] <= 1 or len(a) + len(b) == made.room
            if len(a) + len(b) < made.room:
                assert b[0] == a[-1] + 1
                assert text.sentence[b[0]] == text.sentence[a[-1]] + 1
        for segment in (a, b):
            if len(a) + len(b) < made.room:  # not truncated: whole sentences
                assert text.sentence[segment[0]] != text.sentence[segment[0] - 1]
                assert segment[-1] + 1 == len(text.sentence) or (
                    text.sentence[segment[-1]] != text.sentence[segment[-1] + 1]
                )


def test_labels_are_even_and_random_segments_come_from_anywhere():
    shards = numbered([random_documents(100, 3)])
    text, made = Text(shards), sampler(shards, 64)
    labels, b_documents, b_places = [], [], []
    first, counts = np.unique(text.document, return_index=True)[1], np.bincount(text.document + 1)
    for _, b, label in sequences(made, np.arange(20_000)):
        labels.append(label)
        if label:
            b_documents.append(text.document[b[0]])
            b_places.append((b[0] - first[b_documents[-1] + 1]) / counts[b_documents[-1] + 1])
    assert abs(np.mean(labels) - 0.5) < 5 * 0.5 / np.sqrt(len(labels))
    assert abs(np.mean(b_places) - 0.5) < 0.05  # B begins anywhere in its document
    counts = np.bincount(b_documents, minlength=100)
    expected = counts.sum() / 100
    # Own documents are excluded, so longer ones come up a little less often.
    assert ((counts - expected) ** 2 / expected).mean() < 2
    share = np.mean([label for *_, label in sequences(sampler(shards, 64, random_next_share=0.2), np.arange(5000))])
    assert abs(share - 0.2) < 0.03


@pytest.mark.parametrize("next_sentence", [True, False])
def test_ten_percent_are_short_with_uniform_targets(next_sentence):
    """With one-token sentences a sample is exactly as long as its target."""
    made = sampler(numbered([[[1] * 30_000] * 3]), 64, next_sentence=next_sentence)
    lengths = made.plan(np.arange(100_000)).lengths - made.special_tokens
    short = lengths[lengths < made.room]
    share = 0.1 * (made.room - 2) / (made.room - 1)  # a short target may be the full one
    assert abs(len(short) / len(lengths) - share) < 5 * np.sqrt(0.09 / len(lengths))
    counts = np.bincount(short, minlength=made.room)
    assert counts[:2].sum() == 0
    counts = np.delete(counts, made.reach)[2:]  # what a document's last sample has left
    assert ((counts - counts.mean()) ** 2 / counts.mean()).mean() < 2


def test_the_rest_fills_the_length_where_the_document_allows():
    long = [[*document, *[30] * 8] for document in random_documents(40, 4, longest=200)]
    for next_sentence, least, share in ((True, 128, 0.95), (False, 128 - 50, 1.0)):
        made = sampler(numbered([long]), 128, next_sentence=next_sentence, short_share=0.0)
        assert (made.plan(np.arange(5000)).lengths >= least).mean() >= share


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(2, 128))
def test_truncation_takes_token_by_token_from_the_longer_side(length_a, length_b, room):
    a, b = length_a, length_b
    while a + b > room:
        a, b = (a - 1, b) if a > b else (a, b - 1)
    cut_a, cut_b = _truncation(np.array([length_a]), np.array([length_b]), room)
    assert (length_a - cut_a[0], length_b - cut_b[0]) == (a, b)


def test_truncation_takes_from_both_ends_alike():
    """One document of two 60-token sentences at room 61: A keeps 30, B 31; the cuts are coins."""
    made = sampler(numbered([[[60, 60], [60, 60]]]), 64, random_next_share=0.0, short_share=0.0)
    plan = made.plan(np.arange(4000))
    front_a, front_b = plan.begin_a % 120, plan.begin_b % 120 - 60
    assert set(zip(plan.length_a.tolist(), plan.length_b.tolist(), strict=True)) == {(31, 30)}
    for front, cut in ((front_a, 29), (front_b, 30)):
        assert abs(front.mean() - cut / 2) < 5 * np.sqrt(cut / 4 / 4000)
        assert abs(front.var() - cut / 4) < 0.15 * cut / 4
    assert abs(np.corrcoef(front_a, front_b)[0, 1]) < 0.08


def test_full_sentences_without_next_sentence_prediction():
    shards = numbered([random_documents(100, 5), [[7], [300]]])
    text, made = Text(shards), sampler(shards, 64, next_sentence=False)
    assert made.samples_per_epoch > 0
    seen = set()
    for a, b, label in sequences(made, np.arange(made.samples_per_epoch)):
        assert (len(b), label) == (0, 0) or not len(b)
        assert np.ptp(text.document[a]) == 0
        assert np.array_equal(a, np.arange(a[0], a[0] + len(a)))
        seen.add(text.document[a[0]])
        if len(set(text.sentence[a])) > 1 or len(a) < made.room:
            assert text.sentence[a[0]] != text.sentence[a[0] - 1]
            assert a[-1] + 1 == len(text.sentence) or text.sentence[a[-1]] != text.sentence[a[-1] + 1]
    assert seen == set(range(text.documents))  # those with one sentence too


def coverage(shards: TokenShards, made: Sampler, epochs: int) -> np.ndarray:
    """How often each token is read per epoch from its own document (as A, or as a true B)."""
    counts = np.zeros(shards.vocabulary_size + 1)
    plan = made.plan(np.arange(epochs * made.samples_per_epoch))
    bases = np.cumsum([5, *(len(shard.tokens) for shard in shards.shards)])
    true = plan.label == 0
    for shard, begin, length in (
        (plan.shard_a, plan.begin_a, plan.length_a),
        (plan.shard_b[true], plan.begin_b[true], plan.length_b[true]),
    ):
        np.add.at(counts, bases[shard] + begin, 1)
        np.add.at(counts, bases[shard] + begin + length, -1)
    return np.cumsum(counts)[5:-1] / epochs


@pytest.mark.parametrize(("pairs", "low", "high"), [({}, 0.55, 1.6), ({"next_sentence": False}, 0.42, 1.6)])
def test_text_is_covered_evenly(pairs, low, high):
    """Every stretch of a document, its head and its tail too, is read about once per epoch."""
    for sentences in (6, 12, 30, 120):
        shards = numbered([[[20] * sentences] * 8])
        made = sampler(shards, 128, short_share=0.0, **pairs)
        read = coverage(shards, made, 2400 // sentences).reshape(8, sentences, 20).mean((0, 2))
        assert low < read.min()
        assert read.max() < high
        assert 0.7 < read.mean() < 1.15
        if sentences == 120:
            assert abs(read[12:-12].mean() - 1) < 0.12
            assert read[12:-12].std() < 0.1


def test_endless_sentences_are_read_everywhere():
    """A sentence far longer than a sequence gives a window from anywhere within it."""
    made = sampler(numbered([[[5000, 10], [10, 10]]]), 64)
    plan = made.plan(np.arange(made.samples_per_epoch * 40))
    assert plan.lengths.max() <= 64
    own = (plan.shard_a == 0) & (plan.begin_a < 5000) & (plan.length_a > 20)
    assert np.histogram(plan.begin_a[own], 5, (0, 5000))[0].min() > 0.12 * own.sum()


@settings(max_examples=25, deadline=None)
@given(samples=st.lists(st.integers(0, 3 * 10**9), min_size=1, max_size=20), next_sentence=st.booleans())
def test_a_sample_is_the_same_alone_and_in_any_company(samples, next_sentence):
    shards = numbered([random_documents(30, 6), random_documents(5, 7)], sources=[0, 1], weights=(1.0, 0.5))
    made = sampler(shards, 64, next_sentence=next_sentence)
    together = made.plan(np.array(samples))
    fresh = sampler(shards, 64, next_sentence=next_sentence)
    for row, sample in enumerate(samples):
        alone = fresh.plan(np.array([sample]))
        for name, values in vars(together).items():
            assert getattr(alone, name)[0] == values[row]
        assert np.array_equal(made.gather(together[np.array([row])]).input_ids, fresh.gather(alone).input_ids)


def test_corpus_seed_phase_and_epoch_each_change_the_samples():
    shards = numbered([random_documents(30, 8)])
    made = sampler(shards)
    base = made.plan(np.arange(200)).begin_a
    others = [
        sampler(shards, seed=1).plan(np.arange(200)),
        sampler(shards, phase=1).plan(np.arange(200)),
        sampler(replace(shards, fingerprint="other")).plan(np.arange(200)),
        made.plan(np.arange(200) + made.samples_per_epoch),
    ]
    assert all((plan.begin_a == base).mean() < 0.3 for plan in others)


def test_sources_keep_to_themselves_and_to_their_weights():
    shards = numbered(
        [random_documents(40, 9), random_documents(40, 10), random_documents(40, 11)],
        sources=[1, 0, 1],
        weights=(1.0, 2.0),
    )
    text, made = Text(shards), sampler(shards, 64)
    pairs = list(sequences(made, np.arange(made.samples_per_epoch)))
    assert all(text.source[a[0]] == text.source[b[0]] for a, b, _ in pairs)
    alone = [sampler(numbered([random_documents(40, seed)]), 64).samples_per_epoch for seed in (9, 10, 11)]
    counts = np.bincount([text.source[a[0]] for a, *_ in pairs])
    assert counts.tolist() == [alone[1], 2 * (alone[0] + alone[2])]


def test_a_lone_document_takes_its_random_next_from_another_source():
    shards = numbered([[[9, 9, 9]], random_documents(5, 12)], sources=[0, 1], weights=(20.0, 1.0))
    text = Text(shards)
    pairs = list(sequences(sampler(shards, 32), np.arange(400)))
    random_next = np.array([b[0] for a, b, label in pairs if text.source[a[0]] == 0 and label])
    assert len(random_next) > 20
    assert (text.source[random_next] == 1).all()
    assert len(set(text.document[random_next])) == 5


def test_samples_per_document():
    """A document gets round(tokens / reach) samples, one at least, none without two sentences."""
    reach = round(0.75 * 125)
    for sentences, expected in ([20], 0), ([5, 5], 1), ([20] * 14, 3), ([10] * 1000, round(10_000 / reach)):
        both = sampler(numbered([[sentences, [8, 8]]]))
        assert both.samples_per_epoch == expected + 1


def test_corpora_without_pairs_are_refused():
    with pytest.raises(InputError, match="at least two"):
        sampler(numbered([[[5, 5]]]))
    with pytest.raises(InputError, match="sentences a sample needs"):
        sampler(numbered([[[5], [5]]]))
    with pytest.raises(InputError, match="no text"):
        sampler(replace(numbered([[[5, 5]]]), shards=[]))


def test_large_corpora_are_read_alike(tmp_path, monkeypatch):
    """Letting go of mapped pages changes nothing but memory."""
    shards = open_shards(make_corpus(tmp_path / "corpus"), "train")
    made = sampler(shards)
    expected = [made.gather(made.plan(np.arange(64) + first)).input_ids for first in range(0, 640, 64)]
    monkeypatch.setattr(document_tables, "_KEEP_MAPPED", 0)
    monkeypatch.setattr(document_tables, "_SAMPLES_MAPPED", 64)
    forgotten = []
    monkeypatch.setattr(
        document_tables, "_forget", lambda array, forget=document_tables._forget: forgotten.append(forget(array))
    )
    made = sampler(shards)
    for number, first in enumerate(range(0, 640, 64)):
        rows = made.gather(made.plan(np.arange(64) + first))
        assert np.array_equal(rows.input_ids, expected[number])
    assert len(forgotten) == 2 + 10 * 6  # each table of documents once, then six arrays per 64 samples


def test_damaged_shards_are_noticed():
    shards = numbered([random_documents(30, 13)])
    made = sampler(replace(shards, vocabulary_size=100))
    with pytest.raises(InputError, match="damaged"):
        made.gather(made.plan(np.arange(100)))
    shard = shards.shards[0]
    shifted = replace(shard, sentences=shard.sentences + np.uint64(10**9))
    made = sampler(replace(shards, shards=[shifted]))
    with pytest.raises(IndexError, match="outside its shard"):
        made.gather(made.plan(np.arange(100)))


def large_corpus(document_tokens: int) -> TokenShards:
    """141 shards of 100 million tokens, over 150 million samples of 128, all in the same memory."""
    tokens, sentence = 100_000_000, 20
    ends = np.arange(0, tokens + 1, document_tokens, dtype=np.uint64)
    shard = Shard(
        "train-00000",
        "train",
        0,
        np.zeros(tokens, np.uint16),  # never written, so never resident
        np.arange(0, tokens + 1, sentence, dtype=np.uint64),
        np.stack((ends // np.uint64(sentence), ends), axis=1),
    )
    return TokenShards(Path("nowhere"), "f", 30522, SPECIAL, [{"weight": 1.0}], [shard] * 141)


def test_sample_150_million_is_as_near_as_the_first():
    shards = large_corpus(document_tokens=100_000)
    made = sampler(shards)
    assert 150_000_000 < made.samples_per_epoch < 156_000_000
    samples = np.arange(150_000_000, 150_000_256)
    plan = made.plan(samples)
    rows = made.gather(plan)
    assert len(rows.input_ids) == plan.lengths.sum()
    assert len(set(zip(plan.shard_a.tolist(), plan.begin_a.tolist(), strict=True))) > 250
    assert np.array_equal(sampler(shards).plan(samples[7:8]).begin_a, plan.begin_a[7:8])


@pytest.mark.slow
def test_resume_at_150_million_within_two_seconds_and_500_megabytes():
    code = "import sys; sys.path[:0] = ['', 'tests']; import test_batches_pairs as t; t.resume_figures()"
    root = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds < 2
    assert megabytes < 500


def resume_figures() -> None:
    """Print seconds and peak resident megabytes of a fresh process, 14 million documents."""
    shards = large_corpus(document_tokens=1000)
    began = time.perf_counter()
    made = sampler(shards)
    made.gather(made.plan(np.arange(150_000_000, 150_000_256)))
    print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)

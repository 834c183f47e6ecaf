"""Samples: every token once, in pairs and without (invariants 1 and 4).

The corpora here number their tokens, so every token of a sample says where it came from.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corpora import make_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from numbered import JOINED, NEXT, ORDER, SINGLE, SPECIAL, Text, epoch, numbered, random_documents, sampler, times_read

from pretrain.batches import text as texts
from pretrain.batches.pairs import IGNORED
from pretrain.batches.sampler import Sampler
from pretrain.common.errors import InputError
from pretrain.corpus.shards import Shard, TokenShards, open_shards


def sequences(made: Sampler, samples: np.ndarray):
    """(pieces between separators, label) of each sample, after checking special tokens, types and positions."""
    plan = made.plan(samples)
    rows = made.gather(plan)
    for number, (begin, end) in enumerate(itertools.pairwise(rows.starts)):
        ids, types = rows.input_ids[begin:end], rows.token_types[begin:end]
        separators = np.flatnonzero(ids == SPECIAL["sep"])
        assert ids[0] == SPECIAL["cls"]
        assert separators[-1] == len(ids) - 1
        assert len(separators) == 2 or not made.pairs.has_classifier
        specials = np.isin(np.arange(len(ids)), np.append(separators, 0))
        assert np.array_equal(specials, ids < 5)
        assert np.array_equal(specials, ~rows.is_content[begin:end])
        assert np.array_equal(types, (np.arange(len(ids)) > separators[0]) & made.pairs.has_classifier)
        assert np.array_equal(rows.positions[begin:end], np.arange(len(ids)))
        assert (rows.sequence[begin:end] == number).all()
        assert len(ids) == plan.lengths[number] <= made.capacity + made.special_tokens
        yield [ids[low + 1 : high] for low, high in itertools.pairwise((0, *separators))], plan.label[number]


def adversarial(seed: int = 0) -> dict[str, list[list[int]]]:
    """Documents as lists of sentence lengths, of kinds that samplers get wrong."""
    random = np.random.default_rng(seed)
    return {
        "one endless sentence": [[7000], [3], [900]],
        "one-token documents": [[1]] * 300 + [[1, 1]] * 50,
        "long sentences between short ones": [[4, 1500, 5] for _ in range(12)],
        "no punctuation": [[int(n)] for n in random.integers(1, 600, 40)],
        "lines of a poem": [[int(n) for n in random.integers(3, 9, 90)] for _ in range(20)],
        "all lengths": [[n] for n in range(1, 260)],
        "prose": [np.clip(random.lognormal(3.1, 0.6, 50), 1, 200).astype(int).tolist() for _ in range(12)],
    }


KINDS = list(adversarial())
PAIRS = {"single": SINGLE, "joined": JOINED, "nsp": NEXT, "sop": ORDER}


# Every kind with all pairs, and each of both with all lengths.
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
@pytest.mark.parametrize("number", range(len(PAIRS)), ids=PAIRS)
def test_every_token_is_read_once_in_every_epoch(kind, number):
    length, pairs = (8, 64, 256)[(kind + number) % 3], list(PAIRS.values())[number]
    shards = numbered([adversarial()[KINDS[kind]], adversarial(1)["prose"]])
    for short_share, block_tokens in ((0.0, 600), (0.3, 2000)):
        more = {"block_tokens": block_tokens, "window_blocks": 3}
        made = sampler(shards, length, short_share=short_share, more=more, **pairs)
        sizes = np.concatenate([np.diff(shard.documents[:, 1].astype(int)) for shard in shards.shards])
        least = 2 if pairs in (NEXT, ORDER) else 1
        wanted = np.repeat(sizes >= least, sizes)
        for number in range(2):
            assert np.array_equal(times_read(shards, made, epoch(made, number)), wanted)
        lengths = made.plan(epoch(made)).lengths
        assert lengths.max() <= length
        assert lengths.min() > made.special_tokens


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_token_is_read_once_whatever_the_text(data):
    sentence = st.one_of(st.integers(1, 12), st.integers(1, 600))  # longer than three sequences
    documents = st.lists(st.lists(sentence, min_size=1, max_size=9), min_size=1, max_size=8)
    shards = numbered([data.draw(documents), data.draw(documents)], sources=[0, data.draw(st.integers(0, 1))])
    shards = replace(shards, sources=[{"name": f"s{i}", "weight": 1.0} for i in range(2)])
    pairs = data.draw(st.sampled_from([SINGLE, JOINED, ORDER]))
    more = {"block_tokens": data.draw(st.integers(50, 5000)), "window_blocks": data.draw(st.integers(1, 5))}
    share, seed = data.draw(st.sampled_from([0.0, 0.1, 1.0])), data.draw(st.integers(0, 9))
    made = sampler(shards, data.draw(st.integers(8, 200)), seed=seed, short_share=share, more=more, **pairs)
    read = times_read(shards, made, epoch(made, data.draw(st.integers(0, 3))))
    assert read.max() == 1
    sizes = np.concatenate([np.diff(shard.documents[:, 1].astype(int)) for shard in shards.shards])
    assert np.array_equal(read, np.repeat(sizes >= (2 if pairs is ORDER else 1), sizes))


@pytest.mark.parametrize("length", [128, 512])
@pytest.mark.parametrize("pairs", [SINGLE, JOINED], ids=["single", "joined"])
def test_nine_cuts_of_ten_are_at_sentences_ends_and_sequences_are_nearly_full(length, pairs):
    random = np.random.default_rng(2)
    # As long as those of Wikipedia and novels: 25 tokens on average.
    documents = [np.clip(random.lognormal(3.05, 0.6, 400), 1, 200).astype(int).tolist() for _ in range(60)]
    made = sampler(numbered([documents]), length, short_share=0.0, **pairs)
    plan = made.plan(epoch(made))
    assert plan.ends_at_sentence.mean() > 0.9
    assert plan.content_length.mean() > 0.78 * length


def test_cuts_move_from_epoch_to_epoch():
    """Of a long document every place is a cut about equally often; a short one has several cuts, too."""
    shards = numbered([[[1] * 6000], [[1] * 200]])
    made = sampler(shards, 64, short_share=0.0, **SINGLE)
    counts = np.zeros(6200)
    for number in range(300):
        plan = made.plan(epoch(made, number))
        np.add.at(counts, plan.start_a + 6000 * plan.shard_a, 1)
    inner = counts[200:5800].reshape(-1, 100).sum(1)
    assert inner.std() / inner.mean() < 0.2
    assert counts[1000:5000].reshape(-1, 10).sum(1).min() > 0
    assert (counts[6020:6180] > 0).mean() > 0.45


def test_how_many_samples_a_document_gives_follows_from_its_length():
    for size, expected in (1, 1), (62, 1), (63, 2), (100, 2), (101, 3), (5000, 100):
        both = sampler(numbered([[[size], [8]]]), 64, short_share=0.0, **SINGLE)
        assert both.samples_per_epoch == expected + 1
    assert sampler(numbered([[[1000] * 5]]), 64, short_share=0.0, **SINGLE).samples_per_epoch == 100


def test_short_sequences_have_their_share():
    shards = numbered([[[20] * 400] * 20])
    plain, short = (sampler(shards, 128, short_share=share, **SINGLE) for share in (0.0, 0.1))
    assert short.samples_per_epoch == pytest.approx(1.1 * plain.samples_per_epoch, rel=0.01)
    lengths = short.plan(epoch(short)).lengths
    assert lengths.min() < 30


@pytest.mark.parametrize("length", [16, 64, 256])
def test_pairs_are_what_their_label_says(length):
    shards = numbered([random_documents(60, 1), random_documents(80, 2)])
    text, made = Text(shards), sampler(shards, length)
    for (a, b), label in sequences(made, epoch(made)):
        assert len(a) > 0
        assert len(b) > 0
        for segment in (a, b):
            assert np.array_equal(segment, np.arange(segment[0], segment[0] + len(segment)))
            assert np.ptp(text.document[segment]) == 0
        assert (text.document[a[0]] == text.document[b[0]]) == (label != 1)
        if label != 1:
            assert b[0] == a[-1] + 1


def test_sentence_order_swaps_the_segments_of_one_document():
    """Lan et al. 2020, section 3.1: the same two neighboring segments, in order (0) or swapped (1)."""
    shards = numbered([random_documents(60, 1), random_documents(80, 2)])
    text, made = Text(shards), sampler(shards, 64, objective="sop")
    labels = []
    for (a, b), label in sequences(made, np.arange(3000)):
        assert text.document[a[0]] == text.document[a[-1]] == text.document[b[0]] == text.document[b[-1]]
        assert (a[0] < b[0]) == (label != 1)
        first, second = (a, b) if a[0] < b[0] else (b, a)
        assert second[0] == first[-1] + 1
        labels.append(label)
    assert np.mean([label for label in labels if label >= 0]) == pytest.approx(0.5, abs=0.05)


def test_one_document_is_enough_for_sentence_order():
    assert sampler(numbered([[[5, 5]]]), objective="sop").samples_per_epoch == 1


def packed(shards: TokenShards, length: int = 64, **pairs):
    return sampler(shards, length, objective="none", input_format="full_sentences", **pairs)


@pytest.mark.parametrize("length", [16, 64, 256])
def test_full_sentences_go_on_across_documents(length):
    """Liu et al. 2019, section 4.2: contiguous full sentences, a separator between documents, full up to a sentence."""
    documents = [random_documents(60, 1, longest=5), random_documents(80, 2, longest=30), [[3], [2], [300], [4]]]
    shards = numbered(documents)
    text, made = Text(shards), packed(shards, length, short_share=0.0)
    counts = []
    for pieces, _ in sequences(made, np.arange(2 * made.samples_per_epoch)):
        counts.append(len(pieces))
        tokens = np.concatenate(pieces)
        assert np.array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens)))
        assert [len(set(text.document[piece])) for piece in pieces] == [1] * len(pieces)
        assert len({int(text.document[piece[0]]) for piece in pieces}) == len(pieces)
    assert max(counts) > (2 if length > 16 else 1)


def test_full_sentences_fill_sequences_with_short_documents():
    shards = numbered([[[5, 7]] * 2000])
    made = packed(shards, 128, short_share=0.0)
    alone = sampler(shards, 128, objective="none", short_share=0.0)
    assert made.samples_per_epoch < alone.samples_per_epoch / 5


def what_is_seen(shards: TokenShards, made: Sampler, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of A and B and whether each begins and ends with a sentence, [B, 7], and labels, [B]."""
    plan = made.plan(samples)
    sentence = np.append(Text(shards).sentence, -2)
    bases = np.cumsum([5, *(len(shard.tokens) for shard in shards.shards)])
    features = [plan.length_a, plan.length_b, plan.content_length]
    for shard, begin, length in (
        (plan.shard_a, plan.start_a, plan.length_a),
        (plan.shard_b, plan.start_b, plan.length_b),
    ):
        for place in (bases[shard] + begin, bases[shard] + begin + length):
            features.append(sentence[place] != sentence[place - 1])
    return np.stack(features, axis=1).astype(float), plan.label


@pytest.mark.parametrize(("objective", "length"), [("nsp", 64), ("nsp", 128), ("sop", 128)])
def test_lengths_kinds_of_cuts_and_positions_do_not_tell_the_label(objective, length):
    """A gradient-boosted classifier, trained on half of 100,000 pairs, is right in half of the others."""
    from sklearn.ensemble import HistGradientBoostingClassifier
    from threadpoolctl import threadpool_limits

    random = np.random.default_rng(5)
    documents = [
        np.clip(random.lognormal(2.6, 0.8, random.integers(1, 60)), 1, 300).astype(int).tolist() for _ in range(3000)
    ]
    shards = numbered([documents])
    features, labels = what_is_seen(shards, sampler(shards, length, objective=objective), np.arange(100_000))
    known = labels >= 0
    assert known.mean() > (0.99 if objective == "nsp" else 0.6)
    features, labels = features[known], labels[known]
    assert abs(labels.mean() - 0.5) < 0.005
    half = len(labels) // 2
    with threadpool_limits(1):  # its threads would wait for each other's core
        fitted = HistGradientBoostingClassifier(max_iter=60, random_state=0).fit(features[:half], labels[:half])
    assert fitted.score(features[half:], labels[half:]) < 0.505


def test_second_segments_begin_anywhere_in_a_document():
    """In BERT's pairs too, the first sentences of a document are read as B."""
    shards = numbered([[[10] * 40] * 60])
    made = sampler(shards, 128, short_share=0.0)
    plan = made.plan(np.arange(40 * made.samples_per_epoch))
    place = np.histogram(plan.start_b % 400, 8, (0, 400))[0] / len(plan.key)
    assert place[0] > 0.05
    assert plan.start_b.min() % 400 <= 10


def test_samples_without_a_partner_have_no_label():
    """One document has most of the text: only as much of it as the others have finds partners."""
    shards = numbered([[[20] * 900, [20] * 60, [20] * 60]])
    made = sampler(shards, 64)
    plan = made.plan(epoch(made))
    alone = plan.label == IGNORED
    assert 0.5 < alone.mean() < 0.9
    assert np.array_equal(plan.start_b[alone], (plan.start_a + plan.length_a)[alone])
    assert plan.label[~alone].mean() == pytest.approx(0.5, abs=0.15)
    assert (times_read(shards, made, epoch(made)) == 1).all()


@settings(max_examples=25, deadline=None)
@given(
    samples=st.lists(st.integers(0, 3 * 10**9), min_size=1, max_size=20),
    pairs=st.sampled_from([SINGLE, JOINED, NEXT, ORDER]),
)
def test_a_sample_is_the_same_alone_and_in_any_company(samples, pairs):
    shards = numbered([random_documents(30, 6), random_documents(5, 7)], sources=[0, 1], weights=(1.0, 0.5))
    made, fresh = sampler(shards, 64, **pairs), sampler(shards, 64, **pairs)
    together = made.plan(np.array(samples))
    for row, sample in enumerate(samples):
        alone = fresh.plan(np.array([sample]))
        for name, values in vars(together).items():
            assert getattr(alone, name)[0] == values[row], name
        assert np.array_equal(made.gather(together[np.array([row])]).input_ids, fresh.gather(alone).input_ids)


def test_corpus_seed_and_epoch_each_change_the_samples():
    shards = numbered([random_documents(30, 8)])
    made = sampler(shards)
    base = made.plan(np.arange(200)).start_a
    others = [
        sampler(shards, seed=1).plan(np.arange(200)),
        sampler(replace(shards, fingerprint="other")).plan(np.arange(200)),
        made.plan(np.arange(200) + made.samples_per_epoch),
    ]
    assert all((plan.start_a == base).mean() < 0.3 for plan in others)


def test_a_source_is_read_alike_whatever_else_the_corpus_has():
    """Order, cuts, pairs and masks are keyed by the source, its epoch and the index in it."""
    documents = random_documents(40, 9), random_documents(25, 10)
    alone = replace(numbered([documents[0]]), fingerprints=("a",))
    both = replace(numbered(documents, sources=[0, 1], weights=(1.0, 2.0)), fingerprints=("a", "b"))
    for pairs in (SINGLE, NEXT):
        one, two = sampler(alone, 64, **pairs), sampler(both, 64, **pairs)
        first, mixed = one.plan(epoch(one)), two.plan(epoch(two))
        own = mixed[np.flatnonzero(mixed.shard_a == 0)]
        for name in ("key", "start_a", "length_a", "start_b", "length_b", "label"):
            assert np.array_equal(getattr(first, name), getattr(own, name)), name


def test_sources_keep_to_themselves_and_to_their_weights():
    shards = numbered(
        [random_documents(40, 9), random_documents(40, 10), random_documents(40, 11)],
        sources=[1, 0, 1],
        weights=(1.0, 2.0),
    )
    text, made = Text(shards), sampler(shards, 64)
    pairs = list(sequences(made, epoch(made)))
    assert all(text.source[a[0]] == text.source[b[0]] for (a, b), _ in pairs)
    alone = [sampler(numbered([random_documents(40, seed)]), 64).samples_per_epoch for seed in (9, 10, 11)]
    counts = np.bincount([text.source[a[0]] for (a, _), _ in pairs])
    assert counts.tolist() == [alone[1], 2 * (alone[0] + alone[2])]
    # Any stretch of an epoch has the sources' shares.
    source = np.array([text.source[a[0]] for (a, _), _ in pairs])
    share = counts[1] / counts.sum()
    for begin in range(0, len(source) - 60, 37):
        assert abs(source[begin : begin + 60].sum() - 60 * share) <= 2


def test_a_source_without_text_in_a_split_is_left_out():
    shards = replace(numbered([random_documents(9, 1)]), sources=[{"name": "a"}, {"name": "b"}])
    made = sampler(shards, 64, **SINGLE)
    assert (times_read(shards, made, epoch(made)) == 1).all()


def test_corpora_without_pairs_are_refused():
    with pytest.raises(InputError, match="at least two"):
        sampler(numbered([[[5, 5]]]))
    with pytest.raises(InputError, match="two tokens that a sample needs"):
        sampler(numbered([[[1], [1]]]))
    with pytest.raises(InputError, match="no text"):
        sampler(replace(numbered([[[5, 5]]]), shards=[]))


def test_large_corpora_are_read_alike(tmp_path, monkeypatch):
    """Letting go of mapped pages changes nothing but memory."""
    shards = open_shards(make_corpus(tmp_path / "corpus"), "train")
    made = sampler(shards)
    expected = [made.gather(made.plan(np.arange(64) + first)).input_ids for first in range(0, 640, 64)]
    monkeypatch.setattr(texts, "KEEP_MAPPED", 0)
    monkeypatch.setattr(texts, "SAMPLES_MAPPED", 64)
    forgotten, forget = [], texts.ShardText.unmap_pages
    monkeypatch.setattr(texts.ShardText, "unmap_pages", lambda text: forgotten.append(forget(text)))
    made = sampler(shards)
    for number, first in enumerate(range(0, 640, 64)):
        rows = made.gather(made.plan(np.arange(64) + first))
        assert np.array_equal(rows.input_ids, expected[number])
    assert len(forgotten) == 10  # for each 64 samples; those of blocks were counted before


def test_damaged_shards_are_noticed():
    shards = numbered([random_documents(30, 13)])
    made = sampler(replace(shards, vocabulary_size=100))
    with pytest.raises(InputError, match="damaged"):
        made.gather(made.plan(np.arange(100)))
    shard = shards.shards[0]
    shifted = replace(shard, documents=shard.documents + np.array([0, 10**9], np.uint64))
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


def test_memory_grows_with_blocks_and_not_with_documents():
    """Of twice the documents a sampler keeps what twice the blocks take, and two windows of each."""
    kept, large = [], large_corpus(document_tokens=100)
    for shards in (10, 20):
        text = replace(large, shards=large.shards[:shards])
        tracemalloc.start()
        made = sampler(text, **SINGLE)
        for first in (0, 10**6, 4 * 10**6):
            made.plan(np.arange(100) + first)
        kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    documents = 10 * 10**6  # more of them
    assert kept[1] - kept[0] < documents / 20  # 0.1 MB; one byte a document would be 10 MB
    assert kept[1] < 8 * 2**20  # 5 MB of it are the orders of two windows


def test_sample_150_million_is_as_near_as_the_first():
    shards = large_corpus(document_tokens=100_000)
    made = sampler(shards)
    assert 150_000_000 < made.samples_per_epoch < 156_000_000
    samples = np.arange(150_000_000, 150_000_256)
    plan = made.plan(samples)
    rows = made.gather(plan)
    assert len(rows.input_ids) == plan.lengths.sum()
    assert len(set(zip(plan.shard_a.tolist(), plan.start_a.tolist(), strict=True))) > 250
    assert np.array_equal(sampler(shards).plan(samples[7:8]).start_a, plan.start_a[7:8])


@pytest.mark.slow
def test_resume_at_150_million_within_two_seconds_and_500_megabytes():
    code = "import sys; sys.path[:0] = ['', 'tests']; from tests.batches import test_samples as t; t.resume_figures()"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    seconds, megabytes = map(float, done.stdout.split())
    assert seconds < 2
    assert megabytes < 500


def resume_figures() -> None:
    """Print seconds of CPU and peak resident megabytes of a fresh process, 14 million documents."""
    shards = large_corpus(document_tokens=1000)
    began = time.process_time()
    made = sampler(shards)
    made.gather(made.plan(np.arange(150_000_000, 150_000_256)))
    seconds, status = time.process_time() - began, Path("/proc/self/status").read_text()  # rusage has the parent's peak
    print(seconds, int(status.partition("VmHWM:")[2].split()[0]) / 1024)

"""Masking: how many tokens, which ones, and their replacements (invariant 1)."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corpora import make_corpus
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.batches.masking import Masker
from pretrain.batches.sampler import Sampler
from pretrain.common.errors import InputError
from pretrain.config import MaskingConfig, PairsConfig
from pretrain.corpus.shards import TokenShards, open_shards

DEFAULT = MaskingConfig.model_validate({})

SCHEMES = ["tokens", "whole_words"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> TokenShards:
    return open_shards(make_corpus(tmp_path_factory.mktemp("corpus") / "c", vocabulary_size=300), "train")


def mask(shards, samples, *, length=64, max_predictions=0, next_sentence=True, **masking):
    """(plan, rows, masked) of some samples."""
    made = Sampler(shards, PairsConfig(objective="nsp" if next_sentence else "none"), sequence_length=length, seed=0)
    masker = Masker(
        shards, MaskingConfig.model_validate(masking), sequence_length=length, max_predictions=max_predictions
    )
    plan = made.plan(np.asarray(samples))
    rows = made.gather(plan)
    return plan, rows, masker.apply(rows, plan.key)


@pytest.mark.parametrize("next_sentence", [True, False])
@pytest.mark.parametrize(("length", "most", "limit"), [(64, 0, 10), (128, 0, 19), (128, 20, 20), (64, 4, 4)])
def test_exact_counts_and_never_a_special_token(shards, next_sentence, length, most, limit):
    plan, rows, masked = mask(shards, np.arange(2000), length=length, max_predictions=most, next_sentence=next_sentence)
    counts = np.bincount(rows.sequence[masked.indices], minlength=2000)
    assert counts.tolist() == [min(limit, max(1, round(0.15 * n))) for n in plan.lengths.tolist()]
    assert (np.diff(masked.indices) > 0).all()
    assert (masked.labels >= 5).all()
    assert np.array_equal(masked.labels, rows.input_ids[masked.indices])
    special = rows.input_ids < 5
    assert np.array_equal(masked.input_ids[special], rows.input_ids[special])
    untouched = np.setdiff1d(np.arange(len(rows.input_ids)), masked.indices)
    assert np.array_equal(masked.input_ids[untouched], rows.input_ids[untouched])


def test_counts_are_known_from_lengths(shards):
    plan, rows, masked = mask(shards, np.arange(500), max_predictions=7)
    masker = Masker(shards, DEFAULT, sequence_length=64, max_predictions=7)
    known = masker.max_counts(plan.lengths, special_tokens=3)
    assert np.array_equal(known, np.bincount(rows.sequence[masked.indices], minlength=500))
    greedy = Masker(shards, MaskingConfig.model_validate({"probability": 0.99}), sequence_length=64, max_predictions=64)
    assert greedy.max_counts(np.array([5, 64]), special_tokens=3).tolist() == [2, 61]


def test_every_position_is_as_likely(shards):
    _, rows, masked = mask(shards, np.arange(6000), length=32)
    full = np.flatnonzero(np.diff(rows.starts) == 32)
    chosen = np.isin(np.arange(len(rows.input_ids)), masked.indices)
    counts, chances = np.zeros(32), np.zeros(32)
    for sequence in full:
        span = slice(rows.starts[sequence], rows.starts[sequence + 1])
        counts += chosen[span]
        chances += rows.is_content[span]
    share = counts[1:31].sum() / chances[1:31].sum()
    off = (counts[1:31] - share * chances[1:31]) / np.sqrt(share * (1 - share) * chances[1:31])
    assert np.abs(off).max() < 4


def test_shares_of_replacements(shards):
    _, _, masked = mask(shards, np.arange(12_000))
    made, total = masked.input_ids[masked.indices], len(masked.indices)
    as_mask, kept = (made == 4).mean(), (made == masked.labels).mean()
    ordinary = Masker(shards, DEFAULT, sequence_length=64, max_predictions=0).replacement_ids
    # A random token is the old one by chance once in len(ordinary) times.
    chance = 0.1 / len(ordinary)
    for share, expected in ((as_mask, 0.8), (kept, 0.1 + chance), (1 - as_mask - kept, 0.1 - chance)):
        assert abs(share - expected) < 4.5 * np.sqrt(expected * (1 - expected) / total)
    random = made[(made != 4) & (made != masked.labels)]
    counts = np.bincount(random, minlength=300)
    assert set(np.flatnonzero(counts)) == set(ordinary) == set(range(5, 298))  # no special, no [unused]
    # Chi-square against a uniform distribution over all tokens except the label.
    labels = np.bincount(masked.labels, minlength=300)[ordinary]
    expected = (labels.sum() - labels) / (labels.sum() - labels).sum() * len(random)
    chi = ((counts[ordinary] - expected) ** 2 / expected).sum()
    freedom = len(ordinary) - 1
    assert abs(chi - freedom) < 4.5 * np.sqrt(2 * freedom)


def test_configured_shares(shards):
    _, _, masked = mask(shards, np.arange(500), mask_share=0.0, random_share=0.0)
    assert np.array_equal(masked.input_ids[masked.indices], masked.labels)
    _, _, masked = mask(shards, np.arange(500), mask_share=1.0, random_share=0.0)
    assert (masked.input_ids[masked.indices] == 4).all()
    _, _, masked = mask(shards, np.arange(500), mask_share=0.0, random_share=1.0)
    assert (masked.input_ids[masked.indices] != masked.labels).mean() > 0.98


def words(shards, rows):
    """The words of every sequence, as lists of rows of the token axis."""
    vocabulary = (shards.folder / "vocab.txt").read_text().split("\n")
    for begin, end in itertools.pairwise(rows.starts):
        found, fresh = [], True
        for row in range(begin, end):
            if not rows.is_content[row]:
                fresh = True
            elif fresh or not vocabulary[rows.input_ids[row]].startswith("##"):
                found.append([row])
                fresh = False
            else:
                found[-1].append(row)
        yield found


@pytest.mark.parametrize("next_sentence", [True, False])
def test_whole_words_stay_together(shards, next_sentence):
    plan, rows, masked = mask(shards, np.arange(600), scheme="whole_words", next_sentence=next_sentence)
    chosen = set(masked.indices.tolist())
    sizes, exact = [], 0
    for number, found in enumerate(words(shards, rows)):
        taken = [word for word in found if chosen & set(word)]
        assert all(chosen >= set(word) for word in taken)
        capacity = min(10, max(1, round(0.15 * plan.lengths[number]))) - sum(map(len, taken))
        # Greedy: a word left out would not have fitted any more.
        assert all(len(word) > capacity for word in found if word not in taken)
        assert capacity >= 0
        exact += capacity == 0
        sizes += map(len, taken)
    assert exact > 550
    assert max(sizes) > 1


def test_whole_words_all_get_their_turn(shards):
    """Words of one piece are masked as often as single tokens are, long ones, which may not fit, less."""
    _, rows, masked = mask(shards, np.arange(1500), length=128, scheme="whole_words")
    chosen = np.isin(np.arange(len(rows.input_ids)), masked.indices)
    found = [word for sequence in words(shards, rows) for word in sequence]
    shares = [np.mean([chosen[w[0]] for w in found if len(w) == size]) for size in (1, 2)]
    assert abs(shares[0] - 0.15) < 0.02
    assert 0.1 < shares[1] < 0.17


@settings(max_examples=25, deadline=None)
@given(
    samples=st.lists(st.integers(0, 10**9), min_size=1, max_size=12), scheme=st.sampled_from(["tokens", "whole_words"])
)
def test_masks_depend_on_the_sample_alone(shards, samples, scheme):
    _, rows, together = mask(shards, samples, scheme=scheme)
    for number, sample in enumerate(samples):
        _, _, alone = mask(shards, [sample], scheme=scheme)
        begin, end = rows.starts[number : number + 2]
        own = (together.indices >= begin) & (together.indices < end)
        assert np.array_equal(together.input_ids[begin:end], alone.input_ids)
        assert np.array_equal(together.indices[own] - begin, alone.indices)
        assert np.array_equal(together.labels[own], alone.labels)
        assert np.array_equal(together.token_keys[begin:end], alone.token_keys)


def test_token_keys_differ_across_positions_samples_and_epochs(shards):
    made = Sampler(shards, PairsConfig.model_validate({}), sequence_length=64, seed=0)
    epoch = made.samples_per_epoch
    keys = np.concatenate([mask(shards, np.arange(300) + e * epoch)[2].token_keys for e in range(3)])
    repeated = len(keys) - len(np.unique(keys))
    assert keys.dtype == np.int32
    assert repeated < 5 * (len(keys) ** 2 / 2**33 + 1)  # birthdays among 32 bits
    assert abs((keys < 0).mean() - 0.5) < 0.02


def test_masks_change_with_the_epoch(shards):
    made = Sampler(shards, PairsConfig.model_validate({}), sequence_length=64, seed=0)
    first = mask(shards, np.arange(50))[2].indices
    second = mask(shards, np.arange(50) + made.samples_per_epoch)[2].indices
    assert len(np.intersect1d(first, second)) < 0.4 * len(first)


def test_a_vocabulary_that_does_not_match_is_refused(shards, tmp_path: Path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    for wrong, message in ((tmp_path, "2 entries"), (tmp_path / "none", "cannot be read")):
        with pytest.raises(InputError, match=message):
            Masker(replace(shards, folder=wrong), DEFAULT, sequence_length=64, max_predictions=0)

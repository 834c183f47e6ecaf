"""The order of samples and its hash function (invariant 1)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.batches.order import Mixture, below, draw, permute, root_key, uniform

KEY = root_key("test", 0)


def chi_square(counts: np.ndarray) -> float:
    """Standard deviations by which the chi-square statistic of `counts` differs from that of a uniform distribution."""
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size, key):
    result = permute(np.arange(size), size, np.full(size, key, np.uint64))
    assert np.array_equal(np.sort(result), np.arange(size))


def test_permute_needs_no_neighbors():
    size = 1_000_003
    index = np.array([0, 5, 999_999, 1_000_002])
    keys = draw(KEY, np.array([1, 2, 3, 4]))
    together = permute(index, size, keys)
    alone = [permute(index[i : i + 1], size, keys[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone


@pytest.mark.parametrize("size", [7, 100, 128, 1000])
def test_permute_sends_every_index_everywhere(size):
    """Over many keys each index lands uniformly, and two neighbors land independently."""
    keys = draw(KEY, np.arange(100_000))
    landed = [permute(np.full(len(keys), index), size, keys) for index in (0, 1, size - 1)]
    for where in landed:
        assert abs(chi_square(np.bincount(where, minlength=size))) < 5
    apart = (landed[1] - landed[0]) % size
    assert abs(chi_square(np.bincount(apart, minlength=size)[1:])) < 5


def test_draws_are_uniform_and_fresh():
    bits = draw(KEY, np.arange(200_000))
    assert len(set(bits.tolist())) == len(bits)
    ones = [int(((bits >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(64)]
    assert max(abs(count - 100_000) for count in ones) < 5 * np.sqrt(50_000)
    assert abs(chi_square(np.bincount(below(bits, 97)))) < 5
    assert 0 <= uniform(bits).min() < uniform(bits).max() < 1
    assert abs(uniform(bits).mean() - 0.5) < 0.004
    assert root_key("a", 1) != root_key("a", 2)


@settings(max_examples=60, deadline=None)
@given(shares=st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(any), first=st.integers(0, 10**9))
def test_a_mixture_takes_each_source_in_turn_and_in_its_share(shares, first):
    mixture = Mixture(shares)
    source, before = mixture.locate(np.arange(mixture.period))
    assert np.bincount(source, minlength=len(shares)).tolist() == shares
    for number, share in enumerate(shares):
        assert before[source == number].tolist() == list(range(share))
    later_source, later = mixture.locate(np.arange(first, first + 50))
    counts = mixture.counts(first)
    for number in range(len(shares)):
        own = later[later_source == number]
        assert own.tolist() == list(range(counts[number], counts[number] + len(own)))
    # In any stretch a source has its share to within one for each halving.
    for begin in range(0, mixture.period, 7):
        part = np.bincount(source[begin : begin + 20], minlength=len(shares))
        size = len(source[begin : begin + 20])
        assert np.abs(part - size * np.array(shares) / mixture.period).max() <= 1 + len(shares).bit_length()


def test_a_mixture_of_trillions_of_samples_keeps_its_shares():
    shares = [10**12, 3 * 10**12, 10**9]
    mixture = Mixture(shares)
    assert mixture.period <= 1 << 31
    _, before = mixture.locate(np.array([0, 10**13]))
    assert (before >= 0).all()
    found = np.bincount(mixture.locate(np.arange(200_000))[0], minlength=3) / 200_000
    assert np.abs(found - np.array(shares) / sum(shares)).max() < 1e-4

"""The order of samples and its hash function (invariant 1)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain.batches.order import Order, below, binomial, draw, permute, root_key, uniform

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


def test_permute_needs_no_neighbours():
    size = 1_000_003
    index = np.array([0, 5, 999_999, 1_000_002])
    keys = draw(KEY, np.array([1, 2, 3, 4]))
    together = permute(index, size, keys)
    alone = [permute(index[i : i + 1], size, keys[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone


@pytest.mark.parametrize("size", [7, 100, 128, 1000])
def test_permute_sends_every_index_everywhere(size):
    """Over many keys each index lands uniformly, and two neighbours land independently."""
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


def test_binomial_counts_fair_coins():
    count = np.repeat([0, 1, 2, 63, 64, 65, 200], 20_000)
    heads = binomial(count, draw(KEY, np.arange(len(count))), 7)
    for size in np.unique(count):
        own = heads[count == size]
        assert own.min(initial=0) >= 0
        assert own.max(initial=0) <= size
        assert abs(own.mean() - size / 2) <= 5 * np.sqrt(size / 4 / len(own))
        assert abs(own.var() - size / 4) <= 0.05 * size / 4
    assert set(heads[count == 2].tolist()) == {0, 1, 2}


@settings(max_examples=25, deadline=None)
@given(
    sources=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.7, 3.0])), min_size=1, max_size=4
    ),
    key=st.integers(0, 2**32),
)
def test_epochs_go_through_every_source_in_turn(sources, key):
    """Each epoch takes round(weight x size) samples of a source; no pass begins before the last ends."""
    sizes, weights = zip(*sources, strict=True)
    order = Order(sizes, weights, root_key(key))
    if not order.samples_per_epoch:
        return
    seen = [Counter() for _ in sizes]
    for epoch in range(4):
        index = np.arange(order.samples_per_epoch)
        place = order.locate(epoch * order.samples_per_epoch + index)
        for source, (size, weight) in enumerate(sources):
            own = place.source == source
            assert own.sum() == (max(1, round(size * weight)) if size and weight else 0)
            assert (place.slot[own] < max(size, 1)).all()
            seen[source].update(zip(place.epoch[own].tolist(), place.slot[own].tolist(), strict=True))
    for source, size in enumerate(sizes):
        assert max(seen[source].values(), default=1) == 1
        epochs = Counter(number for number, _ in seen[source])
        full = sum(epochs.values()) // size if size else 0
        assert [epochs[number] for number in range(full)] == [size] * full


def test_every_epoch_has_a_new_order_of_sources_and_texts():
    order = Order([400, 600], [1.0, 0.5], KEY)
    first, second = (order.locate(np.arange(700) + start) for start in (0, 700))
    assert 0.4 < (first.source == second.source).mean() < 0.6
    half = first.slot[first.source == 1]  # of the 600, from all over them
    assert half.min() < 30
    assert half.max() > 570


def test_epochs_differ_in_order():
    order = Order([1000], [1.0], KEY)
    first, second = (order.locate(np.arange(1000) + start).slot for start in (0, 1000))
    assert not np.array_equal(first, second)
    assert np.array_equal(np.sort(first), np.sort(second))
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.15

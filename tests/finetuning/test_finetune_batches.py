"""Labeled batches: each example once a pass, the same on any number of workers, rows and labels in their places."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.tasks.base import Windows
from finetune.training.model.batches import Batches, LabeledBatch
from pretrain.common.errors import InputError


def make_windows(lengths: list[list[int]], ask_all: bool = False) -> Windows:
    """Examples with windows of these lengths; every id is unlike any other, labels and weights follow the rows."""
    flat = [length for example in lengths for length in example]
    starts = np.concatenate([[0], np.cumsum(flat, dtype=np.int64)])
    total = int(starts[-1])
    asked = np.arange(total) if ask_all else np.sort(np.concatenate([starts[:-1], starts[1:] - 1]))
    asked = np.unique(asked)
    return Windows(
        ids=np.arange(total, dtype=np.int32) + 1000,
        types=(np.arange(total) % 2).astype(np.uint8),
        starts=starts,
        examples=np.repeat(np.arange(len(lengths)), [len(example) for example in lengths]),
        queries=asked,
        labels=asked * 3,
        weights=(asked % 5 + 1).astype(np.float32),
        extra={},
    )


def make_batches(windows: Windows, rank: int = 0, world_size: int = 1, budget: int = 64) -> Batches:
    return Batches(windows, seed=7, budget=budget, rank=rank, world_size=world_size)


def tokens_of(batch: LabeledBatch) -> list[tuple[int, int]]:
    """(id, dropout key) of every token."""
    return list(zip(batch.input_ids.tolist(), batch.token_keys.tolist(), strict=True))


EXAMPLES = st.lists(st.lists(st.integers(2, 10), min_size=1, max_size=3), min_size=4, max_size=20)


@settings(max_examples=40, deadline=None)
@given(EXAMPLES, st.integers(1, 3), st.integers(0, 50))
def test_a_step_does_not_depend_on_the_number_of_ranks(lengths: list[list[int]], world_size: int, first: int) -> None:
    windows, count = make_windows(lengths), 4
    alone = make_batches(windows).step(first, count)
    parts = [make_batches(windows, rank, world_size).step(first, count) for rank in range(world_size)]
    together = Counter(t for part in parts for batch in part.micro_batches for t in tokens_of(batch))
    assert together == Counter(t for batch in alone.micro_batches for t in tokens_of(batch))
    found = {(part.tokens, part.weight, part.sequences, len(part.micro_batches)) for part in parts}
    assert found == {(alone.tokens, alone.weight, count, len(parts[0].micro_batches))}
    assert sum(float(b.weights.sum()) for part in parts for b in part.micro_batches) == pytest.approx(alone.weight)


@settings(max_examples=30, deadline=None)
@given(EXAMPLES, st.booleans())
def test_rows_labels_and_owners_are_in_their_places(lengths: list[list[int]], ask_all: bool) -> None:
    windows = make_windows(lengths, ask_all)
    for batch in make_batches(windows).step(3, 5).micro_batches:
        starts = batch.cu_seqlens.tolist()
        assert list(batch.lengths) == sorted(batch.lengths) == np.diff(starts).tolist()
        rows = batch.query_positions.tolist()
        assert rows == sorted(rows)
        # An id is its token's place in the set plus 1000, a label three times that place.
        places = windows.queries[batch.query_indices].tolist()
        assert (batch.input_ids[batch.query_positions] - 1000).tolist() == (batch.labels // 3).tolist() == places
        assert batch.weights.tolist() == windows.weights[batch.query_indices].tolist()
        for row, sequence in zip(rows, batch.window_of_query.tolist(), strict=True):
            assert starts[sequence] <= row < starts[sequence + 1]
        for number, (begin, end) in enumerate(itertools.pairwise(starts)):
            assert batch.positions[begin:end].tolist() == list(range(end - begin))
            place = int(np.flatnonzero(windows.starts == int(batch.input_ids[begin]) - 1000)[0])
            assert (batch.input_ids[begin:end] - 1000).tolist() == list(
                range(windows.starts[place], windows.starts[place + 1])
            )
            same_owner = batch.example_of_window == batch.example_of_window[number]
            owner_examples = {
                int(windows.examples[np.searchsorted(windows.starts, int(batch.input_ids[b]) - 1000)])
                for b, same in zip(starts[:-1], same_owner.tolist(), strict=True)
                if same
            }
            # An example may come twice in a step that crosses two passes; then it has two owners.
            assert owner_examples == {int(windows.examples[place])}


def test_every_epoch_has_each_example_once_in_another_order() -> None:
    windows = make_windows([[3]] * 10)
    batches = make_batches(windows)

    def order(first: int) -> list[int]:
        ids = [batch.input_ids[batch.cu_seqlens[:-1].long()] for batch in batches.step(first, 1).micro_batches]
        return [int(i - 1000) // 3 for part in ids for i in part]

    passes = [[order(10 * turn + number)[0] for number in range(10)] for turn in range(3)]
    assert all(sorted(members) == list(range(10)) for members in passes)
    assert passes[0] != passes[1] != passes[2]


def test_epochs_and_windows_have_different_dropout() -> None:
    batches = make_batches(make_windows([[6, 6]]))
    (one,), (other,) = (batches.step(n, 1).micro_batches for n in (0, 1))
    keys = [*one.token_keys.tolist(), *other.token_keys.tolist()]
    assert len(set(keys)) == 24


@settings(max_examples=30, deadline=None)
@given(EXAMPLES, st.integers(1, 3))
def test_prediction_sees_every_row_on_some_rank(lengths: list[list[int]], world_size: int) -> None:
    windows = make_windows(lengths)
    by_rank = [list(make_batches(windows, rank, world_size).batches_by_length()) for rank in range(world_size)]
    assert len({len(found) for found in by_rank}) == 1
    seen = np.concatenate([batch.query_indices for batches in by_rank for batch in batches])
    assert np.unique(seen).tolist() == list(range(len(windows.queries)))
    if world_size == 1:
        assert len(seen) == len(windows.queries)
    assert all(sum(batch.lengths) <= 64 for found in by_rank for batch in found)


def test_the_largest_step_is_full() -> None:
    batches = make_batches(make_windows([[10], [3], [9], [8], [20]]), budget=40)
    (batch,) = batches.largest().micro_batches
    assert batch.lengths == (9, 10, 20)


def test_an_example_larger_than_a_micro_batch_is_refused() -> None:
    make_batches(make_windows([[30, 34]])).check("classification")
    with pytest.raises(
        InputError, match=r"classification: an example has 65 tokens in all its windows, but a micro-batch fits 64"
    ):
        make_batches(make_windows([[30, 35]])).check("classification")

"""Makes unpadded micro-batches of labeled windows, shuffled and balanced (invariants 1 to 3 in docs/invariants.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from finetune.tasks.base import Windows
from finetune.tasks.datasets.arrays import concatenate_ranges
from pretrain.batches.balancing import balance
from pretrain.batches.batch import copy_to, pinned
from pretrain.batches.order import draw, permute, root_key
from pretrain.common.errors import InputError


@dataclass(frozen=True)
class LabeledBatch:
    """Input of one forward pass: S windows of E examples, concatenated to T tokens, by ascending length."""

    input_ids: Tensor  # int64 [T]
    token_types: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], position of each token in its window
    cu_seqlens: Tensor  # int32 [S + 1]
    token_keys: Tensor  # int32 [T], dropout seed of each token
    query_positions: Tensor  # int64 [R], indices (0 to T-1) of the tokens that the head reads, ascending
    window_of_query: Tensor  # int64 [R], index of the window (0 to S-1) of each query position
    example_of_window: Tensor  # int64 [S], index of the example (0 to E-1) of each window
    examples: int  # number of examples, E
    labels: Tensor  # [R] or [R, C], labels of the query positions, see `finetune.tasks.base.Objective`
    weights: Tensor  # fp32 [R], loss weight of each query position
    lengths: tuple[int, ...]  # number of tokens of each window, ascending
    query_indices: np.ndarray  # int64 [R], index of each query position in `Windows.queries`

    def to(self, device: torch.device) -> LabeledBatch:
        """Return a copy on `device`."""
        return copy_to(self, device)


@dataclass(frozen=True)
class LabeledStep:
    """One rank's part of an optimizer step, with the global weight that normalizes the loss (invariant 3)."""

    micro_batches: tuple[LabeledBatch, ...]  # every rank has the same number of them
    sequences: int  # number of examples on all ranks
    tokens: int  # number of tokens on all ranks
    weight: float  # sum of the loss weights on all ranks
    epoch: int  # epoch of the first example

    def to(self, device: torch.device) -> LabeledStep:
        """Return a copy on `device`; copying is asynchronous."""
        batches = map(pinned, self.micro_batches) if device.type == "cuda" else self.micro_batches
        return dataclasses.replace(self, micro_batches=tuple(batch.to(device) for batch in batches))


class Batches:
    """Makes the batches of any step from a set of windows, whose examples are an endless sequence of shuffled epochs.

    Example i of that sequence is a pure function of (seed, i), so the data position is one integer (invariant 1).

    Args:
        windows: the F windows of all N examples of a set.
        seed: seed of the order and of dropout.
        budget: maximum number of tokens per micro-batch.
        rank, world_size: index of this worker, and number of workers.
    """

    def __init__(self, windows: Windows, *, seed: int, budget: int, rank: int, world_size: int) -> None:
        self.windows, self.budget = windows, budget
        self.rank, self.world_size = rank, world_size
        self._lengths_F = np.diff(windows.starts)
        self._query_starts = np.searchsorted(windows.queries, windows.starts)  # [F + 1], each window's first query
        example_indices, first_window = np.unique(windows.examples, return_index=True)
        self.examples = len(example_indices)
        self._window_starts = np.append(first_window, len(windows))  # [N + 1], each example's first window
        self._tokens_N = np.add.reduceat(self._lengths_F, first_window) if self.examples else self._lengths_F
        self._order_key, self._dropout_key = draw(root_key("finetune", seed), np.arange(2))

    def check(self, where: str) -> None:
        """Raise `InputError` if an example does not fit into a micro-batch."""
        max_tokens = int(self._tokens_N.max(initial=0))
        # Two examples must fit if the ranks may get different numbers of examples (`balance`).
        capacity = self.budget if self.world_size == 1 else self.budget // 2
        if max_tokens > capacity:
            raise InputError(
                f"{where}: an example has {max_tokens} tokens in all its windows, but a micro-batch fits {capacity}. "
                "Raise engine.micro_batch_tokens; for classification, lowering max_windows helps too."
            )

    def step(self, start: int, count: int) -> LabeledStep:
        """Return this rank's part of the step on `count` examples of the endless sequence, from index `start`."""
        indices = np.arange(start, start + count)
        epochs, slots = np.divmod(indices, self.examples)
        members = permute(slots, self.examples, draw(self._order_key, epochs))
        keys = draw(self._dropout_key, indices)
        assignment = balance(self._tokens_N[members], self.world_size, self.budget)
        local = map(assignment.members, range(self.rank, self.world_size * assignment.micro_batches, self.world_size))
        weights = self._weights_of(self._windows_in(members)[0])
        return LabeledStep(
            tuple(self._batch_of(members[batch], keys[batch]) for batch in local),
            sequences=count,
            tokens=int(self._tokens_N[members].sum()),
            weight=float(weights.sum()),
            epoch=int(epochs[0]),
        )

    def largest(self) -> LabeledStep:
        """Return a step with one micro-batch of the longest examples, as full as the budget allows."""
        by_length = np.argsort(-self._tokens_N, kind="stable")
        num_fitting = max(1, int(np.searchsorted(np.cumsum(self._tokens_N[by_length]), self.budget, side="right")))
        members = by_length[:num_fitting]
        batch = self._batch_of(members, draw(self._dropout_key, members))
        weight = float(batch.weights.sum())
        return LabeledStep((batch,), len(members), int(self._tokens_N[members].sum()), weight or 1.0, epoch=0)

    def batches_by_length(self) -> Iterator[LabeledBatch]:
        """Yield this rank's part of the batches of all windows, by length. Every rank yields the same number of them.

        A rank without a batch left repeats the last one with weights of 0, because all workers must run the same number
        of forward passes.
        """
        by_length = np.argsort(self._lengths_F, kind="stable")
        batches, start = [], 0
        while start < len(by_length):
            # Lengths ascend; take as many windows as fit into the budget.
            tokens = np.cumsum(self._lengths_F[by_length[start:]])
            stop = start + max(1, int(np.searchsorted(tokens, self.budget, side="right")))
            batches.append(by_length[start:stop])
            start = stop
        for first_batch in range(0, len(batches), self.world_size):
            windows = batches[min(first_batch + self.rank, len(batches) - 1)]
            batch = self._make_batch(windows, np.arange(len(windows)), np.zeros(len(windows), np.uint64))
            is_repeated = first_batch + self.rank >= len(batches)
            yield dataclasses.replace(batch, weights=batch.weights * 0) if is_repeated else batch

    def _batch_of(self, members: np.ndarray, keys: np.ndarray) -> LabeledBatch:
        """Make a micro-batch of all windows of the examples `members`; `keys` are their dropout keys, uint64 [E]."""
        windows, examples = self._windows_in(members)
        order = np.argsort(self._lengths_F[windows], kind="stable")
        windows, examples = windows[order], examples[order]
        # Windows of one example must not share their random numbers.
        keys_S = draw(keys[examples], windows - self._window_starts[members[examples]])
        return self._make_batch(windows, examples, keys_S)

    def _windows_in(self, members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (indices of the examples' windows; for each window, the index of its example in `members`)."""
        counts = self._window_starts[members + 1] - self._window_starts[members]
        return concatenate_ranges(self._window_starts[members], counts), np.repeat(np.arange(len(members)), counts)

    def _weights_of(self, windows: np.ndarray) -> np.ndarray:
        starts = self._query_starts[windows]
        return self.windows.weights[concatenate_ranges(starts, self._query_starts[windows + 1] - starts)]

    def _make_batch(self, windows: np.ndarray, examples: np.ndarray, keys_S: np.ndarray) -> LabeledBatch:
        lengths = self._lengths_F[windows]
        tokens = concatenate_ranges(self.windows.starts[windows], lengths)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(len(tokens)) - np.repeat(starts[:-1], lengths)
        first_queries, end_queries = self._query_starts[windows], self._query_starts[windows + 1]
        query_indices = concatenate_ranges(first_queries, end_queries - first_queries)
        window_R = np.repeat(np.arange(len(windows)), end_queries - first_queries)
        offset_R = (starts[:-1] - self.windows.starts[windows])[window_R]
        query_positions = self.windows.queries[query_indices] + offset_R
        token_keys = draw(np.repeat(keys_S, lengths), positions).astype(np.uint32).view(np.int32)
        labels = self.windows.labels[query_indices]
        return LabeledBatch(
            input_ids=torch.from_numpy(self.windows.ids[tokens].astype(np.int64)),
            token_types=torch.from_numpy(self.windows.types[tokens].astype(np.int64)),
            positions=torch.from_numpy(positions),
            cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
            token_keys=torch.from_numpy(token_keys),
            query_positions=torch.from_numpy(query_positions),
            window_of_query=torch.from_numpy(window_R),
            example_of_window=torch.from_numpy(examples),
            examples=int(examples.max()) + 1,
            labels=torch.from_numpy(labels),
            weights=torch.from_numpy(self.windows.weights[query_indices]),
            lengths=tuple(lengths.tolist()),
            query_indices=query_indices,
        )

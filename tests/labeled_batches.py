"""Small batches of labeled windows made without a dataset, packed and padded."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finetune.tasks.base import Head, Windows
from finetune.training.model.batches import Batches, LabeledBatch

ROWS = 40
LENGTHS = (1, 5, 18, 9)


def make_batch(has_segments: bool, head: Head) -> LabeledBatch:
    """Return windows of `LENGTHS`; the head reads the first token of each, or all. Token ids are below `ROWS`."""
    starts = np.cumsum([0, *LENGTHS])
    seen = starts[:-1] if head == "sequence" else np.arange(starts[-1])
    labels = np.zeros((len(seen), 2), np.uint8) if head == "spans" else np.zeros(len(seen), np.int64)
    return batch_of(LENGTHS, labels, seen, segments=1 + has_segments)


def windows_of(
    lengths: Sequence[int], labels: np.ndarray, seen: np.ndarray, weights: np.ndarray | None = None, segments: int = 2
) -> Windows:
    """Return one window per example; the head reads the tokens with the indices `seen`, to which the labels belong."""
    starts, draw = np.cumsum([0, *lengths]), np.random.default_rng(0)
    return Windows(
        ids=draw.integers(5, ROWS, starts[-1]).astype(np.int32),
        types=draw.integers(0, segments, starts[-1]).astype(np.uint8),
        starts=starts,
        examples=np.arange(len(lengths)),
        queries=seen,
        extra={},
        weights=np.ones(len(seen), np.float32) if weights is None else weights,
        labels=labels,
    )


def batch_of(*arguments: Any, **options: Any) -> LabeledBatch:
    """Return `windows_of` these arguments as one micro-batch."""
    (batch,) = Batches(windows_of(*arguments, **options), seed=0, budget=100, rank=0, world_size=1).batches_by_length()
    return batch


def pad(batch: LabeledBatch) -> dict[str, Tensor]:
    """Return int64 [B, L] tensors, padded with an id that would change results if it were not masked."""
    longest = max(batch.lengths)
    real = torch.arange(longest) < torch.tensor(batch.lengths)[:, None]
    ids = torch.full(real.shape, 7).masked_scatter(real, batch.input_ids)
    types = torch.zeros(real.shape, dtype=torch.long).masked_scatter(real, batch.token_types)
    return {"input_ids": ids, "attention_mask": real.long(), "token_type_ids": types}

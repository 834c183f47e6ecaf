"""Small batches of labeled windows made without a data set, packed and padded."""

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
    """One window of each of `LENGTHS`, of which the head sees the first token, or all; ids are below `ROWS`."""
    starts = np.cumsum([0, *LENGTHS])
    seen = starts[:-1] if head == "sequence" else np.arange(starts[-1])
    labels = np.zeros((len(seen), 2), np.uint8) if head == "spans" else np.zeros(len(seen), np.int64)
    return batch_of(LENGTHS, labels, seen, segments=1 + has_segments)


def windows_of(
    lengths: Sequence[int], labels: np.ndarray, seen: np.ndarray, weights: np.ndarray | None = None, segments: int = 2
) -> Windows:
    """One window an example; the head sees the tokens numbered `seen`, in whose order labels are."""
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


def batch_of(*given: Any, **more: Any) -> LabeledBatch:
    """One micro-batch of `windows_of`."""
    (batch,) = Batches(windows_of(*given, **more), seed=0, budget=100, rank=0, world_size=1).every_window()
    return batch


def pad(batch: LabeledBatch) -> dict[str, Tensor]:
    """int64 [B, L] each; padding is filled with ids that would show."""
    longest = max(batch.lengths)
    real = torch.arange(longest) < torch.tensor(batch.lengths)[:, None]
    ids = torch.full(real.shape, 7).masked_scatter(real, batch.input_ids)
    types = torch.zeros(real.shape, dtype=torch.long).masked_scatter(real, batch.token_types)
    return {"input_ids": ids, "attention_mask": real.long(), "token_type_ids": types}

"""Small micro-batches made without a corpus."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pretrain.batches.batch import MicroBatch
from pretrain.model.heads import PretrainingModel, nsp_logits, pool


def make_batch(
    lengths: Sequence[int], vocabulary_size: int = 101, seed: int = 0, masked_share: float = 0.15
) -> MicroBatch:
    """Return sequences of random tokens in two segments; `masked_share` of the tokens are masked."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    masked = max(1, round(masked_share * tokens))
    return MicroBatch(
        input_ids=torch.randint(5, vocabulary_size, (tokens,), generator=generator),
        token_types=torch.cat([(torch.arange(n) > n // 2).long() for n in lengths]),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        masked_rows=torch.randperm(tokens, generator=generator)[:masked].sort().values,
        masked_labels=torch.randint(5, vocabulary_size, (masked,), generator=generator),
        nsp_labels=torch.randint(0, 2, (len(lengths),), generator=generator),
        token_keys=torch.randint(-(2**31), 2**31 - 1, (tokens,), generator=generator).int(),
        lengths=tuple(lengths),
    )


def take_sequence(batch: MicroBatch, index: int) -> MicroBatch:
    """Return a batch of only one sequence of `batch`."""
    start, stop = (int(x) for x in batch.cu_seqlens[index : index + 2])
    inside = (batch.masked_rows >= start) & (batch.masked_rows < stop)
    return MicroBatch(
        input_ids=batch.input_ids[start:stop],
        token_types=batch.token_types[start:stop],
        positions=batch.positions[start:stop],
        cu_seqlens=torch.tensor([0, stop - start], dtype=torch.int32),
        masked_rows=batch.masked_rows[inside] - start,
        masked_labels=batch.masked_labels[inside],
        nsp_labels=batch.nsp_labels[index : index + 1],
        token_keys=batch.token_keys[start:stop],
        lengths=(stop - start,),
    )


def next_sentence_logits(model: PretrainingModel, batch: MicroBatch) -> Tensor:
    """Return the logits of (is next, is random), [S, 2]."""
    pooled_SH = pool(model.encode(batch), batch.cu_seqlens, model.shape.pooling)
    return nsp_logits(pooled_SH, model.heads.nsp_weights())

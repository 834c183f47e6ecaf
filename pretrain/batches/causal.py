"""Causal sequences beside masked ones (GPT-BERT: Charpentier and Samuel 2024, section 3).

In a causal sequence nothing is masked, and every ordinary token is predicted at the position before it, which sees only
itself and what is before. Whether a sample is causal depends on its key alone (invariant 1).
"""

from __future__ import annotations

import numpy as np

from pretrain.batches.masking import Masked
from pretrain.batches.order import draw, uniform
from pretrain.batches.plan import Rows

_CAUSAL = 1 << 34  # a counter that no other module draws with


def is_causal(key: np.ndarray, share: float) -> np.ndarray:
    """bool [B]: which of the samples with these keys are causal, `share` of all."""
    return uniform(draw(key, _CAUSAL)) < share


def with_causal_targets(rows: Rows, masked: Masked, causal: int) -> tuple[Masked, int]:
    """`masked`, but the last `causal` sequences of `rows` are not masked, and all of their tokens are targets.

    Returns:
        (rows to predict at, labels and input; how many of the rows, the last ones, are those of causal sequences).
    """
    if not causal:
        return masked, 0
    begin = rows.starts[-1 - causal]
    targets = begin + np.flatnonzero(rows.ordinary[begin:])
    before = masked.rows < begin
    input_ids = masked.input_ids.copy()
    input_ids[begin:] = rows.input_ids[begin:]
    return (
        Masked(
            input_ids,
            np.concatenate((masked.rows[before], targets - 1)),
            np.concatenate((masked.labels[before], rows.input_ids[targets])),
            masked.token_keys,
        ),
        len(targets),
    )

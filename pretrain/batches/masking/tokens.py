"""Masking of random single tokens, as in the original BERT (Devlin et al. 2019, section 3.1)."""

import numpy as np

from pretrain.batches.order import ranges
from pretrain.batches.plan import PackedTokens
from pretrain.batches.scheme import MaskingScheme, shuffle


class Scheme(MaskingScheme):
    """Masks randomly chosen tokens, independently of words; never special tokens."""

    has_exact_counts = True

    def choose(self, tokens: PackedTokens, bits: np.ndarray, limits: np.ndarray) -> np.ndarray:
        ends, order = shuffle(tokens, np.flatnonzero(tokens.is_content), bits)
        starts = np.concatenate(([0], ends[:-1]))
        chosen = order[ranges(starts, np.minimum(limits, ends - starts))]
        chosen.sort()
        return chosen

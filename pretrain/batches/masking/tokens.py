"""Random single tokens, as in the original BERT (Devlin et al. section 3.1)."""

import numpy as np

from pretrain.batches.order import ranges
from pretrain.batches.plan import Rows
from pretrain.batches.scheme import MaskingScheme, shuffle


class Scheme(MaskingScheme):
    """Masks randomly chosen ordinary tokens, independently of words."""

    has_exact_counts = True

    def choose(self, rows: Rows, bits: np.ndarray, limits: np.ndarray) -> np.ndarray:
        ends, order = shuffle(rows, np.flatnonzero(rows.ordinary), bits)
        starts = np.concatenate(([0], ends[:-1]))
        chosen = order[ranges(starts, np.minimum(limits, ends - starts))]
        chosen.sort()
        return chosen

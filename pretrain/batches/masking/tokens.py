"""Single tokens at random, as BERT was originally trained: Devlin et al. section 3.1."""

import numpy as np

from pretrain.batches.order import ranges
from pretrain.batches.plan import Rows
from pretrain.batches.scheme import MaskingScheme, shuffle


class Scheme(MaskingScheme):
    """Masks tokens one by one, at random among the ordinary ones."""

    has_exact_counts = True

    def choose(self, rows: Rows, bits: np.ndarray, limits: np.ndarray) -> np.ndarray:
        ends, order = shuffle(rows, np.flatnonzero(rows.ordinary), bits)
        begins = np.concatenate(([0], ends[:-1]))
        chosen = order[ranges(begins, np.minimum(limits, ends - begins))]
        chosen.sort()
        return chosen

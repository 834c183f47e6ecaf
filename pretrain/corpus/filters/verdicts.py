"""What a filter says of documents."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pretrain.corpus.filters.text_columns import TextColumns


@dataclass(frozen=True)
class Verdicts:
    """What a filter says of D documents.

    broken int64 [D]: index into `rules`, -1 where none is broken; found [D]: what broke it, for people. Documents that
    break a rule are dropped. seen int64: texts of evaluation sets that were found.
    """

    rules: Sequence[str]
    broken: np.ndarray
    found: Sequence[object]
    seen: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


class Filter(Protocol):
    """One filter."""

    def judge(self, texts: Sequence[str], columns: TextColumns) -> Verdicts:
        """The verdicts on `texts`, whose columns are given."""
        ...

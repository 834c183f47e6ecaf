"""Average attention of heads by kind of token (Clark et al. 2019, "What Does BERT Look At?", arXiv:1906.04341).

Shape letters: L tokens of a sequence, S = L * L pairs of tokens, N heads of a layer, Y layers, K kinds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# The kinds of tokens that a token may attend to, relative to that token. They overlap: the next token may be a
# separator. Section 3.1 of the paper is about relative positions, 3.2 about separators and punctuation.
KINDS = {
    "self": "itself",
    "previous": "the previous token",
    "next": "the next token",
    "first": "the first token, [CLS]",
    "separator": "separators, [SEP]",
    "punctuation": "full stops and commas",
    "same_token": "the same token elsewhere",
    "same_word": "the same word elsewhere",
}


@dataclass(frozen=True)
class TokenMarks:
    """The tokens of one sequence, with the attributes that the kinds depend on; arrays of L entries.

    Attributes:
        ids: int64, token ids.
        first: bool mask of the special token at the start.
        separator: bool mask of the other special tokens.
        punctuation: bool mask of full stops and commas.
        word: int64, id of the token's word, equal wherever the word occurs; -1 if the token is not part of a word.
        word_index: int64, index of the token's word within the sequence; -1 if the token is not part of a word.
    """

    ids: np.ndarray
    first: np.ndarray
    separator: np.ndarray
    punctuation: np.ndarray
    word: np.ndarray
    word_index: np.ndarray

    def selectors(self) -> np.ndarray:
        """Return float32 [K, L, L], in the order of `KINDS`: 1 where the column's token has the kind for the row's."""
        length = len(self.ids)
        is_content = ~(self.first | self.separator)
        itself = np.eye(length, dtype=bool)
        same_token = (self.ids[:, None] == self.ids) & is_content & ~itself
        same_word = (self.word[:, None] == self.word) & (self.word_index[:, None] != self.word_index) & (self.word >= 0)
        selector_by_kind = {
            "self": itself,
            "previous": np.eye(length, k=-1, dtype=bool),
            "next": np.eye(length, k=1, dtype=bool),
            "first": np.broadcast_to(self.first, (length, length)),
            "separator": np.broadcast_to(self.separator, (length, length)),
            "punctuation": np.broadcast_to(self.punctuation, (length, length)),
            "same_token": same_token,
            "same_word": same_word,
        }
        return np.stack([selector_by_kind[kind] for kind in KINDS]).astype(np.float32)


class HeadStatistics:
    """Shares of attention by kind, and entropies, averaged over all tokens of the added sequences."""

    def __init__(self) -> None:
        self.texts, self.tokens = 0, 0
        # Sums over tokens, for the heads and for even attention:
        self._totals: np.ndarray = np.zeros(())  # attention to each kind, [K, Y, N]
        self._entropy: np.ndarray = np.zeros(())  # [Y, N]
        self._even_totals, self._even_entropy = np.zeros(len(KINDS)), 0.0

    def add(self, weights: Sequence[np.ndarray], marks: TokenMarks) -> None:
        """Add a sequence.

        Args:
            weights: attention weights of each layer, float32 [N, L, L]; each row has one token's weights.
            marks: tokens of the sequence.
        """
        length, selectors = len(marks.ids), marks.selectors()
        flat_KS = selectors.reshape(len(KINDS), -1)
        self._totals = self._totals + np.stack([flat_KS @ layer.reshape(len(layer), -1).T for layer in weights], axis=1)
        self._entropy = self._entropy + np.stack([_entropy(layer).sum(-1) for layer in weights])
        self._even_totals = self._even_totals + flat_KS.sum(-1) / length
        self._even_entropy += length * math.log(length)
        self.texts, self.tokens = self.texts + 1, self.tokens + length

    @property
    def shares(self) -> dict[str, np.ndarray]:
        """Return {kind: [Y, N], share of each head's attention to that kind, averaged over attending tokens}."""
        return dict(zip(KINDS, self._totals / self.tokens, strict=True))

    @property
    def entropy(self) -> np.ndarray:
        """Return [Y, N], the mean entropy in nats of each head's attention weights: low if it attends to few tokens."""
        return self._entropy / self.tokens

    @property
    def uniform_shares(self) -> dict[str, float]:
        """Return the shares of a head that attends to all tokens evenly."""
        return dict(zip(KINDS, (self._even_totals / self.tokens).tolist(), strict=True))

    @property
    def uniform_entropy(self) -> float:
        """Return the entropy in nats of a head that attends to all tokens evenly, which is the maximum."""
        return self._even_entropy / self.tokens


def _entropy(weights_NLL: np.ndarray) -> np.ndarray:
    """Return the entropy of each row in nats, [N, L]."""
    logarithms = np.log(weights_NLL, out=np.zeros_like(weights_NLL), where=weights_NLL > 0)
    return -(weights_NLL * logarithms).sum(-1)

"""Loss by position: how well a model predicts tokens that stand early or late in a long sequence, in one vocabulary.

Sequences are cut and masked as for the held-out score, and only whole ones count: so all positions are of the same
texts. They are as long as the model allows, halved until the text has enough of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from finetune.scores.held_out import HeldOutSettings, masked_sequences, tokens_of
from finetune.scores.masked_model import MaskedModel, MaskedSequence, frame, progress_bar
from finetune.scores.passages import NoScoreError

PART = "positions"  # of a record
FIRST = 64  # positions of the first range; each later one ends at twice the end before it
_LEAST = 16  # sequences


@dataclass(frozen=True)
class PositionSettings:
    """Which sequences are scored.

    Attributes:
        tokens: of all sequences together at most; beyond that, as many are left out at equal distances as it takes.
        seed: of the masks.
    """

    tokens: int = 1 << 18
    seed: int = 0


@dataclass(frozen=True)
class PositionScore:
    """How well a model predicts masked tokens, by their positions.

    Attributes:
        nats: range of positions, such as "64-127" -> mean cross-entropy of its masked tokens.
        standard_errors: range -> standard error of that mean, over its tokens.
        length: tokens of a sequence, special tokens included.
        sequences: that were scored.
    """

    nats: dict[str, float]
    standard_errors: dict[str, float]
    length: int
    sequences: int


def score_positions(model: MaskedModel, documents: Sequence[str], how: PositionSettings) -> PositionScore:
    """The score of a model on documents in which each run of blanks is one.

    Raises `NoScoreError` if the text has too few sequences even of `FIRST` tokens.
    """
    length = _length(model, documents)
    cuts = masked_sequences(model.tokenizer, model.special_ids, documents, HeldOutSettings(length, seed=how.seed))
    sequences = [one.masked for one in cuts if len(one.masked.ids) == length]
    sequences = sequences[:: -(-len(sequences) * length // how.tokens)]
    with progress_bar("loss by position", sum(len(one.places) for one in sequences)) as advance:
        nats = -model.predict(sequences, advance).log_probabilities
    return by_position(sequences, nats, length)


def by_position(sequences: Sequence[MaskedSequence], nats: np.ndarray, length: int) -> PositionScore:
    """The score of sequences of `length` tokens, from the float64 cross-entropies of their masked tokens in order."""
    places = np.concatenate([one.places for one in sequences])
    means, errors = dict[str, float](), dict[str, float]()
    for begin, end in pairwise(_bounds(length)):
        own = nats[(places >= begin) & (places < end)]
        if len(own):
            name = f"{begin}-{end - 1}"
            means[name], errors[name] = float(own.mean()), float(own.std() / len(own) ** 0.5)
    return PositionScore(means, errors, length, len(sequences))


def _bounds(length: int) -> list[int]:
    bounds = [0, min(FIRST, length)]
    while bounds[-1] < length:
        bounds.append(min(2 * bounds[-1], length))
    return bounds


def _length(model: MaskedModel, documents: Sequence[str]) -> int:
    """The length of the sequences: the largest power of two of which the text has enough whole ones."""
    special = sum(map(len, frame(model.special_ids)))
    tokens = [len(tokens_of(model.tokenizer, document)[0]) for document in documents]
    length = 1 << (model.max_positions.bit_length() - 1)
    while sum(count // (length - special) for count in tokens) < _LEAST:
        if length <= FIRST:
            raise NoScoreError(f"the text has fewer than {_LEAST} sequences of {length} tokens")
        length //= 2
    return length

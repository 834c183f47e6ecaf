"""Loss by position: how well a model predicts tokens that stand early or late in a long sequence, in one vocabulary.

Sequences are cut and masked as for the held-out score, and only whole ones count: so all positions are of the same
texts. They are as long as the model allows, halved until the text has enough of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from finetune.scores.held_out import HeldOutSettings, masked_sequences, tokens_of
from finetune.scores.masked_model import MaskedModel, frame, progress_bar
from finetune.scores.passages import NoScoreError

PART = "positions"  # name of the score
_FIRST = 64  # positions of the first range; each later one ends at twice the end before it
_LEAST = 16  # sequences


@dataclass(frozen=True)
class PositionSettings:
    """Which sequences are scored: at equal distances, so many that they have at most `tokens`; `seed` of the masks."""

    tokens: int = 1 << 18
    seed: int = 0


@dataclass(frozen=True)
class PositionScore:
    """How well a model predicts masked tokens, by their positions in `sequences` of `length` tokens.

    Attributes:
        nats: range of positions, such as "64-127" -> mean cross-entropy of its masked tokens.
        standard_errors: range -> standard error of that mean, over its tokens.
    """

    nats: dict[str, float]
    standard_errors: dict[str, float]
    length: int
    sequences: int


def score_positions(model: MaskedModel, documents: Sequence[str], how: PositionSettings) -> PositionScore:
    """The score of a model on documents in which each run of blanks is one.

    Raises `NoScoreError` if the text has too few sequences even of `_FIRST` tokens.
    """
    length = _length(model, documents)
    cuts = masked_sequences(model.tokenizer, model.special_ids, documents, HeldOutSettings(length, seed=how.seed))
    sequences = [one.masked for one in cuts if len(one.masked.ids) == length]
    sequences = sequences[:: -(-len(sequences) * length // how.tokens)]
    places = np.concatenate([one.places for one in sequences])
    with progress_bar("loss by position", len(places)) as advance:
        nats = -model.predict(sequences, advance).log_probabilities
    means, errors = dict[str, float](), dict[str, float]()
    begin, end = 0, min(_FIRST, length)
    while begin < length:
        own, name = nats[(places >= begin) & (places < end)], f"{begin}-{end - 1}"
        means[name], errors[name] = float(own.mean()), float(own.std() / len(own) ** 0.5)
        begin, end = end, 2 * end
    return PositionScore(means, errors, length, len(sequences))


def _length(model: MaskedModel, documents: Sequence[str]) -> int:
    """The length of the sequences: the largest power of two of which the text has enough whole ones."""
    special = sum(map(len, frame(model.special_ids)))
    tokens = [len(tokens_of(model.tokenizer, document)[0]) for document in documents]
    length = 1 << (model.max_positions.bit_length() - 1)
    while sum(count // (length - special) for count in tokens) < _LEAST:
        if length <= _FIRST:
            raise NoScoreError(f"the text has fewer than {_LEAST} sequences of {length} tokens")
        length //= 2
    return length

"""The scaling law: held-out loss as a function of model size and tokens. Pure functions, nothing is read.

    L(N, D) = E + A / N'^alpha + B / D'^beta       Hoffmann et al. 2022, "Chinchilla", equation 2
    D' = U + U R* (1 - exp(-R / R*))               Muennighoff et al. 2023, equation 5
    N' = M + M S* (1 - exp(-S / S*))               the same, equation 6, if N is more than M
    R* = min(15.4, 6 sqrt(U / 10^6)), S* = 5.31    docs/benchmarks/scaling-law.md
    M = U (1 + 1 / R) parameters

L is in bits per character of held-out text. U are the tokens of one epoch, R = D / U - 1 the repetitions of it,
S = N / M - 1 the excess of parameters: text that does not repeat (R <= 0) has none, M of them suffice for others. N is
the size in effective parameters: the FLOPs that training executes for one token, over 6, without the optimizer's and
without the layers that activation checkpointing runs again. A parameter that every token uses counts once. So attention
counts, a recursion counts as often as it is applied, the decoder by the share of tokens that are masked, and look-ups
of embeddings not at all: one measure for every architecture. The FLOPs of a training are then 6 N D, and what the
optimizer and checkpointing add.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

Numbers = np.ndarray | float

# Repetitions until further ones are worth little: 15.4 in the paper (section 6: R*_D), whose smallest text has 100
# million tokens. Fewer with little text: fitted, by the mean error, to 14 runs with 0.4 to 4 million tokens and up to
# 14 epochs.
MOST_REPETITIONS = 15.4
_REPETITIONS_OF_A_MILLION = 6.0
# Excess parameters until further ones are worth little: R*_N of the paper, whose M is the best size for U tokens. By
# our law that is 0.01 parameters for each of them, which 14 runs of up to 14 epochs contradict (errors of 18 % in the
# mean, without any excess 1.0 %). One for each token is the smallest number that they allow (1.2 %).
_MOST_EXCESS = 5.31
_PARAMETERS_OF_A_TOKEN = 1.0
FLOPS_PER_PARAMETER = 6  # of one token, forward and backward


@dataclass(frozen=True)
class Law:
    """The five coefficients.

    Attributes:
        floor: E, bits per character of an unlimited model with unlimited text.
        size_scale, size_exponent: A and alpha.
        data_scale, data_exponent: B and beta.
    """

    floor: float
    size_scale: float
    size_exponent: float
    data_scale: float
    data_exponent: float

    def loss(self, size: Numbers, tokens: Numbers, unique: Numbers = np.inf) -> Numbers:
        """Bits per character of a model of `size` effective parameters after `tokens` tokens.

        Args:
            size, tokens: above 0; numbers, or arrays of one shape.
            unique: tokens of one epoch.
        """
        of_size = self.size_scale * np.power(useful_size(size, tokens, unique), -self.size_exponent)
        of_data = self.data_scale * np.power(effective_tokens(tokens, unique), -self.data_exponent)
        return self.floor + of_size + of_data


def effective_tokens(tokens: Numbers, unique: Numbers) -> Numbers:
    """D': tokens of text that does not repeat which teach as much as `tokens` tokens in epochs of `unique` tokens.

    Beyond some 15 epochs of little text, models overfit and are worse than this says.
    """
    most = np.minimum(MOST_REPETITIONS, _REPETITIONS_OF_A_MILLION * np.sqrt(np.asarray(unique) / 1e6))
    unique = np.minimum(unique, tokens)  # what is not read once does not repeat
    repetitions = np.asarray(tokens) / unique - 1
    return unique * (1 + most * -np.expm1(-repetitions / most))


def useful_size(size: Numbers, tokens: Numbers, unique: Numbers) -> Numbers:
    """N': the size that learns as much from text without repetition as `size` does from epochs of `unique` tokens."""
    repeated = 1 - np.minimum(1, np.asarray(unique) / tokens)
    excess = np.maximum(0, size * repeated / (_PARAMETERS_OF_A_TOKEN * np.asarray(unique)) - 1)
    return size / (1 + excess) * (1 + _MOST_EXCESS * -np.expm1(-excess / _MOST_EXCESS))


def interval(laws: Sequence[Law], size: float, tokens: float, unique: float = np.inf) -> tuple[float, float]:
    """The range that holds the middle 90 % of the laws' predictions."""
    low, high = np.percentile([float(one.loss(size, tokens, unique)) for one in laws], [5, 95])
    return float(low), float(high)


def coefficients(law: Law) -> tuple[float, ...]:
    """The coefficients in the order of the class, for files."""
    return astuple(law)

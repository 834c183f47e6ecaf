"""How much a phase reads of each source, planned once: weights, a temperature, and a cap on repeats.

A source with T tokens and the weight w gets a share of the phase's tokens in proportion to w T^temperature. So 1 reads
every token equally often (weights are epochs), 0 takes the weights for shares of the tokens, and what is between favors
small sources (XLM-R, Conneau et al. 2020, section 3.1, has 0.3). Token shares become sample shares by each source's
mean length of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.batches.replay import is_replayed, mixture_weights
from pretrain.common.errors import InputError
from pretrain.config import PhaseConfig
from pretrain.corpus.shards import TokenShards

_RESOLUTION = 1 << 30  # samples of a period, unless every source gives a whole number of samples


@dataclass(frozen=True)
class Mix:
    """What `Mixture` interleaves.

    Attributes:
        shares: samples of each source in a period.
        epoch: samples of an epoch of the mixture.
        capped: whether a source has less than its share, because of `max_epochs`.
    """

    shares: tuple[int, ...]
    epoch: int
    capped: tuple[bool, ...]


@dataclass(frozen=True)
class SourceReading:
    """What a phase reads of a source."""

    name: str
    token_share: float  # of the phase's tokens, special tokens aside
    epochs: float  # read by this phase
    until: float  # epochs read at its end since the start of the run, with windows that another length left
    capped: bool
    left_out: int = 0  # tokens of a window that was open and that another sequence length cannot continue

    @property
    def line(self) -> str:
        """As a part of a sentence."""
        parts = [f"{self.name} {self.token_share:.1%} of the tokens, {self.epochs:.2f} epochs"]
        if self.until > self.epochs + 0.005:
            parts.append(f"{self.until:.2f} since the start of the run")
        parts += ["capped by max_epochs"] if self.capped else []
        left = f"{self.left_out:,} tokens left out: another sequence_length cannot continue the window that was open"
        return ", ".join([*parts, *([left] if self.left_out else [])])


def plan_mix(
    shards: TokenShards, phase: PhaseConfig | None, samples: Sequence[int], read: Sequence[int], where: str
) -> Mix:
    """The mix of a phase; without one, that of the corpus.

    Args:
        samples: of one epoch of each source.
        read: of each source before the phase, in its samples.
        where: the phase's place in the config, for errors.

    Raises `InputError` if the corpus has no sample, a weight has no source, or a cap leaves too little.
    """
    epochs = _weights(shards, phase, samples, where)
    counts = np.array(samples, np.float64)
    wanted = np.array(mixture_weights(shards.sources, epochs, samples)) * counts
    if not wanted.sum():
        raise InputError(f"{shards.folder}: no document has the two tokens that a sample needs. Add text.")
    given, capped = wanted, np.zeros(len(wanted), bool)
    if phase is not None and phase.max_epochs:
        left = np.maximum(0.0, phase.max_epochs * counts - np.array(read))
        own = np.array([not is_replayed(source) for source in shards.sources])
        asked = phase.sequences * wanted / wanted.sum()
        given, capped = _capped(asked, np.where(own, left, np.inf))
        _check_cap(shards, phase, asked, given, np.where(own, left, np.inf), where)
    epoch = max(1, round(wanted.sum()))
    given = given if capped.any() else wanted
    if (given != np.round(given)).any():  # rounded up, many small sources would have shares that nobody asked for
        given = given / given.sum() * _RESOLUTION
    return Mix(tuple(max(1, round(x)) if x else 0 for x in given.tolist()), epoch, tuple(capped.tolist()))


def _weights(shards: TokenShards, phase: PhaseConfig | None, samples: Sequence[int], where: str) -> list[float]:
    """Epochs of each source in one of the mixture, before replayed text is added."""
    if phase is None:
        return shards.weights({}, where)
    weights = shards.weights(phase.weights, f"{where}.weights")
    if phase.temperature == 1:
        return weights
    if phase.temperature == 0 and phase.weights:  # shares of the tokens
        names = [source.get("name") for source in shards.sources]
        weights = [w if name is None or name in phase.weights else 0.0 for w, name in zip(weights, names, strict=True)]
    tokens = np.zeros(len(weights))
    for shard in shards.shards:
        tokens[shard.source] += len(shard.tokens)
    counts = np.array(samples, np.float64)
    scaled = np.array(weights) * np.maximum(tokens, 1) ** (phase.temperature - 1)
    own = np.array([not is_replayed(source) for source in shards.sources]) & (scaled > 0)
    total = (scaled * counts)[own].sum()
    return (scaled * (counts[own].sum() / total if total else 1.0)).tolist()


def _capped(asked: np.ndarray, left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(samples of each source, which of them have all that is left): what a source lacks, the others give in
    proportion.
    """
    total, capped = asked.sum(), np.zeros(len(asked), bool)
    given = asked
    while (over := (given > left) & ~capped).any():
        capped |= over
        rest = np.where(capped, 0.0, asked)
        given = np.where(capped, left, rest * max(0.0, total - left[capped].sum()) / max(rest.sum(), 1e-300))
    return given, capped


def _check_cap(
    shards: TokenShards, phase: PhaseConfig, asked: np.ndarray, given: np.ndarray, left: np.ndarray, where: str
) -> None:
    """Raise `InputError` if the cap takes from a source whose weight is given, or leaves too few samples."""
    cap = f"{where}.max_epochs ({phase.max_epochs:g})"
    for number, source in enumerate(shards.sources):
        if source.get("name") in phase.weights and max(asked[number], given[number]) > left[number] + 0.5:
            raise InputError(
                f"{cap}: the weight of {source['name']} asks for {round(asked[number]):,} of its sequences, but only "
                f"{int(left[number]):,} are left until it was read that often. Lower its weight or the steps, or raise "
                "max_epochs."
            )
    if given.sum() < phase.sequences - 0.5:
        raise InputError(
            f"{cap}: the phase reads {phase.sequences:,} sequences, but its sources have only "
            f"{int(left[asked > 0].sum()):,} left until they were read that often. Lower its steps, raise "
            "max_epochs or add text."
        )

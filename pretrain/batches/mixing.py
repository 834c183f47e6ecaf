"""Plans the mix of sources of a phase from weights, a temperature and a maximum number of epochs.

A source with T tokens and the weight w gets a share of the phase's tokens in proportion to w T^temperature. With a
temperature of 1, weights are epochs: with equal weights, every token is read equally often. With 0, weights are shares
of the tokens. Values in between favor small sources (XLM-R uses 0.3: Conneau et al. 2020, section 3.1). Token shares
are converted to sample shares by the mean sample length of each source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.batches.replay import is_replayed, mixture_weights
from pretrain.common.errors import InputError
from pretrain.config import PhaseConfig
from pretrain.corpus.shards import TokenShards

_RESOLUTION = 1 << 30  # number of samples in a period of the `Mixture` if the shares are not integers


@dataclass(frozen=True)
class Mix:
    """The mix of sources of a phase.

    Attributes:
        shares: number of samples of each source in a period of the `Mixture`.
        epoch_samples: number of samples in an epoch of the mix.
        capped: for each source, whether `max_epochs` reduces its share.
    """

    shares: tuple[int, ...]
    epoch_samples: int
    capped: tuple[bool, ...]


@dataclass(frozen=True)
class SourceReading:
    """The amount of a source that a phase reads."""

    name: str
    token_share: float  # share of the phase's tokens, special tokens not counted
    epochs: float  # epochs of the source in this phase
    total_epochs: float  # epochs from the start of the run to the end of the phase; skipped text counts as read
    capped: bool  # whether `max_epochs` reduces the source's share
    skipped_tokens: int = 0  # tokens left unread, since an open window cannot be continued at another sequence length

    @property
    def line(self) -> str:
        """The values as one line of text."""
        parts = [f"{self.name} {self.token_share:.1%} of the tokens, {self.epochs:.2f} epochs"]
        if self.total_epochs > self.epochs + 0.005:
            parts.append(f"{self.total_epochs:.2f} since the start of the run")
        parts += ["capped by max_epochs"] if self.capped else []
        note = f"{self.skipped_tokens:,} tokens skipped: a window cannot be continued at another sequence_length"
        return ", ".join([*parts, *([note] if self.skipped_tokens else [])])


def plan_mix(
    shards: TokenShards, phase: PhaseConfig | None, samples: Sequence[int], samples_read: Sequence[int], where: str
) -> Mix:
    """Plan the mix of a phase; if `phase` is None, the mix of the corpus.

    Args:
        samples: number of samples in an epoch of each source.
        samples_read: number of samples of each source that were read before the phase.
        where: the phase's path in the config, for errors.

    Raises `InputError` if the corpus has no sample, a weighted source is missing, or `max_epochs` leaves too few.
    """
    epochs = _source_epochs(shards, phase, samples, where)
    counts = np.array(samples, np.float64)
    uncapped = np.array(mixture_weights(shards.sources, epochs, samples)) * counts
    if not uncapped.sum():
        raise InputError(f"{shards.folder}: no document has the two tokens that a sample needs. Add text.")
    planned, capped = uncapped, np.zeros(len(uncapped), bool)
    if phase is not None and phase.max_epochs:
        remaining = np.maximum(0.0, phase.max_epochs * counts - np.array(samples_read))
        not_replayed = np.array([not is_replayed(source) for source in shards.sources])
        requested = phase.sequences * uncapped / uncapped.sum()
        remaining = np.where(not_replayed, remaining, np.inf)
        planned, capped = _cap_samples(requested, remaining)
        _check_cap(shards, phase, requested, planned, remaining, where)
    epoch_samples = max(1, round(uncapped.sum()))
    planned = planned if capped.any() else uncapped
    if (planned != np.round(planned)).any():  # scale up: rounding small numbers would distort the shares
        planned = planned / planned.sum() * _RESOLUTION
    shares = tuple(max(1, round(share)) if share else 0 for share in planned.tolist())
    return Mix(shares, epoch_samples, tuple(capped.tolist()))


def _source_epochs(shards: TokenShards, phase: PhaseConfig | None, samples: Sequence[int], where: str) -> list[float]:
    """Return how many epochs of each source an epoch of the mix reads, before replayed text is added."""
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
    not_replayed = np.array([not is_replayed(source) for source in shards.sources]) & (scaled > 0)
    total = (scaled * counts)[not_replayed].sum()
    return (scaled * (counts[not_replayed].sum() / total if total else 1.0)).tolist()


def _cap_samples(requested: np.ndarray, remaining: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Limit each source to its `remaining` samples; the others get the rest in proportion. Return (samples, capped)."""
    total, capped = requested.sum(), np.zeros(len(requested), bool)
    planned = requested
    while (exceeds := (planned > remaining) & ~capped).any():
        capped |= exceeds
        uncapped_samples = np.where(capped, 0.0, requested)
        budget = max(0.0, total - remaining[capped].sum())
        planned = np.where(capped, remaining, uncapped_samples * budget / max(uncapped_samples.sum(), 1e-300))
    return planned, capped


def _check_cap(
    shards: TokenShards, phase: PhaseConfig, requested: np.ndarray, planned: np.ndarray, limit: np.ndarray, where: str
) -> None:
    """Raise `InputError` if `max_epochs` reduces a source with an explicit weight, or leaves too few samples."""
    cap = f"{where}.max_epochs ({phase.max_epochs:g})"
    for index, source in enumerate(shards.sources):
        if source.get("name") in phase.weights and max(requested[index], planned[index]) > limit[index] + 0.5:
            raise InputError(
                f"{cap}: the weight of {source['name']} requires {round(requested[index]):,} of its sequences, but "
                f"only {int(limit[index]):,} are left before this limit. Lower its weight or the steps, or raise "
                "max_epochs."
            )
    if planned.sum() < phase.sequences - 0.5:
        raise InputError(
            f"{cap}: the phase reads {phase.sequences:,} sequences, but its sources have only "
            f"{int(limit[requested > 0].sum()):,} left before this limit. Lower its steps, raise "
            "max_epochs or add text."
        )

"""What the text of a run has: tokens of a sequence and of an epoch, measured on the prepared corpus."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pretrain.batches.batch import StepBatch
from pretrain.batches.loader import BatchMaker
from pretrain.common.errors import InputError
from pretrain.common.files import MANIFEST
from pretrain.config import PhaseConfig, PretrainConfig
from pretrain.corpus.prepare import describe
from pretrain.corpus.shards import open_shards
from pretrain.corpus.stored import prepared_manifest
from pretrain.work import expected_length

_SAMPLED, _BATCH = 1024, 64  # sequences of each phase, and how many at a time
# Bytes of raw text for each token, if the corpus is not prepared: those of Wikipedia and novels in English with a
# vocabulary of 16,000.
BYTES_PER_TOKEN = 4.4


@dataclass(frozen=True)
class PhaseText:
    """Means of the sequences of one phase."""

    mean_length: float  # tokens
    samples_per_epoch: float  # infinite if unknown


@dataclass(frozen=True)
class Text:
    """The text of a run.

    Attributes:
        phases: one for each of the config's.
        source: where the figures come from, as a sentence.
        is_prepared: whether the corpus is, so that a run can be timed.
    """

    phases: tuple[PhaseText, ...]
    source: str
    is_prepared: bool

    @property
    def lengths(self) -> list[float]:
        return [phase.mean_length for phase in self.phases]


def read_text(config: PretrainConfig) -> Text:
    """The text of the config's corpus: measured if it is prepared, else estimated from the size of its sources."""
    folder = config.corpus.dir
    if prepared_manifest(config.corpus) and (config.corpus.folder / MANIFEST).exists():
        phases = tuple(_measured(config, number) for number in range(len(config.phases)))
        tokens = phases[0].samples_per_epoch * phases[0].mean_length
        return Text(phases, f"{folder}: {tokens / 1e6:,.4g} million tokens in an epoch", True)
    lengths = [expected_length(config, phase) for phase in config.phases]
    try:
        size, why = describe(config)["text_bytes"], ", and its size is not known"
    except InputError as error:  # the run can be planned before its text is there
        size, why = math.inf, f", and cannot be prepared yet ({error})"
    if not 0 < size < math.inf:
        phases = tuple(PhaseText(length, math.inf) for length in lengths)
        return Text(phases, f"{folder}: not prepared{why}. Assumed: text that does not repeat.", False)
    tokens = size / BYTES_PER_TOKEN
    phases = tuple(PhaseText(length, max(1.0, tokens / length)) for length in lengths)
    guess = (
        f"{tokens / 1e6:,.4g} million tokens in an epoch, one for each {BYTES_PER_TOKEN} of about {size / 1e6:,.4g} "
        "million bytes of text"
    )
    return Text(phases, f"{folder}: not prepared. Assumed: {guess}. `prepare` it, and they are counted.", False)


def sampled_steps(maker: BatchMaker, phase: PhaseConfig, size: int, sequences: int) -> Iterator[StepBatch]:
    """Batches of `size` sequences, about `sequences` in all, at even distances over the phase."""
    parts = max(1, min(sequences // size, phase.sequences // size))
    for part in range(parts):
        yield maker.make((phase.sequences - size) * part // max(1, parts - 1), size)


def _measured(config: PretrainConfig, number: int) -> PhaseText:
    shards, phase = open_shards(config.corpus.folder, "train"), config.phases[number]
    maker = BatchMaker(shards, config, number, seed=config.seed, rank=0, world_size=1)
    size = min(phase.sequences, maker.samples_per_epoch, _BATCH)
    steps = list(sampled_steps(maker, phase, size, _SAMPLED))
    mean = sum(step.tokens for step in steps) / sum(step.sequences for step in steps)
    return PhaseText(mean, maker.samples_per_epoch)

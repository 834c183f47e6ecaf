"""Samples: which tokens each one reads, addressed by its number (invariants 1 and 4).

    number -> source (`order`) -> epoch, window (`blocks`) -> unit of text -> span (`cuts`) -> segments (`pairs`)

Everything is vectorized over samples. Only to count the samples of each block takes a pass over the corpus.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from pretrain.batches.blocks import WINDOW_BLOCKS, Blocks, blocks_of, sample_counts, window_blocks_for
from pretrain.batches.cuts import Cutting
from pretrain.batches.mixing import SourceReading, plan_mix
from pretrain.batches.order import Mixture
from pretrain.batches.plan import Rows, SamplePlan, gather
from pretrain.batches.source import Machine, SourceProgress, SourceSamples, StreamedBlocks
from pretrain.batches.text import ShardText
from pretrain.common.errors import InputError
from pretrain.common.wording import counted
from pretrain.config import PairsConfig, PhaseConfig, PretrainConfig
from pretrain.corpus.shards import TokenShards

SAMPLER = 4
"""Which samples a number means, and what a `Rollback` holds. A run with other ones cannot be resumed: 1 did not read
every token, 2 shuffled the samples of a window without regard to their blocks, and 3 lost the position in a source
where the mixture changed.
"""


@dataclass(frozen=True)
class Rollback:
    """Where the data of a run continue after its last rollback: before `step`, from `read` on."""

    step: int
    read: list[list[Any]]  # [name, fingerprint, *SourceProgress] of each source


def rolled_back(
    shards: TokenShards, config: PretrainConfig, step: int, failed: int, before: Rollback | None
) -> Rollback:
    """Return the rollback to `step` of a run of which the first `failed` steps have read their data.

    Args:
        before: the last rollback until then.
    """
    phase, within = config.phase_at(failed - 1)
    sampler = phase_sampler(shards, config, phase, seed=config.seed, rollback=before)
    read = sampler.read_after(config.phases[phase].first_sample(within + 1))
    known = zip(_source_names(shards), read, strict=True)
    return Rollback(step, [[*source, *astuple(progress)] for source, progress in known if progress is not None])


def phase_sampler(shards: TokenShards, config: PretrainConfig, phase: int, **more: Any) -> Sampler:
    """Return the samples of a phase; arguments and errors as of `phase_samplers`."""
    return next(itertools.islice(phase_samplers(shards, config, **more), phase, None))


def phase_samplers(
    shards: TokenShards,
    config: PretrainConfig,
    *,
    seed: int,
    rollback: Rollback | None = None,
    machine: Machine = Machine(),  # noqa: B008 - frozen
) -> Iterator[Sampler]:
    """Yield the samples of each phase, which continue each source where the phases before it have read to.

    At another sequence length they continue at the end of the window that is open.

    Args:
        rollback: the last one of the run. Of its phase, samples are right from its step on.
        machine: only its samples can be planned (`Sampler.owners`).

    Raises `InputError` if the corpus has no sample for a phase.
    """
    phase_of, within = config.phase_at(rollback.step) if rollback else (len(config.phases), 0)
    planned: Sequence[SourceProgress | None] = ()
    resumed: tuple[int, Sequence[SourceProgress | None]] | None = None
    for number, settings in enumerate(config.phases):
        if rollback and number == phase_of:
            resumed = settings.first_sample(within), _read_before(rollback, shards)
        made = functools.partial(
            Sampler,
            shards,
            config.pairs,
            sequence_length=settings.sequence_length,
            seed=seed,
            phase=settings,
            where=f"phases.{number}",
            start=planned,
            batch=settings.global_sequences,
            machine=machine,
        )
        sampler = made(resumed=resumed)
        yield sampler
        planned = (made() if resumed else sampler).read_after(settings.sequences)
        resumed = resumed and (0, sampler.read_after(settings.sequences))


def _read_before(rollback: Rollback, shards: TokenShards) -> list[SourceProgress | None]:
    known = {(name, fingerprint): SourceProgress(*progress) for name, fingerprint, *progress in rollback.read}
    return [known.get(source) for source in _source_names(shards)]


def _source_names(shards: TokenShards) -> list[tuple[str, str]]:
    """(name, fingerprint) of each source; replayed ones have no name."""
    return [(source.get("name", ""), shards.source_fingerprint(n)) for n, source in enumerate(shards.sources)]


def held_out_sampler(shards: TokenShards, config: PretrainConfig, phase: int) -> Sampler:
    """The samples that a phase is evaluated on: the same for every seed, mixed as the corpus says."""
    length = config.phases[phase].sequence_length
    return Sampler(shards, config.pairs, sequence_length=length, seed=0)


class Sampler:
    """The samples of one split of a corpus at one sequence length.

    A sample is a pure function of its source's fingerprint, `seed`, the source's epoch and its index in it, and of how
    sequences are cut. Which of them is sample n follows from the `phase` and `start`.

    Args:
        phase: says how much is read of each source, otherwise the corpus does; `where` is its place in the config.
        start: how far each source was read when the phase was planned, from `read_after`.
        resumed: (first sample, how far each source was read before it), if that is not what was planned.
        batch: samples that are read together; windows are never smaller.
        block_tokens: tokens of a block; by default those of the corpus.
        window_blocks: blocks of the windows of all sources together, at least; by default `WINDOW_BLOCKS`.
        machine: only its samples can be planned (`owners`).

    Raises `InputError` if the corpus has no sample, or no source of such a name.
    """

    def __init__(
        self,
        shards: TokenShards,
        pairs: PairsConfig,
        *,
        sequence_length: int,
        seed: int,
        phase: PhaseConfig | None = None,
        where: str = "",
        start: Sequence[SourceProgress | None] = (),
        resumed: tuple[int, Sequence[SourceProgress | None]] | None = None,
        batch: int = 1,
        block_tokens: int = 0,
        window_blocks: int = 0,
        machine: Machine = Machine(),  # noqa: B008 - frozen
    ) -> None:
        if not shards.shards:
            raise InputError(f"{shards.folder}: no text in this split. Prepare the corpus again.")
        self.shards = shards
        self.pairs = pairs
        self._lock = threading.Lock()
        self.paired = pairs.has_classifier
        self.special_tokens = 3 if self.paired else 2  # at least
        self.capacity = sequence_length - self.special_tokens
        self._text = ShardText(shards.shards)
        joined = pairs.chosen_format == "full_sentences"
        cutting = Cutting(self.capacity, 2 if self.paired or joined else 1, pairs.short_share, joined)
        own = [shards.of_source(source) for source in range(len(shards.sources))]
        self._check_partners(own)
        blocks = [blocks_of(shards.shards, one, block_tokens) for one in own]
        counts = sample_counts(self._text, blocks, cutting, shards)
        shares = _uncapped_shares(shards, phase, [int(each.sum()) for each in counts], where)
        most = window_blocks or WINDOW_BLOCKS
        start = list(start) or [None] * len(own)
        first, self._start = resumed or (0, start)
        self.sources = [
            SourceSamples(
                self._text,
                one,
                its_blocks,
                its_counts,
                cutting=cutting,
                pairs=pairs,
                fingerprint=shards.source_fingerprint(number),
                seed=seed,
                window_blocks=window_blocks_for(its_counts, batch, share, most),
                before=self._start[number],
                machine=machine,
                held=_streamed(shards, its_blocks),
            )
            for number, (one, its_blocks, its_counts, share) in enumerate(zip(own, blocks, counts, shares, strict=True))
        ]
        # A rollback changes what is read, not the mixture.
        read = self._samples_of(start)
        self.mix = plan_mix(shards, phase, [source.samples for source in self.sources], read, where)
        self._mixture = Mixture(self.mix.shares)
        self._before = self._mixture.counts(first)  # of each source, which others than `self` have read
        self._first = [a - b for a, b in zip(self._samples_of(self._start), self._before, strict=True)]

    def _samples_of(self, progress: Sequence[SourceProgress | None]) -> list[int]:
        """The first sample of each source that reads nothing of what was read before."""
        both = zip(self.sources, progress, strict=True)
        return [source.first_after(before) if source.samples else 0 for source, before in both]

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Keep the text of the samples that are planned within, for one thread at a time."""
        with self._lock:
            for source in self.sources:
                source.in_use = []
            try:
                yield
            finally:
                for source in self.sources:
                    source.in_use = None

    def check_cache(self, where: str) -> None:
        """Raise `InputError` if what is read at a time is more than the cache of a streamed corpus."""
        caches = {id(shard.cache): shard.cache for shard in self.shards.shards if shard.cache}
        pairs = zip(self.sources, self._mixture.shares, strict=True)
        least = sum(source.held_bytes() for source, share in pairs if share)
        for cache in caches.values():
            cache.check_fits(least, where)

    @property
    def samples_per_epoch(self) -> int:
        """Samples of one pass over the corpus."""
        return self.mix.epoch

    @property
    def identity(self) -> list[list[Any]]:
        """What decides which sample has a number: [name, fingerprint, share] of each source that is read."""
        both = zip(_source_names(self.shards), self._mixture.shares, strict=True)
        return [[*source, share] for source, share in both if share]

    def readings(self, samples: int, left_out: Sequence[int] = ()) -> list[SourceReading]:
        """What the first `samples` read of each source, of which so many tokens are left out."""
        counts, tokens = np.array(self._mixture.counts(samples)), np.zeros(len(self.sources))
        for shard in self.shards.shards:
            tokens[shard.source] += len(shard.tokens)
        each = np.array([max(1, source.samples) for source in self.sources])
        shares = counts * tokens / each
        return [
            SourceReading(
                source.get("name", "replayed text"),
                float(shares[number] / shares.sum()),
                float(counts[number] / each[number]),
                float((self._first[number] + counts[number]) / each[number]),
                self.mix.capped[number],
                left_out[number] if left_out else 0,
            )
            for number, source in enumerate(self.shards.sources)
            if counts[number]
        ]

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` are from each source."""
        return self._mixture.counts(samples)

    def only(self, counts: Sequence[int]) -> Sampler:
        """The sampler of which the first samples are so many of each source, its first ones."""
        other = copy.copy(self)
        other._mixture = Mixture(counts)
        return other

    def read_after(self, samples: int) -> list[SourceProgress | None]:
        """How far each source is read after so many samples; the `start` of a sampler that continues from there."""
        counts = self._mixture.counts(samples)
        rows = zip(self.sources, self._first, counts, self._before, self._start, strict=True)
        return [
            source.progress(first + count) if count > others else before
            for source, first, count, others, before in rows
        ]

    def left_out(self, source: int, reader: SourceSamples | None) -> int:
        """Tokens of the open window of a source that these samples leave out, as they are cut otherwise than those of
        `reader`, who has read it last.
        """
        before = self._start[source]
        return reader.unread(before) if reader and before and reader.cutting != self.sources[source].cutting else 0

    def owners(self, samples: np.ndarray) -> np.ndarray:
        """The machine that each of `samples` belongs to, int64 [B]. Machines have the same number, to within a few."""
        source, before = self._mixture.locate(samples)
        owner = np.zeros_like(samples)
        for number in np.unique(source).tolist():
            own = np.flatnonzero(source == number)
            owner[own] = self.sources[number].owners(before[own] + self._first[number])
        return owner

    def plan(self, samples: np.ndarray) -> SamplePlan:
        """Plan `samples` of this machine (int64 [B], counted across epochs); reads sentence and document offsets, no
        tokens.
        """
        self._text.looked_up(len(samples))
        source, before = self._mixture.locate(samples)
        plans, rows = [], []
        for number in np.unique(source).tolist():
            own = np.flatnonzero(source == number)
            plans.append(self.sources[number].plan(before[own] + self._first[number]))
            rows.append(own)
        plan = SamplePlan.joined(plans)[np.argsort(np.concatenate(rows), kind="stable")]
        plan.number[:] = samples
        return plan

    def gather(self, plan: SamplePlan) -> Rows:
        """Fetch the tokens of a plan, as `plan.gather`."""
        return gather(self.shards, self._text, plan, paired=self.paired)

    def _check_partners(self, shards: Sequence[Sequence[int]]) -> None:
        """Raise `InputError` if no source has documents that could exchange segments, and they should."""
        most = max(sum(self._text.document_count(shard) for shard in own) for own in shards)
        if self.pairs.objective == "nsp" and most < 2:
            raise InputError(
                f"{self.shards.folder}: {counted(most, 'document')} in its largest source, but random next sentences "
                "need at least two. Add documents or set pairs.objective: none."
            )


def _uncapped_shares(shards: TokenShards, phase: PhaseConfig | None, samples: Sequence[int], where: str) -> list[float]:
    """The share of each source in the samples of a phase, whatever was read before; it decides the size of windows."""
    uncapped = None if phase is None else phase.model_copy(update={"max_epochs": 0})
    shares = plan_mix(shards, uncapped, samples, [0] * len(samples), where).shares
    return [share / sum(shares) for share in shares]


def _streamed(shards: TokenShards, blocks: Blocks) -> StreamedBlocks | None:
    """Where the blocks of a source are held; None if it is not streamed."""
    cache = shards.shards[int(blocks.shard[0])].cache if len(blocks) else None
    if cache is None:
        return None
    first = np.searchsorted(blocks.shard, blocks.shard)  # neighbors are of the same shard
    return StreamedBlocks(cache, cache.numbers(blocks.shard, np.arange(len(blocks)) - first))

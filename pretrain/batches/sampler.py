"""Maps the index of a sample to the tokens that it reads (invariants 1 and 4 in docs/invariants.md).

    index -> source (`order`) -> epoch, window (`blocks`) -> unit of text -> span (`cuts`) -> segments (`pairs`)

Everything is vectorized over samples. Only counting the samples of each block needs a pass over the corpus.
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
from pretrain.batches.plan import PackedTokens, SamplePlan, gather
from pretrain.batches.source import Machine, SourceProgress, SourceSamples, StreamedBlocks
from pretrain.batches.text import ShardText
from pretrain.common.errors import InputError
from pretrain.common.wording import counted
from pretrain.config import PairsConfig, PhaseConfig, PretrainConfig
from pretrain.corpus.shards import TokenShards

SAMPLER_VERSION = 4
"""Version of the order of samples and of `Rollback`; a run with another version cannot be resumed."""


@dataclass(frozen=True)
class Rollback:
    """The latest rollback of a run: from `step` on, the run reads the data that follows `read`."""

    step: int
    read: list[list[Any]]  # progress in each source: [name, fingerprint, *SourceProgress]


def make_rollback(
    shards: TokenShards, config: PretrainConfig, step: int, steps_read: int, previous: Rollback | None
) -> Rollback:
    """Return the rollback to `step` of a run that has read the data of its first `steps_read` steps."""
    phase, phase_step = config.phase_at(steps_read - 1)
    sampler = phase_sampler(shards, config, phase, seed=config.seed, rollback=previous)
    all_progress = sampler.progress_after(config.phases[phase].first_sample(phase_step + 1))
    pairs = zip(_source_ids(shards), all_progress, strict=True)
    return Rollback(step, [[*source, *astuple(progress)] for source, progress in pairs if progress is not None])


def phase_sampler(shards: TokenShards, config: PretrainConfig, phase: int, **arguments: Any) -> Sampler:
    """Return the sampler of a phase; arguments and errors are as in `phase_samplers`."""
    return next(itertools.islice(phase_samplers(shards, config, **arguments), phase, None))


def phase_samplers(
    shards: TokenShards,
    config: PretrainConfig,
    *,
    seed: int,
    rollback: Rollback | None = None,
    machine: Machine = Machine(),  # noqa: B008 - frozen
) -> Iterator[Sampler]:
    """Yield the sampler of each phase; each source continues where the previous phases stopped.

    If the sequence length changes, a source continues after the window that it is reading.

    Args:
        rollback: the run's latest rollback. The sampler of the rollback's phase is only valid from that step on.
        machine: the machine whose samples can be planned (`Sampler.owners`).

    Raises `InputError` if the corpus has no sample for a phase.
    """
    rollback_phase, phase_step = config.phase_at(rollback.step) if rollback else (len(config.phases), 0)
    planned_progress: Sequence[SourceProgress | None] = ()
    resumed: tuple[int, Sequence[SourceProgress | None]] | None = None
    for phase_index, settings in enumerate(config.phases):
        if rollback and phase_index == rollback_phase:
            resumed = settings.first_sample(phase_step), _rollback_progress(rollback, shards)
        make_sampler = functools.partial(
            Sampler,
            shards,
            config.pairs,
            sequence_length=settings.sequence_length,
            seed=seed,
            phase=settings,
            where=f"phases.{phase_index}",
            start=planned_progress,
            batch_size=settings.global_sequences,
            machine=machine,
        )
        sampler = make_sampler(resumed=resumed)
        yield sampler
        planned_progress = (make_sampler() if resumed else sampler).progress_after(settings.sequences)
        resumed = resumed and (0, sampler.progress_after(settings.sequences))


def _rollback_progress(rollback: Rollback, shards: TokenShards) -> list[SourceProgress | None]:
    known = {(name, fingerprint): SourceProgress(*progress) for name, fingerprint, *progress in rollback.read}
    return [known.get(source) for source in _source_ids(shards)]


def _source_ids(shards: TokenShards) -> list[tuple[str, str]]:
    """Return (name, fingerprint) of each source; the name of a replayed source is empty."""
    return [(source.get("name", ""), shards.source_fingerprint(n)) for n, source in enumerate(shards.sources)]


def held_out_sampler(shards: TokenShards, config: PretrainConfig, phase: int) -> Sampler:
    """Return the sampler of held-out text for a phase: independent of the seed, with the corpus's mix of sources."""
    length = config.phases[phase].sequence_length
    return Sampler(shards, config.pairs, sequence_length=length, seed=0)


class Sampler:
    """The samples of one split of a corpus at one sequence length.

    A sample is a pure function of its source's fingerprint, `seed`, the source's epoch, its index in this epoch, and
    the cutting of sequences. `phase` and `start` determine which of these samples has index n.

    Args:
        phase: the phase that sets the share of each source; without it, the weights in the corpus apply.
        where: path of `phase` in the config, for errors.
        start: progress in each source at the planned start of the phase, from `progress_after`.
        resumed: None, or after a rollback: (first sample to read, progress in each source before this sample).
        batch_size: number of samples in a batch; windows are large enough for a batch.
        block_tokens: approximate number of tokens per block; by default, the blocks of the corpus are used.
        window_blocks: minimum number of blocks in the windows of all sources together, by default `WINDOW_BLOCKS`.
        machine: the machine whose samples can be planned (`owners`).

    Raises `InputError` if the corpus has no sample or lacks a configured source.
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
        batch_size: int = 1,
        block_tokens: int = 0,
        window_blocks: int = 0,
        machine: Machine = Machine(),  # noqa: B008 - frozen
    ) -> None:
        if not shards.shards:
            raise InputError(f"{shards.folder}: no text in this split. Prepare the corpus again.")
        self.shards, self.pairs = shards, pairs
        self._lock = threading.Lock()
        self.paired = pairs.has_classifier
        self.special_tokens = 3 if self.paired else 2  # per sequence, not counting separators between documents
        self.capacity = sequence_length - self.special_tokens
        self._text = ShardText(shards.shards)
        crosses_documents = pairs.chosen_format == "full_sentences"
        min_tokens = 2 if self.paired or crosses_documents else 1
        cutting = Cutting(self.capacity, min_tokens, pairs.short_share, crosses_documents)
        source_shards = [shards.of_source(source) for source in range(len(shards.sources))]
        self._check_partners(source_shards)
        blocks = [blocks_of(shards.shards, indices, block_tokens) for indices in source_shards]
        counts = sample_counts(self._text, blocks, cutting, shards)
        shares = _uncapped_shares(shards, phase, [int(block_counts.sum()) for block_counts in counts], where)
        total_blocks = window_blocks or WINDOW_BLOCKS
        start = list(start) or [None] * len(source_shards)
        first_sample, self._start = resumed or (0, start)
        self.sources = [
            SourceSamples(
                self._text,
                shard_indices,
                source_blocks,
                source_counts,
                cutting=cutting,
                pairs=pairs,
                fingerprint=shards.source_fingerprint(index),
                seed=seed,
                window_blocks=window_blocks_for(source_counts, batch_size, share, total_blocks),
                progress=self._start[index],
                machine=machine,
                streamed=_streamed_blocks(shards, source_blocks),
            )
            for index, (shard_indices, source_blocks, source_counts, share) in enumerate(
                zip(source_shards, blocks, counts, shares, strict=True)
            )
        ]
        # A rollback changes which samples are read, but not the mix.
        samples_read = self._next_samples(start)
        self.mix = plan_mix(shards, phase, [source.samples for source in self.sources], samples_read, where)
        self._mixture = Mixture(self.mix.shares)
        self._earlier_counts = self._mixture.counts(first_sample)  # samples of each source that earlier samplers read
        # Added to a sample's index among the phase's samples of a source, to get its index in the source.
        self._offsets = np.subtract(self._next_samples(self._start), self._earlier_counts).tolist()

    def _next_samples(self, progress: Sequence[SourceProgress | None]) -> list[int]:
        """Return the index of the first sample of each source after its `progress`."""
        pairs = zip(self.sources, progress, strict=True)
        return [source.next_sample(position) if source.samples else 0 for source, position in pairs]

    @contextlib.contextmanager
    def keep_text_cached(self) -> Iterator[None]:
        """Keep the text of all samples that are planned in this context cached; only one thread at a time can enter."""
        with self._lock:
            for source in self.sources:
                source.held_windows = []
            try:
                yield
            finally:
                for source in self.sources:
                    source.held_windows = None

    def check_cache(self, where: str) -> None:
        """Raise `InputError` if the cache of a streamed corpus is too small for the blocks that are held at once."""
        caches = {id(shard.cache): shard.cache for shard in self.shards.shards if shard.cache}
        pairs = zip(self.sources, self._mixture.shares, strict=True)
        required = sum(source.held_bytes() for source, share in pairs if share)
        for cache in caches.values():
            cache.check_fits(required, where)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one pass over the corpus."""
        return self.mix.epoch_samples

    @property
    def identity(self) -> list[list[Any]]:
        """Values that determine the order of samples: [name, fingerprint, share] of each source with a share."""
        named_shares = zip(_source_ids(self.shards), self._mixture.shares, strict=True)
        return [[*source, share] for source, share in named_shares if share]

    def readings(self, samples: int, skipped_tokens: Sequence[int] = ()) -> list[SourceReading]:
        """Return how much of each source the first `samples` samples read; `skipped_tokens` has a count per source."""
        counts, tokens = np.array(self._mixture.counts(samples)), np.zeros(len(self.sources))
        for shard in self.shards.shards:
            tokens[shard.source] += len(shard.tokens)
        epoch_samples = np.array([max(1, source.samples) for source in self.sources])
        tokens_read = counts * tokens / epoch_samples
        return [
            SourceReading(
                source.get("name", "replayed text"),
                float(tokens_read[index] / tokens_read.sum()),
                float(counts[index] / epoch_samples[index]),
                float((self._offsets[index] + counts[index]) / epoch_samples[index]),
                self.mix.capped[index],
                skipped_tokens[index] if skipped_tokens else 0,
            )
            for index, source in enumerate(self.shards.sources)
            if counts[index]
        ]

    def counts(self, samples: int) -> list[int]:
        """Return the number of samples of each source among the first `samples`."""
        return self._mixture.counts(samples)

    def limit_to(self, counts: Sequence[int]) -> Sampler:
        """Return a sampler of only the first `counts[i]` samples of each source i."""
        limited = copy.copy(self)
        limited._mixture = Mixture(counts)
        return limited

    def progress_after(self, samples: int) -> list[SourceProgress | None]:
        """Return the progress in each source after the first `samples`: the `start` of the next phase's sampler."""
        counts = self._mixture.counts(samples)
        columns = zip(self.sources, self._offsets, counts, self._earlier_counts, self._start, strict=True)
        return [
            source.progress(offset + count) if count > earlier else start
            for source, offset, count, earlier, start in columns
        ]

    def skipped_tokens(self, source: int, last_reader: SourceSamples | None) -> int:
        """Count the tokens of a source that this sampler skips: the rest of the window that `last_reader` left open; 0
        if both cut samples in the same way.
        """
        start, cutting = self._start[source], self.sources[source].cutting
        return last_reader.count_unread(start) if last_reader and start and last_reader.cutting != cutting else 0

    def owners(self, samples: np.ndarray) -> np.ndarray:
        """Return the index of the machine that reads each sample, int64 [B]; machines read nearly equal numbers."""
        source, index_in_source = self._mixture.locate(samples)
        owner = np.zeros_like(samples)
        for source_index in np.unique(source).tolist():
            indices = np.flatnonzero(source == source_index)
            owner[indices] = self.sources[source_index].owners(index_in_source[indices] + self._offsets[source_index])
        return owner

    def plan(self, samples: np.ndarray) -> SamplePlan:
        """Plan `samples` of this machine (int64 [B], indices counted across epochs). Reads offsets, but no tokens."""
        self._text.count_lookups(len(samples))
        source, index_in_source = self._mixture.locate(samples)
        plans, positions = [], []
        for source_index in np.unique(source).tolist():
            indices = np.flatnonzero(source == source_index)
            plans.append(self.sources[source_index].plan(index_in_source[indices] + self._offsets[source_index]))
            positions.append(indices)
        plan = SamplePlan.concatenate(plans)[np.argsort(np.concatenate(positions), kind="stable")]
        plan.sample_index[:] = samples
        return plan

    def gather(self, plan: SamplePlan) -> PackedTokens:
        """Fetch the tokens of a plan, as described in `pretrain.batches.plan.gather`."""
        return gather(self.shards, self._text, plan, paired=self.paired)

    def _check_partners(self, source_shards: Sequence[Sequence[int]]) -> None:
        """Raise `InputError` if random next sentences are configured, but no source has two documents."""
        largest = max(sum(self._text.document_count(shard) for shard in indices) for indices in source_shards)
        if self.pairs.objective == "nsp" and largest < 2:
            raise InputError(
                f"{self.shards.folder}: {counted(largest, 'document')} in its largest source, but random next "
                "sentences need at least two. Add documents or set pairs.objective: none."
            )


def _uncapped_shares(shards: TokenShards, phase: PhaseConfig | None, samples: Sequence[int], where: str) -> list[float]:
    """Return the share of each source in a phase without `max_epochs`; window sizes depend on it."""
    uncapped = None if phase is None else phase.model_copy(update={"max_epochs": 0})
    shares = plan_mix(shards, uncapped, samples, [0] * len(samples), where).shares
    return [share / sum(shares) for share in shares]


def _streamed_blocks(shards: TokenShards, blocks: Blocks) -> StreamedBlocks | None:
    """Return the cache of a source's blocks, or None if the source is not streamed."""
    cache = shards.shards[int(blocks.shard[0])].cache if len(blocks) else None
    if cache is None:
        return None
    first_block = np.searchsorted(blocks.shard, blocks.shard)  # blocks of a shard are adjacent
    return StreamedBlocks(cache, cache.global_indices(blocks.shard, np.arange(len(blocks)) - first_block))

"""The samples of one source at one sequence length, addressed by index (invariant 1 in docs/invariants.md)."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from pretrain.batches.blocks import Blocks, OpenWindow, SourceOrder, Units, Window
from pretrain.batches.cuts import Cutting
from pretrain.batches.order import draw, permute, ranges, root_key
from pretrain.batches.pairs import PairSpans, exchange_segments, swap_segments
from pretrain.batches.plan import SamplePlan
from pretrain.batches.text import DocumentSentences, JoinedSentences, ShardText, Unit
from pretrain.config import PairsConfig
from pretrain.corpus.block_cache import BlockCache, Lease

_CELL_SAMPLES = 8  # samples of a cell (`pairs`) per token of capacity, so that most lengths of B occur several times
_CACHED_STRATA, _CACHED_WINDOWS = 2, 2  # numbers of cached strata (`_plan_window`) and windows
_GOLDEN, _LOW_BITS = 0x9E3779B9, (1 << 32) - 1  # 2^32 / golden ratio: its multiples modulo 2^32 are evenly spread
_OWNER_BATCH, _COUNT_BATCH = 1 << 16, 1 << 14  # numbers of samples processed at a time
_WINDOW_BITS = 32  # bits for the index of a window in an epoch
_OFFSET_BITS = 44  # bits for a token offset within a shard
_MIN_BLOCKS = 16  # minimum number of blocks in a division of a window, so that divisions have similar numbers of tokens

V = TypeVar("V")


@dataclass(frozen=True)
class SourceProgress:
    """Position in a source, independent of how the source was read, so that invariant 1 holds across phases."""

    cutting: str  # identity of the `Cutting`; a sampler with another cutting continues after the open window
    sample: int  # index of the next sample, counted across epochs
    epoch: int
    start: int  # start of the open (partly read) window in the epoch's block order
    stop: int  # end of the open window; equal to `start` if no window is open

    def window(self, blocks: int, *, is_continued: bool) -> OpenWindow:
        """Return the open window if `is_continued`, else the empty window after it, in a source of `blocks` blocks."""
        if is_continued:
            return OpenWindow(self.epoch, self.start, self.stop)
        return OpenWindow(self.epoch + 1, 0, 0) if self.stop == blocks else OpenWindow(self.epoch, self.stop, self.stop)


@dataclass(frozen=True)
class Machine:
    """One of the machines that divide the text of a window among them."""

    index: int = 0
    count: int = 1


@dataclass(frozen=True)
class StreamedBlocks:
    """The cache of a source's blocks, and their indices in the cache, int64 [N]."""

    cache: BlockCache
    block_indices: np.ndarray


class SourceSamples:
    """The samples of one source, counted from 0 across epochs.

    Args:
        shards: indices of the source's shards in `text`.
        counts: number of samples of each block, [N].
        fingerprint: digest of the source's tokens.
        window_blocks: minimum number of blocks of a window.
        progress: position up to which the source has been read; None for the start.
        machine: the machine whose samples can be planned (`owners`).
        streamed: the cache of the source's blocks, if the source is streamed.
    """

    def __init__(
        self,
        text: ShardText,
        shards: list[int],
        blocks: Blocks,
        counts: np.ndarray,
        *,
        cutting: Cutting,
        pairs: PairsConfig,
        fingerprint: str,
        seed: int,
        window_blocks: int,
        progress: SourceProgress | None,
        machine: Machine,
        streamed: StreamedBlocks | None,
    ) -> None:
        self._machine, self._streamed = machine, streamed
        self.held_windows: list[_LoadedWindow] | None = None  # windows whose text stays cached, if not None
        self._text, self._blocks, self._cutting, self._pairs = text, blocks, cutting, pairs
        self.cutting = str(cutting.identity)
        window = progress and progress.window(len(counts), is_continued=progress.cutting == self.cutting)
        # The block order is the same for all sequence lengths, so that a phase knows which blocks earlier phases read.
        self.order = SourceOrder(counts, root_key(fingerprint, seed), window_blocks, window)
        key = root_key(fingerprint, seed, self.cutting)
        self._shuffle_key, self._cut_key, self._sample_key = draw(key, np.arange(3))
        self._shard_in_source = np.zeros(1 + max(shards, default=0), np.int64)  # index of each shard within the source
        self._shard_in_source[shards] = np.arange(len(shards))
        self._windows: _LruCache[_LoadedWindow] = _LruCache(_CACHED_WINDOWS)
        self._strata: _LruCache[SamplePlan] = _LruCache(_CACHED_STRATA)

    @property
    def samples(self) -> int:
        """Number of samples in an epoch."""
        return self.order.samples

    def next_sample(self, progress: SourceProgress | None) -> int:
        """Return the index of the first sample after `progress`."""
        if progress is None:
            return 0
        if progress.cutting == self.cutting:
            return progress.sample
        return self.order.first_sample(progress.epoch, progress.stop)

    def progress(self, sample: int) -> SourceProgress:
        """Return the position in the source before `sample`."""
        window = self.order.open_window(sample)
        return SourceProgress(self.cutting, sample, window.epoch, window.start, window.stop)

    def count_unread(self, progress: SourceProgress) -> int:
        """Count the unread tokens in the open window of `progress`, by planning its remaining samples."""
        end = progress.sample
        if progress.start < progress.stop:
            end = self.order.first_sample(progress.epoch, progress.stop)
        batches = range(progress.sample, end, _COUNT_BATCH)
        return sum(int(self.plan(np.arange(n, min(n + _COUNT_BATCH, end))).content_length.sum()) for n in batches)

    def plan(self, samples: np.ndarray) -> SamplePlan:
        """Plan `samples` of this machine, int64 [B]."""
        plans, positions = [], []
        for indices, window, window_samples in self._group_by_window(samples):
            plans.append(self._plan_window(window, window_samples))
            positions.append(indices)
        return SamplePlan.concatenate(plans)[np.argsort(np.concatenate(positions), kind="stable")]

    def owners(self, samples: np.ndarray) -> np.ndarray:
        """Return the index of the machine that reads each sample, int64 [B], without reading text."""
        owner = np.zeros_like(samples)
        for indices, window, window_samples in self._group_by_window(samples):
            owner[indices] = window.owner[window_samples]
        return owner

    def _group_by_window(self, samples: np.ndarray) -> Iterator[tuple[np.ndarray, _LoadedWindow, np.ndarray]]:
        """Yield (indices into `samples`, window, indices of these samples in the window) for each window."""
        epoch, window, window_samples = self.order.locate(samples)
        group = (epoch << _WINDOW_BITS) + window
        for window_id in np.unique(group).tolist():
            indices = np.flatnonzero(group == window_id)
            loaded = self._load_window(*divmod(window_id, 1 << _WINDOW_BITS))
            if self.held_windows is not None:
                self.held_windows.append(loaded)
            yield indices, loaded, window_samples[indices]

    def _load_window(self, epoch: int, window: int) -> _LoadedWindow:
        loaded = self._windows.get((epoch, window))
        if loaded is None:
            block_indices, order = self.order.blocks(epoch, window), self.order.epoch(epoch)
            # The key depends on the first block, not the window's index, which changes if another phase continues it.
            key = draw(draw(self._shuffle_key, epoch), int(order.bounds[window]))
            samples = Window(block_indices, self.order.counts[block_indices], key)
            division, local_blocks = self._divide(block_indices), self._local_blocks(block_indices)
            self._windows.make_room()
            lease = self._hold_blocks(epoch, window, local_blocks) if self._streamed else None
            owner = self._sample_owners(block_indices, samples) if self._machine.count > 1 else np.zeros(0, np.int16)
            units = Units(self._text, self._blocks, block_indices[local_blocks], self._cutting)
            first_sample = int(order.samples_before[window])
            loaded = _LoadedWindow(epoch, first_sample, samples, division, local_blocks, owner, units, lease)
            self._windows.put((epoch, window), loaded)
        return loaded

    def window_text(self, epoch: int, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (shard, start token, end token) of the blocks of a window, int64 [W] each."""
        block_indices, blocks = self.order.blocks(epoch, window), self._blocks
        table = blocks.table[block_indices]
        return blocks.shard[block_indices].astype(np.int64), table["begin"], table["end"]

    def _sample_owners(self, block_indices: np.ndarray, window: Window) -> np.ndarray:
        """Return the index of the machine that reads each sample of a window, int16 [S].

        Machines divide the window's tokens evenly, so two machines may read the block at their boundary. With sentence
        pairs, a machine needs both samples of a couple: each division of the window belongs to a group of machines, all
        of which read its text and take turns with its samples.
        """
        owner = np.empty(window.samples, np.int16)
        start, size, tokens = self._token_bounds(block_indices)
        division, count = self._divide(block_indices), self._machine.count
        groups = self._group_count(division) if self._pairs.has_classifier else count
        for batch_start in range(0, len(owner), _OWNER_BATCH):
            block, sample = window.locate(np.arange(batch_start, min(batch_start + _OWNER_BATCH, len(owner))))
            if self._pairs.has_classifier:
                machines = division[block] % groups
            else:  # spread a block's samples evenly over its machines, in proportion to their parts of the block
                machines = (start[block] + ((sample * _GOLDEN & _LOW_BITS) * size[block] >> 32)) * count // tokens
            owner[batch_start : batch_start + len(machines)] = machines
        for group in range(groups if count > groups else 0):
            members = np.flatnonzero(owner == group)
            owner[members] += (groups * (np.arange(len(members)) % (count // groups))).astype(np.int16)
        return owner

    def _divide(self, block_indices: np.ndarray) -> np.ndarray:
        """Divide a window into 2^n divisions of similar size; return the index of each block's division, int64 [W]."""
        loads = [(0, division) for division in range(1 << max(0, (len(block_indices) // _MIN_BLOCKS).bit_length() - 1))]
        table = self._blocks.table[block_indices]
        sizes = table["end"] - table["begin"]
        divisions = np.zeros(len(block_indices), np.int64)
        for index in np.argsort(-sizes, kind="stable").tolist():  # largest first, each to the smallest division
            tokens, divisions[index] = loads[0]
            heapq.heapreplace(loads, (tokens + int(sizes[index]), int(divisions[index])))
        return divisions

    def _group_count(self, division: np.ndarray) -> int:
        """Return the number of groups of machines that share a window, given the division of each block."""
        return math.gcd(1 + int(division.max(initial=0)), self._machine.count)

    def _local_blocks(self, block_indices: np.ndarray) -> np.ndarray:
        """Return the indices, within the window, of the blocks that this machine reads, int64."""
        machine, count = self._machine.index, self._machine.count
        if self._pairs.has_classifier:
            groups = self._group_count(division := self._divide(block_indices))
            return np.flatnonzero(division % groups == machine % groups)
        start, size, tokens = self._token_bounds(block_indices)
        return np.flatnonzero((start * count // tokens <= machine) & ((start + size - 1) * count // tokens >= machine))

    def _token_bounds(self, block_indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Return (tokens before each block of a window, tokens of each block, int64 [W] each; total tokens)."""
        table = self._blocks.table[block_indices]
        size = (table["end"] - table["begin"]).astype(np.int64)
        end = np.cumsum(size)
        return end - size, size, int(end[-1])

    def _hold_blocks(self, epoch: int, window: int, local_blocks: np.ndarray) -> Lease:
        """Wait for this machine's blocks of a window and keep them cached; prefetch its blocks of the next window."""
        assert self._streamed is not None
        lease = self._streamed.cache.hold(self._streamed.block_indices[self.order.blocks(epoch, window)[local_blocks]])
        next_blocks = self.order.next_blocks(epoch, window)
        self._streamed.cache.fetch_ahead(self._streamed.block_indices[next_blocks[self._local_blocks(next_blocks)]])
        return lease

    def held_bytes(self) -> int:
        """Return the maximum number of bytes of the source that this machine holds in its cache at once."""
        if self._streamed is None:
            return 0
        cache, indices = self._streamed.cache, self._streamed.block_indices
        total, largest = cache.bytes_of(indices), cache.largest_size(indices)
        windows = self.order.largest_window_group()
        return min(total, largest * sum(len(self._local_blocks(blocks)) + 1 for blocks in windows))

    def _plan_window(self, window: _LoadedWindow, window_samples: np.ndarray) -> SamplePlan:
        """Plan the samples with these indices in a window, int64 [B]."""
        block, sample = window.sample_order.locate(window_samples)
        if not self._pairs.has_classifier:
            return self._plan_single(*self._spans(window, window_samples, block, sample))
        counts = window.sample_order.counts
        # A stratum has one cell per division and an equal fraction of each block, so its samples are close together.
        divisions = 1 + int(window.division.max())
        strata = max(1, window.sample_order.samples // (divisions * _CELL_SAMPLES * self._cutting.capacity))
        stratum = ((sample + 1) * strata - 1) // counts[block]
        plans, positions = [], []
        for stratum_index in np.unique(stratum).tolist():
            low, high = stratum_index * counts // strata, (stratum_index + 1) * counts // strata
            block_starts = np.zeros(len(counts), np.int64)  # start of each block in the stratum's plan
            block_starts[window.local_blocks] = np.cumsum(np.append(0, (high - low)[window.local_blocks][:-1]))
            indices = np.flatnonzero(stratum == stratum_index)
            stratum_plan = self._plan_stratum(window, stratum_index, low, high)
            plans.append(stratum_plan[block_starts[block[indices]] + sample[indices] - low[block[indices]]])
            positions.append(indices)
        return SamplePlan.concatenate(plans)[np.argsort(np.concatenate(positions), kind="stable")]

    def _plan_stratum(self, window: _LoadedWindow, stratum_index: int, low: np.ndarray, high: np.ndarray) -> SamplePlan:
        """Plan the samples [low, high), int64 [W], of this machine's blocks; cached, since batches share strata."""
        key = (window.epoch, window.first_sample, stratum_index)
        plan = self._strata.get(key)
        if plan is None:
            local_blocks, sizes = window.local_blocks, high - low
            block, sample = np.repeat(local_blocks, sizes[local_blocks]), ranges(low[local_blocks], sizes[local_blocks])
            spans, _ = self._spans(window, window.sample_order.index(block, sample), block, sample)
            plan = self._plan_pairs(replace(spans, cell=window.division[block]))
            self._strata.put(key, plan)
        return plan

    def _spans(
        self, window: _LoadedWindow, window_samples: np.ndarray, block: np.ndarray, sample: np.ndarray
    ) -> tuple[PairSpans, Unit]:
        """Return the spans and units of samples, given their blocks and indices in these. Of the spans, `cell` is set
        later, by `_plan_stratum`, and `first_sentence` and `starts_at_sentence` by `_plan_pairs`.
        """
        shuffle_key = draw(draw(self._shuffle_key, window.epoch), window.sample_order.blocks[block])
        shuffled = permute(sample, window.sample_order.counts[block], shuffle_key)
        unit, unit_sample = window.units.find(np.searchsorted(window.local_blocks, block), shuffled)
        shard_id = self._shard_in_source[unit.shard] << _OFFSET_BITS
        key = draw(draw(self._cut_key, window.epoch), shard_id + unit.start)
        sentences = (JoinedSentences if self._cutting.crosses_documents else DocumentSentences)(self._text, unit)
        spans, rows = self._cutting.cut(sentences, unit.size, unit_sample, key), np.arange(len(window_samples))
        pair_spans = PairSpans(
            cell=np.zeros_like(window_samples),
            shard=unit.shard,
            start=sentences.token(rows, spans.start),
            end=sentences.token(rows, spans.end),
            first_sentence=spans.first_sentence,
            stop_sentence=spans.stop_sentence,
            starts_at_sentence=np.zeros_like(spans.ends_at_sentence),
            ends_at_sentence=spans.ends_at_sentence,
            document=shard_id + unit.first_document,
            key=draw(draw(self._sample_key, window.epoch), window_samples + window.first_sample),
        )
        return pair_spans, unit

    def _plan_single(self, spans: PairSpans, unit: Unit) -> SamplePlan:
        """Plan samples that have one segment."""
        length, zeros = spans.end - spans.start, np.zeros_like(spans.start)
        document, separators = unit.first_document, zeros
        if self._cutting.crosses_documents:
            document, last_document = (
                self._text.last_document(unit.shard, unit.first_document, unit.stop_document, token, column=1)
                for token in (spans.start, spans.end - 1)
            )
            separators = last_document - document
        return SamplePlan(
            sample_index=zeros.copy(),
            key=spans.key,
            shard_a=spans.shard,
            start_a=spans.start,
            length_a=length,
            shard_b=spans.shard,
            start_b=spans.start,
            length_b=zeros,
            label=zeros,
            lengths=length + separators + 2,
            document=document,
            separators=separators,
            ends_at_sentence=spans.ends_at_sentence,
        )

    def _plan_pairs(self, spans: PairSpans) -> SamplePlan:
        """Plan samples that have two segments."""
        first_start = self._text.sentence_start(spans.shard, np.minimum(spans.first_sentence, spans.stop_sentence))
        starts = first_start == spans.start
        spans = replace(spans, starts_at_sentence=starts, first_sentence=spans.first_sentence + starts)
        is_sop = self._pairs.objective == "sop"
        segments = (swap_segments if is_sop else exchange_segments)(self._text, spans)
        segment_a = spans.shard, spans.start, segments.split - spans.start
        b_source = segments.b_source
        segment_b = spans.shard[b_source], segments.split[b_source], (spans.end - segments.split)[b_source]
        if is_sop:
            is_swapped = segments.label == 1
            columns = list(zip(segment_a, segment_b, strict=True))
            segment_a = (np.where(is_swapped, b, a) for a, b in columns)
            segment_b = (np.where(is_swapped, a, b) for a, b in columns)
        (shard_a, start_a, length_a), (shard_b, start_b, length_b) = segment_a, segment_b
        return SamplePlan(
            sample_index=np.zeros_like(spans.start),
            key=spans.key,
            shard_a=shard_a,
            start_a=start_a,
            length_a=length_a,
            shard_b=shard_b,
            start_b=start_b,
            length_b=length_b,
            label=segments.label,
            lengths=length_a + length_b + 3,
            document=np.zeros_like(spans.start),
            separators=np.zeros_like(spans.start),
            ends_at_sentence=spans.ends_at_sentence,
        )


@dataclass(frozen=True)
class _LoadedWindow:
    """A window that is being read, with the units that this machine's samples are cut from."""

    epoch: int
    first_sample: int  # index of the window's first sample in the epoch
    sample_order: Window
    division: np.ndarray  # index of each block's division of the window, int64 [W]; couples are within a division
    local_blocks: np.ndarray  # indices of this machine's blocks within the window, int64
    owner: np.ndarray  # index of the machine that reads each sample, int16 [S]
    units: Units  # units of this machine's blocks
    lease: Lease | None  # keeps this machine's blocks in the cache


class _LruCache(Generic[V]):
    """A mapping that drops the least recently used value when it is full."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._values = capacity, OrderedDict[Hashable, V]()

    def get(self, key: Hashable) -> V | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Hashable, value: V) -> None:
        self.make_room()
        self._values[key] = value

    def make_room(self) -> None:
        """Drop the least recently used value if there is no room for another one."""
        if len(self._values) >= self._capacity:
            self._values.popitem(last=False)

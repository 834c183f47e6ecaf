"""The samples of one source at one sequence length, by their index in its epochs (invariant 1)."""

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
from pretrain.batches.pairs import PairSpans, exchanged, swapped
from pretrain.batches.plan import SamplePlan
from pretrain.batches.text import DocumentPlaces, JoinedPlaces, ShardText, Unit
from pretrain.config import PairsConfig
from pretrain.corpus.block_cache import BlockCache, Lease

_CELL_LENGTHS = 8  # samples per cell of exchanges, in sequence lengths: most lengths of B occur several times
_CACHED_LAYERS, _CACHED_WINDOWS = 2, 2
_GOLDEN, _LOW_BITS = 0x9E3779B9, (1 << 32) - 1  # multiples of 2^32 / golden ratio fill any range evenly
_OWNERS_AT_ONCE, _COUNTED_AT_ONCE = 1 << 16, 1 << 14  # samples
_WINDOW_BITS = 32  # of a window's number in an epoch
_OFFSET_BITS = 44  # of a token offset within a shard
_SHARE_BLOCKS = 16  # minimum blocks in a share of a window, so that shares have nearly the same number of tokens

V = TypeVar("V")


@dataclass(frozen=True)
class SourceProgress:
    """Position in a source, independent of the plan by which it was read: invariant 1 holds across phases."""

    cutting: str  # identity of the cutting; a sampler with another one continues after the open window
    sample: int  # the next one, counted across epochs
    epoch: int
    first: int  # block of the open window, in the order of the epoch
    last: int  # one past the last; `first` if no window is open

    def window(self, blocks: int, *, continued: bool) -> OpenWindow:
        """Return the open window of a source with `blocks` blocks, or the empty window after it."""
        if continued:
            return OpenWindow(self.epoch, self.first, self.last)
        return OpenWindow(self.epoch + 1, 0, 0) if self.last == blocks else OpenWindow(self.epoch, self.last, self.last)


@dataclass(frozen=True)
class Machine:
    """This machine's number in a run. Machines divide the text of a window among them."""

    number: int = 0
    count: int = 1


@dataclass(frozen=True)
class StreamedBlocks:
    """The cache of a source's blocks; `numbers` int64 [N], their numbers in the cache."""

    cache: BlockCache
    numbers: np.ndarray


class SourceSamples:
    """The samples of one source, counted from 0 across epochs.

    Args:
        shards: shards of the source, as indices into `text`.
        counts: samples of each block, [N].
        fingerprint: of the source's tokens.
        window_blocks: minimum blocks of a window.
        before: position up to which the source was read before.
        machine: only its samples can be planned (`owners`).
        held: the source's text if it is streamed.
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
        before: SourceProgress | None,
        machine: Machine,
        held: StreamedBlocks | None,
    ) -> None:
        self._machine, self._held = machine, held
        self.in_use: list[_OpenWindow] | None = None  # collects the windows that are read, unless None
        self._text, self._blocks, self._cutting, self._pairs = text, blocks, cutting, pairs
        self.cutting = str(cutting.identity)
        window = before and before.window(len(counts), continued=before.cutting == self.cutting)
        # The order of blocks is the same for all lengths, so that a phase knows which blocks others have read.
        self.order = SourceOrder(counts, root_key(fingerprint, seed), window_blocks, window)
        key = root_key(fingerprint, seed, self.cutting)
        self._shuffle_key, self._cut_key, self._sample_key = draw(key, np.arange(3))
        self._shard = np.zeros(1 + max(shards, default=0), np.int64)  # counted within the source
        self._shard[shards] = np.arange(len(shards))
        self._windows: _LruCache[_OpenWindow] = _LruCache(_CACHED_WINDOWS)
        self._layers: _LruCache[SamplePlan] = _LruCache(_CACHED_LAYERS)

    @property
    def samples(self) -> int:
        """Samples of one epoch."""
        return self.order.samples

    def first_after(self, before: SourceProgress | None) -> int:
        """Return the first sample that reads only unread text."""
        if before is None:
            return 0
        return before.sample if before.cutting == self.cutting else self.order.first_sample(before.epoch, before.last)

    def progress(self, sample: int) -> SourceProgress:
        """Return the position in the source before a sample."""
        window = self.order.open_window(sample)
        return SourceProgress(self.cutting, sample, window.epoch, window.first, window.last)

    def unread(self, before: SourceProgress) -> int:
        """Count the unread tokens of the open window of `before`, from `progress`, by planning its other samples."""
        end = self.order.first_sample(before.epoch, before.last) if before.first < before.last else before.sample
        parts = range(before.sample, end, _COUNTED_AT_ONCE)
        return sum(int(self.plan(np.arange(low, min(low + _COUNTED_AT_ONCE, end))).ordinary.sum()) for low in parts)

    def plan(self, samples: np.ndarray) -> SamplePlan:
        """Plan samples of this machine, int64 [B]."""
        plans, rows = [], []
        for here, window, within in self._by_window(samples):
            plans.append(self._of_window(window, within))
            rows.append(here)
        return SamplePlan.joined(plans)[np.argsort(np.concatenate(rows), kind="stable")]

    def owners(self, samples: np.ndarray) -> np.ndarray:
        """Return the machine of each sample, int64 [B]; reads no text. `_owner` divides a window."""
        owner = np.zeros_like(samples)
        for here, window, within in self._by_window(samples):
            owner[here] = window.owner[within]
        return owner

    def _by_window(self, samples: np.ndarray) -> Iterator[tuple[np.ndarray, _OpenWindow, np.ndarray]]:
        """Yield (rows of `samples`, int64; their window; their numbers in it, int64)."""
        epoch, window, within = self.order.locate(samples)
        group = (epoch << _WINDOW_BITS) + window
        for number in np.unique(group).tolist():
            here = np.flatnonzero(group == number)
            window = self._open(*divmod(number, 1 << _WINDOW_BITS))
            if self.in_use is not None:
                self.in_use.append(window)
            yield here, window, within[here]

    def _open(self, epoch: int, window: int) -> _OpenWindow:
        opened = self._windows.get((epoch, window))
        if opened is None:
            numbers, order = self.order.blocks(epoch, window), self.order.epoch(epoch)
            # Not keyed by its number: a window that the next phase continues has another number there.
            key = draw(draw(self._shuffle_key, epoch), int(order.bounds[window]))
            samples = Window(numbers, self.order.counts[numbers], key)
            share, own = self._shares(numbers), self._own(numbers)
            self._windows.make_room()
            lease = self._hold(epoch, window, own) if self._held else None
            owner = self._owner(numbers, samples) if self._machine.count > 1 else np.zeros(0, np.int16)
            units = Units(self._text, self._blocks, numbers[own], self._cutting)
            first = int(order.samples[window])
            opened = _OpenWindow(epoch, first, samples, share, own, owner, units, lease)
            self._windows.put((epoch, window), opened)
        return opened

    def window_text(self, epoch: int, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (shard, first token, one past the last) of the blocks of a window, int64 [W] each."""
        numbers, blocks = self.order.blocks(epoch, window), self._blocks
        table = blocks.table[numbers]
        return blocks.shard[numbers].astype(np.int64), table["begin"], table["end"]

    def _owner(self, numbers: np.ndarray, samples: Window) -> np.ndarray:
        """Return the machine of each sample of a window, int16 [S].

        Machines divide the window's tokens evenly, so two may read the block at their border. Couples of pairs stay
        together: groups of machines have shares, and the machines of a group take turns.
        """
        owner = np.empty(samples.samples, np.int16)
        begin, size, tokens = self._places(numbers)
        share, count = self._shares(numbers), self._machine.count
        groups = self._groups(share) if self._pairs.has_classifier else count
        for first in range(0, len(owner), _OWNERS_AT_ONCE):
            block, sample = samples.locate(np.arange(first, min(first + _OWNERS_AT_ONCE, len(owner))))
            if self._pairs.has_classifier:
                here = share[block] % groups
            else:  # samples of a block go to its machines in proportion, in any range
                here = (begin[block] + ((sample * _GOLDEN & _LOW_BITS) * size[block] >> 32)) * count // tokens
            owner[first : first + len(here)] = here
        for number in range(groups if count > groups else 0):
            own = np.flatnonzero(owner == number)
            owner[own] += (groups * (np.arange(len(own)) % (count // groups))).astype(np.int16)
        return owner

    def _shares(self, numbers: np.ndarray) -> np.ndarray:
        """Return the share of a window that each block is in, int64 [W]; 2^n shares of nearly equal token counts."""
        loads = [(0, share) for share in range(1 << max(0, (len(numbers) // _SHARE_BLOCKS).bit_length() - 1))]
        table = self._blocks.table[numbers]
        sizes = table["end"] - table["begin"]
        shares = np.zeros(len(numbers), np.int64)
        for place in np.argsort(-sizes, kind="stable").tolist():  # the largest first, to the share with the fewest
            tokens, shares[place] = loads[0]
            heapq.heapreplace(loads, (tokens + int(sizes[place]), int(shares[place])))
        return shares

    def _groups(self, share: np.ndarray) -> int:
        """Return the number of groups of machines that read a window with these shares."""
        return math.gcd(1 + int(share.max(initial=0)), self._machine.count)

    def _own(self, numbers: np.ndarray) -> np.ndarray:
        """Return the positions of this machine's blocks in a window, int64."""
        number, count = self._machine.number, self._machine.count
        if self._pairs.has_classifier:
            groups = self._groups(share := self._shares(numbers))
            return np.flatnonzero(share % groups == number % groups)
        begin, size, tokens = self._places(numbers)
        return np.flatnonzero((begin * count // tokens <= number) & ((begin + size - 1) * count // tokens >= number))

    def _places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Return (tokens of a window before each block, tokens of each block, int64 [W] each; tokens of all)."""
        table = self._blocks.table[numbers]
        size = (table["end"] - table["begin"]).astype(np.int64)
        end = np.cumsum(size)
        return end - size, size, int(end[-1])

    def _hold(self, epoch: int, window: int, own: np.ndarray) -> Lease:
        """Wait for this machine's blocks of a window, and prefetch the next window's."""
        assert self._held is not None
        lease = self._held.cache.hold(self._held.numbers[self.order.blocks(epoch, window)[own]])
        following = self.order.following(epoch, window)
        self._held.cache.fetch_ahead(self._held.numbers[following[self._own(following)]])
        return lease

    def held_bytes(self) -> int:
        """Return the maximum bytes of the source that this machine holds at a time."""
        if self._held is None:
            return 0
        whole = self._held.cache.bytes_of(self._held.numbers)
        largest = self._held.cache.largest(self._held.numbers)
        return min(whole, largest * sum(len(self._own(window)) + 1 for window in self.order.largest_in_a_row()))

    def _of_window(self, window: _OpenWindow, within: np.ndarray) -> SamplePlan:
        """Plan samples of a window; `within` int64 [B] counts in its order."""
        block, sample = window.samples.locate(within)
        if not self._pairs.has_classifier:
            return self._single(*self._spans(window, within, block, sample))
        counts = window.samples.counts
        # A layer has one cell per share. Blocks are read at the same pace, so its samples are neighbors.
        shares = 1 + int(window.share.max())
        layers = max(1, window.samples.samples // (shares * _CELL_LENGTHS * self._cutting.capacity))
        layer = ((sample + 1) * layers - 1) // counts[block]
        wanted, plans, rows = np.unique(layer).tolist(), [], []
        for number in wanted:
            low, high = number * counts // layers, (number + 1) * counts // layers
            begins = np.zeros(len(counts), np.int64)
            begins[window.own] = np.cumsum(np.append(0, (high - low)[window.own][:-1]))
            here = np.flatnonzero(layer == number)
            whole = self._layer(window, number, low, high)
            plans.append(whole[begins[block[here]] + sample[here] - low[block[here]]])
            rows.append(here)
        return SamplePlan.joined(plans)[np.argsort(np.concatenate(rows), kind="stable")]

    def _layer(self, window: _OpenWindow, number: int, low: np.ndarray, high: np.ndarray) -> SamplePlan:
        """Plan the samples `low` to `high` of each of this machine's blocks, int64 [W]; small batches reuse them."""
        name = (window.epoch, window.first, number)
        plan = self._layers.get(name)
        if plan is None:
            block = np.repeat(window.own, (high - low)[window.own])
            sample = ranges(low[window.own], (high - low)[window.own])
            spans, _ = self._spans(window, window.samples.index(block, sample), block, sample)
            plan = self._paired(replace(spans, cell=window.share[block]))
            self._layers.put(name, plan)
        return plan

    def _spans(
        self, window: _OpenWindow, within: np.ndarray, block: np.ndarray, sample: np.ndarray
    ) -> tuple[PairSpans, Unit]:
        """Return the spans and keys of samples of blocks of a window, and their units; `_layer` sets `cell`, and
        `_paired` sets `first` and `at_begin`.
        """
        shuffle_key = draw(draw(self._shuffle_key, window.epoch), window.samples.blocks[block])
        shuffled = permute(sample, window.samples.counts[block], shuffle_key)
        unit, number = window.units.find(np.searchsorted(window.own, block), shuffled)
        identity = self._shard[unit.shard] << _OFFSET_BITS
        key = draw(draw(self._cut_key, window.epoch), identity + unit.begin)
        places = (JoinedPlaces if self._cutting.joined else DocumentPlaces)(self._text, unit)
        spans, rows = self._cutting.cut(places, unit.size, number, key), np.arange(len(within))
        pair_spans = PairSpans(
            cell=np.zeros_like(within),
            shard=unit.shard,
            begin=places.token(rows, spans.begin),
            end=places.token(rows, spans.end),
            first=spans.first,
            last=spans.last,
            at_begin=np.zeros_like(spans.at_end),
            at_end=spans.at_end,
            document=identity + unit.first,
            key=draw(draw(self._sample_key, window.epoch), within + window.first),
        )
        return pair_spans, unit

    def _single(self, spans: PairSpans, unit: Unit) -> SamplePlan:
        """Plan one segment for each span."""
        length, zeros = spans.end - spans.begin, np.zeros_like(spans.begin)
        first, separators = unit.first, zeros
        if self._cutting.joined:
            first, last = (
                self._text.last_document(unit.shard, unit.first, unit.last, place, column=1)
                for place in (spans.begin, spans.end - 1)
            )
            separators = last - first
        return SamplePlan(
            number=zeros.copy(),
            key=spans.key,
            shard_a=spans.shard,
            begin_a=spans.begin,
            length_a=length,
            shard_b=spans.shard,
            begin_b=spans.begin,
            length_b=zeros,
            label=zeros,
            lengths=length + separators + 2,
            document=first,
            separators=separators,
            at_end=spans.at_end,
        )

    def _paired(self, spans: PairSpans) -> SamplePlan:
        """Plan two segments for each span."""
        first = self._text.offset(spans.shard, np.minimum(spans.first, spans.last))
        spans = replace(spans, at_begin=first == spans.begin, first=spans.first + (first == spans.begin))
        is_order = self._pairs.objective == "sop"
        segments = (swapped if is_order else exchanged)(self._text, spans)
        a = spans.shard, spans.begin, segments.split - spans.begin
        b_of = segments.b_of
        b = spans.shard[b_of], segments.split[b_of], (spans.end - segments.split)[b_of]
        if is_order:
            is_swapped = segments.label == 1
            a, b = ((np.where(is_swapped, y, x) for x, y in zip(*pair, strict=True)) for pair in ((a, b), (b, a)))
        (shard_a, begin_a, length_a), (shard_b, begin_b, length_b) = a, b
        return SamplePlan(
            number=np.zeros_like(spans.begin),
            key=spans.key,
            shard_a=shard_a,
            begin_a=begin_a,
            length_a=length_a,
            shard_b=shard_b,
            begin_b=begin_b,
            length_b=length_b,
            label=segments.label,
            lengths=length_a + length_b + 3,
            document=np.zeros_like(spans.begin),
            separators=np.zeros_like(spans.begin),
            at_end=spans.at_end,
        )


@dataclass(frozen=True)
class _OpenWindow:
    """A window that is being read, and the units of this machine's samples."""

    epoch: int
    first: int  # its first sample in the epoch
    samples: Window
    share: np.ndarray  # of each block, int64 [W]; couples of pairs stay within one
    own: np.ndarray  # positions of this machine's blocks in the window, int64
    owner: np.ndarray  # machine of each sample, int16 [S]
    units: Units  # of this machine's blocks
    lease: Lease | None  # keeps their text in the cache


class _LruCache(Generic[V]):
    """A small LRU cache."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._values = capacity, OrderedDict[Hashable, V]()

    def get(self, name: Hashable) -> V | None:
        if name in self._values:
            self._values.move_to_end(name)
        return self._values.get(name)

    def put(self, name: Hashable, value: V) -> None:
        self.make_room()
        self._values[name] = value

    def make_room(self) -> None:
        """Drop the least recently used value if there is no room for another one."""
        if len(self._values) >= self._capacity:
            self._values.popitem(last=False)

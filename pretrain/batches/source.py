"""The samples of one source at one sequence length, by their index in its epochs (invariant 1)."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from pretrain.batches.blocks import Blocks, SourceOrder, Units
from pretrain.batches.cuts import Cutting
from pretrain.batches.order import draw, permute, root_key
from pretrain.batches.pairs import PairSpans, exchanged, swapped
from pretrain.batches.plan import SamplePlan
from pretrain.batches.text import DocumentPlaces, JoinedPlaces, ShardText
from pretrain.config import PairsConfig

_CELL_LENGTHS = 8  # samples whose Bs may be exchanged, in sequence lengths: most lengths of B occur several times
_CELLS_KEPT, _WINDOWS_KEPT = 4, 2
_OFFSET_BITS = 44  # of a token offset within a shard

V = TypeVar("V")


@dataclass(frozen=True)
class SourceProgress:
    """How far a source was read: the next sample if sequences go on being cut alike, else the next unread block."""

    cutting: Hashable
    sample: int  # counted across epochs
    epoch: int
    block: int  # in the order of the epoch


class SourceSamples:
    """Samples are counted from 0 across epochs.

    Args:
        shards: of the source, among those of `text`.
        counts: samples of each block, [N].
        fingerprint: of the source's tokens.
        window_blocks: blocks of a window, at least.
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
    ) -> None:
        self._text, self._blocks, self._cutting, self._pairs = text, blocks, cutting, pairs
        # The order of blocks is the same for all lengths, so that a phase knows what others have read.
        self.order = SourceOrder(counts, root_key(fingerprint, seed), window_blocks)
        key = root_key(fingerprint, seed, str(cutting.identity))
        self._shuffle_key, self._cut_key, self._sample_key = draw(key, np.arange(3))
        self._shard = np.zeros(1 + max(shards, default=0), np.int64)  # counted within the source
        self._shard[shards] = np.arange(len(shards))
        self._windows: _Recent[Units] = _Recent(_WINDOWS_KEPT)
        self._cells: _Recent[SamplePlan] = _Recent(_CELLS_KEPT)

    @property
    def samples(self) -> int:
        """Of one epoch."""
        return self.order.samples

    def first_after(self, before: SourceProgress | None) -> int:
        """The first sample that reads nothing of what was read before."""
        if before is None:
            return 0
        return before.sample if before.cutting == self._identity else self.order.next_start(before.epoch, before.block)

    def progress(self, samples: int) -> SourceProgress:
        """How far the source is read after so many samples."""
        epoch, block = self.order.next_block(samples)
        return SourceProgress(self._identity, samples, epoch, block)

    @property
    def _identity(self) -> Hashable:
        return (*self._cutting.identity, self.order.windows)

    def plan(self, samples: np.ndarray) -> SamplePlan:
        """Plan samples, int64 [B]."""
        epoch, window, within = self.order.locate(samples)
        group = epoch * self.order.windows + window
        plans, rows = [], []
        for number in np.unique(group).tolist():
            here = np.flatnonzero(group == number)
            its_epoch, its_window = divmod(number, self.order.windows)
            plans.append(self._of_window(its_epoch, its_window, within[here]))
            rows.append(here)
        return SamplePlan.joined(plans)[np.argsort(np.concatenate(rows), kind="stable")]

    def window_text(self, epoch: int, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(shard, first token, one past the last) of the blocks of a window, int64 [W] each."""
        numbers, blocks = self.order.blocks(epoch, window), self._blocks
        return blocks.shard[numbers].astype(np.int64), blocks.begin[numbers], blocks.end[numbers]

    def _of_window(self, epoch: int, window: int, within: np.ndarray) -> SamplePlan:
        """Samples of a window; `within` int64 [B] counts in its order."""
        units = self._windows.get((epoch, window))
        if units is None:
            units = Units(self._text, self._blocks, self.order.blocks(epoch, window), self._cutting)
            self._windows.put((epoch, window), units)
        if not self._pairs.has_classifier:
            return self._single(self._spans(epoch, window, units, within))
        cells = max(1, units.samples // (_CELL_LENGTHS * self._cutting.capacity))
        bounds = np.arange(cells + 1) * units.samples // cells
        cell = np.searchsorted(bounds, within, side="right") - 1
        wanted, inverse = np.unique(cell, return_inverse=True)
        plan = self._of_cells(epoch, window, units, bounds, wanted)
        starts = np.cumsum(np.append(0, (bounds[wanted + 1] - bounds[wanted])[:-1]))
        return plan[starts[inverse] + within - bounds[cell]]

    def _of_cells(self, epoch: int, window: int, units: Units, bounds: np.ndarray, cells: np.ndarray) -> SamplePlan:
        """All samples of cells of a window. Those of a few cells are kept, since small batches use them again."""
        name = (epoch, window, *cells.tolist())
        plan = self._cells.get(name)
        if plan is None:
            ends = zip(bounds[cells].tolist(), bounds[cells + 1].tolist(), strict=True)
            within = np.concatenate([np.arange(begin, end) for begin, end in ends])
            spans = self._spans(epoch, window, units, within)
            plan = self._paired(replace(spans, cell=np.searchsorted(bounds, within, side="right") - 1))
            if len(cells) <= _CELLS_KEPT:
                self._cells.put(name, plan)
        return plan

    def _spans(self, epoch: int, window: int, units: Units, within: np.ndarray) -> PairSpans:
        """The spans and keys of samples of a window; `_of_cells` sets `cell`, `_paired` sets `first` and `at_begin`."""
        shuffle_key = np.broadcast_to(draw(draw(self._shuffle_key, epoch), window), len(within))
        unit, sample = units.find(permute(within, units.samples, shuffle_key))
        identity = self._shard[unit.shard] << _OFFSET_BITS
        key = draw(draw(self._cut_key, epoch), identity + unit.begin)
        places = (JoinedPlaces if self._cutting.joined else DocumentPlaces)(self._text, unit)
        spans, rows = self._cutting.cut(places, unit.size, sample, key), np.arange(len(within))
        index = within + self.order.epoch(epoch).samples[window]
        return PairSpans(
            cell=np.zeros_like(within),
            shard=unit.shard,
            begin=places.token(rows, spans.begin),
            end=places.token(rows, spans.end),
            first=spans.first,
            last=spans.last,
            at_begin=np.zeros_like(spans.at_end),
            at_end=spans.at_end,
            document=identity + unit.first,
            key=draw(draw(self._sample_key, epoch), index),
        )

    def _single(self, spans: PairSpans) -> SamplePlan:
        """One segment for each span."""
        length, nothing = spans.end - spans.begin, np.zeros_like(spans.begin)
        separators = nothing
        if self._cutting.joined:
            first, last = (self._text.document_at(spans.shard, place) for place in (spans.begin, spans.end - 1))
            separators = last - first
        return SamplePlan(
            number=nothing.copy(),
            key=spans.key,
            shard_a=spans.shard,
            begin_a=spans.begin,
            length_a=length,
            shard_b=spans.shard,
            begin_b=spans.begin,
            length_b=nothing,
            label=nothing,
            lengths=length + separators + 2,
            separators=separators,
            at_end=spans.at_end,
        )

    def _paired(self, spans: PairSpans) -> SamplePlan:
        """Two segments for each span."""
        first = self._text.offset(spans.shard, np.minimum(spans.first, spans.last))
        spans = replace(spans, at_begin=first == spans.begin, first=spans.first + (first == spans.begin))
        is_order = self._pairs.objective == "sop"
        made = (swapped if is_order else exchanged)(self._text, spans)
        a = spans.shard, spans.begin, made.split - spans.begin
        b = spans.shard[made.b_of], made.split[made.b_of], (spans.end - made.split)[made.b_of]
        if is_order:
            is_swapped = made.label == 1
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
            label=made.label,
            lengths=length_a + length_b + 3,
            separators=np.zeros_like(spans.begin),
            at_end=spans.at_end,
        )


class _Recent(Generic[V]):
    """The values that were used last."""

    def __init__(self, most: int) -> None:
        self._most, self._values = most, OrderedDict[Hashable, V]()

    def get(self, name: Hashable) -> V | None:
        if name in self._values:
            self._values.move_to_end(name)
        return self._values.get(name)

    def put(self, name: Hashable, value: V) -> None:
        self._values[name] = value
        if len(self._values) > self._most:
            self._values.popitem(last=False)

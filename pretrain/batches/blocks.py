"""Blocks of a source, the order of an epoch, and windows of blocks (invariant 1 in docs/invariants.md).

An epoch reads the blocks of a source in a keyed random order. Consecutive blocks in this order form a window. The
samples of each block of a window are shuffled and evenly interleaved with the samples of its other blocks. So a machine
reads contiguous text, machines can divide the blocks of a window among them, and locating a sample takes memory per
block, not per document. The documents of a source are already in random order (`pretrain.corpus.prepare`), so a window
is a random sample of the source.
"""

import contextlib
import hashlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from pretrain.batches.cuts import Cutting
from pretrain.batches.order import draw, uniform
from pretrain.batches.text import ShardText, Unit
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import atomic_open, locked
from pretrain.corpus.blocks import concatenate_tables, cut_blocks
from pretrain.corpus.shards import COUNTS, Shard, TokenShards

WINDOW_BLOCKS = 64  # minimum number of blocks in the windows of all sources together, by default

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Blocks:
    """The N blocks of one source."""

    shard: np.ndarray  # uint32 [N], index of each block's shard among all shards of the split
    table: np.ndarray  # BLOCK [N], bounds of each block; if streamed, mapped from a file that processes share

    def __len__(self) -> int:
        return len(self.shard)


def blocks_of(shards: Sequence[Shard], indices: Sequence[int], block_tokens: int = 0) -> Blocks:
    """Return the blocks of the shards `indices`, as prepared or cut again into blocks of about `block_tokens`."""
    tables = [_block_table(shards[index], block_tokens) for index in indices]
    shard = np.repeat(np.array(indices, np.uint32), [len(table) for table in tables])
    return Blocks(shard, concatenate_tables(tables))


def bounds_of(blocks: Blocks, index: int) -> tuple[int, int, int, int]:
    """Return the bounds of a block in its shard: (start token, end token, first document, end document)."""
    block = blocks.table[index]
    return int(block["begin"]), int(block["end"]), int(block["first"]), int(block["last"])


def _block_table(shard: Shard, block_tokens: int) -> np.ndarray:
    if shard.blocks is not None and not block_tokens:
        return shard.blocks
    documents, sentences = (np.asarray(array).view(np.int64) for array in (shard.documents, shard.sentences))
    return cut_blocks(documents, sentences, block_tokens)


class Units:
    """The units that the samples of some blocks are cut from: documents, or whole blocks if sequences cross documents.

    Args:
        blocks: all blocks of the source.
        indices: indices of the blocks to use, int64 [W].
    """

    def __init__(self, text: ShardText, blocks: Blocks, indices: np.ndarray, cutting: Cutting) -> None:
        self._text, self._blocks, self._indices, self._cutting = text, blocks, indices, cutting
        samples_per_unit = [cutting.count(self._sizes(index)) for index in indices.tolist()]
        self._units_before = np.cumsum([0, *map(len, samples_per_unit)])  # number of units before each block
        self._samples_before = np.cumsum([0, *(int(counts.sum()) for counts in samples_per_unit)])
        self._unit_ends = np.cumsum(np.concatenate([*samples_per_unit, np.zeros(0, np.int64)])).astype(np.uint32)
        self.samples = int(self._samples_before[-1])

    def find(self, block: np.ndarray, sample: np.ndarray) -> tuple[Unit, np.ndarray]:
        """Return each sample's unit and index in it, given its block's index in `indices` and index in the block."""
        sample = sample + self._samples_before[block]
        unit = np.searchsorted(self._unit_ends, sample.astype(self._unit_ends.dtype), side="right")
        offset = self._unit_ends[unit - 1].astype(np.int64)  # number of samples of earlier units
        offset[unit == 0] = 0
        block_index = self._indices[block]
        shard, blocks = self._blocks.shard[block_index].astype(np.int64), self._blocks.table[block_index]
        start, end, document = blocks["begin"], blocks["end"], blocks["first"]
        sentences = blocks["first_sentence"], blocks["last_sentence"]
        if self._cutting.crosses_documents:
            stop = blocks["last"]
            return Unit(shard, start, end - start + stop - document - 1, document, stop, *sentences), sample - offset
        document = document + unit - self._units_before[block]
        start = np.maximum(start, self._text.document_start(shard, document))
        size = np.minimum(end, self._text.document_start(shard, document + 1)) - start
        return Unit(shard, start, size, document, document + 1, *sentences), sample - offset

    def _sizes(self, index: int) -> np.ndarray:
        """Return the number of tokens (and separators) of each unit of a block, int64."""
        start, end, first, stop = bounds_of(self._blocks, index)
        if self._cutting.crosses_documents:
            return np.array([end - start + stop - first - 1])
        return np.diff(self._text.document_starts(int(self._blocks.shard[index]), first, stop + 1).clip(start, end))


class Window:
    """The samples of a window in reading order: finds the block of a sample, and the sample's index in the block.

    Args:
        blocks: indices of the window's blocks in the source, int64 [W].
        counts: number of samples of each block, [W].
        key: random key of each block's offset in the interleaving.
    """

    def __init__(self, blocks: np.ndarray, counts: np.ndarray, key: np.ndarray | np.uint64) -> None:
        self.blocks, self.counts = blocks, counts.astype(np.int64)
        self._starts = np.concatenate(([0], np.cumsum(self.counts)))
        self.samples = int(self._starts[-1])
        block = np.repeat(np.arange(len(blocks)), self.counts)
        # The sort key of sample r of c in a block is (r + u) / c, with a random u, so every block is spread evenly.
        offset = np.arange(self.samples) - self._starts[block] + uniform(draw(key, np.arange(len(blocks))))[block]
        self._order = np.argsort(offset / self.counts[block], kind="stable").astype(np.uint32)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (index into `blocks`, index in the block) of each sample, given its index in the window; int64 [B]."""
        position = self._order[samples].astype(np.int64)
        block = np.searchsorted(self._starts, position, side="right") - 1
        return block, position - self._starts[block]

    def index(self, block: np.ndarray, sample: np.ndarray) -> np.ndarray:
        """Return each sample's index in the window, int64 [B], from the results of `locate`."""
        return self._inverse_order[self._starts[block] + sample].astype(np.int64)

    @cached_property
    def _inverse_order(self) -> np.ndarray:
        positions = np.empty_like(self._order)
        positions[self._order] = np.arange(self.samples, dtype=np.uint32)
        return positions


@dataclass(frozen=True)
class _Epoch:
    """One epoch of a source."""

    order: np.ndarray  # uint32 [N], indices of the blocks in reading order
    bounds: np.ndarray  # int64 [windows + 1], the start of each window in `order`; the last value is N
    samples_before: np.ndarray  # int64 [windows + 1], the number of samples before each window


@dataclass(frozen=True)
class OpenWindow:
    """The window that is being read: positions [start, stop) in the block order of an epoch; empty if none is open."""

    epoch: int
    start: int
    stop: int


class SourceOrder:
    """The samples of one source in reading order, epoch after epoch, counted from 0.

    Args:
        counts: number of samples of each block, [N].
        key: random key of the block order.
        window_blocks: minimum number of blocks in a window, unless fewer are left in the epoch.
        open_window: window that is read to its end first; only the blocks after it are divided into new windows.
    """

    def __init__(self, counts: np.ndarray, key: np.uint64, window_blocks: int, open_window: OpenWindow | None) -> None:
        self.counts, self._key, self._window_blocks, self._initial_window = counts, key, window_blocks, open_window
        self.samples = int(counts.sum(dtype=np.int64))
        self.epoch = lru_cache(maxsize=2)(self._make_epoch)

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (epoch, window, index in the window) of each sample, given its `index` in the source; int64 [B]."""
        epoch, sample = np.divmod(index, self.samples)
        window = np.empty_like(index)
        for epoch_index in np.unique(epoch).tolist():
            members = np.flatnonzero(epoch == epoch_index)
            samples_before = self.epoch(epoch_index).samples_before
            window[members] = np.searchsorted(samples_before, sample[members], side="right") - 1
            sample[members] -= samples_before[window[members]]
        return epoch, window, sample

    def blocks(self, epoch: int, window: int) -> np.ndarray:
        """Return the indices of the blocks of a window, int64."""
        bounds = self.epoch(epoch).bounds
        return self.epoch(epoch).order[bounds[window] : bounds[window + 1]].astype(np.int64)

    def next_blocks(self, epoch: int, window: int) -> np.ndarray:
        """Return the indices of the blocks of the next window, int64, possibly in the next epoch."""
        is_last = window + 2 == len(self.epoch(epoch).bounds)
        return self.blocks(epoch + 1, 0) if is_last else self.blocks(epoch, window + 1)

    def largest_window_group(self) -> list[np.ndarray]:
        """Return the block indices (int64) of each window in the largest group of windows that one batch may read."""
        first = self._initial_window or OpenWindow(0, 0, 0)
        bounds = {epoch: self._bounds(epoch) for epoch in range(first.epoch, first.epoch + 3)}
        windows = [(epoch, n) for epoch, edges in bounds.items() for n in range(len(edges) - 1)]
        windows = windows[np.searchsorted(bounds[first.epoch], first.start) :]
        sizes = np.concatenate([np.diff(edges) for edges in bounds.values()])[-len(windows) :]
        combined = sizes[:-1] + sizes[1:]
        # A batch may read three windows if the middle one is small, as at the end of an epoch.
        is_small = sizes[1:-1] < min(self._window_blocks, len(self.counts))
        combined[:-1] += np.where(is_small, sizes[2:], 0)
        largest = int(np.argmax(combined))
        count = 3 if largest < len(is_small) and is_small[largest] else 2
        return [self.blocks(*window) for window in windows[largest : largest + count]]

    def open_window(self, sample: int) -> OpenWindow:
        """Return the window that is partly read when `sample` is next; empty if `sample` is the first of a window."""
        epoch, offset = divmod(sample, self.samples)
        order = self.epoch(epoch)
        window = int(np.searchsorted(order.samples_before, offset, side="right")) - 1
        start, stop = int(order.bounds[window]), int(order.bounds[window + 1])
        return OpenWindow(epoch, start, stop if offset > order.samples_before[window] else start)

    def first_sample(self, epoch: int, position: int) -> int:
        """Return the index of the first sample of the block at `position` in the order of an epoch."""
        earlier_blocks = self.epoch(epoch).order[:position]
        return epoch * self.samples + int(self.counts[earlier_blocks].sum(dtype=np.int64))

    def _make_epoch(self, epoch: int) -> _Epoch:
        count = len(self.counts)
        # The whole order is needed, so sort by hashes: for few blocks, a Feistel permutation would need many steps.
        order = np.argsort(draw(draw(self._key, epoch), np.arange(count))).astype(np.uint32)
        bounds = self._bounds(epoch)
        sums = np.concatenate(([0], np.cumsum(self.counts[order], dtype=np.int64)))
        return _Epoch(order, bounds, sums[bounds])

    def _bounds(self, epoch: int) -> np.ndarray:
        """Return the start of each window in the block order of an epoch, followed by the number of blocks."""
        count, first_new, starts = len(self.counts), 0, []
        if self._initial_window is not None and epoch == self._initial_window.epoch:
            starts, first_new = [0, self._initial_window.start], self._initial_window.stop
        windows = max(1, (count - first_new) // self._window_blocks)
        edges = first_new + np.arange(windows + 1) * (count - first_new) // windows
        return np.unique(np.append(starts, edges)).astype(np.int64)


def window_blocks_for(counts: np.ndarray, batch_size: float, share: float, total_blocks: int) -> int:
    """Return the number of blocks per window of a source with this `share` of all samples: `share` * `total_blocks`.

    It is at least 1, and doubled until a window has at least as many samples as a batch reads from the source.
    """
    blocks = max(1, math.ceil(total_blocks * share))
    while blocks < len(counts) and blocks * (int(counts.sum()) / len(counts)) < batch_size * share:
        blocks *= 2
    return blocks


def sample_counts(text: ShardText, blocks: Sequence[Blocks], cutting: Cutting, shards: TokenShards) -> list[np.ndarray]:
    """Count the samples of each block of each source, uint32 [N]; store the counts of training text in the corpus."""
    return [_source_counts(text, source_blocks, cutting, shards, index) for index, source_blocks in enumerate(blocks)]


def counts_file(shards: TokenShards, source: int, cutting: Cutting, blocks: int) -> Path:
    """Return the path of the file that stores the sample counts of a source with `blocks` blocks."""
    identity = [shards.source_fingerprint(source), shards.split, cutting.identity, blocks]
    return shards.folder / COUNTS / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]}.npy"


def _source_counts(text: ShardText, blocks: Blocks, cutting: Cutting, shards: TokenShards, source: int) -> np.ndarray:
    if not len(blocks):
        return np.zeros(0, np.uint32)
    path = counts_file(shards, source, cutting, len(blocks))
    if (stored := _load_counts(path, len(blocks))) is not None:
        return stored
    if shards.shards[int(blocks.shard[0])].cache is not None:
        with locked(path.with_suffix(".lock")):  # only one process of a machine reads the document offsets
            stored = _load_counts(path, len(blocks))
            return _store_counts(path, _streamed_counts(blocks, cutting, shards)) if stored is None else stored
    block_counts = (Units(text, blocks, np.array([index]), cutting).samples for index in range(len(blocks)))
    counts = np.fromiter(block_counts, np.uint32, len(blocks))
    text.unmap_pages()
    return _store_counts(path, counts) if shards.split == "train" and shards.folder.exists() else counts


def _load_counts(path: Path, blocks: int) -> np.ndarray | None:
    with contextlib.suppress(OSError, ValueError):
        stored = np.load(path, allow_pickle=False)
        if (stored.dtype, stored.shape) == (np.dtype(np.uint32), (blocks,)):
            return stored
    return None


def _store_counts(path: Path, counts: np.ndarray) -> np.ndarray:
    with contextlib.suppress(OSError, InputError, MachineError), atomic_open(path) as file:
        np.save(file, counts, allow_pickle=False)
    return counts


def _streamed_counts(blocks: Blocks, cutting: Cutting, shards: TokenShards) -> np.ndarray:
    """Count the samples of a streamed source from its document offsets: 16 bytes per document are read."""
    logger.info("%s: counting samples of a new sequence length; `prepare` with this config avoids this", shards.folder)
    counts = np.zeros(len(blocks), np.uint32)
    for shard in np.unique(blocks.shard).tolist():
        cache = shards.shards[shard].cache
        assert cache is not None
        starts = cache.document_starts(shard)
        for index in np.flatnonzero(blocks.shard == shard).tolist():
            start, end, first, stop = bounds_of(blocks, index)
            sizes = np.diff(starts[first : stop + 1].clip(start, end))
            counts[index] = cutting.count(
                np.array([end - start + stop - first - 1]) if cutting.crosses_documents else sizes
            ).sum()
    return counts

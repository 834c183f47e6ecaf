"""Blocks of a source: its text in ranges of about a million tokens, and the order of an epoch (invariant 1).

An epoch reads the blocks of a source in a keyed random order. Neighbors in this order form windows, and samples are
shuffled within a window. So a machine reads its text by range, and finding a sample takes memory by blocks and not by
documents. The documents of a source are in random order already (`pretrain.corpus.prepare`), so a window is a random
sample of the source.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pretrain.batches.cuts import Cutting
from pretrain.batches.order import draw
from pretrain.batches.text import ShardText, Unit
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import atomic_open
from pretrain.corpus.shards import TokenShards

BLOCK_TOKENS = 1 << 20
WINDOW_BLOCKS = 64
_BLOCK_DOCUMENTS = 1 << 14  # at most; a table of where their samples begin is made for each block of a window
COUNTS = ".samples"  # folder of a corpus: how many samples each block has, by how sequences are cut
_LEAST_KEPT = 64  # blocks; the samples of fewer are counted at once


@dataclass(frozen=True)
class Blocks:
    """N neighboring ranges of tokens of one source; arrays [N].

    A block holds whole documents. Only documents of more than a block's tokens are divided, at the end of a sentence
    where one is near.
    """

    shard: np.ndarray  # uint32, among all shards of the split
    begin: np.ndarray  # int64, token offset within the shard
    end: np.ndarray  # int64
    first: np.ndarray  # uint32, document of the shard that holds the first token
    last: np.ndarray  # uint32, one past the one that holds the last token

    def __len__(self) -> int:
        return len(self.shard)


def cut_blocks(text: ShardText, shards: Sequence[int], tokens: int = BLOCK_TOKENS) -> Blocks:
    """Divide the text of `shards` into blocks of about `tokens` tokens, fewer where documents are very short."""
    parts = [_blocks_of(text, shard, tokens) for shard in shards]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else [np.zeros(0, int)] * 5
    shard, begin, end, first, last = columns
    return Blocks(shard.astype(np.uint32), begin, end, first.astype(np.uint32), last.astype(np.uint32))


def _blocks_of(text: ShardText, shard: int, tokens: int) -> tuple[np.ndarray, ...]:
    """(shard, begin, end, first, last) of the blocks of one shard; int64."""
    documents = text.document_count(shard)
    # Each document counts some tokens more, so that a block never has more than _BLOCK_DOCUMENTS.
    each = -(-tokens // _BLOCK_DOCUMENTS)
    end = text.document_begin(np.array([shard]), np.array([documents]))[0]
    size = end + each * documents
    count = max(1, round(size / tokens))
    wanted = size * np.arange(1, count) // count
    which = np.full(count - 1, shard)
    first = text.first_document(which, wanted, each)
    edge = text.document_begin(which, first)
    previous = np.maximum(first - 1, 0)
    inside = text.sentence_near(which, previous, wanted - each * previous, tokens // 64)
    before, least = text.document_begin(which, previous), tokens // 16
    divided = (edge - before > tokens) & (inside - before >= least) & (edge - inside >= least)
    edge, first = np.where(divided, inside, edge), np.where(divided, previous, first)
    last = first + divided
    kept = np.diff(np.append(edge, end)) > 0
    kept &= edge > 0
    begins = np.append(0, edge[kept])
    ends = np.append(edge[kept], end)
    firsts, lasts = np.append(0, first[kept]), np.append(last[kept], documents)
    filled = ends > begins
    return tuple(column[filled] for column in (np.full(len(begins), shard), begins, ends, firsts, lasts))


class Units:
    """What the samples of some blocks are cut from, U of them: documents, or whole blocks where sequences cross
    documents.

    Args:
        blocks: all of the source.
        numbers: which of them, int64 [W].
    """

    def __init__(self, text: ShardText, blocks: Blocks, numbers: np.ndarray, cutting: Cutting) -> None:
        self._text, self._blocks, self._numbers, self._cutting = text, blocks, numbers, cutting
        counts = [cutting.count(self._sizes(number)) for number in numbers.tolist()]
        self._first = np.cumsum([0, *map(len, counts)])
        self._ends = np.cumsum(np.concatenate([*counts, np.zeros(0, np.int64)])).astype(np.uint32)
        self.samples = int(self._ends[-1]) if len(self._ends) else 0

    def find(self, sample: np.ndarray) -> tuple[Unit, np.ndarray]:
        """The unit of each sample, and which of its samples it is; [B] each."""
        unit = np.searchsorted(self._ends, sample.astype(self._ends.dtype), side="right")
        before = self._ends[unit - 1].astype(np.int64)
        before[unit == 0] = 0
        place = np.searchsorted(self._first, unit, side="right") - 1
        number = self._numbers[place]
        blocks = self._blocks
        shard, begin, end = blocks.shard[number].astype(np.int64), blocks.begin[number], blocks.end[number]
        document = blocks.first[number].astype(np.int64)
        if self._cutting.joined:
            last = blocks.last[number].astype(np.int64)
            return Unit(shard, begin, end - begin + last - document - 1, document, last), sample - before
        document += unit - self._first[place]
        begin = np.maximum(begin, self._text.document_begin(shard, document))
        size = np.minimum(end, self._text.document_begin(shard, document + 1)) - begin
        return Unit(shard, begin, size, document, document + 1), sample - before

    def _sizes(self, number: int) -> np.ndarray:
        """Tokens of the units of a block, int64."""
        blocks = self._blocks
        begin, end = int(blocks.begin[number]), int(blocks.end[number])
        first, last = int(blocks.first[number]), int(blocks.last[number])
        if self._cutting.joined:
            return np.array([end - begin + last - first - 1])
        begins = self._text.document_begins(int(blocks.shard[number]), first, last + 1).clip(begin, end)
        return np.diff(begins)


@dataclass(frozen=True)
class _Epoch:
    """One epoch of a source: its blocks in order, where windows begin in this order, and samples before each."""

    order: np.ndarray  # uint32 [N]
    bounds: np.ndarray  # int64 [windows + 1]
    samples: np.ndarray  # int64 [windows + 1]


class SourceOrder:
    """The samples of one source in the order in which they are read, epoch after epoch, counted from 0.

    Args:
        counts: samples of each block, [N].
        key: of the order of its blocks.
        window_blocks: blocks of a window at least, if the source has as many.
    """

    def __init__(self, counts: np.ndarray, key: np.uint64, window_blocks: int) -> None:
        self._counts, self._key, self.window_blocks = counts, key, window_blocks
        self.samples = int(counts.sum(dtype=np.int64))
        self.windows = max(1, len(counts) // window_blocks)
        self.epoch = lru_cache(maxsize=2)(self._epoch)

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(epoch, window, sample within the window) of samples; int64 [B] each."""
        epoch, within = np.divmod(index, self.samples)
        window = np.empty_like(index)
        for number in np.unique(epoch).tolist():
            rows = np.flatnonzero(epoch == number)
            samples = self.epoch(number).samples
            window[rows] = np.searchsorted(samples, within[rows], side="right") - 1
            within[rows] -= samples[window[rows]]
        return epoch, window, within

    def blocks(self, epoch: int, window: int) -> np.ndarray:
        """The blocks of a window, int64."""
        bounds = self.epoch(epoch).bounds
        return self.epoch(epoch).order[bounds[window] : bounds[window + 1]].astype(np.int64)

    def next_block(self, samples: int) -> tuple[int, int]:
        """(epoch, place in its order of blocks) of the first window of which nothing is read after so many samples."""
        epoch, within = divmod(samples, self.samples)
        return epoch, int(self.epoch(epoch).bounds[np.searchsorted(self.epoch(epoch).samples, within)])

    def next_start(self, epoch: int, block: int) -> int:
        """The first sample of the first window that begins at or after a place in an epoch's order of blocks."""
        there = self.epoch(epoch)
        return epoch * self.samples + int(there.samples[np.searchsorted(there.bounds, block)])

    def _epoch(self, number: int) -> _Epoch:
        count = len(self._counts)
        # All places are needed, so hashes are sorted. A Feistel network would walk long for a few blocks.
        order = np.argsort(draw(draw(self._key, number), np.arange(count))).astype(np.uint32)
        bounds = np.arange(self.windows + 1) * count // self.windows
        sums = np.concatenate(([0], np.cumsum(self._counts[order], dtype=np.int64)))
        return _Epoch(order, bounds, sums[bounds])


def window_blocks_for(counts: np.ndarray, batch: int, least: int) -> int:
    """Blocks of a window that is not smaller than a batch: `least`, doubled as often as it takes."""
    while least < len(counts) and least * (int(counts.sum()) / len(counts)) < batch:
        least *= 2
    return least


def sample_counts(text: ShardText, blocks: Sequence[Blocks], cutting: Cutting, shards: TokenShards) -> list[np.ndarray]:
    """How many samples each block of each source has, uint32. A large corpus keeps them beside its shards."""
    sizes = [len(one) for one in blocks]
    identity = [shards.fingerprint, [shard.name for shard in shards.shards], cutting.identity, sizes]
    path = shards.folder / COUNTS / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]}.npy"
    bounds = np.cumsum(sizes)[:-1]
    with contextlib.suppress(OSError, ValueError):
        kept = np.load(path, allow_pickle=False)
        if (kept.dtype, kept.shape) == (np.dtype(np.uint32), (sum(sizes),)):
            return np.split(kept, bounds)
    each = (Units(text, one, np.array([number]), cutting).samples for one in blocks for number in range(len(one)))
    counts = np.fromiter(each, np.uint32, sum(sizes))
    text.forget()
    if len(counts) >= _LEAST_KEPT and shards.folder.exists():
        with contextlib.suppress(OSError, InputError, MachineError), atomic_open(path) as file:
            np.save(file, counts, allow_pickle=False)
    return np.split(counts, bounds)

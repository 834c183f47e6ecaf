"""Cache of the blocks (`blocks`) of shards in an object store, in files that all processes of this machine share.

The files are sparse and as large as the full arrays: a block is written at its offset when it is needed; blocks are
evicted, the least recently used ones first, by punching holes. While a process holds a `Lease` on blocks, it can read
them as from a full copy. The processes of this machine, of one or several runs, never fetch the same block twice.

    <folder>/tokens, sentences, documents  an array of all shards; each shard starts at a page boundary
    <folder>/state     STATE [blocks], protected by a lock on <folder>/lock
    <folder>/held      bool [_SLOTS, blocks], whether the process in a slot needs a block
    <folder>/limits    int64 [_SLOTS], maximum bytes of the cache, as configured for the process in a slot
    <folder>/slot-<n>  locked by the process that owns the slot; the kernel unlocks it if that process dies
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretrain.common.addresses import join
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import disk_errors
from pretrain.corpus.blocks import ARRAYS, block_digest, ranges_of
from pretrain.corpus.sparse_files import punch_hole, shared_array, try_lock, write_all
from pretrain.storage.objects import AccessError, ContentError, ObjectStore

_SLOTS = 64  # maximum processes per machine
_MAX_FETCHES = 16  # simultaneous fetches; S3 serves about 90 MB/s per connection
_POLL_SECONDS = 0.02
_PAGE = 4096
_ABSENT, _FETCHING, _PRESENT = range(3)
# slot: slot of the process that fetches the block; used: value of an access counter when it was last used.
STATE = np.dtype([("state", "u1"), ("slot", "u1"), ("used", "<u4")])

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredArray:
    """The file of a shard's array in an object store."""

    name: str
    bytes: int  # size of the file
    header_bytes: int  # size of the header before the first element
    row_bytes: int  # bytes per element or row of the array


@dataclass(frozen=True)
class StoredShard:
    """A shard in an object store: its arrays by name, and its blocks (BLOCK [B])."""

    arrays: dict[str, StoredArray]
    blocks: np.ndarray


@dataclass
class _Extent:
    """The location of one array of a shard in the cache file, which holds the arrays with this name of all shards."""

    name: str  # name of the array
    descriptor: int  # file descriptor of the cache file
    base: int  # offset of the array in the file, in bytes
    row_bytes: int  # bytes per element or row
    blocks: np.ndarray  # blocks of the shard, BLOCK [B]

    def range_of(self, block: int) -> tuple[int, int]:
        """Return the range [start, end) of a block in the file, in bytes."""
        start, end = ranges_of(self.blocks[block])[self.name]
        return self.base + int(start) * self.row_bytes, self.base + int(end) * self.row_bytes


@dataclass
class _Shard:
    extents: dict[str, _Extent]  # by name of the array
    first_block: int  # index of its first block over all shards


class Lease:
    """Blocks that are kept on this machine while this object lives."""

    def __init__(self, cache: BlockCache, blocks: np.ndarray) -> None:
        self._cache, self._blocks = cache, blocks

    # At interpreter exit, modules may already be cleared; the kernel then frees the slot.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self._cache.release(self._blocks)


class BlockCache:
    """This machine's cache of the blocks of a split.

    Args:
        address: address of the corpus.
        folder: folder of the cache, the same for all processes of the machine.
        max_bytes: size of the cache (`corpus.cache`); if runs share a folder, their maximum applies.

    Raises `MachineError` if the file system does not support holes, or too many processes use the folder.
    """

    def __init__(self, address: str, folder: Path, shards: Sequence[StoredShard], *, max_bytes: int) -> None:
        self._address, self._folder, self._stored_shards = address, folder, list(shards)
        self._max_bytes, self._objects = max_bytes, ObjectStore()
        counts = [len(shard.blocks) for shard in shards]
        self._first_blocks = np.cumsum([0, *counts])  # index of each shard's first block; number of blocks
        self._sizes = np.concatenate([np.zeros(0, np.int64), *map(_block_bytes, shards)])
        self._mutex, self._lock_depth, self._shrink_count = threading.RLock(), 0, 0
        self._lease_counts = np.zeros(len(self._sizes), np.int32)  # this process's leases of each block
        self._verified = np.zeros(len(self._sizes), bool)  # verified by this process, or by one that holds the block
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            self._state = shared_array(folder / "state", STATE, (len(self._sizes),))
            self._held = shared_array(folder / "held", np.dtype(bool), (_SLOTS, len(self._sizes)))
            self._limits = shared_array(folder / "limits", np.dtype(np.int64), (_SLOTS,))
            punch_hole(self._lock, 0, _PAGE, folder)  # raises if the file system does not support holes
            self._descriptors = {name: os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644) for name in ARRAYS}
            self._shards = self._assign_ranges()
            self._mappings = {n: mmap.mmap(d, 0, access=mmap.ACCESS_READ) for n, d in self._descriptors.items()}
            self._slot = self._take_slot()
        self._limits[self._slot] = max_bytes
        self._is_prefetched = np.zeros(len(self._sizes), bool)  # blocks that this process prefetched and has not used
        self._pool = ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="blocks")
        self._prefetch_pool = ThreadPoolExecutor(1, thread_name_prefix="blocks-ahead")

    def array(self, shard: int, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Return an array of a shard, read-only; blocks that are not held may be zeros."""
        return np.ndarray(shape, dtype, self._mappings[name], offset=self._shards[shard].extents[name].base)

    def global_indices(self, shards: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Convert indices of shards and of blocks in these shards to indices of blocks over all shards; int64."""
        return self._first_blocks[shards.astype(np.int64)] + blocks

    def bytes_of(self, blocks: np.ndarray) -> int:
        """Return the total bytes of `blocks`, which are indices over all shards, as in all methods."""
        return int(self._sizes[blocks].sum())

    def largest_size(self, blocks: np.ndarray) -> int:
        """Return the size of the largest of `blocks`, in bytes."""
        return int(self._sizes[blocks].max(initial=0))

    def document_starts(self, shard: int) -> np.ndarray:
        """Fetch the token offsets of all documents of a shard, which are not cached; int64 [documents + 1]."""
        array = self._stored_shards[shard].arrays["documents"]
        content = self._objects.read_range(join(self._address, array.name), array.header_bytes, array.bytes)
        return np.frombuffer(content, "<i8").reshape(-1, 2)[:, 1]

    def check_fits(self, needed: int, purpose: str) -> None:
        """Raise `InputError` if `needed` bytes exceed the size of the cache."""
        if needed > self._max_bytes:
            raise InputError(
                f"corpus.cache: {_format_size(self._max_bytes)}, but {purpose} needs at least "
                f"{_format_size(needed)}. Raise it, preferably to twice that size, to prefetch the next blocks."
            )

    def hold(self, blocks: np.ndarray) -> Lease:
        """Fetch the missing blocks, wait for all `blocks`, and keep them while the returned lease lives.

        Raises:
            InputError: the store denies access.
            MachineError: the store fails for too long, a stored block is damaged, or the disk is full.
        """
        start = time.monotonic()
        with self._locked():  # hold and claim atomically: other processes assume that a held block is verified
            self._lease_counts[blocks] += 1
            self._held[self._slot, blocks] = True
            self._is_prefetched[blocks] = False
            lease = Lease(self, blocks)
            claimed = self._claim(blocks)
        self._fetch_or_verify(*claimed)
        while len(blocks := self._blocks_not_present(blocks)):
            time.sleep(_POLL_SECONDS)
            self._fetch_or_verify(*self._claim(blocks))
        if (waited := time.monotonic() - start) > 1:
            logger.info("%s: waited %.1f s for blocks", self._address, waited)
        return lease

    def fetch_ahead(self, blocks: np.ndarray) -> None:
        """Fetch as many of the blocks as fit, in the background."""
        self._prefetch_pool.submit(self._prefetch, blocks)

    def release(self, blocks: np.ndarray) -> None:
        """Release the blocks of a lease."""
        with self._locked():
            self._lease_counts[blocks] -= 1
            self._held[self._slot, blocks[self._lease_counts[blocks] == 0]] = False

    def close(self) -> None:
        """Stop fetching. Fetches in progress complete; if this process exits first, another process repeats them."""
        self._prefetch_pool.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ state of the blocks

    def _blocks_not_present(self, blocks: np.ndarray) -> np.ndarray:
        """Return the blocks that are not present yet, because another process is fetching them."""
        with self._locked():
            return blocks[self._state["state"][blocks] != _PRESENT]

    def _fetch_or_verify(self, absent: np.ndarray, unverified: np.ndarray) -> None:
        """Fetch or verify the blocks that this process has claimed, and wait for them."""
        futures = {block: self._pool.submit(self._fetch, block) for block in absent.tolist()}
        futures |= {block: self._pool.submit(self._verify, block) for block in unverified.tolist()}
        self._wait(futures)

    def _prefetch(self, blocks: np.ndarray) -> None:
        with contextlib.suppress(InputError, MachineError, OSError):  # `hold` raises the error when it needs the block
            with self._locked():
                absent = blocks[self._state["state"][blocks] == _ABSENT]
                evictable = self._evictable()
                evictable_bytes = int(self._sizes[evictable[~self._is_prefetched[evictable]]].sum())
                free_bytes = self._max_size() - self._present_bytes() + evictable_bytes
                fitting = absent[np.cumsum(self._sizes[absent]) <= free_bytes]
                self._is_prefetched[fitting] = True
            for batch in np.array_split(fitting, max(1, len(fitting) // _MAX_FETCHES)):
                self._fetch_or_verify(*self._claim(batch))

    def _claim(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Claim blocks and make room for them; return (blocks that this process must fetch, blocks to verify)."""
        with self._locked():
            state = self._state["state"][blocks]
            self._state["used"][blocks] = int(self._state["used"].max(initial=0)) + 1
            absent = blocks[state == _ABSENT]
            fetching = blocks[state == _FETCHING]
            if len(fetching):
                alive = self._live_slots()
                absent = np.concatenate([absent, fetching[~alive[self._state["slot"][fetching]]]])
            unverified = blocks[(state == _PRESENT) & ~self._verified[blocks]]
            if len(unverified):
                # Another process has verified the blocks that it holds.
                held = self._held[self._live_slots(include_own=False)][:, unverified].any(axis=0)
                self._verified[unverified[held]] = True
                unverified = unverified[~held]
            self._make_room_for(absent)
            for claimed in (absent, unverified):
                self._state["state"][claimed], self._state["slot"][claimed] = _FETCHING, self._slot
            return absent, unverified

    def _wait(self, futures: dict[int, Future[None]]) -> None:
        """Wait for fetches and update the state of their blocks; then raise the first error, if any."""
        errors: list[BaseException] = []
        for block, future in futures.items():
            try:
                future.result()
            except BaseException as error:
                errors.append(error)
                for other in futures.values():
                    other.cancel()
            with self._locked():
                self._verified[block] = is_present = not (future.cancelled() or future.exception())
                self._state["state"][block] = _PRESENT if is_present else _ABSENT
        if errors:
            raise next((raised for raised in errors if isinstance(raised, (InputError, MachineError))), errors[0])

    def _make_room_for(self, blocks: np.ndarray) -> None:
        """Evict the least recently used blocks until `blocks` fit. The caller must hold the lock."""
        needed = int(self._sizes[blocks[self._state["state"][blocks] == _ABSENT]].sum())
        if (excess := self._present_bytes() + needed - self._max_size()) > 0:
            self._evict(excess, blocks)

    def _evict(self, excess: int, exclude: np.ndarray) -> int:
        """Evict about `excess` bytes of unneeded blocks; return the bytes freed. The caller must hold the lock."""
        blocks = np.setdiff1d(self._evictable(), exclude)
        blocks = blocks[np.lexsort((self._state["used"][blocks], self._is_prefetched[blocks]))]  # prefetched ones last
        evicted = blocks[: int(np.searchsorted(np.cumsum(self._sizes[blocks]), excess)) + 1]
        for block in evicted.tolist():
            self._state["state"][block] = _ABSENT
            self._verified[block] = False
            self._free_pages(block)
        return int(self._sizes[evicted].sum())

    def _evictable(self) -> np.ndarray:
        """Return the present blocks that no live process needs. The caller must hold the lock."""
        held = self._held[self._live_slots()].any(axis=0)
        return np.flatnonzero((self._state["state"] == _PRESENT) & ~held)

    def _present_bytes(self) -> int:
        """Return the bytes of all blocks that are present or being fetched. The caller must hold the lock."""
        return int(self._sizes[self._state["state"] != _ABSENT].sum())

    def _max_size(self) -> int:
        """Return the maximum size configured for any live process, in bytes. The caller must hold the lock."""
        return int(self._limits[self._live_slots()].max())

    # ------------------------------------------------------------ one block

    def _fetch(self, index: int) -> None:
        """Fetch a block and write it to its offset."""
        shard, block = self._locate(index)
        stored, extents = self._stored_shards[shard], self._shards[shard].extents
        for retries_left in (1, 0):
            contents = {name: self._fetch_range(stored.arrays[name], extent, block) for name, extent in extents.items()}
            if block_digest(iter(contents.values())) == stored.blocks[block]["digest"].tobytes():
                break
            if not retries_left:
                raise ContentError(
                    f"{join(self._address, stored.arrays['tokens'].name)}: the checksum of its block {block} is wrong; "
                    "it was changed or damaged. Remove the file at this address, and run `prepare` on a machine that "
                    "has the full copy."
                )
        with disk_errors(self._folder):
            writes = [(e.descriptor, contents[name], e.range_of(block)[0]) for name, e in extents.items()]
            while True:
                shrink_count = self._shrink_count
                try:
                    return write_all(writes)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._shrink(index, shrink_count):
                        raise

    def _shrink(self, index: int, shrink_count: int) -> bool:
        """Shrink the cache to make room for a block on a full disk; return whether this freed space."""
        with self._locked():
            if self._shrink_count != shrink_count:  # another thread has made room in the meantime
                return True
            present_bytes = self._present_bytes()
            freed = self._evict(max(int(self._sizes[index]), present_bytes // 8), np.array([index]))
            if freed:
                self._shrink_count += 1
                self._limits[:] = np.minimum(self._limits, present_bytes - freed)
                logger.warning("%s: disk full; cache limited to %s", self._folder, _format_size(present_bytes - freed))
        return freed > 0

    def _verify(self, index: int) -> None:
        """Verify a block that another process fetched; fetch it again if it is damaged."""
        shard, block = self._locate(index)
        ranges = ((extent, *extent.range_of(block)) for extent in self._shards[shard].extents.values())
        content = (os.pread(extent.descriptor, end - start, start) for extent, start, end in ranges)
        if block_digest(content) != self._stored_shards[shard].blocks[block]["digest"].tobytes():
            logger.warning("%s: block %d is damaged on this machine; fetching it again", self._folder, index)
            self._fetch(index)

    def _locate(self, index: int) -> tuple[int, int]:
        """Convert the index of a block over all shards to (shard, block in the shard)."""
        shard = int(np.searchsorted(self._first_blocks, index, side="right")) - 1
        return shard, index - int(self._first_blocks[shard])

    def _fetch_range(self, array: StoredArray, extent: _Extent, block: int) -> bytes:
        start, end = (byte - extent.base + array.header_bytes for byte in extent.range_of(block))
        address = join(self._address, array.name)
        try:
            return self._objects.read_range(address, start, end)
        except AccessError:
            raise
        except InputError:
            raise ContentError(
                f"{address}: not found. Run `prepare` on a machine with the full copy: it stores missing files again."
            ) from None

    def _free_pages(self, index: int) -> None:
        """Free the pages of a block, except pages shared with a present block. The caller must hold the lock."""
        shard_index, block = self._locate(index)
        shard = self._shards[shard_index]
        absent = self._state["state"][shard.first_block : int(self._first_blocks[shard_index + 1])] == _ABSENT
        for extent in shard.extents.values():
            start, end = extent.range_of(block)
            low, high = start // _PAGE * _PAGE, -(-end // _PAGE) * _PAGE
            # Keep the pages of present neighbors; blocks are stored in order.
            if (present := np.flatnonzero(~absent[:block])).size:
                low = max(low, -(-extent.range_of(int(present[-1]))[1] // _PAGE) * _PAGE)
            if (present := np.flatnonzero(~absent[block + 1 :])).size:
                high = min(high, extent.range_of(block + 1 + int(present[0]))[0] // _PAGE * _PAGE)
            if high > low:
                punch_hole(extent.descriptor, low, high - low, self._folder)

    # ------------------------------------------------------------ files and processes

    def _assign_ranges(self) -> list[_Shard]:
        """Assign a range of the files to each array of each shard, and set the sizes of the files."""
        shards, bases = [], dict.fromkeys(ARRAYS, 0)
        for stored, first_block in zip(self._stored_shards, self._first_blocks.tolist(), strict=False):
            extents = {}
            for name in ARRAYS:
                array = stored.arrays[name]
                extents[name] = _Extent(name, self._descriptors[name], bases[name], array.row_bytes, stored.blocks)
                bases[name] += -(-(array.bytes - array.header_bytes) // _PAGE) * _PAGE
            shards.append(_Shard(extents, first_block))
        for name, size in bases.items():
            os.ftruncate(self._descriptors[name], max(size, _PAGE))
        return shards

    def _take_slot(self) -> int:
        self._slots: dict[int, int] = {}
        with self._locked():
            for slot in range(_SLOTS):
                self._slots[slot] = os.open(self._folder / f"slot-{slot}", os.O_RDWR | os.O_CREAT, 0o644)
            for slot, descriptor in self._slots.items():
                if try_lock(descriptor):
                    self._held[slot] = False
                    is_abandoned = (self._state["state"] == _FETCHING) & (self._state["slot"] == slot)
                    self._state["state"][is_abandoned] = _ABSENT  # the fetching process has died
                    return slot
        raise MachineError(f"{self._folder}: {_SLOTS} processes use it already. Wait for them, or stop some.")

    def _live_slots(self, *, include_own: bool = True) -> np.ndarray:
        """Return which slots belong to live processes, bool [_SLOTS]. The caller must hold the lock."""
        alive = np.zeros(_SLOTS, bool)
        for slot, descriptor in self._slots.items():
            if slot == self._slot:
                continue
            if try_lock(descriptor):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            else:
                alive[slot] = True
        alive[self._slot] = include_own
        return alive

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._mutex:
            self._lock_depth += 1  # reentrant: a lease may be released anywhere, even while the lock is held
            try:
                if self._lock_depth == 1:
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                yield
            finally:
                self._lock_depth -= 1
                if not self._lock_depth:
                    fcntl.flock(self._lock, fcntl.LOCK_UN)


def remove_unused(folder: Path) -> None:
    """Remove the caches next to `folder`, of earlier versions of the corpus, that no process uses."""
    for state_file in folder.parent.glob("*/state"):
        if state_file.parent == folder:
            continue
        with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):  # removed by another process
            descriptors = []
            for path in state_file.parent.glob("slot-*"):
                descriptors.append(os.open(path, os.O_RDWR))
                stack.callback(os.close, descriptors[-1])
            if descriptors and all(map(try_lock, descriptors)):
                shutil.rmtree(state_file.parent, ignore_errors=True)


def _block_bytes(shard: StoredShard) -> np.ndarray:
    """Return the bytes of each block, int64 [B]."""
    bounds = ranges_of(shard.blocks).items()
    return np.sum([(end - start) * shard.arrays[name].row_bytes for name, (start, end) in bounds], axis=0)


def _format_size(size: int) -> str:
    """Format a number of bytes, rounded up, so that a cache of this size suffices."""
    unit, name = (10**7, "GB") if size >= 10**9 else (10**4, "MB")
    return f"{-(-size // unit) / 100:g} {name}"

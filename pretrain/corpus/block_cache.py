"""Blocks of shards at an address, fetched by range into files of this machine that all its processes share.

The files are as large as all arrays and sparse: a block is written to its place when it is needed, and its place is
made a hole again when it is the one that was used longest ago. So what reads an array is the same as for a full copy,
and holds a `Lease` of the blocks that it reads. Two processes never fetch one block twice, of one run or of several.

    <folder>/tokens, sentences, documents  an array of all shards, each from a page on: three files, however many shards
    <folder>/state     STATE [blocks], under the lock of <folder>/lock
    <folder>/held      bool [_SLOTS, blocks], which process needs which block
    <folder>/limits    int64 [_SLOTS], how many bytes the cache may have by each process
    <folder>/slot-<n>  locked by the process that has the slot; the kernel unlocks it if that process dies
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
from pretrain.corpus.blocks import PARTS, block_digest, parts_of
from pretrain.corpus.sparse_files import punch_hole, shared_array, try_lock, write_all
from pretrain.storage.objects import AccessError, ContentError, ObjectStore

_SLOTS = 64  # processes of one machine
_AT_ONCE = 16  # blocks on their way; S3 gives one connection some 90 MB/s
_POLL_SECONDS = 0.02
_PAGE = 4096
_ABSENT, _COMING, _HERE = range(3)
STATE = np.dtype([("state", "u1"), ("slot", "u1"), ("used", "<u4")])

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredArray:
    """An array of a shard at an address."""

    name: str  # of the file
    bytes: int
    header: int  # bytes before the first element
    width: int  # bytes of an element, or of a row


@dataclass(frozen=True)
class StoredShard:
    """A shard at an address: its arrays by their names, and its blocks (BLOCK [B])."""

    arrays: dict[str, StoredArray]
    blocks: np.ndarray


@dataclass
class _Place:
    """Where an array of a shard is in the file of all shards."""

    name: str
    descriptor: int
    base: int  # byte of the file
    width: int  # bytes of an element
    blocks: np.ndarray  # BLOCK [B] of the shard

    def range_of(self, block: int) -> tuple[int, int]:
        """[begin, end) of a block, in bytes of the file."""
        begin, end = parts_of(self.blocks[block])[self.name]
        return self.base + int(begin) * self.width, self.base + int(end) * self.width


@dataclass
class _Shard:
    files: dict[str, _Place]
    first: int  # block, counted over all shards


class Lease:
    """Blocks that stay here as long as this object does."""

    def __init__(self, cache: BlockCache, blocks: np.ndarray) -> None:
        self._cache, self._blocks = cache, blocks

    # As Python exits, modules may be cleared already; the kernel then frees the slot.
    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self._cache.release(self._blocks)


class BlockCache:
    """The blocks of a split that are on this machine.

    Args:
        address: of the corpus.
        folder: for the files; all processes of the machine have the same.
        most_bytes: of the cache (`corpus.cache`); of several runs with the same folder, the largest counts.

    Raises `MachineError` if the file system has no holes, or too many processes use the folder.
    """

    def __init__(self, address: str, folder: Path, shards: Sequence[StoredShard], *, most_bytes: int) -> None:
        self._address, self._folder, self._stored = address, folder, list(shards)
        self._most, self._objects = most_bytes, ObjectStore()
        counts = [len(shard.blocks) for shard in shards]
        self._firsts = np.cumsum([0, *counts])
        self._bytes = np.concatenate([np.zeros(0, np.int64), *map(_block_bytes, shards)])
        self._mutex, self._depth, self._shrunk = threading.RLock(), 0, 0
        self._uses = np.zeros(len(self._bytes), np.int32)
        self._proven = np.zeros(len(self._bytes), bool)  # read and verified by this process, or by one that fetched it
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            self._state = shared_array(folder / "state", STATE, (len(self._bytes),))
            self._held = shared_array(folder / "held", np.dtype(bool), (_SLOTS, len(self._bytes)))
            self._limits = shared_array(folder / "limits", np.dtype(np.int64), (_SLOTS,))
            punch_hole(self._lock, 0, _PAGE, folder)  # tells now whether the file system can
            self._files = {name: os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o644) for name in PARTS}
            self._shards = self._placed()
            self._mappings = {name: mmap.mmap(file, 0, access=mmap.ACCESS_READ) for name, file in self._files.items()}
            self._slot = self._take_slot()
        self._limits[self._slot] = most_bytes
        self._is_ahead = np.zeros(len(self._bytes), bool)  # fetched ahead by this process, and not held since
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="blocks")
        self._ahead = ThreadPoolExecutor(1, thread_name_prefix="blocks-ahead")

    def array(self, shard: int, name: str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """An array of a shard, read-only, with zeros where no block is held."""
        return np.ndarray(shape, dtype, self._mappings[name], offset=self._shards[shard].files[name].base)

    def numbers(self, shard: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Blocks of shards, counted over all shards; int64."""
        return self._firsts[shard.astype(np.int64)] + block

    def bytes_of(self, blocks: np.ndarray) -> int:
        """What blocks take, by their numbers over all shards."""
        return int(self._bytes[blocks].sum())

    def largest(self, blocks: np.ndarray) -> int:
        """Bytes of the largest of some blocks."""
        return int(self._bytes[blocks].max(initial=0))

    def document_begins(self, shard: int) -> np.ndarray:
        """The token offsets of all documents of a shard, int64 [documents + 1], read from the store."""
        array = self._stored[shard].arrays["documents"]
        content = self._objects.read_range(join(self._address, array.name), array.header, array.bytes)
        return np.frombuffer(content, "<i8").reshape(-1, 2)[:, 1]

    def check_fits(self, least: int, what: str) -> None:
        """Raise `InputError` if `least` bytes are more than the cache may take."""
        if least > self._most:
            raise InputError(
                f"corpus.cache: {_size(self._most)}, but {what} needs {_size(least)} at least. Raise it to that, or "
                "better to twice as much, so that what comes next is fetched ahead."
            )

    def hold(self, blocks: np.ndarray) -> Lease:
        """Wait until blocks are here, fetching those that are not, and keep them as long as the result lives.

        Raises:
            InputError: the store denies access.
            MachineError: the store fails for too long, a block is damaged there, or the disk is full.
        """
        began = time.monotonic()
        with self._locked():  # marked and claimed at once: who finds a block held takes it for verified
            self._uses[blocks] += 1
            self._held[self._slot, blocks] = True
            self._is_ahead[blocks] = False
            lease = Lease(self, blocks)
            claimed = self._claim(blocks)
        self._fetch_claimed(*claimed)
        while len(blocks := self._not_here(blocks)):
            time.sleep(_POLL_SECONDS)
            self._fetch_claimed(*self._claim(blocks))
        if (waited := time.monotonic() - began) > 1:
            logger.info("%s: waited %.1f s for blocks", self._address, waited)
        return lease

    def fetch_ahead(self, blocks: np.ndarray) -> None:
        """Fetch blocks in the background, as far as there is room for them."""
        self._ahead.submit(self._bring_ahead, blocks)

    def release(self, blocks: np.ndarray) -> None:
        """A lease has ended."""
        with self._locked():
            self._uses[blocks] -= 1
            self._held[self._slot, blocks[self._uses[blocks] == 0]] = False

    def close(self) -> None:
        """Fetch no more. What is on its way still comes, or is fetched by another process when this one has ended."""
        self._ahead.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ what is here

    def _not_here(self, blocks: np.ndarray) -> np.ndarray:
        """Those of `blocks` that another process is still fetching."""
        with self._locked():
            return blocks[self._state["state"][blocks] != _HERE]

    def _fetch_claimed(self, absent: np.ndarray, unproven: np.ndarray) -> None:
        """Fetch or verify what this process has claimed, and wait for it."""
        futures = {block: self._pool.submit(self._fetch, block) for block in absent.tolist()}
        futures |= {block: self._pool.submit(self._prove, block) for block in unproven.tolist()}
        self._finish(futures)

    def _bring_ahead(self, blocks: np.ndarray) -> None:
        with contextlib.suppress(InputError, MachineError, OSError):  # who needs the blocks will find out
            with self._locked():
                absent = blocks[self._state["state"][blocks] == _ABSENT]
                free = self._free()
                room = self._limit() - self._present_bytes() + int(self._bytes[free[~self._is_ahead[free]]].sum())
                fits = absent[np.cumsum(self._bytes[absent]) <= room]
                self._is_ahead[fits] = True
            for part in np.array_split(fits, max(1, len(fits) // _AT_ONCE)):
                self._fetch_claimed(*self._claim(part))

    def _claim(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The blocks that this process shall fetch, for which there is room, and those that it shall verify."""
        with self._locked():
            state = self._state["state"][blocks]
            self._state["used"][blocks] = int(self._state["used"].max(initial=0)) + 1
            absent = blocks[state == _ABSENT]
            coming = blocks[state == _COMING]
            if len(coming):
                alive = self._alive()
                absent = np.concatenate([absent, coming[~alive[self._state["slot"][coming]]]])
            unproven = blocks[(state == _HERE) & ~self._proven[blocks]]
            if len(unproven):
                # What another process holds it has verified.
                elsewhere = self._held[self._alive(own=False)][:, unproven].any(axis=0)
                self._proven[unproven[elsewhere]] = True
                unproven = unproven[~elsewhere]
            self._make_room(absent)
            for own in (absent, unproven):
                self._state["state"][own], self._state["slot"][own] = _COMING, self._slot
            return absent, unproven

    def _finish(self, futures: dict[int, Future[None]]) -> None:
        """Wait for fetched blocks and mark them; raises the first error after the others have ended."""
        errors: list[BaseException] = []
        for block, future in futures.items():
            try:
                future.result()
            except BaseException as error:
                errors.append(error)
                for other in futures.values():
                    other.cancel()
            with self._locked():
                self._proven[block] = is_here = not (future.cancelled() or future.exception())
                self._state["state"][block] = _HERE if is_here else _ABSENT
        if errors:
            raise next((one for one in errors if isinstance(one, (InputError, MachineError))), errors[0])

    def _make_room(self, blocks: np.ndarray) -> None:
        """Evict what was used longest ago until `blocks`, which are absent, fit. Under the lock."""
        needed = int(self._bytes[blocks[self._state["state"][blocks] == _ABSENT]].sum())
        if (excess := self._present_bytes() + needed - self._limit()) > 0:
            self._evict(excess, blocks)

    def _evict(self, excess: int, but: np.ndarray) -> int:
        """Free `excess` bytes if blocks that nobody needs have them; returns the bytes that went. Under the lock."""
        free = np.setdiff1d(self._free(), but)
        free = free[np.lexsort((self._state["used"][free], self._is_ahead[free]))]  # what was fetched ahead goes last
        count = int(np.searchsorted(np.cumsum(self._bytes[free]), excess)) + 1
        for block in free[:count].tolist():
            self._state["state"][block] = _ABSENT
            self._proven[block] = False
            self._punch(block)
        return int(self._bytes[free[:count]].sum())

    def _free(self) -> np.ndarray:
        """Blocks that are here and that no living process needs. Under the lock."""
        held = self._held[self._alive()].any(axis=0)
        return np.flatnonzero((self._state["state"] == _HERE) & ~held)

    def _present_bytes(self) -> int:
        return int(self._bytes[self._state["state"] != _ABSENT].sum())

    def _limit(self) -> int:
        """The size of the cache: the largest that a living process has been given. Under the lock."""
        return int(self._limits[self._alive()].max())

    # ------------------------------------------------------------ one block

    def _fetch(self, number: int) -> None:
        """Write a block to its place."""
        shard, block = self._place(number)
        stored, files = self._stored[shard], self._shards[shard].files
        for retries_left in (1, 0):
            parts = {name: self._read(stored.arrays[name], file, block) for name, file in files.items()}
            if block_digest(iter(parts.values())) == stored.blocks[block]["digest"].tobytes():
                break
            if not retries_left:
                raise ContentError(
                    f"{join(self._address, stored.arrays['tokens'].name)}: the checksum of its block {block} is wrong; "
                    "it was changed or damaged. Remove this file there, and run `prepare` on a "
                    "machine that has the full copy."
                )
        with disk_errors(self._folder):
            places = [(files[name].descriptor, part, files[name].range_of(block)[0]) for name, part in parts.items()]
            while True:
                before = self._shrunk
                try:
                    return write_all(places)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._has_shrunk(number, before):
                        raise

    def _has_shrunk(self, number: int, before: int) -> bool:
        """Whether blocks that nobody needs made room for a block on a full disk; the cache stays as small."""
        with self._locked():
            if self._shrunk != before:  # another thread has made room meanwhile
                return True
            present = self._present_bytes()
            freed = self._evict(max(int(self._bytes[number]), present // 8), np.array([number]))
            if freed:
                self._shrunk += 1
                self._limits[:] = np.minimum(self._limits, present - freed)
                logger.warning("%s: disk full; the cache is now %s", self._folder, _size(present - freed))
        return freed > 0

    def _prove(self, number: int) -> None:
        """Verify a block that was here before this process; fetch it again if it is damaged."""
        shard, block = self._place(number)
        ranges = ((file, *file.range_of(block)) for file in self._shards[shard].files.values())
        here = (os.pread(file.descriptor, end - begin, begin) for file, begin, end in ranges)
        if block_digest(here) != self._stored[shard].blocks[block]["digest"].tobytes():
            logger.warning("%s: block %d is damaged on this machine; fetching it again", self._folder, number)
            self._fetch(number)

    def _place(self, number: int) -> tuple[int, int]:
        """(shard, block of the shard) of a block counted over all shards."""
        shard = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return shard, number - int(self._firsts[shard])

    def _read(self, array: StoredArray, place: _Place, block: int) -> bytes:
        begin, end = (byte - place.base + array.header for byte in place.range_of(block))
        where = join(self._address, array.name)
        try:
            return self._objects.read_range(where, begin, end)
        except AccessError:
            raise
        except InputError:
            raise ContentError(
                f"{where}: not found. Run `prepare` on a machine that has the full copy: it stores what was lost."
            ) from None

    def _punch(self, number: int) -> None:
        """Free the pages of a block that no block that is here shares. Under the lock."""
        place, block = self._place(number)
        shard = self._shards[place]
        absent = self._state["state"][shard.first : int(self._firsts[place + 1])] == _ABSENT
        for file in shard.files.values():
            begin, end = file.range_of(block)
            low, high = begin // _PAGE * _PAGE, -(-end // _PAGE) * _PAGE
            # Pages of a present neighbor stay. Blocks lie in their order.
            if (here := np.flatnonzero(~absent[:block])).size:
                low = max(low, -(-file.range_of(int(here[-1]))[1] // _PAGE) * _PAGE)
            if (here := np.flatnonzero(~absent[block + 1 :])).size:
                high = min(high, file.range_of(block + 1 + int(here[0]))[0] // _PAGE * _PAGE)
            if high > low:
                punch_hole(file.descriptor, low, high - low, self._folder)

    # ------------------------------------------------------------ files and processes

    def _placed(self) -> list[_Shard]:
        """The places of all shards; the files become as large as they need."""
        shards, bases = [], dict.fromkeys(PARTS, 0)
        for stored, first in zip(self._stored, self._firsts.tolist(), strict=False):
            files = {}
            for name in PARTS:
                array = stored.arrays[name]
                files[name] = _Place(name, self._files[name], bases[name], array.width, stored.blocks)
                bases[name] += -(-(array.bytes - array.header) // _PAGE) * _PAGE
            shards.append(_Shard(files, first))
        for name, size in bases.items():
            os.ftruncate(self._files[name], max(size, _PAGE))
        return shards

    def _take_slot(self) -> int:
        self._slots: dict[int, int] = {}
        with self._locked():
            for slot in range(_SLOTS):
                self._slots[slot] = os.open(self._folder / f"slot-{slot}", os.O_RDWR | os.O_CREAT, 0o644)
            for slot, descriptor in self._slots.items():
                if try_lock(descriptor):
                    self._held[slot] = False
                    left = (self._state["state"] == _COMING) & (self._state["slot"] == slot)
                    self._state["state"][left] = _ABSENT  # by a process that died
                    return slot
        raise MachineError(f"{self._folder}: {_SLOTS} processes use it already. Wait for them, or stop some.")

    def _alive(self, *, own: bool = True) -> np.ndarray:
        """Which slots have a living process, also this one or not, bool [_SLOTS]. Under the lock."""
        alive = np.zeros(_SLOTS, bool)
        for slot, descriptor in self._slots.items():
            if slot == self._slot:
                continue
            if try_lock(descriptor):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            else:
                alive[slot] = True
        alive[self._slot] = own
        return alive

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._mutex:
            self._depth += 1  # a lease may end anywhere
            try:
                if self._depth == 1:
                    fcntl.flock(self._lock, fcntl.LOCK_EX)
                yield
            finally:
                self._depth -= 1
                if not self._depth:
                    fcntl.flock(self._lock, fcntl.LOCK_UN)


def remove_unused(folder: Path) -> None:
    """Remove the caches beside `folder` that no process uses: of what the corpus was before it changed."""
    for other in folder.parent.glob("*/state"):
        if other.parent == folder:
            continue
        with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):  # another process removes it, too
            descriptors = []
            for path in other.parent.glob("slot-*"):
                descriptors.append(os.open(path, os.O_RDWR))
                stack.callback(os.close, descriptors[-1])
            if descriptors and all(map(try_lock, descriptors)):
                shutil.rmtree(other.parent, ignore_errors=True)


def _block_bytes(shard: StoredShard) -> np.ndarray:
    """Bytes of each block, int64 [B]."""
    bounds = parts_of(shard.blocks).items()
    return np.sum([(end - begin) * shard.arrays[name].width for name, (begin, end) in bounds], axis=0)


def _size(count: int) -> str:
    """Rounded up, so that it can be given as the size of a cache."""
    unit, name = (10**7, "GB") if count >= 10**9 else (10**4, "MB")
    return f"{-(-count // unit) / 100:g} {name}"

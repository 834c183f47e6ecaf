"""Near-duplicates by MinHash (Broder 1997) and locality-sensitive hashing in bands (Leskovec et al., chapter 3).

While documents are read, each gets a sketch: one number for every band, which documents with equal minima in that band
share, and the lowest 8 bits of all minima (Li & Koenig 2010). The sketches of a part are a file. Afterwards each call
of `find_pairs` compares the documents of one band, or of a share of it by hash, and names the pairs that are similar.

A document is dropped if an earlier one in the order of the corpus is similar, whether that one is kept or not. It is
compared with two of the documents that share a band with it: the first, and the one right before it.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.common.files import atomic_open, write_json
from pretrain.corpus.filters.report import MOST_EXAMPLES, excerpt
from pretrain.corpus.filters.text_columns import TextColumns, mixed
from pretrain.corpus.partitions import Partitions, partition_of

SUFFIX = ".sketches"
WORDS = 3  # of a sequence
# A pair of documents with similarity s shares a band with probability 1 - (1 - s^ROWS)^BANDS: 0.87 at 0.5.
BANDS, ROWS = 32, 4  # ROWS: minima in a band
_SEED = 42
MOST_DOCUMENTS = 1 << 23  # of a call of `find_pairs`: about 0.4 GB of memory
_PAIRS_AT_ONCE = 4096  # compared, so that their minima fit the cache
_EXCERPT_BYTES = 96
_CHANCE = 1 / 256  # that the lowest 8 bits of different minima are equal
_HASH = np.dtype([("first", "<u8"), ("second", "<u8")])
PAIR = np.dtype([("document", "<u8"), ("earlier", "<u8"), ("equal", "<u4"), ("hash", "<u8", 2)])


@dataclass(frozen=True)
class Sketches:
    """keys uint64 [D, bands]; minima uint8 [D, bands * rows]; excerpts S96 [D]."""

    keys: np.ndarray
    minima: np.ndarray
    excerpts: np.ndarray

    def select(self, keep: np.ndarray) -> Sketches:
        """Those of the documents that bool or integer `keep` chooses."""
        return Sketches(self.keys[keep], self.minima[keep], self.excerpts[keep])

    @classmethod
    def joined(cls, sketches: Sequence[Sketches]) -> Sketches:
        """Those of all documents, one after the other."""
        return cls(*(np.concatenate([getattr(s, name) for s in sketches]) for name in ("keys", "minima", "excerpts")))

    def save(self, path: Path, hashes: np.ndarray) -> None:
        """Write the sketches of documents with `hashes`, uint64 [D, 2]; bands lie one after the other."""
        with atomic_open(path) as file:
            for array in (hashes, np.ascontiguousarray(self.keys.T), self.minima, self.excerpts):
                np.save(file, array, allow_pickle=False)


def sketches(texts: Sequence[str], columns: TextColumns) -> Sketches:
    """The sketches of `texts`, of which each set is that of its sequences of `WORDS` words."""
    from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

    grams, counts = _gram_sets(texts, columns, WORDS)
    offsets = np.append(0, np.cumsum(counts)).astype(np.uint64)
    size = BANDS * ROWS
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(grams, offsets, size, _SEED)
    minima = np.array(matrix.to_rows(), np.uint64).reshape(len(texts), BANDS, ROWS)
    keys = np.zeros((len(texts), BANDS), np.uint64)
    for row in range(ROWS):
        keys = mixed(keys * np.uint64(0x9E3779B97F4A7C15) + minima[:, :, row] + np.uint64(1))
    lowest = (minima & np.uint64(0xFF)).astype(np.uint8).reshape(len(texts), size)
    excerpts = np.array([excerpt(text).encode()[:_EXCERPT_BYTES] for text in texts], f"S{_EXCERPT_BYTES}")
    return Sketches(keys, lowest, excerpts)


def _gram_sets(texts: Sequence[str], columns: TextColumns, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of the n-grams of all documents, and how many each has. One with fewer than n words has one hash: of all
    its words or, without any, such as in a script whose letters `TextColumns` does not know, of its text.
    """
    grams = columns.grams(n)
    first, counts = columns.gram_documents(n)
    if counts.all():
        within = np.repeat(first - np.append(0, np.cumsum(counts)[:-1]), counts) + np.arange(counts.sum())
        return grams[within], counts
    whole = columns.sequence_hashes(columns.terms[:-1], columns.terms[1:])
    for number in map(int, np.flatnonzero(np.diff(columns.terms) == 0)):
        digest = hashlib.blake2b(texts[number].encode(), digest_size=8).digest()
        whole[number] = int.from_bytes(digest, "little")
    pieces = [grams[a : a + c] if c else whole[d : d + 1] for d, (a, c) in enumerate(zip(first, counts, strict=True))]
    return np.concatenate(pieces), np.maximum(1, counts)


def join_sketches(parts: Sequence[Path], out: Path) -> None:
    """Write the sketches of several files, one after the other, as one file."""
    with atomic_open(out) as file:
        for number in range(4):
            arrays = [_mapped(path, number) for path in parts]
            axis = 1 if number == 1 else 0  # of the documents
            shape = list(arrays[0].shape)
            shape[axis] = sum(array.shape[axis] for array in arrays)
            described = {"descr": np.lib.format.dtype_to_descr(arrays[0].dtype), "fortran_order": False}
            np.lib.format.write_array_header_1_0(file, {**described, "shape": tuple(shape)})  # pyright: ignore[reportArgumentType]
            for row in range(shape[0] if axis else 1):
                for array in arrays:
                    np.ascontiguousarray(array[row] if axis else array).tofile(file)


# ---------------------------------------------------------------- the search


class SketchFiles:
    """The sketches of all parts in the folder `work`, in the order of the corpus, read from their files as needed.

    Files that are named by a source alone are of a corpus that grows. Their documents are the `known` first ones.
    """

    def __init__(self, work: Path) -> None:
        named = sorted((tuple(map(int, path.stem.split("-"))), path) for path in work.glob("*" + SUFFIX))
        self._paths = [path for _, path in named]
        self.first = np.cumsum([0, *(len(_mapped(path, 0)) for path in self._paths)])
        self._known = sum(len(place) == 1 for place, _ in named)
        self.known = int(self.first[self._known])

    def band(self, band: int, share: int, shares: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys of one band that are `share` modulo `shares`, and the documents that have them.

        Of known documents, only those that share their key with one that is not.
        """
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {-1: (np.zeros(0, np.uint64), np.zeros(0, np.uint64))}
        new = np.zeros(0, np.uint64)
        for number in [*range(self._known, len(self._paths)), *range(self._known)]:
            if number == 0:
                new = np.unique(np.concatenate([keys for keys, _ in found.values()]))
            own = np.asarray(_mapped(self._paths[number], 1)[band])
            chosen = np.flatnonzero(own % np.uint64(shares) == share)
            if number < self._known:
                chosen = chosen[np.isin(own[chosen], new)]
            found[number] = own[chosen], chosen.astype(np.uint64) + np.uint64(self.first[number])
        keys, documents = zip(*(found[number] for number in sorted(found)), strict=True)
        return np.concatenate(keys), np.concatenate(documents)

    def rows(self, number: int, documents: np.ndarray) -> np.ndarray:
        """Rows of the array `number` (0 hashes, 2 minima, 3 excerpts) for ascending document numbers."""
        documents = documents.astype(np.int64)
        part = np.searchsorted(self.first, documents, "right") - 1
        chosen = [_mapped(self._paths[p], number)[documents[part == p] - self.first[p]] for p in np.unique(part)]
        return np.concatenate(chosen or [_mapped(self._paths[0], number)[:0]])


def _mapped(path: Path, number: int) -> np.ndarray:
    """One of the arrays of a file of sketches, memory-mapped: hashes, keys, minima, excerpts."""
    with path.open("rb") as file:
        for _ in range(number + 1):
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            place = file.tell()
            file.seek(dtype.itemsize * int(np.prod(shape)), os.SEEK_CUR)
    return np.memmap(path, dtype, "r", place, shape)


def find_pairs(work: Path, out: Path, band: int, share: int, shares: int, threshold: float) -> None:
    """Write the documents that are similar to an earlier one in one band to `out`: PAIR, ascending.

    Only keys that are `share` modulo `shares` are compared.
    """
    files = SketchFiles(work)
    later, earlier = _candidates(files, *files.band(band, share, shares))
    is_new = later >= np.uint64(files.known)
    later, earlier = later[is_new], earlier[is_new]
    involved, place = np.unique(np.concatenate([later, earlier]), return_inverse=True)
    minima = files.rows(2, involved)
    equal = _equal_bits(minima, place[: len(later)], place[len(later) :])
    similar = _similarity(equal, minima.shape[1]) >= threshold
    pairs = np.zeros(int(similar.sum()), PAIR)
    pairs["document"], pairs["earlier"], pairs["equal"] = later[similar], earlier[similar], equal[similar]
    pairs["hash"] = files.rows(0, involved)[place[: len(later)][similar]]
    with atomic_open(out) as file:
        np.save(file, _earliest(pairs), allow_pickle=False)


def _equal_bits(minima: np.ndarray, some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """uint32 [N]: how many of the minima of documents `some[i]` and `others[i]` are equal."""
    equal = np.zeros(len(some), np.uint32)
    for start in range(0, len(some), _PAIRS_AT_ONCE):
        these = slice(start, start + _PAIRS_AT_ONCE)
        equal[these] = np.count_nonzero(minima[some[these]] == minima[others[these]], axis=1)
    return equal


def _earliest(pairs: np.ndarray) -> np.ndarray:
    """The pair with the earliest other document for each document."""
    pairs = pairs[np.lexsort((pairs["earlier"], pairs["document"]))]
    return pairs[np.append(True, pairs["document"][1:] != pairs["document"][:-1])[: len(pairs)]]


def _similarity(equal: np.ndarray, size: int) -> np.ndarray:
    """The estimated share of common n-grams (Jaccard) of documents of whose `size` minima `equal` have equal bits."""
    return (equal / size - _CHANCE) / (1 - _CHANCE)


def _candidates(files: SketchFiles, keys: np.ndarray, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(document, earlier one) for each document that is not the first with its key; copies do not count."""
    order = np.argsort(keys, kind="stable")  # documents ascend within a key
    keys, documents = keys[order], documents[order]
    same = np.append(False, keys[1:] == keys[:-1])[: len(keys)]
    shared = same | np.append(same[1:], False)
    keys, documents = keys[shared], documents[shared]
    kept = ~_copies(files, keys, documents)
    keys, documents = keys[kept], documents[kept]
    begins = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
    first = np.repeat(begins, np.diff(np.append(begins, len(keys))))
    place = np.arange(len(keys))
    others, before = place[place > first], place[place > first + 1]
    pairs = np.concatenate([others, before]), np.concatenate([first[others], before - 1])
    return documents[pairs[0]], documents[pairs[1]]


def _copies(files: SketchFiles, keys: np.ndarray, documents: np.ndarray) -> np.ndarray:
    """bool: documents with the text of an earlier one, which are left out anyway. They share every key with it."""
    ascending, place = np.unique(documents, return_inverse=True)
    hashes = files.rows(0, ascending)[place]
    order = np.lexsort((documents, hashes[:, 1], hashes[:, 0], keys))
    copies = np.zeros(len(keys), bool)
    now, before = order[1:], order[:-1]
    copies[now] = (keys[now] == keys[before]) & (hashes[now] == hashes[before]).all(axis=1)
    return copies


def merge_pairs(found: Sequence[Path], work: Path, size: int, out: Path) -> None:
    """Write the result to `out` from what all calls of `find_pairs` wrote; sketches have `size` minima.

    `out` has the hashes of the documents to drop, uint64 [N, 2], ascending; beside it is a report of them.
    """
    files = SketchFiles(work)
    every = [np.load(path, mmap_mode="r", allow_pickle=False) for path in found]
    shares = max(1, -(-int(files.first[-1]) // MOST_DOCUMENTS))
    by_hash = Partitions(out.with_suffix(".partitions"), _HASH, shares)
    examples: list[dict[str, Any]] = []
    for block in range(shares):
        pairs = _earliest(np.concatenate([_of_block(pairs, block) for pairs in every]))
        examples += [_example(files, pair, size) for pair in pairs[: MOST_EXAMPLES - len(examples)]]
        hashes = np.ascontiguousarray(pairs["hash"]).view(_HASH).reshape(-1)
        by_hash.add(hashes, partition_of(hashes["first"], shares))
    write_json(out.with_suffix(".json"), {"examples": examples})
    with atomic_open(out) as file:
        for hashes in by_hash.drain():
            np.sort(hashes, order=["first", "second"]).tofile(file)


def _of_block(pairs: np.ndarray, block: int) -> np.ndarray:
    """Those of ascending `pairs` whose document is one of `MOST_DOCUMENTS`; a search that reads few pages."""
    begin, end = (
        bisect.bisect_left(pairs, number * MOST_DOCUMENTS, key=lambda pair: int(pair["document"]))
        for number in (block, block + 1)
    )
    return np.array(pairs[begin:end])


def _example(files: SketchFiles, pair: np.void, size: int) -> dict[str, Any]:
    numbers = np.array([pair["document"]]), np.array([pair["earlier"]])
    text, like = (files.rows(3, number)[0].decode(errors="ignore") for number in numbers)
    similarity = float(_similarity(pair["equal"], size))
    return {"text": text, "found": f"similarity {similarity:.2f} to: {like}"}


@dataclass(frozen=True)
class NearDuplicates:
    """The documents to drop: hashes uint64 [N, 2], ascending; examples as a `Report` has them."""

    hashes: np.ndarray
    examples: list[dict[str, Any]]

    @classmethod
    def load(cls, path: Path) -> NearDuplicates:
        """What `merge_pairs` wrote."""
        report = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        hashes = np.memmap(path, np.uint64, "r") if path.stat().st_size else np.zeros(0, np.uint64)
        return cls(hashes.reshape(-1, 2), report["examples"])

    def are(self, hashes: np.ndarray) -> np.ndarray:
        """bool [D]: whether documents with `hashes`, uint64 [D, 2] with the first ascending, are to be dropped."""
        return are_among(self.hashes, hashes)


def are_among(known: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """bool [D]: which of `hashes` are known; both uint64 [N, 2] with the first ascending."""
    if not len(hashes):
        return np.zeros(0, bool)
    begin = bisect.bisect_left(known, hashes[0, 0], key=lambda row: row[0])
    end = bisect.bisect_right(known, hashes[-1, 0], lo=begin, key=lambda row: row[0])
    known = np.array(known[begin:end])
    if not len(known):
        return np.zeros(len(hashes), bool)
    place = np.searchsorted(known[:, 0], hashes[:, 0]).clip(max=len(known) - 1)
    return (known[place] == hashes).all(axis=1)

"""Near-duplicates by MinHash (Broder 1997) and locality-sensitive hashing in bands (Leskovec et al., chapter 3).

Each document that is read gets a sketch: a key per band, which is a hash of the band's minima (MinHash values), and the
lowest 8 bits of all minima (Li & Koenig 2010). The sketches of each part file (`parts`) are stored in a file next to
it. Each call of `find_pairs` then compares the documents with equal keys in one band, or in one partition of the band's
keys, and writes the similar pairs.

A document is dropped if it is similar to an earlier one, even if that one is also dropped. The order is: known
documents (in an existing corpus to which sources are added), held-out documents, then all others in the order of
the corpus. A document is compared with the previous one with the same key, and with the key's anchors: its first
document or, if there are known or held-out ones, up to `_ANCHORS` of them.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.common.files import atomic_open, write_json
from pretrain.corpus.buckets import Buckets, bucket_of
from pretrain.corpus.filters.report import MAX_EXAMPLES, excerpt
from pretrain.corpus.filters.terms import DocumentTerms, mix_bits

SUFFIX = ".sketches"
WORDS = 3  # words per n-gram
# A pair of documents with similarity s shares a band with probability 1 - (1 - s^ROWS)^BANDS: 0.87 at 0.5.
BANDS, ROWS = 32, 4  # number of bands, and of minima per band
_SEED = 42
MAX_DOCUMENTS = 1 << 23  # maximum number of documents per call of `find_pairs`; bounds its memory to about 0.4 GB
_ANCHORS = 8  # maximum number of anchors of a key: documents with which all later ones with the key are compared
_BATCH_PAIRS = 4096  # pairs compared together; the minima of a larger batch do not fit in the CPU cache
_HASHES, _KEYS, _MINIMA, _EXCERPTS = range(4)  # arrays of a sketch file, in order
_EXCERPT_BYTES = 96  # bytes of a document that are kept as an example
_SPARSE_LOOKUP_RATIO = 1000  # with more known hashes per lookup, the file is read only where needed
_COLLISION = 1 / 256  # probability that the lowest 8 bits of different minima are equal
_HASH = np.dtype([("first", "<u8"), ("second", "<u8")])
# Precedence ranks of documents (not workers): the one with the lowest rank is kept. _KNOWN: already in the corpus;
# _HELD_OUT: in a source that is entirely held out; _VALIDATION: in the held-out fraction of another source.
_KNOWN, _HELD_OUT, _VALIDATION, _TRAINING = range(4)
_RANKS = [("rank", "u1"), ("earlier_rank", "u1")]
PAIR = np.dtype([("document", "<u8"), ("earlier", "<u8"), ("equal", "<u4"), ("hash", "<u8", 2), *_RANKS])


@dataclass(frozen=True)
class Precedence:
    """Documents that take precedence over training documents.

    Attributes:
        held_out_sources: indices of the sources that are entirely held out.
        fraction: fraction of the other sources' documents to hold out, the ones with the lowest hashes.
        training_hash_files: files with the hashes of known training documents.
    """

    held_out_sources: tuple[int, ...]
    fraction: float
    training_hash_files: tuple[Path, ...]

    def in_fraction(self, hashes: np.ndarray) -> np.ndarray:
        """Return which documents with these hashes, uint64 [D, 2], are in the held-out fraction, bool [D]."""
        return hashes[:, 0] < np.uint64(self.fraction * 2**64)


@dataclass(frozen=True)
class Sketches:
    """Sketches of D documents."""

    keys: np.ndarray  # uint64 [D, BANDS]
    minima: np.ndarray  # uint8 [D, BANDS * ROWS], lowest 8 bits of the minima
    excerpts: np.ndarray  # S96 [D], start of each document

    def select(self, keep: np.ndarray) -> Sketches:
        """Return the sketches selected by `keep`, a bool mask or integer indices."""
        return Sketches(self.keys[keep], self.minima[keep], self.excerpts[keep])

    @classmethod
    def concatenate(cls, sketches: Sequence[Sketches]) -> Sketches:
        """Concatenate sketches."""
        return cls(*map(np.concatenate, zip(*(vars(each).values() for each in sketches), strict=True)))

    def save(self, path: Path, hashes: np.ndarray) -> None:
        """Write the sketches of documents with `hashes`, uint64 [D, 2]; the keys are stored band by band."""
        with atomic_open(path) as file:
            for array in (hashes, np.ascontiguousarray(self.keys.T), self.minima, self.excerpts):
                np.save(file, array, allow_pickle=False)


def sketches(texts: Sequence[str], batch: DocumentTerms) -> Sketches:
    """Return the sketch of each document: the MinHash of its set of n-grams of `WORDS` words."""
    from rensa import RMinHash  # pyright: ignore[reportAttributeAccessIssue]

    grams, counts = _gram_sets(texts, batch, WORDS)
    offsets = np.append(0, np.cumsum(counts)).astype(np.uint64)
    size = BANDS * ROWS
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(grams, offsets, size, _SEED)
    minima = np.array(matrix.to_rows(), np.uint64).reshape(len(texts), BANDS, ROWS)
    keys = np.zeros((len(texts), BANDS), np.uint64)
    for row in range(ROWS):
        keys = mix_bits(keys * np.uint64(0x9E3779B97F4A7C15) + minima[:, :, row] + np.uint64(1))
    low_bits = (minima & np.uint64(0xFF)).astype(np.uint8).reshape(len(texts), size)
    excerpts = np.array([excerpt(text).encode()[:_EXCERPT_BYTES] for text in texts], f"S{_EXCERPT_BYTES}")
    return Sketches(keys, low_bits, excerpts)


def _gram_sets(texts: Sequence[str], batch: DocumentTerms, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of the n-grams of all documents, and the number of n-grams of each document. A document with
    fewer than n words has one hash: of all its words or, if it has no words (such as only emoji), of its characters.
    """
    grams = batch.grams(n)
    starts, counts = batch.document_grams(n)
    if counts.all():
        indices = np.repeat(starts - np.append(0, np.cumsum(counts)[:-1]), counts) + np.arange(counts.sum())
        return grams[indices], counts
    whole = batch.sequence_hashes(batch.document_starts[:-1], batch.document_starts[1:])
    for index in map(int, np.flatnonzero(np.diff(batch.document_starts) == 0)):
        digest = hashlib.blake2b(texts[index].encode(), digest_size=8).digest()
        whole[index] = int.from_bytes(digest, "little")
    hashes = [grams[i : i + k] if k else whole[j : j + 1] for j, (i, k) in enumerate(zip(starts, counts, strict=True))]
    return np.concatenate(hashes), np.maximum(1, counts)


def join_sketches(parts: Sequence[Path], out: Path) -> None:
    """Concatenate several files of sketches into one."""
    with atomic_open(out) as file:
        for array_index in range(4):
            arrays = [_map_array(path, array_index) for path in parts]
            axis = 1 if array_index == _KEYS else 0  # axis of the documents
            shape = list(arrays[0].shape)
            shape[axis] = sum(array.shape[axis] for array in arrays)
            header = {"descr": np.lib.format.dtype_to_descr(arrays[0].dtype), "fortran_order": False}
            np.lib.format.write_array_header_1_0(file, {**header, "shape": tuple(shape)})  # pyright: ignore[reportArgumentType]
            for row in range(shape[0] if axis else 1):
                for array in arrays:
                    np.ascontiguousarray(array[row] if axis else array).tofile(file)


# ---------------------------------------------------------------- the search


class SketchFiles:
    """The sketches of all documents, in the order of the corpus, read from files in `work_dir` as needed.

    Files are named after their source, input, chunk and part; files named after a source alone are from the corpus
    to which sources are added. Their documents come first and are called known; `known_count` is their number.
    """

    def __init__(self, work_dir: Path) -> None:
        files = sorted((tuple(map(int, path.stem.split("-"))), path) for path in work_dir.glob("*" + SUFFIX))
        self._paths = [path for _, path in files]
        # Index of each file's first document, and the number of all documents.
        self.file_starts = np.cumsum([0, *(len(_map_array(path, _HASHES)) for path in self._paths)])
        self._sources = np.array([indices[0] for indices, _ in files], np.int64)  # source of each file
        self._known_file_count = sum(len(indices) == 1 for indices, _ in files)
        self.known_count = int(self.file_starts[self._known_file_count])

    def keys_of_band(self, band: int, partition: int, partition_count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of a band that equal `partition` modulo `partition_count`, and the index of their documents.

        Known documents are only included if a new document has the same key.
        """
        by_file: dict[int, tuple[np.ndarray, np.ndarray]] = {-1: (np.zeros(0, np.uint64), np.zeros(0, np.uint64))}
        new_keys = np.zeros(0, np.uint64)
        for file in [*range(self._known_file_count, len(self._paths)), *range(self._known_file_count)]:
            if file == 0:
                new_keys = np.unique(np.concatenate([keys for keys, _ in by_file.values()]))
            keys = np.asarray(_map_array(self._paths[file], _KEYS)[band])
            chosen = np.flatnonzero(keys % np.uint64(partition_count) == partition)
            if file < self._known_file_count:
                chosen = chosen[np.isin(keys[chosen], new_keys)]
            by_file[file] = keys[chosen], chosen.astype(np.uint64) + np.uint64(self.file_starts[file])
        keys, documents = zip(*(by_file[file] for file in sorted(by_file)), strict=True)
        return np.concatenate(keys), np.concatenate(documents)

    def sources(self, documents: np.ndarray) -> np.ndarray:
        """Return the index of each document's source, int64 [D]."""
        return self._sources[np.searchsorted(self.file_starts, documents, "right") - 1]

    def ranks(self, documents: np.ndarray, hashes: np.ndarray, precedence: Precedence) -> np.ndarray:
        """Return each document's precedence, `_KNOWN` to `_TRAINING`, uint8 [D]; `hashes` are the documents' hashes."""
        held_out = np.isin(self.sources(documents), precedence.held_out_sources)
        conditions = [documents < np.uint64(self.known_count), held_out, precedence.in_fraction(hashes)]
        return np.select(conditions, [_KNOWN, _HELD_OUT, _VALIDATION], _TRAINING).astype(np.uint8)

    def rows(self, array_index: int, documents: np.ndarray) -> np.ndarray:
        """Return the rows of an array other than `_KEYS` for ascending document indices."""
        documents = documents.astype(np.int64)
        files = np.searchsorted(self.file_starts, documents, "right") - 1
        chosen = [
            _map_array(self._paths[i], array_index)[documents[files == i] - self.file_starts[i]]
            for i in np.unique(files)
        ]
        return np.concatenate(chosen or [_map_array(self._paths[0], array_index)[:0]])


def _map_array(path: Path, array_index: int) -> np.ndarray:
    """Memory-map an array of a sketch file, such as `_HASHES`."""
    with path.open("rb") as file:
        for _ in range(array_index + 1):
            np.lib.format.read_magic(file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            offset = file.tell()
            file.seek(dtype.itemsize * int(np.prod(shape)), os.SEEK_CUR)
    return np.memmap(path, dtype, "r", offset, shape)


def find_pairs(
    work_dir: Path, out: Path, band: int, partition: int, partition_count: int, threshold: float, precedence: Precedence
) -> None:
    """Find documents that are similar to an earlier one with the same key in `band`; write the pairs to `out`.

    Only keys that equal `partition` modulo `partition_count` are compared. `out` has PAIR elements as `_sort_pairs`
    sorts them: the first of each document and, for documents of held-out sources, also all pairs with known documents.
    """
    files = SketchFiles(work_dir)
    later, earlier, *ranks = _candidates(files, *files.keys_of_band(band, partition, partition_count), precedence)
    compared, rows = np.unique(np.concatenate([later, earlier]), return_inverse=True)
    minima = files.rows(_MINIMA, compared)
    equal = _equal_minima(minima, rows[: len(later)], rows[len(later) :])
    is_similar = _similarity(equal, minima.shape[1]) >= threshold
    pairs = np.zeros(int(is_similar.sum()), PAIR)
    pairs["document"], pairs["earlier"], pairs["equal"] = later[is_similar], earlier[is_similar], equal[is_similar]
    pairs["hash"] = files.rows(_HASHES, compared)[rows[: len(later)][is_similar]]
    pairs["rank"], pairs["earlier_rank"] = (rank[is_similar] for rank in ranks)
    pairs = _sort_pairs(pairs)
    with atomic_open(out) as file:
        np.save(file, pairs[_is_first(pairs) | _is_with_known(pairs)], allow_pickle=False)


def _equal_minima(minima: np.ndarray, later: np.ndarray, earlier: np.ndarray) -> np.ndarray:
    """Count the equal minima of the documents `later[i]` and `earlier[i]`, uint32 [N]."""
    equal = np.zeros(len(later), np.uint32)
    for start in range(0, len(later), _BATCH_PAIRS):
        batch = slice(start, start + _BATCH_PAIRS)
        equal[batch] = np.count_nonzero(minima[later[batch]] == minima[earlier[batch]], axis=1)
    return equal


def _sort_pairs(pairs: np.ndarray) -> np.ndarray:
    return pairs[np.lexsort((pairs["earlier"], pairs["earlier_rank"], pairs["document"]))]


def _is_first(pairs: np.ndarray) -> np.ndarray:
    """Return whether each of the sorted pairs is the first of its document, bool [N]."""
    return np.append(True, pairs["document"][1:] != pairs["document"][:-1])[: len(pairs)]


def _is_with_known(pairs: np.ndarray) -> np.ndarray:
    """Return whether each pair consists of a document of a held-out source and a known document, bool [N]."""
    return (pairs["rank"] == _HELD_OUT) & (pairs["earlier_rank"] == _KNOWN)


def _similarity(equal: np.ndarray, count: int) -> np.ndarray:
    """Estimate the Jaccard similarity of two documents' n-grams if `equal` of their `count` minima are equal."""
    return (equal / count - _COLLISION) / (1 - _COLLISION)


def _candidates(
    files: SketchFiles, keys: np.ndarray, documents: np.ndarray, precedence: Precedence
) -> tuple[np.ndarray, ...]:
    """Return (later, earlier, ranks of later, ranks of earlier) of pairs with equal keys, except exact copies."""
    order = np.argsort(keys, kind="stable")
    keys, documents = keys[order], documents[order]
    equals_previous = np.append(False, keys[1:] == keys[:-1])[: len(keys)]
    has_partner = equals_previous | np.append(equals_previous[1:], False)
    keys, documents = keys[has_partner], documents[has_partner]
    ascending, rows = np.unique(documents, return_inverse=True)
    hashes = files.rows(_HASHES, ascending)
    ranks = files.ranks(ascending, hashes, precedence)
    order = np.lexsort((documents, ranks[rows], keys))
    keys, rows = keys[order], rows[order]
    kept = ~_are_copies(keys, hashes[rows])
    keys, documents, ranks = keys[kept], ascending[rows[kept]], ranks[rows[kept]]
    later, earlier = _pairs_to_compare(keys, ranks)
    is_new = ranks[later] != _KNOWN
    later, earlier = later[is_new], earlier[is_new]
    return documents[later], documents[earlier], ranks[later], ranks[earlier]


def _pairs_to_compare(keys: np.ndarray, ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices (later, earlier) of the pairs to compare, for documents sorted by key and rank.

    A document is compared with the previous one and with the anchors: the first documents with the same key.
    """
    starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
    sizes = np.diff(np.append(starts, len(keys)))
    anchor_counts = np.add.reduceat(ranks != _TRAINING, starts).clip(1, _ANCHORS) if len(keys) else sizes
    firsts, anchor_counts, indices = np.repeat(starts, sizes), np.repeat(anchor_counts, sizes), np.arange(len(keys))
    later = [indices[(indices > firsts + n) & (anchor_counts > n)] for n in range(anchor_counts.max(initial=0))]
    earlier = [firsts[rows] + n for n, rows in enumerate(later)]
    with_previous = indices[indices > firsts + anchor_counts]
    return np.concatenate([*later, with_previous]), np.concatenate([*earlier, with_previous - 1])


def _are_copies(keys: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Return which documents are exact copies of an earlier one with the same key, bool [N]."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0], keys))
    copies = np.zeros(len(keys), bool)
    current, previous = order[1:], order[:-1]
    copies[current] = (keys[current] == keys[previous]) & (hashes[current] == hashes[previous]).all(axis=1)
    return copies


def merge_pairs(
    pair_files: Sequence[Path], work_dir: Path, minima_count: int, out: Path, precedence: Precedence
) -> None:
    """Merge the files of all calls of `find_pairs` into `out`; each sketch has `minima_count` minima.

    `out` has the hashes of the documents to drop, uint64 [N, 2], ascending, and is written last. Two files beside it
    have the hashes of dropped training documents that are similar to a held-out document, and a report.
    """
    files = SketchFiles(work_dir)
    pair_arrays = [np.load(path, mmap_mode="r", allow_pickle=False) for path in pair_files]
    partition_count = max(1, -(-int(files.file_starts[-1]) // MAX_DOCUMENTS))
    paths = _lost_to_held_out_path(out), out
    buckets_by_path = {path: Buckets(Path(f"{path}.partitions"), _HASH, partition_count) for path in paths}
    examples: list[dict[str, Any]] = []
    in_training_counts: Counter[str] = Counter()
    for partition in range(partition_count):
        pairs = _sort_pairs(np.concatenate([_pairs_in_partition(pairs, partition) for pairs in pair_arrays]))
        in_training_counts.update(_count_similar_to_training(files, pairs[_is_with_known(pairs)], precedence))
        pairs = pairs[_is_first(pairs)]
        examples += [_example(files, pair, minima_count) for pair in pairs[: MAX_EXAMPLES - len(examples)]]
        is_lost_to_held_out = (pairs["rank"] == _TRAINING) & np.isin(pairs["earlier_rank"], (_HELD_OUT, _VALIDATION))
        for buckets, dropped in zip(buckets_by_path.values(), (pairs[is_lost_to_held_out], pairs), strict=True):
            hashes = np.ascontiguousarray(dropped["hash"]).view(_HASH).reshape(-1)
            buckets.add(hashes, bucket_of(hashes["first"], partition_count))
    write_json(out.with_suffix(".json"), {"examples": examples, "trained": in_training_counts})
    for path, buckets in buckets_by_path.items():
        with atomic_open(path) as file:
            for hashes in buckets.drain():
                np.sort(hashes, order=["first", "second"]).tofile(file)


def _lost_to_held_out_path(out: Path) -> Path:
    """Return the path for the hashes of training documents that are dropped because held-out ones are similar."""
    return out.with_suffix(".lost")


def _count_similar_to_training(files: SketchFiles, pairs: np.ndarray, precedence: Precedence) -> Counter[str]:
    """Return {index of a source: number of its documents that are similar to a known training document}."""
    earlier, rows = np.unique(pairs["earlier"], return_inverse=True)
    hashes = files.rows(_HASHES, earlier)
    order = np.argsort(hashes[:, 0])
    is_in_training_set = np.zeros(len(earlier), bool)
    for path in precedence.training_hash_files:
        is_in_training_set[order] |= are_among(load_hashes(path), hashes[order])
    is_in_training_set &= ~precedence.in_fraction(hashes)
    documents = np.unique(pairs["document"][is_in_training_set[rows]])
    return Counter(map(str, files.sources(documents).tolist()))


def _pairs_in_partition(pairs: np.ndarray, partition: int) -> np.ndarray:
    """Return the pairs of a partition of `MAX_DOCUMENTS` documents; bisecting the sorted pairs reads little."""
    start, end = (
        bisect.bisect_left(pairs, bound * MAX_DOCUMENTS, key=lambda pair: int(pair["document"]))
        for bound in (partition, partition + 1)
    )
    return np.array(pairs[start:end])


def _example(files: SketchFiles, pair: np.void, minima_count: int) -> dict[str, Any]:
    indices = np.array([pair["document"]]), np.array([pair["earlier"]])
    text, earlier_text = (files.rows(_EXCERPTS, index)[0].decode(errors="ignore") for index in indices)
    similarity = float(_similarity(pair["equal"], minima_count))
    return {"text": text, "found": f"similarity {similarity:.2f} to: {earlier_text}"}


@dataclass(frozen=True)
class NearDuplicates:
    """The near-duplicates to drop.

    Attributes:
        hashes: hashes of all near-duplicates, uint64 [N, 2], ascending.
        lost_to_held_out: hashes of the training documents among them that are similar to held-out documents.
        examples: examples for a `Report`.
        in_training_counts: {index of a held-out source: number of its documents similar to known training documents}.
    """

    hashes: np.ndarray
    lost_to_held_out: np.ndarray
    examples: list[dict[str, Any]]
    in_training_counts: dict[int, int]

    @classmethod
    def load(cls, path: Path) -> NearDuplicates:
        """Read the files that `merge_pairs` wrote."""
        report = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        in_training_counts = {int(source): count for source, count in report["trained"].items()}
        return cls(load_hashes(path), load_hashes(_lost_to_held_out_path(path)), report["examples"], in_training_counts)


def load_hashes(path: Path) -> np.ndarray:
    """Memory-map a file of hashes as uint64 [N, 2], unless it is empty."""
    return np.memmap(path, np.uint64, "r").reshape(-1, 2) if path.stat().st_size else np.zeros((0, 2), np.uint64)


def are_among(known: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    """Return which of `hashes` are in `known`, bool [D]; both are uint64 [N, 2], ascending in the first column."""
    if not len(hashes):
        return np.zeros(0, bool)
    start = bisect.bisect_left(known, hashes[0, 0], key=lambda row: row[0])
    end = bisect.bisect_right(known, hashes[-1, 0], lo=start, key=lambda row: row[0])
    is_sparse = len(hashes) * _SPARSE_LOOKUP_RATIO < end - start
    known = known[start:end] if is_sparse else np.array(known[start:end])
    if not len(known):
        return np.zeros(len(hashes), bool)
    index = np.searchsorted(known[:, 0], hashes[:, 0]).clip(max=len(known) - 1)
    return (known[index] == hashes).all(axis=1)

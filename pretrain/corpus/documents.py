"""Decide which documents are kept, which are held out, and which shard each belongs to.

Memory hardly grows with the number of documents: 155 MB for 6.5 million, 185 MB for 650 million. Only a few values per
part file (`parts`) are in memory. The tables of documents stay in the part files and are read one file at a time. Equal
documents are found by sorting their hashes in buckets on disk. A file with one byte per document marks the kept ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pretrain.common.errors import InputError
from pretrain.common.files import atomic_open, write_json
from pretrain.common.wording import counted
from pretrain.corpus.buckets import Buckets, bucket_of
from pretrain.corpus.filters.near_duplicates import NearDuplicates, are_among, load_hashes
from pretrain.corpus.filters.report import MAX_EXAMPLES, Report
from pretrain.corpus.inputs import SKIP_COUNTERS, first_faults
from pretrain.corpus.parts import count_documents, load_document_table, random_order

_MIN_VALIDATION_DOCUMENTS = 2  # two, since a random next sentence comes from another document
MAX_DOCUMENTS = 1 << 21  # maximum documents processed together, in about 150 MB
_KEPT = "kept"  # file in the work folder: one bool per document, in the order of the corpus
_HASHED = np.dtype([("hash", "<u8", 2), ("document", "<u8")])
# near: whether the document is a near-duplicate; lost: whether it is a training document with held-out text.
_DROPPED = np.dtype([("document", "<u8"), ("near", "?"), ("lost", "?")])
_HASH = np.dtype([("first", "<u8"), ("second", "<u8")])  # both halves of a hash, in sortable form
_SAMPLE_BITS = 16  # number of leading bits of a hash that select its histogram bin, to choose a sample
_ORDER_BITS = 16  # number of leading bits of a sort key (`random_order`) that select its bin, to cut shards
_ORDER_SHIFT = 64 - _ORDER_BITS
_PARTS = "parts-{}.json"  # file in the work folder: (part file, index of its first document) of a source's parts
SPLITS = ("train", "validation")
_KnownHashes = Sequence[tuple[np.ndarray, bool | None]]  # content of `known_hash_files` in `Documents.load`


@dataclass
class ChunkSummary:
    """The result of `stages.read` for a chunk."""

    source: int
    documents: int  # number of documents read
    parts: list[str]  # part files with the documents that remain after filtering
    filtered: list[dict[str, Any]] = field(default_factory=list)  # entries of a `Report` on dropped documents
    seen: list[int] = field(default_factory=list)  # indices of evaluation examples that occur in documents
    left_out: dict[str, int] = field(default_factory=dict)  # `Problems.skip_counts`

    @property
    def dropped(self) -> int:
        """The number of documents that filters dropped."""
        return sum(entry["documents"] for entry in self.filtered)

    def drop_surplus(self, example_counts: Counter[tuple[str, str]], seen: set[int]) -> None:
        """Drop examples beyond the maximum per rule, and indices that are in `seen`; update both arguments."""
        for entry in self.filtered:
            rule = entry["filter"], entry["rule"]
            entry["examples"] = entry["examples"][: MAX_EXAMPLES - example_counts[rule]]
            example_counts[rule] += len(entry["examples"])
        self.seen = [index for index in self.seen if index not in seen]
        seen.update(self.seen)


@dataclass(frozen=True)
class DocumentRange:
    """Documents of a source and split whose sort keys (`random_order`) are in [low, high).

    This object is small: a process that writes a shard reads the tables of documents itself.
    """

    source: int
    split: str
    low: int
    high: int
    source_is_held_out: bool  # whether the entire source is held out
    max_held_out_hash: int  # the highest hash of a held-out document; -1 for none

    def documents(self, work_dir: Path) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (part file, ascending indices of the selected documents in it) for each part file of the source."""
        for name, first_document in json.loads((work_dir / _PARTS.format(self.source)).read_text(encoding="utf-8")):
            table = load_document_table(work_dir / name)
            sort_keys = random_order(table["hash"])  # ascending
            start = int(np.searchsorted(sort_keys, np.uint64(self.low)))
            end = int(np.searchsorted(sort_keys, np.uint64(self.high - 1), "right"))
            kept = np.fromfile(work_dir / _KEPT, bool, end - start, offset=first_document + start)
            held_out = are_held_out(table[start:end], self.max_held_out_hash, entire_source=self.source_is_held_out)
            yield name, start + np.flatnonzero(kept & (held_out == (self.split == "validation")))


@dataclass(frozen=True)
class ShardPlan:
    """The documents of one shard."""

    name: str
    document_range: DocumentRange
    totals: dict[str, int]  # number of documents, sentences and tokens

    @property
    def split(self) -> str:
        return self.document_range.split

    @property
    def source(self) -> int:
        return self.document_range.source


@dataclass(frozen=True)
class _DecidedPart:
    """A part file with D documents, and which of them are kept and held out."""

    name: str
    source: int
    table: np.ndarray  # DOCUMENT [D]
    kept: np.ndarray  # bool [D]
    held_out: np.ndarray  # bool [D]

    def of_split(self, split: str) -> np.ndarray:
        """Return which documents belong to a split, bool [D]."""
        return self.held_out if split == "validation" else self.kept & ~self.held_out


class Documents:
    """All documents in the order of the corpus."""

    def __init__(
        self, work_dir: Path, summaries: list[ChunkSummary], fraction: float, held_out_sources: Mapping[int, str]
    ) -> None:
        self._work_dir = work_dir
        self._summaries = summaries
        self._parts = [(part, summary.source) for summary in summaries for part in summary.parts]
        self._part_starts = np.cumsum([0, *(count_documents(work_dir / part) for part, _ in self._parts)])
        self._count = int(self._part_starts[-1])
        self._fraction, self._hash_limit = fraction, np.uint64(fraction * 2**64)  # lower hashes are held out
        self._held_out_sources = held_out_sources
        self._only_held_out = all(summary.source in held_out_sources for summary in summaries)
        self._max_held_out_hash = -1  # the highest hash of a held-out document
        self._near_duplicates: NearDuplicates | None = None
        # Counts by source: near-duplicates, training documents that match held-out ones, held-out documents that are
        # already in the corpus's training set.
        source_count = 1 + max([*(summary.source for summary in summaries), *held_out_sources], default=-1)
        self._near_counts, self._lost_counts, self._trained_counts = np.zeros((3, source_count), np.int64)

    @classmethod
    def load(
        cls,
        work_dir: Path,
        summaries: list[ChunkSummary],
        validation_fraction: float,
        held_out_sources: Mapping[int, str] = MappingProxyType({}),
        near_duplicates: NearDuplicates | None = None,
        faults: Sequence[dict[str, Any]] = (),
        known_hash_files: Sequence[tuple[Path, bool | None]] = (),
    ) -> Documents:
        """Read the tables of all part files and decide which documents are kept and which are held out.

        Args:
            validation_fraction: fraction of documents to hold out in sources that are not entirely held out.
            held_out_sources: {index: name} of the sources that are entirely held out.
            near_duplicates: the near-duplicates to drop; None if they are not searched.
            faults: entries of `Problems`, to explain an empty corpus.
            known_hash_files: files of `write_hashes` for documents that the corpus already has, which are dropped; and
                whether they are training documents (True), held-out documents (False), or possibly both (None).

        Raises `InputError` if no document is left, or if the corpus trains on documents of a source to hold out.
        """
        documents = cls(work_dir, summaries, validation_fraction, held_out_sources)
        if not documents._count:
            raise _empty_error(summaries, faults)
        known_hashes = [(load_hashes(path), are_in_training_set) for path, are_in_training_set in known_hash_files]
        documents._drop(near_duplicates, known_hashes)
        documents._check_not_trained()
        documents._hold_out()
        return documents

    # ------------------------------------------------------------ decisions

    def _drop(self, near_duplicates: NearDuplicates | None, known_hashes: _KnownHashes) -> None:
        """Keep the first of each group of equal documents, unless it is known or a near-duplicate of an earlier one.

        Documents of held-out sources precede all others.
        """
        self._near_duplicates = near_duplicates
        count = max(1, -(-self._count // MAX_DOCUMENTS))
        hash_buckets = Buckets(self._work_dir / "hashed", _HASHED, count)
        for (part, _), first in zip(self._parts, self._part_starts.tolist(), strict=False):
            hashes = load_document_table(self._work_dir / part)["hash"]
            rows = np.zeros(len(hashes), _HASHED)
            rows["hash"], rows["document"] = hashes, np.arange(first, first + len(hashes))
            hash_buckets.add(rows, bucket_of(hashes[:, 0], count))
        dropped_buckets = Buckets(self._work_dir / "dropped", _DROPPED, count)
        for rows in hash_buckets.drain():
            dropped = self._find_dropped(rows, near_duplicates, known_hashes)
            dropped_buckets.add(dropped, dropped["document"] // np.uint64(MAX_DOCUMENTS))
        with atomic_open(self._work_dir / _KEPT) as file:
            for index, dropped in enumerate(dropped_buckets.drain()):
                start = index * MAX_DOCUMENTS
                kept = np.ones(min(MAX_DOCUMENTS, self._count - start), bool)
                kept[dropped["document"] - np.uint64(start)] = False
                kept.tofile(file)
                self._near_counts += self._count_by_source(dropped["document"][dropped["near"]])
                self._lost_counts += self._count_by_source(dropped["document"][dropped["lost"]])

    def _find_dropped(
        self, rows: np.ndarray, near_duplicates: NearDuplicates | None, known_hashes: _KnownHashes
    ) -> np.ndarray:
        """Return the documents to drop, _DROPPED; `rows` must contain all documents with the same hash."""
        hashes, in_held_out = rows["hash"], np.isin(self._sources(rows["document"]), [*self._held_out_sources])
        order = np.lexsort((rows["document"], ~in_held_out, hashes[:, 1], hashes[:, 0]))
        rows, in_held_out = rows[order], in_held_out[order]
        documents, hashes = rows["document"], rows["hash"]
        is_dropped = np.append(False, (hashes[1:] == hashes[:-1]).all(axis=1))[: len(rows)]
        first_equal = np.maximum.accumulate(np.where(is_dropped, 0, np.arange(len(rows))))  # first row with this hash
        in_fraction = hashes[:, 0] < self._hash_limit
        is_lost_to_held_out = ~in_held_out & in_held_out[first_equal]
        is_near, is_in_training_set, is_held_out = np.zeros((3, len(rows)), bool)
        for file_hashes, are_in_training_set in known_hashes:
            is_known = are_among(file_hashes, hashes)
            is_dropped |= is_known
            is_in_training_set |= is_known & bool(are_in_training_set)
            # If near-duplicates are not searched, each dropped document equals one that is trained on or held out.
            may_be_held_out = are_in_training_set is False or (are_in_training_set is None and not near_duplicates)
            is_held_out |= is_known & (in_fraction | may_be_held_out)
        is_lost_to_held_out |= ~in_held_out & is_held_out & ~is_in_training_set
        self._trained_counts += self._count_by_source(documents[is_in_training_set & in_held_out])
        if near_duplicates:
            is_near = are_among(near_duplicates.hashes, hashes) & ~is_dropped
            is_lost_to_held_out |= are_among(near_duplicates.lost_to_held_out, hashes) & is_near
            is_dropped |= is_near
        dropped = np.zeros(int(is_dropped.sum()), _DROPPED)
        for name, values in (("document", documents), ("near", is_near), ("lost", is_lost_to_held_out)):
            dropped[name] = values[is_dropped]
        return dropped

    def _sources(self, documents: np.ndarray) -> np.ndarray:
        """Return the index of each document's source, int64 [D]."""
        sources = np.array([source for _, source in self._parts], np.int64)
        return sources[np.searchsorted(self._part_starts, documents, "right") - 1]

    def _count_by_source(self, documents: np.ndarray) -> np.ndarray:
        return np.bincount(self._sources(documents), minlength=len(self._lost_counts))

    def _check_not_trained(self) -> None:
        """Raise `InputError` if the corpus already trains on documents of a held-out source."""
        similar = self._near_duplicates.in_training_counts if self._near_duplicates else {}
        counts = {name: (int(self._trained_counts[n]), similar.get(n, 0)) for n, name in self._held_out_sources.items()}
        found = [f"{name}: {equal:,} equal, {near:,} similar" for name, (equal, near) in counts.items() if equal + near]
        if found:
            count = counted(sum(map(sum, counts.values())), "document")
            raise InputError(
                f"corpus.sources: {count} to hold out ({'; '.join(found)}): the corpus trains on this text. Remove it "
                "from the source, or prepare all sources together into another corpus.dir."
            )

    def _hold_out(self) -> None:
        """Hold out the fraction of documents with the lowest hashes, but at least `_MIN_VALIDATION_DOCUMENTS`."""
        held_out_count, lowest = 0, np.zeros(0, np.uint64)
        for part in self._decided_parts():
            hashes = part.table["hash"][part.kept, 0]
            held_out_count += int((hashes < self._hash_limit).sum())
            lowest = np.sort(np.append(lowest, hashes))[:_MIN_VALIDATION_DOCUMENTS]
        if not len(lowest):
            raise InputError(
                f"corpus.sources: none of {counted(self._count, 'document')} is new, all are in the corpus already. "
                "Remove the sources that add nothing from the config."
            )
        is_enough = self._fraction == 0 or held_out_count >= _MIN_VALIDATION_DOCUMENTS
        self._max_held_out_hash = int(self._hash_limit) - 1 if is_enough else int(lowest[-1])
        if not self._has_training_documents() and not self._only_held_out:
            kept = sum(int(part.kept.sum()) for part in self._decided_parts())
            raise InputError(
                f"corpus.sources: {counted(kept, 'document')}, all held out for validation; none remains for training. "
                "Add text, split the files, or set corpus.validation_fraction: 0, which otherwise holds out at least "
                f"{_MIN_VALIDATION_DOCUMENTS}."
            )

    def _has_training_documents(self) -> bool:
        return any(part.of_split("train").any() for part in self._decided_parts())

    def _decided_parts(self, start: int = 0, end: int | None = None) -> Iterator[_DecidedPart]:
        """Yield the parts that contain documents with indices in [start, end)."""
        start = max(0, int(np.searchsorted(self._part_starts, start, "right")) - 1)
        stop = int(np.searchsorted(self._part_starts, self._count if end is None else end))
        for (name, source), first in zip(self._parts[start:stop], self._part_starts[start:stop].tolist(), strict=True):
            table = load_document_table(self._work_dir / name)
            kept = np.fromfile(self._work_dir / _KEPT, bool, len(table), offset=first)
            yield _DecidedPart(name, source, table, kept, kept & self._are_held_out(table, source))

    def _are_held_out(self, table: np.ndarray, source: int) -> np.ndarray:
        return are_held_out(table, self._max_held_out_hash, entire_source=source in self._held_out_sources)

    # ------------------------------------------------------------ samples and shards

    def sample(self, max_bytes: int) -> Iterator[tuple[str, np.ndarray, int]]:
        """Yield (part file, mask of the sampled documents, their bytes of text) for each part file; masks are bool [D].

        The training documents with the lowest hashes are sampled: at least one, and at most `max_bytes` of text.
        """
        max_hash = self._max_sampled_hash(max_bytes)
        for part, candidates in self._candidates():
            chosen = candidates & (part.table["hash"][:, 1] <= max_hash)
            yield part.name, chosen, int(part.table["bytes"][chosen].sum(dtype=np.int64))

    def _candidates(self) -> Iterator[tuple[_DecidedPart, np.ndarray]]:
        """Yield each part and its training documents, bool [D]; if the corpus has none, its kept documents."""
        has_training = self._has_training_documents()
        for part in self._decided_parts():
            yield part, part.of_split("train") if has_training else part.kept

    def _max_sampled_hash(self, max_bytes: int) -> np.uint64:
        """Return the highest hash in a sample: find its bin in a histogram, then the hash among the bin's documents."""
        shift, bin_count = np.uint64(64 - _SAMPLE_BITS), 1 << _SAMPLE_BITS
        counts, sizes = np.zeros(bin_count, np.int64), np.zeros(bin_count, np.int64)
        for part, candidates in self._candidates():
            bins = (part.table["hash"][candidates, 1] >> shift).astype(np.int64)
            counts += np.bincount(bins, minlength=bin_count)
            sizes += np.bincount(bins, part.table["bytes"][candidates], bin_count).astype(np.int64)
        ends = np.cumsum(sizes)
        last_bin = int(np.searchsorted(ends, max_bytes, "right"))
        if last_bin == bin_count:
            return np.uint64(2**64 - 1)
        in_last_bin = [
            part.table[candidates & (part.table["hash"][:, 1] >> shift == np.uint64(last_bin))]
            for part, candidates in self._candidates()
        ]
        ordered = np.concatenate(in_last_bin)
        ordered = ordered[np.argsort(ordered["hash"][:, 1])]
        cumulative = ends[last_bin] - sizes[last_bin] + np.cumsum(ordered["bytes"], dtype=np.int64)
        fitting_count = int((cumulative <= max_bytes).sum())
        if not fitting_count and counts[:last_bin].any():
            return np.uint64((last_bin << int(shift)) - 1)
        return ordered["hash"][max(1, fitting_count) - 1, 1]

    def write_hashes(self, source: int, path: Path, *, trained: bool) -> None:
        """Write the hashes (uint64 [D, 2], ascending) of a source's training documents, or of all its other documents.

        Other documents are held out, or dropped because the corpus has an equal or similar one.
        """
        parts = [index for index, (_, part_source) in enumerate(self._parts) if part_source == source]
        start, end = (int(self._part_starts[parts[0]]), int(self._part_starts[parts[-1] + 1])) if parts else (0, 0)
        count = max(1, -(-(end - start) // MAX_DOCUMENTS))
        buckets = Buckets(self._work_dir / "signatures", _HASH, count)
        for part in self._decided_parts(start, end):
            hashes = np.ascontiguousarray(part.table["hash"][part.of_split("train") == trained])
            buckets.add(hashes.view(_HASH).reshape(-1), bucket_of(hashes[:, 0], count))
        with atomic_open(path) as file:
            for hashes in buckets.drain():
                np.unique(hashes).tofile(file)

    def plan(self, shard_tokens: int, first_shards: Mapping[str, int] | None = None) -> list[ShardPlan]:
        """Cut the randomly ordered documents of each source and split into shards of at most `shard_tokens` tokens.

        A shard may only exceed this if it is a single bin of the random order. The shards of a split are numbered from
        `first_shards[split]`. A file in the work folder lists the part files of each source.
        """
        plans: dict[str, list[ShardPlan]] = {split: [] for split in SPLITS}
        for source in sorted({source for _, source in self._parts}):
            indices = [index for index, (_, part_source) in enumerate(self._parts) if part_source == source]
            parts = [(self._parts[index][0], int(self._part_starts[index])) for index in indices]
            write_json(self._work_dir / _PARTS.format(source), parts)
            totals = self._totals(int(self._part_starts[indices[0]]), int(self._part_starts[indices[-1] + 1]))
            for split, split_totals in zip(SPLITS, totals, strict=True):
                for low, high, shard_totals in _cut_bins(split_totals, shard_tokens):
                    name = f"{split}-{(first_shards or {}).get(split, 0) + len(plans[split]):05d}"
                    is_held_out = source in self._held_out_sources
                    document_range = DocumentRange(source, split, low, high, is_held_out, self._max_held_out_hash)
                    plans[split].append(ShardPlan(name, document_range, shard_totals))
        return [plan for split in SPLITS for plan in plans[split]]

    def _totals(self, start: int, end: int) -> np.ndarray:
        """Return int64 [splits, 3, bins]: documents, sentences and tokens in each bin of the random order."""
        totals = np.zeros((len(SPLITS), 3, 1 << _ORDER_BITS), np.int64)
        for part in self._decided_parts(start, end):
            bins = (random_order(part.table["hash"]) >> np.uint64(_ORDER_SHIFT)).astype(np.int64)
            for split_index, split in enumerate(SPLITS):
                chosen = part.of_split(split)
                for row, weights in enumerate((None, part.table["sentences"][chosen], part.table["items"][chosen])):
                    totals[split_index, row] += np.bincount(bins[chosen], weights, 1 << _ORDER_BITS).astype(np.int64)
        return totals

    # ------------------------------------------------------------ the card

    def filter_entries(self, source_count: int) -> list[dict[str, Any]]:
        """Return the entries of a `Report` on all filters, each with the documents dropped from each source."""
        report = Report(entry for summary in self._summaries for entry in summary.filtered)
        entries = {(entry["filter"], entry["rule"]): entry for entry in report.entries()}
        for entry in entries.values():
            entry["by_source"] = [0] * source_count
        for summary in self._summaries:
            for dropped in summary.filtered:
                entries[dropped["filter"], dropped["rule"]]["by_source"][summary.source] += dropped["documents"]
        return [*entries.values(), *self._near_duplicate_entries(source_count)]

    def evaluation_entries(self, sizes: Sequence[dict[str, int]], names: Sequence[str]) -> list[dict[str, Any]]:
        """Return {name, texts, too_short, found} of each evaluation set; `found` counts examples found in documents."""
        seen = np.array(sorted({index for summary in self._summaries for index in summary.seen}), np.int64)
        set_starts = np.cumsum([0, *(size["texts"] for size in sizes)])
        found = np.diff(np.searchsorted(seen, set_starts))
        return [
            {"name": name, **size, "found": int(count)} for name, size, count in zip(names, sizes, found, strict=True)
        ]

    def _near_duplicate_entries(self, source_count: int) -> list[dict[str, Any]]:
        """Return a list of one entry, on near-duplicates; [] if none were dropped."""
        if self._near_duplicates is None or not self._near_counts.any():
            return []
        by_source = [self._near_count(source) for source in range(source_count)]
        return [
            {
                "filter": "near_duplicates",
                "rule": "threshold",
                "documents": sum(by_source),
                "examples": self._near_duplicates.examples,
                "by_source": by_source,
            }
        ]

    def _near_count(self, source: int) -> int:
        """Return the number of near-duplicates dropped from a source."""
        return int(self._near_counts[source]) if source < len(self._near_counts) else 0

    def skipped_paragraphs(self, source: int) -> dict[str, int]:
        """Return {paragraphs, characters, read_characters} of headings that a reader skipped; {} if there are none."""
        total = sum((Counter(summary.left_out) for summary in self._summaries if summary.source == source), Counter())
        return {key: total[key] for key in SKIP_COUNTERS} if total["paragraphs"] else {}

    def statistics(self, source_count: int) -> list[dict[str, int]]:
        """Return the counts of each source for the card."""
        unaccounted, entries = [0] * source_count, []
        for source in range(source_count):
            summaries = [summary for summary in self._summaries if summary.source == source]
            read = sum(summary.documents for summary in summaries)
            unaccounted[source] = read - sum(summary.dropped for summary in summaries)
            names = ("too_short", "duplicates", "lost_to_held_out", "documents", "validation_documents")
            entries.append({"documents_read": read} | dict.fromkeys((*names, *_SUMS), 0))
        for part in self._decided_parts():
            counts = entries[part.source]
            unaccounted[part.source] -= len(part.table)
            counts["duplicates"] += int((~part.kept).sum())
            counts["documents"] += int(part.kept.sum())
            counts["validation_documents"] += int(part.held_out.sum())
            for name, field_name in _SUMS.items():
                counts[name] += int(part.table[field_name][part.kept].sum(dtype=np.int64))
        for source, counts in enumerate(entries):
            counts["too_short"] = unaccounted[source]
            counts["duplicates"] -= self._near_count(source)
            counts["lost_to_held_out"] = int(self._lost_counts[source]) if source < len(self._lost_counts) else 0
        return entries


_SUMS = {"sentences": "sentences", "words": "words", "tokens": "items", "text_bytes": "bytes"}
"""Key of the card -> field of DOCUMENT that is summed."""


def _empty_error(summaries: Sequence[ChunkSummary], faults: Sequence[dict[str, Any]]) -> InputError:
    """Return the error for an empty corpus, with the faults of the input and the setting that dropped the most."""
    documents, dropped = (sum(getattr(summary, key) for summary in summaries) for key in ("documents", "dropped"))
    if not documents:
        advice = "Check the files, and that each kind matches them"
    elif 2 * dropped > documents:
        advice = f"Relax corpus.filters, which drop {dropped:,}"
    else:
        advice = f"Lower corpus.min_document_words, for which {documents - dropped:,} are too short"
    listed = f" Faults in the input: {first_faults(faults)}." if faults else ""
    return InputError(f"corpus.sources: none of {documents:,} documents remains.{listed} {advice}.")


def are_held_out(table: np.ndarray, max_hash: int, *, entire_source: bool) -> np.ndarray:
    """Return which documents are held out, bool [D]: all (`entire_source`), or all with hashes up to `max_hash`."""
    if entire_source or max_hash < 0:
        return np.full(len(table), entire_source)
    return table["hash"][:, 0] <= np.uint64(max_hash)


def _cut_bins(totals: np.ndarray, max_tokens: int) -> Iterator[tuple[int, int, dict[str, int]]]:
    """Yield ranges of bins with at most `max_tokens` tokens: (lowest sort key, end of the sort keys, totals).

    `totals` int64 [3, bins] has the documents, sentences and tokens of each bin.
    """
    filled = np.flatnonzero(totals[0])
    ends = np.cumsum(totals[:, filled], axis=1)
    start = 0
    while start < len(filled):
        earlier = ends[:, start - 1] if start else np.zeros(3, np.int64)  # totals of all earlier ranges
        end = max(start + 1, int(np.searchsorted(ends[2], earlier[2] + max_tokens, "right")))
        documents, sentences, tokens = (ends[:, end - 1] - earlier).tolist()
        low, high = (int(filled[start]) << _ORDER_SHIFT, (int(filled[end - 1]) + 1) << _ORDER_SHIFT)
        yield low, high, {"documents": documents, "sentences": sentences, "tokens": tokens}
        start = end

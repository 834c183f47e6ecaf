"""Which documents of a corpus are kept, which are held out, and which shard each belongs to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.common.errors import InputError
from pretrain.corpus.filters.near_duplicates import NearDuplicates
from pretrain.corpus.filters.report import Report
from pretrain.corpus.parts import DOCUMENT, count_documents, load_documents

_MIN_VALIDATION_DOCUMENTS = 2  # a random next sentence comes from another document
_ROWS = 1 << 18  # compared at once


@dataclass
class PieceSummary:
    """What `stages.read` returns for a piece: documents read, and the part files of those that are long enough.

    `filtered` has the entries of a `Report` on those that filters dropped before, `seen` the texts of evaluation sets
    that were found.
    """

    source: int
    documents: int
    parts: list[str]
    filtered: list[dict[str, Any]] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)

    @property
    def dropped(self) -> int:
        """Documents that filters dropped."""
        return sum(entry["documents"] for entry in self.filtered if entry["dropped"])


@dataclass(frozen=True)
class ShardPlan:
    """The documents of one shard."""

    name: str
    split: str
    source: int
    documents: np.ndarray  # their numbers in the corpus
    totals: dict[str, int]  # documents, sentences, tokens


class Documents:
    """The table of all documents in the order of the corpus: 36 bytes each, and up to twice that while it is sorted."""

    def __init__(
        self, table: np.ndarray, source: np.ndarray, parts: list[str], sizes: list[int], read: list[PieceSummary]
    ):
        self.table = table  # DOCUMENT [D]
        self.parts = parts
        self._source = source  # uint16 [D]
        self._first = np.cumsum([0, *sizes])  # first document of each part
        self._read = read
        self._near: NearDuplicates | None = None
        self._near_counts = np.zeros(1 + max((one.source for one in read), default=-1), np.int64)

    @classmethod
    def load(
        cls,
        work: Path,
        summaries: list[PieceSummary],
        validation_fraction: float,
        held_out: Sequence[bool] = (),
        near_duplicates: NearDuplicates | None = None,
    ) -> Documents:
        """Read the tables of all part files and decide which documents are kept and which are held out.

        `held_out` says of each source whether all of its documents are, besides `validation_fraction` of the others.
        `near_duplicates` are not kept.
        """
        parts = [part for summary in summaries for part in summary.parts]
        of_part = [summary.source for summary in summaries for _ in summary.parts]
        sizes = [count_documents(work / part) for part in parts]
        source = np.repeat(np.array(of_part, np.uint16), sizes)
        table = np.empty(sum(sizes), DOCUMENT)
        documents = cls(table, source, parts, sizes, summaries)
        for part, rows in zip(parts, documents.by_part(table), strict=True):
            rows[:] = load_documents(work / part)
        documents._drop_copies()
        if near_duplicates is not None:
            documents._drop_near(near_duplicates)
        documents._decide(validation_fraction, held_out)
        return documents

    def _drop_copies(self) -> None:
        """Keep the first of every group of equal documents."""
        first, second = self.table["hash"][:, 0], self.table["hash"][:, 1]
        order = np.lexsort((second, first))  # stable: equal documents stay in the order of the corpus
        self.stays = np.ones(len(order), bool)
        for start in range(1, len(order), _ROWS):
            these = order[start : start + _ROWS]
            before = order[start - 1 :][: len(these)]
            repeated = (first[these] == first[before]) & (second[these] == second[before])
            self.stays[these[repeated]] = False

    def _drop_near(self, near_duplicates: NearDuplicates) -> None:
        """Drop those of the documents that are nearly equal to an earlier one."""
        self._near = near_duplicates
        for start in range(0, len(self.table), _ROWS):
            these = slice(start, start + _ROWS)
            near = near_duplicates.are(self.table["hash"][these]) & self.stays[these]
            self.stays[these] &= ~near
            self._near_counts += np.bincount(self._source[these][near], minlength=len(self._near_counts))

    def _decide(self, validation_fraction: float, of_source: Sequence[bool]) -> None:
        """Hold out the documents whose hash is below the fraction."""
        first = self.table["hash"][:, 0]
        if not self.stays.any():
            read = sum(summary.documents for summary in self._read)
            raise InputError(
                f"corpus.sources: none of {read} documents remains. "
                f"Check that each kind matches its files, or {self._advice()}."
            )
        held_out = first < np.uint64(validation_fraction * 2**64)
        if validation_fraction > 0 and (held_out & self.stays).sum() < _MIN_VALIDATION_DOCUMENTS:
            lowest = np.sort(first[self.stays])[:_MIN_VALIDATION_DOCUMENTS]
            held_out = first <= lowest[-1]
        if any(of_source):
            held_out = held_out | np.asarray(of_source)[self._source]
        self.held_out = held_out & self.stays

    def _advice(self) -> str:
        dropped = sum(summary.dropped for summary in self._read)
        return f"relax corpus.filters, which drop {dropped}" if dropped else "lower corpus.min_document_words"

    def by_part(self, values: np.ndarray) -> list[np.ndarray]:
        """Values of all documents, cut into the parts of the corpus."""
        return [values[a:b] for a, b in itertools.pairwise(self._first)]

    def sample(self, most_bytes: int) -> np.ndarray:
        """bool [D]: training documents with the lowest hashes, at most `most_bytes` of text, at least one."""
        candidates = self._numbers(self.stays & ~self.held_out)
        if not candidates.size:
            candidates = self._numbers(self.stays)
        ordered = candidates[np.argsort(self.table["hash"][candidates, 1], kind="stable")]
        fits = np.cumsum(self.table["bytes"][ordered], dtype=np.int64) <= most_bytes
        chosen = np.zeros(len(self.table), bool)
        chosen[ordered[: max(1, int(fits.sum()))]] = True
        return chosen

    def plan(self, shard_tokens: int) -> list[ShardPlan]:
        """Cut every source's documents of each split into shards of at most `shard_tokens` tokens, if they fit."""
        plans = []
        for split, mask in (("train", self.stays & ~self.held_out), ("validation", self.held_out)):
            number = 0
            for source in np.unique(self._source):
                documents = self._numbers(mask & (self._source == source))
                ends = np.cumsum(self.table["items"][documents], dtype=np.int64)
                start = 0
                while start < len(documents):
                    before = ends[start - 1] if start else 0
                    end = max(start + 1, int(np.searchsorted(ends, before + shard_tokens, "right")))
                    chosen = documents[start:end]
                    totals = {
                        "documents": len(chosen),
                        "sentences": int(self.table["sentences"][chosen].sum(dtype=np.int64)),
                        "tokens": int(ends[end - 1] - before),
                    }
                    plans.append(ShardPlan(f"{split}-{number:05d}", split, int(source), chosen, totals))
                    number += 1
                    start = end
        return plans

    def filtered(self, source_count: int) -> list[dict[str, Any]]:
        """What filters did: entries of a `Report`, each with `by_source`, its documents of each source."""
        report = Report(entry for summary in self._read for entry in summary.filtered)
        entries = {(entry["filter"], entry["rule"]): entry for entry in report.entries()}
        for entry in entries.values():
            entry["by_source"] = [0] * source_count
        for summary in self._read:
            for one in summary.filtered:
                entries[one["filter"], one["rule"]]["by_source"][summary.source] += one["documents"]
        return [*entries.values(), *self._filtered_near(source_count)]

    def evaluation(self, texts: Sequence[int], names: Sequence[str]) -> list[dict[str, Any]]:
        """[{name, texts, found}] of each evaluation set: its texts, and how many of them documents contain."""
        seen = np.array(sorted({number for summary in self._read for number in summary.seen}), np.int64)
        first = np.cumsum([0, *texts])
        found = np.diff(np.searchsorted(seen, first))
        return [
            {"name": name, "texts": count, "found": int(number)}
            for name, count, number in zip(names, texts, found, strict=True)
        ]

    def _filtered_near(self, source_count: int) -> list[dict[str, Any]]:
        if self._near is None or not self._near_counts.any():
            return []
        by_source = [self._near_of(number) for number in range(source_count)]
        return [
            {
                "filter": "near_duplicates",
                "rule": "threshold",
                "dropped": True,
                "documents": sum(by_source),
                "examples": self._near.examples,
                "by_source": by_source,
            }
        ]

    def _near_of(self, source: int) -> int:
        """Near-duplicates dropped from a source."""
        return int(self._near_counts[source]) if source < len(self._near_counts) else 0

    def _numbers(self, chosen: np.ndarray) -> np.ndarray:
        """Numbers of the documents for which bool `chosen` is set, in the narrowest type."""
        return np.flatnonzero(chosen).astype(np.min_scalar_type(len(chosen)))

    def selections(self, documents: np.ndarray) -> list[tuple[str, np.ndarray]]:
        """Ascending document numbers as (part, numbers within it)."""
        part = np.searchsorted(self._first, documents, "right") - 1
        chosen = []
        for number in np.unique(part):
            chosen.append((self.parts[number], (documents[part == number] - self._first[number]).astype(np.uint32)))
        return chosen

    def figures(self, source_count: int) -> list[dict[str, int]]:
        """Counts of each source for the card."""
        result = []
        for number in range(source_count):
            mine = self._source == number
            stays, read = mine & self.stays, sum(s.documents for s in self._read if s.source == number)
            unfiltered = read - sum(s.dropped for s in self._read if s.source == number)
            result.append(
                {
                    "documents_read": read,
                    "too_short": unfiltered - int(mine.sum()),
                    "duplicates": int(mine.sum() - stays.sum()) - self._near_of(number),
                    "documents": int(stays.sum()),
                    "validation_documents": int((mine & self.held_out).sum()),
                    "sentences": int(self.table["sentences"][stays].sum(dtype=np.int64)),
                    "words": int(self.table["words"][stays].sum(dtype=np.int64)),
                    "tokens": int(self.table["items"][stays].sum(dtype=np.int64)),
                    "text_bytes": int(self.table["bytes"][stays].sum(dtype=np.int64)),
                }
            )
        return result

"""The filters of `prepare`: optional steps that drop documents, applied in the processes that read documents.

Documents that contain text of evaluation sets are dropped immediately. Near-duplicates can only be found after all
documents have been read, so each kept document gets a sketch (`near_duplicates`), and all sketches are compared later.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.common.files import sha256_file
from pretrain.config import FiltersConfig
from pretrain.corpus.filters.contamination import Contamination
from pretrain.corpus.filters.evaluation_sets import MIN_TERMS, NGRAM, TABLE, evaluation_files
from pretrain.corpus.filters.near_duplicates import BANDS, ROWS, WORDS, Sketches, sketches
from pretrain.corpus.filters.report import Report
from pretrain.corpus.filters.terms import document_terms

_BATCH_CHARACTERS = 1 << 19  # characters filtered together; a larger batch does not fit in the CPU cache


def filter_settings(config: FiltersConfig) -> dict[str, Any]:
    """Return {name: value} of the settings that determine which documents are dropped; {} if no filter is enabled."""
    settings: dict[str, Any] = {}
    if config.contamination.sets:
        values = {"drop": True, "ngram": NGRAM, "shortest": MIN_TERMS}
        settings |= {f"contamination.{key}": value for key, value in values.items()}
        for index, files in enumerate(evaluation_files(config.contamination)):
            columns = config.contamination.sets[index].columns
            settings[f"contamination.sets.{index}"] = [[sha256_file(file) for file in files], list(columns)]
    if config.near_duplicates.enabled:
        values = {"threshold": config.near_duplicates.threshold, "ngram": WORDS, "bands": BANDS, "rows": ROWS}
        settings |= {f"near_duplicates.{key}": value for key, value in values.items()}
    return settings


class Filters:
    """The filters of a config."""

    def __init__(self, config: FiltersConfig, work_dir: Path) -> None:
        self._finds_near_duplicates = config.near_duplicates.enabled
        has_sets = bool(config.contamination.sets)
        self._contamination = Contamination(config.contamination, work_dir / TABLE) if has_sets else None

    def keep(self, texts: list[str], report: Report) -> tuple[list[str], Sketches | None]:
        """Return the documents to keep, and their sketches; the dropped ones are added to `report`."""
        if not texts or not (self._contamination or self._finds_near_duplicates):
            return texts, None
        batches, kept_sketches = zip(*(self._filter(batch, report) for batch in _batches(texts)), strict=True)
        all_sketches = Sketches.concatenate(kept_sketches) if self._finds_near_duplicates else None
        return [text for batch in batches for text in batch], all_sketches

    def _filter(self, texts: list[str], report: Report) -> tuple[list[str], Sketches | None]:
        batch = document_terms(texts)
        is_kept = np.ones(len(texts), bool)
        if self._contamination:
            matches = self._contamination.find(batch)
            is_kept = matches.sets < 0
            for index in np.flatnonzero(~is_kept).tolist():
                name = self._contamination.names[matches.sets[index]]
                report.add("contamination", name, texts[index], matches.excerpts[index])
            report.seen.update(matches.matched_examples.tolist())
        kept_sketches = sketches(texts, batch).select(is_kept) if self._finds_near_duplicates else None
        return [texts[index] for index in np.flatnonzero(is_kept).tolist()], kept_sketches


def _batches(texts: list[str]) -> Iterator[list[str]]:
    """Yield the documents in lists of about `_BATCH_CHARACTERS` characters."""
    start, size = 0, 0
    for stop, text in enumerate(texts, 1):
        size += len(text)
        if size >= _BATCH_CHARACTERS or stop == len(texts):
            yield texts[start:stop]
            start, size = stop, 0

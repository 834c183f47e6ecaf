"""The filters of `prepare`: optional steps that drop documents, applied where documents are read in parallel.

Documents with text of evaluation sets are dropped there, each by itself. Near-duplicates need all documents: here those
that stay get sketches, and `near_duplicates` compares them when all are read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.common.files import sha256_file
from pretrain.config import FiltersConfig
from pretrain.corpus.filters.contamination import Contamination
from pretrain.corpus.filters.evaluation_sets import NGRAM, SHORTEST, TABLE, evaluation_files
from pretrain.corpus.filters.near_duplicates import BANDS, ROWS, WORDS, Sketches, sketches
from pretrain.corpus.filters.report import Report
from pretrain.corpus.filters.text_columns import text_columns

_CHARACTERS = 1 << 19  # of documents in columns at once, so that these fit the cache


def filter_settings(config: FiltersConfig) -> dict[str, Any]:
    """The settings that decide what the filters that are on drop, by their names in the section; {} if all are off."""
    settings: dict[str, Any] = {}
    if config.contamination.sets:
        values = {"drop": True, "ngram": NGRAM, "shortest": SHORTEST}
        settings |= {f"contamination.{key}": value for key, value in values.items()}
        for number, files in enumerate(evaluation_files(config.contamination)):
            columns = config.contamination.sets[number].columns
            settings[f"contamination.sets.{number}"] = [[sha256_file(file) for file in files], list(columns)]
    if config.near_duplicates.enabled:
        values = {"threshold": config.near_duplicates.threshold, "ngram": WORDS, "bands": BANDS, "rows": ROWS}
        settings |= {f"near_duplicates.{key}": value for key, value in values.items()}
    return settings


class Filters:
    """The filters of a config."""

    def __init__(self, config: FiltersConfig, work: Path) -> None:
        self._finds_near = config.near_duplicates.enabled
        sets = config.contamination
        self._contamination = Contamination(sets, work / TABLE) if sets.sets else None

    def keep(self, texts: list[str], report: Report) -> tuple[list[str], Sketches | None]:
        """Those of `texts` that stay, and their sketches; the others go to `report`."""
        if not texts or not (self._contamination or self._finds_near):
            return texts, None
        kept, made = zip(*(self._kept(some, report) for some in _cut(texts)), strict=True)
        return [text for some in kept for text in some], Sketches.joined(made) if self._finds_near else None

    def _kept(self, texts: list[str], report: Report) -> tuple[list[str], Sketches | None]:
        columns = text_columns(texts)
        stays = np.ones(len(texts), bool)
        if self._contamination:
            matches = self._contamination.find(columns)
            stays = matches.sets < 0
            for number in np.flatnonzero(~stays).tolist():
                name = self._contamination.names[matches.sets[number]]
                report.add("contamination", name, texts[number], matches.words[number])
            report.seen.update(matches.seen.tolist())
        made = sketches(texts, columns).select(stays) if self._finds_near else None
        return [texts[number] for number in np.flatnonzero(stays).tolist()], made


def _cut(texts: list[str]) -> Iterator[list[str]]:
    """`texts` in lists of about `_CHARACTERS`."""
    first, size = 0, 0
    for last, text in enumerate(texts, 1):
        size += len(text)
        if size >= _CHARACTERS or last == len(texts):
            yield texts[first:last]
            first, size = last, 0

"""The filters of `prepare`: optional steps that drop documents, applied where documents are read in parallel.

A filter judges each document by itself, so the corpus does not depend on the number of processes. `FILTERS` is their
table, in the order in which they are applied; a document counts under the first that drops it. Near-duplicates need
all documents: here those that stay get sketches, and `near_duplicates` compares them when all are read.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.common.files import sha256_file
from pretrain.config import FiltersConfig, QualityConfig
from pretrain.corpus.filters.contamination import Contamination
from pretrain.corpus.filters.evaluation_sets import NGRAM, SHORTEST, TABLE, evaluation_files
from pretrain.corpus.filters.language import SAMPLE_CHARACTERS, Language, check_language
from pretrain.corpus.filters.mojibake import repaired
from pretrain.corpus.filters.near_duplicates import BANDS, ROWS, WORDS, Sketches, sketches
from pretrain.corpus.filters.quality import broken_rules
from pretrain.corpus.filters.report import Report
from pretrain.corpus.filters.text_columns import TextColumns, text_columns
from pretrain.corpus.filters.verdicts import Filter, Verdicts

_CHARACTERS = 1 << 19  # of documents in columns at once, so that these fit the cache


class _Quality:
    def __init__(self, config: QualityConfig) -> None:
        self._config = config

    def judge(self, texts: Sequence[str], columns: TextColumns) -> Verdicts:
        broken, figures = broken_rules(columns, self._config)
        return Verdicts(self._config.chosen_rules, broken, np.round(figures, 4).tolist())


def _contamination(config: FiltersConfig, work: Path) -> Filter | None:
    return Contamination(config.contamination, work / TABLE) if config.contamination.sets else None


FILTERS: dict[str, Callable[[FiltersConfig, Path], Filter | None]] = {
    "language": lambda config, _: Language(config.language) if config.language.keep else None,
    "quality": lambda config, _: _Quality(config.quality) if config.quality.enabled else None,
    "contamination": _contamination,
}
"""Name -> what makes the filter from its settings and the work folder, None if it is off."""


def check_filters(config: FiltersConfig) -> None:
    """Raise `MachineError` if a filter that is on lacks its package, `InputError` if its settings are impossible."""
    if config.language.keep:
        check_language(config.language)


def filter_settings(config: FiltersConfig) -> dict[str, Any]:
    """The settings that decide what the filters that are on drop, by their names in the section; {} if all are off."""
    settings: dict[str, Any] = {}
    if config.quality.enabled:
        rules = config.quality.chosen_rules
        settings["quality.rules"] = list(rules)
        settings |= {f"quality.{rule}": config.quality.threshold(rule) for rule in rules}
        if "min_stop_words" in rules:
            settings["quality.stop_words"] = list(config.quality.stop_words)
    if config.language.keep:
        settings["language.keep"] = sorted(config.language.keep)
        settings["language.sample_characters"] = SAMPLE_CHARACTERS
    if config.contamination.sets:
        values = {"drop": True, "ngram": NGRAM, "shortest": SHORTEST}
        settings |= {f"contamination.{key}": value for key, value in values.items()}
        for number, files in enumerate(evaluation_files(config.contamination)):
            columns = config.contamination.sets[number].columns
            settings[f"contamination.sets.{number}"] = [[sha256_file(file) for file in files], list(columns)]
    if config.near_duplicates.enabled:
        values = {"threshold": config.near_duplicates.threshold, "ngram": WORDS, "bands": BANDS, "rows": ROWS}
        settings |= {f"near_duplicates.{key}": value for key, value in values.items()}
    if config.repair_mojibake:
        settings["repair_mojibake"] = True
    return settings


class Filters:
    """The filters of a config."""

    def __init__(self, config: FiltersConfig, work: Path) -> None:
        self._near_duplicates = config.near_duplicates
        self._repairs = config.repair_mojibake
        made = {name: make(config, work) for name, make in FILTERS.items()}
        self._filters = {name: one for name, one in made.items() if one is not None}

    def keep(self, texts: list[str], report: Report) -> tuple[list[str], Sketches | None]:
        """Those of `texts` that all filters keep, and their sketches; the others go to `report`."""
        if self._repairs:
            texts = repaired(texts, report)
        if not texts or not (self._filters or self._near_duplicates.enabled):
            return texts, None
        kept, made = zip(*(self._kept(some, report) for some in _cut(texts)), strict=True)
        return [text for some in kept for text in some], (
            Sketches.joined(made) if self._near_duplicates.enabled else None
        )

    def _kept(self, texts: list[str], report: Report) -> tuple[list[str], Sketches | None]:
        columns = text_columns(texts)
        stays = np.ones(len(texts), bool)
        for name, one in self._filters.items():
            verdicts = one.judge(texts, columns)
            broken = verdicts.broken >= 0
            for number in np.flatnonzero(stays & broken).tolist():
                rule, found = verdicts.rules[int(verdicts.broken[number])], verdicts.found[number]
                report.add(name, rule, texts[number], found)
            report.seen.update(verdicts.seen.tolist())
            stays &= ~broken
        made = sketches(texts, columns).select(stays) if self._near_duplicates.enabled else None
        return [texts[number] for number in np.flatnonzero(stays).tolist()], made


def _cut(texts: list[str]) -> Iterator[list[str]]:
    """`texts` in lists of about `_CHARACTERS`."""
    first, size = 0, 0
    for last, text in enumerate(texts, 1):
        size += len(text)
        if size >= _CHARACTERS or last == len(texts):
            yield texts[first:last]
            first, size = last, 0

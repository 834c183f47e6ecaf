"""Sentences with or without entities, and the documents they form."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from finetune.tasks.datasets.annotations import UNLABELED, NoLabel
from finetune.tasks.datasets.words import joined

Segmenter = Callable[[str], np.ndarray]
"""Segments text into words: int64 [W, 2], as `cut_words` returns."""


@dataclass(frozen=True, eq=False)
class Sentence:
    """A sentence of W words, with their tags if known."""

    words: Sequence[str]
    tags: Sequence[str] | None  # [W]; None: unlabeled
    source: str  # a file, or the location of a single record
    line: int = 0  # line of the record, or of the first word if `lined`; 0 if `source` includes it
    lined: bool = False  # the file has one line per word
    text: str | None = None  # None: the words joined by spaces
    offsets: np.ndarray | None = None  # int64 [W, 2], offsets of the words in `text`
    document: Sequence[Sequence[str]] = ()  # words of all sentences of its document, including this one
    index: int = 0  # index of this sentence in `document`
    name: str | None = None  # name of its document, if the record has one
    id: Any = None  # id of the record
    from_spans: bool = False  # tags come from character spans: IOB2 whatever the scheme of the file
    missing: NoLabel = UNLABELED  # why it has no tags, if it has none
    from_text: bool = False  # the words were segmented from the text

    def __post_init__(self) -> None:
        if not self.document:
            object.__setattr__(self, "document", [self.words])

    def where(self, word: int = 0) -> str:
        """Return file and line of a word, for messages."""
        return f"{self.source}:{self.line + word * self.lined}" if self.line else self.source

    def characters(self) -> tuple[str, np.ndarray]:
        """Return (text, int64 [W, 2]: first character of each word, and the index after its last)."""
        if self.text is not None and self.offsets is not None:
            return self.text, self.offsets
        return " ".join(self.words), joined(list(self.words))


@dataclass
class Remarks:
    """Warnings about a file, with the count and the first location of each."""

    counts: Counter[str] = field(default_factory=Counter)
    first_places: dict[str, str] = field(default_factory=dict)

    def add(self, remark: str, where: str, count: int = 1) -> None:
        """Add `count` occurrences of the remark; the first `where` is kept."""
        self.counts[remark] += count
        self.first_places.setdefault(remark, where)

    def lines(self) -> list[str]:
        """Return one line per remark: its first location and its count."""
        return [
            f"{self.first_places[remark]}: {remark}" + (f"; {count} in all, this is the first" if count > 1 else "")
            for remark, count in self.counts.items()
        ]


def group_documents(sentences: Iterable[Sentence]) -> list[Sentence]:
    """Group sentences into documents, as context of each other: adjacent sentences with the same document name.

    A sentence without a name is a separate document.
    """
    grouped: list[Sentence] = []
    for sentence in sentences:
        joins = bool(grouped) and sentence.name is not None and sentence.name == grouped[-1].name
        document: list[Sequence[str]] = grouped[-1].document if joins else []  # pyright: ignore[reportAssignmentType]
        document.append(sentence.words)
        grouped.append(replace(sentence, document=document, index=len(document) - 1))
    return grouped

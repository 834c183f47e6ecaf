"""Sentences with or without tags, and the documents that they form."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from finetune.tasks.datasets.annotations import UNLABELED, NoLabel
from finetune.tasks.datasets.words import joined_offsets

Segmenter = Callable[[str], np.ndarray]
"""Segments text into words; returns their offsets, int64 [W, 2], like `cut_words`."""


@dataclass(frozen=True, eq=False)
class Sentence:
    """A sentence of W words, with a tag for each if known."""

    words: Sequence[str]
    tags: Sequence[str] | None  # [W]; None: unlabeled
    source: str  # file, or location of a single record, for messages
    line: int = 0  # line number of the record or of the first word; 0 if `source` includes it
    one_word_per_line: bool = False  # whether each line of the file has one word
    text: str | None = None  # original text; None: the words joined by spaces
    offsets: np.ndarray | None = None  # int64 [W, 2], offsets of the words in `text`
    document: Sequence[Sequence[str]] = ()  # words of each sentence of its document, including this one
    index: int = 0  # index of this sentence in `document`
    document_name: str | None = None  # name of its document, if the record has it
    id: Any = None  # id of the record
    from_spans: bool = False  # whether tags were made from character spans (then IOB2, whatever the file's scheme)
    missing_reason: NoLabel = UNLABELED  # why it has no tags, if `tags` is None
    from_text: bool = False  # whether `words` come from segmenting `text`

    def __post_init__(self) -> None:
        if not self.document:
            object.__setattr__(self, "document", [self.words])

    def where(self, word_index: int = 0) -> str:
        """Return file and line of a word, for messages."""
        return f"{self.source}:{self.line + word_index * self.one_word_per_line}" if self.line else self.source

    def text_and_offsets(self) -> tuple[str, np.ndarray]:
        """Return (text, int64 [W, 2]: start and end, exclusive, of each word in it, in characters)."""
        if self.text is not None and self.offsets is not None:
            return self.text, self.offsets
        return " ".join(self.words), joined_offsets(list(self.words))


@dataclass
class Remarks:
    """Warnings about a file, with the number of occurrences and the first location of each."""

    counts: Counter[str] = field(default_factory=Counter)
    first_locations: dict[str, str] = field(default_factory=dict)

    def add(self, remark: str, where: str, count: int = 1) -> None:
        """Add `count` occurrences of the remark; only its first location `where` is kept."""
        self.counts[remark] += count
        self.first_locations.setdefault(remark, where)

    def lines(self) -> list[str]:
        """Return one line per remark: its first location and its count."""
        totals = {key: f"; {count} in total, this is the first" for key, count in self.counts.items() if count > 1}
        return [f"{self.first_locations[remark]}: {remark}{totals.get(remark, '')}" for remark in self.counts]


def group_documents(sentences: Iterable[Sentence]) -> list[Sentence]:
    """Group adjacent sentences with the same document name into documents, and store the document in each sentence.

    A sentence without a document name is a separate document.
    """
    grouped: list[Sentence] = []
    for sentence in sentences:
        previous_name = grouped[-1].document_name if grouped else None
        continues = sentence.document_name is not None and sentence.document_name == previous_name
        document: list[Sequence[str]] = grouped[-1].document if continues else []  # pyright: ignore[reportAssignmentType]
        document.append(sentence.words)
        grouped.append(replace(sentence, document=document, index=len(document) - 1))
    return grouped

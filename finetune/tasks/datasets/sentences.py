"""Sentences with or without entities, and the documents they form."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from finetune.tasks.datasets.annotations import UNLABELED, Missing
from finetune.tasks.datasets.words import joined

Cut = Callable[[str], np.ndarray]
"""Where the words of a text are: int64 [W, 2], as `cut_words` has it."""


@dataclass(frozen=True, eq=False)
class Sentence:
    """W words, and their tags if they are known."""

    words: Sequence[str]
    tags: Sequence[str] | None  # [W]; None: unlabeled
    source: str  # a file, or the name of a single record
    line: int = 0  # of the record, or of the first word if `lined`; 0 if `source` has it
    lined: bool = False  # one line per word
    text: str | None = None  # None: the words joined by spaces
    offsets: np.ndarray | None = None  # int64 [W, 2], offsets of the words in `text`
    document: Sequence[Sequence[str]] = ()  # words of all sentences of its document, its own among them
    place: int = 0  # index of this sentence in `document`
    name: str | None = None  # of its document, if the record has one
    id: Any = None  # of the record
    from_spans: bool = False  # tags were made from character spans: IOB2 for every scheme of the file
    missing: Missing = UNLABELED  # why it has no tags, if it has none
    from_text: bool = False  # the words were segmented from the text, not given

    def __post_init__(self) -> None:
        if not self.document:
            object.__setattr__(self, "document", [self.words])

    def where(self, word: int = 0) -> str:
        """File and line of a word, for messages."""
        return f"{self.source}:{self.line + word * self.lined}" if self.line else self.source

    def characters(self) -> tuple[str, np.ndarray]:
        """The text, and int64 [W, 2]: the first character of each word, and the index after its last."""
        if self.text is not None and self.offsets is not None:
            return self.text, self.offsets
        return " ".join(self.words), joined(list(self.words))


@dataclass
class Remarks:
    """What was odd in a file without being wrong: how often, and where first."""

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, str] = field(default_factory=dict)

    def add(self, what: str, where: str, count: int = 1) -> None:
        """Count `what`, `count` times; the first `where` is kept."""
        self.counts[what] += count
        self.places.setdefault(what, where)

    def lines(self) -> list[str]:
        """One line for each remark: its first place and how often it occurs."""
        return [
            f"{self.places[what]}: {what}" + (f"; {count} in all, this is the first" if count > 1 else "")
            for what, count in self.counts.items()
        ]


def in_documents(sentences: Iterable[Sentence]) -> list[Sentence]:
    """`sentences` as each other's context: those that follow each other with the same name make a document.

    One without a name is a document of its own.
    """
    made: list[Sentence] = []
    for one in sentences:
        known = bool(made) and one.name is not None and one.name == made[-1].name
        document: list[Sequence[str]] = made[-1].document if known else []  # pyright: ignore[reportAssignmentType]
        document.append(one.words)
        made.append(replace(one, document=document, place=len(document) - 1))
    return made

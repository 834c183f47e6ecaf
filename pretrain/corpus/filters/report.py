"""The filters' report: how many documents each rule dropped, and the first of them as examples."""

from collections.abc import Iterable
from typing import Any

MAX_EXAMPLES = 3  # maximum dropped documents shown per rule
_EXCERPT_CHARACTERS = 160


class Report:
    """Counts and examples of dropped documents by (filter, rule)."""

    def __init__(self, entries: Iterable[dict[str, Any]] = ()) -> None:
        self._entries: dict[tuple[str, str], dict[str, Any]] = {}
        self.seen: set[int] = set()  # indices of the evaluation examples found in documents
        self.extend(entries)

    def add(self, filter_name: str, rule: str, text: str, found: str) -> None:
        """Count a dropped document; `found` describes the reason, such as words shared with an evaluation set."""
        entry = self._entry(filter_name, rule)
        entry["documents"] += 1
        if len(entry["examples"]) < MAX_EXAMPLES:
            entry["examples"].append({"text": excerpt(text), "found": found})

    def extend(self, entries: Iterable[dict[str, Any]]) -> None:
        """Add the `entries` of a report on documents that come later in the corpus."""
        for entry in entries:
            total = self._entry(entry["filter"], entry["rule"])
            total["documents"] += entry["documents"]
            total["examples"] += entry["examples"][: MAX_EXAMPLES - len(total["examples"])]

    def entries(self) -> list[dict[str, Any]]:
        """Return [{filter, rule, documents, examples: [{text, found}]}], ordered by the first dropped document."""
        return list(self._entries.values())

    def _entry(self, filter_name: str, rule: str) -> dict[str, Any]:
        empty = {"filter": filter_name, "rule": rule, "documents": 0, "examples": []}
        return self._entries.setdefault((filter_name, rule), empty)


def excerpt(text: str) -> str:
    """Return the start of a document on one line."""
    return " ".join(text[: 2 * _EXCERPT_CHARACTERS].split())[:_EXCERPT_CHARACTERS]

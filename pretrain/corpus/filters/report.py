"""The report of the filters: number of documents that each rule dropped, and the first examples."""

from collections.abc import Iterable
from typing import Any

MAX_EXAMPLES = 3  # per rule
_EXCERPT_CHARACTERS = 160


class Report:
    """Counts and examples by (filter, rule)."""

    def __init__(self, entries: Iterable[dict[str, Any]] = ()) -> None:
        self._entries: dict[tuple[str, str], dict[str, Any]] = {}
        self.seen: set[int] = set()  # examples of evaluation sets found in documents
        self.extend(entries)

    def add(self, name: str, rule: str, text: str, found: str) -> None:
        """Count a document that the filter `name` dropped; `found` describes the reason."""
        entry = self._entry(name, rule)
        entry["documents"] += 1
        if len(entry["examples"]) < MAX_EXAMPLES:
            entry["examples"].append({"text": excerpt(text), "found": found})

    def extend(self, entries: Iterable[dict[str, Any]]) -> None:
        """Add the `entries` of another process, whose documents come later in the corpus."""
        for entry in entries:
            total = self._entry(entry["filter"], entry["rule"])
            total["documents"] += entry["documents"]
            total["examples"] += entry["examples"][: MAX_EXAMPLES - len(total["examples"])]

    def entries(self) -> list[dict[str, Any]]:
        """Return [{filter, rule, documents, examples: [{text, found}]}], in order of arrival."""
        return list(self._entries.values())

    def _entry(self, name: str, rule: str) -> dict[str, Any]:
        new = {"filter": name, "rule": rule, "documents": 0, "examples": []}
        return self._entries.setdefault((name, rule), new)


def excerpt(text: str) -> str:
    """Return the start of a document on one line."""
    return " ".join(text[: 2 * _EXCERPT_CHARACTERS].split())[:_EXCERPT_CHARACTERS]

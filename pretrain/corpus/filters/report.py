"""What filters dropped: a count for each rule, and a few examples in the order of the corpus."""

from collections.abc import Iterable
from typing import Any

MOST_EXAMPLES = 3  # of a rule
_EXCERPT = 160  # characters


class Report:
    """Counts and examples by (filter, rule)."""

    def __init__(self, entries: Iterable[dict[str, Any]] = ()) -> None:
        self._entries: dict[tuple[str, str], dict[str, Any]] = {}
        self.seen: set[int] = set()  # texts of evaluation sets that were found
        self.extend(entries)

    def add(self, name: str, rule: str, text: str, found: str) -> None:
        """Count a document; `found` says what the filter `name` found in `text`."""
        entry = self._entry(name, rule)
        entry["documents"] += 1
        if len(entry["examples"]) < MOST_EXAMPLES:
            entry["examples"].append({"text": excerpt(text), "found": found})

    def extend(self, entries: Iterable[dict[str, Any]]) -> None:
        """Add the `entries` of another process, which stand later in the corpus."""
        for entry in entries:
            mine = self._entry(entry["filter"], entry["rule"])
            mine["documents"] += entry["documents"]
            mine["examples"] += entry["examples"][: MOST_EXAMPLES - len(mine["examples"])]

    def entries(self) -> list[dict[str, Any]]:
        """[{filter, rule, documents, examples: [{text, found}]}], in order of arrival."""
        return list(self._entries.values())

    def _entry(self, name: str, rule: str) -> dict[str, Any]:
        new = {"filter": name, "rule": rule, "documents": 0, "examples": []}
        return self._entries.setdefault((name, rule), new)


def excerpt(text: str) -> str:
    """The beginning of a text on one line."""
    return " ".join(text[: 2 * _EXCERPT].split())[:_EXCERPT]

"""Where each part of each parameter is in a checkpoint: the manifest's list of fragments, and how it is searched.

ZeRO-3 cuts every parameter into equal parts, one for each rank. Such parts are one entry of the list, with their
number: the list grows with the parameters, not with parameters times ranks. Before it is written, rank 0 receives the
parts of all ranks as single entries, which grow with both.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class StoredFragment(NamedTuple):
    """Entries [start, stop) of a flattened parameter, in `file` under the tensor name that ends with `start`."""

    start: int
    stop: int
    file: str


def packed(entries: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries {name, start, numel, kinds, rank} of all ranks, with equal parts on consecutive ranks as one entry.

    That entry has the start and rank of the first part, and `parts`, their number.
    """
    runs: list[dict[str, Any]] = []
    for entry in sorted(entries, key=lambda entry: (entry["name"], entry["kinds"], entry["start"])):
        if runs and _continues(runs[-1], entry):
            runs[-1]["parts"] = runs[-1].get("parts", 1) + 1
        else:
            runs.append(dict(entry))
    return runs


def _continues(run: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    parts = run.get("parts", 1)
    return (
        all(run[key] == entry[key] for key in ("name", "kinds", "numel"))
        and entry["start"] == run["start"] + parts * run["numel"]
        and entry["rank"] == run["rank"] + parts
    )


class FragmentIndex:
    """Finds the fragments that a range of a parameter lies in.

    Args:
        entries: as `packed` returns them.
        files: names of the ranks' files, by rank.
    """

    def __init__(self, entries: Iterable[Mapping[str, Any]], files: Sequence[str]) -> None:
        self._files = files
        self._runs: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
        for entry in entries:
            for kind in entry["kinds"]:
                self._runs[kind, entry["name"]].append(entry)
        for runs in self._runs.values():
            runs.sort(key=lambda run: run["start"])

    def covering(self, kind: str, name: str, start: int, stop: int) -> Iterator[StoredFragment]:
        """The fragments that share entries with [start, stop), in ascending order."""
        for run in self._runs.get((kind, name), ()):
            first, numel, parts = run["start"], run["numel"], run.get("parts", 1)
            begin = max(0, (start - first) // numel)
            end = min(parts, -(-(stop - first) // numel))
            for number in range(begin, end):
                file = self._files[int(run["rank"]) + number]
                yield StoredFragment(first + number * numel, first + (number + 1) * numel, file)

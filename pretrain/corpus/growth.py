"""A corpus that grows: the sources that it has stay as they are, further ones are prepared with its vocabulary.

Each source keeps the signatures of its documents: their hashes (uint64 [D, 2], ascending; `source-00003.hashes` for
training, `.others` for those that are held out or left out) and, where near-duplicates are searched, their sketches.
New documents are compared with them, so a text that the corpus has is not taken again. If it is for training and is to
be held out now, that is an error. The manifest is replaced last, in one rename.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.common.addresses import is_remote
from pretrain.common.errors import InputError
from pretrain.common.files import put_manifest, write_json
from pretrain.config import SourceConfig
from pretrain.corpus import sources
from pretrain.corpus.documents import SPLITS, Documents
from pretrain.corpus.filters import near_duplicates
from pretrain.corpus.manifest import by_source, readable_manifest, source_name, without_card
from pretrain.corpus.shards import source_fingerprint

_CARD = "card-before.json"  # in the work folder
_HASHES, _OTHERS, _SKETCHES = ".hashes", ".others", near_duplicates.SUFFIX


@dataclass(frozen=True)
class Growth:
    """What a preparation adds to.

    Attributes:
        folder: of the corpus.
        manifest: of the corpus as it is.
    """

    folder: Path
    manifest: dict[str, Any]

    @property
    def sources(self) -> int:
        """How many the corpus has, which is the number of the first new one."""
        return len(self.manifest["sources"])

    @property
    def first_shards(self) -> dict[str, int]:
        """The first number of each split that no shard has."""
        numbers = {split: [-1] for split in SPLITS}
        for shard in self.manifest["shards"]:
            numbers[shard["split"]].append(int(shard["name"].rpartition("-")[2]))
        return {split: 1 + max(own) for split, own in numbers.items()}

    @property
    def identity(self) -> list[str]:
        """The fingerprints of its sources: work that was begun for other ones is of no use."""
        return [source_fingerprint(self.manifest, number) for number in range(self.sources)]

    def signatures(self, suffix: str) -> dict[int, Path]:
        """The files of signatures with this suffix that the corpus has, by source."""
        names = {number: f"{_stem(number)}{suffix}" for number in range(self.sources)}
        return {number: self.folder / name for number, name in names.items() if name in self.manifest["files"]}

    @property
    def hashes(self) -> list[tuple[Path, bool | None]]:
        """Those of the documents of each source, and whether these are for training.

        None is for documents that are held out or left out.
        """
        own = by_source(self.manifest["settings"])[1]
        held_out = {n for n in own if own[n].get("held_out")}
        trained = [(path, n not in held_out) for n, path in self.signatures(_HASHES).items()]
        return [*trained, *((path, False if n in held_out else None) for n, path in self.signatures(_OTHERS).items())]

    @property
    def trained(self) -> tuple[Path, ...]:
        """The files of hashes of documents for training."""
        return tuple(path for path, are_trained in self.hashes if are_trained)

    def link_sketches(self, work: Path) -> None:
        """Put the sketches that the corpus has into the work folder, before those of the new documents."""
        for number, path in self.signatures(_SKETCHES).items():
            target = work / f"{number:03d}{_SKETCHES}"
            target.unlink(missing_ok=True)
            try:
                os.link(path, target)
            except OSError:  # a file system without links
                shutil.copyfile(path, target)

    def keep_card(self, work: Path) -> None:
        """Copy the card to the work folder: an interrupted growth may have replaced it."""
        card = json.loads((self.folder / "card.json").read_text(encoding="utf-8"))
        write_json(work / _CARD, {**card, "sources": card["sources"][: self.sources]})

    def card(self, work: Path) -> dict[str, Any]:
        """The card of the corpus as it is."""
        return json.loads((work / _CARD).read_text(encoding="utf-8"))

    def begin_card(self) -> None:
        """Let the corpus do without its card, which is replaced before the manifest is."""
        put_manifest(self.folder, without_card(self.manifest))


def known_at_addresses(folder: Path, given: Sequence[SourceConfig]) -> dict[int, str]:
    """The state of the files of those sources at addresses that the corpus has, under their names and as large.

    So what is known need not be fetched.
    """
    if (manifest := readable_manifest(folder)) is None:
        return {}
    numbers = {entry["name"]: number for number, entry in enumerate(manifest["sources"])}
    old, states = by_source(manifest["settings"])[1], {}
    for place, source in enumerate(given):
        number = numbers.get(source_name(source), -1)
        if is_remote(source.path) and "path" in old.get(number, {}):
            found = sources.list_inputs(source, f"corpus.sources.{place}")
            if sum(item.bytes for item in found) == manifest["sources"][number].get("input_bytes"):
                states[place] = old[number]["path"]
    return states


def expect_all(manifest: dict[str, Any], numbers: list[int], damage: InputError) -> None:
    """Raise `InputError` unless a damaged corpus can be prepared again from sources with these numbers in it."""
    if "grown" in manifest or numbers != list(range(len(manifest["sources"]))):
        raise InputError(
            f"{damage} It cannot be prepared again as it was: sources were added to it, or are not in the config. "
            "Restore the file, or prepare all sources into another corpus.dir."
        )


def write_signatures(folder: Path, work: Path, documents: Documents, source: int, *, nearly: bool) -> list[str]:
    """Write the signatures of a source that was prepared in `work`; the names of the files."""
    names = [f"{_stem(source)}{suffix}" for suffix in (_HASHES, _OTHERS)]
    for name, trained in zip(names, (True, False), strict=True):
        documents.write_hashes(source, folder / name, trained=trained)
    parts = sorted(work.glob(f"{source:03d}-*{_SKETCHES}")) if nearly else []
    if parts:
        names.append(f"{_stem(source)}{_SKETCHES}")
        near_duplicates.join_sketches(parts, folder / names[-1])
    return names


def grown_filters(before: list[dict[str, Any]], added: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """What filters did with the sources of a corpus, and with those added, a `number` in all; entries of the card."""
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in before:
        counts = [*entry["by_source"], *[0] * (number - len(entry["by_source"]))]
        entries[entry["filter"], entry["rule"]] = {**entry, "by_source": counts}
    for entry in added:
        earlier = entries.setdefault((entry["filter"], entry["rule"]), {**entry, "documents": 0, "by_source": []})
        earlier["documents"] += entry["documents"]
        own = earlier["by_source"] or [0] * number
        earlier["by_source"] = [a + b for a, b in zip(own, entry["by_source"], strict=True)]
    return list(entries.values())


def grown_sets(before: list[dict[str, Any]], added: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Evaluation sets and how many of their texts were found: the most that one preparation found."""
    earlier: Mapping[str, int] = {one["name"]: one["found"] for one in before}
    return [{**one, "found": max(one["found"], earlier.get(one["name"], 0))} for one in added]


def _stem(source: int) -> str:
    return f"source-{source:05d}"

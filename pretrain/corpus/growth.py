"""Adding sources to a corpus: existing sources remain unchanged, new ones are prepared with the same vocabulary.

The signatures of each source's documents are stored: hashes (uint64 [D, 2], ascending; `source-00003.hashes` of
training documents, `.others` of held-out or dropped ones) and, if near-duplicates are searched, sketches. New documents
are compared with them, so that the corpus never has a document twice. It is an error if a new held-out source contains
training documents. The manifest is replaced last, by a rename.
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
from pretrain.corpus.manifest import source_name, split_by_source, try_read_manifest, without_card
from pretrain.corpus.shards import source_fingerprint

_CARD = "card-before.json"  # in the work folder
_HASHES, _OTHERS, _SKETCHES = ".hashes", ".others", near_duplicates.SUFFIX


@dataclass(frozen=True)
class Growth:
    """An existing corpus to which sources are added.

    Attributes:
        folder: folder of the corpus.
        manifest: manifest of the existing corpus.
    """

    folder: Path
    manifest: dict[str, Any]

    @property
    def sources(self) -> int:
        """The number of sources in the corpus, which is also the number of the first new one."""
        return len(self.manifest["sources"])

    @property
    def first_shards(self) -> dict[str, int]:
        """The first unused shard number of each split."""
        numbers = {split: [-1] for split in SPLITS}
        for shard in self.manifest["shards"]:
            numbers[shard["split"]].append(int(shard["name"].rpartition("-")[2]))
        return {split: 1 + max(used) for split, used in numbers.items()}

    @property
    def identity(self) -> list[str]:
        """The fingerprints of the existing sources; unfinished work is only continued if they are the same."""
        return [source_fingerprint(self.manifest, number) for number in range(self.sources)]

    def signatures(self, suffix: str) -> dict[int, Path]:
        """Return the corpus's signature files with the given suffix, by source."""
        names = {number: f"{_stem(number)}{suffix}" for number in range(self.sources)}
        return {number: self.folder / name for number, name in names.items() if name in self.manifest["files"]}

    @property
    def hashes(self) -> list[tuple[Path, bool | None]]:
        """The hash files, each with whether its documents are for training; None for held-out or dropped documents."""
        settings = split_by_source(self.manifest["settings"])[1]
        held_out = {n for n in settings if settings[n].get("held_out")}
        trained = [(path, n not in held_out) for n, path in self.signatures(_HASHES).items()]
        return [*trained, *((path, False if n in held_out else None) for n, path in self.signatures(_OTHERS).items())]

    @property
    def trained(self) -> tuple[Path, ...]:
        """The hash files of training documents."""
        return tuple(path for path, are_trained in self.hashes if are_trained)

    def link_sketches(self, work: Path) -> None:
        """Link the corpus's sketches into the work folder, where they sort before the sketches of new documents."""
        for number, path in self.signatures(_SKETCHES).items():
            target = work / f"{number:03d}{_SKETCHES}"
            target.unlink(missing_ok=True)
            try:
                os.link(path, target)
            except OSError:  # a file system without hard links
                shutil.copyfile(path, target)

    def keep_card(self, work: Path) -> None:
        """Save the card in the work folder, since an interrupted preparation may replace it."""
        card = json.loads((self.folder / "card.json").read_text(encoding="utf-8"))
        write_json(work / _CARD, {**card, "sources": card["sources"][: self.sources]})

    def card(self, work: Path) -> dict[str, Any]:
        """Return the card of the existing corpus."""
        return json.loads((work / _CARD).read_text(encoding="utf-8"))

    def detach_card(self) -> None:
        """Remove the card from the corpus's manifest, since the card is replaced before the manifest."""
        put_manifest(self.folder, without_card(self.manifest))


def known_at_addresses(folder: Path, configured: Sequence[SourceConfig]) -> dict[int, str]:
    """Return the file states of sources at addresses that the corpus already has, with the same name and size.

    These sources need not be fetched.
    """
    if (manifest := try_read_manifest(folder)) is None:
        return {}
    numbers = {entry["name"]: number for number, entry in enumerate(manifest["sources"])}
    old, states = split_by_source(manifest["settings"])[1], {}
    for index, source in enumerate(configured):
        number = numbers.get(source_name(source), -1)
        if is_remote(source.path) and "path" in old.get(number, {}):
            inputs = sources.list_inputs(source, f"corpus.sources.{index}")
            if sum(item.bytes for item in inputs) == manifest["sources"][number].get("input_bytes"):
                states[index] = old[number]["path"]
    return states


def check_repeatable(manifest: dict[str, Any], numbers: list[int], damage: InputError) -> None:
    """Raise `InputError` unless a damaged corpus can be prepared again from the sources with these numbers."""
    if "grown" in manifest or numbers != list(range(len(manifest["sources"]))):
        raise InputError(
            f"{damage} It cannot be prepared again as it was: sources were added to it, or are not in the config. "
            "Restore the file, or prepare all sources into another corpus.dir."
        )


def write_signatures(folder: Path, work: Path, documents: Documents, source: int, *, with_sketches: bool) -> list[str]:
    """Write the signatures of a source that was prepared in `work`, optionally with sketches; return the file names."""
    names = [f"{_stem(source)}{suffix}" for suffix in (_HASHES, _OTHERS)]
    for name, trained in zip(names, (True, False), strict=True):
        documents.write_hashes(source, folder / name, trained=trained)
    parts = sorted(work.glob(f"{source:03d}-*{_SKETCHES}")) if with_sketches else []
    if parts:
        names.append(f"{_stem(source)}{_SKETCHES}")
        near_duplicates.join_sketches(parts, folder / names[-1])
    return names


def merged_filters(before: list[dict[str, Any]], added: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Merge the filter entries of the existing card and of new sources; `number` is the total number of sources."""
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in before:
        counts = [*entry["by_source"], *[0] * (number - len(entry["by_source"]))]
        entries[entry["filter"], entry["rule"]] = {**entry, "by_source": counts}
    for entry in added:
        earlier = entries.setdefault((entry["filter"], entry["rule"]), {**entry, "documents": 0, "by_source": []})
        earlier["documents"] += entry["documents"]
        counts = earlier["by_source"] or [0] * number
        earlier["by_source"] = [old + new for old, new in zip(counts, entry["by_source"], strict=True)]
    return list(entries.values())


def merged_sets(before: list[dict[str, Any]], added: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the entries of evaluation sets; `found` is the maximum over preparations."""
    earlier: Mapping[str, int] = {entry["name"]: entry["found"] for entry in before}
    return [{**entry, "found": max(entry["found"], earlier.get(entry["name"], 0))} for entry in added]


def _stem(source: int) -> str:
    return f"source-{source:05d}"

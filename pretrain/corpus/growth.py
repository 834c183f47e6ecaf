"""Adding sources to a corpus: existing sources remain unchanged, new ones are prepared with the same vocabulary.

To recognize documents that it already has, a corpus stores signatures of each source's documents: hashes (uint64
[D, 2], ascending; `source-00003.hashes` for training documents, `.others` for held-out and dropped ones) and, if
near-duplicates are searched, sketches. It is an error if a new held-out source contains training documents. The
manifest is replaced last, by a rename.
"""

from __future__ import annotations

import json
import operator
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

_OLD_CARD = "card-before.json"  # file in the work folder
_TRAINING_SUFFIX, _OTHERS_SUFFIX, _SKETCHES_SUFFIX = ".hashes", ".others", near_duplicates.SUFFIX


@dataclass(frozen=True)
class ExistingCorpus:
    """An existing corpus to which sources are added."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def source_count(self) -> int:
        """The number of sources in the corpus, which is also the index of the first new one."""
        return len(self.manifest["sources"])

    @property
    def first_shards(self) -> dict[str, int]:
        """The first unused shard number of each split."""
        used = {split: [-1] for split in SPLITS}
        for shard in self.manifest["shards"]:
            used[shard["split"]].append(int(shard["name"].rpartition("-")[2]))
        return {split: 1 + max(numbers) for split, numbers in used.items()}

    @property
    def fingerprints(self) -> list[str]:
        """The fingerprints of the existing sources; an interrupted addition only continues if they are unchanged."""
        return [source_fingerprint(self.manifest, source) for source in range(self.source_count)]

    def signatures(self, suffix: str) -> dict[int, Path]:
        """Return the corpus's signature files with the given suffix, by index of the source."""
        names = {source: f"{_stem(source)}{suffix}" for source in range(self.source_count)}
        return {source: self.folder / name for source, name in names.items() if name in self.manifest["files"]}

    @property
    def hash_files(self) -> list[tuple[Path, bool | None]]:
        """Hash files, each with True for training documents, False for held-out ones, None for held-out or dropped."""
        settings = split_by_source(self.manifest["settings"])[1]
        held_out = {n for n in settings if settings[n].get("held_out")}
        files = [(path, n not in held_out) for n, path in self.signatures(_TRAINING_SUFFIX).items()]
        others = [(path, False if n in held_out else None) for n, path in self.signatures(_OTHERS_SUFFIX).items()]
        return [*files, *others]

    @property
    def training_hash_files(self) -> tuple[Path, ...]:
        """The hash files of training documents."""
        return tuple(path for path, are_trained in self.hash_files if are_trained)

    def link_sketches(self, work_dir: Path) -> None:
        """Link the corpus's sketches into the work folder, where they sort before the sketches of new documents."""
        for source, path in self.signatures(_SKETCHES_SUFFIX).items():
            target = work_dir / f"{source:03d}{_SKETCHES_SUFFIX}"
            target.unlink(missing_ok=True)
            try:
                os.link(path, target)
            except OSError:  # a file system without hard links
                shutil.copyfile(path, target)

    def save_old_card(self, work_dir: Path) -> None:
        """Save the card in the work folder, since an interrupted preparation may replace it."""
        card = json.loads((self.folder / "card.json").read_text(encoding="utf-8"))
        write_json(work_dir / _OLD_CARD, {**card, "sources": card["sources"][: self.source_count]})

    def card(self, work_dir: Path) -> dict[str, Any]:
        """Return the existing corpus's card, which `save_old_card` saved."""
        return json.loads((work_dir / _OLD_CARD).read_text(encoding="utf-8"))

    def detach_card(self) -> None:
        """Remove the card from the corpus's manifest, since the card is replaced before the manifest."""
        put_manifest(self.folder, without_card(self.manifest))


def known_digests(folder: Path, config_sources: Sequence[SourceConfig]) -> dict[int, str]:
    """Return {index in `config_sources`: digest of the files} of sources at addresses that need not be fetched.

    The corpus already has these sources, with the same name and size.
    """
    if (manifest := try_read_manifest(folder)) is None:
        return {}
    corpus_indices = {entry["name"]: index for index, entry in enumerate(manifest["sources"])}
    old_settings, digests = split_by_source(manifest["settings"])[1], {}
    for index, source in enumerate(config_sources):
        corpus_index = corpus_indices.get(source_name(source), -1)
        if is_remote(source.path) and "path" in old_settings.get(corpus_index, {}):
            inputs = sources.list_inputs(source, f"corpus.sources.{index}")
            if sum(item.bytes for item in inputs) == manifest["sources"][corpus_index].get("input_bytes"):
                digests[index] = old_settings[corpus_index]["path"]
    return digests


def check_repeatable(manifest: dict[str, Any], corpus_indices: list[int], damage: InputError) -> None:
    """Raise `InputError` unless a damaged corpus can be prepared again from the configured sources.

    `corpus_indices` has the index in the corpus of each configured source; `damage` is the error that was found.
    """
    if "grown" in manifest or corpus_indices != list(range(len(manifest["sources"]))):
        raise InputError(
            f"{damage} It cannot be prepared again as it was: sources were added to it, or are not in the config. "
            "Restore the file, or prepare all sources into another corpus.dir."
        )


def write_signatures(
    folder: Path, work_dir: Path, documents: Documents, source: int, *, with_sketches: bool
) -> list[str]:
    """Write the signatures of a new source, optionally with sketches from `work_dir`; return the file names."""
    names = [f"{_stem(source)}{suffix}" for suffix in (_TRAINING_SUFFIX, _OTHERS_SUFFIX)]
    for name, trained in zip(names, (True, False), strict=True):
        documents.write_hashes(source, folder / name, trained=trained)
    parts = sorted(work_dir.glob(f"{source:03d}-*{_SKETCHES_SUFFIX}")) if with_sketches else []
    if parts:
        names.append(f"{_stem(source)}{_SKETCHES_SUFFIX}")
        near_duplicates.join_sketches(parts, folder / names[-1])
    return names


def merged_filters(old: list[dict[str, Any]], new: list[dict[str, Any]], source_count: int) -> list[dict[str, Any]]:
    """Merge the filter entries of the existing card and of the new sources."""
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in old:
        counts = [*entry["by_source"], *[0] * (source_count - len(entry["by_source"]))]
        entries[entry["filter"], entry["rule"]] = {**entry, "by_source": counts}
    for entry in new:
        merged = entries.setdefault((entry["filter"], entry["rule"]), {**entry, "documents": 0, "by_source": []})
        merged["documents"] += entry["documents"]
        counts = merged["by_source"] or [0] * source_count
        merged["by_source"] = list(map(operator.add, counts, entry["by_source"]))
    return list(entries.values())


def merged_evaluation_sets(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the evaluation sets' entries of the existing card and the new sources; `found` is the maximum of both."""
    old_found: Mapping[str, int] = {entry["name"]: entry["found"] for entry in old}
    return [{**entry, "found": max(entry["found"], old_found.get(entry["name"], 0))} for entry in new]


def _stem(source: int) -> str:
    return f"source-{source:05d}"

"""Corpora in object stores: copied to the machines that read them or streamed, stored by the one that prepares."""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.common.addresses import check_address, is_remote, join
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import MANIFEST, atomic_open, check_manifest, disk_errors, locked, read_manifest, sha256_file
from pretrain.config import CorpusConfig
from pretrain.corpus.block_cache import BlockCache, StoredArray, StoredShard, remove_unused
from pretrain.corpus.blocks import PARTS
from pretrain.corpus.card import CARD_FILES
from pretrain.corpus.shards import (
    COUNTS,
    Shard,
    TokenShards,
    array_types,
    check_version,
    mapped,
    open_shards,
    read_blocks,
    shards_of,
    source_fingerprints,
)
from pretrain.storage import folders
from pretrain.storage.objects import ObjectStore

_ARRAYS_READ_BY_BLOCK = tuple(f"train-*.{part}.npy" for part in ("tokens", "sentences", "documents"))
_SIGNATURES = ("source-*.hashes", "source-*.others", "source-*.sketches")  # which only a preparation reads
_SMALL_AT_ONCE = 16  # tables of blocks on their way, of some kilobytes each
_STREAMED = ".streamed"  # folder of a corpus: its manifest, and the blocks that are here


def is_streamed(corpus: CorpusConfig) -> bool:
    """Whether training reads the corpus from its address while it goes on."""
    return is_remote(corpus.dir) and bool(corpus.cache) and not (corpus.folder / MANIFEST).is_file()


def fetch_corpus(corpus: CorpusConfig) -> Path:
    """Bring the prepared corpus to this machine if it is at an address; returns its folder.

    With `corpus.cache`, all but the training text, unless a full copy is here already.

    Raises `InputError` and `MachineError` as `folders.fetch`.
    """
    advice = "Run `prepare` with this config first."
    if is_streamed(corpus):
        objects = ObjectStore()
        but = (*_ARRAYS_READ_BY_BLOCK, *_SIGNATURES)
        folders.fetch(corpus.dir, objects, exclude=but, at_once=_SMALL_AT_ONCE, advice=advice)
        folders.fetch_files(join(corpus.dir, COUNTS), objects)
        content = folders.read_stored_manifest(corpus.dir, objects)
        with folders.alone(corpus.folder), atomic_open(corpus.folder / _STREAMED / MANIFEST) as file:
            file.write(content or b"")
    elif is_remote(corpus.dir):
        folders.fetch(corpus.dir, advice=advice)
    return corpus.folder


def open_corpus(corpus: CorpusConfig, split: str, *, tokens: bool = True) -> TokenShards:
    """Open the shards of `split` of a corpus that `fetch_corpus` has brought, as `open_shards`.

    Args:
        tokens: whether its text is read. Otherwise the shards of one that is streamed are left out.
    """
    if not is_streamed(corpus):
        return open_shards(corpus.folder, split)
    content = (corpus.folder / _STREAMED / MANIFEST).read_bytes()
    manifest = check_version(check_manifest(content, join(corpus.dir, MANIFEST)), corpus.dir)
    if split != "train":
        return shards_of(corpus.folder, manifest, split)
    entries = [entry for entry in manifest["shards"] if entry["split"] == split] if tokens else []
    described = shards_of(corpus.folder, {**manifest, "shards": []}, split)
    fingerprints = source_fingerprints(manifest)
    if not entries:
        return replace(described, fingerprints=fingerprints)
    text = [manifest["files"][f"{entry['name']}.{part}.npy"] for entry in entries for part in PARTS]
    folder = corpus.folder / _STREAMED / hashlib.sha256(json.dumps(text).encode()).hexdigest()[:16]
    remove_unused(folder)
    tables = _tables(corpus, folder / "blocks.npy", entries)
    stored = [StoredShard(_arrays(entry, manifest), table) for entry, table in zip(entries, tables, strict=True)]
    cache = BlockCache(corpus.dir, folder, stored, most_bytes=int(corpus.cache))
    shards = [
        Shard(entry["name"], split, entry["source"], *_views(cache, number, entry, manifest), blocks=table, cache=cache)
        for number, (entry, table) in enumerate(zip(entries, tables, strict=True))
    ]
    return replace(described, fingerprints=fingerprints, shards=shards)


def _tables(corpus: CorpusConfig, file: Path, entries: list[dict[str, Any]]) -> list[np.ndarray]:
    """The tables of blocks of all shards, in one file whose pages the processes of the machine share."""
    with locked(file.with_suffix(".lock")):
        try:
            whole = mapped(file)
        except (InputError, MachineError):  # not there, or damaged
            tables = [read_blocks(corpus.folder, entry) for entry in entries]
            with disk_errors(file), atomic_open(file) as opened:
                np.save(opened, np.concatenate(tables), allow_pickle=False)
            whole = mapped(file)
    return np.split(whole, np.flatnonzero(whole["begin"] == 0)[1:])


def _arrays(entry: dict[str, Any], manifest: dict[str, Any]) -> dict[str, StoredArray]:
    """The arrays of a shard at an address."""
    arrays = {}
    for part, (dtype, shape) in array_types(entry, manifest).items():
        name, width = f"{entry['name']}.{part}.npy", dtype.itemsize * math.prod(shape[1:])
        size = int(manifest["files"][name]["bytes"])
        arrays[part] = StoredArray(name, size, size - width * shape[0], width)
    return arrays


def _views(
    cache: BlockCache, shard: int, entry: dict[str, Any], manifest: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, sentences and documents of a shard."""
    arrays = {part: cache.array(shard, part, *kind) for part, kind in array_types(entry, manifest).items()}
    return arrays["tokens"], arrays["sentences"], arrays["documents"]


def fetch_without_tokens(corpus: CorpusConfig, *, again: bool = False) -> Path:
    """As `fetch_corpus`, but of a corpus that is not here only the tokenizer and the card; `again`: of each corpus."""
    if is_remote(corpus.dir) and (again or not (corpus.folder / MANIFEST).is_file()):
        folders.fetch(corpus.dir, exclude=("*.npy", *_SIGNATURES))
    return corpus.folder


def prepared_manifest(corpus: CorpusConfig) -> dict[str, Any] | None:
    """The manifest of the prepared corpus, of which nothing else is read or fetched; None if it is not prepared."""
    if is_remote(corpus.dir):
        content = folders.read_stored_manifest(corpus.dir, ObjectStore())
        manifest = None if content is None else check_manifest(content, join(corpus.dir, MANIFEST))
    else:
        manifest = read_manifest(corpus.folder) if (corpus.folder / MANIFEST).exists() else None
    return manifest and check_version(manifest, corpus.dir)


@contextlib.contextmanager
def kept_at_address(corpus: CorpusConfig) -> Iterator[bool]:
    """Around a preparation: fetch what it needs of a corpus at an address, and store the corpus after it.

    Yields whether the folder has what is stored there, of which the tokens are not fetched.

    Raises `InputError` if the address cannot be written to, `MachineError` if another machine stored a corpus since.
    """
    if not is_remote(corpus.dir):
        yield False
        return
    try:
        check_address(corpus.dir, written=True)
    except ValueError as error:
        raise InputError(f"corpus.dir: {error}") from None
    theirs = folders.read_stored_manifest(corpus.dir, ObjectStore())
    if theirs is not None and not _has_all(corpus.folder, theirs):
        _remove_other(corpus.folder, theirs)
        folders.fetch(corpus.dir, exclude=("*.npy",))
        with atomic_open(corpus.folder / MANIFEST) as file:
            file.write(theirs)
    try:
        yield theirs is not None
        now = folders.read_stored_manifest(corpus.dir, ObjectStore())
        if now not in (None, theirs) and not _has_all(corpus.folder, now):
            raise MachineError(
                f"{corpus.dir}: another machine has stored a corpus there meanwhile, so this one is not stored. Run "
                "the command again: it adds what that corpus lacks."
            )
        lost = folders.store(corpus.folder, corpus.dir, replaced=CARD_FILES)
        _store_counts(corpus)
        print(f"{corpus.dir}: stored" + (f", and again what was lost there: {', '.join(lost)}" if lost else ""))
        theirs = (corpus.folder / MANIFEST).read_bytes()
    finally:
        here = (corpus.folder / MANIFEST).read_bytes() if (corpus.folder / MANIFEST).is_file() else None
        if here == theirs and any(not (corpus.folder / name).is_file() for name in folders.files_of(here)):
            (corpus.folder / MANIFEST).unlink()  # who reads the tokens fetches the others


def _has_all(folder: Path, manifest: bytes) -> bool:
    """Whether the corpus in a folder is the one of this manifest, or has grown from it and was not stored yet."""
    if not (folder / MANIFEST).is_file():
        return False
    here, there = read_manifest(folder), folders.files_of(manifest)
    return all(here["files"].get(name) == entry for name, entry in there.items() if name not in CARD_FILES)


def _remove_other(folder: Path, manifest: bytes) -> None:
    """Remove the files of a folder that the corpus of this manifest has with another content."""
    here = folders.files_of((folder / MANIFEST).read_bytes() if (folder / MANIFEST).is_file() else None)
    for name, entry in folders.files_of(manifest).items():
        path = folder / name
        if here.get(name) != entry and path.is_file() and sha256_file(path) != entry["sha256"]:
            path.unlink()


def _store_counts(corpus: CorpusConfig) -> None:
    """Store how many samples the blocks have: a machine that streams would read where all documents begin."""
    here = {path.name: path for path in (corpus.folder / COUNTS).glob("*.npy")}
    objects = ObjectStore()
    there = objects.listing(join(corpus.dir, COUNTS)) if here else {}
    for name in here.keys() - there.keys():
        objects.upload(here[name], join(corpus.dir, COUNTS, name))

"""Corpora in object stores: uploaded by the machine that prepares them, fetched or streamed by machines that train."""

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
from pretrain.corpus.blocks import ARRAYS
from pretrain.corpus.card import CARD_FILES
from pretrain.corpus.shards import (
    COUNTS,
    Shard,
    TokenShards,
    array_types,
    check_version,
    map_array,
    open_shards,
    read_blocks,
    shards_of,
    source_fingerprints,
)
from pretrain.storage import folders
from pretrain.storage.objects import ObjectStore

_STREAMED_ARRAYS = tuple(f"train-*.{array}.npy" for array in ("tokens", "sentences", "documents"))
_SIGNATURE_FILES = ("source-*.hashes", "source-*.others", "source-*.sketches")  # of documents; only for `prepare`
_MAX_FETCHES = 16  # maximum simultaneous fetches of block tables, which have a few kilobytes each
_STREAMED = ".streamed"  # subfolder with the manifest and the fetched blocks of a streamed corpus


def is_streamed(corpus: CorpusConfig) -> bool:
    """Return whether training streams the corpus from its address, the URL of a folder in an object store."""
    return is_remote(corpus.dir) and bool(corpus.cache) and not (corpus.folder / MANIFEST).is_file()


def fetch_corpus(corpus: CorpusConfig) -> Path:
    """Fetch the prepared corpus if it is at an address; return its local folder.

    With `corpus.cache`, the training text is not fetched, unless the folder already has a full copy.

    Raises `InputError` and `MachineError` like `folders.fetch`.
    """
    advice = "Run `prepare` with this config first."
    if is_streamed(corpus):
        objects = ObjectStore()
        skipped = (*_STREAMED_ARRAYS, *_SIGNATURE_FILES)
        folders.fetch(corpus.dir, objects, exclude=skipped, concurrency=_MAX_FETCHES, advice=advice)
        folders.fetch_files(join(corpus.dir, COUNTS), objects)
        content = folders.read_stored_manifest(corpus.dir, objects)
        with folders.folder_lock(corpus.folder), atomic_open(corpus.folder / _STREAMED / MANIFEST) as file:
            file.write(content or b"")
    elif is_remote(corpus.dir):
        folders.fetch(corpus.dir, advice=advice)
    return corpus.folder


def open_corpus(corpus: CorpusConfig, split: str, *, needs_tokens: bool = True) -> TokenShards:
    """Open the shards of `split` of a corpus that `fetch_corpus` has fetched, like `open_shards`.

    Args:
        needs_tokens: whether tokens will be read; if False, a streamed corpus is opened without its shards.
    """
    if not is_streamed(corpus):
        return open_shards(corpus.folder, split)
    content = (corpus.folder / _STREAMED / MANIFEST).read_bytes()
    manifest = check_version(check_manifest(content, join(corpus.dir, MANIFEST)), corpus.dir)
    if split != "train":
        return shards_of(corpus.folder, manifest, split)
    entries = [entry for entry in manifest["shards"] if entry["split"] == split] if needs_tokens else []
    metadata = shards_of(corpus.folder, {**manifest, "shards": []}, split)
    fingerprints = source_fingerprints(manifest)
    if not entries:
        return replace(metadata, fingerprints=fingerprints)
    files = [manifest["files"][f"{entry['name']}.{array}.npy"] for entry in entries for array in ARRAYS]
    folder = corpus.folder / _STREAMED / hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]
    remove_unused(folder)
    tables = _block_tables(corpus, folder / "blocks.npy", entries)
    arrays = [_stored_arrays(entry, manifest) for entry in entries]
    stored_shards = list(map(StoredShard, arrays, tables))
    cache = BlockCache(corpus.dir, folder, stored_shards, max_bytes=int(corpus.cache))
    shards = [
        Shard(entry["name"], split, entry["source"], *_views(cache, index, entry, manifest), blocks=table, cache=cache)
        for index, (entry, table) in enumerate(zip(entries, tables, strict=True))
    ]
    return replace(metadata, fingerprints=fingerprints, shards=shards)


def _block_tables(corpus: CorpusConfig, file: Path, entries: list[dict[str, Any]]) -> list[np.ndarray]:
    """Return the block tables of all shards, mapped from one file that the processes of this machine share."""
    with locked(file.with_suffix(".lock")):
        try:
            table = map_array(file)
        except (InputError, MachineError):  # missing or damaged
            tables = [read_blocks(corpus.folder, entry) for entry in entries]
            with disk_errors(file), atomic_open(file) as opened:
                np.save(opened, np.concatenate(tables), allow_pickle=False)
            table = map_array(file)
    return np.split(table, np.flatnonzero(table["begin"] == 0)[1:])


def _stored_arrays(entry: dict[str, Any], manifest: dict[str, Any]) -> dict[str, StoredArray]:
    """Describe the files of a shard's arrays in the object store."""
    arrays = {}
    for array, (dtype, shape) in array_types(entry, manifest).items():
        name, row_bytes = f"{entry['name']}.{array}.npy", dtype.itemsize * math.prod(shape[1:])
        size = int(manifest["files"][name]["bytes"])
        arrays[array] = StoredArray(name, size, size - row_bytes * shape[0], row_bytes)
    return arrays


def _views(
    cache: BlockCache, shard: int, entry: dict[str, Any], manifest: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens, sentences and documents of a shard as views of the cache."""
    arrays = {array: cache.array(shard, array, *layout) for array, layout in array_types(entry, manifest).items()}
    return arrays["tokens"], arrays["sentences"], arrays["documents"]


def fetch_without_tokens(corpus: CorpusConfig, *, refresh: bool = False) -> Path:
    """Fetch the corpus without tokens, unless it is local already; with `refresh`, fetch it in any case."""
    if is_remote(corpus.dir) and (refresh or not (corpus.folder / MANIFEST).is_file()):
        folders.fetch(corpus.dir, exclude=("*.npy", *_SIGNATURE_FILES))
    return corpus.folder


def prepared_manifest(corpus: CorpusConfig) -> dict[str, Any] | None:
    """Read the manifest of the corpus; None if the corpus is not prepared."""
    if is_remote(corpus.dir):
        content = folders.read_stored_manifest(corpus.dir, ObjectStore())
        manifest = None if content is None else check_manifest(content, join(corpus.dir, MANIFEST))
    else:
        manifest = read_manifest(corpus.folder) if (corpus.folder / MANIFEST).exists() else None
    return manifest and check_version(manifest, corpus.dir)


@contextlib.contextmanager
def sync_with_address(corpus: CorpusConfig) -> Iterator[bool]:
    """Fetch the files that preparing a corpus at an address needs; after the `with` block, store the corpus there.

    Yields whether the address already has a corpus; its tokens are not fetched.

    Raises `InputError` if the address is not writable, `MachineError` if another machine stores a corpus meanwhile.
    """
    if not is_remote(corpus.dir):
        yield False
        return
    try:
        check_address(corpus.dir, for_writing=True)
    except ValueError as error:
        raise InputError(f"corpus.dir: {error}") from None
    stored_manifest = folders.read_stored_manifest(corpus.dir, ObjectStore())
    if stored_manifest is not None and not _has_all(corpus.folder, stored_manifest):
        _remove_outdated(corpus.folder, stored_manifest)
        folders.fetch(corpus.dir, exclude=("*.npy",))
        with atomic_open(corpus.folder / MANIFEST) as file:
            file.write(stored_manifest)
    try:
        yield stored_manifest is not None
        current_manifest = folders.read_stored_manifest(corpus.dir, ObjectStore())
        if current_manifest not in (None, stored_manifest) and not _has_all(corpus.folder, current_manifest):
            raise MachineError(
                f"{corpus.dir}: another machine stored a corpus there in the meantime, so this one was not stored. Run "
                "the command again to add the missing sources to the stored corpus."
            )
        restored = folders.store(corpus.folder, corpus.dir, replaceable=CARD_FILES)
        _store_counts(corpus)
        print(f"{corpus.dir}: stored" + (f"; missing files were restored: {', '.join(restored)}" if restored else ""))
        stored_manifest = (corpus.folder / MANIFEST).read_bytes()
    finally:
        local_manifest = (corpus.folder / MANIFEST).read_bytes() if (corpus.folder / MANIFEST).is_file() else None
        names = folders.file_entries(local_manifest) if local_manifest == stored_manifest else ()
        if not all((corpus.folder / name).is_file() for name in names):
            (corpus.folder / MANIFEST).unlink()  # so that training fetches the missing files


def _has_all(folder: Path, manifest: bytes) -> bool:
    """Return whether the folder has all files of the corpus with this manifest; it may have more sources."""
    if not (folder / MANIFEST).is_file():
        return False
    local, stored_files = read_manifest(folder), folders.file_entries(manifest)
    return all(local["files"].get(name) == entry for name, entry in stored_files.items() if name not in CARD_FILES)


def _remove_outdated(folder: Path, manifest: bytes) -> None:
    """Remove the files of a folder whose content differs from this manifest."""
    local = folders.file_entries((folder / MANIFEST).read_bytes() if (folder / MANIFEST).is_file() else None)
    for name, entry in folders.file_entries(manifest).items():
        path = folder / name
        if local.get(name) != entry and path.is_file() and sha256_file(path) != entry["sha256"]:
            path.unlink()


def _store_counts(corpus: CorpusConfig) -> None:
    """Store the number of samples of each block, so that a streaming machine need not read all document offsets."""
    local = {path.name: path for path in (corpus.folder / COUNTS).glob("*.npy")}
    objects = ObjectStore()
    remote = objects.listing(join(corpus.dir, COUNTS)) if local else {}
    for name in local.keys() - remote.keys():
        objects.upload(local[name], join(corpus.dir, COUNTS, name))

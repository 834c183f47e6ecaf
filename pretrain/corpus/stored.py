"""Corpora in object stores: fetched to the machine that reads them, stored by the one that prepared them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.common.addresses import check_address, is_remote, join
from pretrain.common.errors import InputError
from pretrain.common.files import MANIFEST, atomic_open, check_manifest, read_manifest
from pretrain.config import CorpusConfig
from pretrain.corpus.card import CARD_FILES
from pretrain.storage import folders
from pretrain.storage.objects import ObjectStore


def fetch_corpus(corpus: CorpusConfig) -> Path:
    """Bring the prepared corpus to this machine if it is at an address; returns its folder.

    Raises `InputError` and `MachineError` as `folders.fetch`.
    """
    if is_remote(corpus.dir):
        folders.fetch(corpus.dir, advice="Run `prepare` with this config first.")
    return corpus.folder


def fetch_without_tokens(corpus: CorpusConfig, *, again: bool = False) -> Path:
    """As `fetch_corpus`, but of a corpus that is not here only the tokenizer and the card; `again`: of each corpus."""
    if is_remote(corpus.dir) and (again or not (corpus.folder / MANIFEST).is_file()):
        folders.fetch(corpus.dir, but="*.npy")
    return corpus.folder


def prepared_manifest(corpus: CorpusConfig) -> dict[str, Any] | None:
    """The manifest of the prepared corpus, of which nothing else is read or fetched; None if it is not prepared."""
    if is_remote(corpus.dir):
        content = folders.read_stored_manifest(corpus.dir, ObjectStore())
        return None if content is None else check_manifest(content, join(corpus.dir, MANIFEST))
    return read_manifest(corpus.folder) if (corpus.folder / MANIFEST).exists() else None


@contextlib.contextmanager
def kept_at_address(corpus: CorpusConfig) -> Iterator[bool]:
    """Around a preparation: fetch what it needs of a corpus at an address, and store the corpus after it.

    Yields whether the folder has what is stored there, of which the tokens are not fetched.

    Raises `InputError` if the address cannot be written to.
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
        folders.fetch(corpus.dir, but="*.npy")
        with atomic_open(corpus.folder / MANIFEST) as file:
            file.write(theirs)
    yield theirs is not None
    folders.store(corpus.folder, corpus.dir, replaced=CARD_FILES)
    if any(not (corpus.folder / name).is_file() for name in read_manifest(corpus.folder)["files"]):
        (corpus.folder / MANIFEST).unlink()  # who reads the tokens fetches the others


def _has_all(folder: Path, manifest: bytes) -> bool:
    """Whether the corpus in a folder is the one of this manifest, or has grown from it and was not stored yet."""
    if not (folder / MANIFEST).is_file():
        return False
    here, there = read_manifest(folder), folders.files_of(manifest)
    return all(here["files"].get(name) == entry for name, entry in there.items() if name not in CARD_FILES)

"""Whole folders of an object store, fetched to their local folders once per machine, and stored from there.

A folder with a manifest is stored with the manifest last and fetched with the manifest last, so on both sides a
manifest means that everything in it is there. No listing is needed for such a folder. Files without a manifest, such as
raw text, are found by listing.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pretrain.common.addresses import cache, join, local
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import (
    MANIFEST,
    atomic_open,
    check_manifest,
    disk_errors,
    existing_parent,
    is_as_listed,
    locked,
    read_manifest,
    signed,
)
from pretrain.common.wording import make_console
from pretrain.storage.objects import ListedObject, ObjectStore, bytes_to_fetch

AT_ONCE = 4  # files on their way
_STORED = ".stored"  # in a folder that is being stored: what is at the address already, a line each
_SAME_TIME_SECONDS = 0.01  # what a file system may round
_PATTERN = frozenset("*?[")

logger = logging.getLogger(__name__)


def fetch(
    address: str,
    objects: ObjectStore | None = None,
    *,
    folder: Path | None = None,
    but: Sequence[str] = (),
    trusted: bool = True,
    at_once: int = 0,
    hashed: bool = False,
    advice: str = "Check the address.",
) -> Path:
    """Bring the folder with a manifest at `address` to this machine, to `folder` or else its local one; returns that.

    One process per machine fetches; others that ask meanwhile wait. What is already here is kept, so a fetch that was
    cut goes on.

    Args:
        objects: where the address is.
        but: files whose names match one of these patterns are left out, and then no manifest is written.
        at_once: files on their way; by default few, since they are large.
        trusted: files under the same manifest are compared by size, otherwise by SHA-256.
        hashed: the files have their `hashed_name` there.
        advice: what to do if there is no manifest.

    Raises:
        InputError: there is no manifest, or it is damaged.
        MachineError: the disk is full, or a file is not what the manifest says.
    """
    objects, folder = objects or ObjectStore(), folder or local(address)
    content = objects.read(join(address, MANIFEST))
    if content is None:
        raise InputError(f"{join(address, MANIFEST)}: not found, so nothing complete is stored there. {advice}")
    manifest = check_manifest(content, join(address, MANIFEST))
    files = {
        name: entry
        for name, entry in manifest["files"].items()
        if not any(fnmatch.fnmatch(name, pattern) for pattern in but)
    }
    with alone(folder):
        same = (folder / MANIFEST).is_file() and (folder / MANIFEST).read_bytes() == content
        trusted = trusted and same
        missing = [name for name, entry in files.items() if not is_as_listed(folder / name, entry, content=not trusted)]
        if same and not missing:
            return folder
        if not same:
            (folder / MANIFEST).unlink(missing_ok=True)
        expected = {name: (ListedObject(files[name]["bytes"], "", 0.0), files[name]["sha256"]) for name in missing}
        _check_space(folder, sum(bytes_to_fetch(folder / name, *expected[name]) for name in missing))

        def download(name: str) -> None:
            source = hashed_name(name, files[name]) if hashed else name
            objects.download(join(address, source), folder / name, *expected[name])

        for_all(download, missing, at_once)
        if not but:
            with atomic_open(folder / MANIFEST) as file:
                file.write(content)
    logger.info("fetched %d files of %s", len(missing), address)
    return folder


def read_stored_manifest(address: str, objects: ObjectStore) -> bytes | None:
    """The manifest at `address` as it is stored; None if there is none."""
    return objects.read(join(address, MANIFEST))


def hashed_name(name: str, entry: Mapping[str, Any]) -> str:
    """The name at an address of a file with this entry in its manifest, which ends with its SHA-256."""
    return f"{name}.{entry['sha256'][:16]}"


def store(
    folder: Path,
    address: str,
    objects: ObjectStore | None = None,
    *,
    replaced: Collection[str] = (),
    hashed: bool = False,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """Store the folder with a manifest at `address`, the manifest last; files that are there already are kept.

    An interrupted call continues where it stopped. New files come first, and those that were lost there. Before others
    are replaced, the manifest that is there is deleted; if they are all among `replaced`, it only stops naming them, so
    that the rest can be fetched. At the end, files of an earlier manifest that this one has not are deleted. `check` is
    called before the manifest is written; `hashed` is as for `fetch`.

    Returns the files that were lost there.

    Raises `MachineError` if a file was lost there and is not here, or damaged.
    """
    objects, entries = objects or ObjectStore(), read_manifest(folder)["files"]
    content, theirs = (folder / MANIFEST).read_bytes(), read_stored_manifest(address, objects)
    before, there = files_of(theirs), objects.listing(address)
    names = {name: hashed_name(name, entry) if hashed else name for name, entry in entries.items()}
    lost = {name for name in names if getattr(there.get(names[name]), "bytes", None) != entries[name]["bytes"]}
    if theirs == content and not lost:
        return []
    others = [name for name, entry in entries.items() if before.get(name, entry) != entry]
    journal = folder / _STORED
    journal.touch()
    stored = set(journal.read_text(encoding="utf-8").splitlines(keepends=True))

    def put(name: str) -> None:
        line = _stored_line(join(address, names[name]), entries[name]["sha256"])
        if name in lost or line not in stored:
            if not is_as_listed(folder / name, entries[name], content=name in before):
                raise MachineError(
                    f"{join(address, name)}: is missing or has another size there, and is not here, or damaged. "
                    "Restore it, or run this command on a machine that has all files."
                )
            objects.upload(folder / name, join(address, names[name]))
            with contextlib.suppress(OSError), journal.open("a", encoding="utf-8") as file:
                file.write(line)

    for_all(put, [name for name in names if name not in before or (name in lost and name not in others)])
    if theirs is not None and others:
        if set(others) <= set(replaced):
            rest = {**json.loads(theirs), "files": {n: e for n, e in before.items() if n not in others}}
            objects.write(join(address, MANIFEST), signed(rest))
        else:
            objects.delete(join(address, MANIFEST))
    for_all(put, others)
    check()
    if theirs != content:
        objects.write(join(address, MANIFEST), content)
    journal.unlink(missing_ok=True)  # another process may have stored it, too
    for name in before.keys() - names.keys():
        objects.delete(join(address, name))
    return sorted(lost & before.keys())


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the lock of a local folder on this machine. Waits while another process or thread holds it."""
    digest = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    with disk_errors(folder), locked(cache() / ".locks" / digest):
        yield


def fetch_files(address: str, objects: ObjectStore | None = None) -> list[Path]:
    """Bring the files at `address` to this machine: one file, all below a folder, or those that match a pattern.

    Returns their local paths, sorted; [] if there are none. They have the times of the objects, and are fetched again
    if those have changed.
    """
    objects = objects or ObjectStore()
    return fetch_found(address, find(address, objects), objects)


def fetch_found(
    address: str, found: Mapping[str, ListedObject], objects: ObjectStore, *, shown: bool = False
) -> list[Path]:
    """As `fetch_files`, for objects that `find` found; with a bar if `shown`."""
    root = local(root_of(address))
    with alone(root):
        missing = [name for name, facts in found.items() if not _is_current(local(name), facts)]
        needed = sum(bytes_to_fetch(local(name), found[name]) for name in missing)
        _check_space(root, needed)
        with _bar(f"fetching {address}", needed if shown else 0) as advance:
            for_all(lambda name: objects.download(name, local(name), found[name], advance=advance), missing)
    return sorted(local(name) for name in found)


@contextlib.contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """A bar over `total` bytes on stderr, if there are any; yields what to call with the bytes done."""
    if not total:
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=make_console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.update(task, advance=count)


def find(address: str, objects: ObjectStore | None = None) -> dict[str, ListedObject]:
    """The objects that `fetch_files` would bring, by their addresses; no object is read."""
    objects = objects or ObjectStore()
    if not _PATTERN & set(address) and (facts := objects.facts(address)) is not None:
        return {address: facts}
    root = root_of(address)
    found = {join(root, name): facts for name, facts in sorted(objects.listing(root).items())}
    is_pattern = root != address.rstrip("/")
    return {name: facts for name, facts in found.items() if not is_pattern or matches(name, address)}


def root_of(address: str) -> str:
    """The folder to list: what comes before the first part with a pattern."""
    parts = address.rstrip("/").split("/")
    first = next((number for number, part in enumerate(parts) if _PATTERN & set(part)), len(parts))
    return "/".join(parts[:first])


def matches(name: str, pattern: str) -> bool:
    """As glob: `**` is any number of folders, and other patterns match within one, also `a**`."""
    from fsspec.utils import glob_translate

    pattern = re.sub(r"(?<=[^/])\*\*+|\*\*+(?=[^/])", "*", pattern)
    return re.match(glob_translate(pattern), name) is not None


def _is_current(path: Path, facts: ListedObject) -> bool:
    """Whether the local file was fetched from the object as it is now."""
    if not path.is_file():
        return False
    stat = path.stat()
    return stat.st_size == facts.bytes and abs(stat.st_mtime - facts.modified) < _SAME_TIME_SECONDS


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(existing_parent(folder)).free
    if free < needed:
        raise MachineError(
            f"{folder}: {needed / 1e9:.1f} GB are to be fetched, but {free / 1e9:.1f} GB are free. "
            "Free some space, or set BERTRAIN_CACHE to a folder on a larger disk."
        )


def files_of(manifest: bytes | None) -> dict[str, Any]:
    """The entries of a stored manifest; {} if there is none or it is damaged."""
    if manifest is None:
        return {}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return dict(json.loads(manifest)["files"])
    return {}


def for_all(work: Callable[[str], object], names: Iterable[str], at_once: int = 0) -> None:
    """`work` on all names, a few at once; the first error ends it."""
    with ThreadPoolExecutor(at_once or AT_ONCE, thread_name_prefix="objects") as pool:
        for _ in pool.map(work, names):
            pass


def note_stored(folder: Path, address: str, hashes: Mapping[str, str]) -> None:
    """Let the `store` that comes know files that are at the address already, by their SHA-256."""
    with (folder / _STORED).open("a", encoding="utf-8") as file:
        file.writelines(_stored_line(join(address, name), sha256) for name, sha256 in hashes.items())


def _stored_line(address: str, sha256: str) -> str:
    return f"{sha256} {address}\n"

"""Fetches folders from an object store, once per machine, and stores local folders in it.

A folder's manifest is stored and fetched last. So if a manifest exists, locally or at the address, all of its files
exist, and the folder need not be listed. Folders without a manifest, such as raw text, are listed.
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

from pretrain.common.addresses import cache_folder, join, local_path
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import (
    MANIFEST,
    atomic_open,
    check_manifest,
    disk_errors,
    existing_parent,
    is_intact,
    locked,
    manifest_bytes,
    read_manifest,
)
from pretrain.common.wording import make_console
from pretrain.storage.objects import ListedObject, ObjectStore, bytes_to_fetch

MAX_CONCURRENT = 4  # number of concurrent transfers
_JOURNAL = ".stored"  # file in a folder that is being stored, with one line for each file already at the address
_TIME_TOLERANCE_SECONDS = 0.01  # maximum difference of equal modification times, which file systems round
_WILDCARDS = frozenset("*?[")

logger = logging.getLogger(__name__)


def fetch(
    address: str,
    objects: ObjectStore | None = None,
    *,
    folder: Path | None = None,
    exclude: Sequence[str] = (),
    trust_sizes: bool = True,
    concurrency: int = 0,
    hashed: bool = False,
    advice: str = "Check the address.",
) -> Path:
    """Fetch the folder with a manifest at `address` to `folder`, by default the address's local folder; return it.

    One process per machine fetches; other callers wait. Intact local files are kept, so an interrupted fetch continues.

    Args:
        objects: the object store of the address.
        exclude: patterns of file names to omit; unless empty, no manifest is written.
        trust_sizes: whether equal sizes suffice, without comparing SHA-256, if the local manifest is up to date.
        concurrency: number of concurrent transfers; 0 means `MAX_CONCURRENT`, which suits large files.
        hashed: whether each file is stored under its `hashed_name`.
        advice: last sentence of the error message if there is no manifest.

    Raises:
        InputError: there is no manifest, or it is damaged.
        MachineError: the disk is full, or a file does not match the manifest.
    """
    objects, folder = objects or ObjectStore(), folder or local_path(address)
    content = objects.read(join(address, MANIFEST))
    if content is None:
        raise InputError(f"{join(address, MANIFEST)}: not found, so no complete folder is stored there. {advice}")
    manifest = check_manifest(content, join(address, MANIFEST))
    files = {
        name: entry
        for name, entry in manifest["files"].items()
        if not any(fnmatch.fnmatch(name, pattern) for pattern in exclude)
    }
    with folder_lock(folder):
        same_manifest = (folder / MANIFEST).is_file() and (folder / MANIFEST).read_bytes() == content
        check_hashes = not (trust_sizes and same_manifest)
        missing = [n for n, entry in files.items() if not is_intact(folder / n, entry, check_hashes=check_hashes)]
        if same_manifest and not missing:
            return folder
        if not same_manifest:
            (folder / MANIFEST).unlink(missing_ok=True)
        expected = {name: (ListedObject(files[name]["bytes"], "", 0.0), files[name]["sha256"]) for name in missing}
        _check_space(folder, sum(bytes_to_fetch(folder / name, *expected[name]) for name in missing))

        def download(name: str) -> None:
            source = hashed_name(name, files[name]) if hashed else name
            objects.download(join(address, source), folder / name, *expected[name])

        run_concurrently(download, missing, concurrency)
        if not exclude:
            with atomic_open(folder / MANIFEST) as file:
                file.write(content)
    logger.info("fetched %d files of %s", len(missing), address)
    return folder


def read_stored_manifest(address: str, objects: ObjectStore) -> bytes | None:
    """Return the content of the manifest at `address`; None if there is none."""
    return objects.read(join(address, MANIFEST))


def hashed_name(name: str, entry: Mapping[str, Any]) -> str:
    """Return the name under which a file with this manifest entry is stored: `name` and its SHA-256."""
    return f"{name}.{entry['sha256'][:16]}"


def store(
    folder: Path,
    address: str,
    objects: ObjectStore | None = None,
    *,
    replaceable: Collection[str] = (),
    hashed: bool = False,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """Store the folder with a manifest at `address`, the manifest last; files already stored are kept.

    An interrupted call continues where it stopped. New files, and files missing at the address, are stored first. Then
    the stored manifest is deleted, and the changed files are replaced. If all changed files are in `replaceable`, only
    their entries are removed from the manifest, so that the other files can still be fetched. Finally, files that only
    the previous manifest lists are deleted. `check` is called before the manifest is written; `hashed`: see `fetch`.

    Returns the names of files that the stored manifest listed but that were missing. Raises `MachineError` if a file is
    missing at the address, and also missing or damaged in `folder`.
    """
    objects, entries = objects or ObjectStore(), read_manifest(folder)["files"]
    content, stored_content = (folder / MANIFEST).read_bytes(), read_stored_manifest(address, objects)
    old_entries, listed = file_entries(stored_content), objects.listing(address)
    stored_names = {name: hashed_name(name, entry) if hashed else name for name, entry in entries.items()}
    missing = {n for n in stored_names if getattr(listed.get(stored_names[n]), "bytes", None) != entries[n]["bytes"]}
    if stored_content == content and not missing:
        return []
    changed = [name for name, entry in entries.items() if old_entries.get(name, entry) != entry]
    journal = folder / _JOURNAL
    journal.touch()
    stored_lines = set(journal.read_text(encoding="utf-8").splitlines(keepends=True))

    def put(name: str) -> None:
        line = _journal_line(join(address, stored_names[name]), entries[name]["sha256"])
        if name in missing or line not in stored_lines:
            if not is_intact(folder / name, entries[name], check_hashes=name in old_entries):
                raise MachineError(
                    f"{join(address, name)}: is missing or has another size, and {folder / name} is missing or "
                    "damaged. Restore it, or run this command on a machine that has all files."
                )
            objects.upload(folder / name, join(address, stored_names[name]))
            with contextlib.suppress(OSError), journal.open("a", encoding="utf-8") as file:
                file.write(line)

    run_concurrently(put, [n for n in stored_names if n not in old_entries or (n in missing and n not in changed)])
    if stored_content is not None and changed:
        if set(changed) <= set(replaceable):
            kept = {name: entry for name, entry in old_entries.items() if name not in changed}
            objects.write(join(address, MANIFEST), manifest_bytes({**json.loads(stored_content), "files": kept}))
        else:
            objects.delete(join(address, MANIFEST))
    run_concurrently(put, changed)
    check()
    if stored_content != content:
        objects.write(join(address, MANIFEST), content)
    journal.unlink(missing_ok=True)  # another process may have stored the folder, too
    for name in old_entries.keys() - stored_names.keys():
        objects.delete(join(address, name))
    return sorted(missing & old_entries.keys())


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a local folder on this machine; wait while another process or thread holds it."""
    digest = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]
    with disk_errors(folder), locked(cache_folder() / ".locks" / digest):
        yield


def fetch_files(address: str, objects: ObjectStore | None = None) -> list[Path]:
    """Fetch the files at `address`: one file, all files below a folder, or all that match a pattern.

    Returns their local paths, sorted; [] if there are none. Each file gets the modification time of its object, and is
    fetched again if the object has changed.
    """
    objects = objects or ObjectStore()
    return fetch_found(address, find(address, objects), objects)


def fetch_found(
    address: str, listed: Mapping[str, ListedObject], objects: ObjectStore, *, show_progress: bool = False
) -> list[Path]:
    """Fetch the objects that `find` returned, as `fetch_files` does; with a progress bar if `show_progress`."""
    root = local_path(root_of(address))
    with folder_lock(root):
        outdated = [name for name, info in listed.items() if not _is_current(local_path(name), info)]
        needed = sum(bytes_to_fetch(local_path(name), listed[name]) for name in outdated)
        _check_space(root, needed)
        with _progress_bar(f"fetching {address}", needed if show_progress else 0) as advance:
            run_concurrently(
                lambda name: objects.download(name, local_path(name), listed[name], advance=advance), outdated
            )
    return sorted(local_path(name) for name in listed)


@contextlib.contextmanager
def _progress_bar(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """Show a progress bar over `total` bytes on stderr (none for 0); yield a function that advances the bar."""
    if not total:
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=make_console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.update(task, advance=count)


def find(address: str, objects: ObjectStore | None = None) -> dict[str, ListedObject]:
    """Return the objects that `fetch_files` would fetch, by address; no object is read."""
    objects = objects or ObjectStore()
    if not _WILDCARDS & set(address) and (info := objects.info(address)) is not None:
        return {address: info}
    root = root_of(address)
    listed = {join(root, name): info for name, info in sorted(objects.listing(root).items())}
    is_pattern = root != address.rstrip("/")
    return {name: info for name, info in listed.items() if not is_pattern or matches(name, address)}


def root_of(address: str) -> str:
    """Return the folder to list: the address up to the first component with a wildcard."""
    components = address.rstrip("/").split("/")
    stop = next((index for index, name in enumerate(components) if _WILDCARDS & set(name)), len(components))
    return "/".join(components[:stop])


def matches(name: str, pattern: str) -> bool:
    """Return whether `name` matches a glob `pattern`, where only a whole component `**` matches several folders."""
    from fsspec.utils import glob_translate

    pattern = re.sub(r"(?<=[^/])\*\*+|\*\*+(?=[^/])", "*", pattern)
    return re.match(glob_translate(pattern), name) is not None


def _is_current(path: Path, info: ListedObject) -> bool:
    """Return whether the local file was fetched from the current version of the object."""
    if not path.is_file():
        return False
    stat = path.stat()
    return stat.st_size == info.bytes and abs(stat.st_mtime - info.modified) < _TIME_TOLERANCE_SECONDS


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(existing_parent(folder)).free
    if free < needed:
        raise MachineError(
            f"{folder}: fetching needs {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free. "
            "Free some space, or set BERTRAIN_CACHE to a folder on a larger disk."
        )


def file_entries(manifest: bytes | None) -> dict[str, Any]:
    """Return the entries of the files in a stored manifest; {} if there is none or it is damaged."""
    if manifest is None:
        return {}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return dict(json.loads(manifest)["files"])
    return {}


def run_concurrently(work: Callable[[str], object], names: Iterable[str], concurrency: int = 0) -> None:
    """Call `work` with each name in a thread pool; raise the first error."""
    with ThreadPoolExecutor(concurrency or MAX_CONCURRENT, thread_name_prefix="objects") as pool:
        for _ in pool.map(work, names):
            pass


def record_stored(folder: Path, address: str, hashes: Mapping[str, str]) -> None:
    """Record for the next `store` that files with these SHA-256 `hashes` (name -> hash) are already at the address."""
    with (folder / _JOURNAL).open("a", encoding="utf-8") as file:
        file.writelines(_journal_line(join(address, name), sha256) for name, sha256 in hashes.items())


def _journal_line(address: str, sha256: str) -> str:
    return f"{sha256} {address}\n"

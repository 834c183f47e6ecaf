"""Select the files to read in a folder, or that match a pattern or an address. Skipped files are counted."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath

from pretrain.common.errors import InputError
from pretrain.common.files import MANIFEST
from pretrain.storage import folders

Reporter = Callable[[str, str, str], object]  # called with (path, fault, location), such as `Problems.add`
HIDDEN = "hidden file, or file in a hidden folder: left out"
PREPARED = "file of a prepared corpus: left out"
BROKEN_LINK = "link that leads nowhere: left out"


def files_in(folder: Path, where: str = "") -> list[Path]:
    """List all files and broken links below a folder, sorted. Linked folders are followed, each only once.

    Raises `InputError` if a folder cannot be listed; `where` is the setting that names it.
    """
    visited = [folder.resolve()]  # roots of the folder trees visited so far

    def is_unvisited(link: Path) -> bool:
        real = link.resolve()
        if any(real.is_relative_to(root) for root in visited):
            return False
        visited.append(real)
        return True

    files: list[Path] = []
    pending = [str(folder)]
    try:
        for current in pending:  # grows during the loop
            with os.scandir(current) as entries:
                for entry in sorted(entries, key=lambda e: e.name):
                    link = Path(entry.path) if entry.is_symlink() else None
                    item = link or entry  # a circular link is neither file nor folder, but only a Path reports that
                    if item.is_dir():
                        if link is None or is_unvisited(link):
                            pending.append(entry.path)
                    elif item.is_file() or (link and not link.exists()):
                        files.append(Path(entry.path))
    except OSError as error:
        location = f"{where}: {error.filename}" if where else error.filename
        raise InputError(f"{location}: cannot be read ({error.strerror}). Check its permissions.") from None
    return sorted(files)


def visible_files(files: Iterable[Path], root: Path, report: Reporter, *, include_hidden: bool = False) -> list[Path]:
    """Return the local files below `root` to read, like `select_names`."""
    by_name = {str(file.relative_to(root)): file for file in files}
    names = select_names(by_name, str(root), lambda n: (root / n).exists(), report, include_hidden=include_hidden)
    return [by_name[name] for name in names]


def select_names(
    names: Iterable[str], root: str, exists: Callable[[str], bool], report: Reporter, *, include_hidden: bool = False
) -> list[str]:
    """Return the names of the files below `root` to read; report all others to `report`.

    Broken links, hidden files (unless `include_hidden`) and corpora below `root`, finished or not, are skipped.
    """
    prepared, selected = {PurePath(): False}, []

    def is_prepared(folder: PurePath) -> bool:
        if folder not in prepared:
            is_corpus = all(exists(f"{folder}/{name}") for name in (MANIFEST, "card.json"))
            prepared[folder] = is_corpus or exists(f"{folder}/.work/settings.json") or is_prepared(folder.parent)
        return prepared[folder]

    for name in names:
        path = PurePath(name)
        if is_prepared(path.parent):
            report(root, PREPARED, name)
        elif not include_hidden and any(part.startswith(".") for part in path.parts):
            report(root, HIDDEN, name)
        elif not exists(name):
            report(root, BROKEN_LINK, name)
        else:
            selected.append(name)
    return selected


def matching_files(path: Path, report: Reporter) -> list[Path]:
    """Return the files to read that match a pattern; hidden ones only if a part of the pattern starts with a dot."""
    pattern = str(path)
    root = Path(folders.root_of(pattern) or path.anchor)
    include_hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    if "**" in path.parts and not include_hidden and root.is_dir():  # `files_in` visits linked folders only once
        files = [file for file in files_in(root) if folders.matches(str(file), pattern)]
    else:
        paths = sorted(map(Path, glob.glob(pattern, recursive=True)))  # noqa: PTH207 (absolute patterns)
        files = [file for file in paths if file.is_file() or not file.exists()]
    return visible_files(files, root, report, include_hidden=include_hidden)


def escaped_pattern(path: Path) -> str:
    """Return the pattern `path` with the names of existing folders escaped; "" if they need no escaping."""
    folder = next(parent for parent in path.parents if parent.exists())
    pattern = str(Path(glob.escape(str(folder)), path.relative_to(folder)))
    return pattern if pattern != str(path) else ""

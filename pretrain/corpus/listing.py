"""Which files of a folder, a pattern or an address are read. What is left out is counted."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath

from pretrain.common.errors import InputError
from pretrain.common.files import MANIFEST
from pretrain.storage import folders

Note = Callable[[str, str, str], object]  # `Problems.add`: path, fault, first
HIDDEN = "hidden file, or file in a hidden folder: left out"
PREPARED = "file of a prepared corpus: left out"
NOWHERE = "link that leads nowhere: left out"


def files_in(folder: Path, where: str = "") -> list[Path]:
    """All files below a folder, sorted, and links that lead nowhere; also in linked folders, each visited once.

    Raises `InputError` if a folder cannot be listed; `where` is its setting.
    """
    visited = [folder.resolve()]  # with all below them

    def is_new(link: Path) -> bool:
        real = link.resolve()
        if any(real.is_relative_to(one) for one in visited):
            return False
        visited.append(real)
        return True

    files: list[Path] = []
    waiting = [str(folder)]
    try:
        for here in waiting:  # which grows
            with os.scandir(here) as entries:
                for entry in sorted(entries, key=lambda one: one.name):
                    link = Path(entry.path) if entry.is_symlink() else None
                    kind = link or entry  # only a path may lead in a circle, and be neither
                    if kind.is_dir():
                        if link is None or is_new(link):
                            waiting.append(entry.path)
                    elif kind.is_file() or (link and not link.exists()):
                        files.append(Path(entry.path))
    except OSError as error:
        place = f"{where}: {error.filename}" if where else error.filename
        raise InputError(f"{place}: cannot be read ({error.strerror}). Check its permissions.") from None
    return sorted(files)


def visible(files: Iterable[Path], root: Path, note: Note, *, hidden: bool = False) -> list[Path]:
    """As `read_names`, of files of this machine."""
    inner = {str(file.relative_to(root)): file for file in files}
    kept = read_names(inner, str(root), lambda name: (root / name).exists(), note, hidden=hidden)
    return [inner[name] for name in kept]


def read_names(
    names: Iterable[str], root: str, exists: Callable[[str], bool], note: Note, *, hidden: bool = False
) -> list[str]:
    """Those of the files with these names below `root` that are read; the others are told to `note`.

    Left out are links that lead nowhere, hidden files, unless `hidden`, and corpora below `root`, prepared or begun.
    """
    known, kept = {PurePath(): False}, []

    def is_prepared(folder: PurePath) -> bool:
        if folder not in known:
            is_corpus = all(exists(f"{folder}/{name}") for name in (MANIFEST, "card.json"))
            known[folder] = is_corpus or exists(f"{folder}/.work/settings.json") or is_prepared(folder.parent)
        return known[folder]

    for name in names:
        path = PurePath(name)
        if is_prepared(path.parent):
            note(root, PREPARED, name)
        elif not hidden and any(part.startswith(".") for part in path.parts):
            note(root, HIDDEN, name)
        elif not exists(name):
            note(root, NOWHERE, name)
        else:
            kept.append(name)
    return kept


def matching(path: Path, note: Note) -> list[Path]:
    """The files that match a pattern and are read. Hidden ones match only a pattern that has their dot."""
    pattern = str(path)
    root = Path(folders.root_of(pattern) or path.anchor)
    dotted = any(part.startswith(".") for part in path.relative_to(root).parts)
    if "**" in path.parts and not dotted and root.is_dir():  # linked folders once
        files = [file for file in files_in(root) if folders.matches(str(file), pattern)]
    else:
        found = sorted(map(Path, glob.glob(pattern, recursive=True)))  # noqa: PTH207 (absolute patterns)
        files = [file for file in found if file.is_file() or not file.exists()]
    return visible(files, root, note, hidden=dotted)


def escaped(path: Path) -> str:
    """The pattern for `path` in which the folders that exist are their names; "" if that is no other one."""
    folder = next(one for one in path.parents if one.exists())
    pattern = str(Path(glob.escape(str(folder)), path.relative_to(folder)))
    return pattern if pattern != str(path) else ""

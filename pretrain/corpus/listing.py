"""Which files of a folder, a pattern or an address are read. What is left out is counted."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from pretrain.common.errors import InputError
from pretrain.common.files import MANIFEST
from pretrain.storage import folders

if TYPE_CHECKING:
    from pretrain.corpus.inputs import Problems

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


def visible(files: Iterable[Path], root: Path, problems: Problems, *, hidden: bool = False) -> list[Path]:
    """Those of the files below `root` that are read; with `hidden` also hidden ones."""
    inner = {str(file.relative_to(root)): file for file in files}
    kept = read_names(inner, lambda name: (root / name).exists(), problems, str(root), hidden=hidden)
    return [inner[name] for name in kept]


def read_names(
    names: Iterable[str], exists: Callable[[str], bool], problems: Problems, root: str, *, hidden: bool = False
) -> list[str]:
    """Those of the files with these names below `root` that are read.

    Others go to `problems`: hidden ones, unless `hidden`, links that lead nowhere, and the files of corpora that were
    prepared below `root`, or are being prepared.
    """
    known = {PurePath(): False}

    def is_prepared(folder: PurePath) -> bool:
        if folder not in known:
            is_corpus = all(exists(str(folder / name)) for name in (MANIFEST, "card.json"))
            is_begun = is_corpus or exists(str(folder / ".work" / "settings.json"))
            known[folder] = is_begun or is_prepared(folder.parent)
        return known[folder]

    kept = []
    for name in names:
        path = PurePath(name)
        if is_prepared(path.parent):
            problems.add(root, PREPARED, name)
        elif not hidden and any(part.startswith(".") for part in path.parts):
            problems.add(root, HIDDEN, name)
        elif not exists(name):
            problems.add(root, NOWHERE, name)
        else:
            kept.append(name)
    return kept


def matching(path: Path, problems: Problems) -> list[Path]:
    """The files that match a pattern and are read. Hidden ones match only a pattern that has their dot."""
    pattern = str(path)
    found = set(map(Path, glob.glob(pattern, recursive=True)))  # noqa: PTH207 (absolute patterns)
    root = Path(folders.root_of(pattern) or path.anchor)
    dotted = any(part.startswith(".") for part in path.relative_to(root).parts)
    if "**" in path.parts and not dotted and root.is_dir():
        found |= {file for file in files_in(root) if folders.matches(str(file), pattern)}
    files = [file for file in sorted(found) if file.is_file() or not file.exists()]
    return visible(files, root, problems, hidden=dotted)


def escaped(path: Path) -> str:
    """A pattern that matches files if the folders in it that exist are taken by their names; "" if it is none."""
    here, parts = Path(), []
    for part in path.parts:
        is_there = here is not None and (here / part).exists()
        here = here / part if here is not None and is_there else None
        parts.append(glob.escape(part) if is_there else part)
    pattern = str(Path(*parts))
    return pattern if pattern != str(path) and glob.glob(pattern, recursive=True) else ""  # noqa: PTH207

"""Atomic files and proven folders (law 5): written aside, fsynced, renamed; the manifest comes last.

A folder whose `manifest.json` is missing or does not match its files does not exist for us.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import resource
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from pretrain.common.errors import InputError, MachineError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_OWN_HASH = "manifest_sha256"
# With one slash too: that is what pathlib leaves of two.
_REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_OTHER_FILES = 4096  # sockets, libraries and logs of a large run, several times over
# What flock says where the file system or its mount has no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_SUCH_PATH = (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


def check_local(path: Path | str) -> None:
    """`ValueError` where `path` is a remote address such as s3://bucket/run, of which a local folder would be made."""
    if _REMOTE.match(str(path)):
        raise ValueError(
            f"{str(path)!r} is a remote address, and only paths of this machine are read and written. "
            "Mount or copy it, and name the path."
        )


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals below `path` into one-line errors with what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(existing_parent(path)).free
            raise MachineError(
                f"{path}: disk full ({free / 1e9:.2f} GB free). Nothing half-written is kept; "
                "free some space and run the same command again."
            ) from error
        if error.errno in _NO_SUCH_PATH:
            raise InputError(f"{path}: cannot write here ({error.strerror}). Choose a writable path.") from error
        raise


def existing_parent(path: Path) -> Path:
    """The nearest existing folder at or above `path`."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


@contextlib.contextmanager
def atomic_open(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open `path` for writing so that it appears whole or not at all.

    Writes to a temporary neighbour, fsyncs it, renames it over `path` and fsyncs the folder.
    Disk-full and permission errors become `MachineError` / `InputError`; the temporary is removed.
    """
    path = Path(path)
    # Not the process's number: another machine that shares the folder may have the same.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with aside.open(mode, **({} if "b" in mode else {"encoding": "utf-8"})) as file:  # pyright: ignore[reportArgumentType, reportCallIssue]
                yield file
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
            fsync_folder(path.parent)
        finally:
            aside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented UTF-8 JSON, atomically."""
    with atomic_open(path, "w") as file:
        json.dump(value, file, indent=2, ensure_ascii=False, sort_keys=False)
        file.write("\n")


def open_regular(path: Path, flags: int) -> int:
    """A descriptor of the regular file `path`, made where it is missing; `flags` are those of `os.open`.

    A name that is known beforehand may be taken by a link to another file, or by a pipe: `InputError`.
    """
    with disk_errors(path):
        try:
            # Not blocking, because the opening of a pipe would wait for its other end.
            descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.set_blocking(descriptor, True)
                return descriptor
            os.close(descriptor)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise
    raise InputError(f"{path}: is a link or no regular file, and is not written to. Remove it.")


def append_open(path: Path, buffering: int = -1) -> IO[bytes]:
    """The regular file `path`, opened as `open_regular` does to append to it."""
    return cast("IO[bytes]", open(path, "ab", buffering, opener=lambda name, flags: open_regular(Path(name), flags)))


def allow_open_files(count: int) -> int:
    """Let this process have `count` files open besides others, as far as the system's hard limit goes.

    Returns how many it may have open in all.

    Soft limits are often 1,024; the hard one can be a billion, and some programs walk through all that are allowed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and most > soft:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


@contextlib.contextmanager
def locked(path: Path, refusal: str) -> Iterator[bool]:
    """Hold the lock file `path` for this process; `InputError(refusal)` where another one holds it.

    The lock is the kernel's, so it ends with the process however that ends. Yields whether there is one: on a file
    system without locks a warning says so and the work goes on, since whoever works there can seldom change the mount.
    """
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = open_regular(path, os.O_RDWR)
    try:
        yield _lock(descriptor, path, refusal)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, refusal: str) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(refusal) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "%s: this file system has no locks (%s). See to it that nothing else works in %s at the same time.",
            path,
            error.strerror,
            path.parent,
        )
        return False
    return True


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file, read in 4 MiB pieces."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while piece := file.read(4 << 20):
            digest.update(piece)
    return digest.hexdigest()


def write_manifest(folder: Path, extra: dict[str, Any], hashes: dict[str, str] | None = None) -> dict[str, Any]:
    """List every file below `folder` with size and SHA-256 in its manifest, which comes last.

    `hashes` may carry digests already computed while writing (relative path -> hex), to save a second read.
    `extra` is stored beside the list. Returns the manifest.
    """
    known = hashes or {}
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST):
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size, "sha256": known.get(name) or sha256_file(path)}
    manifest = {**extra, "files": files}
    put_manifest(folder, manifest)
    return manifest


def put_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write `manifest` as that of `folder`, with its own SHA-256, by which `verify_manifest` knows it."""
    write_json(folder / MANIFEST, {**manifest, _OWN_HASH: _own_hash(manifest)})


def _own_hash(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != _OWN_HASH}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`; `InputError` when it is missing or not readable as JSON."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
            raise ValueError("no list of files")
    except FileNotFoundError:
        raise InputError(f"{path}: not found, so this folder is not complete. Make it again.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: damaged ({error}). Make the folder again.") from None
    return manifest


def verify_manifest(folder: Path, *, content: bool = True) -> dict[str, Any]:
    """Check `folder` against its manifest, and that itself: sizes always, SHA-256 with `content`. Returns the manifest.

    Raises `InputError` naming the first file that is missing, of the wrong size or altered.
    """
    manifest = read_manifest(folder)
    if manifest.get(_OWN_HASH) != _own_hash(manifest):
        raise InputError(f"{folder / MANIFEST}: altered or damaged on disk. Make the folder again.")
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path}: missing, though the manifest lists it. Make the folder again.")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise InputError(
                f"{path}: {size} bytes where the manifest says {expected['bytes']}; truncated or altered. "
                "Restore it or make the folder again."
            )
        if content and sha256_file(path) != expected["sha256"]:
            raise InputError(
                f"{path}: its SHA-256 differs from the manifest's; altered or damaged on disk. "
                "Restore it or make the folder again."
            )
    return manifest

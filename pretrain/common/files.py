"""Atomic files and verified folders (invariant 5 in docs/invariants.md).

A file is written under a temporary name, fsynced and renamed. A folder gets its `manifest.json` last; a folder without
a matching manifest is treated as missing.
"""

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
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from pretrain.common.errors import InputError, MachineError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
UNTRAINED = "step-00000000"  # the checkpoint that a new run saves to test its largest batch
CHECKPOINT_NAME = re.compile(r"step-(\d{8})")
_HASH_KEY = "manifest_sha256"
# One slash is enough: pathlib reduces two slashes to one.
_REMOTE_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_LFS_POINTER = b"version https://git-lfs."
_SPARE_FILES = 4096  # number of open files to allow for other uses: more than the sockets and logs of a large run
# Errors of flock if the file system or its mount does not support locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# Errors of paths that this user cannot create or write.
_NOT_WRITABLE = (
    *(errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.ENXIO),
)


def check_local(path: Path | str) -> None:
    """Raise `ValueError` if `path` is an address such as s3://bucket/run, which would become a local folder's name."""
    if _REMOTE_ADDRESS.match(str(path)):
        raise ValueError(
            f"{str(path)!r} is a remote address; only local paths are supported. "
            "Mount or copy it, and use the local path."
        )


def find_run(name: Path | str) -> Path:
    """Return `name` if it is a folder, else runs/`name` if that is a folder, else `name`."""
    return next((folder for folder in (Path(name), Path("runs", name)) if folder.is_dir()), Path(name))


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert operating system errors from writing `path` to one-line errors with advice."""
    try:
        yield
    except OSError as error:
        # numpy's tofile sets no errno: "81400 requested and 74096 written".
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or (error.errno is None and str(error).endswith(" written")):
            free = shutil.disk_usage(existing_parent(path)).free
            raise MachineError(
                f"{path}: disk full ({free / 1e9:.2f} GB free). No incomplete file is kept; "
                "free some space and run the same command again (pretrain and finetune: with --resume)."
            ) from error
        if error.errno in _NOT_WRITABLE:
            raise InputError(f"{path}: cannot write here ({error.strerror}). Choose a writable path.") from error
        raise


def existing_parent(path: Path) -> Path:
    """Return the nearest existing folder at or above `path`."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


@contextlib.contextmanager
def atomic_open(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Open `path` for writing; the file appears complete or not at all.

    Writes a temporary file in the same folder, fsyncs it, renames it to `path` and fsyncs the folder. Disk-full and
    permission errors become `MachineError` and `InputError`; the temporary file is removed. If `path` is a link, its
    target is replaced. A pipe or a device is written in place.
    """
    path, encoding = Path(path), {} if "b" in mode else {"encoding": "utf-8"}
    if is_stream(path):
        with disk_errors(path), path.open(mode, **encoding) as file:  # pyright: ignore[reportArgumentType, reportCallIssue]
            yield file
        return
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    # Not the process id: a process on another machine that shares the folder may have the same one.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open(mode, **encoding) as file:  # pyright: ignore[reportArgumentType, reportCallIssue]
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            fsync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def is_stream(path: Path) -> bool:
    """Return whether `path` is a pipe, a device or a socket, such as bash's <(command), or a link to one."""
    return path.exists() and not path.is_file() and not path.is_dir()


def check_outputs_differ(outputs: Iterable[Path], inputs: Iterable[Path | str]) -> None:
    """Raise `InputError` if an output is the same file as an input, even under another name."""
    input_paths = [Path(path).expanduser() for path in inputs]
    for out in outputs:
        # A device, such as a terminal, may be both.
        if out.is_file() and any(path.is_file() and path.samefile(out) for path in input_paths):
            raise InputError(f"{out}: is also an input, which would be overwritten. Choose another name.")


def reject_lfs_pointer(path: Path) -> None:
    """Raise `InputError` if Git LFS left a pointer in place of the file."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise InputError(
                f"{path}: a Git LFS pointer, not the file itself. Run `git lfs pull` in its repository, or download it."
            )


def read_json(path: Path, kind: type[Any] = dict) -> Any:
    """Return the value of an untrusted JSON file. Raises `InputError` if its type is not `kind`: dict or list."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: not found. Use a folder with a released model.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}). Download it again.") from None
    if not isinstance(value, kind):
        type_name = "object" if kind is dict else "list"
        raise InputError(f"{path}: is not a JSON {type_name}. Download it again.")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented UTF-8 JSON, atomically."""
    with atomic_open(path, "w") as file:
        json.dump(value, file, indent=2, ensure_ascii=False, sort_keys=False)
        file.write("\n")


def append_open(path: Path, buffering: int = -1) -> IO[bytes]:
    """Open the file `path` for appending."""
    with disk_errors(path):
        return path.open("ab", buffering)


def allow_open_files(count: int) -> int:
    """Raise the limit on open files for `count` more files, up to the hard limit. Returns the new limit.

    Soft limits are often 1,024. The hard limit can be a billion, and some programs iterate over all allowed
    descriptors, so the limit is not raised further than needed.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + _SPARE_FILES
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and limit > soft:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            soft = limit
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


@contextlib.contextmanager
def locked(path: Path, error_message: str = "") -> Iterator[bool]:
    """Hold the lock file `path` for this process; the kernel releases it when the process exits for any reason.

    If another process holds it, raises `InputError(error_message)`, or waits if the message is empty. Yields whether
    the lock is held: on a file system without locks, which users can rarely change, only a warning is logged.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield _lock(descriptor, path, error_message)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path, error_message: str) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (fcntl.LOCK_NB if error_message else 0))
    except BlockingIOError:
        raise InputError(error_message) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "%s: this file system does not support locks (%s). Make sure that no other process uses %s.",
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
    """Return the hex SHA-256 of a file, read in chunks of 4 MiB."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while chunk := file.read(4 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def write_manifest(folder: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """Write and return the manifest of the complete `folder`: `extra`, and the size and SHA-256 of each file."""
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST):
        name = path.relative_to(folder).as_posix()
        files[name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    manifest = {**extra, "files": files}
    put_manifest(folder, manifest)
    return manifest


def put_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write `manifest` to `folder` together with its SHA-256, which `verify_manifest` checks."""
    with atomic_open(folder / MANIFEST) as file:
        file.write(manifest_bytes(manifest))


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """Return the content of manifest.json: `manifest` and its SHA-256."""
    return f"{json.dumps({**manifest, _HASH_KEY: _manifest_hash(manifest)}, indent=2, ensure_ascii=False)}\n".encode()


def is_our_manifest(manifest: Any) -> bool:
    """Return whether `put_manifest` wrote this manifest, not another program."""
    return isinstance(manifest, dict) and _HASH_KEY in manifest


def _manifest_hash(manifest: dict[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != _HASH_KEY}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def checkpoint_names(folder: Path) -> list[str]:
    """Return the names of a run folder's complete checkpoints, oldest first, without the damaged ones set aside."""
    names = (path.parent.name for path in folder.glob(f"checkpoints/*/{MANIFEST}"))
    return sorted(name for name in names if CHECKPOINT_NAME.fullmatch(name))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of `folder`. Raises `InputError` if it is missing or not valid JSON."""
    path = folder / MANIFEST
    try:
        return parse_manifest(path.read_bytes(), path)
    except FileNotFoundError:
        raise InputError(f"{path}: not found, so the folder is incomplete. Create the folder again.") from None
    except PermissionError:
        raise InputError(f"{path}: cannot be read by this user. Check its permissions.") from None


def parse_manifest(content: bytes, where: Path | str) -> dict[str, Any]:
    """Return the manifest in `content`, which was read from `where`.

    Raises `InputError` if it is not valid JSON, or names a file outside the folder.
    """
    try:
        manifest = json.loads(content.decode("utf-8"))
        if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
            raise ValueError("no list of files")
        if any(name.is_absolute() or ".." in name.parts for name in map(Path, manifest["files"])):
            raise ValueError("it names files outside its folder")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: damaged ({error}). Create the folder again.") from None
    return manifest


def check_manifest(content: bytes, where: Path | str) -> dict[str, Any]:
    """Parse as `parse_manifest` does, and check the manifest's SHA-256. Raises `InputError`."""
    manifest = parse_manifest(content, where)
    if manifest.get(_HASH_KEY) != _manifest_hash(manifest):
        raise InputError(f"{where}: changed or damaged. Create the folder again.")
    return manifest


def verify_manifest(folder: Path, *, check_hashes: bool = True) -> dict[str, Any]:
    """Check the manifest of `folder` and its files: sizes, and with `check_hashes` SHA-256. Returns the manifest.

    Raises `InputError` with the first file that is missing, has the wrong size or was changed.
    """
    manifest = read_manifest(folder)
    if manifest.get(_HASH_KEY) != _manifest_hash(manifest):
        raise InputError(f"{folder / MANIFEST}: changed or damaged on disk. Create the folder again.")
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise InputError(f"{path}: missing, but listed in the manifest. Create the folder again.")
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise InputError(
                f"{path}: {size} bytes, but {expected['bytes']} in the manifest; truncated or changed. "
                "Restore the file or create the folder again."
            )
        if check_hashes:
            verify_content(path, expected)
    return manifest


def is_intact(path: Path, entry: Mapping[str, Any], *, check_hashes: bool) -> bool:
    """Return whether a file matches the size in its manifest entry and, with `check_hashes`, the SHA-256."""
    if not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    return not check_hashes or sha256_file(path) == entry["sha256"]


def verify_content(path: Path, expected: Mapping[str, Any]) -> None:
    """Raise `InputError` if the file's SHA-256 differs from `expected`, its entry in a manifest."""
    if sha256_file(path) != expected["sha256"]:
        raise InputError(
            f"{path}: its SHA-256 differs from the manifest; changed or damaged on disk. "
            "Restore the file or create the folder again."
        )

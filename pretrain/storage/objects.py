"""Reads, writes, uploads, downloads, lists and deletes single objects of an object store, with bounded retries.

fsspec's file systems retry single requests a few times. If that fails, the whole operation is retried here, with
exponential backoff and jitter, until a time limit. Permanent failures, such as wrong credentials or a missing
bucket, immediately raise `InputError`.
"""

import contextlib
import errno
import functools
import hashlib
import itertools
import logging
import math
import os
import random
import re
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pretrain.common.addresses import scheme_of
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import disk_errors, fsync_folder, sha256_file
from pretrain.common.packages import install_command

RETRY_SECONDS = 300.0  # default time limit for the retries of an operation
_FIRST_WAIT_SECONDS, _MAX_WAIT_SECONDS = 0.25, 20.0
CHUNK_BYTES = 16 << 20  # bytes per request of a download; a broken connection loses at most one chunk
# The package to install for a scheme, and the variables or command that provide its credentials.
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs", "az": "adlfs", "hf": "huggingface_hub"}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws/credentials or the machine's IAM role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or `gcloud auth application-default login`",
    "abfs": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or `az login`",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or `az login`",
    "hf": "HF_TOKEN or `hf auth login`",
}
_OPTIONS: dict[str, dict[str, Any]] = {  # scheme -> options of fsspec's file system
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 60, "retries": {"mode": "standard"}}},
}
S3_PART_BYTES, _S3_MAX_PARTS = 16 << 20, 10_000  # minimum size of an upload's parts, and S3's limit on their number
# Exceptions of the clients for missing or rejected credentials.
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"}
_NO_CREDENTIALS |= {"ProfileNotFound", "ClientAuthenticationError", "DefaultCredentialsError", "RefreshError"}
_DENIED_STATUS, _RETRIED_STATUS = (401, 403), (408, 425, 429)  # HTTP status codes
_NO_BUCKET = re.compile(r"(bucket|container) (does not exist|was not found)|NoSuchBucket|Invalid bucket", re.IGNORECASE)
# Exceptions of the Hub's client -> our messages. The Hub does not distinguish missing and private repositories.
_LOG_IN = "accept its terms at {page}, if it has any, and set HF_TOKEN or run `hf auth login`."
_HUB_ERRORS = {
    "GatedRepoError": f"gated or private; {_LOG_IN}",
    "HfUriError": "not a Hub address. Use one such as hf://owner/name or hf://owner/name@revision/folder.",
    "RevisionNotFoundError": "the repository has no such revision. Check the part after the @.",
    "RepositoryNotFoundError": f"the Hub has no such repository, or it is private. Check its name; {_LOG_IN}",
}
_OUR_PACKAGES = ("pretrain", "finetune", "cluster")
_LIBRARY_FOLDERS = {"site-packages", "dist-packages"}
_UNREACHABLE = (errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH)
_MISCONFIGURED = {"SSLCertVerificationError", "OfflineModeIsEnabled", "UnsupportedProtocol", "InvalidURL"}

T = TypeVar("T")
logger = logging.getLogger(__name__)


class AccessError(InputError):
    """The store cannot be used at all: wrong credentials, a missing permission, bucket or package."""


class ContentError(MachineError):
    """An object's content does not match the manifest or the listing."""


@dataclass(frozen=True)
class ListedObject:
    """An object in a listing. `tag` changes whenever the content changes."""

    bytes: int
    tag: str
    modified: float  # modification time in seconds since 1970; a hash of the tag if the store provides no times


class ObjectStore:
    """Reads and writes objects by address.

    Args:
        retry_seconds: time limit for retries of a failing operation, counted from its first failure; by default
            `RETRY_SECONDS`.

    Its methods raise `AccessError` for wrong credentials, a missing bucket or a missing package, and `MachineError` if
    the store still fails after `retry_seconds`.
    """

    def __init__(self, retry_seconds: float | None = None) -> None:
        self._retry_seconds = RETRY_SECONDS if retry_seconds is None else retry_seconds

    def read(self, address: str) -> bytes | None:
        """Read a small object; None if it does not exist."""
        return self._or_default(address, "read", lambda: _filesystem(address).cat_file(_key(address)), None)

    def read_range(self, address: str, start: int, end: int) -> bytes:
        """Read the bytes [`start`, `end`) of an object."""

        def work() -> bytes:
            chunk = _filesystem(address).cat_file(_key(address), start=start, end=end)
            if len(chunk) != end - start:
                raise OSError(f"{len(chunk)} bytes received instead of {end - start}")
            return chunk

        return self._retry(address, "read", work)

    def write(self, address: str, content: bytes) -> None:
        """Write a small object."""
        self._retry(address, "written", lambda: _filesystem(address).pipe_file(_key(address), content))

    def create(self, address: str, content: bytes) -> bool:
        """Write a small object unless it exists, by a conditional write; return whether it now has this content."""

        def work() -> bool:
            try:
                _filesystem(address).pipe_file(_key(address), content, mode="create")
            except Exception:  # each library raises a different exception for an existing object
                with contextlib.suppress(FileNotFoundError):
                    return _filesystem(address).cat_file(_key(address)) == content  # an earlier attempt succeeded
                raise
            return True

        return self._retry(address, "written", work)

    def create_can_overwrite(self, address: str, content: bytes) -> bool:
        """Try to `create` the existing object with its current `content`; return whether the store replaced it."""
        try:
            _filesystem(address).pipe_file(_key(address), content, mode="create")
        except Exception:  # rejected, as expected, or the network failed
            return False
        return True

    def upload(self, path: Path, address: str) -> None:
        """Store the file `path` at `address`, in parts if it is large, and check the stored size."""
        size = path.stat().st_size

        def work() -> None:
            _filesystem(address).put_file(str(path), _key(address), **_multipart_options(address, size))
            stored = self._info(address).bytes
            if stored != size:
                raise OSError(f"{stored} bytes were stored instead of {size}")

        self._retry(address, "stored", work)

    def download(
        self,
        address: str,
        path: Path,
        expected: ListedObject,
        sha256: str = "",
        advance: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Fetch an object of `expected` size to `path`, atomically.

        An interrupted download continues where it stopped, even in another process. The content must have the given
        SHA-256; without one, the object must still have the `expected` tag afterwards. Raises `ContentError` if not.
        `advance` is called with the number of bytes of each chunk.
        """
        part = _part_file(path, expected, sha256)
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            for retries_left in (1, 0):
                self._append(address, part, expected.bytes, advance)
                if sha256_file(part) == sha256 if sha256 else getattr(self.info(address), "tag", "") == expected.tag:
                    break
                part.unlink()
                if not retries_left:
                    raise ContentError(
                        f"{address}: the content does not match its manifest or listing; it was changed or damaged. "
                        "Upload it again."
                    )
            if expected.modified:
                os.utime(part, (expected.modified, expected.modified))
            part.replace(path)
            fsync_folder(path.parent)

    def listing(self, address: str) -> dict[str, ListedObject]:
        """List all objects below `address`, by relative path; {} if there are none."""

        def work() -> dict[str, ListedObject]:
            system, prefix = _filesystem(address), _key(address)
            system.invalidate_cache()
            entries = system.find(prefix, detail=True)
            if not entries or not isinstance(entries, dict):  # for a single object, adlfs returns [its name]
                raise FileNotFoundError(address)
            folder = f"{prefix}/"
            return {
                name[len(folder) :]: _to_listed_object(info)
                for name, info in entries.items()
                if name.startswith(folder) and not name.endswith("/")
            }

        return self._or_default(address, "listed", work, {})

    def info(self, address: str) -> ListedObject | None:
        """Return size, tag and time of one object; None if it does not exist."""
        return self._or_default(address, "read", lambda: self._info(address), None)

    def delete(self, address: str) -> None:
        """Delete one object, if it exists."""
        self._or_default(address, "deleted", lambda: _filesystem(address).rm_file(_key(address)), None)

    def _info(self, address: str) -> ListedObject:
        system = _filesystem(address)
        system.invalidate_cache()
        info = system.info(_key(address))
        if info.get("type") == "directory":
            raise FileNotFoundError(address)
        return _to_listed_object(info)

    def _append(self, address: str, part: Path, size: int, advance: Callable[[int], object]) -> None:
        """Append the object's missing bytes to `part`, up to `size`."""
        with part.open("ab") as file:
            while (position := file.tell()) < size:
                advance(file.write(self.read_range(address, position, min(size, position + CHUNK_BYTES))))
            file.flush()
            os.fsync(file.fileno())

    def _or_default(self, address: str, action: str, work: Callable[[], T], default: T) -> T:
        """Return the result of `work`, or `default` if the object does not exist."""

        def work_or_default() -> T:
            try:
                return work()
            except FileNotFoundError as error:
                _raise_if_bucket_missing(address, error)
                return default

        return self._retry(address, action, work_or_default)

    def _retry(self, address: str, action: str, work: Callable[[], T]) -> T:
        """Return the result of `work`, retrying it if the network or the store fails."""
        start = failing_since = time.monotonic()
        wait = _FIRST_WAIT_SECONDS
        for attempt in itertools.count(1):
            try:
                result = work()
                _filesystem(address).has_responded = True
                return result
            except Exception as error:
                _raise_if_permanent(address, action, error)
                if not is_storage_error(error):
                    raise
                now = time.monotonic()
                failing_since = now if attempt == 1 else failing_since
                seconds_left = failing_since + self._retry_seconds - now
                if seconds_left <= 0 or _must_give_up(address, error):
                    raise MachineError(
                        f"{address}: cannot be {action}; {attempt} attempt{'s'[: attempt - 1]} in {now - start:.0f} s "
                        f"({_one_line(error)}). Check the network, HTTPS_PROXY and the object store, then run the "
                        "command again."
                    ) from error
                description = f"{address}: cannot be {action}: {_one_line(error)}"
                logger.warning("%s; retrying for %.0f s", description, seconds_left)
            time.sleep(min(seconds_left, wait * random.uniform(0.5, 1.0)))
            wait = min(_MAX_WAIT_SECONDS, 2 * wait)
        raise AssertionError("unreachable")


def bytes_to_fetch(path: Path, expected: ListedObject, sha256: str = "") -> int:
    """Return the number of bytes that `ObjectStore.download` with these arguments still has to fetch."""
    part = _part_file(path, expected, sha256)
    return expected.bytes - (part.stat().st_size if part.is_file() else 0)


def _part_file(path: Path, expected: ListedObject, sha256: str) -> Path:
    """Return the path of the partial file of a download."""
    tag = hashlib.sha256(f"{sha256 or expected.tag} {expected.bytes}".encode()).hexdigest()[:8]
    return path.with_name(f".{path.name}.{tag}.part")


def _filesystem(address: str) -> Any:
    """Return the fsspec file system of an address, cached per process and bucket."""
    scheme = scheme_of(address)
    try:
        return _open_filesystem(os.getpid(), "/".join(address.split("/")[:3]))
    except ImportError:
        raise AccessError(
            f"{address}: {scheme}:// needs a package that is not installed. Run: {install_command(_PACKAGES[scheme])}"
        ) from None


@functools.cache
def _open_filesystem(_process: int, bucket: str) -> Any:
    # Bypass fsspec's cache of file systems, which may keep one per thread (every save starts a thread), and its cache
    # of listings, which would hide files that other machines write.
    import fsspec

    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it would log tracebacks of errors that are retried here
    options = _OPTIONS.get(scheme_of(bucket), {})
    return fsspec.url_to_fs(bucket, use_listings_cache=False, skip_instance_cache=True, **options)[0]


def _multipart_options(address: str, size: int) -> dict[str, int]:
    """Return options to upload `size` bytes to S3 in separately retried parts; other clients choose the part size."""
    if scheme_of(address) != "s3":
        return {}
    return {"chunksize": max(S3_PART_BYTES, math.ceil(size / _S3_MAX_PARTS)), "max_concurrency": 4}


def _key(address: str) -> str:
    from fsspec.core import strip_protocol

    return strip_protocol(address)


def _to_listed_object(info: dict[str, Any]) -> ListedObject:
    """Convert the `info` dictionary of an object from s3fs, gcsfs, adlfs or huggingface_hub."""
    tag = next((str(info[key]) for key in ("ETag", "etag", "md5Hash", "content_md5", "blob_id") if info.get(key)), "")
    modified: Any = next((info[key] for key in ("LastModified", "last_modified", "mtime") if info.get(key)), None)
    tag = tag or str(modified)
    if hasattr(modified, "timestamp"):
        return ListedObject(int(info["size"] or 0), tag, modified.timestamp())
    # The Hub provides no times. One derived from the tag makes comparisons of (size, time) notice changed content.
    return ListedObject(int(info["size"] or 0), tag, float(int(hashlib.sha256(tag.encode()).hexdigest()[:7], 16)))


def _raise_if_bucket_missing(address: str, error: BaseException) -> None:
    """Raise `AccessError` if the error means that the bucket, or the repository on the Hub, does not exist."""
    names = {type(cause).__name__ for cause in _chain(error)}
    if message := next((text for name, text in _HUB_ERRORS.items() if name in names), ""):
        name = re.sub(r"hf://((datasets/|spaces/)?[^/]+/[^/@]+).*", r"\1", address)
        raise AccessError(f"hf://{name}: {message.format(page=f'{_filesystem(address).endpoint}/{name}')}") from None
    if _NO_BUCKET.search(str(error)):
        raise AccessError(f"{address}: {_one_line(error)}. Create the bucket, or correct its name.") from None
    if isinstance(error, FileNotFoundError) and _is_bucket_missing(address):
        raise AccessError(f"{address}: the bucket does not exist. Create the bucket, or correct its name.") from None


def _is_bucket_missing(address: str) -> bool:
    """Return whether the bucket is missing, for clients that raise the same error if only the object is."""
    system, bucket = _filesystem(address), _key(address).strip("/").partition("/")[0]
    try:
        if scheme_of(address) not in ("s3", "hf") and not getattr(system, "has_bucket", False):
            # gcsfs's `info` requires a permission that reading and writing objects does not.
            system.ls(bucket, max_results=1) if scheme_of(address) == "gs" else system.info(bucket)
            system.has_bucket = True
    except FileNotFoundError:
        return True
    except Exception:  # not permitted, or the network failed
        pass
    return False


def _raise_if_permanent(address: str, action: str, error: Exception) -> None:
    """Raise `InputError` for failures that no retry can fix."""
    _raise_if_bucket_missing(address, error)
    names = {type(x).__name__ for x in (error, error.__cause__) if x is not None}
    # Messages of gcsfs for status 403, and of adlfs for a wrong account name.
    is_denied = _status(error) in _DENIED_STATUS or re.match("Forbidden: |.*with credentials", str(error), re.DOTALL)
    if isinstance(error, PermissionError) or is_denied or names & _NO_CREDENTIALS:
        raise AccessError(
            f"{address}: cannot be {action}: {_one_line(error)}. Check the credentials and their permissions "
            f"({_CREDENTIALS[scheme_of(address)]})."
        ) from error
    if isinstance(error, FileNotFoundError):
        raise InputError(f"{address}: not found ({_one_line(error)}). Check the address.") from error


def _status(error: Exception) -> int:
    """Return the HTTP status of the response; 0 if there is none."""
    sources = (error, getattr(error, "response", None))
    values = (getattr(source, name, 0) for source in sources for name in ("status", "status_code", "code"))
    return next((value for value in values if isinstance(value, int) and value), 0)


def is_storage_error(error: BaseException) -> bool:
    """Return whether the network or the store may have caused an error, rather than a bug.

    True if the error is an `OSError`, or if its class or the raising code belongs to an installed library.
    """
    packages = {_package(base.__module__) for base in type(error).__mro__}
    if isinstance(error, (OSError, EOFError)) or packages - {*sys.stdlib_module_names, *_OUR_PACKAGES}:
        return True
    frames = [(_package(frame.f_globals["__name__"]), frame) for frame, _ in traceback.walk_tb(error.__traceback__)]
    last_frames = [(package, frame) for package, frame in frames if package not in sys.stdlib_module_names][-1:]
    return any(
        package not in _OUR_PACKAGES and not _LIBRARY_FOLDERS.isdisjoint(Path(frame.f_code.co_filename).parts)
        for package, frame in last_frames  # a list of at most one
    )


def _must_give_up(address: str, error: Exception) -> bool:
    """Return whether retries are useless: a client error or bad setup, or an unreachable store that never responded."""
    is_client_error = 400 <= _status(error) < 500 and _status(error) not in _RETRIED_STATUS
    if is_client_error or isinstance(error, (ValueError, TypeError, ImportError, LookupError, AttributeError)):
        return True
    never_responded = not getattr(_filesystem(address), "has_responded", False)
    return any(type(e).__name__ in _MISCONFIGURED or (never_responded and _is_unreachable(e)) for e in _chain(error))


def _is_unreachable(error: BaseException) -> bool:
    """Return whether a host name does not resolve, a connection is refused, or a proxy cannot connect."""
    cannot_connect = getattr(error, "errno", 0) in _UNREACHABLE or type(error).__name__ == "ProxyError"
    return cannot_connect or isinstance(error, socket.gaierror)


def _package(module: str) -> str:
    return module.partition(".")[0]


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _one_line(error: BaseException) -> str:
    text = " ".join((str(error) or type(error).__name__).split())
    return text.partition(" For more information check: ")[0].rstrip(".")  # httpx appends a link

"""Addresses of object stores, such as s3://bucket/runs/mini, and the local folder of each.

Data at an address is used through its local folder: it is fetched into that folder, or written there and then stored.
The local folder is in `~/.cache/bertrain`, or in BERTRAIN_CACHE (an environment variable). While a run trains, its
local folder is in BERTRAIN_RUNS, if that is set: all machines of the run must share it, but not the cache.
"""

import os
import re
from pathlib import Path

CACHE_VARIABLE, RUNS_VARIABLE = "BERTRAIN_CACHE", "BERTRAIN_RUNS"
SCHEMES = ("s3", "gs", "abfs", "az", "hf")
_READ_ONLY_SCHEMES = ("hf",)  # each write to the Hub is a commit, and the Hub limits the number of commits
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://(.*)", re.DOTALL)


def is_remote(location: Path | str) -> bool:
    """Return whether `location` is an address of an object store, not a path."""
    match = _ADDRESS.fullmatch(location) if isinstance(location, str) else None
    return match is not None and match[1] in SCHEMES


def scheme_of(address: str) -> str:
    """Return the scheme of an address, such as s3 for s3://bucket/run."""
    return address.partition("://")[0]


def check_address(address: str, *, for_writing: bool = False) -> None:
    """Raise `ValueError` unless `address` names a file or folder in a bucket, and is writable if `for_writing`."""
    scheme, _, rest = address.partition("://")
    parts = rest.rstrip("/").split("/")
    if len(parts) < 2 or not all(parts) or {".", ".."} & set(parts) or not rest.isprintable() or ":" in parts[0]:
        raise ValueError(
            f"{address!r} does not name a file or folder in a bucket. Use an address such as {scheme}://bucket/folder."
        )
    if for_writing and scheme in _READ_ONLY_SCHEMES:
        raise ValueError(f"{address!r} is read-only. Use a local path, or an address with s3://, gs:// or abfs://.")


def cache_folder() -> Path:
    """Return the folder that contains the local folders of all addresses."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/bertrain").expanduser().absolute()


def local_path(location: Path | str) -> Path:
    """Return the local folder or file of an address. A path is returned with ~ expanded."""
    return _path_below(cache_folder(), location)


def runs_folder() -> Path:
    """Return the folder that contains the local folders of runs at addresses while they train."""
    return Path(os.environ.get(RUNS_VARIABLE) or cache_folder()).expanduser().absolute()


def local_run(location: Path | str) -> Path:
    """Return the local folder in which the run at an address trains. A path is returned with ~ expanded."""
    return _path_below(runs_folder(), location)


def display_path(path: Path | str) -> str:
    """Return the address whose local copy is `path`, or `path` itself if it is not a local copy."""
    try:
        scheme, *parts = Path(path).relative_to(cache_folder()).parts
    except ValueError:
        return str(path)
    return f"{scheme}://{'/'.join(parts)}" if scheme in SCHEMES and parts else str(path)


def _path_below(folder: Path, location: Path | str) -> Path:
    if not is_remote(location):
        return Path(location).expanduser()
    scheme, _, rest = str(location).partition("://")
    return folder / scheme / rest.rstrip("/")


def hub_hint(name: Path | str) -> str:
    """Return a question to append to the error about the missing folder `name`; "" unless it looks like a Hub model."""
    is_hub_name = _HUB_NAME.fullmatch(str(name)) and not Path(name).parent.exists()
    return f" Did you mean hf://{name}?" if is_hub_name else ""


def join(address: str, *names: str) -> str:
    """Return `address` extended by the path components `names`."""
    return "/".join((address.rstrip("/"), *names))

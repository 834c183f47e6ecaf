"""Arguments of command lines that name what is stored: runs that are read, targets that are written."""

from __future__ import annotations

from pathlib import Path

from pretrain.common.addresses import is_remote, local
from pretrain.common.commands import run_argument


def run_path(text: str) -> Path:
    """An argument that is a run folder or model, the name of a run (`find_run`), or an address, which is fetched.

    Raises `InputError` if nothing is stored at the address.
    """
    from pretrain.storage.runs import fetched_model

    given = run_argument(text)
    return given if isinstance(given, Path) else fetched_model(given)


def store_target(target: Path | str) -> None:
    """Store what was written to the local folder of `target`, a `target_path`, if that is an address."""
    from pretrain.storage.folders import store

    if is_remote(target):
        store(local(target), str(target))

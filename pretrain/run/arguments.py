"""Command-line arguments that name a run to read or a target to write: a path, or an address (object store URL)."""

import argparse
from pathlib import Path
from typing import Any

from pretrain.common.addresses import is_remote, local_path
from pretrain.common.commands import location_help, run_argument


def add_run(parser: argparse.ArgumentParser, name: str, content: str) -> None:
    """Add the positional argument `name`, a folder or address; `content` tells in the help what it contains."""
    parser.add_argument(name, type=run_path, metavar=name.upper(), help=location_help(content))


def run_path(run: Any) -> Path:
    """Return the folder of a run or model, in any form that `run_argument` accepts; fetch it if it is at an address.

    Raises `InputError` if nothing is stored at the address.
    """
    from pretrain.storage.runs import fetched_model

    location = run_argument(run)
    return location if isinstance(location, Path) else fetched_model(location)


def store_target(target: Path | str) -> None:
    """If `target` (a result of `target_path`) is an address, upload its local folder there."""
    from pretrain.storage.folders import store

    if is_remote(target):
        store(local_path(target), str(target))

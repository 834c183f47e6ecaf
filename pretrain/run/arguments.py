"""Command-line arguments for the runs to read and the targets to write: paths or addresses."""

import argparse
from pathlib import Path
from typing import Any

from pretrain.common.addresses import is_remote, local_path
from pretrain.common.commands import location_help, run_argument


def add_run(parser: argparse.ArgumentParser, name: str, content: str) -> None:
    """Add the positional `name`, a folder or address of `content`."""
    parser.add_argument(name, type=run_path, metavar=name.upper(), help=location_help(content))


def run_path(run: Any) -> Path:
    """Return the folder of a run or model, in any form that `run_argument` accepts; fetch it if it is at an address.

    Raises `InputError` if nothing is stored at the address.
    """
    from pretrain.storage.runs import fetched_model

    location = run_argument(run)
    return location if isinstance(location, Path) else fetched_model(location)


def store_target(target: Path | str) -> None:
    """Upload the local folder of `target`, a `target_path`, if that is an address."""
    from pretrain.storage.folders import store

    if is_remote(target):
        store(local_path(target), str(target))

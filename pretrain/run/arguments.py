"""Arguments of command lines that name what is stored: runs that are read, targets that are written."""

import argparse
from pathlib import Path
from typing import Any

from pretrain.common.addresses import is_remote, local
from pretrain.common.commands import at, run_argument


def add_run(parser: argparse.ArgumentParser, name: str, what: str) -> None:
    """Add the positional `name`, a folder or address of `what`."""
    parser.add_argument(name, type=run_path, metavar=name.upper(), help=at(what))


def run_path(given: Any) -> Path:
    """The folder of a run or model, as `run_argument` takes it; one at an address is fetched.

    Raises `InputError` if nothing is stored at the address.
    """
    from pretrain.storage.runs import fetched_model

    place = run_argument(given)
    return place if isinstance(place, Path) else fetched_model(place)


def store_target(target: Path | str) -> None:
    """Store what was written to the local folder of `target`, a `target_path`, if that is an address."""
    from pretrain.storage.folders import store

    if is_remote(target):
        store(local(target), str(target))

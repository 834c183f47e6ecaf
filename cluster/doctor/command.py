"""The command `doctor`. It imports what it needs when it runs."""

import argparse
import functools
from typing import Any

from pretrain.common.commands import add_address, add_command, local_path


def add_to(commands: Any, measures: str) -> None:
    """Add `doctor` to the subcommands of a parser; `measures` as `check.check`."""
    parser = add_command(
        commands,
        "doctor",
        functools.partial(_doctor, measures),
        "check this machine or a cluster, and say how to fix what is missing",
        """
  ./launch.sh doctor
  ./launch.sh doctor --cluster
  ./launch.sh doctor --address http://127.0.0.1:8265 --dir /mnt/shared/bert""",
    )
    add_address(parser, "check the cluster with this dashboard URL")
    parser.add_argument("--cluster", action="store_true", help="check the cluster that `up` started here")
    parser.add_argument(
        "--dir",
        type=local_path,
        metavar="DIR",
        help="folder that all machines of the cluster should share (default: the current directory)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _doctor(measures: str, arguments: argparse.Namespace) -> int:
    from cluster.doctor.check import check

    return check(
        measures,
        cluster=arguments.cluster or bool(arguments.address),
        address=arguments.address,
        folder=arguments.dir,
        as_json=arguments.json,
        plain_http=arguments.allow_plain_http,
    )

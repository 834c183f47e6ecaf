"""The command `doctor`. Its imports are deferred until it runs."""

import argparse
import functools
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pretrain.common.commands import add_address, add_command, check_effects, parse_path
from pretrain.common.errors import MachineError


def add_to(commands: Any, measurement_module: str) -> None:
    """Add `doctor` to the subcommands of a parser. `machine.check` explains `measurement_module`."""
    parser = add_command(
        commands,
        "doctor",
        functools.partial(_doctor, measurement_module),
        "check this machine or a cluster, and say what to fix",
        """
  ./launch.sh doctor
  ./launch.sh doctor --cluster
  ./launch.sh doctor --address http://127.0.0.1:8265 --dir /mnt/shared/bert""",
    )
    add_address(parser, "check the cluster with this dashboard URL")
    parser.add_argument("--cluster", action="store_true", help="check the cluster of `up` on this machine")
    parser.add_argument(
        "--dir",
        type=parse_path,
        metavar="DIR",
        help="folder that all machines of the cluster should share (default: the current directory)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _doctor(measurement_module: str, arguments: argparse.Namespace) -> int:
    """Print the findings. Return the exit code of `MachineError` if a check fails, else 0."""
    from rich.console import Console
    from rich.markup import escape

    from cluster.doctor import machine, remote, rows
    from cluster.workers.address import redact_credentials

    address, folder = arguments.address, arguments.dir or Path.cwd()
    check_effects({"--cluster": (arguments.cluster, not address, "with --address")})
    on_cluster = arguments.cluster or bool(address)
    target = f"the cluster {redact_credentials(address)}".rstrip() if on_cluster else "this machine"
    with Console(stderr=True).status(escape(f"checking {target}")):
        findings = (
            remote.check(measurement_module, address, folder, plain_http=arguments.allow_plain_http)
            if on_cluster
            else machine.check(measurement_module, folder)
        )
    counts = Counter(row.mark for row in findings)
    if arguments.json:
        print(json.dumps([asdict(row) for row in findings], indent=2, ensure_ascii=False))
    else:
        rows.show(findings, Console())
        print(", ".join(f"{counts[mark]} {mark}" for mark in (rows.PASS, rows.WARN, rows.FAIL)))
    return MachineError.exit_code if counts[rows.FAIL] else 0

"""The command line of `demo`. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from pretrain.common.commands import WORKERS_DEFAULT, add_command, add_set, add_workers, check_effects, parse_path

_EXAMPLES = """
  ./launch.sh demo
  ./launch.sh demo --minutes 20 --fresh
  ./launch.sh demo --set phases.0.steps=500 --run-dir runs/short-demo"""


def add_to(commands: Any) -> None:
    """Add `demo` to the subcommands of a parser."""
    purpose = "run the whole pipeline on installed packages' docstrings"
    parser = add_command(commands, "demo", _run, purpose, _EXAMPLES)
    add_workers(parser, WORKERS_DEFAULT)
    path_options: dict[str, Any] = {"type": parse_path, "metavar": "DIR"}
    parser.add_argument("--run-dir", default="runs/demo", help="run folder (default: runs/demo)", **path_options)
    parser.add_argument("--data-dir", default="data/demo", help="corpus folder (default: data/demo)", **path_options)
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="pretrain for about M minutes (default: 6); a few timed steps determine the number of steps. 0 uses the "
        "number in tiny.yaml",
    )
    parser.add_argument("--fresh", action="store_true", help="delete an earlier demo run first, but keep its corpus")
    add_set(parser, "override a setting of tiny.yaml; may be repeated")


def _run(arguments: argparse.Namespace) -> None:
    from finetune.workflows.demo import stages

    sets_steps = any(setting.startswith("phases.0.steps=") for setting in arguments.set)
    check_effects({"--minutes": (arguments.minutes, not sets_steps, "with --set phases.0.steps")})
    stages.run(arguments)

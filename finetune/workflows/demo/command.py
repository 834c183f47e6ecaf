"""The command line of `demo`. Imports nothing heavy."""

from __future__ import annotations

import argparse
from typing import Any

from pretrain.common.commands import USUAL_WORKERS, add_command, add_set, add_workers, check_effects, local_path

_EXAMPLES = """
  ./launch.sh demo
  ./launch.sh demo --quick
  ./launch.sh demo --minutes 20 --fresh
  ./launch.sh demo --set phases.0.steps=500 --run-dir runs/short-demo"""


def add_to(commands: Any) -> None:
    """Add `demo` to the subcommands of a parser."""
    purpose = "run every stage on the docstrings of this Python"
    parser = add_command(commands, "demo", _run, purpose, _EXAMPLES)
    add_workers(parser, USUAL_WORKERS)
    parser.add_argument(
        "--run-dir",
        type=local_path,
        metavar="DIR",
        help="run folder (default: runs/demo, with --quick runs/demo-quick)",
    )
    parser.add_argument(
        "--data-dir",
        type=local_path,
        metavar="DIR",
        help="corpus folder (default: data/demo, with --quick data/demo-quick)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="time for pretraining; a few timed steps determine the number of steps (default: 6, with --quick a fixed "
        "number of steps); 0 trains the steps of tiny.yaml, as does --set phases.0.steps",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a first look: the text of the standard library, 160 steps of pretraining, one task",
    )
    parser.add_argument("--fresh", action="store_true", help="delete an earlier demo run first; its corpus is kept")
    add_set(parser, "override a setting of tiny.yaml; may be repeated")


def _run(arguments: argparse.Namespace) -> None:
    from finetune.workflows.demo import stages

    sets_steps = any(setting.startswith("phases.0.steps=") for setting in arguments.set)
    check_effects({"--minutes": (arguments.minutes, not sets_steps, "with --set phases.0.steps")})
    stages.run(arguments)

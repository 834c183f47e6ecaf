"""The command line of `demo`. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path

from pretrain.common.commands import USUAL_WORKERS, add_set, add_workers, local_path, usual_workers

EXAMPLES = """
  ./launch.sh demo
  ./launch.sh demo --quick
  ./launch.sh demo --minutes 20 --fresh
  ./launch.sh demo --set phases.0.steps=500 --run-dir runs/short-demo"""

CONFIG = "tiny"
_MINUTES = 6.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options."""
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
        help="time for pretraining: a few steps are timed, and as many are trained as fit "
        f"(default: {_MINUTES:g}, with --quick a fixed number of steps); "
        f"0 trains the steps of {CONFIG}.yaml, as does --set phases.0.steps",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a first look: the text of the standard library, 160 steps of pretraining, one task",
    )
    parser.add_argument("--fresh", action="store_true", help="delete an earlier demo run first; its corpus is kept")
    add_set(parser, f"override a setting of {CONFIG}.yaml; may be repeated")


def fill_in(arguments: argparse.Namespace) -> None:
    """Fill in what depends on --quick and was not given."""
    name = "demo-quick" if arguments.quick else "demo"
    arguments.run_dir = arguments.run_dir or Path("runs", name)
    arguments.data_dir = arguments.data_dir or Path("data", name)
    if arguments.minutes is None:
        arguments.minutes = 0.0 if arguments.quick else _MINUTES
    if arguments.workers is None:
        arguments.workers = 1 if arguments.quick else usual_workers()

"""The pretraining command line: python -m pretrain COMMAND. A command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrain.common.commands import add_command, exit_code, make_parser, run_command
from pretrain.common.examples import listing, text_of
from pretrain.reporting import command as reporting
from pretrain.run import command as run


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: run_command(build_parser(), given))


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command, for the command line and the command reference."""
    return make_parser(
        "Pretrain BERT-style encoders, from raw text to a checkpoint that transformers loads.", (add_to,)
    )


def add_to(commands: Any) -> None:
    """Add every command to the subcommands of a parser."""
    _add_configs(commands)
    run.add_to(commands)
    reporting.add_to(commands, _find_job)


def _add_configs(commands: Any) -> None:
    parser = add_command(
        commands,
        "configs",
        _configs,
        "list the example configs, or print one",
        """
  ./launch.sh configs
  ./launch.sh configs mini > my.yaml      # a copy to edit
  ./launch.sh pretrain mini --dry-run     # commands take the names as well""",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="config to print")


def _configs(arguments: argparse.Namespace) -> None:
    print(text_of(arguments.name) if arguments.name else listing(), end="" if arguments.name else "\n")


def _find_job(*given: Any, **options: Any) -> Path | None:
    from cluster.jobs.client import run_folder

    return run_folder(*given, **options)


if __name__ == "__main__":
    sys.exit(main())

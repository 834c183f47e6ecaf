"""The pretraining command line: python -m pretrain COMMAND. A command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.common.commands import exit_code, make_parser, run_command
from pretrain.reporting import command as reporting
from pretrain.run import command as run

if TYPE_CHECKING:
    from cluster.jobs.submission import Kind


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: run_command(build_parser(), given))


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command, for the command line and the command reference."""
    return make_parser(
        "Pretrain BERT-style encoders, from raw text to a checkpoint that transformers loads.",
        (run.add_to, lambda commands: reporting.add_to(commands, _find_job)),
    )


def job_kinds() -> dict[str, Kind]:
    """What a cluster's job can run of these commands, by name."""
    from cluster.jobs.submission import Kind

    module = "pretrain.__main__"
    return {"pretrain": Kind(run.load, module), "prepare": Kind(run.load, module, trains=False)}


def _find_job(*given: Any, **options: Any) -> Path | None:
    from cluster.jobs.client import run_folder

    return run_folder(*given, **options)


if __name__ == "__main__":
    sys.exit(main())

"""The console command `bertrain`: runs each command with the command line of its package.

A command line is imported when one of its commands runs.
"""

from __future__ import annotations

import argparse
import functools
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.common.commands import EXIT_CODES, exit_code, make_parser, program, run_command
from pretrain.common.files import find_run
from pretrain.common.kinds import did_you_mean

if TYPE_CHECKING:
    from cluster.jobs.submission import Kind

# launch.sh prints this file too, before there is a Python to run.
COMMANDS_FILE = Path(__file__).with_name("commands.txt")

MEASURES = "pretrain.run.machine"  # what `doctor` measures with, on every node
_PRETRAIN = ("configs", "prepare", "pretrain", "report", "dashboard", "attention")
_FINETUNE = ("demo", "adapt", "finetune", "evaluate", "predict", "sweep", "glue", "evaluate-pretrained")
_CLUSTER = ("doctor", "manifest", "submit", "status", "logs", "list", "stop", "delete", "up", "down")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    package = package_of(words)
    if not package:
        nearest = did_you_mean(words[0], commands())
        advice = f"{nearest} {program()} --help lists them.".lstrip()
        print(f"error: {words[0]!r} is not a command; {advice}", file=sys.stderr)
        return 2
    return _MAINS[package](words)


def usage() -> str:
    """The text of --help."""
    return (
        f"usage: {program()} COMMAND [arguments]\n\n{COMMANDS_FILE.read_text(encoding='utf-8')}\n"
        f"{program()} COMMAND --help describes a command and its arguments.\n{textwrap.fill(EXIT_CODES, 90)}"
    )


def commands() -> list[str]:
    """The names of all commands."""
    lines = COMMANDS_FILE.read_text(encoding="utf-8").splitlines()
    return [line.split()[0] for line in lines if line.startswith("  ")]


def package_of(words: Sequence[str]) -> str:
    """The package whose command line runs `words`: pretrain, finetune or cluster; "" if it is not a command."""
    command, *rest = words
    if command == "export":
        return "finetune" if _exports_finetuned(rest) else "pretrain"
    packages = {"pretrain": _PRETRAIN, "finetune": _FINETUNE, "cluster": _CLUSTER}
    return next((package for package, members in packages.items() if command in members), "")


def _exports_finetuned(words: Sequence[str]) -> bool:
    """Whether the first argument of `export` that is neither an option nor its value is a fine-tuned model."""
    run = next(
        (
            word
            for before, word in zip(["", *words], words, strict=False)
            if not word.startswith("-") and before != "--checkpoint"
        ),
        None,
    )
    files = ("finetune.json", "model/finetune.json")
    return run is not None and any((find_run(run) / name).is_file() for name in files)


# ---------------------------------------------------------------- the command line of each package


def _pretrain(words: Sequence[str]) -> int:
    from pretrain.__main__ import main

    return main(words)


def _finetune(words: Sequence[str]) -> int:
    from finetune.__main__ import main

    return main(words)


def _cluster(words: Sequence[str]) -> int:
    return exit_code(lambda: run_command(cluster_parser(), words))


_MAINS = {"pretrain": _pretrain, "finetune": _finetune, "cluster": _cluster}


def cluster_parser() -> argparse.ArgumentParser:
    """The parser of the commands for clusters, which are handed what they need to know of runs."""
    from cluster.doctor import command as doctor
    from cluster.jobs import command as jobs
    from cluster.manifests import command as manifests

    def config_type(path: Path) -> type[Any]:
        from finetune.training.config import config_type

        return config_type(path)

    return make_parser(
        "Check a machine or a cluster, submit jobs, or start a cluster on this machine.",
        (
            lambda commands: jobs.add_to(commands, job_kinds),
            lambda commands: manifests.add_to(commands, config_type),
            lambda commands: doctor.add_to(commands, MEASURES),
        ),
    )


def job_kinds() -> Mapping[str, Kind]:
    """What `submit` runs, by name."""
    from cluster.jobs.submission import Kind
    from finetune.training import api as finetuning
    from pretrain.run import api

    # A checkpoint in start_from is the cluster's to read.
    load = functools.partial(api.load_config, imports=True)
    return {
        "pretrain": Kind(load, f"{api.__name__}:train"),
        "prepare": Kind(load, f"{api.__name__}:prepare", trains=False),
        "finetune": Kind(finetuning.read_config, f"{finetuning.__name__}:train"),
    }


if __name__ == "__main__":
    sys.exit(main())

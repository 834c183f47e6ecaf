"""The console command `bertrain`: runs each command with the command line of its package.

A command line is imported when one of its commands runs.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from pretrain.common.commands import EXIT_CODES, program
from pretrain.common.files import find_run
from pretrain.common.kinds import did_you_mean

# launch.sh prints this file too, before there is a Python to run.
COMMANDS_FILE = Path(__file__).with_name("commands.txt")

_PRETRAIN = ("prepare", "pretrain", "report", "dashboard", "attention")
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
    return importlib.import_module(f"{package}.__main__").main(words)


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


if __name__ == "__main__":
    sys.exit(main())

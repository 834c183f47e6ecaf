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

from pretrain.common.commands import EXIT_CODES, add_command, exit_code, make_parser, program, run_command
from pretrain.common.files import find_run
from pretrain.common.kinds import did_you_mean

if TYPE_CHECKING:
    from cluster.jobs.submission import Kind

# launch.sh prints this file too, before there is a Python to run.
COMMANDS_FILE = Path(__file__).with_name("commands.txt")

MEASURES = "pretrain.run.machine"  # what `doctor` measures with, on every node
_PRETRAIN = ("configs", "prepare", "pretrain", "report", "dashboard", "attention")
_FINETUNE = ("demo", "adapt", "finetune", "evaluate", "predict", "sweep", "glue", "evaluate-pretrained")
_CLUSTER = ("completion", "doctor", "manifest", "submit", "status", "logs", "list", "stop", "delete", "up", "down")


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
    if package == "cluster":
        return exit_code(lambda: run_command(cluster_parser(), words))
    if package == "pretrain":
        from pretrain.__main__ import main as run
    else:
        from finetune.__main__ import main as run
    return run(words)


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


def cluster_parser() -> argparse.ArgumentParser:
    """The parser of the commands for clusters, and of the one that completes all commands."""
    purpose = "Check a machine or a cluster, submit jobs, or start a cluster on this machine."
    return make_parser(purpose, (_add_cluster, _add_completion))


def _add_completion(commands: Any) -> None:
    parser = add_command(
        commands,
        "completion",
        _completion,
        "print what makes a shell complete commands and options",
        """
  ./launch.sh completion bash >> ~/.bashrc
  ./launch.sh completion zsh > "${fpath[1]}/_bertrain"

They complete the console command bertrain, in a new shell.""",
    )
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh")


def _completion(arguments: argparse.Namespace) -> None:
    import shtab

    from finetune.__main__ import add_to as add_finetune
    from pretrain.__main__ import add_to as add_pretrain

    def add_all(commands: Any) -> None:
        add_pretrain(commands)
        commands.choices["export"].add_argument("--onnx", action="store_true", help="also write model.onnx")
        for add in (add_finetune, _add_cluster, _add_completion):
            add(commands)

    parser = make_parser("", (add_all,))
    parser.prog = "bertrain"
    print(shtab.complete(parser, arguments.shell))


def _add_cluster(commands: Any) -> None:
    """The commands for clusters, which are handed what they need to know of runs."""
    from cluster.doctor import command as doctor
    from cluster.jobs import command as jobs
    from cluster.manifests import command as manifests

    def config_type(path: Path) -> type[Any]:
        from finetune.training.config import config_type

        return config_type(path)

    jobs.add_to(commands, job_kinds)
    manifests.add_to(commands, config_type)
    doctor.add_to(commands, MEASURES)


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

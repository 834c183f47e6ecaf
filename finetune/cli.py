"""The command line `bertrain`: one parser, to which each component adds its commands.

Building the parser imports no large library: a command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import finetune

try:
    finetune.check_not_shadowed()
except ImportError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)

from cluster.doctor import command as doctor
from cluster.jobs import command as jobs
from cluster.manifests import command as manifests
from finetune.artifacts import command as artifacts
from finetune.experiments import command as experiments
from finetune.scores import options as scores
from finetune.workflows.adaptation import command as adaptation
from finetune.workflows.demo import command as demo
from pretrain.common.commands import EXIT_CODES, Parser, add_command, program, run_command, run_for_exit_code
from pretrain.common.errors import InputError
from pretrain.common.examples import listing, text_of
from pretrain.common.wording import did_you_mean, for_terminal
from pretrain.reporting import command as reporting
from pretrain.run import command as run

MEASUREMENT_MODULE = "pretrain.run.machine"  # `doctor` runs its measurements on every node
# {heading: commands} in the order of --help and docs/reference.
GROUPS = {
    "Start here": ("demo", "configs", "completion", "doctor"),
    "Pretrain": ("prepare", "pretrain", "adapt", "report", "attention"),
    "Fine-tune": ("finetune", "evaluate", "predict", "sweep", "evaluate-pretrained", "export"),
    "Run on a cluster": ("submit", "list", "status", "logs", "stop", "delete", "manifest", "up"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    return run_for_exit_code(lambda: _run(list(sys.argv[1:] if argv is None else argv)), ends_process=argv is None)


def _run(arguments: list[str]) -> int:
    if arguments == ["job"] and "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:  # on the cluster, started by `submit`
        from cluster.jobs import entrypoint

        entrypoint.run(job_functions)
        return 0
    if arguments[:1] in ([], ["help"]):
        arguments = [*(word for word in arguments[1:2] if word != "help"), "--help"]
    command = arguments[0]
    parser, parsers = build_parsers()
    if command == "--version":
        from importlib.metadata import version

        print("bertrain", version("bertrain"))
        return 0
    if command not in (*parsers, "-h", "--help"):
        advice = f"{did_you_mean(command, parsers)} {program()} --help lists them.".lstrip()
        raise InputError(f"{command!r} is not a command; {advice}")
    return run_command(parser, arguments)


def build_parsers(
    parser_type: type[Parser] = Parser, commands_help: str | None = argparse.SUPPRESS
) -> tuple[Parser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser and {command: its parser}; `commands_help` is argparse's `help` for the list of commands."""
    parser = parser_type(
        prog=program(),
        usage="%(prog)s COMMAND [arguments]",
        epilog=f"{program()} help COMMAND describes a command and its arguments.\n{textwrap.fill(EXIT_CODES, 80)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(prog=program(), metavar="COMMAND", help=commands_help)
    for component in (demo, run, adaptation, artifacts, experiments, scores):
        component.add_to(commands)
    reporting.add_to(commands, find_job_folder)
    jobs.add_to(commands, job_functions)
    manifests.add_to(commands, _config_type)
    doctor.add_to(commands, MEASUREMENT_MODULE)
    _add_configs(commands)
    _add_completion(commands)
    parser.description = overview(commands.choices)
    return parser, commands.choices


def overview(parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Return the text that lists all commands in groups, one per line."""
    lines = []
    for title, names in GROUPS.items():
        lines += ["", f"{title}:"]
        purposes = {name: str(parsers[name].description) for name in names}
        lines += [f"  {name:19}  {purpose[0].lower()}{purpose[1:-1]}" for name, purpose in purposes.items()]
    return "\n".join(lines[1:])


# ---------------------------------------------------------------- configs, completion


def _add_configs(commands: Any) -> None:
    parser = add_command(
        commands,
        "configs",
        lambda options: print(text_of(options.example) if options.example else f"{for_terminal(listing())}\n", end=""),
        "list the example configs, or print one",
        """
  ./launch.sh configs
  ./launch.sh configs mini > my.yaml      # a copy to edit
  ./launch.sh pretrain mini --dry-run     # commands accept these names""",
    )
    parser.add_argument("example", nargs="?", metavar="NAME", help="config to print")


def _add_completion(commands: Any) -> None:
    parser = add_command(
        commands,
        "completion",
        _completion,
        "print a script for completion in bash or zsh",
        """
  ./launch.sh completion bash >> ~/.bashrc
  ./launch.sh completion zsh >> ~/.zshrc
  source <(./launch.sh completion bash)     # for this shell only; the same for zsh

The script completes the arguments of bertrain and ./launch.sh, including files, runs and example configs.""",
    )
    parser.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="bash or zsh")


def _completion(arguments: argparse.Namespace) -> None:
    from finetune.completion import CompletionParser, script

    print(script(build_parsers(CompletionParser, commands_help=None)[0], arguments.shell))


# ---------------------------------------------------------------- functions that connect components


def job_functions() -> Mapping[str, Callable[..., Any]]:
    """Return the functions that a job can run, by command."""
    from finetune.training import api as finetuning
    from pretrain.run import api

    return {"pretrain": api.train, "prepare": api.prepare, "finetune": finetuning.train}


def _config_type(path: Path) -> type[Any]:
    from finetune.training.config import config_type

    return config_type(path)


def find_job_folder(*arguments: Any, **options: Any) -> Path | None:
    """Call `cluster.jobs.client.run_folder`, which returns the run folder of a job on a cluster."""
    from cluster.jobs.client import run_folder

    return run_folder(*arguments, **options)


if __name__ == "__main__":
    sys.exit(main())

"""What every command line of the house is made of. Nothing heavy is imported until a command needs it."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.common.errors import DivergedError, InputError, RunError, StoppedError, printable
from pretrain.common.files import check_local

if TYPE_CHECKING:
    from pretrain.config import RunConfig


def exit_code(run: Callable[[], int | None]) -> int:
    """What `run` returns; a `RunError` is told in a line and gives its code, a bug keeps its traceback."""
    try:
        return run() or 0
    except RunError as error:
        for line in str(error).split("\n"):
            print(f"error: {printable(line)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Options may stand before an optional positional, as in `evaluate RUN --precision fp32 FILE`.

    argparse gives such a positional its default as soon as the one before it is read.
    """

    _is_inside = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        if self._is_inside or all(action.nargs != "?" for action in self._get_positional_actions()):
            return super().parse_known_args(args, namespace)
        self._is_inside = True  # what follows comes back here
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_inside = False


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    return _Parser(
        prog=prog,
        description=description,
        epilog="Exit codes: 0 done, 2 your input, 3 the machine or cluster is not fit, 4 training diverged, "
        "75 stopped but resumable, 130 interrupted.",
        allow_abbrev=False,
    )


def add_command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], Any], purpose: str, examples: str
) -> argparse.ArgumentParser:
    """A command with its examples; `function` gets what was given to it."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=f"examples:{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=function)
    return parser


def local_text(text: str) -> str:
    """An argument that may be a path: `InputError` where it is a remote address."""
    try:
        check_local(text)
    except ValueError as error:
        raise InputError(f"{error}") from None
    return text


def local_path(text: str) -> Path:
    """An argument that is a path of this machine; `InputError` where it is a remote address."""
    return Path(local_text(text))


def is_alone(config: RunConfig, no_ray: bool) -> bool:
    """Whether this process trains, alone or as one of torchrun's; `InputError` where it cannot."""
    if no_ray and config.scheduling.workers > 1:
        raise InputError(
            f"--no-ray: trains in one process, but scheduling.workers is {config.scheduling.workers}. "
            "Add --workers 1, or start several processes with torchrun."
        )
    return no_ray or "RANK" in os.environ


def is_follower() -> bool:
    """Whether this is a process of torchrun's whose first one checks and speaks for all."""
    return os.environ.get("RANK", "0") != "0"


def train(target: str, config: RunConfig, resume: bool, steps: int, *, alone: bool) -> None:
    """Train to the end: call `target` ("package.module:function") here, or in workers that Ray starts and restarts.

    `steps` is for the live line on the terminal.
    """
    from pretrain.tracking.live import follow
    from pretrain.tracking.records import note_end

    if is_follower():
        return _start(target, config, resume, alone=alone)
    try:
        with follow(config.folder, steps):
            _start(target, config, resume, alone=alone)
    except (StoppedError, DivergedError) as error:
        note_end(config.folder, "stop" if isinstance(error, StoppedError) else "diverged", str(error))
        raise


def _start(target: str, config: RunConfig, resume: bool, *, alone: bool) -> None:
    payload = {"config": config.model_dump(mode="json"), "resume": resume}
    if alone:
        from pretrain.common.worker import Worker

        module, function = target.split(":")
        getattr(importlib.import_module(module), function)(payload, Worker.from_environment())
        return
    from cluster.workers.launch import run

    scheduling = config.scheduling
    run(
        target,
        payload,
        name=config.name,
        run_dir=config.folder,
        workers=scheduling.workers,
        cpus_per_worker=scheduling.cpus_per_worker,
        address=scheduling.address,
        max_failures=scheduling.max_failures,
        min_workers=scheduling.min_workers,
        wait_for_nodes_seconds=scheduling.wait_for_nodes_seconds,
    )

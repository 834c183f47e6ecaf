"""Code that all command lines of the project share. Imports no large packages."""

from __future__ import annotations

import argparse
import os
import re
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from pretrain.common.addresses import check_address, is_remote
from pretrain.common.errors import InputError, NothingSavedError, RunError, StoppedError, print_error
from pretrain.common.examples import config_path
from pretrain.common.files import check_local, find_run
from pretrain.common.packages import convert_import_errors
from pretrain.common.wording import did_you_mean
from pretrain.common.worker import torchrun_rank

LAUNCHER = "./launch.sh"
EXIT_CODES = (
    "Exit codes: 0 success, 1 a check found a difference, or a bug with its traceback, 2 invalid input, "
    "3 unsuitable machine or cluster, 4 training diverged, 75 stopped and resumable, 130 interrupted."
)

# Set when this process starts to compile: on exit, torch would wait up to five minutes for compilations.
compilation_started = threading.Event()

# Commands with --import. They read recorded configs, whose custom modules are imported only with this option.
_IMPORT_COMMANDS = ("prepare", "pretrain", "adapt", "export", "report", "attention")
_IMPORT_COMMANDS += ("finetune", "sweep", "evaluate", "predict", "evaluate-pretrained")


def program() -> str:
    """Return what the user types before a command: `bertrain`, or ./launch.sh in a clone.

    launch.sh also runs the console command, and sets BERTRAIN_PROGRAM to its name.
    """
    script = Path(sys.argv[0]).name if sys.argv else ""
    is_clone = Path(__file__).parents[2].joinpath(LAUNCHER).is_file()
    default = LAUNCHER if is_clone and script != "bertrain" else "bertrain"
    return os.environ.get("BERTRAIN_PROGRAM") or default


def run_for_exit_code(run: Callable[[], int | None], *, ends_process: bool = False) -> int:
    """Call `run` and return its exit code (0 for None). With `ends_process`, the caller exits with this code.

    A `RunError` is printed as `error: ...` and determines the exit code. A bug keeps its traceback. If the reader of
    the output exits, as `head` does, the command exits silently with the code of SIGPIPE. SIGTERM acts like Ctrl-C.

    If one of several processes under torchrun fails, it exits immediately (see `_has_nccl_group`), and so does a
    process that is stopped while it compiles.
    """
    try:
        code = _run_for_exit_code(run)
    except Exception:
        if not _has_nccl_group():
            raise
        traceback.print_exc()
        code = 1
    stopped = code in (StoppedError.exit_code, NothingSavedError.exit_code)
    if code and (_has_nccl_group() or (ends_process and stopped and compilation_started.is_set())):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _has_nccl_group() -> bool:
    """Return whether an NCCL process group exists, since the interpreter's exit would then wait for other ranks."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized() and distributed.get_backend() == "nccl"


def _run_for_exit_code(run: Callable[[], int | None]) -> int:
    previous = signal.getsignal(signal.SIGTERM)
    handles_sigterm = previous == signal.SIG_DFL and threading.current_thread() is threading.main_thread()
    try:
        if handles_sigterm:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        code = run() or 0
        sys.stdout.flush()
        return code
    except RunError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print_error("interrupted")
        return 130
    except BrokenPipeError:
        if not _reader_exited():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 128 + signal.SIGPIPE
    finally:
        if handles_sigterm:
            signal.signal(signal.SIGTERM, previous)


def _reader_exited() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), select.POLLOUT)
    return any(event & select.POLLERR for _, event in poll.poll(0))


# ---------------------------------------------------------------- parsers


class Parser(argparse.ArgumentParser):
    """Accepts options between positional arguments (`evaluate RUN --precision fp32 FILE`), and prints one-line errors.

    argparse itself stops a list at the next option, and sets optional positional arguments to defaults too early.
    """

    _is_nested = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        if self._is_nested:
            return super().parse_known_args(args, namespace)
        self._is_nested = True  # parse_known_intermixed_args calls this method again
        try:
            ellipsis = "" if "--" in (args or ()) else r"( \.\.\.)?"  # everything after -- belongs to the list
            has_optional = re.search(rf" \[[A-Z]+{ellipsis}\](?!\])", self.format_usage())
            parse = self.parse_known_intermixed_args if has_optional else super().parse_known_args
            parsed, unknown = parse(args, namespace)
        finally:
            self._is_nested = False
        if unknown:
            options = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", self.format_help(), re.MULTILINE)
            nearest = did_you_mean(unknown[0].partition("=")[0], options)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{nearest and f'; {nearest}'}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        """Raise `InputError`."""
        command = self.prog.removeprefix(program()).strip()
        period = "" if message.endswith("?") else "."
        raise InputError(f"{command}: {message}{period} {self.prog} --help describes its arguments.")


def run_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    """Parse `argv` and run its command; returns its exit code."""
    arguments = parser.parse_args(argv)
    _check_options(vars(arguments))
    if names := getattr(arguments, "imports", None):
        from pretrain.common.extensions import import_modules

        import_modules(names)
    with convert_import_errors(parser.prog if not argv else argv[0]):
        return arguments.command(arguments) or 0


def check_effects(options: Mapping[str, tuple[Any, Any, str]]) -> None:
    """Raise `InputError` for an option without effect. `options`: name -> (value, whether it has effect, reason)."""
    for option, (value, has_effect, reason) in options.items():
        if value and not has_effect:
            raise InputError(f"{option}: has no effect {reason}. Leave it out.")


def _check_options(options: Mapping[str, Any]) -> None:
    """Check that options shared by several commands have an effect. Raises `InputError`."""
    can_use_ray, reason = torchrun_rank() is None, "under torchrun, which has started the processes"
    plain_http, address = options.get("allow_plain_http"), options.get("address")
    check_effects({"--allow-plain-http": (plain_http, address, "without --address")})
    for option in ("show_config", "on", "mean_length"):
        is_set = options.get(option) not in (None, False)
        check_effects({f"--{option.replace('_', '-')}": (is_set, options.get("dry_run"), "without --dry-run")})
    has_workers = options.get("workers") is not None
    check_effects({"--workers": (has_workers, can_use_ray, reason), "--ray": (options.get("ray"), can_use_ray, reason)})


def overrides(arguments: argparse.Namespace) -> list[str]:
    """Return the overrides of the command line as key.path=value: --set first, then --workers."""
    workers = getattr(arguments, "workers", None)
    return [*arguments.set, *([] if workers is None else [f"scheduling.workers={workers}"])]


def add_command(
    commands: Any, name: str, function: Callable[[argparse.Namespace], Any], purpose: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command and return its parser.

    Args:
        commands: the return value of `add_subparsers`.
        name: the command.
        function: called with the parsed arguments; stored as `arguments.command`.
        purpose: one sentence without its full stop, in the imperative mood.
        examples: lines with example commands, which start with ./launch.sh.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=f"examples:{examples}".replace(LAUNCHER, program()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=function)
    if name in _IMPORT_COMMANDS:
        parser.add_argument(
            "--import",
            dest="imports",
            action="append",
            metavar="MODULE",
            help="import a custom module that the config of a run or model names; may be repeated",
        )
    return parser


def add_config(parser: argparse.ArgumentParser, start_help: str, *, several: bool = False) -> None:
    """Add CONFIG (one, or `several`), --from with the help text `start_help`, and --set."""
    purpose = "YAML file of the run, or the name of an example config (`configs` lists them)"
    parser.add_argument("config", type=config_argument, metavar="CONFIG", nargs="+" if several else None, help=purpose)
    add_start(parser, f"{start_help}, in place of the config's", type=run_argument)
    add_set(parser)


def add_start(parser: argparse.ArgumentParser, purpose: str, **options: Any) -> None:
    """Add --from DIR; `options` are passed on to `add_argument`."""
    where = location_help("a released model, an export or a run")
    parser.add_argument("--from", dest="start_from", metavar="DIR", help=f"{purpose}: {where}", **options)


def run_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Convert the options of `add_config` and `add_run_options` to keyword arguments of the function that trains."""
    options = {name: getattr(arguments, name) for name in ("start_from", "resume", "ray", "no_ray")}
    return {"overrides": overrides(arguments), **options}


def add_set(parser: argparse.ArgumentParser, purpose: str = "override a setting; may be repeated") -> None:
    """Add --set KEY=VALUE."""
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=purpose)


def add_address(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add --address URL and --allow-plain-http, for commands that talk to a cluster."""
    parser.add_argument("--address", default="", metavar="URL", help=purpose)
    parser.add_argument(
        "--allow-plain-http",
        action="store_true",
        help="send the token over unencrypted http to another machine; whoever reads it can run code on the cluster",
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add --resume, --ray and --no-ray, the options of every training run."""
    parser.add_argument("--resume", action="store_true", help="continue the run from its latest checkpoint")
    launcher = parser.add_mutually_exclusive_group()
    launcher.add_argument("--ray", action="store_true", help="use Ray even for one worker on this machine")
    launcher.add_argument(
        "--no-ray", action="store_true", help="train in this process, without Ray (implied under torchrun)"
    )


def add_dry_run(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add --dry-run, and --show-config, which requires it."""
    parser.add_argument("--dry-run", action="store_true", help=purpose)
    parser.add_argument("--show-config", action="store_true", help="with --dry-run: also print the resolved config")


def add_workers(parser: argparse.ArgumentParser, default: str = "overrides scheduling.workers") -> None:
    """Add --workers N."""
    parser.add_argument("--workers", type=int, metavar="N", help=f"number of worker processes ({default})")


def add_follow(parser: argparse.ArgumentParser, purpose: str) -> None:
    """Add -f, --follow."""
    parser.add_argument("-f", "--follow", action="store_true", help=purpose)


def location_help(noun: str) -> str:
    """Return the help text of an argument that `run_argument` parses; `noun` is the object that it locates."""
    return f"folder or address of {noun}, or name of a run in runs/"


WORKERS_DEFAULT = "default: one for each GPU; without GPUs 2, or 1 on a single core"


def default_workers() -> int:
    """Return the default number of workers on this machine."""
    import torch

    return torch.cuda.device_count() or min(2, len(os.sched_getaffinity(0)))


# ---------------------------------------------------------------- argument types


def local_string(text: str) -> str:
    """Return `text`, an argument that may be a local path. Raises `InputError` if it is a remote address."""
    try:
        check_local(text)
    except ValueError as error:
        raise InputError(f"{error}") from None
    return text


def parse_path(text: str) -> Path:
    """Parse a local path. Raises `InputError` for a remote address."""
    return Path(local_string(text))


def config_argument(text: str) -> Path:
    """Parse a config: a local path, or the name of an example config."""
    return config_path(parse_path(text))


def run_argument(value: Any) -> Path | str:
    """Parse a run or model: a path, a run name (`find_run`), an address, or an object with a `location`, as `Run`."""
    text = str(getattr(value, "location", value))
    return checked_address(text) if is_remote(text) else find_run(parse_path(text))


def checked_address(text: str, *, for_writing: bool = False) -> str:
    """Parse an address. Raises `InputError` if it names nothing in a bucket, or is read-only although `for_writing`."""
    try:
        check_address(text, for_writing=for_writing)
    except ValueError as error:
        raise InputError(f"{error}") from None
    return text.rstrip("/")


def target_path(text: str) -> Path | str:
    """Parse a folder to write to: a path or an address. Raises `InputError` if the address is read-only."""
    return checked_address(text, for_writing=True) if is_remote(text) else parse_path(text)


def positive_int(text: str) -> int:
    """Parse a positive integer."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)

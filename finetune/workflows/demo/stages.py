"""The demo's pretraining on the docstrings of this Python and its packages: prepare, pretrain, export, report.

Each stage is a command that a user would type, run through the same command line.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pretrain.common.commands import add_local_workers, add_set, as_stage, local_path, program, usual_workers
from pretrain.common.errors import InputError, StoppedError
from pretrain.common.examples import CONFIGS
from pretrain.common.files import MANIFEST, checkpoint_names
from pretrain.common.run_files import ENVIRONMENT_FILE

EXAMPLES = """
  ./launch.sh demo
  ./launch.sh demo --quick
  ./launch.sh demo --minutes 20 --fresh
  ./launch.sh demo --set phases.0.steps=500 --run-dir runs/short-demo"""

STAGES = 4

RunCommand = Callable[[Sequence[str]], int]  # a command line: words -> exit code

_CONFIG = CONFIGS / "pretrain" / "tiny.yaml"
_MINUTES = 6.0
# A text that is read in seconds, and steps that take about a minute on two cores, too few to compile or to start Ray.
_QUICK = ("phases.0.steps=160", "phases.0.warmup_steps=20", "checkpoint.every_steps=80", "evaluation.every_steps=40")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options."""
    add_local_workers(parser)
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
        f"0 trains the steps of {_CONFIG.name}, as does --set phases.0.steps",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a first look: the text of the standard library, 160 steps of pretraining, one task",
    )
    parser.add_argument("--fresh", action="store_true", help="delete an earlier demo run first; its corpus is kept")
    add_set(parser, f"override a setting of {_CONFIG.name}; may be repeated")


def fill_in(arguments: argparse.Namespace) -> None:
    """Fill in what depends on --quick and was not given."""
    name = "demo-quick" if arguments.quick else "demo"
    arguments.run_dir = arguments.run_dir or Path("runs", name)
    arguments.data_dir = arguments.data_dir or Path("data", name)
    if arguments.minutes is None:
        arguments.minutes = 0.0 if arguments.quick else _MINUTES
    if arguments.workers is None:
        arguments.workers = 1 if arguments.quick else usual_workers()


def run_stages(arguments: argparse.Namespace, run_command: RunCommand, more_stages: int = 0) -> int:
    """Run every stage except the report; `more_stages` follow before it. Returns an exit code."""
    if not _CONFIG.is_file():
        raise InputError(f"{_CONFIG}: not found. The demo needs a clone of the repository; run ./launch.sh demo there.")
    folder: Path = arguments.run_dir
    if arguments.fresh and folder.exists():
        _remove_run(folder)
    resume = bool(checkpoint_names(folder))
    has_corpus = (arguments.data_dir / MANIFEST).is_file()
    if has_corpus:
        print(f"{arguments.data_dir}: using the corpus made by an earlier demo")
    if resume:
        print(f"{folder}: resuming from the newest checkpoint (--fresh starts a new run)")
    for number, (title, command) in enumerate(_stages(arguments, resume), 1):
        # A new corpus would differ if packages were installed since, and the run could not resume on it.
        if command[0] == "prepare" and has_corpus:
            continue
        print(f"\n[{number}/{STAGES + more_stages}] {title}: {program()} {_shell(command)}", flush=True)
        started = time.monotonic()
        with as_stage():
            code = run_command(command)
        if code:
            return code
        print(f"      {time.monotonic() - started:.1f} s", flush=True)
    return 0


def finish(arguments: argparse.Namespace, started: float, code: int, more_stages: int = 0) -> int:
    """Write the report, or say how a stopped demo continues; returns `code`, the exit code of the stages.

    `started` is the demo's start on the monotonic clock, `more_stages` as in `run_stages`.
    """
    if code == StoppedError.exit_code:
        print("The demo stopped. Run the same command again to continue it.")
    elif not code:
        print(f"\n[{STAGES + more_stages}/{STAGES + more_stages}] report", flush=True)
        _write_report(arguments, started)
    return code


def _write_report(arguments: argparse.Namespace, started: float) -> None:
    from pretrain.reporting import report

    path = report.write_report(arguments.run_dir, arguments.run_dir / "report.html")
    print(report.summary(arguments.run_dir))
    print(f"\nAll stages took {time.monotonic() - started:.0f} s.")
    print(f"Curves, corpus card, fill-mask examples and scores: {path.resolve().as_uri()}")


def _stages(arguments: argparse.Namespace, resume: bool) -> list[tuple[str, list[str]]]:
    """(title, command) of each stage."""
    values = [
        "name=demo",
        f"run_dir={json.dumps(str(arguments.run_dir))}",
        f"corpus.dir={json.dumps(str(arguments.data_dir))}",
        f"scheduling.workers={arguments.workers}",
        *(_quick_settings() if arguments.quick else ()),
        *arguments.set,
    ]
    settings = [word for value in values for word in ("--set", value)]
    as_given = any(value.startswith("phases.0.steps=") for value in arguments.set)
    minutes = [] if as_given or not arguments.minutes else ["--minutes", f"{arguments.minutes:g}"]
    return [
        ("tokenizing text into shards", ["prepare", str(_CONFIG), *settings]),
        ("training", ["pretrain", str(_CONFIG), *settings, *minutes, *(["--resume"] if resume else [])]),
        ("export", ["export", str(arguments.run_dir), str(arguments.run_dir / "export")]),
    ]


def _quick_settings() -> list[str]:
    library = json.dumps(sysconfig.get_path("stdlib"))
    return [*_QUICK, f"corpus.sources.0.path={library}", "engine.compile=false"]


def _remove_run(folder: Path) -> None:
    if not (folder / ENVIRONMENT_FILE).is_file():
        raise InputError(f"{folder}: not a run folder, so --fresh does not delete it. Choose another --run-dir.")
    shutil.rmtree(folder)


def _shell(command: list[str]) -> str:
    """The command as one would type it, with paths relative to the working directory."""
    here = f"{Path.cwd()}/"
    return shlex.join(word.removeprefix(here) for word in command)

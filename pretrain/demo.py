"""The whole main job on a corpus that every Python installation has: prepare, pretrain, export, report.

Each stage is the command that a user would type, run through the same door as the command line's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from pretrain.commands import local_path
from pretrain.common.errors import InputError
from pretrain.common.files import MANIFEST

_ROOT = Path(__file__).resolve().parent.parent
_CONFIG = _ROOT / "configs" / "pretrain" / "tiny.yaml"
STAGES = 4


def main(argv: Sequence[str]) -> int:
    """Run the demo with these command-line arguments; returns the exit code of the first stage that fails."""
    arguments = parser().parse_args(argv)
    began = time.monotonic()
    code = run(arguments)
    if not code:
        report(arguments, began)
    return code


def run(arguments: argparse.Namespace, more_stages: int = 0) -> int:
    """All stages but the report; `more_stages` come between them and it. Returns an exit code."""
    from pretrain.__main__ import main as command_line

    folder = arguments.run_dir
    if arguments.fresh and folder.exists():
        _remove_run(folder)
    resume = ["--resume"] if any(folder.glob(f"checkpoints/*/{MANIFEST}")) else []
    settings = _settings(arguments)
    stages = [
        ("text to token shards", ["prepare", str(_CONFIG), *settings]),
        ("training", ["pretrain", str(_CONFIG), *settings, *resume]),
        ("export", ["export", str(folder), str(folder / "export")]),
    ]
    if (arguments.data_dir / MANIFEST).is_file():
        # Its text is that of the packages installed when it was made; a package more must not stop the demo.
        print(f"{arguments.data_dir}: found, its corpus is used as it is")
        stages[0] = ("text to token shards: there already", [])
    if resume:
        print(f"{folder}: found, going on from its newest checkpoint (--fresh begins a new run)")
    for number, (title, command) in enumerate(stages, 1):
        if not command:
            continue
        print(f"\n[{number}/{STAGES + more_stages}] {title}: ./launch.sh {_shell(command)}", flush=True)
        began = time.monotonic()
        code = command_line(command)
        if code:
            return code
        print(f"      {time.monotonic() - began:.1f} s", flush=True)
    return 0


def report(arguments: argparse.Namespace, began: float) -> None:
    """Write the run's report and say where it is."""
    from pretrain.reporting import report as page

    path = page.write_report(arguments.run_dir, arguments.run_dir / "report.html")
    print(f"\n{page.summary(arguments.run_dir)}")
    print(f"\nAll stages took {time.monotonic() - began:.0f} s.")
    print(f"Curves, corpus, filled-in sentences and scores: {path.resolve().as_uri()}")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./launch.sh demo",
        description="Prepare the embedded corpus (docstrings of Python and of the installed packages), "
        "pretrain a small BERT on it, export it and write a report.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=min(2, len(os.sched_getaffinity(0))),
        metavar="N",
        help="worker processes (default: 2, or 1 on a single core)",
    )
    parser.add_argument("--run-dir", type=local_path, default=Path("runs/demo"), metavar="DIR", help="the run folder")
    parser.add_argument(
        "--data-dir", type=local_path, default=Path("data/demo"), metavar="DIR", help="the corpus folder"
    )
    parser.add_argument("--fresh", action="store_true", help="remove an earlier demo run first; the corpus is kept")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"override a setting of {_CONFIG.name}",
    )
    return parser


def _settings(arguments: argparse.Namespace) -> list[str]:
    values = [
        "name=demo",
        f"run_dir={arguments.run_dir}",
        f"corpus.dir={arguments.data_dir}",
        f"scheduling.workers={arguments.workers}",
        *arguments.set,
    ]
    return [word for value in values for word in ("--set", value)]


def _remove_run(run: Path) -> None:
    if not (run / "config.yaml").is_file():
        raise InputError(f"{run}: is no run folder, so --fresh leaves it alone. Choose another --run-dir.")
    shutil.rmtree(run)


def _shell(command: list[str]) -> str:
    """The command as one would type it, with paths below the working directory made short."""
    here = f"{Path.cwd()}/"
    return " ".join(word.removeprefix(here) for word in command)

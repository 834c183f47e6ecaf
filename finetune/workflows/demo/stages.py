"""The demo's pretraining on the docstrings of this Python and its packages: prepare, pretrain, export, report.

Each stage calls the function that the command of its name calls.
"""

from __future__ import annotations

import argparse
import shutil
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

from pretrain.common.commands import add_local_workers, add_set, local_path, usual_workers
from pretrain.common.errors import InputError
from pretrain.common.examples import CONFIGS
from pretrain.common.files import MANIFEST, checkpoint_names
from pretrain.common.run_files import ENVIRONMENT_FILE
from pretrain.run import api

EXAMPLES = """
  ./launch.sh demo
  ./launch.sh demo --quick
  ./launch.sh demo --minutes 20 --fresh
  ./launch.sh demo --set phases.0.steps=500 --run-dir runs/short-demo"""

STAGES = 4

_CONFIG = CONFIGS / "pretrain" / "tiny.yaml"
_MINUTES = 6.0
# A text that is read in seconds, and steps that take about a minute on two cores, too few to compile or to start Ray.
_QUICK = {
    "phases.0.steps": 160,
    "phases.0.warmup_steps": 20,
    "checkpoint.every_steps": 80,
    "evaluation.every_steps": 40,
}


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


def run_stages(arguments: argparse.Namespace, more_stages: int = 0) -> None:
    """Run every stage except the report; `more_stages` follow before it."""
    folder: Path = arguments.run_dir
    if arguments.fresh and folder.exists():
        _remove_run(folder)
    resume = bool(checkpoint_names(folder))
    settings = _settings(arguments)

    def prepare() -> None:
        # A new corpus would differ if packages were installed since, and the run could not resume on it.
        if (arguments.data_dir / MANIFEST).is_file():
            print(f"{arguments.data_dir}: using the corpus made by an earlier demo")
        else:
            print(api.prepare(_CONFIG, overrides=settings))

    def train() -> None:
        if resume:
            print(f"{folder}: resuming from the newest checkpoint (--fresh starts a new run)")
        as_given = any(value.startswith("phases.0.steps=") for value in arguments.set)
        minutes = None if as_given or not arguments.minutes else arguments.minutes
        run = api.train(_CONFIG, overrides=settings, minutes=minutes, resume=resume)
        if run.trained:
            print(run)

    stages: dict[str, Callable[[], None]] = {
        "tokenizing text into shards": prepare,
        "training": train,
        "export": lambda: print(api.export(folder, folder / "export")),
    }
    for number, (title, run_stage) in enumerate(stages.items(), 1):
        print(f"\n[{number}/{STAGES + more_stages}] {title}", flush=True)
        started = time.monotonic()
        run_stage()
        print(f"      {time.monotonic() - started:.1f} s", flush=True)


def finish(arguments: argparse.Namespace, started: float, more_stages: int = 0) -> None:
    """Write the report; `started` is the demo's start on the monotonic clock, `more_stages` as in `run_stages`."""
    from pretrain.reporting import report

    print(f"\n[{STAGES + more_stages}/{STAGES + more_stages}] report", flush=True)
    path = report.write_report(arguments.run_dir, arguments.run_dir / "report.html")
    print(report.summary(arguments.run_dir))
    print(f"\nAll stages took {time.monotonic() - started:.0f} s.")
    print(f"Curves, corpus card, fill-mask examples and scores: {path.resolve().as_uri()}")


def _settings(arguments: argparse.Namespace) -> list[str]:
    """The overrides of the config."""
    from pretrain.common.settings import as_overrides

    given = {
        "name": "demo",
        "run_dir": arguments.run_dir,
        "corpus.dir": arguments.data_dir,
        "scheduling.workers": arguments.workers,
    }
    if arguments.quick:
        given |= {**_QUICK, "corpus.sources.0.path": sysconfig.get_path("stdlib"), "engine.compile": False}
    return [*as_overrides(given), *arguments.set]


def _remove_run(folder: Path) -> None:
    if not (folder / ENVIRONMENT_FILE).is_file():
        raise InputError(f"{folder}: not a run folder, so --fresh does not delete it. Choose another --run-dir.")
    shutil.rmtree(folder)

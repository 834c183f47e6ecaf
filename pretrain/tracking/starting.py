"""The phase of a run's start, such as compilation: worker 0 writes it to a file, and the live line shows it."""

import contextlib
from pathlib import Path

WORKERS = "starting the workers"
CONNECT = "connecting the workers"
LOAD = "loading data and model"
WARMUP_STEP = "trying the largest batch and a checkpoint"
COMPILE = f"compiling the model, {WARMUP_STEP}"
MEASURE = "measuring the speed of matrix products"
STEPS = "training the first steps"

_FILE = "starting.txt"  # in the run's logs; exists while the run starts


def write_phase(run_dir: Path, phase: str) -> None:
    """Record that `phase` begins. A full or read-only disk is ignored: other writes report it."""
    path = _path(run_dir)
    aside = path.with_name(f".{path.name}.tmp")
    with contextlib.suppress(OSError):
        aside.write_text(phase, encoding="utf-8")
        aside.replace(path)


def read_phase(run_dir: Path) -> str:
    """The phase that was written last; "" if the run is not starting."""
    try:
        return _path(run_dir).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def end_phases(run_dir: Path) -> None:
    """Record that the start is over."""
    with contextlib.suppress(OSError):
        _path(run_dir).unlink(missing_ok=True)


def _path(run_dir: Path) -> Path:
    return run_dir / "logs" / _FILE

"""Rates of this machine that were measured once, in a file of the user's cache folder."""

import contextlib
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

from pretrain.common.files import write_json
from pretrain.common.thread_waits import waited_seconds

_QUIET = 0.03  # share of the time that a thread may wait for a core during a measurement that is kept
_CPU = Path("/proc/cpuinfo")


def remembered(what: str, measure: Callable[[], float]) -> float:
    """The number that `measure` returned when it was called for `what` first; the file is `rates_file()`.

    It is kept for this machine, its cores and the version of torch; and only if other programs left the cores alone
    meanwhile. A machine that does not say so is measured each time.
    """
    key = " | ".join([what, *_machine()])
    kept = _read()
    if isinstance(kept.get(key), float):
        return kept[key]
    before, began = waited_seconds(), time.monotonic()
    value = measure()
    after, seconds = waited_seconds(), time.monotonic() - began
    if before and max(after[thread] - before.get(thread, 0.0) for thread in after) < _QUIET * seconds:
        with contextlib.suppress(OSError):  # a home that cannot be written: the next start measures again
            rates_file().parent.mkdir(parents=True, exist_ok=True)
            write_json(rates_file(), {**_read(), key: value})
    return value


def rates_file() -> Path:
    """Where the rates are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "bertrain" / "rates.json"


def _read() -> dict[str, float]:
    try:
        kept = json.loads(rates_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _machine() -> tuple[str, ...]:
    lines = _CPU.read_text(errors="replace").splitlines() if _CPU.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return platform.node(), name, f"cores {cores}", f"threads {threads}", f"torch {importlib.metadata.version('torch')}"

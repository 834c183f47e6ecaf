"""Caches measured rates of this machine in a file in the user's cache folder."""

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

_MAX_WAIT_SHARE = 0.03  # maximum share of the time that a thread may wait for a core if the result is to be cached
_CPUINFO = Path("/proc/cpuinfo")


def cached_rate(name: str, measure: Callable[[], float]) -> float:
    """Return the cached result of `measure` for `name`, or call it and cache the result in `rates_file()`.

    Results are cached per machine, set of cores and torch version, and only if other programs left the cores idle
    during the measurement. On a system that does not record waits for cores, nothing is cached.
    """
    key = " | ".join([name, *_machine_key()])
    cached = _read_rates()
    if isinstance(cached.get(key), float):
        return cached[key]
    old_waits, started = waited_seconds(), time.monotonic()
    value = measure()
    waits, seconds = waited_seconds(), time.monotonic() - started
    if old_waits and max(waits[thread] - old_waits.get(thread, 0.0) for thread in waits) < _MAX_WAIT_SHARE * seconds:
        with contextlib.suppress(OSError):  # home folder not writable: the next run measures again
            rates_file().parent.mkdir(parents=True, exist_ok=True)
            write_json(rates_file(), {**_read_rates(), key: value})
    return value


def rates_file() -> Path:
    """Return the path of the cache file."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "bertrain" / "rates.json"


def _read_rates() -> dict[str, float]:
    try:
        cached = json.loads(rates_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cached if isinstance(cached, dict) else {}


def cpu_has(flag: str) -> bool:
    """Return whether this CPU has a feature; `flag` is its name in /proc/cpuinfo."""
    return flag in cpuinfo("flags").split()


def cpuinfo(field: str) -> str:
    """Return the first value of a field of /proc/cpuinfo, or "" without one."""
    lines = _CPUINFO.read_text(errors="replace").splitlines() if _CPUINFO.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def _machine_key() -> tuple[str, ...]:
    cpu = cpuinfo("model name")
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return platform.node(), cpu, f"cores {cores}", f"threads {threads}", f"torch {importlib.metadata.version('torch')}"

"""Functions that Ray tasks run in tests of `prepare` on a cluster; they record their calls in the working directory."""

import os
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

from pretrain.corpus import stages
from pretrain.corpus.inputs import Chunk


def read(chunk: Chunk) -> list[dict[str, Any]]:
    """Call stages.read; for one chunk, kill the process once after the part files are written, before the summary."""
    if _is_first(f"read-{chunk.name}") and chunk.name == "000-000001-000000":
        stages.write_json = _die
    return stages.read(chunk)


def write_shard(name: str, *rest: Any) -> dict[str, Any]:
    """Call stages.write_shard; for one shard, kill the process once while its files are written."""
    if _is_first(f"write_shard-{name}") and name == "train-00001":
        stages.ShardWriter.add = _die  # pyright: ignore[reportAttributeAccessIssue]
    return stages.write_shard(name, *rest)


def always_die(*_: Any) -> NoReturn:
    _is_first("die")
    _die()


def bug(*_: Any) -> NoReturn:
    raise ZeroDivisionError("a bug\nin two lines")


def runs() -> dict[str, int]:
    """Return the number of calls of each job."""
    counts: dict[str, int] = {}
    for trace in Path("runs").iterdir():
        job = trace.name.rpartition("@")[0]
        counts[job] = counts.get(job, 0) + 1
    return counts


def _is_first(job: str) -> bool:
    folder = Path("runs")
    folder.mkdir(exist_ok=True)
    first = not list(folder.glob(f"{job}@*"))
    (folder / f"{job}@{time.time_ns()}").touch()
    return first


def _die(*_: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")

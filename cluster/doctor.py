"""What this machine has, what a run would miss, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import netrc
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from pretrain.errors import MachineError

_GIB = 1 << 30
_MATMUL = 2048  # square; large enough to reach the peak, small enough for any machine
_DISK_GIB = 10  # a corpus of a few GB, its shards and three checkpoints of BERT-Base
_MEMORY_GIB = 4


@dataclass(frozen=True)
class Row:
    """One line of the table. `advice` says what to do, or what follows, when not `fine`."""

    what: str
    found: str
    fine: bool = True
    advice: str = ""


def main() -> int:
    """Print the table; 0 when everything a run needs is there, else the exit code of an unfit machine."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "what", "found", "to do"):
        table.add_column(column, overflow="fold")
    found = rows()
    for row in found:
        mark = "[green]ok[/]" if row.fine else "[yellow]--[/]"
        table.add_row(mark, row.what, row.found, "" if row.fine else row.advice)
    Console().print(table)
    return 0 if all(row.fine for row in found) else MachineError.exit_code


def rows() -> list[Row]:
    """Everything that was looked at, in the order of the table. Takes about 3 s, 1 of them for the matmul."""
    return [*_machine(), *_software(), *_accelerators(), *_optional()]


def _machine() -> list[Row]:
    memory = psutil.virtual_memory()
    here, temporary = Path.cwd(), Path(tempfile.gettempdir())
    return [
        Row("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        Row("cores", str(len(os.sched_getaffinity(0)))),
        Row(
            "memory",
            f"{memory.total / _GIB:.0f} GiB, {memory.available / _GIB:.0f} free",
            memory.available > _MEMORY_GIB * _GIB,
            f"Under {_MEMORY_GIB} GiB is little even for a small model; close other programs.",
        ),
        *(_disk(what, path) for what, path in (("disk here", here), ("disk, temporary", temporary))),
    ]


def _disk(what: str, path: Path) -> Row:
    free = shutil.disk_usage(path).free
    needed = _DISK_GIB if what == "disk here" else 1
    advice = f"Free {needed} GiB or work elsewhere (TMPDIR names the temporary folder)."
    return Row(what, f"{free / _GIB:.0f} GiB free on {path}", free > needed * _GIB, advice)


def _software() -> list[Row]:
    python = ".".join(map(str, sys.version_info[:3]))
    compiler = shutil.which("g++") or shutil.which("c++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return [
        Row("Python", python, (3, 10) <= sys.version_info[:2] < (3, 14), "Use Python 3.10 to 3.13."),
        *(_package(name) for name in ("torch", "deepspeed", "ray")),
        Row(
            "C++ compiler",
            compiler or "none",
            compiler is not None,
            "Install g++ (apt-get install g++), or set engine.compile: false.",
        ),
        Row(
            "Python headers",
            str(header) if header.exists() else "none",
            header.exists(),
            "torch.compile needs Python.h (apt-get install python3-dev), or set engine.compile: false.",
        ),
    ]


def _package(name: str) -> Row:
    advice = "Not installed: run ./launch.sh doctor, which sets up .venv."
    try:
        return Row(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Row(name, "none", False, advice)


def _accelerators() -> list[Row]:
    import torch

    found = [
        Row("bf16 matmul", f"{_matmul_gflops('cpu'):,.0f} GFLOP/s on {torch.get_num_threads()} CPU threads")
    ]
    if not torch.cuda.is_available():
        return [Row("GPUs", "none: workers train on the CPU"), *found]
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        text = f"{properties.name}, {properties.total_memory / _GIB:.0f} GiB"
        found.append(
            Row(f"GPU {number}", f"{text}, bf16 {_matmul_gflops(f'cuda:{number}') / 1000:,.0f} TFLOP/s")
        )
    return found


def _matmul_gflops(device: str, seconds: float = 1.0) -> float:
    """The best bf16 matmul rate in GFLOP/s over about `seconds`; 2 n^3 operations each."""
    import torch

    size = _MATMUL if device == "cpu" else 4 * _MATMUL
    a = torch.randn(size, size, device=device).bfloat16()
    out = torch.empty_like(a)
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        if device != "cpu":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e9


def _optional() -> list[Row]:
    key = "present" if _has_wandb_key() else "none: runs are recorded offline, `wandb sync` sends them later"
    return [Row("W&B key", key)]


def _has_wandb_key() -> bool:
    """Whether wandb would find a key in the environment or in netrc. The key itself is never read out."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return "api.wandb.ai" in netrc.netrc().hosts
    except (OSError, netrc.NetrcParseError):
        return False

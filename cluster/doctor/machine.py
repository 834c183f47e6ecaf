"""Measurements of one machine; `cluster.doctor.verdicts` judges them."""

import hashlib
import importlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from cluster.doctor import reduce, storage, verdicts
from cluster.doctor.rows import Finding
from cluster.doctor.verdicts import GIB, NONE
from cluster.workers.outcomes import one_line
from pretrain.common.memory import machine_memory

_BUSY_SECONDS = 0.5  # time over which the CPU load is measured
_COMPILE_SECONDS = 20.0  # time limit of the compiler
_PACKAGES = ("cluster", "pretrain", "finetune")


def check(measurement_module: str, folder: Path) -> list[Finding]:
    """Return the findings about this machine; `folder` is where it would store runs.

    `measurement_module` is the dotted name of the module that measures speed, such as `pretrain.run.machine`.
    """
    system = Finding("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    rows = _rows(measurement_module, folder, with_speed=True)
    return [system, *rows, reduce.local_bandwidth(), verdicts.judge_wandb_key()]


def check_node(measurement_module: str, folder: Path, lock: str, cpus: int, gpus: int) -> list[Finding]:
    """Return the findings about this machine as a node of a cluster.

    Args:
        lock: name of the lock file in `folder` that the job holds; empty for none.
        cpus, gpus: how many CPUs and GPUs Ray uses here. If both are 0, no workers run here, and speed is not measured.
    """
    import torch

    if cpus:
        torch.set_num_threads(cpus)
    lock_rows = [storage.try_lock(folder, lock)] if lock else []
    return [*_rows(measurement_module, folder, with_speed=bool(cpus or gpus)), verdicts.judge_wandb_key(), *lock_rows]


def _rows(measurement_module: str, folder: Path, *, with_speed: bool) -> list[Finding]:
    import torch

    measurements: Any = importlib.import_module(measurement_module)
    found_versions, gpu_count = versions(measurements), torch.cuda.device_count()
    device_files, visible = len(list(Path("/dev").glob("nvidia[0-9]*"))), os.environ.get("CUDA_VISIBLE_DEVICES")
    return [
        *verdicts.judge_versions(found_versions),
        verdicts.judge_cores(len(os.sched_getaffinity(0)), psutil.cpu_percent(_BUSY_SECONDS) / 100),
        verdicts.judge_memory(*machine_memory()),
        *_disk_rows(folder),
        verdicts.judge_compiler(*try_compiler()),
        verdicts.judge_gpus(device_files, gpu_count, found_versions, visible),
        *(_matmul_rows(measurements, gpu_count) if with_speed else []),
    ]


def versions(measurements: Any) -> dict[str, str]:
    """Return {name: version} of what must be equal on all nodes; "none" with the reason if an import fails."""
    return {
        "Python": platform.python_version(),
        **{name: _version(lambda get=get: get(importlib.import_module("torch"))) for name, get in _FROM_TORCH.items()},
        "DeepSpeed": _version(measurements.deepspeed_version),
        "Ray": _version(lambda: importlib.import_module("ray").__version__),
        "bertrain": source_version(),
    }


_FROM_TORCH: dict[str, Callable[[Any], str]] = {  # {name: function that reads its version from the module `torch`}
    "torch": lambda torch: torch.__version__,
    "CUDA": lambda torch: torch.version.cuda or NONE,
    "NCCL": lambda torch: (
        ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else NONE
    ),
    "gloo": lambda torch: "in torch" if torch.distributed.is_gloo_available() else NONE,
}


def _version(read: Callable[[], str]) -> str:
    try:
        return read()
    except Exception as error:  # a broken library may raise anything
        return f"{NONE}: {one_line(error)}"


def source_version() -> str:
    """Return a digest of the project's sources, since checkouts with equal version numbers may differ."""
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{digest.hexdigest()[:8]} (hash of the project's source files)"


def _disk_rows(folder: Path) -> list[Finding]:
    """Return a row for the free space of each folder."""
    folders = [  # (name, path, bytes below which to warn, bytes below which to fail)
        # Space for a corpus of a few GB, its shards and three checkpoints of BERT-Base.
        ("disk", folder, 10 * GIB, GIB),
        ("disk, temporary", Path(tempfile.gettempdir()), GIB, GIB // 4),
        # Space for Ray's object store (75 MiB or more) and NCCL's buffers.
        ("shared memory", Path("/dev/shm"), GIB // 4, GIB // 12),
    ]
    return [
        verdicts.judge_disk(what, path, shutil.disk_usage(path).free, wanted, minimum)
        for what, path, wanted, minimum in folders
        if path.is_dir()
    ]


def try_compiler() -> tuple[str, str, str]:
    """Return (path of the compiler, path of Python.h, error of a test build); "" for a missing file and no error."""
    compiler = shutil.which("g++") or shutil.which("c++") or ""
    path = Path(sysconfig.get_path("include")) / "Python.h"
    header = str(path) if path.exists() else ""
    if not (compiler and header):
        return compiler, header, ""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "probe.cpp"
        source.write_text(
            "#include <Python.h>\n#include <cmath>\n#include <vector>\n"
            'extern "C" double probe(double x) { return std::vector<double>{std::sqrt(x)}[0]; }\n'
        )
        command = [compiler, "-shared", "-fPIC", "-fopenmp", f"-I{path.parent}", str(source), "-o", f"{source}.so"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return compiler, header, one_line(error)
    lines = result.stderr.strip().splitlines()
    error = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
    return compiler, header, error if result.returncode else ""


def _matmul_rows(measurements: Any, gpu_count: int) -> list[Finding]:
    """Return a row for the speed of matrix products on each device."""
    import torch

    devices = {"cpu": f"CPU, threads: {torch.get_num_threads()}"}
    for index in range(gpu_count):
        properties = torch.cuda.get_device_properties(index)
        devices[f"cuda:{index}"] = f"GPU {index}, {properties.name}, {properties.total_memory / GIB:.0f} GiB"
    rows = []
    for device, name in devices.items():
        bf16, fp32 = (measurements.measure_matmul(device, precision) for precision in ("bf16", "fp32"))
        rows.append(verdicts.judge_matmul(name, bf16, fp32, measurements.is_faster_in_fp32(bf16, fp32)))
    return rows

"""What one machine has and how fast it is; `cluster.doctor.verdicts` judges it."""

import hashlib
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from cluster.workers.outcomes import one_line
from pretrain.common.memory import machine_memory

NONE = "none"

GIB = 1 << 30
_LOADER_SECONDS = 0.5
_BUSY_SECONDS = 0.5
_COMPILE_SECONDS = 20.0
_OLD_LOCK_SECONDS = 600.0  # no single op of DeepSpeed compiles for so long
_PACKAGES = ("cluster", "pretrain", "finetune")


class Measures(Protocol):
    """The module that knows what a run needs of a machine. It is handed by name, so that every node can import it."""

    def deepspeed_ops(self) -> dict[str, bool]: ...
    def measure_matmul(self, device: str, kind: Any) -> float: ...
    def is_faster_in_fp32(self, bf16: float, fp32: float) -> bool: ...
    def loader_rate(self, seconds: float) -> float: ...
    def sequence_flops(self) -> float: ...


def measures_of(name: str) -> Measures:
    """The module `name`."""
    module: Any = importlib.import_module(name)
    return module


@dataclass(frozen=True)
class Disk:
    """Free space of a folder: below `wanted` it is scarce, below `least` nothing works."""

    what: str
    path: str
    free: int  # bytes; so below
    wanted: int
    least: int


@dataclass(frozen=True)
class Device:
    """What a worker computes on, with its measured matrix products in FLOP/s."""

    name: str
    kind: str  # devices of the same kind should be equally fast
    bf16: float
    fp32: float
    prefers_fp32: bool


@dataclass(frozen=True)
class MachineFacts:
    """The facts about one machine."""

    system: str
    cores: int
    busy: float  # share of the cores that other programs used meanwhile
    memory: int  # bytes, of the machine or container; so below
    memory_free: int
    disks: tuple[Disk, ...]
    versions: Mapping[str, str]
    compiler: str
    headers: str
    compile_error: str  # why a small Python extension could not be compiled
    ops: Mapping[str, bool]  # DeepSpeed's: whether they could be compiled here
    old_locks: tuple[str, ...]  # of compilations that no longer run
    gpu_files: int  # devices of the driver, whether or not torch sees them
    gpus: int  # those that torch sees
    visible: str | None  # CUDA_VISIBLE_DEVICES
    devices: tuple[Device, ...]  # measured; empty without a measurement
    sequences_per_second: float  # of one worker's loader; 0 without a measurement
    sequence_flops: float  # of training BERT-Base


def inspect(name: str, folder: Path, threads: int = 0, measure: bool = True) -> MachineFacts:
    """The facts about this machine.

    Args:
        name: of the module with the `Measures`.
        folder: where runs would be stored.
        threads: CPU threads for the measurements; 0 uses torch's default.
        measure: measure for about 3 s how fast the machine is.
    """
    import torch

    measures = measures_of(name)
    busy, (memory, free) = psutil.cpu_percent(_BUSY_SECONDS) / 100, machine_memory()
    if threads:
        torch.set_num_threads(threads)
    compiler, headers, error = try_compiler()
    return MachineFacts(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        busy=busy,
        memory=memory,
        memory_free=free,
        disks=_disks(folder),
        versions=versions(measures),
        compiler=compiler,
        headers=headers,
        compile_error=error,
        ops=_deepspeed_ops(measures),
        old_locks=find_old_locks(),
        gpu_files=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        gpus=torch.cuda.device_count(),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        devices=_devices(measures) if measure else (),
        sequences_per_second=measures.loader_rate(_LOADER_SECONDS) if measure else 0.0,
        sequence_flops=measures.sequence_flops(),
    )


def versions(measures: Measures) -> dict[str, str]:
    """Versions that must agree wherever workers run; "none" with the reason if an import fails."""
    libraries = {"Python": platform.python_version()}
    try:
        import torch

        nccl = torch.distributed.is_nccl_available()
        libraries |= {
            "torch": torch.__version__,
            "CUDA": torch.version.cuda or NONE,
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if nccl else NONE,  # pyright: ignore[reportAttributeAccessIssue]
            "gloo": "in torch" if torch.distributed.is_gloo_available() else NONE,
        }
    except Exception as error:  # a broken library may raise anything
        libraries |= {"torch": f"{NONE}: {one_line(error)}", "CUDA": NONE, "NCCL": NONE, "gloo": NONE}
    return {**libraries, "DeepSpeed": _deepspeed_version(measures), "Ray": _ray_version(), "bertrain": own_version()}


def _deepspeed_version(measures: Measures) -> str:
    try:
        measures.deepspeed_ops()
        return importlib.metadata.version("deepspeed")
    except Exception as error:
        return f"{NONE}: {one_line(error)}"


def _ray_version() -> str:
    try:
        import ray

        return ray.__version__
    except Exception as error:
        return f"{NONE}: {one_line(error)}"


def own_version() -> str:
    """A digest of our sources: two checkouts may have the same version, and need not be installed."""
    digest, root = hashlib.sha256(), Path(__file__).parents[2]
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return f"{digest.hexdigest()[:8]} (hash of the project's source files)"


def _disks(folder: Path) -> tuple[Disk, ...]:
    folders = [
        # A corpus of a few GB, its shards and three checkpoints of BERT-Base.
        ("disk", folder, 10 * GIB, GIB),
        ("disk, temporary", Path(tempfile.gettempdir()), GIB, GIB // 4),
        # Ray's objects, for which it needs at least 75 MiB, and NCCL's buffers.
        ("shared memory", Path("/dev/shm"), GIB // 4, GIB // 12),
    ]
    return tuple(
        Disk(what, str(path), shutil.disk_usage(path).free, wanted, least)
        for what, path, wanted, least in folders
        if path.is_dir()
    )


def try_compiler() -> tuple[str, str, str]:
    """Compiler, Python's header file, and why they cannot compile an extension like those of torch.compile."""
    compiler = shutil.which("g++") or shutil.which("c++") or ""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    headers = str(header) if header.exists() else ""
    if not (compiler and headers):
        return compiler, headers, ""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "probe.cpp"
        source.write_text(
            "#include <Python.h>\n#include <cmath>\n#include <vector>\n"
            'extern "C" double probe(double x) { return std::vector<double>{std::sqrt(x)}[0]; }\n'
        )
        command = [compiler, "-shared", "-fPIC", "-fopenmp", f"-I{header.parent}", str(source), "-o", f"{source}.so"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return compiler, headers, one_line(error)
    lines = done.stderr.strip().splitlines()
    error = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
    return compiler, headers, error if done.returncode else ""


def _deepspeed_ops(measures: Measures) -> dict[str, bool]:
    try:
        return measures.deepspeed_ops()
    except Exception:  # its version shows the reason
        return {}


def find_old_locks() -> tuple[str, ...]:
    """Lock files of compilations that died without removing them: the next compilation would wait forever."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    old = time.time() - _OLD_LOCK_SECONDS
    return tuple(str(path) for path in root.glob("**/lock") if path.stat().st_mtime < old)


def _devices(measures: Measures) -> tuple[Device, ...]:
    import torch

    cpu = f"CPU, threads: {torch.get_num_threads()}"
    devices = [_measured(measures, cpu, cpu, "cpu")]
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        name = f"GPU {number}, {properties.name}, {properties.total_memory / GIB:.0f} GiB"
        devices.append(_measured(measures, name, properties.name, f"cuda:{number}"))
    return tuple(devices)


def _measured(measures: Measures, name: str, kind: str, device: str) -> Device:
    bf16, fp32 = measures.measure_matmul(device, "bf16"), measures.measure_matmul(device, "fp32")
    return Device(name, kind, bf16, fp32, measures.is_faster_in_fp32(bf16, fp32))

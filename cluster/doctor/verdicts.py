"""Judge the measurements of one machine. Nothing is measured here, so that tests can judge made-up values."""

import contextlib
import netrc
import os
from collections.abc import Mapping
from pathlib import Path

from cluster.doctor.rows import FAIL, PASS, WARN, Finding, above, below
from pretrain.common.commands import LAUNCHER, program
from pretrain.common.packages import install_command, is_installed

GIB = 1 << 30
NONE = "none"

_BUSY = 0.25
_NEEDED = ("torch", "gloo", "DeepSpeed", "Ray", "bertrain")
_OPTIONAL = {"DeepSpeed": "Training needs it", "Ray": "Several workers, sweeps and clusters need it"}


def judge_versions(versions: Mapping[str, str]) -> list[Finding]:
    """A row for each library: installed or not."""
    advice = "Install the packages that requirements.lock lists."
    if program() == LAUNCHER:
        advice = f"Run {LAUNCHER} doctor, which sets up .venv; if there is one already, remove it and run it again."
    rows = []
    for name, version in versions.items():
        if name == "Python":
            supported = (3, 10) <= tuple(map(int, version.split(".")[:2])) < (3, 14)
            rows.append(Finding(name, version, PASS if supported else FAIL, "Use Python 3.10 to 3.13."))
        else:
            is_missing = name in _NEEDED and version.startswith(NONE)
            rows.append(Finding(name, version, FAIL if is_missing else PASS, advice))
        if name in _OPTIONAL and not is_installed(name.lower()):
            advice = f"{_OPTIONAL[name]}. To install it: {install_command(name.lower())}"
            rows[-1] = Finding(name, f"{NONE}: not installed", WARN, advice)
    return rows


def judge_cores(cores: int, busy: float) -> Finding:
    """The row of the CPU cores; `busy` is their share used by other programs."""
    advice = "Other programs run here: the measurements below are lower than what this machine can do."
    return Finding("cores", f"{cores}, {busy:.0%} busy", above(busy, _BUSY, 1.0), advice)


def judge_memory(total: int, free: int) -> Finding:
    """The row of the memory, in bytes."""
    mark = below(free, 4 * GIB, GIB)
    advice = "Less than 4 GiB is too little even for a small model; close other programs."
    return Finding("memory", f"{total / GIB:.0f} GiB, {free / GIB:.1f} free", mark, advice)


def judge_disk(what: str, path: Path, free: int, wanted: int, minimum: int) -> Finding:
    """The row of a folder's free space: below `wanted` bytes it is scarce, below `minimum` nothing works."""
    other = {
        "disk": "or work in another folder",
        "disk, temporary": "or set TMPDIR to another folder",
        "shared memory": "or give the container more (docker run --shm-size)",
    }[what]
    mark = below(free, wanted, minimum)
    return Finding(what, f"{free / GIB:.1f} GiB free on {path}", mark, f"Free {wanted / GIB:g} GiB, {other}.")


def judge_compiler(compiler: str, headers: str, error: str) -> Finding:
    """The row of the C++ compiler: its path, the path of Python.h ("": missing), and the error of a test build."""
    alternative = ", or set engine.compile: false."
    if not compiler:
        return Finding("C++ compiler", NONE, FAIL, f"Install g++ (apt-get install g++){alternative}")
    if not headers:
        advice = f"torch.compile needs Python.h (apt-get install python3-dev){alternative}"
        return Finding("C++ compiler", f"{compiler}, but no Python.h", FAIL, advice)
    if error:
        return Finding("C++ compiler", f"{compiler} cannot compile an extension: {error}", FAIL, f"Fix it{alternative}")
    return Finding("C++ compiler", f"{compiler} compiles an extension for Python")


def judge_gpus(files: int, count: int, versions: Mapping[str, str], visible: str | None) -> Finding:
    """The row of the GPUs: the driver shows `files` of them, torch sees `count`, and NCCL must connect them."""
    if count and versions["NCCL"] == NONE:
        return Finding("GPUs", f"{count}, but torch has no NCCL", FAIL, "Install a torch with NCCL.")
    if count:
        return Finding("GPUs", str(count))
    if not files:
        return Finding("GPUs", "none: workers train on the CPU")
    if visible is not None:
        return Finding("GPUs", f"{files}, hidden by CUDA_VISIBLE_DEVICES={visible}", WARN, "Unset it to train on them.")
    advice = (
        f"This torch ({versions['torch']}) is built for CPUs; install one for CUDA."
        if versions["CUDA"] == NONE
        else f"The driver does not support CUDA {versions['CUDA']} (see nvidia-smi): update it."
    )
    return Finding("GPUs", f"{files} that torch cannot use", FAIL, advice)


def judge_matmul(device: str, bf16: float, fp32: float, prefers_fp32: bool) -> Finding:
    """The row of a device's matrix products, in FLOP/s."""
    rates = f"{bf16 / 1e9:,.0f} GFLOP/s in bf16, {fp32 / 1e9:,.0f} in fp32"
    advice = "fp32 is faster than bf16 here: engine.precision: auto trains in fp32; do not set bf16 in the config."
    return Finding("matmul", f"{rates} ({device})", WARN if prefers_fp32 else PASS, advice)


def wandb_key() -> Finding:
    """The row that says whether wandb would find a key in the environment or in netrc. The key itself is not read."""
    has_key = bool(os.environ.get("WANDB_API_KEY"))
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        has_key = has_key or "api.wandb.ai" in netrc.netrc().hosts
    missing = f"{NONE}: runs are recorded offline; `wandb sync` uploads them later"
    if not is_installed("wandb"):
        missing = f"{NONE}: W&B is not installed"
    return Finding("W&B key", "present" if has_key else missing)

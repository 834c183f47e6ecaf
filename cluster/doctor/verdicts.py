"""Turns the measurements of one machine into findings. Nothing is measured here, so that tests can pass any values."""

import contextlib
import netrc
import os
from collections.abc import Mapping
from pathlib import Path

from cluster.doctor.rows import FAIL, PASS, WARN, Finding, mark_if_high, mark_if_low
from pretrain.common.commands import LAUNCHER, program
from pretrain.common.packages import install_command, is_installed

GIB = 1 << 30
NONE = "none"

_MAX_BUSY = 0.25  # share of the CPU time that other programs may use without a warning
_REQUIRED = ("torch", "gloo", "DeepSpeed", "Ray", "bertrain")
_OPTIONAL = {"DeepSpeed": "Training needs it", "Ray": "Several workers, sweeps and clusters need it"}


def judge_versions(versions: Mapping[str, str]) -> list[Finding]:
    """Return a row for each version, with a warning or failure for a library that is missing."""
    advice = "Install the packages that requirements.lock lists."
    if program() == LAUNCHER:
        advice = f"Remove .venv if it exists, then run {LAUNCHER} doctor, which sets it up."
    rows = []
    for name, version in versions.items():
        if name == "Python":
            supported = (3, 10) <= tuple(map(int, version.split(".")[:2])) < (3, 14)
            rows.append(Finding(name, version, PASS if supported else FAIL, "Use Python 3.10 to 3.13."))
        else:
            is_missing = name in _REQUIRED and version.startswith(NONE)
            rows.append(Finding(name, version, FAIL if is_missing else PASS, advice))
        if name in _OPTIONAL and not is_installed(name.lower()):
            optional_advice = f"{_OPTIONAL[name]}. To install it: {install_command(name.lower())}"
            rows[-1] = Finding(name, f"{NONE}: not installed", WARN, optional_advice)
    return rows


def judge_cores(cores: int, busy: float) -> Finding:
    """Return the row of the CPU cores; `busy` is the share of their time that other programs use."""
    advice = "Other programs run here: the measurements below are lower than what this machine can do."
    return Finding("cores", f"{cores}, {busy:.0%} busy", mark_if_high(busy, _MAX_BUSY, 1.0), advice)


def judge_memory(total: int, free: int) -> Finding:
    """Return the row of the memory; `total` and `free` are in bytes."""
    mark = mark_if_low(free, 4 * GIB, GIB)
    advice = "Even a small model needs 4 GiB; close other programs."
    return Finding("memory", f"{total / GIB:.0f} GiB, {free / GIB:.1f} free", mark, advice)


def judge_disk(what: str, path: Path, free: int, wanted: int, minimum: int) -> Finding:
    """Return the row of a folder's free space: a warning below `wanted` bytes, a failure below `minimum`."""
    alternative = {
        "disk": "or work in another folder",
        "disk, temporary": "or set TMPDIR to another folder",
        "shared memory": "or give the container more (docker run --shm-size)",
    }[what]
    mark = mark_if_low(free, wanted, minimum)
    return Finding(what, f"{free / GIB:.1f} GiB free on {path}", mark, f"Free {wanted / GIB:g} GiB, {alternative}.")


def judge_compiler(compiler: str, header: str, error: str) -> Finding:
    """Return the row of the C++ compiler; the arguments are results of `machine.try_compiler`."""
    alternative = ", or set engine.compile: false."
    if not compiler:
        return Finding("C++ compiler", NONE, FAIL, f"Install g++ (apt-get install g++){alternative}")
    if not header:
        advice = f"torch.compile needs Python.h (apt-get install python3-dev){alternative}"
        return Finding("C++ compiler", f"{compiler}, but no Python.h", FAIL, advice)
    if error:
        return Finding("C++ compiler", f"{compiler} cannot compile an extension: {error}", FAIL, f"Fix it{alternative}")
    return Finding("C++ compiler", f"{compiler} compiles an extension for Python")


def judge_gpus(total: int, usable: int, versions: Mapping[str, str], visible: str | None) -> Finding:
    """Return the row of the GPUs; torch can use `usable` of `total`. `visible` is the value of CUDA_VISIBLE_DEVICES."""
    if usable and versions["NCCL"] == NONE:
        return Finding("GPUs", f"{usable}, but torch has no NCCL", FAIL, "Install a build of torch with NCCL.")
    if usable:
        return Finding("GPUs", str(usable))
    if not total:
        return Finding("GPUs", "none: workers train on the CPU")
    if visible is not None:
        return Finding("GPUs", f"{total}, hidden by CUDA_VISIBLE_DEVICES={visible}", WARN, "Unset it to use them.")
    advice = (
        f"This torch ({versions['torch']}) is built for CPUs; install one for CUDA."
        if versions["CUDA"] == NONE
        else f"The driver does not support CUDA {versions['CUDA']} (see nvidia-smi): update it."
    )
    return Finding("GPUs", f"{total} that torch cannot use", FAIL, advice)


def judge_matmul(device: str, bf16: float, fp32: float, prefers_fp32: bool) -> Finding:
    """Return the row of a device's speed of matrix products; `bf16` and `fp32` are in FLOP/s."""
    rates = f"{bf16 / 1e9:,.0f} GFLOP/s in bf16, {fp32 / 1e9:,.0f} in fp32"
    advice = "fp32 is faster than bf16 on this device, so engine.precision: auto trains in fp32. Do not set bf16."
    return Finding("matmul", f"{rates} ({device})", WARN if prefers_fp32 else PASS, advice)


def judge_wandb_key() -> Finding:
    """Return the row that states whether the environment or netrc has a W&B key. The key is never printed."""
    has_key = bool(os.environ.get("WANDB_API_KEY"))
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        has_key = has_key or "api.wandb.ai" in netrc.netrc().hosts
    missing = f"{NONE}: runs are recorded offline; `wandb sync` uploads them later"
    if not is_installed("wandb"):
        missing = f"{NONE}: W&B is not installed"
    return Finding("W&B key", "present" if has_key else missing)

"""Whole training steps on CUDA tensors that do not exist, on any machine.

Fake tensors have a device, a type and a shape, and no values. Torch's builds for CPUs know no CUDA device; `device.cpp`
registers one on which nothing runs. `trace.py` runs steps of the engine there; `kernels.py` compiles their kernels.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]


def run(module: str, cases: Iterable[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return what a module of this package prints per case, in a process with the fake device, built in `folder`."""
    library, torch_folder = folder / "device.so", Path(torch.__file__).parent
    subprocess.run(
        [
            *("g++", "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder}/include", "-o", library),
            *(ROOT / "tests/fake_cuda/device.cpp", f"-L{torch_folder}/lib", f"-Wl,-rpath,{torch_folder}/lib"),
            *("-lc10", "-ltorch_cpu"),
        ],
        check=True,
    )
    done = subprocess.run(
        [sys.executable, "-m", f"tests.fake_cuda.{module}", *map(json.dumps, cases)],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(library), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

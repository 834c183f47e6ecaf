"""The settings of torch.compile hold in every thread, and its kernels are launched without Python's lock."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading

import torch

from pretrain.model.compile import program


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_every_thread_has_the_settings() -> None:
    """A backward pass on CUDA runs, and may compile, in a thread of its own."""
    found: dict[str, tuple[int, bool, bool]] = {}

    def run(name: str) -> None:
        assert program(double, fused=True)(torch.ones(3)).tolist() == [2.0] * 3
        config, symbols = torch._dynamo.config, importlib.import_module("torch.fx.experimental._config")
        found[name] = config.recompile_limit, config.specialize_float, symbols.use_duck_shape

    run("main")
    thread = threading.Thread(target=run, args=("other",))
    thread.start()
    thread.join()
    assert found == {"main": (32, True, False), "other": (32, True, False)}


def test_a_launch_that_waits_for_the_device_does_not_hold_pythons_lock() -> None:
    """Else a rank behind a full queue would send no heartbeats."""
    code = "import pretrain.train, finetune.train, torch._inductor.config as c; print(c.use_static_cuda_launcher)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

"""torch.compile: settings in every thread, code that no batch size shaped, launches without Python's lock."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading

import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

from pretrain.model.compile import MARKS_UNKNOWN_SIZES, program


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_every_thread_has_the_settings() -> None:
    """A backward pass on CUDA runs, and may compile, in a thread of its own."""
    found: dict[str, tuple[int, bool, bool]] = {}

    def run(name: str) -> None:
        assert program(double, True, ("M",))(torch.ones(3)).tolist() == [2.0] * 3
        config, symbols = torch._dynamo.config, importlib.import_module("torch.fx.experimental._config")
        found[name] = config.recompile_limit, config.specialize_float, symbols.use_duck_shape

    run("main")
    thread = threading.Thread(target=run, args=("other",))
    thread.start()
    thread.join()
    assert found == {"main": (32, True, False), "other": (32, True, False)}


def rows_of_heads(x_TND: torch.Tensor, rows_M: torch.Tensor) -> torch.Tensor:
    return x_TND[rows_M].float().exp().sum((1, 2))


@pytest.mark.skipif(not MARKS_UNKNOWN_SIZES, reason="this torch relies on sizes")
@pytest.mark.parametrize(("width", "same"), [(64, True), (16, False)])
def test_the_code_does_not_depend_on_the_first_batch(width: int, same: bool) -> None:
    """The compiler's cache on disk hands it to later runs: of large batches, and of other models unless it differs."""

    def code(tokens: int, width: int) -> str:
        torch._dynamo.reset()
        function = program.__wrapped__(rows_of_heads, True, ("T", "M"))
        x, rows = torch.zeros(tokens, 4, width, dtype=torch.bfloat16), torch.zeros(tokens, dtype=torch.int64)
        with (
            inductor_config.patch(fx_graph_cache=False),
            functorch_config.patch(enable_autograd_cache=False),
        ):
            (found,) = run_and_get_code(function, x, rows)[1]
        return found.partition("async_compile = ")[2].partition("def benchmark")[0]

    assert (code(3, 64) == code(5000, width)) is same


def test_a_launch_that_waits_for_the_device_does_not_hold_pythons_lock() -> None:
    """Else a rank behind a full queue would send no heartbeats."""
    code = "import pretrain.train, finetune.train, torch._inductor.config as c; print(c.use_static_cuda_launcher)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

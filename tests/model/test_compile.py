"""torch.compile: settings in every thread, code that no batch size shaped, launches without Python's lock."""

import importlib
import os
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache, run_and_get_code

from pretrain.config import ModelConfig
from pretrain.model.compile import SUPPORTS_UNBACKED_SIZES, maybe_compile, remove_unfinished_libraries
from pretrain.model.heads import PretrainingModel
from pretrain.model.positions import Rotation
from pretrain.model.projection import QKV_AXES, form_qkv
from tests.batches_by_hand import make_batch
from tests.distributed import run_program, run_workers

FAMILIES = {
    "bert": {},
    "modernbert": {"family": "modernbert", "local_attention": 0, "global_every": 1, "local_rotary_base": 0},
}


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def test_every_thread_has_the_settings() -> None:
    """A backward pass on CUDA runs, and may compile, in a thread of its own."""
    found: dict[str, tuple[int, bool, bool]] = {}

    def run(name: str) -> None:
        assert maybe_compile(double, True, ("M",))(torch.ones(3)).tolist() == [2.0] * 3
        config, symbols = torch._dynamo.config, importlib.import_module("torch.fx.experimental._config")
        found[name] = config.recompile_limit, config.specialize_float, symbols.use_duck_shape

    run("main")
    thread = threading.Thread(target=run, args=("other",))
    thread.start()
    thread.join()
    assert found == {"main": (32, True, False), "other": (32, True, False)}


def rows_of_heads(x_TND: torch.Tensor, rows_M: torch.Tensor) -> torch.Tensor:
    return x_TND[rows_M].float().exp().sum((1, 2))


def write_code(tokens: int, width: int) -> str:
    """The kernel's code, compiled for a first call of so many tokens. torch drops all compiled code to get it."""
    function = maybe_compile(rows_of_heads, True, ("T", "M"))
    x, rows = torch.zeros(tokens, 4, width, dtype=torch.bfloat16), torch.zeros(tokens, dtype=torch.int64)
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        (found,) = run_and_get_code(function, x, rows)[1]
    return found.partition("async_compile = ")[2].partition("def benchmark")[0]


@pytest.mark.skipif(not SUPPORTS_UNBACKED_SIZES, reason="this torch relies on sizes")
def test_the_code_does_not_depend_on_the_first_batch() -> None:
    """The compiler's cache on disk hands it to later runs: of large batches, and of other models unless it differs."""
    sizes = ((3, 64), (5000, 64), (5000, 16))
    (few,), (many,), (narrow,) = (run_workers(1, write_code, *size) for size in sizes)
    assert "kernel" in few
    assert few == many != narrow


def turned_heads(x_MH: torch.Tensor, heads: int) -> torch.Tensor:
    return x_MH.unflatten(-1, (heads, -1)).flip(-1).exp().flatten(-2)


def write_code_for(*heads: int) -> list[str]:
    function = maybe_compile(turned_heads, True, ("M",))
    found = [run_and_get_code(function, torch.zeros(7, 64), number)[1][0] for number in heads]
    return [code.partition("async_compile = ")[2].partition("def benchmark")[0] for code in found]


def test_a_number_is_a_constant_of_the_code() -> None:
    """Not one more size that varies: on a GPU each address would be computed with divisions by it."""
    ((two, four),) = run_workers(1, write_code_for, 2, 4)
    assert "ks0" in two, "the rows"
    assert "ks1" not in two
    assert two != four
    x = torch.randn(5, 8)
    for heads in (1, 4):
        torch.testing.assert_close(maybe_compile(turned_heads, True, ("M",))(x, heads), turned_heads(x, heads))


def count_graphs(family: str) -> list[int]:
    """How many graphs have been compiled after each of some batches: frozen teacher, inference and training."""
    shape = {"size": "custom", "layers": 4, "hidden": 32, "heads": 2, "max_positions": 64, **FAMILIES[family]}
    student, teacher = (PretrainingModel(ModelConfig.model_validate(shape), 101, compile=True) for _ in range(2))
    teacher.requires_grad_(False)
    counts = []
    for lengths in ((2, 1, 3), (60, 41, 7, 7), (5,), (1,), (64,) * 9, (2, 2)):
        batch = make_batch(lengths, 101)
        with torch.no_grad():
            for model in (teacher, student):
                model(batch)
        with torch.inference_mode():
            student.masked_logits(batch)
        output = student(batch)
        (output.mlm_loss + output.nsp_loss).backward()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return counts


@pytest.mark.skipif(not SUPPORTS_UNBACKED_SIZES, reason="this torch relies on sizes")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_compiles_nothing_new_for_any_batch(family: str) -> None:
    """Not for a single token, mask or sequence either, which the compiler would take for constants."""
    (counts,) = run_workers(1, count_graphs, family)
    assert counts == [counts[0]] * len(counts)


@pytest.mark.skipif(not SUPPORTS_UNBACKED_SIZES, reason="this torch relies on sizes")
def test_rotating_what_flash_attention_reads_compiles_once() -> None:
    stats, seen = torch._dynamo.utils.counters["stats"], set()
    for tokens in (1, 3, 500):
        angles = torch.rand(tokens, 4)
        rotation = Rotation(angles.cos(), angles.sin())
        products = torch.randn(tokens, 48)
        whole = form_qkv((products,), (None,), rotation, 2)
        found = maybe_compile(form_qkv, True, QKV_AXES)((products.clone(),), (None,), rotation, 2)
        torch.testing.assert_close(found, whole)
        seen.add(stats["unique_graphs"])
    assert len(seen) == 1


def launcher() -> None:
    print(inductor_config.use_static_cuda_launcher, "pretrain.run.train" in sys.modules)


def test_a_launch_that_waits_for_the_device_does_not_hold_pythons_lock() -> None:
    """Else a rank behind a full queue would send no heartbeats. Trainings are imported there, and nothing else."""
    assert run_program(launcher).stdout == "False True\n"


def test_libraries_that_a_killed_linker_left_are_removed(tmp_path: Path) -> None:
    """Not those of another process that may be linking now."""
    data, folder = Path(np.random.mtrand.__file__).read_bytes(), tmp_path / "ab"
    folder.mkdir()
    for name, content in {"whole": data, "empty": b"", "header": data[:64], "half": data[: len(data) // 2]}.items():
        (folder / f"{name}.so").write_bytes(content)
        os.utime(folder / f"{name}.so", (0, 0))
    (folder / "now.so").touch()
    remove_unfinished_libraries(tmp_path)
    assert sorted(path.stem for path in folder.iterdir()) == ["now", "whole"]


def test_a_compilation_that_a_signal_to_the_process_group_ends_is_repeated(tmp_path: Path) -> None:
    compiler, killed = tmp_path / "g++", tmp_path / "killed"
    once = f'[ -e {killed} ] || case "$*" in *.main.cpp*) touch {killed}; kill $$;; esac'
    compiler.write_text(f'#!/bin/sh\n{once}\nexec {shutil.which("g++")} "$@"')
    compiler.chmod(0o755)
    settings = {"cpp.cxx": (str(compiler),), "cpp_cache_precompile_headers": False}
    with fresh_cache(), inductor_config.patch(settings):
        assert maybe_compile(lambda x: x * 2 + 1, True, ("T",))(torch.ones(3)).tolist() == [3] * 3
    assert killed.exists()

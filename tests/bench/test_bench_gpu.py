"""`bench gpu` on a machine without a GPU: its error, its steps on CPU, its table, and the count of host reads."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from pretrain.planning.roofline import GPUS
from tests.bench import gpu
from tests.bench.__main__ import main
from tests.bench.gpu import Case, gpu_of, host_reads, measure, table

SHAPE = {"size": "custom", "layers": 1, "hidden": 32, "heads": 2, "max_positions": 64}
SMALL = Case("small", 16, 64, 101, SHAPE)


def test_without_a_gpu_it_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["gpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: bench gpu: torch ")
    assert "finds no GPU" in line


@pytest.mark.parametrize(
    ("known", "name"),
    [
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("A100", "NVIDIA A100-SXM4-80GB"),
        ("L4", "NVIDIA L4"),
        ("RTX4090", "NVIDIA GeForce RTX 4090"),
        ("", "NVIDIA T4"),
        ("", "NVIDIA L40"),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name(name: str, known: str) -> None:
    assert gpu_of(name) is GPUS.get(known)


def test_a_small_model_is_trained_and_stands_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "BLOCKS", 2)
    row = measure(SMALL, 1, "bf16", GPUS["H100"])
    assert row["seconds"] > 0
    assert row["spread_seconds"][0] <= row["seconds"] <= row["spread_seconds"][1]
    assert row["share"] == row["limit_seconds"] / row["seconds"]
    assert row["limited_by"] == "launches"
    assert row["parts"]["launches"] == row["limit_seconds"]
    header, line = table([row]).splitlines()
    assert header.split("  ")[0] == "model"
    assert line.startswith("small  4 x 16 bf16  ")
    assert "launches" in line


def test_rows_without_times_or_limits() -> None:
    row: dict[str, Any] = {"model": "large", "length": 128, "sequences": 8, "precision": "fp32"}
    failed = {**row, "failed": "does not fit into this GPU's memory"}
    timed = {**row, "seconds": 0.5, "host_reads": {"engine.py:10": 2, "loop.py:3": 1}, "memory_bytes": 3 << 30}
    lines = table([failed, timed]).splitlines()
    assert " ".join(lines[1].split()) == f"large 8 x 128 fp32 - - - - - - {failed['failed']}"
    assert " ".join(lines[2].split()) == "large 8 x 128 fp32 500.0 2,048 - - - 3 3.0"
    assert lines[3:] == ["host read: engine.py:10", "host read: loop.py:3"]


def test_host_reads_are_counted_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    synchronize = lambda device: modes.append("waited")  # noqa: E731
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    def step() -> None:
        assert modes[-1] == "warn"
        torch.cuda.synchronize(device="cuda:0")
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("another warning", stacklevel=1)

    reads = host_reads(step)
    assert sorted(reads.values()) == [1, 1, 3]
    assert all(place.startswith(__file__) for place in reads)
    assert modes == [0, "warn", "waited", 0]
    assert torch.cuda.synchronize is synchronize

    def fail() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        host_reads(fail)
    assert modes[-1] == 0

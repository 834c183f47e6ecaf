"""Rates of the machine: measured once, and kept unless other programs disturbed the measurement."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.common import measured
from pretrain.common.measured import rates_file, remembered
from pretrain.model import precision


@pytest.fixture
def waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """What `waited_seconds` says; the cache folder is a new one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seconds = {1: 5.0}
    monkeypatch.setattr(measured, "waited_seconds", lambda: dict(seconds))
    return seconds


def test_a_rate_is_measured_once(waits: dict[int, float]) -> None:
    assert remembered("bf16", lambda: 7e11) == 7e11
    assert remembered("bf16", lambda: pytest.fail("measured again")) == 7e11
    assert remembered("fp32", lambda: 2e11) == 2e11
    assert remembered("bf16", lambda: pytest.fail("measured again")) == 7e11


def test_a_rate_beside_other_programs_is_measured_again(waits: dict[int, float]) -> None:
    def disturbed() -> float:
        waits[1] += 1.0
        return 1e11

    assert remembered("bf16", disturbed) == 1e11
    assert remembered("bf16", lambda: 7e11) == 7e11


def test_a_machine_that_records_no_waits_is_measured_each_time(waits: dict[int, float]) -> None:
    waits.clear()
    assert remembered("bf16", lambda: 1e11) == 1e11
    assert remembered("bf16", lambda: 7e11) == 7e11


@pytest.mark.parametrize("changed", ["torch", "cores"])
def test_another_machine_or_version_is_measured(waits: dict[int, float], monkeypatch: Any, changed: str) -> None:
    assert remembered("bf16", lambda: 1e11) == 1e11
    if changed == "torch":
        monkeypatch.setattr(measured.importlib.metadata, "version", lambda _: "another")
    else:
        monkeypatch.setattr(measured.os, "sched_getaffinity", lambda _: {0, 7})
    assert remembered("bf16", lambda: 7e11) == 7e11


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}'])
def test_a_damaged_file_is_replaced(waits: dict[int, float], content: str) -> None:
    rates_file().parent.mkdir()
    rates_file().write_text(content)
    assert remembered("bf16", lambda: 7e11) == 7e11
    assert remembered("bf16", lambda: pytest.fail("measured again")) == 7e11


def test_the_rates_of_a_cpu_are_remembered(waits: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(precision, "measure_matmul", lambda *_, threads=0: made.append(threads) or 1e11)
    for _ in range(2):
        for function in (precision.of_one_thread, precision.matmul_peak):
            function.cache_clear()
        precision.offer(torch.device("cpu"))
        precision.matmul_peak("cpu", "bf16")
    assert made == [1, 1, 0]
    for function in (precision.of_one_thread, precision.matmul_peak):
        function.cache_clear()

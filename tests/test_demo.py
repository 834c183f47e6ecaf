"""What the demo decides by itself."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pretrain import demo


@pytest.mark.parametrize("kept", ["bf16", "fp32"])
def test_a_run_goes_on_in_its_own_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    (tmp_path / "config.yaml").write_text(f"""
name: demo
corpus: {{dir: corpus}}
phases: [{{sequence_length: 32, global_sequences: 8, steps: 3, peak_learning_rate: 1e-3}}]
engine: {{precision: {kept}}}
""")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("it is not measured anew"))
    assert demo.precision(tmp_path) == kept


def test_a_new_run_takes_a_precision_and_what_is_set_goes_before(tmp_path: Path) -> None:
    arguments = demo.parser().parse_args(["--run-dir", str(tmp_path), "--set", "engine.precision=bf16"])
    assert demo.precision(tmp_path / "new") in ("bf16", "fp32")
    assert demo._settings(arguments, "fp32")[-3:] == [
        "engine.precision=fp32",
        "--set",
        "engine.precision=bf16",
    ]
    assert "engine.precision=fp32" not in demo._settings(arguments, "bf16")

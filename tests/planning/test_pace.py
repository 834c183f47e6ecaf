"""A schedule for a given time: what is scaled, what is timed, and what a resumed run keeps."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import make_corpus

from pretrain.common import measured
from pretrain.common.errors import MachineError
from pretrain.common.measured import cached_rate, rates_file
from pretrain.config import ModelConfig, PretrainConfig
from pretrain.model import precision
from pretrain.planning import pace
from pretrain.run import preflight
from tests.tasks.refusals import refused


def make_config(folder: Path, *phases: dict[str, Any], **values: Any) -> PretrainConfig:
    phase = {"sequence_length": 32, "global_sequences": 8, "steps": 100, "peak_learning_rate": 1e-3}
    model = {"size": "custom", "layers": 1, "hidden": 32, "heads": 2, "max_positions": 32}
    usual = {"name": "paced", "run_dir": str(folder / "run"), "corpus": {"dir": str(folder / "corpus")}, "model": model}
    usual |= {
        "phases": [{**phase, **one} for one in phases or ({},)],
        "engine": {"precision": "fp32", "compile": False},
    }
    return PretrainConfig.model_validate({**usual, **values})


def test_all_parts_of_a_schedule_are_scaled(tmp_path: Path) -> None:
    config = make_config(
        tmp_path,
        {"warmup_steps": 10, "decay_steps": 40},
        {"steps": 300, "ramp_from": 2, "ramp_steps": 60},
        checkpoint={"every_steps": 50},
        evaluation={"every_steps": 20, "probes": {"texts": ["x"]}},
    )
    scaled = pace.scale(config, 2.5)
    assert not pace.timing_config(config, tmp_path / "timed", 7).evaluation.probes.is_on
    first, second = scaled.phases
    assert (first.steps, first.warmup_steps, first.decay_steps) == (250, 25, 100)
    assert (second.steps, second.ramp_from, second.ramp_steps) == (750, 2, 150)
    assert (scaled.checkpoint.every_steps, scaled.evaluation.every_steps) == (125, 50)
    assert first.peak_learning_rate == config.phases[0].peak_learning_rate
    assert first.global_sequences == config.phases[0].global_sequences


@pytest.mark.parametrize("factor", [1e-6, 0.013, 0.1, 0.37, 1.0, 7.77])
def test_any_factor_gives_a_valid_schedule(tmp_path: Path, factor: float) -> None:
    phases = {"warmup_steps": 33, "decay_steps": 67}, {"steps": 11, "ramp_from": 2, "ramp_steps": 3}
    config = make_config(tmp_path, *phases)
    assert all(phase.steps >= 1 for phase in pace.scale(config, factor).phases)
    assert pace.scale(config, 1.0) == config


def test_checkpoints_that_are_kept_move_with_their_phases(tmp_path):
    config = make_config(tmp_path)
    phases = [config.phases[0].model_copy(update={"steps": steps}) for steps in (10, 30)]
    checkpoint = config.checkpoint.model_copy(update={"keep_at": (1, 10, 25, 40)})
    config = config.model_copy(update={"phases": tuple(phases), "checkpoint": checkpoint})
    assert pace.scale(config, 3.0).checkpoint.keep_at == (3, 30, 75, 120)
    assert pace.scale(config, 0.25).checkpoint.keep_at == (1, 2, 6, 10)  # phases of 2 and 8 steps


def test_a_short_decay_stays_one(tmp_path: Path) -> None:
    """0 steps of decay would be a decay from the warm-up on."""
    config = make_config(tmp_path, {"steps": 1000, "warmup_steps": 900, "decay_steps": 100})
    for factor in (0.05, 0.009, 0.002, 1e-6):
        phase = pace.scale(config, factor).phases[0]
        assert phase.decay_steps == max(1, phase.steps // 10)
    assert pace.scale(make_config(tmp_path), 0.01).phases[0].decay_steps == 0


def fake_timing(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Stands in for the timed run: a second cannot be relied on here."""
    monkeypatch.setattr(pace, "time_steps", lambda config, steps: seconds)


def test_the_steps_fill_the_time(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    fake_timing(monkeypatch, 2.0)
    fitted = pace.fit(make_config(tmp_path, {"steps": 100}), 30)
    line = capsys.readouterr().out
    assert fitted.total_steps == 0.95 * 30 * 60 / 2.0
    assert "2 s each" in line
    assert "855 steps take about 30 min (100 in the config)" in line


def test_longer_sequences_of_a_later_phase_take_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two phases of equal steps, the second with twice the sequences: a third of the time is the first one's."""
    fake_timing(monkeypatch, 1.0)
    fitted = pace.fit(make_config(tmp_path, {}, {"global_sequences": 16}), 10)
    assert [phase.steps for phase in fitted.phases] == [190, 190]


def test_phases_are_weighed_by_the_lengths_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second phase has full sequences, the first one half of them: a third of the time is the first one's."""
    fake_timing(monkeypatch, 1.0)
    config = make_config(tmp_path, {}, {}, pairs={"objective": "none"})
    fitted = pace.fit(config, 10, [8.0, 32.0])
    work = [one.executed for one in pace.work_of_phases(config, [8.0, 32.0])]
    assert work[1] > 3 * work[0]
    assert [phase.steps for phase in fitted.phases] == [round(570 / (1 + work[1] / work[0]))] * 2


def test_a_teacher_takes_its_part_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_timing(monkeypatch, 1.0)
    config = make_config(tmp_path, pairs={"objective": "none"}, distillation={"teacher": "big"})
    monkeypatch.setattr(pace, "read_frozen_config", lambda _: None)
    alone = pace.work_of_phases(config, None)[0].executed
    monkeypatch.setattr(pace, "read_frozen_config", lambda _: ModelConfig(size="mini"))
    assert pace.work_of_phases(config, None)[0].executed > 1.5 * alone


def test_a_time_for_less_than_a_step_is_not_promised(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    fake_timing(monkeypatch, 60.0)
    fitted = pace.fit(make_config(tmp_path, {}, {}), 0.5)
    assert fitted.total_steps == 2
    assert "2 steps take about 2.11 min, not 0.5 (200 in the config)" in capsys.readouterr().out


def test_a_ramp_is_timed_at_full_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the steps have 4 sequences, half 8: 3/4 of the time that full batches would take."""
    fake_timing(monkeypatch, 1.0)
    fitted = pace.fit(make_config(tmp_path, {"ramp_from": 4, "ramp_steps": 50}), 10)
    assert fitted.total_steps == pytest.approx(0.95 * 600 / 0.75, abs=2)


@pytest.mark.parametrize(
    ("minutes", "values", "message"),
    [
        *((minutes, {}, "expected a number above 0") for minutes in (0.0, -3.0, float("nan"), float("inf"))),
        (5, {"scheduling": {"address": "ray://head:10001"}}, "only on this machine"),
    ],
)
def test_what_cannot_be_timed_is_refused(tmp_path: Path, minutes: float, values: dict[str, Any], message: str) -> None:
    refused(message, pace.fit, make_config(tmp_path, **values), minutes)


def test_steps_are_timed_in_a_run_that_leaves_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path, corpus={"dir": str(make_corpus(tmp_path / "corpus"))})
    assert pace.time_steps(config, 3) > 0
    assert not config.folder.exists()


def test_a_step_takes_the_median_without_the_first_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slow steps, then one of 0.4 s and one of 0.6 s."""
    records = [{"step": step, "seconds": seconds} for step, seconds in enumerate((30.0, 31.0, 31.4, 32.0), 1)]
    monkeypatch.setattr(pace, "run_program", lambda command: subprocess.CompletedProcess(command, 0))
    monkeypatch.setattr(pace, "read_records", lambda run: records)
    assert pace.time_steps(make_config(tmp_path), 2) == pytest.approx(0.5)


def test_every_worker_of_the_timed_run_has_a_sequence_to_evaluate(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"ramp_from": 4, "ramp_steps": 50}, scheduling={"workers": 3})
    timed = pace.timing_config(config, tmp_path / "timed", 7)
    assert timed.evaluation.sequences == 3
    assert (timed.total_steps, timed.phases[0].batch_sizes, timed.folder) == (7, (8,), tmp_path / "timed")


def test_a_timed_run_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Traceback\npretrain.InputError: corpus: not found\n"
    monkeypatch.setattr(pace, "run_program", lambda command: subprocess.CompletedProcess(command, 1, "", said))
    with pytest.raises(MachineError, match=r"^The run that times steps failed: .*corpus"):
        pace.time_steps(make_config(tmp_path), 1)


def test_a_resumed_run_keeps_its_schedule(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"warmup_steps": 10})
    assert pace.with_recorded_schedule(config) == config
    fitted = pace.scale(config, 3.3)
    fitted.folder.mkdir(parents=True)
    preflight.record_config(fitted)
    assert pace.with_recorded_schedule(config) == fitted


# ---- rates of the machine: measured once, and kept unless other programs disturbed the measurement


@pytest.fixture
def waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """What `waited_seconds` says; the cache folder is a new one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seconds = {1: 5.0}
    monkeypatch.setattr(measured, "waited_seconds", lambda: dict(seconds))
    return seconds


def test_a_rate_is_measured_once(waits: dict[int, float]) -> None:
    assert cached_rate("bf16", lambda: 7e11) == 7e11
    assert cached_rate("bf16", lambda: pytest.fail("measured again")) == 7e11
    assert cached_rate("fp32", lambda: 2e11) == 2e11
    assert cached_rate("bf16", lambda: pytest.fail("measured again")) == 7e11


def test_a_rate_beside_other_programs_is_measured_again(waits: dict[int, float]) -> None:
    def disturbed() -> float:
        waits[1] += 1.0
        return 1e11

    assert cached_rate("bf16", disturbed) == 1e11
    assert cached_rate("bf16", lambda: 7e11) == 7e11


def test_a_machine_that_records_no_waits_is_measured_each_time(waits: dict[int, float]) -> None:
    waits.clear()
    assert cached_rate("bf16", lambda: 1e11) == 1e11
    assert cached_rate("bf16", lambda: 7e11) == 7e11


@pytest.mark.parametrize("changed", ["torch", "cores"])
def test_another_machine_or_version_is_measured(waits: dict[int, float], monkeypatch: Any, changed: str) -> None:
    assert cached_rate("bf16", lambda: 1e11) == 1e11
    if changed == "torch":
        monkeypatch.setattr(measured.importlib.metadata, "version", lambda _: "another")
    else:
        monkeypatch.setattr(measured.os, "sched_getaffinity", lambda _: {0, 7})
    assert cached_rate("bf16", lambda: 7e11) == 7e11


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1}'])
def test_a_damaged_file_is_replaced(waits: dict[int, float], content: str) -> None:
    rates_file().parent.mkdir()
    rates_file().write_text(content)
    assert cached_rate("bf16", lambda: 7e11) == 7e11
    assert cached_rate("bf16", lambda: pytest.fail("measured again")) == 7e11


def test_the_rates_of_a_cpu_are_remembered(waits: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(precision, "measure_matmul", lambda *_, threads=0: made.append(threads) or 1e11)
    for _ in range(2):
        for function in (precision.single_thread_peak, precision.matmul_peak):
            function.cache_clear()
        precision.capabilities(torch.device("cpu"))
        precision.matmul_peak("cpu", "bf16")
    assert made == [1, 1, 0]
    for function in (precision.single_thread_peak, precision.matmul_peak):
        function.cache_clear()

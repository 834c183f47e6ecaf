"""Many trials through Ray Tune: side by side, their crashes and other ends, on a Ray of our own and on a cluster."""

from pathlib import Path
from typing import Any

import pytest

from cluster.workers.request import TrialRequest
from cluster.workers.trials import run_trials
from pretrain.common.errors import DivergedError, InputError, MachineError
from pretrain.common.worker import TrainingRequest
from tests.workers.test_cluster import CORES, ROOT, own_head

TRIALS = (
    {"name": "a", "do": "meet", "other": "b"},
    {"name": "b", "do": "meet", "other": "a"},
    {"name": "c", "do": "die once"},
    {"name": "d", "do": "diverge"},
    {"name": "e", "do": "bug"},
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, with the targets importable by workers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    return tmp_path


def run_all(trials: tuple[dict[str, Any], ...], **options: Any) -> dict[str, Exception | None]:
    """Run the trials; returns the error, if any, of each."""
    found: dict[int, Exception | None] = {}
    requests = [TrialRequest(Path("run") / trial["name"], TrainingRequest(trial, True)) for trial in trials]
    where: dict[str, Any] = {"name": "test", "run_dir": Path("run"), "poll": found.update}
    run_trials("trial_targets:trial", requests, **where, **options)
    return {str(TRIALS[number]["name"]): error for number, error in found.items()}


@pytest.mark.skipif(CORES < 2, reason="needs two cores")
def test_trials_run_side_by_side_and_only_crashes_are_repeated(folder: Path) -> None:
    outcomes = run_all(TRIALS, parallel=2, cpus_per_trial=1, max_failures=1)
    assert list(map(outcomes.get, "abc")) == [None, None, None]
    assert set(outcomes) == set("abcde")
    assert isinstance(outcomes["d"], DivergedError)
    assert str(outcomes["d"]) == "step 3: loss is NaN."
    assert isinstance(outcomes["e"], MachineError)
    message = str(outcomes["e"])
    assert "\n" not in message
    assert "run/e/logs/worker-0.log: crashed (ZeroDivisionError: a bug in two lines) and all max_failures=1" in message
    starts = {name: (folder / f"starts-{name}").read_text().splitlines() for name in "abcde"}
    assert {name: len(lines) for name, lines in starts.items()} == {"a": 1, "b": 1, "c": 2, "d": 1, "e": 2}
    assert all(line.split()[0] == "1" for lines in starts.values() for line in lines)
    processes = [line.split()[1] for lines in starts.values() for line in lines]
    assert len(set(processes)) == len(processes), "two trials shared a process"
    assert "Traceback" in (folder / "run/e/logs/worker-0.log").read_text()


@pytest.mark.slow
def test_trials_run_on_a_cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with own_head(tmp_path_factory, cpus=2) as (head, port):
        errors = run_all(TRIALS[:4], address=f"127.0.0.1:{port}", parallel=2)
        kinds = {name: type(error) for name, error in errors.items()}
        assert kinds == {"a": type(None), "b": type(None), "c": MachineError, "d": DivergedError}
        assert head.poll() is None, "the cluster is not ours to end"


def test_an_address_is_host_and_port(folder: Path) -> None:
    with pytest.raises(InputError, match="host:port"):
        run_all(TRIALS, address="auto")
    assert not (folder / "run").exists()

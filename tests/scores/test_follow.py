"""`evaluate-pretrained RUN --follow`: which checkpoints are scored, what is recorded, and what it copes with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from corpora import make_corpus
from starts import Start, pretraining, starts

from finetune.cli import main
from finetune.scores.follow import follow
from pretrain.checkpoint import hf
from pretrain.common.errors import MachineError
from pretrain.common.files import checkpoint_names, locked
from pretrain.common.records import read_records
from pretrain.common.run_files import CONFIG_FILE, PROBES
from pretrain.config import PretrainConfig, load_config
from pretrain.run.preflight import record_config
from tests.distributed import run_workers
from tests.tasks.refusals import refused

WORDS = ["--text-scores", "held_out", "--length", "64"]


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps with four checkpoints, the last of which has averaged weights."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = make_corpus(folder / "corpus", documents=60, vocabulary_size=300)
    values = pretraining(corpus, folder / "run", [(32, 8, 8)], checkpoint__every_steps=2, checkpoint__keep_last=9)
    values["phases"][0]["averaged_share"] = 0.25
    values["evaluation"]["every_steps"] = 1  # of the checkpoints, which come every second step
    assert run_workers(1, starts, [Start(values)]) == [[""]]
    record_config(PretrainConfig.model_validate(values))
    return folder / "run"


@pytest.fixture
def run(parent: Path, tmp_path: Path) -> Path:
    """The run as it is after two steps."""
    shutil.copytree(parent, tmp_path / "run", ignore=shutil.ignore_patterns("step-0000000[468]"))
    return tmp_path / "run"


class Scores:
    """Half the number of a checkpoint, as its held-out loss, and what is to happen before and after it is told."""

    def __init__(self, **meanwhile: Callable[[], object]) -> None:
        self.measured: list[int] = []
        self.meanwhile = meanwhile

    def __call__(self, model: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        assert (model / "config.json").is_file()
        run = model.parents[1]
        step = int(checkpoint_names(run)[-1].removeprefix("step-"))
        self.measured.append(step)
        yield "held_out", {"scores": {"nats_per_token": step / 2}}
        self.meanwhile.pop(f"at_{step}", lambda: None)()


def saved(parent: Path, run: Path, *steps: int) -> None:
    for step in steps:
        shutil.copytree(parent / "checkpoints" / f"step-{step:08d}", run / "checkpoints" / f"step-{step:08d}")


def test_the_newest_is_scored_and_those_before_it_are_counted(parent: Path, run: Path) -> None:
    scores = Scores(at_2=lambda: saved(parent, run, 4, 6), at_6=lambda: saved(parent, run, 8))
    follow(run, scores)
    found = read_records(run, PROBES)
    fields = ("step", "skipped", "averaged", "held_out")
    assert [tuple(one[name] for name in fields) for one in found] == [(2, 0, 0, 1.0), (6, 1, 0, 3.0), (8, 0, 2, 4.0)]
    assert not (run / "probes" / "model").exists()
    follow(run, scores)
    assert len(scores.measured) == 3


def test_an_error_is_recorded_with_what_was_scored_before_it(parent: Path, run: Path) -> None:
    """Though the checkpoint is gone."""

    def fails() -> None:
        shutil.rmtree(run / "checkpoints" / "step-00000002")
        saved(parent, run, 8)
        raise ValueError("no\nluck")

    follow(run, Scores(at_2=fails, at_8=MagicMock(side_effect=MachineError("disk full"))))
    first, last = read_records(run, PROBES)
    assert (first["step"], first["error"], first["held_out"]) == (2, "ValueError: no luck", 1.0)
    assert (last["step"], last["error"], last["held_out"]) == (8, "MachineError: disk full", 4.0)


def test_a_checkpoint_that_is_removed_before_it_is_exported_is_no_error(parent, run, monkeypatch) -> None:
    export = hf.export_run

    def pruned(*given: Any, **options: Any) -> None:
        if not (run / "checkpoints" / "step-00000008").exists():
            saved(parent, run, 8)
            shutil.rmtree(run / "checkpoints" / "step-00000002")
        export(*given, **options)

    monkeypatch.setattr(hf, "export_run", pruned)
    follow(run, Scores())
    assert [(one["step"], "error" in one) for one in read_records(run, PROBES)] == [(8, False)]


def test_a_run_that_is_longer_than_its_checkpoint_says_is_followed_on(parent, run, monkeypatch) -> None:
    """A run that was resumed with more steps, or a fork."""
    saved(parent, run, 8)
    config = load_config(run / CONFIG_FILE)
    (phase,) = config.phases
    longer = config.model_copy(update={"phases": [phase.model_copy(update={"steps": 16})], "run_dir": str(run)})
    record_config(longer)

    def sleep(seconds: float) -> None:
        if seconds:
            raise TimeoutError("it waits for more")

    monkeypatch.setattr("finetune.scores.follow.time.sleep", sleep)
    with pytest.raises(TimeoutError):
        follow(run, Scores())
    assert [one["step"] for one in read_records(run, PROBES)] == [8]


def test_a_step_that_was_done_again_is_scored_again(parent: Path, run: Path) -> None:
    saved(parent, run, 8)
    (run / PROBES).write_text('{"step": 2, "split": "probe", "held_out": 1.0}\n{"step": 4, "spl')  # killed in mid-line
    follow(run, Scores())
    assert [(one["step"], one["held_out"]) for one in read_records(run, PROBES)] == [(2, 1.0), (8, 4.0)]


def test_what_was_interrupted_is_done_by_the_next_call(parent: Path, run: Path) -> None:
    with locked(run / "probes" / ".lock"):
        refused("another process scores the checkpoints of this run", follow, run, Scores())
    with pytest.raises(KeyboardInterrupt):
        follow(run, Scores(at_2=MagicMock(side_effect=KeyboardInterrupt)))
    assert read_records(run, PROBES) == []
    scores = Scores(at_2=lambda: saved(parent, run, 8))
    follow(run, scores)
    assert scores.measured == [2, 8]


def test_scores_are_those_of_the_export(parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command; of the averaged weights where the checkpoint has them."""
    run, text = tmp_path / "run", tmp_path / "text.txt"
    shutil.copytree(parent, run)
    text.write_text("a b c d e f g h " * 300)
    assert main(["evaluate-pretrained", str(run), "--texts", str(text), *WORDS, "--follow"]) == 0
    (record,) = read_records(run, PROBES)
    hf.export_run(run, tmp_path / "export", averaged=True)
    out = ["--out", str(tmp_path / "out")]
    assert main(["evaluate-pretrained", str(tmp_path / "export"), "--texts", str(text), *WORDS, *out]) == 0
    (found,) = json.loads((tmp_path / "out" / "scores.json").read_text())["models"]
    assert record["held_out"] == found["held_out"]["scores"]["nats_per_token"]
    assert main(["evaluate-pretrained", str(tmp_path), "--texts", str(text), "--follow"]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_it_ends_with_the_process_that_started_it(run: Path) -> None:
    """Though the run's last checkpoint never comes."""
    other = subprocess.Popen(["sleep", "60"])
    program = f"""
from pathlib import Path
from finetune.scores.follow import follow
follow(Path({str(run)!r}), lambda _: (), {other.pid})
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2]) as follower:
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                follower.wait(5)
            other.kill()
            assert follower.wait(20) == 0
        finally:
            follower.kill()
            other.kill()
            other.wait()

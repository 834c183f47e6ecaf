"""The process that scores a run's checkpoints: what it gets, how it ends, and what a real run with it is."""

import contextlib
import importlib.metadata
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from corpora import make_corpus
from pydantic import ValidationError
from starts import losses, pretraining
from wandb_files import history

from pretrain.common.errors import StoppedError
from pretrain.common.records import read_records
from pretrain.common.run_files import PROBES
from pretrain.config import PretrainConfig
from pretrain.run import api, probes
from tests.tasks.refusals import refused


def settings(folder: Path, *texts: str, **changes: Any) -> dict[str, Any]:
    """A run in `folder` of 12 steps that saves and scores every second one."""
    values = pretraining(folder / "corpus", folder / "run", [(32, 8, 12)], checkpoint__every_steps=2, **changes)
    return {**values, "evaluation": {**values["evaluation"], "every_steps": 2, "probes": {"texts": list(texts)}}}


def config(folder: Path, *texts: str, **probed: Any) -> PretrainConfig:
    values = settings(folder, *texts)
    values["evaluation"]["probes"] |= probed
    return PretrainConfig.model_validate(values)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "text.txt").write_text("a b c d e f g h " * 200)
    return tmp_path


# ---- the settings


@pytest.mark.parametrize(
    ("probed", "said"),
    [
        ({"texts": ["text.txt", "absent.txt"]}, "texts: 'absent.txt' does not exist"),
        ({"texts": [""]}, "texts: '' does not exist"),
        ({"blimp": "absent"}, "blimp: 'absent' has no .jsonl file"),
        ({"blimp": "run"}, "blimp: 'run' has no .jsonl file"),
        ({"blimp": "text.txt"}, "blimp: 'text.txt' has no .jsonl file"),
    ],
)
def test_paths_that_cannot_be_scored_are_refused_before_the_run(place: Path, probed: Any, said: str) -> None:
    probes.check(config(place, "text.txt"))
    refused(rf"^evaluation\.probes\.{said}", probes.check, config(place, **probed))


def test_common_words_need_a_text(place: Path) -> None:
    with pytest.raises(ValidationError, match="common_words needs texts"):
        config(place, common_words=True, blimp="blimp")


# ---- the process


class _Fake:
    module = "tests.fake_probe"


@pytest.fixture
def fake(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the console command; what it was started with is in fake.json of the run."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [_Fake])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    return place


def started(run: Path) -> dict[str, Any]:
    deadline = time.monotonic() + 30
    while not (run / "fake.json").is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    return json.loads((run / "fake.json").read_text())


def test_it_has_its_share_and_no_gpu_and_an_error_of_the_run_ends_it(fake: Path) -> None:
    facts: dict[str, Any] = {}

    def train() -> None:
        with probes.probing(config(fake, "-x.txt", "sleep", common_words=True, blimp="~/data")):
            facts.update(started(fake / "run"))
            assert psutil.pid_exists(facts["pid"])
            group = Path(f"/proc/{facts['pid']}/autogroup")
            assert not group.exists() or not (said := group.read_text()) or said.endswith(" nice 19\n")
            raise StoppedError("stopped")

    with pytest.raises(StoppedError):
        train()
    assert not psutil.pid_exists(facts["pid"])
    assert (facts["nice"], facts["cores"]) == (19, 1)
    words = ["--texts", str(fake / "-x.txt"), str(fake / "sleep"), "--text-scores", "held_out"]
    words += ["common_words", "--blimp", str(Path.home() / "data"), "--blimp-limit", "20", "--follow"]
    assert facts["words"] == ["evaluate-pretrained", str(fake / "run"), *words, "--pid", str(os.getpid())]
    assert facts["environment"]["CUDA_VISIBLE_DEVICES"] == ""
    assert not {"RANK", "RAY_ADDRESS"} & facts["environment"].keys()


def test_a_finished_run_waits_for_a_limited_time(fake: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(probes, "WAIT_SECONDS", 0.1)
    with probes.probing(config(fake, "sleep")):
        facts = started(fake / "run")
    assert not psutil.pid_exists(facts["pid"])
    said = capsys.readouterr()
    assert "waiting up to 0 s for the last checkpoint's scores" in said.out
    texts = f"--texts {fake / 'sleep'} --text-scores held_out"
    assert f"evaluate-pretrained {fake / 'run'} {texts} --follow\n" in said.err


def test_sigterm_ends_the_wait_and_not_the_run(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with probes.probing(config(fake, "sleep")):
        started(fake / "run")
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert "stopped waiting for the scores of the last checkpoint" in capsys.readouterr().err


def test_a_process_that_fails_is_one_line_and_the_run_goes_on(fake: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with probes.probing(config(fake, "fail")):
        started(fake / "run")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: evaluation.probes: no more checkpoints are scored; the process exited with code 7")


def test_scores_of_steps_that_are_done_again_are_dropped(fake: Path) -> None:
    """The records of a run are dropped in the same way."""
    for step in (2, 4, 6):
        (fake / "run" / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (fake / "run" / "checkpoints" / f"step-{step:08d}" / "manifest.json").touch()
    lines = [json.dumps({"step": step, "split": "probe"}) for step in (2, 6, 8)]
    (fake / "run" / PROBES).write_text("".join(f"{line}\n" for line in lines))
    with probes.probing(config(fake)):
        pass
    assert [record["step"] for record in read_records(fake / "run", PROBES)] == [2, 6]


# ---- a real run


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    make_corpus(folder / "corpus", documents=60, vocabulary_size=300)
    return folder / "corpus"


LONG = [{"sequence_length": 32, "global_sequences": 8, "steps": 600, "peak_learning_rate": 1e-3}]


@contextlib.contextmanager
def command(values: dict[str, Any], *options: str) -> Iterator[subprocess.Popen[bytes]]:
    Path("run.yaml").write_text(yaml.safe_dump(values))
    words = [sys.executable, "-m", "finetune.cli", "pretrain", "run.yaml", *options]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with Path("out.txt").open("wb") as out, subprocess.Popen(words, env=environment, stdout=out, stderr=out) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(found: Any, seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := found()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert result, Path("out.txt").read_text()
    return result


def followers(run: Path) -> Sequence[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if {"--follow", str(run)} <= set(one.info["cmdline"] or ())]


@pytest.mark.slow
def test_a_run_with_probes_has_the_losses_of_one_without(place: Path, prepared: Path) -> None:
    """Its last checkpoint is scored when it returns, and W&B has each score once, at the checkpoint's step."""
    (place / "corpus").symlink_to(prepared)
    values = settings(place, "text.txt", phases=LONG, tracking__wandb="offline")
    run = api.train(values, no_ray=True)
    plain = api.train({**settings(place, phases=LONG), "run_dir": str(place / "plain")}, no_ray=True)
    assert losses(run.folder) == losses(plain.folder)
    assert not (plain.folder / PROBES).exists()
    found = read_records(run.folder, PROBES)
    steps = [record["step"] for record in found]
    assert steps == sorted(set(steps))
    assert (len(steps) > 1, steps[-1]) == (True, 600)
    assert sum(1 + record["skipped"] for record in found) == 300
    assert all(math.isfinite(record["held_out"]) for record in found)
    rows = [values for path in run.folder.glob("wandb/offline-run-*/*.wandb") for _, values in history(path)]
    sent = [(int(row["probe/step"]), float(row["probe/held_out"])) for row in rows if "probe/step" in row]
    assert sorted(sent) == [(record["step"], pytest.approx(record["held_out"])) for record in found]
    assert not followers(run.folder)


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_nothing_and_scores_nothing_twice(place: Path, prepared: Path) -> None:
    (place / "corpus").symlink_to(prepared)
    (place / "text.txt").write_text("a b c d e f g h " * 20000)
    values = settings(place, "text.txt")
    values["phases"][0]["steps"] = 20000
    run = place / "run"
    with command(values) as process:
        wait_for(lambda: read_records(run, PROBES))
        (follower,) = followers(run)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert follower.wait(10) is None or not psutil.pid_exists(follower.pid)
    before = read_records(run, PROBES)
    with command(values, "--resume") as process:
        wait_for(lambda: len(read_records(run, PROBES)) > len(before))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == StoppedError.exit_code
    assert not followers(run)
    steps = [record["step"] for record in read_records(run, PROBES)]
    assert steps == sorted(set(steps))
    assert steps[: len(before)] == [record["step"] for record in before]
    assert "error" not in {key for record in read_records(run, PROBES) for key in record}

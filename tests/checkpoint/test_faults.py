"""Faults of one process's own run: a full disk, kills at any moment, leftovers of a compiler. No Ray."""

import contextlib
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos import events, last_step, losses, newest_checkpoint, report, settings, start, wait_for, wait_for_step

from pretrain.checkpoint import store

pytestmark = pytest.mark.chaos


def end(started: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str]:
    output, _ = started.communicate(timeout=seconds)
    return started.returncode, output


def test_kills_right_after_checkpoints_resume_from_the_newest(corpus: Path, tmp_path: Path) -> None:
    """Twenty kills, each 0 to 2 s after a checkpoint was seen."""
    values = settings(corpus, tmp_path / "after", steps=100_000, workers=1, checkpoint={"every_steps": 20})
    run_dir, generator = Path(values["run_dir"]), random.Random(0)
    for number in range(20):
        started, before = start(values, resume=number > 0), newest_checkpoint(run_dir)
        wait_for(lambda before=before: newest_checkpoint(run_dir) > before, 60)
        time.sleep(generator.uniform(0, 2))
        started.kill()
        end(started)
        newest, reached = newest_checkpoint(run_dir), last_step(run_dir)
        found = store.latest(run_dir / "checkpoints")
        assert found is not None
        assert found.name == f"step-{newest:08d}"
        assert reached - newest <= 20 + 2, "one being written when the kill came is all that may be missing"
    assert losses(run_dir).keys() >= set(range(1, last_step(run_dir) + 1))
    report("2 kill after a checkpoint", trials=20)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(place)], capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_disk_ends_the_run_and_frees_nothing_but_its_own(corpus: Path, small_disk: Path) -> None:
    values = settings(corpus, small_disk / "full", steps=400, workers=1, checkpoint={"every_steps": 10})
    run_dir = Path(values["run_dir"])
    started = start(values)
    wait_for_step(run_dir, 30)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    code, said = end(started)
    assert code == 3, said
    assert "disk full" in said
    assert "run the same command again (pretrain and finetune: with --resume)" in said
    assert "Traceback" not in said
    good = store.latest(run_dir / "checkpoints")
    assert good is not None
    assert not list(run_dir.glob("checkpoints/.step-*"))
    ballast.unlink()
    code, said = end(start(values, resume=True))
    assert code == 0, said
    assert last_step(run_dir) == 400
    report("13 disk full", resumed_from=good.name)


def test_storage_that_is_away_for_a_while_holds_up_but_ends_nothing(corpus: Path, tmp_path: Path) -> None:
    """For 30 seconds the checkpoints' folder is another, read-only file system."""
    values = settings(corpus, tmp_path / "away", steps=400, workers=1, checkpoint={"every_steps": 10})
    run_dir = Path(values["run_dir"])
    place = run_dir / "checkpoints"
    started = start(values)
    wait_for_step(run_dir, 30)
    away = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(place)]
    if subprocess.run(away, capture_output=True).returncode:
        started.kill()
        end(started)
        pytest.skip("cannot mount a tmpfs here")
    reached = last_step(run_dir)
    time.sleep(30)
    held = last_step(run_dir)
    subprocess.run(["umount", "--lazy", str(place)], check=True)
    began = time.monotonic()
    code, said = end(started)
    assert code == 0, said
    assert "Retrying" in (run_dir / "logs/training-0.log").read_text()
    assert held < reached + 30, "training waits for the save before it"
    (event,) = events(run_dir, "storage")
    assert "was delayed" in event["message"]
    assert losses(run_dir).keys() == set(range(1, 401))
    assert newest_checkpoint(run_dir) == 400
    assert store.latest(place) is not None
    report("14 storage away for 30 s", waited_at_step=held, ended_after=round(time.monotonic() - began, 1))


def test_leftovers_of_a_compiler_and_no_ninja_hold_nothing_up(corpus: Path, tmp_path: Path) -> None:
    extensions = tmp_path / "extensions"
    for name in ("deepspeed_shm_comm", "fused_adam", "cpu_adam"):
        (extensions / name).mkdir(parents=True)
        (extensions / name / "lock").touch()
    without_ninja = [place for place in os.environ["PATH"].split(os.pathsep) if not (Path(place) / "ninja").exists()]
    began = time.monotonic()
    values = settings(corpus, tmp_path / "lock", steps=5, workers=1)
    path = os.pathsep.join(without_ninja)
    code, said = end(start(values, TORCH_EXTENSIONS_DIR=str(extensions), PATH=path))
    assert code == 0, said
    report("21 stale compiler lock, no ninja", seconds=round(time.monotonic() - began, 1))

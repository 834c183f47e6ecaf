"""Background checkpoints: the saved state, storage failures, and the same behavior on all ranks."""

import contextlib
import errno
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretrain.checkpoint import saver as saver_module
from pretrain.checkpoint import store, writing
from pretrain.checkpoint.saver import Saver
from pretrain.common.errors import MachineError
from pretrain.run import loop
from pretrain.training.engine import Fragment
from tests.distributed import Alone, Rank, Ranks

STATE = {"step": 1, "shapes": {"a": [4]}}


def fragments(values: torch.Tensor) -> list[Fragment]:
    return [Fragment("a", 0, {"weight": values}, replicated=False)]


def save_and_wait(saver: Saver, step: int) -> None:
    saver.save(step, fragments(torch.ones(4)), {**STATE, "step": step})
    saver.wait()


def make(folder: Path, **changes: Any) -> Saver:
    return Saver(folder, Alone(), **{"keep_last": 2, "retry_seconds": 0.0, **changes})


def test_a_checkpoint_is_the_state_at_its_step_while_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, write = threading.Event(), writing.write

    def held_up(*arguments: Any) -> Path:
        go.wait(10)
        return write(*arguments)

    monkeypatch.setattr(writing, "write", held_up)
    values, saver = torch.arange(4.0), make(tmp_path)
    saver.save(1, fragments(values), STATE)
    values.add_(1)  # the next step, while nothing is written yet
    assert store.latest(tmp_path) is None
    go.set()
    saver.wait()
    assert store.read_weights(tmp_path / "step-00000001")["a"].tolist() == [0, 1, 2, 3]
    saver.save(2, fragments(values), {**STATE, "step": 2})
    saver.wait()
    assert store.read_weights(tmp_path / "step-00000002")["a"].tolist() == [1, 2, 3, 4]


def train_two(folder: Path, steps: int) -> list[str]:
    """What the saves of two ranks raised, at any step."""
    failed, group = [], Ranks(2)

    def train(rank: int) -> None:
        saver = Saver(folder, Rank(rank, group), keep_last=3, retry_seconds=0.0)
        try:
            for step in range(1, steps + 1):
                fragment = Fragment("a", 2 * rank, {"weight": torch.full((2,), float(step))}, replicated=False)
                saver.save(step, [fragment], {**STATE, "step": step})
            saver.wait()
        except MachineError as error:
            failed.append(str(error))

    ranks = [threading.Thread(target=train, args=(rank,)) for rank in (0, 1)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    return failed


def test_no_rank_writes_while_the_first_still_removes_old_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruning removes leftovers of saves, and a save in progress on another rank looks like one."""
    prune = store.prune

    def slow(*arguments: Any) -> None:
        time.sleep(0.3)
        prune(*arguments)

    monkeypatch.setattr(store, "prune", slow)
    assert not train_two(tmp_path, steps=2)
    for step in (1, 2):
        assert store.latest(tmp_path) == tmp_path / "step-00000002"
        assert store.read_weights(tmp_path / store.name_of(step))["a"].tolist() == [step] * 4


def test_the_other_ranks_do_not_wait_for_one_whose_save_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lack of memory is no error of the storage."""
    write = writing.save_weights

    def save_weights(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if path.name.startswith("rank-00001"):
            raise MemoryError("too little")
        write(tensors, path)

    monkeypatch.setattr(writing, "save_weights", save_weights)
    assert train_two(tmp_path, steps=1) == ["worker 1: MemoryError: too little"] * 2
    assert not list(tmp_path.iterdir())


def test_storage_that_fails_for_a_while_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saver_module, "FIRST_WAIT_SECONDS", 0.05)
    folder = tmp_path / "checkpoints"
    folder.write_text("in the way")
    saver = make(folder, retry_seconds=60.0)
    saver.save(1, fragments(torch.ones(4)), STATE)
    time.sleep(0.3)
    assert not saver.failed
    folder.unlink()
    saver.wait()
    assert store.latest(folder) == folder / "step-00000001"
    assert re.match(r"step-00000001 was delayed \d+ s by the storage: ", saver.trouble)
    saver.trouble = ""
    save_and_wait(saver, 2)
    assert not saver.trouble


def test_an_error_of_the_storage_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(MachineError, match=r"rank-00000.*: cannot be written \(Input/output error\)\. Check"):
        save_and_wait(make(tmp_path), 1)


def test_waits_for_a_save_last_as_long_as_its_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog ends a run that waits longer than it said."""
    waited = list[float]()
    monkeypatch.setattr(saver_module.time, "sleep", waited.append)

    def broken(*_: Any) -> Any:
        raise MachineError("x: [Errno 30] Read-only file system")

    monkeypatch.setattr(writing, "write_shard", broken)
    events = list[str]()

    @contextlib.contextmanager
    def allow(seconds: float) -> Iterator[None]:
        events.append(f"may take {seconds:.0f} s")
        yield

    @contextlib.contextmanager
    def awaiting(what: str) -> Iterator[None]:
        events.append(f"waits for {what}")
        yield

    training: Any = object.__new__(loop.Fit)
    training.engine = SimpleNamespace(watch=SimpleNamespace(allow=allow, awaiting=awaiting))
    training.saver = make(tmp_path, retry_seconds=60.0)
    training.saver.save(1, fragments(torch.ones(4)), STATE)
    with pytest.raises(MachineError, match="Read-only"):
        training.stop()
    assert events == ["may take 1920 s", "waits for the run folder's storage"]
    assert 60 < sum(waited) < 1920


def test_a_failure_for_good_is_raised_and_the_checkpoint_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "FIRST_WAIT_SECONDS", 0.05)
    saver = make(tmp_path, retry_seconds=60.0)
    save_and_wait(saver, 1)
    tries = []

    def full(*_: Any) -> Any:
        tries.append(time.monotonic())
        raise MachineError("x: disk full (0.00 GB free).")

    monkeypatch.setattr(writing, "write_shard", full)
    with pytest.raises(MachineError, match="disk full"):
        save_and_wait(saver, 2)
    assert len(tries) == 2, "a full disk is tried once more only"
    assert saver.failed
    assert store.latest(tmp_path) == tmp_path / "step-00000001"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]

"""The rank of a worker, and its stop requests."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.common import interrupts
from pretrain.common.interrupts import Interrupted
from pretrain.common.worker import Flag, Worker
from tests.distributed import run_program


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_alone() -> None:
    worker = Worker.from_environment()
    assert (worker.rank, worker.world_size, worker.local_rank, worker.local_world_size) == (0, 1, 0, 1)
    assert not worker.stop_requested()


def test_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**place, "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    worker = Worker.from_environment()
    assert (worker.rank, worker.world_size, worker.local_rank, worker.local_world_size) == (5, 8, 1, 4)


def test_stop_file_is_heard_whenever_it_appears(tmp_path: Path) -> None:
    worker = Worker(flags=(Flag(tmp_path / "stop"), Flag(tmp_path / "restart", "a")))
    assert not worker.stop_requested()
    (tmp_path / "stop").touch()
    assert worker.stop_requested()
    assert not dataclasses.replace(worker, local_rank=1).stop_requested(), "the first process of the machine looks"


def test_a_flag_is_for_one_attempt(tmp_path: Path) -> None:
    path = tmp_path / "restart"
    first, second = Flag(path, "launch 1"), Flag(path, "launch 2")
    first.set()
    assert first.is_set()
    assert not second.is_set(), "an attempt before it was asked"
    second.set()
    assert second.is_set()
    assert not first.is_set()
    assert [one.name for one in tmp_path.iterdir()] == ["restart"], "nothing is left beside it"


def test_a_file_that_names_nobody_counts_when_it_is_new(tmp_path: Path) -> None:
    """A pod's hook or a user touches the file. Network storage may show it for a while after its removal."""
    path, began = tmp_path / "stop", 1_700_000_000_000_000_000
    flag = Flag(path, "launch", since=began)
    path.touch()
    os.utime(path, ns=(began - 1, began - 1))
    assert not flag.is_set(), "it was meant for an earlier launch"
    os.utime(path, ns=(began, began))
    assert flag.is_set()
    assert not Flag(path, "launch", since=None).is_set(), "only who starts the workers again asks for that"


def test_a_touch_counts_though_the_file_is_of_another_launch(tmp_path: Path) -> None:
    """An earlier launch left the file; a `touch` by a pod's hook or a user keeps its text."""
    path = tmp_path / "stop"
    path.touch()
    began = path.stat().st_mtime_ns
    Flag(path, "before", since=0).set()
    flag, restart = Flag(path, "launch", since=began), Flag(path, "launch 1", since=None)
    assert not flag.is_set()
    subprocess.run(["touch", "--", path], check=True)
    assert flag.is_set()
    assert not restart.is_set()
    path.write_text("")  # as `: >stop` does
    assert flag.is_set()


def test_a_stop_is_heard_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: the file can be created, but nothing can be written to it."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    (tmp_path / "now").touch()
    stop = Flag(tmp_path / "stop", "launch", since=(tmp_path / "now").stat().st_mtime_ns)
    stop.set()
    assert stop.is_set()
    with pytest.raises(OSError, match="No space left"):
        Flag(tmp_path / "restart", "launch 1", since=None).set()


def test_a_link_is_not_a_flag_and_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("kept")
    (tmp_path / "stop").symlink_to(target)
    flag = Flag(tmp_path / "stop", "launch")
    assert not flag.is_set()
    flag.set()
    assert flag.is_set()
    assert target.read_text() == "kept"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_is_heard(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    worker = Worker.from_environment()
    os.kill(os.getpid(), number)
    assert worker.stop_requested()
    assert not Worker().stop_requested(), "one worker's ear is not another's"


def test_a_closed_terminal_is_ignored_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    worker = Worker.from_environment()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not worker.stop_requested()


@pytest.mark.parametrize("patience", [0.0, 0.02])
def test_a_stop_interrupts_a_wait_only_where_nothing_is_lost(patience: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(interrupts, "STUCK_SECONDS", 0.05)
    before, stuck = signal.getsignal(signal.SIGUSR2), threading.Event()
    worker = Worker.from_environment()
    worker.interrupts.on_stuck = stuck.set
    with worker.interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted), worker.interrupts.after(patience) if patience else contextlib.nullcontext():
            threading.Event().wait()  # as for a compiler
        assert not threading.Event().wait(0.1), "what ends the work is not interrupted"
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])  # as in a library that does not return to Python
        worker.interrupts.patience = 0.0
        stuck.wait()
        with pytest.raises(Interrupted):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
    assert signal.getsignal(signal.SIGUSR2) is before


def interrupt_twice() -> None:
    worker = Worker.from_environment()
    os.kill(os.getpid(), signal.SIGINT)
    print(worker.stop_requested(), flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    print("still here")


def test_second_interrupt_ends_the_process() -> None:
    done = run_program(interrupt_twice)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "True\n"

"""The watchdog in real processes: it ends a run that hangs and names the rank; announced slow work continues."""

import ctypes
import importlib
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from finetune.training import train as finetuning
from pretrain.run import session, train
from pretrain.run.session import collective_timeout
from pretrain.training import watchdog as watchdogs
from pretrain.training.engine.deepspeed_patches import import_deepspeed
from pretrain.training.heartbeats import Hang
from pretrain.training.watchdog import Clock, ExchangeThread, Watchdog, waits_for_others
from tests.batches.test_loader import run_config
from tests.distributed import Program, free_port


# What processes do: 25 steps that wait for one another, then, on the rank that is given, what is given.
def train_and(rank: int, port: int, logs: Path, guilty: int, then: str, limit: float, stall: float) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(minutes=5))

    def step(between: Callable[[], None] = lambda: None) -> None:
        watchdog.beat()
        between()
        dist.all_reduce(torch.ones(1))
        time.sleep(0.01)

    def hold_the_lock(seconds: float) -> None:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))

    with Watchdog(rank, 2, logs, limit, stall_seconds=stall) as watchdog:
        for _ in range(25):
            step()
        (logs / f"ready-{rank}").touch()
        if then == "wait":
            for _ in range(500):
                step()
        if then == "slow work":
            for one in (0, 1):
                if rank == one:
                    with watchdog.allow(60):
                        hold_the_lock(1.5 * limit)
                step()
            if rank == 1:
                with watchdog.awaiting("a batch"):
                    time.sleep(1.5 * limit)
            step()
        elif rank == guilty:
            if then == "sleeps":
                step(lambda: time.sleep(600))
            elif then == "holds the lock":
                hold_the_lock(600)
            elif then == "waits for data":
                with watchdog.awaiting("a batch"):
                    time.sleep(600)
        step()
    print("done")


def start(logs: Path, guilty: int, then: str, *, limit: float = 1.5, stall: float = 3.0) -> list[Program]:
    words = (free_port(), logs, guilty, then, limit, stall)
    return [Program(train_and, rank, *words) for rank in range(2)]


def end(processes: list[Program]) -> list[tuple[int | None, str]]:
    try:
        return [
            (process.returncode, "".join(written)) for process in processes for written in [process.communicate(240)]
        ]
    finally:
        for process in processes:
            process.kill()


def found(logs: Path) -> dict[str, Any]:
    return json.loads((logs / "hang.json").read_text())


@pytest.mark.parametrize(
    ("then", "event", "reason"),
    [("sleeps", "hang", "has made no progress for"), ("waits for data", "data_stall", "s for a batch")],
)
def test_one_that_stops_ends_all_and_every_stack_is_written(tmp_path: Path, then: str, event: str, reason: str) -> None:
    """Both have started the same micro-batch: one is in a collective, the other is not."""
    ends = end(start(tmp_path, 1, then))
    assert [code for code, _ in ends] == [3, 3], ends
    assert (found(tmp_path)["event"], found(tmp_path)["rank"]) == (event, 1)
    assert reason in found(tmp_path)["reason"]
    assert "distributed_c10d" in (tmp_path / "stacks-0.txt").read_text()
    assert "distributed_c10d" not in (tmp_path / "stacks-1.txt").read_text()
    assert "train_and" in (tmp_path / "stacks-1.txt").read_text()


def test_announced_slow_work_continues(tmp_path: Path) -> None:
    """Each rank in turn holds Python's lock in an announced block, and one waits for data: longer than the limit."""
    ends = end(start(tmp_path, -1, "slow work", limit=2.5, stall=60))
    assert [(code, "done" in output.splitlines()) for code, output in ends] == [(0, True)] * 2, ends
    assert not (tmp_path / "hang.json").exists()


def test_one_that_holds_the_lock_unannounced_is_named(tmp_path: Path) -> None:
    """Its own watchdog cannot run: the other ends, and finds it."""
    processes = start(tmp_path, 1, "holds the lock")
    try:
        _, said = end(processes[:1])[0]
        assert "watchdog: rank 1 was silent for" in said
        assert found(tmp_path)["rank"] == 1
    finally:
        processes[1].kill()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_process_is_named_and_its_stack_read_from_outside(tmp_path: Path, rank: int) -> None:
    processes = start(tmp_path, -1, "wait")
    while not all((tmp_path / f"ready-{one}").exists() for one in range(2)):
        time.sleep(0.05)
    time.sleep(1.5)  # they know of one another
    processes[rank].send_signal(signal.SIGSTOP)
    try:
        _, said = end([processes[1 - rank]])[0]
        assert f"watchdog: rank {rank} was silent for" in said
        assert found(tmp_path)["rank"] == rank
        assert "step" in (tmp_path / f"stacks-{rank}.txt").read_text()
    finally:
        processes[rank].kill()


def test_time_in_which_this_process_was_stopped_is_not_held_against_others(monkeypatch: Any) -> None:
    now = [100.0]
    monkeypatch.setattr("pretrain.training.watchdog.time.monotonic", lambda: now[0])
    clock = Clock(max_tick=1.0)
    ticks = []
    for later in (0.5, 0.5, 3600.0, 0.5):
        now[0] += later
        ticks.append(clock.tick())
    assert ticks == [0.5, 1.0, 2.0, 2.5]


def test_a_stall_does_not_make_the_watchdog_patient(tmp_path: Path, monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr("pretrain.training.watchdog.time.monotonic", lambda: now[0])
    watchdog = Watchdog(0, 1, tmp_path, 8.0)

    def train(seconds: float, micro_batches: int) -> None:
        for _ in range(micro_batches):
            watchdog.beat()
            now[0] += seconds

    train(0.5, 25)
    assert watchdog.heartbeat().progress_timeout == 8
    with watchdog.awaiting("a batch"):
        now[0] += 600
    train(0.5, 1)
    now[0] += 600  # in a collective, for another rank's batch
    train(0.5, 1)
    assert watchdog.heartbeat().progress_timeout == 8
    train(5.0, 4)
    assert watchdog.heartbeat().progress_timeout == 50, "work that is slow again and again"


def test_blocks_state_their_needs(tmp_path: Path) -> None:
    watchdog = Watchdog(0, 1, tmp_path, 8.0, stall_seconds=600.0)
    for _ in range(25):
        watchdog.beat()
    usual = watchdog.heartbeat()
    assert (usual.progress_timeout, usual.silence_timeout, usual.waiting_for, usual.micro_batches) == (8, 8, "", 25)
    with watchdog.allow(100.0):
        watchdog.beat()
        inside = watchdog.heartbeat()
    assert (inside.progress_timeout, inside.silence_timeout, inside.micro_batches) == (100, 100, 25), (
        "evaluations differ between ranks"
    )
    assert inside.progress_count > usual.progress_count
    with watchdog.awaiting("a batch"):
        waiting = watchdog.heartbeat()
    assert (waiting.progress_timeout, waiting.silence_timeout, waiting.waiting_for) == (600, 8, "a batch")
    assert watchdog.heartbeat().progress_timeout == 8
    with Watchdog(0, 1, tmp_path, 0.0).awaiting("a batch"):
        pass
    endless = Watchdog(0, 1, tmp_path, 8.0)
    with endless.awaiting("a batch"):
        assert endless.heartbeat().progress_timeout == float("inf")


def test_a_failed_exchange_is_tried_again_and_written_with_the_stacks(tmp_path: Path) -> None:
    """Whatever the store's client raises, the heartbeat thread continues."""
    answers: list[Any] = [ValueError("garbled"), None, None]

    class Store:
        def compare_set(self, *_: str) -> None: ...
        def set(self, *_: str) -> None:
            answer = answers.pop(0) if answers else None
            if answer is not None:
                raise answer

        def multi_get(self, keys: list[str]) -> list[bytes]:
            return [b"null"] * len(keys)

    watchdog = Watchdog(0, 2, tmp_path, 8.0)
    connect: Any = Store
    thread = ExchangeThread(watchdog, connect, 0, 2, round_seconds=60.0)
    watchdog._exchange = thread
    deadline = time.monotonic() + 30
    while thread.error is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "garbled" in str(thread.error)
    watchdog._write(Hang("hang", 0, "was silent", "elsewhere", 1), found_here=False)
    assert "the last exchange of heartbeats failed: ValueError('garbled')" in (tmp_path / "stacks-0.txt").read_text()
    thread.announce()
    assert thread.error is None
    assert thread.heartbeats is not None
    thread.end()


def test_a_collective_is_distinguished_from_work() -> None:
    seen: dict[str, bool] = {}
    code = compile("def all_reduce(then): then()", "c10d", "exec")
    scope: dict[str, Any] = {"__name__": "torch.distributed.distributed_c10d"}
    exec(code, scope)
    me = threading.get_ident()
    seen["work"] = waits_for_others(me, ())
    scope["all_reduce"](lambda: seen.setdefault("collective", waits_for_others(me, ())))
    assert seen == {"work": False, "collective": True}
    assert not waits_for_others(-1, LAUNCHING), "a thread that has ended"


LAUNCHING = (*watchdogs.LAUNCHING, *session.LAUNCHING, *train.LAUNCHING, *finetuning.LAUNCHING)

# (module, function, whether it waits for others on a CPU, and on a GPU)
WAITS = (
    ("pretrain.training.engine.workers", "sum_over_workers", False, True),  # reading what NCCL sums waits
    ("pretrain.model.encoder", "forward", False, True),
    ("torch.autograd.graph", "_engine_run_backward", False, True),
    ("torch._inductor.runtime.compile_tasks.cabc", "call", False, True),
    ("pretrain.objectives.masked", "totals", False, True),
    ("pretrain.run.forward_backward", "launch", False, True),
    ("pretrain.run.loop", "launch_step", False, True),
    ("pretrain.common.transfers", "to_device", False, True),
    ("torch.cuda.streams", "record", False, True),
    ("finetune.training.train", "loss", False, True),
    ("finetune.training.train", "evaluate", False, False),
    ("pretrain.run.loop", "train", False, False),
    ("pretrain.batches.loader", "__next__", False, False),
)


@pytest.mark.parametrize(("module", "name", "on_cpu", "on_gpu"), WAITS)
def test_a_host_behind_a_collective_waits_for_others(module: str, name: str, on_cpu: bool, on_gpu: bool) -> None:
    """Where it reads a result on the device, or can launch no more kernels before the device goes on."""
    held, scope = threading.Lock(), {"__name__": module}
    exec(f"def {name}(read): read()", scope)
    function: Any = scope[name]
    with held:
        reader = threading.Thread(target=function, args=(held.acquire,))
        reader.start()
        assert reader.ident is not None
        while sys._current_frames()[reader.ident].f_code.co_name != name:
            time.sleep(0.001)
        assert waits_for_others(reader.ident, ()) == on_cpu
        assert waits_for_others(reader.ident, LAUNCHING) == on_gpu
    reader.join()
    held.release()


def test_the_modules_that_a_watchdog_knows_exist() -> None:
    import_deepspeed()
    for name in {*LAUNCHING, *watchdogs.COLLECTIVES} - {"triton."}:  # which is installed with CUDA
        try:
            importlib.import_module(name.rstrip("."))
        except ModuleNotFoundError:
            module, _, function = name.rpartition(".")
            assert f"def {function}(" in inspect.getsource(importlib.import_module(module)), name


@pytest.mark.parametrize("hang", [0.0, 30.0, 180.0, 7200.0])
def test_collectives_fail_later_than_the_watchdog(hang: float) -> None:
    seconds = collective_timeout(run_config(scheduling={"hang_seconds": hang})).total_seconds()
    assert seconds >= max(1.5 * 1800, 15 * hang), "a compilation, a start, a wait for data"

"""The watchdog in real processes: one that stands still ends them, work that is slow for good reasons does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What each process does: 25 steps that wait for one another, then, on rank 1, what is given.
SCRIPT = """
import sys, time, torch, torch.distributed as dist
from datetime import timedelta
from pathlib import Path
from pretrain.watchdog import Watchdog
rank, port, logs, then = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=timedelta(minutes=5))
def step():
    watchdog.beat()
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
with Watchdog(rank, 2, logs, 1.5) as watchdog:
    for _ in range(25):
        step()
    (logs / f"ready-{rank}").touch()
    if rank == 1 and then == "sleeps":
        time.sleep(60)
    elif rank == 1 and then == "allowed":
        with watchdog.allow(60):
            time.sleep(4)
    elif then == "wait":
        for _ in range(500):
            step()
    step()
print("done")
"""


def start(logs: Path, then: str) -> list[subprocess.Popen[str]]:
    from tests.distributed import _free_port

    port = _free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(port), str(logs), then], cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip


def end(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    ends = []
    for process in processes:
        output, _ = process.communicate(timeout=60)
        ends.append((process.returncode, output))
    return ends


def test_one_that_sleeps_ends_all_and_every_stack_is_written(tmp_path: Path) -> None:
    (first, said), (second, _) = end(start(tmp_path, "sleeps"))
    assert 0 not in (first, second), said
    found = json.loads((tmp_path / "hang.json").read_text())
    assert found["rank"] == 1
    assert "no rank came on for" in found["reason"]
    assert "all_reduce" in (tmp_path / "stacks-0.txt").read_text()
    assert "<module>" in (tmp_path / "stacks-1.txt").read_text()


def test_slow_work_that_is_allowed_goes_on(tmp_path: Path) -> None:
    assert [(code, output.splitlines()[-1]) for code, output in end(start(tmp_path, "allowed"))] == [
        (0, "done")
    ] * 2
    assert not (tmp_path / "hang.json").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_process_is_named_and_its_stack_read_from_outside(tmp_path: Path, rank: int) -> None:
    processes = start(tmp_path, "wait")
    while not all((tmp_path / f"ready-{one}").exists() for one in range(2)):
        time.sleep(0.05)
    time.sleep(1.5)  # they know of one another
    processes[rank].send_signal(signal.SIGSTOP)
    try:
        _, said = end([processes[1 - rank]])[0]
        assert f"watchdog: rank {rank} was silent for" in said
        assert json.loads((tmp_path / "hang.json").read_text())["rank"] == rank
        assert "step" in (tmp_path / f"stacks-{rank}.txt").read_text()
    finally:
        processes[rank].kill()
        processes[rank].communicate()

"""Threads of CPU kernels sleep while other programs compete for the cores, and only then."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pretrain.common import memory, thread_waits


class Script:
    """Simulates the wait times of threads: a share of the time for each poll, then the end."""

    def __init__(self, shares: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.end = threading.Event()
        self.held: list[bool] = []  # at each look, whether there is a pool
        self._holding, self._waited, self._now = False, 0.0, 0.0
        self._shares = iter([0.0, *shares])
        monkeypatch.setattr(thread_waits, "POLL_SECONDS", 0.0)
        monkeypatch.setattr(thread_waits.time, "monotonic", lambda: self._now)

    def waited(self) -> dict[int, float]:
        share = next(self._shares, None)
        if share is None:
            self.end.set()
            share = 0.0
        self.held.append(self._holding)
        self._now += 1.0
        self._waited += share
        return {1: self._waited, 2: 0.0}

    @contextlib.contextmanager
    def pool(self) -> Iterator[None]:
        self._holding = True
        yield
        self._holding = False


def test_threads_sleep_while_cores_are_contended(monkeypatch: pytest.MonkeyPatch) -> None:
    free, busy = 0.04, 0.5  # about what Ray's own processes cost on two cores
    script = Script([free, 0.08, busy, 0.08, free, free, free, busy, free, free, free, free, free], monkeypatch)
    thread_waits.watch(script.pool, script.end, script.waited)
    # The fourth free look in a row ends it; the first look only begins the account.
    assert script.held == [False] * 4 + [True] * 9 + [False, False]
    assert not script._holding


def test_what_is_held_at_the_end_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script([0.9, 0.9], monkeypatch)
    thread_waits.watch(script.pool, script.end, script.waited)
    assert script.held[-1]
    assert not script._holding


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_pool_has_more_threads_than_cores_and_leaves_none(request: pytest.FixtureRequest) -> None:
    openmp = thread_waits.loaded_openmp()
    if openmp is None:
        pytest.skip("torch has another OpenMP")
    before = threads()
    with thread_waits.idle_threads(openmp):
        # The pool's master is a thread, too.
        assert threads() >= before + len(os.sched_getaffinity(0)) + 1
        torch.zeros(1 << 20).add_(1)
    for _ in range(1000):  # the system takes a while to forget a thread that was joined
        if threads() <= before + torch.get_num_threads():
            return
        threading.Event().wait(0.01)
    pytest.fail(f"{threads() - before} threads are left")


def test_no_pool_is_made_near_a_limit_of_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """libgomp exits the process if it cannot create a thread."""
    monkeypatch.setattr(thread_waits, "may_start_pool", lambda _: False)
    script = Script([0.9, 0.9, 0.9], monkeypatch)
    thread_waits.watch(script.pool, script.end, script.waited)
    assert not any(script.held)


def test_limits_of_threads_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_AS: resource.RLIM_INFINITY, resource.RLIMIT_NPROC: 1 << 40}
    monkeypatch.setattr(thread_waits.resource, "getrlimit", lambda which: (limits[which], 0))
    monkeypatch.setattr(thread_waits, "control_groups", lambda _: [Path("group")])
    monkeypatch.setattr(Path, "read_text", lambda _: "max")  # the cgroup's
    assert thread_waits.may_start_pool(3)
    limits[resource.RLIMIT_NPROC] = 20
    assert not thread_waits.may_start_pool(3)
    limits[resource.RLIMIT_NPROC] = resource.RLIM_INFINITY
    monkeypatch.setattr(Path, "read_text", lambda path: "1000" if path.name == "pids.max" else "960")
    assert not thread_waits.may_start_pool(3)
    assert thread_waits.may_start_pool(2)
    limits[resource.RLIMIT_AS] = 1 << 34
    assert not thread_waits.may_start_pool(2)


@pytest.mark.parametrize(
    ("group", "folder", "files"),
    [
        ("0::/jobs/one", "", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/jobs/one\n0::/",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_the_limits_of_every_control_group_around_a_job_count(monkeypatch, tmp_path, group, folder, files) -> None:
    monkeypatch.setattr(memory, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "_CGROUP_ROOT", tmp_path / "groups")
    (tmp_path / "own").write_text(group + "\n")
    job = tmp_path / "groups" / folder / "jobs/one"
    job.mkdir(parents=True)
    assert memory.machine_memory()[0] > 1 << 20, "no limit"
    for place, limit, used in ((job, 1 << 20, 1000), (job.parent, 1 << 21, (1 << 21) - 5000)):
        (place / files[0]).write_text(str(limit))
        (place / files[1]).write_text(str(used))
        (place / "memory.stat").write_text(f"anon 5\n{files[2]} 200\n")
    assert memory.machine_memory() == (1 << 20, 5200)
    assert job in memory.control_groups("memory")


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_user_decided_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(thread_waits, "watch", lambda *_: pytest.fail("nobody looks"))
    monkeypatch.setenv(name, "1")
    with thread_waits.sleep_when_contended():
        assert not any(thread.name == "thread-waits" for thread in threading.enumerate())


def test_a_watcher_ends_with_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    with thread_waits.sleep_when_contended():
        pass
    assert not any(thread.name == "thread-waits" for thread in threading.enumerate())

"""Waits for data and storage: the watchdog knows of them, and long ones become events."""

import contextlib
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.workers import supervisor
from pretrain.common.errors import MachineError
from pretrain.common.files import allow_open_files
from pretrain.common.interrupts import Interrupts
from pretrain.common.worker import HANG_FILE, Worker
from pretrain.run import loop, session
from pretrain.run.plan import TrainingPlan
from pretrain.run.progress import Progress
from pretrain.run.stragglers import RankTimes
from pretrain.training.watchdog import Watchdog


class Engine:
    """An engine of `size` ranks, this one among them, with a watchdog that watches nothing."""

    device = torch.device("cpu")

    def __init__(self, logs: Path, size: int = 1, rank: int = 0) -> None:
        self.world_size, self.rank = size, rank
        self.watch = Watchdog(0, 1, logs, 0.0)
        self.others = torch.zeros(3, size, dtype=torch.float64)
        self.module = SimpleNamespace(train=lambda: None)
        self.workers = self

    @property
    def doing(self) -> str:
        return self.watch.heartbeat().waiting_for

    def sum_over_workers(self, values: torch.Tensor) -> torch.Tensor:
        return values.add_(self.others)

    def new_cpu_group(self, _: Any) -> None:
        pass


def test_each_wait_for_data_or_storage_is_announced(tmp_path: Path) -> None:
    """The task makes batches and opens the data of a phase where the loop asks for a step."""
    engine, doing = Engine(tmp_path), dict[str, list[str]]()

    def look(where: str) -> None:
        doing.setdefault(where, []).append(engine.doing)

    def batches(*_: Any) -> Iterator[int]:
        for number in range(2):
            look("batch")
            yield number

    def stop_requested() -> bool:
        look("stop files")
        return False

    recorder = SimpleNamespace(log=lambda record: look("log"), rewind=lambda step: look("rewind"))
    tracking = SimpleNamespace(log_every_steps=1)
    saving = SimpleNamespace(keep_last=1, keep_at=(), keep_every_tokens=0)
    limits = SimpleNamespace(hang_seconds=60)
    config: Any = SimpleNamespace(seed=0, tracking=tracking, checkpoint=saving, scheduling=limits, address="")
    plan = TrainingPlan(config, 2, lambda _: 0.0, evaluate_every_steps=9, checkpoint_every_steps=9)
    task: Any = SimpleNamespace(batches=batches, stalled_seconds=lambda: 0.0, validation_set=lambda: "dev")
    parts: list[Any] = [engine, task, plan, Progress(), tmp_path, {}, recorder]
    run: Any = loop.Fit(*parts)

    def read_step(launched: None) -> loop.StepOutcome:
        look("step")
        return loop.StepOutcome(stop=False, failure=None)

    run.launch_step, run.read_step = lambda *_: None, read_step
    run.log = lambda: run.recorder.log({})
    run.evaluate = run.save = lambda: None
    assert run.train(stop_requested) is None
    run.recorder.rewind(0)
    storage = "the run folder's storage"
    waits = {"stop files": [storage] * 2, "log": [storage] * 2, "rewind": [storage]}
    assert doing == {"batch": ["a batch"] * 2, "step": [""] * 2, **waits}


def test_the_first_batch_of_a_loader_is_not_a_stall(tmp_path: Path) -> None:
    """It includes opening the data: at a start, after a rollback and where a phase begins."""
    waits: list[int] = []
    phase = 0

    def batches(start_step: int, skipped: Any) -> Iterator[int]:
        nonlocal phase
        for step in range(start_step, 6):
            phase = step // 3
            yield step

    run: Any = object.__new__(loop.Fit)
    run.engine, run.progress = Engine(tmp_path), Progress()
    run.task = SimpleNamespace(batches=batches, validation_set=lambda: f"phase {phase}")
    run.interrupts, run.first_step = Interrupts(lambda: False), 0
    run.stragglers = SimpleNamespace(add_wait=lambda seconds: waits.append(run.progress.step))
    for start in (0, 1):
        waits.clear()
        run.progress.step = start
        for step in run.steps():
            run.progress.step = step + 1
        assert waits == [one for one in range(start + 1, 6) if one != 3]


def test_a_long_wait_for_one_batch_is_an_event(tmp_path: Path) -> None:
    engine, logged = Engine(tmp_path, size=3, rank=1), list[dict[str, Any]]()
    times = RankTimes(engine)  # type: ignore[arg-type]
    recorder = SimpleNamespace(log=logged.append)
    times.add_wait(4.0)
    times.add_wait(3.0)
    times.lap(recorder, 10)  # type: ignore[arg-type]
    assert not logged, "below the seconds that are worth an event"
    times.add_wait(40.0)
    times.waited = 1 / 3
    engine.others[2] = torch.tensor([6.0, 0.0, 31.0])
    record = times.lap(recorder, 20)  # type: ignore[arg-type]
    assert set(record) == {"rank_forward_seconds", "rank_wait_seconds"}
    assert record["rank_wait_seconds"][1] == 0.3333, "four digits"
    (event,) = logged
    assert (event["event"], event["step"], event["rank"], event["seconds"]) == ("data_stall", 20, 1, 40.0)
    assert event["message"] == "rank 1 waited 40 s for a batch"
    engine.others.zero_()
    times.lap(recorder, 30)  # type: ignore[arg-type]
    assert len(logged) == 1, "logged once"


@pytest.mark.parametrize("event", ["hang", "data_stall"])
def test_a_restart_reports_the_watchdogs_cause(tmp_path: Path, event: str) -> None:
    (tmp_path / "logs").mkdir()
    began = time.time()
    assert supervisor.hang_event(tmp_path, since=began) is None
    found = {"event": event, "rank": 3, "reason": "rank 3 was slow", "time": began + 1, "found_by": 0}
    (tmp_path / "logs" / HANG_FILE).write_text(json.dumps(found))
    assert supervisor.hang_event(tmp_path, since=began) == (event, 3, "rank 3 was slow")
    assert supervisor.hang_event(tmp_path, since=began + 2) is None


def test_the_first_finding_of_a_start_stays(tmp_path: Path) -> None:
    """A rank that was cut off blames rank 0, which has found before that it was cut off."""
    from pretrain.training.heartbeats import Hang

    path = tmp_path / HANG_FILE
    path.write_text(json.dumps({"event": "hang", "rank": 5, "reason": "an old one", "time": time.time() - 60}))
    watchdog = Watchdog(0, 8, tmp_path, 8.0)
    watchdog.write_hang(Hang("hang", 7, "was silent", "a", 1))
    Watchdog(7, 8, tmp_path, 8.0)
    watchdog.write_hang(Hang("hang", 0, "was silent", "a", 1))
    assert json.loads(path.read_text())["rank"] == 7


@contextlib.contextmanager
def open_files(soft: int) -> Iterator[int]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, before[1]), before[1]))
    try:
        yield before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_rank_0_may_open_a_connection_for_every_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_files(soft=512) as hard:
        wanted = min(2048 + 4096, hard)
        assert allow_open_files(2048) == wanted
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == wanted
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(session, "allow_open_files", lambda _: 1024)
    refusal = pytest.raises(MachineError, match="the limit of open files is 1024, but 1024 workers need 2304")
    with refusal, session.process_group(Worker(rank=0, world_size=1024)):
        pass

"""One training on one worker: the order of what `run` calls, whatever is trained."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pretrain.common.errors import DivergedError, InputError, MachineError, RunError, StoppedError
from pretrain.common.worker import TrainingRequest, Worker
from pretrain.run import run as running
from pretrain.run.loop import LONG_SECONDS
from pretrain.run.plan import TrainingPlan
from pretrain.run.progress import Progress
from pretrain.tracking import live

RESTART = {"event": "restart", "time": 1.0, "message": "a node was lost"}


class Calls:
    """Stand-ins for all that `run` uses; each call is noted in `made`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, saved: dict[str, Any] | None = None) -> None:
        self.made: list[str] = []
        self.outcome: Exception | None = None
        self.closing: Exception | None = None
        self.settings: dict[str, Any] = {}
        self.events: list[str] = []
        self.extra_state: dict[str, Any] = {}
        self.peak = 0.0
        self._saved = saved
        dump, engine = (lambda mode: {"name": "trial"}), SimpleNamespace(compiled=True)
        self._config: Any = SimpleNamespace(folder=folder, callbacks=(), model_dump=dump, engine=engine)
        self.phases: list[str] = []
        monkeypatch.setattr(live, "write_startup_stage", lambda folder, phase: self.phases.append(phase))
        monkeypatch.setattr(live, "end_startup", lambda folder: self.phases.append("end"))
        stand_ins = {
            "latest_checkpoint": self._newest,
            "read_state": lambda engine, checkpoint: self._note("read state", saved),
            "Tracker": self._tracker,
            "warmup_step": lambda *given: self._note("warmup_step"),
            "restore": lambda engine, checkpoint: self._note("restore"),
            "total_matmul_peak": lambda engine: self._note("measure", 2e12),
            "fit": self._fit,
        }
        for name, value in stand_ins.items():
            monkeypatch.setattr(running, name, value)

    def run(self, *, resume: bool = False, warmup_step: bool = True) -> None:
        engine: Any = SimpleNamespace(watch=SimpleNamespace(allow=self._allow), workers=None, rank=0)
        training: Any = running.Training(
            task=SimpleNamespace(close=lambda: self._note("close task")),  # type: ignore[arg-type]
            plan=TrainingPlan(self._config, 10, lambda step: 0.1, 5, 5, warmup_step=warmup_step),
            job_type="trial",
            card={"size": 3},
            identity={"data": "abc"},
            check=self._check,
            finish=lambda tracker: self._note("finish"),
        )
        running.run(training, engine, Worker(), TrainingRequest({}, resume, (RESTART,)))

    def _note(self, call: str, answer: Any = None) -> Any:
        self.made.append(call)
        return answer

    @contextlib.contextmanager
    def _allow(self, seconds: float) -> Iterator[None]:
        assert seconds == LONG_SECONDS
        self.made.append("(")
        try:
            yield
        finally:
            self.made.append(")")

    def _newest(self, checkpoints: Path, engine: Any) -> Path | None:
        assert checkpoints == self._config.folder / "checkpoints"
        return self._note("newest", checkpoints / "step-00000004" if self._saved else None)

    def _check(self, state: dict[str, Any], checkpoint: Path) -> None:
        self._note("check")
        if state["data"] != "abc":
            raise InputError(f"{checkpoint}: was trained on other data")

    def _tracker(self, *_: Any, **settings: Any) -> Any:
        self.settings = settings
        self._note("open tracker")
        return SimpleNamespace(
            run_id=settings["run_id"] or "new",
            log=None,
            log_events=self._log_events,
            mirror_end=lambda event, step, message: self._note(f"mirror {event} at {step}: {message}"),
            close=self._close_tracker,
        )

    def _close_tracker(self) -> None:
        self._note("close tracker")
        if self.closing:
            raise self.closing

    def _log_events(self, events: list[dict[str, Any]], step: int) -> None:
        self.events = [event["message"] for event in events]
        self._note(f"log {len(events)} events at {step}")

    def _fit(self, engine: Any, task: Any, plan: TrainingPlan, progress: Progress, **more: Any) -> None:
        self.extra_state, self.peak = more["extra_state"], plan.peak_flops
        self._note(f"fit from {progress.step}")
        if self.outcome:
            raise self.outcome


def saved(**more: Any) -> dict[str, Any]:
    return {"step": 4, "run_id": "old", "data": "abc", "skipped": [], "window": {}, **more}


END = ["(", "finish", ")", "(", "close task", "close tracker", ")"]


NEW = ["(", ")", "open tracker", "log 1 events at 0"]
READ = ["newest", "read state", "check", "open tracker"]


@pytest.mark.parametrize(
    ("state", "resume", "warmup_step", "made"),
    [
        (None, False, True, [*NEW, "warmup_step", "measure", "fit from 0"]),
        (None, False, False, [*NEW, "measure", "fit from 0"]),  # a short run
        (None, True, True, ["newest", *NEW, "warmup_step", "measure", "fit from 0"]),
        (saved(), True, True, [*READ, "log 2 events at 4", "warmup_step", "measure", "fit from 4"]),
        (saved(), True, False, [*READ, "log 2 events at 4", "restore", "measure", "fit from 4"]),
        # A run that is over only finishes.
        (saved(step=10), True, True, [*READ, "log 2 events at 10"]),
        (saved(stopped_early=True), True, True, [*READ, "log 2 events at 4"]),
    ],
)
def test_a_run_calls(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: Any, resume: bool, warmup_step: bool, made: list[str]
) -> None:
    calls = Calls(monkeypatch, tmp_path, state)
    calls.run(resume=resume, warmup_step=warmup_step)
    assert calls.made == [*made, *END]
    expected = {"run_id": "old", "step": state["step"]} if state else {"run_id": None, "step": None}
    assert calls.settings == {**expected, "card": {"size": 3}, "job_type": "trial", "enabled": True}
    assert calls.events == ["a node was lost", *(["resumed from step-00000004"] if state else [])]
    if "measure" in made:
        run_id = "old" if state else "new"
        assert calls.extra_state == {"run_id": run_id, "data": "abc", "config": {"name": "trial"}}
        assert calls.peak == 2e12
        compiles = [live.COMPILE] if "warmup_step" in made else []
        assert calls.phases == [*compiles, live.MEASURE, "end"]


def test_a_checkpoint_of_other_data_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = Calls(monkeypatch, tmp_path, saved(data="other"))
    with pytest.raises(InputError, match="step-00000004: was trained on other data"):
        calls.run(resume=True)
    assert calls.made == ["newest", "read state", "check"]


@pytest.mark.parametrize(("error", "event"), [(StoppedError("as asked"), "stop"), (DivergedError("NaN"), "diverged")])
def test_an_early_end_reaches_wandb_closes_all_and_does_not_finish(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: RunError, event: str
) -> None:
    calls = Calls(monkeypatch, tmp_path)
    calls.outcome = error
    with pytest.raises(type(error)):
        calls.run()
    end = [f"mirror {event} at 0: {error}", "(", "close task", "close tracker", ")"]
    assert calls.made[-6:] == ["fit from 0", *end]


@pytest.mark.parametrize("error", [StoppedError("as asked"), None])
@pytest.mark.parametrize(
    "closing", [MachineError("disk full"), InputError("read-only"), OSError(errno.EIO, "Input/output error")]
)
def test_records_that_are_not_written_fail_a_run_that_did_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closing: Exception, error: RunError | None
) -> None:
    calls = Calls(monkeypatch, tmp_path)
    calls.outcome, calls.closing = error, closing
    with pytest.raises(type(error or calls.closing)):
        calls.run()

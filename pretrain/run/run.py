"""Runs pretraining or fine-tuning on one worker, from a new start or a checkpoint to the end."""

import dataclasses
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from pretrain.checkpoint import store
from pretrain.common.errors import DivergedError, RunError, StoppedError
from pretrain.common.interrupts import Interrupted
from pretrain.common.records import make_event, read_records
from pretrain.common.run_files import read_fork
from pretrain.common.worker import TrainingRequest, Worker
from pretrain.run.callbacks import Callbacks
from pretrain.run.loop import LONG_SECONDS, fit
from pretrain.run.plan import TrainingPlan
from pretrain.run.progress import Progress, read_state, restore
from pretrain.run.session import latest_checkpoint, total_matmul_peak
from pretrain.run.task import S, TrainingTask
from pretrain.run.warmup_step import warmup_step
from pretrain.tracking import live
from pretrain.tracking.tracker import Tracker
from pretrain.training.engine import Engine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Training(Generic[S]):
    """The parts of `run` that depend on the kind of training.

    Attributes:
        task: the task to train, which `run` closes.
        plan: the schedule, whose `peak_flops` `run` measures.
        job_type: name of this kind of run in W&B.
        card: facts about the data for the tracker.
        identity: facts about the data that each checkpoint stores, for `check`.
        initialize: called on every rank if there is no checkpoint to resume from; sets the initial weights.
        check: called with the state of a checkpoint and its folder before the run resumes from it; raises `InputError`
            if it belongs to another run.
        finish: called on every rank when all steps are done.
    """

    task: TrainingTask[S]
    plan: TrainingPlan
    job_type: str
    card: dict[str, Any]
    identity: dict[str, Any]
    check: Callable[[dict[str, Any], Path], None]
    finish: Callable[[Tracker], None]
    initialize: Callable[[], None] = lambda: None


def run(training: Training[S], engine: Engine, worker: Worker, request: TrainingRequest) -> None:
    """Train to the end of the plan, as specified by `request`.

    Raises:
        RunError: an error of `pretrain.common.errors`; see `fit`, `warmup_step` and `Training.check`.
    """
    task, plan, config = training.task, training.plan, training.plan.config
    checkpoints, progress, state = config.folder / "checkpoints", Progress(), {}
    checkpoint = latest_checkpoint(checkpoints, engine.workers) if request.resume else None
    if checkpoint is not None:
        state = read_state(engine, checkpoint)
        training.check(state, checkpoint)
        progress = Progress.from_state(state)
        logger.info("resumed from %s", checkpoint)
    else:
        with engine.watch.allow(LONG_SECONDS):
            training.initialize()
    fork = _starting_fork(config.folder, state)
    tracker = Tracker(
        config,
        config.folder,
        run_id=fork.get("id") or state.get("run_id"),
        step=progress.step if state else None,
        card=training.card,
        job_type=training.job_type,
        enabled=worker.rank == 0,
    )
    callbacks = Callbacks(
        config.callbacks, request.callbacks, engine.rank, tracker.log, lambda: engine.watch.awaiting("a callback")
    )
    tracker.log_events([*request.events, *_start_events(fork, checkpoint)], progress.step)
    evaluate_first = plan.evaluate_first and progress.step == 0 and not _was_evaluated(config.folder, engine)
    extra_state = {"run_id": tracker.run_id, **training.identity, "config": config.model_dump(mode="json")}
    end_error: RunError | None = None
    try:
        if progress.step < plan.total_steps and not progress.stopped_early:
            plan = _prepare_steps(training, engine, progress, checkpoints, extra_state, checkpoint)
            fit(
                engine,
                task,
                dataclasses.replace(plan, evaluate_first=evaluate_first),
                progress,
                checkpoints=checkpoints,
                extra_state=extra_state,
                recorder=tracker,
                stop_requested=worker.stop_requested,
                callbacks=callbacks,
                interrupts=worker.interrupts,
            )
        with engine.watch.allow(LONG_SECONDS):
            training.finish(tracker)
    except (StoppedError, DivergedError) as error:
        end_error = error
        tracker.mirror_end("stop" if isinstance(error, StoppedError) else "diverged", progress.step, str(error))
        raise
    finally:
        with engine.watch.allow(LONG_SECONDS):  # W&B may wait for its network
            callbacks.call("run_end", _end_record(progress.step, config.folder))
            task.close()
            _close_tracker(tracker, end_error)


def _end_record(step: int, folder: Path) -> dict[str, Any]:
    """Return the record for the callbacks' hook `run_end`, with the current error, if any."""
    error = sys.exc_info()[1]
    outcomes = {StoppedError: "stopped", Interrupted: "stopped", DivergedError: "diverged", type(None): "finished"}
    outcome = outcomes.get(type(error), "failed")
    return {"step": step, "outcome": outcome, "error": str(error or ""), "folder": str(folder)}


def _close_tracker(tracker: Tracker, end_error: RunError | None) -> None:
    """Close the tracker. After an `end_error`, which sets the exit code, only log the tracker's errors."""
    try:
        tracker.close()
    except (RunError, OSError) as error:
        if end_error is None:
            raise
        logger.warning("%s", error)


def _prepare_steps(
    training: Training[S],
    engine: Engine,
    progress: Progress,
    checkpoints: Path,
    extra_state: dict[str, Any],
    resumed_from: Path | None,
) -> TrainingPlan:
    """Take the warm-up step if the plan has one, and measure the matmul peak. Returns the plan with the peak."""
    config = training.plan.config

    def show_stage(stage: str) -> None:
        if engine.rank == 0:
            live.write_startup_stage(config.folder, stage)

    if training.plan.warmup_step:
        show_stage(live.COMPILE if config.engine.compiled else live.WARMUP_STEP)
        warmup_step(engine, training.task, progress, checkpoints, extra_state, resumed_from)
    elif resumed_from is not None:
        restore(engine, resumed_from)
    show_stage(live.MEASURE)
    plan = dataclasses.replace(training.plan, peak_flops=total_matmul_peak(engine))
    if engine.rank == 0:
        live.end_startup(config.folder)
    return plan


def _start_events(fork: dict[str, Any], checkpoint: Path | None) -> list[dict[str, Any]]:
    """Return the event of a start from a fork or from a checkpoint; [] for a new run."""
    if fork:
        return [make_event("fork", f"forked from {fork['name']} ({fork['run']}) at step {fork['step']}")]
    if checkpoint is None:
        return []
    message = f"resumed from {checkpoint.name}"
    if damaged := store.damaged_after(checkpoint):
        message += f"; set aside: {', '.join(damaged)} (see logs/training-0.log)"
    return [make_event("resume", message)]


def _starting_fork(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Return the content of fork.json if `state` is from the parent's checkpoint, at a fork's start; else {}."""
    fork = read_fork(folder)
    return fork if fork and state and state.get("run_id") == fork["run_id"] else {}


def _was_evaluated(folder: Path, engine: Engine) -> bool:
    """Return whether the run's records, which rank 0 reads, contain an evaluation."""
    evaluated = engine.rank == 0 and any(record.get("split") == "validation" for record in read_records(folder))
    return engine.workers.gather_objects(evaluated)[0]

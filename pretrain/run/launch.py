"""Starts a training run: in this process, as a process under torchrun, or in workers that Ray starts and restarts."""

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NoReturn

from pretrain.common import records
from pretrain.common.addresses import is_remote, local_run
from pretrain.common.errors import DivergedError, InputError, NothingSavedError, RunError, StoppedError, print_error
from pretrain.common.files import UNTRAINED, checkpoint_names
from pretrain.common.interrupts import Interrupted
from pretrain.common.packages import expect, install_command, is_installed
from pretrain.common.records import Metric
from pretrain.common.wording import counted
from pretrain.common.worker import TrainingRequest, Worker, torchrun_rank
from pretrain.config import ConfigT, RunConfig, SchedulingConfig
from pretrain.run import preflight
from pretrain.run.callbacks import check_options, serialize_callbacks
from pretrain.storage.runs import StoredRun, storing
from pretrain.tracking import live
from pretrain.tracking.logs import restore_on_exit


@dataclass(frozen=True)
class RunKind(Generic[ConfigT]):
    """The parts of starting a run that differ between pretraining and fine-tuning."""

    target: str  # "package.module:function", called in each worker with a `TrainingRequest` and a `Worker`
    # Called before anything is written, with the config and whether this process itself trains. Returns the number of
    # training steps, or None if the run is already finished.
    check: Callable[[ConfigT, bool], int | None]
    is_finished: Callable[[ConfigT], bool]  # whether the run folder contains a finished run
    find_changed: preflight.FindChanged[ConfigT]
    metrics: Mapping[str, Metric]  # metrics in the training records, for the progress line
    # Returns a context manager around the training; on exit it may wait, if the training has finished.
    training_context: Callable[[ConfigT], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
    callbacks: tuple[Any, ...] = ()  # callbacks (functions and objects) in addition to the config's


def start_run(
    kind: RunKind[ConfigT], config: ConfigT, old_config: ConfigT | None, *, resume: bool, ray: bool, no_ray: bool
) -> bool:
    """Check that the run can start, record it in its folder and train to the end; see `api.train` for the options.

    Under torchrun only the first process checks, records and prints. The others only train.

    Args:
        old_config: the config that an earlier start recorded, if the run resumes (`earlier_config`).

    Returns whether this process trained; False if the run is already finished, or another process started it. Raises a
    `RunError` if the run cannot start, diverged, or was stopped.
    """
    in_process = trains_in_process(config.scheduling.workers, no_ray)
    location = _describe_location(config.scheduling, ray=ray, in_process=in_process)
    kind = replace(kind, callbacks=serialize_callbacks(kind.callbacks, pickled=not in_process))
    try:
        if is_follower():
            if not kind.is_finished(config):
                _train(kind, config, resume, in_process=True)
            return False
        steps = kind.check(config, in_process)
        if steps is not None:
            _expect_packages(config, in_ray=not in_process and _uses_ray(config.scheduling, ray))
        with (
            preflight.checked_run_folder(config, old_config, kind.find_changed, resume=resume) as config,
            storing(config.address, config.folder, resume=resume),
        ):
            if steps is None or kind.is_finished(config):
                print(f"{config.folder}: already finished; nothing to do")
                return False
            preflight.record_run(config, [sys.executable, *sys.orig_argv[1:]])
            print(location)
            with (
                _recording_end(config.folder),
                live.follow(config.folder, steps, metrics=kind.metrics),
                kind.training_context(config),
            ):
                _train(kind, config, resume, in_process=in_process, ray=ray)
        return True
    except (KeyboardInterrupt, Interrupted):  # while no workers run
        raise _stopped_error(config.folder) from None


def earlier_config(config: ConfigT, resume: bool) -> ConfigT | None:
    """Return the config that an earlier start recorded, if this process starts a run with `resume`; else None."""
    return preflight.recorded_config(config) if resume and not is_follower() else None


def check_callbacks_and_workers(config: RunConfig, in_process: bool) -> None:
    """Check the options of callbacks, and whether the workers fit on this machine.

    Clusters are checked when the run starts. Raises `InputError` for callbacks, `MachineError` for workers.
    """
    check_options(config.callbacks)
    if in_process or config.scheduling.address:
        return
    from cluster.workers.nodes import choose_cpus

    cores = len(os.sched_getaffinity(0))
    choose_cpus([(cores, 0)], config.scheduling.workers, config.scheduling.cpus_per_worker, "this machine")


def trains_in_process(workers: int, no_ray: bool) -> bool:
    """Return whether this process trains, by itself or under torchrun; `InputError` if it cannot."""
    if no_ray and workers > 1:
        raise InputError(
            f"--no-ray: trains in one process, but scheduling.workers is {workers}. "
            "Add --workers 1, or start several processes with torchrun."
        )
    return bool(torchrun_rank()) or no_ray


def is_follower() -> bool:
    """Return whether torchrun started this process, and this is not its first process."""
    ranks = torchrun_rank()
    return ranks is not None and ranks[0] > 0


def download(run_dir: Any) -> None:
    """Fetch the files that a resume needs from the run at the address `run_dir`; do nothing for a path.

    Under torchrun, the first process verifies the local files, and also fetches the best checkpoint.
    """
    if is_remote(run_dir):
        StoredRun(run_dir, local_run(run_dir)).download(best=not is_follower(), is_follower=is_follower())


def _describe_location(scheduling: SchedulingConfig, *, ray: bool, in_process: bool) -> str:
    """Describe where the run trains, for the terminal."""
    if torchrun_rank():
        return "processes of torchrun, without Ray"
    if in_process:
        return "this process, without Ray"
    location = f"Ray at {scheduling.address}" if scheduling.address else "Ray"
    in_ray = _uses_ray(scheduling, ray)
    return f"{counted(scheduling.workers, 'worker')}, {f'through {location}' if in_ray else 'without Ray'}"


def _uses_ray(scheduling: SchedulingConfig, ray: bool) -> bool:
    return ray or scheduling.workers > 1 or bool(scheduling.address)


def _expect_packages(config: RunConfig, *, in_ray: bool) -> None:
    """Raise `MachineError` if a package that the run needs is not installed; print a line if W&B is not installed."""
    needs_wandb = config.tracking.wandb in ("online", "offline")
    expect("training", "deepspeed", *(["ray"] if in_ray else []), *(["wandb"] if needs_wandb else []))
    if config.tracking.wandb == "auto" and not is_installed("wandb"):
        print(f"W&B is not installed, so the run is not mirrored. To install it: {install_command('wandb')}")


@contextlib.contextmanager
def _recording_end(folder: Path) -> Iterator[None]:
    """If the training in the block stops early, record the reason in the run `folder`."""
    try:
        yield
    except (Interrupted, StoppedError, DivergedError) as cause:
        error = cause if isinstance(cause, DivergedError) else _stopped_error(folder, cause)
        event = "diverged" if isinstance(error, DivergedError) else "stop"
        try:
            records.append_end_event(folder, event, str(error), int(_latest_checkpoint(folder).removeprefix("step-")))
        except (RunError, OSError) as write_error:  # job scripts need the exit code of the original error
            print(f"warning: the end of the run is not recorded: {write_error}", file=sys.stderr)
        raise error from None


def _stopped_error(folder: Path, cause: BaseException | None = None) -> StoppedError:
    """Return the error for a stopped run, which names the latest checkpoint; a `NothingSavedError` if no step is saved.

    If `cause` is a `StoppedError`, its message is kept.
    """
    error = cause if isinstance(cause, StoppedError) else StoppedError(f"{folder}: {StoppedError.BETWEEN_STEPS}")
    latest = _latest_checkpoint(folder)
    if isinstance(error, NothingSavedError) or (latest > UNTRAINED and latest in str(error)):
        return error
    error_type, saved = (StoppedError, f"Checkpoint {latest}") if latest > UNTRAINED else (NothingSavedError, "No step")
    return error_type(f"{str(error).removesuffix(error.CONTINUE)} {saved} is saved.{error.CONTINUE}")


def _latest_checkpoint(folder: Path) -> str:
    return max(checkpoint_names(folder), default=UNTRAINED)


def _exit_stopped(folder: Path) -> NoReturn:
    """Exit this process on a stop request while a library blocks the main thread; there is nothing to save."""
    error = _stopped_error(folder)
    print_error(error)
    os._exit(error.exit_code)


def _train(kind: RunKind[ConfigT], config: ConfigT, resume: bool, *, in_process: bool, ray: bool = False) -> None:
    training = TrainingRequest(config.model_dump(mode="json"), resume, callbacks=kind.callbacks)
    if in_process:
        module, function = kind.target.split(":")
        with restore_on_exit():
            worker = Worker.from_environment()
            worker.watch_stop_file(config.folder)
            worker.interrupts.on_stuck = functools.partial(_exit_stopped, config.folder)
            with worker.interrupts:
                getattr(importlib.import_module(module), function)(training, worker)
        return
    from cluster.workers.launch import run

    scheduling = config.scheduling
    run(
        kind.target,
        training,
        name=config.name,
        run_dir=config.folder,
        workers=scheduling.workers,
        cpus_per_worker=scheduling.cpus_per_worker,
        address=scheduling.address,
        in_ray=ray,
        max_failures=scheduling.max_failures,
        min_workers=scheduling.min_workers,
        wait_for_nodes_seconds=scheduling.wait_for_nodes_seconds,
        start_seconds=scheduling.start_seconds,
    )

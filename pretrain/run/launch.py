"""Start a training run: in this process, as one of torchrun's processes, or in workers that Ray starts and restarts."""

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, NoReturn

from pretrain.common import records
from pretrain.common.addresses import is_remote, local_run
from pretrain.common.errors import DivergedError, InputError, MachineError, RunError, StoppedError
from pretrain.common.interrupts import Interrupted
from pretrain.common.records import Metric
from pretrain.common.wording import counted
from pretrain.common.worker import TrainingRequest, Worker, torchrun_place
from pretrain.config import R, RunConfig, SchedulingConfig
from pretrain.run import preflight
from pretrain.run.callbacks import carried, check_options
from pretrain.storage.runs import SAVE_RETRY_SECONDS, StoredRun
from pretrain.tracking import live
from pretrain.tracking.logs import process_restored


@dataclass(frozen=True)
class RunKind(Generic[R]):
    """What starting a run needs to know of its kind, pretraining or fine-tuning."""

    target: str  # "package.module:function", called in each worker with a `TrainingRequest` and a `Worker`
    # Called before anything is written, with the config and whether this process trains. Returns the number of training
    # steps, or None if the run is finished already.
    check: Callable[[R, bool], int | None]
    is_finished: Callable[[R], bool]  # whether the run folder holds the finished run
    changed: Callable[[R, R, int], list[str]]  # as of `preflight.check_run_folder`
    metrics: Mapping[str, Metric]  # what its records have, for the line on the terminal
    # What goes on beside the training; it may wait at the end of one that finishes.
    beside: Callable[[R], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
    callbacks: tuple[Any, ...] = ()  # functions and objects that are told what the run does, beside those of the config


def start_run(kind: RunKind[R], config: R, before: R | None, *, resume: bool, ray: bool, no_ray: bool) -> bool:
    """`_start_run`; a Ctrl-C or SIGTERM that comes when no workers run is a stop, too."""
    try:
        return _start_run(kind, config, before, resume=resume, ray=ray, no_ray=no_ray)
    except KeyboardInterrupt:
        raise _stopped(config) from None


def _start_run(kind: RunKind[R], config: R, before: R | None, *, resume: bool, ray: bool, no_ray: bool) -> bool:
    """Check that the run can start, record it in its folder and train it to the end; `api.train` has the options.

    Under torchrun only the first process checks, records and prints. The others only train.

    Args:
        before: the config that an earlier start recorded, if the run resumes (`config_before`).

    Returns whether this process started the training; it may be finished already. Raises a `RunError` if the run cannot
    start, diverged, or was stopped.
    """
    alone = is_alone(config.scheduling.workers, no_ray)
    kind = replace(kind, callbacks=carried(kind.callbacks, elsewhere=not alone))
    if is_follower():
        if not kind.is_finished(config):
            _train(kind, config, resume, alone=True)
        return False
    steps = kind.check(config, alone)
    with preflight.only_run(config.folder):
        config = preflight.check_run_folder(config, before, kind.changed, resume=resume)
        with storing(config, resume):
            if steps is None or kind.is_finished(config):
                print(f"{config.folder}: already finished; nothing to do")
                return False
            preflight.record_run(config, [sys.executable, *sys.orig_argv[1:]])
            print(_how(config.scheduling, ray=ray, alone=alone))
            _train_and_follow(kind, config, resume, steps, alone=alone, ray=ray)
    return True


def config_before(config: R, resume: bool) -> R | None:
    """The config that an earlier start recorded, for the process that starts a run which is to `resume`; else None."""
    return preflight.recorded_config(config) if resume and not is_follower() else None


def check_start(config: RunConfig, alone: bool) -> None:
    """Check what the config says of processes: options of callbacks, and whether the workers fit on this machine.

    Clusters are checked when the run starts. Raises `InputError` for the callbacks, `MachineError` for the workers.
    """
    check_options(config.callbacks)
    if alone or config.scheduling.address:
        return
    from cluster.workers.nodes import nodes_fit

    cores = len(os.sched_getaffinity(0))
    nodes_fit([(cores, 0)], config.scheduling.workers, config.scheduling.cpus_per_worker, "this machine")


def is_alone(workers: int, no_ray: bool) -> bool:
    """Whether this process trains, by itself or as one of torchrun's; `InputError` if it cannot."""
    if no_ray and workers > 1:
        raise InputError(
            f"--no-ray: trains in one process, but scheduling.workers is {workers}. "
            "Add --workers 1, or start several processes with torchrun."
        )
    return bool(torchrun_place()) or no_ray


def is_follower() -> bool:
    """Whether this is a process of torchrun's, but not the first."""
    place = torchrun_place()
    return place is not None and place[0] > 0


def download(run_dir: Any) -> None:
    """Fetch what a resume needs of the run at the address `run_dir`; nothing for a path.

    Of torchrun's processes, the first verifies what is here, and fetches the best checkpoint, too.
    """
    if is_remote(run_dir):
        StoredRun(run_dir, local_run(run_dir)).download(best=not is_follower(), follows=is_follower())


@contextlib.contextmanager
def storing(config: RunConfig, resume: bool) -> Iterator[None]:
    """Store what a run with an address leaves in its folder, however it ends.

    Raises `MachineError` if that fails after a run that did not; its checkpoints are in the folder then.
    """
    if not config.address:
        yield
        return
    run = StoredRun(config.address, config.folder, SAVE_RETRY_SECONDS)
    if not resume and (run.names() or run.has_model()):
        found = f"checkpoints (newest {run.names()[-1]})" if run.names() else "a finished model"
        raise InputError(
            f"{config.address}: already holds {found}. Add --resume to continue that run, or choose another run_dir "
            "to start a new one."
        )
    run.claim()
    try:
        yield
    except BaseException as error:
        try:
            run.end(failed=True)
        except RunError as reason:
            if isinstance(error, RunError):  # and not a bug, an error of CUDA or Ctrl-C
                raise type(error)(f"{error} Not stored: {reason}") from error
        raise
    try:
        run.end()
    except RunError as error:
        raise MachineError(
            f"{config.folder}: finished, but its last checkpoint or results are not stored: {error} "
            "Run the command with --resume to store them."
        ) from error
    print(f"{config.address}: stored")


def _how(scheduling: SchedulingConfig, *, ray: bool, alone: bool) -> str:
    """Where the run trains, for the terminal."""
    if torchrun_place():
        return "processes of torchrun, without Ray"
    if alone:
        return "this process, without Ray"
    where = f"Ray at {scheduling.address}" if scheduling.address else "Ray"
    by_ray = ray or scheduling.workers > 1 or bool(scheduling.address)
    return f"{counted(scheduling.workers, 'worker')}, {f'through {where}' if by_ray else 'without Ray'}"


def _train_and_follow(kind: RunKind[R], config: R, resume: bool, steps: int, *, alone: bool, ray: bool) -> None:
    """Train, with a live line on the terminal, and record why the run ended early."""
    try:
        with live.follow(config.folder, steps, metrics=kind.metrics), kind.beside(config):
            _train(kind, config, resume, alone=alone, ray=ray)
    except (StoppedError, DivergedError) as ended:
        error = preflight.with_saved(config.folder, ended) if isinstance(ended, StoppedError) else ended
        try:
            records.note_end(config.folder, "stop" if isinstance(error, StoppedError) else "diverged", str(error))
        except (RunError, OSError) as reason:  # the exit code tells job scripts how the run ended
            print(f"warning: the end of the run is not recorded: {reason}", file=sys.stderr)
        raise error from None


def _stopped(config: RunConfig) -> StoppedError:
    return preflight.with_saved(config.folder, StoppedError(f"{config.folder}: {StoppedError.BETWEEN}"))


def _give_up(config: RunConfig) -> NoReturn:
    """End this process, which a library holds although a stop is requested and there is nothing to save."""
    error = _stopped(config)
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(error.exit_code)


def _train(kind: RunKind[R], config: R, resume: bool, *, alone: bool, ray: bool = False) -> None:
    training = TrainingRequest(config.model_dump(mode="json"), resume, callbacks=kind.callbacks)
    if alone:
        module, function = kind.target.split(":")
        with process_restored():
            worker = Worker.from_environment()
            worker.heed_stop_file(config.folder)
            worker.interrupts.stuck = functools.partial(_give_up, config)
            try:
                with worker.interrupts:
                    getattr(importlib.import_module(module), function)(training, worker)
            except Interrupted:
                raise _stopped(config) from None
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
    )

"""The training loop, the same for every task and any number of workers.

`fit` knows steps, logging, evaluation, checkpoints and stops. What a batch is, what its loss is and what its
numbers are called, a `Task` tells it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from pretrain.checkpoint import store
from pretrain.checkpoint.saver import Saver
from pretrain.common.errors import DivergedError, InputError, MachineError, StoppedError
from pretrain.common.memory import return_freed_memory
from pretrain.config import RunConfig
from pretrain.training.engine.engine import Engine, StepResult
from pretrain.training.session import newest_checkpoint
from pretrain.training.spikes import REMEMBERED, is_spike
from pretrain.training.stragglers import RankTimes

logger = logging.getLogger(__name__)

_SKIPS_AT_ONE_SCALE = 3  # that fp16's loss scaler lets pass (its hysteresis is 2) before it lowers it
LONG_SECONDS = 1800.0  # that an evaluation, a save or a rollback may take at most
_STORAGE = "the run folder's storage"


class Step(Protocol):
    """One rank's share of one optimizer step; `pretrain.batches.loader.StepBatch` is one."""

    @property
    def micro_batches(self) -> tuple[Any, ...]: ...
    @property
    def sequences(self) -> int: ...  # global
    @property
    def tokens(self) -> int: ...  # global
    @property
    def epoch(self) -> int: ...


S = TypeVar("S", bound=Step)


class TrainingTask(Protocol[S]):
    """What is trained. Totals are sums over micro-batches, made comparable by `metrics` (law 3)."""

    def batches(self, start_step: int, passed_over: Sequence[tuple[int, int]]) -> Iterator[S]:
        """The steps from the 0-based `start_step` on, to the end of training.

        `passed_over` has (step, count): from this step on, so many steps' worth of data lie behind that were not used.
        """
        ...

    def pass_over(self, step: int, count: int) -> list[tuple[int, int]]:
        """What `passed_over` gets so that the data of `count` steps from `step` on is not used."""
        ...

    def largest(self) -> S:
        """A step of one micro-batch, as large as any that can come."""
        ...

    def loss(self, output: Any, step: S) -> Tensor:
        """This micro-batch's part of the global mean loss, to be differentiated."""
        ...

    def totals(self, output: Any) -> Tensor:
        """fp32 [n] sums of one micro-batch."""
        ...

    def counts(self, step: S) -> Tensor:
        """fp64 [m] global counts of one step, which totals are divided by."""
        ...

    def flops(self, micro_batch: Any) -> float:
        """Useful floating-point operations of one micro-batch, forward and backward."""
        ...

    def metrics(self, totals: list[float], counts: list[float]) -> dict[str, float]:
        """Named means, `loss` among them."""
        ...

    def evaluate(self, engine: Engine) -> dict[str, float]:
        """Named means over the held-out samples, `loss` among them; {} when there are none."""
        ...

    def to_minimise(self, means: dict[str, float]) -> float:
        """Which number of an evaluation says how good a checkpoint is; lower is better."""
        ...

    def validation_set(self) -> str:
        """Which held-out samples `evaluate` uses now; numbers of different ones do not compare."""
        ...

    def stalled_seconds(self) -> float:
        """Seconds spent so far on waiting for batches."""
        ...


@dataclass(frozen=True)
class TrainingPlan:
    """How long, how fast and how often."""

    config: RunConfig  # tracking, checkpoint, guard and engine
    total_steps: int
    learning_rate: Callable[[int], float]  # of the 0-based step
    evaluate_every_steps: int
    checkpoint_every_steps: int
    peak_flops: float  # measured matmul peak of all workers together, FLOP/s
    keep_best: bool = False  # save where an evaluation is the best so far, for who goes back to it in the end
    patience: int = 0  # evaluations in a row without a gain after which training ends; 0 goes to the last step


@dataclass
class Window:
    """Sums of the steps since the last record, over all ranks; a checkpoint carries them to the next record."""

    totals: list[float] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    tokens: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0  # before this start
    stalled: float = 0.0  # all ranks' mean

    def add(self, totals: list[float], counts: list[float]) -> None:
        self.totals = [a + b for a, b in zip(self.totals or [0.0] * len(totals), totals, strict=True)]
        self.counts = [a + b for a, b in zip(self.counts or [0.0] * len(counts), counts, strict=True)]


@dataclass
class Progress:
    """What a checkpoint knows of the way so far."""

    step: int = 0  # optimizer steps done, skipped ones included
    samples: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    bad_in_a_row: int = 0
    seconds: float = 0.0  # of training, over all starts, up to the last record
    part: str = ""  # the validation set of the phase; losses of different ones do not compare
    lowest: float | None = None  # of what the task minimises, over the evaluations of this part
    evaluations_without_gain: int = 0
    stopped_early: bool = False
    recent: list[float] = field(default_factory=list)  # losses of the last steps, for `guard.is_spike`
    rollbacks: int = 0
    passed_over: list[tuple[int, int]] = field(default_factory=list)  # see `Task.batches`
    window: Window = field(default_factory=Window)  # since the last record

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """As a checkpoint's state.json has it."""
        values = {name: state[name] for name in cls.__dataclass_fields__ if name in state}
        passed_over = [(step, count) for step, count in state["passed_over"]]
        return cls(**{**values, "passed_over": passed_over, "window": Window(**values["window"])})


class Recorder(Protocol):
    """Where numbers go; `pretrain.tracking.tracker.Tracker` is one."""

    def log(self, record: dict[str, Any]) -> None: ...
    def rewind(self, step: int) -> None: ...


class _PatientRecorder:
    """A recorder whose storage may pause."""

    def __init__(self, recorder: Recorder, engine: Engine) -> None:
        self._recorder, self._engine = recorder, engine

    def log(self, record: dict[str, Any]) -> None:
        with self._engine.awaiting(_STORAGE):
            self._recorder.log(record)

    def rewind(self, step: int) -> None:
        with self._engine.awaiting(_STORAGE):
            self._recorder.rewind(step)


def fit(
    engine: Engine,
    task: TrainingTask[S],
    plan: TrainingPlan,
    progress: Progress,
    *,
    checkpoints: Path,
    extra_state: dict[str, Any],
    recorder: Recorder,
    stop_requested: Callable[[], bool],
) -> None:
    """Train from `progress` to the end of `plan`, with a checkpoint at least at the end.

    Raises:
        StoppedError: a stop was asked for on any rank; a checkpoint of the current step was written.
        DivergedError: steps without a finite loss or gradient, or leaps of the loss, after as many rollbacks as there may be.
        MachineError: a checkpoint could not be written; earlier ones are untouched.
    """
    run = _Run(engine, task, plan, progress, checkpoints, extra_state, recorder)
    try:
        while run.train(stop_requested):
            run.roll_back()
    finally:
        with engine.allow(LONG_SECONDS):
            run.saver.settle()
    run.saver.wait()
    run.tell_trouble()


def rehearse(
    engine: Engine, task: TrainingTask[S], progress: Progress, checkpoints: Path, extra_state: dict[str, Any]
) -> None:
    """Fail in minute one: step the largest micro-batch, with a checkpoint written before and read back after.

    Leaves the training state bitwise as the checkpoint of `progress` has it; at a fresh start that is written first, as
    step 0. A run that goes on need not have been restored before.
    """
    checkpoint = checkpoints / store.name_of(progress.step)
    if checkpoint not in store.list_checkpoints(checkpoints):
        store.save(checkpoints, progress.step, engine.fragments(), _state(engine, progress, extra_state), engine)
    engine.module.train()
    step = task.largest()
    try:
        # A second micro-batch finds the first one's gradients there; a run that goes on has met that.
        for last in (True,) if progress.step else (False, True):
            engine.backward(task.loss(engine.forward(step.micro_batches[0]), step), last=last)
        engine.step(learning_rate=0.0)
    except torch.OutOfMemoryError as error:
        raise MachineError(
            "engine.micro_batch_tokens: the largest micro-batch does not fit the device. Lower it, or take a higher "
            "engine.zero_stage or engine.activation_checkpointing."
        ) from error
    restore(engine, checkpoint)


def read_state(engine: Engine, checkpoint: Path) -> dict[str, Any]:
    """The state.json of a verified checkpoint; `InputError` when its parameters are not those of `engine`."""
    state = store.read_state(checkpoint)
    found, wanted = state["shapes"], {name: list(shape) for name, shape in engine.shapes.items()}
    for name in {**wanted, **found}:
        if found.get(name) != wanted.get(name):
            raise InputError(
                f"{checkpoint}: {name} is {found.get(name)}, this config makes it {wanted.get(name)}. "
                "Resume with the config that it was written with."
            )
    return state


def restore(engine: Engine, checkpoint: Path) -> dict[str, Any]:
    """Bring `engine` to the state of a verified checkpoint; returns what `read_state` does."""
    state = read_state(engine, checkpoint)
    return_freed_memory()  # which the pages of the checkpoint's files would come on top of
    with store.CheckpointReader(checkpoint) as reader:
        engine.load(reader, state["updates"])
    engine.load_scaler_state(state["scaler"])
    return_freed_memory()
    return state


class _Clock:
    """Seconds of training; evaluation and checkpoints are counted apart."""

    def __init__(self) -> None:
        self._began, self._away = time.perf_counter(), 0.0
        self.apart = {"evaluation": 0.0, "checkpoint": 0.0}  # since the last record

    def lap(self) -> float:
        """Seconds of training since the last lap."""
        now = time.perf_counter()
        seconds = now - self._began - self._away
        self._began, self._away = now, 0.0
        return seconds

    def leave_out(self, what: str, seconds: float) -> None:
        self.apart[what] += seconds
        self._away += seconds


class _Run(Generic[S]):
    """The state of one `fit`."""

    def __init__(
        self,
        engine: Engine,
        task: TrainingTask[S],
        plan: TrainingPlan,
        progress: Progress,
        checkpoints: Path,
        extra_state: dict[str, Any],
        recorder: Recorder,
    ) -> None:
        self.engine, self.task, self.plan, self.progress = engine, task, plan, progress
        self.checkpoints, self.extra_state = checkpoints, extra_state
        self.recorder: Recorder = _PatientRecorder(recorder, engine)
        saving = plan.config.checkpoint
        self.saver = Saver(
            checkpoints,
            engine.side_group(),
            keep_last=saving.keep_last,
            background=saving.background,
            retry_seconds=saving.retry_seconds,
        )
        self.clock = _Clock()
        self.stragglers = RankTimes(engine, plan.config.tracking.straggler_factor)
        self.stalled_before = task.stalled_seconds()
        self.norm = 0.0
        self.skips, self.skipped_scale = 0, 0.0  # steps in a row that fp16 has skipped at this loss scale
        self.wrong = ""  # why the last `train` ended, if not well
        self.validation: tuple[int, float] | None = None

    def train(self, stop_requested: Callable[[], bool]) -> bool:
        """Train to the end; True where something went wrong, which `wrong` says, and a rollback may mend it."""
        progress, plan = self.progress, self.plan
        self.engine.module.train()
        self.engine.seed_device(plan.config.seed, progress.step + progress.rollbacks)
        self.clock.lap()
        for step in self.steps():
            with self.engine.awaiting(_STORAGE):
                asked = stop_requested()  # looks for files
            stop = self.train_step(step, asked)
            progress.step += 1
            last, best = progress.step == plan.total_steps, False
            if self.wrong:
                return True
            if last or progress.step % plan.config.tracking.log_every_steps == 0:
                self.log()
            if last or progress.step % plan.evaluate_every_steps == 0:
                self.evaluate()
                progress.stopped_early = 0 < plan.patience <= progress.evaluations_without_gain
                last = last or progress.stopped_early
                best = plan.keep_best and not progress.evaluations_without_gain
            if last or stop or best or progress.step % plan.checkpoint_every_steps == 0:
                self.save()
            if progress.stopped_early:
                return False
            if stop and not last:
                with self.engine.allow(LONG_SECONDS):
                    self.saver.wait()
                raise StoppedError(
                    f"stopped at step {progress.step} of {plan.total_steps}; checkpoint "
                    f"{store.name_of(progress.step)} is saved. Continue with --resume."
                )
        return False

    def steps(self) -> Iterator[S]:
        """The task's steps from here on. Waiting for one, as where a phase opens its data, is no hang."""
        steps = self.task.batches(self.progress.step, self.progress.passed_over)
        part = None
        while True:
            began = time.perf_counter()
            with self.engine.awaiting("a batch"):
                step = next(steps, None)
            if step is None:
                return
            before, part = part, self.task.validation_set()
            if part == before:  # not the first batch of a phase, nor after a start or a rollback: it opens the data
                self.stragglers.waited_once(time.perf_counter() - began)
            yield step

    def train_step(self, step: S, stop_here: bool) -> bool:
        """One optimizer step; returns whether any rank asks for a stop."""
        engine, task, progress = self.engine, self.task, self.progress
        totals: Tensor | None = None
        flops = 0.0
        for number, micro_batch in enumerate(step.micro_batches):
            with self.stragglers.forward():
                output = engine.forward(micro_batch)
            engine.backward(task.loss(output, step), last=number == len(step.micro_batches) - 1)
            part = task.totals(output).detach()
            totals = part if totals is None else totals + part
            flops += task.flops(micro_batch)
        assert totals is not None
        rate = self.plan.learning_rate(progress.step)
        result = engine.step(rate)
        stalled = task.stalled_seconds()
        mine = torch.tensor(
            [float(stop_here), float(self.saver.failed), flops, stalled - self.stalled_before],
            dtype=torch.float64,
        )
        self.stragglers.waited += stalled - self.stalled_before
        self.stalled_before = stalled
        shared = engine.sum_over_workers(torch.cat([totals.double().cpu(), mine]))
        *sums, stop, failed, all_flops, all_stalled = shared.tolist()
        if failed:
            self.saver.wait()  # raises on every rank
        self._count(step, result, sums, rate)
        progress.window.flops += all_flops
        progress.window.stalled += all_stalled / engine.world_size
        return stop > 0

    def _count(self, step: S, result: StepResult, sums: list[float], rate: float) -> None:
        progress = self.progress
        progress.samples += step.sequences
        progress.tokens += step.tokens
        progress.window.tokens += step.tokens
        self.rate, self.epoch = rate, step.epoch
        if not result.applied:
            progress.skipped_steps += 1
        self.norm = result.gradient_norm
        if not all(map(math.isfinite, sums)) or (not result.applied and self._scale_is_stuck()):
            progress.bad_in_a_row += 1
            logger.warning("step %d: loss or gradient is not finite; skipped", progress.step + 1)
            if progress.bad_in_a_row >= self.plan.config.engine.max_bad_steps:
                self.wrong = (
                    f"{progress.bad_in_a_row} steps in a row up to step {progress.step + 1} had a loss or gradient that is "
                    "not finite"
                )
            return
        progress.bad_in_a_row = 0
        if result.applied:
            self.skips = 0
        self._enter_part()
        counts = self.task.counts(step).tolist()
        loss = self.task.metrics(sums, counts)["loss"]
        if is_spike(progress.recent, loss, self.plan.config.guard):
            self.wrong = f"the loss of step {progress.step + 1} leapt to {loss:.4g}"
        progress.recent = [*progress.recent, loss][-REMEMBERED:]
        progress.window.add(sums, counts)

    def _scale_is_stuck(self) -> bool:
        """Whether no lower fp16 loss scale will come: skipped steps are its way of looking for one."""
        scale = self.engine.scaler_state().get("cur_scale", 1)
        self.skips = self.skips + 1 if scale == self.skipped_scale else 1
        self.skipped_scale = scale
        return scale <= 1 or self.skips > _SKIPS_AT_ONE_SCALE

    def _enter_part(self) -> None:
        """Losses compare within a phase alone: longer sequences have higher ones at first."""
        progress, part = self.progress, self.task.validation_set()
        if progress.part not in ("", part):
            progress.recent, progress.lowest, progress.evaluations_without_gain = [], None, 0
        progress.part = part

    def log(self) -> None:
        progress, engine, window = self.progress, self.engine, self.progress.window
        seconds = window.seconds + self.clock.lap()
        progress.seconds += seconds
        means = self.task.metrics(window.totals, window.counts) if window.totals else {}
        self.recorder.log(
            {
                "step": progress.step,
                "epoch": self.epoch,
                "samples": progress.samples,
                "tokens": progress.tokens,
                **(means or {"loss": math.nan}),
                "lr": self.rate,
                "grad_norm": self.norm,
                "tokens_per_second": window.tokens / seconds,
                "mfu": window.flops / seconds / self.plan.peak_flops,
                "data_stall_fraction": window.stalled / seconds,
                "seconds": progress.seconds,
                **{f"{name}_seconds": apart for name, apart in self.clock.apart.items()},
                **self.stragglers.lap(self.recorder, progress.step),
                "skipped_steps": progress.skipped_steps,
                "memory_bytes": engine.peak_memory_bytes(),
            }
        )
        progress.window = Window()
        self.clock.apart = dict.fromkeys(self.clock.apart, 0.0)

    def evaluate(self) -> None:
        began = time.perf_counter()
        self.engine.module.eval()
        with torch.no_grad(), self.engine.allow(LONG_SECONDS):
            means = self.task.evaluate(self.engine)
        self.engine.module.train()
        took = time.perf_counter() - began
        self.clock.leave_out("evaluation", took)
        if means:
            self._judge(self.task.to_minimise(means))
            best = self.progress.evaluations_without_gain == 0
            self.recorder.log(
                {"step": self.progress.step, "split": "validation", **means, "best": best, "seconds": took}
            )

    def _judge(self, value: float) -> None:
        progress = self.progress
        self.validation = (progress.step, value)
        if math.isfinite(value) and (progress.lowest is None or value < progress.lowest):
            progress.lowest, progress.evaluations_without_gain = value, 0
        else:
            progress.evaluations_without_gain += 1

    def save(self) -> None:
        began = time.perf_counter()
        self.progress.window.seconds += self.clock.lap()
        current = self.validation is not None and self.validation[0] == self.progress.step
        state = {
            **self.extra_state,
            "validation_loss": self.validation[1] if current and self.validation else None,
            "validation_set": self.task.validation_set(),
        }
        with self.engine.allow(LONG_SECONDS):  # for the save before it, where the storage is slow
            self.saver.save(self.progress.step, self.engine.fragments(), _state(self.engine, self.progress, state))
        self.tell_trouble()
        self.clock.leave_out("checkpoint", time.perf_counter() - began)

    def tell_trouble(self) -> None:
        """Record that a save had to wait for the storage, which looks like a standstill while it lasts."""
        if self.saver.trouble:
            event = {"event": "storage", "step": self.progress.step, "time": time.time()}
            self.recorder.log({**event, "message": self.saver.trouble})
            self.saver.trouble = ""

    def roll_back(self) -> None:
        """Go back to the last checkpoint and pass over the data since; `DivergedError` where that was tried enough."""
        progress, plan = self.progress, self.plan
        if progress.window.tokens:  # not just logged
            self.log()
        with self.engine.allow(LONG_SECONDS):
            self.saver.wait()
            checkpoint = newest_checkpoint(self.checkpoints, self.engine)
        name = checkpoint.name if checkpoint else "none"
        if checkpoint is None or progress.rollbacks >= plan.config.guard.max_rollbacks:
            raise DivergedError(
                f"{self.wrong}, after {progress.rollbacks} rollbacks. The last good checkpoint is {name}. Lower the "
                "learning rate, or set guard.spike_sigmas: 0 if a leap is nothing to fear; a pretraining goes on from it with "
                "--resume, a fine-tuning begins anew."
            )
        with self.engine.allow(LONG_SECONDS):
            found = Progress.from_state(restore(self.engine, checkpoint))
        first, count = found.step, progress.step - found.step
        logger.warning("%s: back to %s, past the data of %d steps", self.wrong, name, count)
        event = {
            "event": "rollback",
            "step": first,
            "from_step": progress.step,
            "passed_over_steps": count,
            "time": time.time(),
            "message": f"{self.wrong}: back to {name}, past the data of {count} steps",
        }
        found.rollbacks = progress.rollbacks + 1
        found.passed_over = [*progress.passed_over, *self.task.pass_over(first, count)]
        for name in Progress.__dataclass_fields__:
            setattr(progress, name, getattr(found, name))
        self.wrong = ""
        self.recorder.rewind(first)
        self.recorder.log(event)


def _state(engine: Engine, progress: Progress, extra_state: dict[str, Any]) -> dict[str, Any]:
    """What state.json has."""
    return {
        **dataclasses.asdict(progress),
        "updates": engine.updates(),
        "scaler": engine.scaler_state(),
        "shapes": {name: list(shape) for name, shape in engine.shapes.items()},
        **extra_state,
    }

"""The training loop for every task and any number of workers.

`fit` handles steps, logging, evaluation, checkpoints and stops. A `TrainingTask` defines the batches, the loss and the
metrics.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, NoReturn

import torch
from torch import Tensor

from pretrain.checkpoint import store
from pretrain.checkpoint.saver import Saver
from pretrain.common.errors import DivergedError, StoppedError
from pretrain.common.interrupts import Interrupted, Interrupts
from pretrain.common.records import make_event
from pretrain.common.transfers import to_device, to_host
from pretrain.common.wording import counted
from pretrain.run.callbacks import Callbacks
from pretrain.run.forward_backward import ForwardBackward, seed_device
from pretrain.run.plan import TrainingPlan
from pretrain.run.progress import MetricSums, Progress, Stopwatch, checkpoint_state, restore
from pretrain.run.session import collective_timeout, latest_checkpoint
from pretrain.run.spikes import LOSS_WINDOW, SkipCounter, is_spike
from pretrain.run.steps import LaunchedStep, StepOutcome, TrainingFailure
from pretrain.run.stragglers import RankTimes
from pretrain.run.task import Recorder, S, TrainingTask
from pretrain.storage.runs import SAVE_RETRY_SECONDS, StoredRun, evaluation_key
from pretrain.training.engine import Engine

logger = logging.getLogger(__name__)

LONG_SECONDS = 1800.0  # time limit of an evaluation, of a save without its retries, and of a rollback
STOP_SECONDS = 5.0  # how long a stop waits for the step in progress, which may be compiled for minutes
_STORAGE = "the run folder's storage"
_MAX_BAD_STEPS = 5  # consecutive steps with a loss or gradient that is not finite, before the run rolls back
_MAX_ROLLBACKS = 3  # number of rollbacks without a checkpoint past the failed step, before the run stops as diverged


def fit(
    engine: Engine,
    task: TrainingTask[S],
    plan: TrainingPlan,
    progress: Progress,
    *,
    stop_requested: Callable[[], bool],
    **options: Any,
) -> None:
    """Train from `progress` to the end of `plan`, with a checkpoint at least at the end; `options` are passed to `Fit`.

    Raises:
        StoppedError: a stop was requested on any rank; a checkpoint of the current step was written. Before it stops,
            training continues to a step with finite loss and gradients.
        DivergedError: the loss or gradient was not finite, or the loss spiked, after the maximum number of rollbacks.
        MachineError: a checkpoint could not be written; earlier ones are untouched.
    """
    training = Fit(engine, task, plan, progress, **options)
    try:
        if plan.evaluate_first:
            # In fine-tuning, the initial weights may remain the best; continued pretraining does not keep them.
            training.evaluate(update_best=plan.keep_best)
            if plan.keep_best and training.validation:
                training.save()
        while failure := training.train(stop_requested):
            training.roll_back(failure)
    finally:
        with training.saving(), engine.watch.awaiting(_STORAGE):
            training.saver.join()
        training.callbacks.call_for_each("checkpoint", training.saver.unreported)
    training.saver.wait()
    training.log_storage_trouble()
    if engine.averaged_steps:
        training.evaluate_average()


class _PatientRecorder:
    """A recorder whose storage may be slow; the watchdog does not treat waiting for it as a hang."""

    def __init__(self, recorder: Recorder, engine: Engine) -> None:
        self._recorder, self._engine = recorder, engine

    def log(self, record: dict[str, Any]) -> None:
        with self._engine.watch.awaiting(_STORAGE):
            self._recorder.log(record)

    def rewind(self, step: int) -> None:
        with self._engine.watch.awaiting(_STORAGE):
            self._recorder.rewind(step)


class Fit(Generic[S]):
    """The state and actions of one call of `fit`."""

    def __init__(
        self,
        engine: Engine,
        task: TrainingTask[S],
        plan: TrainingPlan,
        progress: Progress,
        checkpoints: Path,
        extra_state: dict[str, Any],
        recorder: Recorder,
        callbacks: Callbacks | None = None,
        interrupts: Interrupts | None = None,
    ) -> None:
        self.callbacks = callbacks or Callbacks()
        self.interrupts = interrupts or Interrupts(lambda: False)
        self.saved_step, self.any_launched = progress.step, False
        self.engine, self.task, self.plan, self.progress = engine, task, plan, progress
        self.checkpoints, self.extra_state = checkpoints, extra_state
        self.recorder: Recorder = _PatientRecorder(recorder, engine)
        address = plan.config.address
        self.saver = Saver(
            checkpoints,
            engine.workers.new_cpu_group(collective_timeout(plan.config)),
            keep_last=plan.config.checkpoint.keep_last,
            stored_run=StoredRun(address, plan.config.folder, SAVE_RETRY_SECONDS) if address else None,
        )
        self.stopwatch = Stopwatch()
        self.stragglers = RankTimes(engine)
        self.forward_backward = ForwardBackward(engine, task, self.stragglers.timed_forward)
        self.skip_counter = SkipCounter()
        self.stalled_before = task.stalled_seconds()
        self.learning_rate, self.epoch, self.norm, self.loss = 0.0, 0, 0.0, math.nan  # values of the last step
        self.validation: dict[str, Any] = {}  # the last evaluation, as `storage.runs.evaluation_key` expects it
        self.save_due = False  # whether a save waits for a step with finite loss and gradients
        self.saved_at = time.monotonic()

    def train(self, stop_requested: Callable[[], bool]) -> TrainingFailure | None:
        """Train to the end of the plan, or to a failure that a rollback may fix.

        Saves and stops wait for a step with finite loss and gradients; if the last step has none, that is a failure.
        """
        progress = self.progress
        self.engine.module.train()
        seed_device(self.engine, self.plan.config.seed, progress.step + progress.rollbacks)
        self.stopwatch.lap()
        self.save_due = False
        try:
            return self._take_steps(stop_requested)
        except Interrupted:
            if progress.bad_in_a_row or progress.step == self.saved_step:
                raise
            self.save()
            self.stop()

    def _take_steps(self, stop_requested: Callable[[], bool]) -> TrainingFailure | None:
        """Do the work of `train`; `Interrupted` may be raised between two steps."""
        progress, plan, stopping = self.progress, self.plan, False
        for stop, failure, save in self.outcomes(stop_requested):
            progress.step += 1
            if failure is not None:
                return failure
            due, is_best = plan.due(progress.step), False
            last = due.last
            self.call_step_end(self.log() if due.log else None)
            if due.evaluate:
                self.evaluate()
                progress.stopped_early = 0 < plan.patience <= progress.evaluations_without_gain
                last = last or progress.stopped_early
                is_best = plan.keep_best and not progress.evaluations_without_gain
            stopping = stopping or stop
            self.save_due = self.save_due or due.save or stop or save
            # If bad weights were saved, every resume would start from them and fail again.
            if last and progress.bad_in_a_row:
                return self._bad_steps_failure(progress.step)
            if last or is_best or (self.save_due and not progress.bad_in_a_row):
                self.save()
            if progress.stopped_early:
                return None
            if stopping and not last and not self.save_due:
                self.stop()
        return None

    def stop(self) -> NoReturn:
        """Raise `StoppedError` once the checkpoint of this step is written."""
        with self.saving():
            self.wait_for_save()
        step, reason = self.progress.step, self.callbacks.stop_reason
        raise StoppedError(
            f"{reason and f'{reason}; '}stopped at step {step} of {self.plan.total_steps}; checkpoint "
            f"{store.name_of(step)} is saved.{StoppedError.CONTINUE}"
        )

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """Wrap code that does not change the training state, so that a stop need not wait for it.

        Several ranks must first agree on the stop, unless there is nothing to save.
        """
        decides_alone = self.engine.world_size == 1 or not self.any_launched
        cannot_save = self.progress.bad_in_a_row and self.progress.step > self.saved_step
        return self.interrupts.after(STOP_SECONDS if decides_alone and not cannot_save else math.inf)

    def steps(self) -> Iterator[S]:
        """Yield the task's remaining steps. A long wait for a step is not a hang: a new phase first opens its data."""
        steps = self.task.batches(self.progress.step, self.progress.skipped)
        validation_set = None
        while True:
            started = time.perf_counter()
            with self.engine.watch.awaiting("a batch"), self.interruptible():
                step = next(steps, None)
            if step is None:
                return
            previous_set, validation_set = validation_set, self.task.validation_set()
            # The first batch of a phase opens the data, as does the first one after a start or a rollback.
            if validation_set == previous_set:
                self.stragglers.add_wait(time.perf_counter() - started)
            yield step

    def outcomes(self, stop_requested: Callable[[], bool]) -> Iterator[StepOutcome]:
        """Take the remaining steps, and yield the outcome of each.

        On a GPU an outcome is read after the next step is launched, so that the device does not wait for the host; the
        rollback after a failure also drops the launched step. If something is due after a step, or a stop was
        requested, the outcome is read immediately, so that progress and weights are of the same step.
        """
        stop, save, unread_step = False, False, None
        try:
            for index, step in enumerate(self.steps(), self.progress.step):
                with self.engine.watch.awaiting(_STORAGE):
                    requested = stop_requested() or bool(self.callbacks.stop_reason)  # `stop_requested` reads files
                launched = self.launch_step(index, step, requested)
                if unread_step is not None:
                    previous = self.read_step(unread_step)
                    stop, save = stop or previous.stop, previous.save
                    yield StepOutcome(stop=False, failure=previous.failure)
                unread_step = launched
                due = self.save_due or save or any(self.plan.due(index + 1)) or self.plan.averaged_steps(index) > 0
                if stop or due or not reads_late(self.engine):
                    outcome = self.read_step(launched)
                    yield StepOutcome(stop or outcome.stop, outcome.failure, save or outcome.save)
                    save, unread_step = False, None
        except Interrupted:
            # The weights already include the unread step. If it failed, the last checkpoint is used.
            if unread_step is not None and self.read_step(unread_step).failure is None:
                yield StepOutcome(stop=True, failure=None)
            raise

    def launch_step(self, index: int, step: S, stop_requested: bool) -> LaunchedStep[S]:
        """Launch optimizer step `index`. `stop_requested`: whether a stop was requested on this rank."""
        engine, task = self.engine, self.task
        totals: Tensor | None = None
        flops, weights = 0.0, task.loss_weights(step)
        with self.interruptible():  # the passes may be compiled
            for position, micro_batch in enumerate(step.micro_batches):
                partial = self.forward_backward.run(micro_batch, weights, last=position == len(step.micro_batches) - 1)
                totals = partial if totals is None else totals + partial
                flops += task.flops(micro_batch)
        assert totals is not None
        learning_rate = self.plan.learning_rate(index)
        stalled = task.stalled_seconds()
        waited, self.stalled_before = stalled - self.stalled_before, stalled
        flags = stop_requested, self.save_is_due(), self.saver.failed
        rank_values = torch.tensor([*flags, flops, waited], dtype=torch.float64)
        self.stragglers.waited += waited
        # Summed before the step is launched: later the sum would queue behind the step's gathers.
        sums = engine.workers.sum_over_workers(torch.cat([totals.double(), to_device(rank_values, totals.device)]))
        result = engine.step(learning_rate, self.plan.weight_decay(index))
        results = torch.cat([sums, result.norm.to(sums).view(1)])
        self.any_launched = True
        return LaunchedStep(index, step, learning_rate, task.validation_set(), to_host(results))

    def read_step(self, launched: LaunchedStep[S]) -> StepOutcome:
        """Wait for the results of a launched step, and add them to the progress."""
        engine, progress, step = self.engine, self.progress, launched.step
        *sums, stop, save, failed, flops, stalled, norm = launched.results.wait().tolist()
        if failed:
            self.saver.wait()  # raises the error on every rank
        applied = math.isfinite(norm)
        averaged = self.plan.averaged_steps(launched.index)
        if applied or averaged <= 1:  # a skipped step also stops the averaging of the previous phase
            engine.average(averaged if applied else 0)
        self.learning_rate, self.epoch = launched.learning_rate, step.epoch
        self._enter_phase(launched.validation_set)
        failure = self._add_step(step, norm if applied else math.inf, sums)
        progress.window.flops += flops
        progress.window.stalled += stalled / engine.world_size
        return StepOutcome(stop > 0, failure, save > 0)

    def _add_step(self, step: S, norm: float, sums: list[float]) -> TrainingFailure | None:
        """Add a step to the progress. Returns the failure that the step causes, if any.

        Args:
            step: the step to add.
            norm: norm of the gradients; inf if the optimizer skipped the step.
            sums: the task's totals, summed over micro-batches and workers.
        """
        progress, applied = self.progress, math.isfinite(norm)
        progress.samples += step.sequences
        progress.tokens += step.tokens
        progress.window.tokens += step.tokens
        progress.skipped_steps += not applied
        self.norm, self.loss = norm, math.nan
        scale = self.engine.loss_scale.cur_scale if self.engine.loss_scale else 1
        if not all(map(math.isfinite, sums)) or (not applied and self.skip_counter.record_skip(scale)):
            progress.bad_in_a_row += 1
            logger.warning("step %d: loss or gradient is not finite; skipped", progress.step + 1)
            return self._bad_steps_failure(progress.step + 1) if progress.bad_in_a_row >= _MAX_BAD_STEPS else None
        progress.bad_in_a_row = 0
        if applied:
            self.skip_counter.record_applied()
        counts = self.task.counts(step).tolist()
        self.loss = loss = self.task.metrics(sums, counts)["loss"]
        spike = is_spike(progress.recent, loss, self.plan.config.guard)
        progress.recent = [*progress.recent, loss][-LOSS_WINDOW:]
        progress.window.add(sums, counts)
        if not spike:
            return None
        remedy = ", or set guard.spike_sigmas: 0 if such loss spikes are harmless"
        return TrainingFailure(f"the loss of step {progress.step + 1} spiked to {loss:.4g}", remedy)

    def _bad_steps_failure(self, last_step: int) -> TrainingFailure:
        count = counted(self.progress.bad_in_a_row, "step")
        return TrainingFailure(f"{count} in a row up to step {last_step} had a loss or gradient that is not finite")

    def _enter_phase(self, validation_set: str) -> None:
        """In a new phase, drop the losses of the previous one: longer sequences have higher losses at first."""
        progress = self.progress
        if progress.part not in ("", validation_set):
            progress.recent, progress.best, progress.evaluations_without_gain = [], None, 0
        progress.part = validation_set

    def call_step_end(self, logged: dict[str, Any] | None) -> None:
        """Call the callbacks with the last step and its `logged` record, if any, then with new checkpoints."""
        values = {"loss": self.loss, "lr": self.learning_rate, "grad_norm": self.norm, "logged": logged}
        counts = {name: getattr(self.progress, name) for name in ("step", "samples", "tokens")}
        self.callbacks.call("step_end", {**counts, "epoch": self.epoch, **values})
        self.callbacks.call_for_each("checkpoint", self.saver.unreported)

    def log(self) -> dict[str, Any]:
        """Record the metrics of the steps since the last record; returns the new record."""
        progress, engine, window = self.progress, self.engine, self.progress.window
        seconds = window.seconds + self.stopwatch.lap()
        progress.seconds += seconds
        means = self.task.metrics(window.totals, window.counts) if window.totals else {}
        record = {
            "step": progress.step,
            "epoch": self.epoch,
            "samples": progress.samples,
            "tokens": progress.tokens,
            **(means or {"loss": math.nan}),
            "lr": self.learning_rate,
            "grad_norm": self.norm,
            "tokens_per_second": window.tokens / seconds,
            "mfu": window.flops / seconds / self.plan.peak_flops,
            "data_stall_fraction": window.stalled / seconds,
            "seconds": progress.seconds,
            **{f"{name}_seconds": seconds for name, seconds in self.stopwatch.excluded.items()},
            **self.stragglers.lap(self.recorder, progress.step),
            "skipped_steps": progress.skipped_steps,
            "memory_bytes": engine.usage().memory_bytes,
        }
        self.recorder.log(record)
        progress.window, self.stopwatch.excluded = MetricSums(), dict.fromkeys(self.stopwatch.excluded, 0.0)
        return record

    def evaluate(self, *, update_best: bool = True) -> None:
        """Evaluate and record the metrics; with `update_best`, compare them with the best evaluation so far."""
        started = time.perf_counter()
        means = self._evaluate()
        seconds = time.perf_counter() - started
        self.stopwatch.exclude("evaluation", seconds)
        if means:
            if update_best:
                self.update_best(means)
            best = update_best and self.progress.evaluations_without_gain == 0
            record = {"step": self.progress.step, "split": "validation", **means, "best": best, "seconds": seconds}
            self.recorder.log(record)
            self.callbacks.call("evaluation", record)

    def _evaluate(self) -> dict[str, float]:
        self.engine.module.eval()
        with torch.no_grad(), self.engine.watch.allow(LONG_SECONDS), self.interruptible():  # the model may be compiled
            means = self.task.evaluate(self.engine)
        self.engine.module.train()
        return means

    def evaluate_average(self) -> None:
        """Load the averaged weights of the last checkpoint into the engine for good, and evaluate them."""
        engine, step = self.engine, self.progress.step
        checkpoint = self.checkpoints / store.name_of(step)
        with engine.watch.allow(LONG_SECONDS), store.CheckpointReader(checkpoint, averaged=True) as reader:
            engine.load(reader, engine.state())
        means = self._evaluate()
        if not means:
            return
        loss, unaveraged = self.task.to_minimize(means), self.validation.get("validation_loss")
        comparison = f" ({unaveraged:.4f} without averaging)" if unaveraged is not None else ""
        message = f"the averaged weights of the last {engine.averaged_steps} steps have a held-out loss of {loss:.4f}"
        self.recorder.log(make_event("average", f"{message}{comparison}", step=step, **means))

    def update_best(self, means: dict[str, float]) -> None:
        """Compare an evaluation with the best one so far, and keep the better one in the progress."""
        progress, value = self.progress, self.task.to_minimize(means)
        self.validation = {"step": progress.step, "validation_loss": value, "held_out_loss": means["loss"]}
        score = evaluation_key(self.validation)
        if score is not None and (progress.best is None or list(score) < progress.best):
            progress.best, progress.evaluations_without_gain = list(score), 0
        else:
            progress.evaluations_without_gain += 1

    def save(self) -> None:
        """Save a checkpoint of this step, in the background."""
        started = time.perf_counter()
        self.save_due, self.saved_step, self.saved_at = False, self.progress.step, time.monotonic()
        self.progress.window.seconds += self.stopwatch.lap()
        is_evaluated = self.validation.get("step") == self.progress.step
        extra_state = {
            **self.extra_state,
            "validation_loss": None,
            **(self.validation if is_evaluated else {}),
            # The task's validation set may already be the next phase's, whose data the loader has opened.
            "validation_set": self.progress.part or self.task.validation_set(),
            "kept": self.progress.register_checkpoint(self.plan.config.checkpoint),
        }
        with self.saving():
            self.wait_for_save()  # the previous one, if the storage is slow
            state = checkpoint_state(self.engine, self.progress, extra_state)
            self.saver.save(self.progress.step, self.engine.fragments(), state)
        self.log_storage_trouble()
        self.stopwatch.exclude("checkpoint", time.perf_counter() - started)

    def save_is_due(self) -> bool:
        """Return whether `checkpoint.every_minutes` have passed, by the clock of rank 0."""
        minutes = self.plan.config.checkpoint.every_minutes
        return self.engine.rank == 0 and 0 < minutes * 60 <= time.monotonic() - self.saved_at

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Wrap saves and waits for them; their retries may take twice `SAVE_RETRY_SECONDS`."""
        return self.engine.watch.allow(LONG_SECONDS + 2 * SAVE_RETRY_SECONDS)

    def wait_for_save(self) -> None:
        """Wait for the save in progress. Raises its error, on every rank."""
        with self.engine.watch.awaiting(_STORAGE):
            self.saver.wait()

    def log_storage_trouble(self) -> None:
        """Record that a save had to wait for the storage. Until then, the run seemed to hang."""
        if self.saver.trouble:
            message, self.saver.trouble = self.saver.trouble, ""
            self.recorder.log(make_event("storage", message, step=self.progress.step))

    def roll_back(self, failure: TrainingFailure) -> None:
        """Restore the last checkpoint and skip the data after it.

        Raises `DivergedError` after too many rollbacks without a checkpoint past the failed step.
        """
        progress = self.progress
        if progress.window.tokens:  # steps since the last record
            self.log()
        with self.saving():
            self.wait_for_save()
            checkpoint = latest_checkpoint(self.checkpoints, self.engine.workers)
        if checkpoint is not None and store.step_of(checkpoint) >= progress.failed_step:
            progress.rollbacks = 0
        if checkpoint is None or progress.rollbacks >= _MAX_ROLLBACKS:
            raise DivergedError(
                f"{failure.reason}, after {progress.rollbacks} rollbacks. The last good checkpoint is "
                f"{checkpoint.name if checkpoint else 'none'}. Lower the learning rate{failure.remedy}. Pretraining "
                "continues from that checkpoint with --resume; fine-tuning starts over."
            )
        with self.engine.watch.allow(LONG_SECONDS):
            restored = Progress.from_state(restore(self.engine, checkpoint))
        step, count = restored.step, progress.step - restored.step
        message = f"{failure.reason}: rolled back to {checkpoint.name}, skipping the data of {counted(count, 'step')}"
        logger.warning("%s", message)
        event = make_event("rollback", message, step=step, from_step=progress.step, passed_over_steps=count)
        restored.rollbacks, restored.failed_step = progress.rollbacks + 1, progress.step
        restored.bad_in_a_row = 0
        restored.skipped = self.task.skip(step, progress.step, progress.skipped)
        for name in Progress.__dataclass_fields__:
            setattr(progress, name, getattr(restored, name))
        self.recorder.rewind(step)
        self.recorder.log(event)


def reads_late(engine: Engine) -> bool:
    """Return whether the outcome of a step is read after the next one is launched.

    fp16's loss scaler, which runs on the host, waits for the device in each step anyway.
    """
    return engine.device.type == "cuda" and engine.loss_scale is None

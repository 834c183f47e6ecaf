"""Fits a schedule to a time budget on this machine: times some training steps, then scales the number of steps."""

import itertools
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pretrain.common.children import run_program, unwind_on_sigterm
from pretrain.common.errors import InputError, MachineError
from pretrain.common.records import is_training, read_records
from pretrain.common.run_files import CONFIG_FILE
from pretrain.common.settings import dump, load_recorded
from pretrain.common.worker import torchrun_rank
from pretrain.config import PretrainConfig
from pretrain.model.precision import resolve_precision
from pretrain.planning.estimate import ASSUMED_MFU, parse_cluster
from pretrain.planning.work import Work, phase_work, read_frozen_config, vocabulary_rows

_TRAINING_SHARE = 0.95  # assumed share of a run's time that training steps take; in the demo, the rest takes 2 to 3 %
_TIMED_SECONDS = 15  # approximate total duration of the timed steps
_MIN_TIMED_STEPS, _MAX_TIMED_STEPS = 4, 60
_UNTIMED_STEPS = 2  # number of steps at the start that are not timed, because they are slower
_TOLERANCE = 1.1  # factor by which the expected duration must exceed the budget to be printed
_STEP_SETTINGS = ("steps", "warmup_steps", "decay_steps", "ramp_steps")  # settings of a phase that are numbers of steps
_PERIODIC_SECTIONS = ("checkpoint", "evaluation")  # config sections with a setting `every_steps`


@dataclass(frozen=True)
class Pace:
    """The speed of a run on this machine."""

    timed_steps: int  # number of steps that were timed
    step_seconds: float  # median duration of a step of the first phase
    seconds_per_flop: float  # seconds per executed FLOP

    def minutes(self, work: Sequence[Work]) -> float:
        """Return the minutes of a run, including evaluations and checkpoints, given the work of its phases."""
        return self.seconds_per_flop * sum(phase.executed for phase in work) / _TRAINING_SHARE / 60


def fit(config: PretrainConfig, minutes: float, lengths: Sequence[float] | None = None) -> PretrainConfig:
    """Return the config with its steps scaled so that the run takes about `minutes` here; print the result.

    Batches and learning rates stay the same; warm-up, decay, ramps, evaluations and checkpoints scale with the steps.

    Args:
        lengths: mean sequence length of each phase in tokens; None assumes `work.ASSUMED_FILL` of the maximum.

    Raises:
        InputError: `minutes` is not positive, or the run uses a Ray cluster or torchrun.
        MachineError: the run that times steps failed.
    """
    if not 0 < minutes < math.inf:
        raise InputError(f"--minutes: {minutes:g}; expected a number above 0.")
    if config.scheduling.address or torchrun_rank():
        raise InputError("--minutes: times steps only on this machine; do not use scheduling.address or torchrun.")
    print(f"timing steps for --minutes {minutes:g} ...", flush=True)
    pace = measure_pace(config, lengths)
    fitted = scale(config, minutes / pace.minutes(work_of_phases(config, lengths)))
    expected = pace.minutes(work_of_phases(fitted, lengths))
    # The run may take longer, since every phase has at least one step.
    duration = f"{expected:.3g} min, not {minutes:g}" if expected > _TOLERANCE * minutes else f"{minutes:g} min"
    result = f"{fitted.total_steps:,} steps take about {duration} ({config.total_steps:,} in the config)"
    print(f"{pace.timed_steps} steps timed here, {pace.step_seconds:.3g} s each: {result}", flush=True)
    return fitted


def measure_pace(config: PretrainConfig, lengths: Sequence[float] | None = None) -> Pace:
    """Time a few steps of the first phase, in a temporary run with the same workers; `lengths` as in `fit`.

    Raises `MachineError` with the last line of this run's output if it fails.
    """
    cluster = parse_cluster("here", resolve_precision(config)[0])
    work = work_of_phases(config, lengths)[0]
    # The temporary run has no batch size ramp, so all its batches have `global_sequences`.
    step_flops = work.executed / work.sequences * config.phases[0].global_sequences
    estimated_seconds = step_flops / (cluster.peak_flops * ASSUMED_MFU[cluster.device])
    steps = min(_MAX_TIMED_STEPS, max(_MIN_TIMED_STEPS, round(_TIMED_SECONDS / estimated_seconds)))
    seconds = time_steps(config, steps)
    return Pace(steps, seconds, seconds / step_flops)


def work_of_phases(config: PretrainConfig, lengths: Sequence[float] | None) -> list[Work]:
    """Return the work of each phase; `lengths` as in `fit`."""
    vocabulary_size, frozen_config = vocabulary_rows(config), read_frozen_config(config)
    phases = zip(config.phases, lengths or [None] * len(config.phases), strict=True)
    return [phase_work(config, phase, vocabulary_size, length, frozen_config) for phase, length in phases]


def scale(config: PretrainConfig, factor: float) -> PretrainConfig:
    """Return the config with its steps multiplied by `factor`; every phase keeps at least one."""
    phases = []
    for phase in config.phases:
        steps = max(1, round(factor * phase.steps))
        # Rounded down, so that warm-up, decay and ramp still fit into the phase.
        scaled = {name: int(getattr(phase, name) * steps / phase.steps) for name in _STEP_SETTINGS[1:]}
        if phase.decay_steps:  # 0 would mean a decay over all steps after the warm-up
            scaled["decay_steps"] = max(1, scaled["decay_steps"])
        min_steps = len(phase.batch_sizes) - 1  # a batch size ramp needs a step for each size before the last
        phases.append({**scaled, "ramp_steps": max(scaled["ramp_steps"], min_steps), "steps": max(steps, min_steps)})
    periods = {name: max(1, round(factor * getattr(config, name).every_steps)) for name in _PERIODIC_SECTIONS}
    # `keep_at` is scaled within each phase, so that a checkpoint at the end of a phase stays there.
    phase_ends = (
        [0, *np.cumsum([phase.steps for phase in config.phases])],
        [0, *np.cumsum([phase["steps"] for phase in phases])],
    )
    keep_at = {max(1, round(float(np.interp(step, *phase_ends)))) for step in config.checkpoint.keep_at}
    return _with_schedule(config, phases, periods, sorted(keep_at))


def with_recorded_schedule(config: PretrainConfig) -> PretrainConfig:
    """Return the config with the schedule that `fit` chose when the run first started, from the run's folder."""
    path = config.folder / CONFIG_FILE
    recorded = load_recorded(path, PretrainConfig) if path.is_file() else config
    if len(recorded.phases) != len(config.phases):
        return config
    phases = [{name: getattr(phase, name) for name in _STEP_SETTINGS} for phase in recorded.phases]
    periods = {name: getattr(recorded, name).every_steps for name in _PERIODIC_SECTIONS}
    return _with_schedule(config, phases, periods, recorded.checkpoint.keep_at)


def _with_schedule(
    config: PretrainConfig, phases: list[dict[str, int]], periods: dict[str, int], keep_at: Sequence[int]
) -> PretrainConfig:
    values: dict[str, Any] = config.model_dump()
    values["checkpoint"]["keep_at"] = tuple(keep_at)
    for phase, schedule in zip(values["phases"], phases, strict=True):
        phase.update(schedule)
    for name, steps in periods.items():
        values[name]["every_steps"] = steps
    return PretrainConfig.model_validate(values)


def time_steps(config: PretrainConfig, steps: int) -> float:
    """Run `steps` steps and return their median duration in seconds."""
    with unwind_on_sigterm(), tempfile.TemporaryDirectory(prefix="bertrain-pace-") as folder:
        run, path = Path(folder) / "run", Path(folder) / CONFIG_FILE
        path.write_text(dump(timing_config(config, run, _UNTIMED_STEPS + steps)), encoding="utf-8")
        program = f"import sys, pretrain; pretrain.train(sys.argv[1], no_ray={config.scheduling.workers == 1})"
        result = run_program([sys.executable, "-c", program, str(path)])
        if result.returncode:
            output = (result.stderr or result.stdout).strip().splitlines() or [f"exit code {result.returncode}"]
            raise MachineError(f"The run that times steps failed: {output[-1]}")
        # Seconds from the start of training to the end of each step; every step is recorded.
        elapsed = [record["seconds"] for record in read_records(run) if is_training(record)][_UNTIMED_STEPS - 1 :]
    return statistics.median(after - before for before, after in itertools.pairwise(elapsed))


def timing_config(config: PretrainConfig, run_dir: Path, steps: int) -> PretrainConfig:
    """Return a config that trains `steps` steps of the first phase, without a batch size ramp."""
    values: dict[str, Any] = config.model_dump()
    disabled = dict.fromkeys((*_STEP_SETTINGS, "ramp_from", "averaged_share"), 0)
    values.update(run_dir=str(run_dir), phases=[{**values["phases"][0], **disabled, "steps": steps}])
    values["evaluation"].update(every_steps=steps, sequences=config.scheduling.workers, probes={})
    values["checkpoint"]["every_steps"] = steps
    values["tracking"].update(wandb="off", log_every_steps=1)
    return PretrainConfig.model_validate(values)

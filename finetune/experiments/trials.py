"""Several fine-tunings of one command: which are over, which are still to run, and what they came to.

Each has its run folder below that of the command. What is there decides: a finished run is not run again, one that
diverged would diverge again, any other goes on from its checkpoint.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from finetune import runs
from finetune.artifacts.saved import MODEL, SCORES
from finetune.config import FinetuneConfig, changed_for_resume
from finetune.experiments.trials_view import View
from pretrain import preflight
from pretrain.common.errors import DivergedError, InputError, MachineError, RunError, StoppedError
from pretrain.common.files import MANIFEST, write_json
from pretrain.config import Precision, with_precision
from pretrain.model.precision import choose_here

FAILED = "failed.json"  # of a run that diverged


@dataclass(frozen=True)
class Trial:
    """One fine-tuning among several."""

    label: str
    config: FinetuneConfig
    steps: int
    test_sets: bool = True  # whether to predict them at the end, and score those with labels

    @property
    def examples(self) -> int:
        """Examples it sees, over all passes: what the time left is told by."""
        return self.steps * self.config.training.examples_per_step


@dataclass(frozen=True)
class Outcome:
    """What a trial came to: scores, or why there are none."""

    metric: str = ""  # the score that counts, of the first set
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # set -> name -> share of 1
    error: RunError | None = None
    chosen_on: str = ""  # the set whose score chose the checkpoint; only that one may choose among trials
    degenerate: str = ""  # why the run has learnt nothing although it came to its end
    data: str = ""  # digest of what it was trained and scored on
    test_sets_scored: bool = True  # whether labelled test sets are part of that

    @property
    def score(self) -> float | None:
        """`metric` on the first dev set; None for a failed run and without such a set. Test sets choose nothing."""
        return self.scores.get(self.chosen_on, {}).get(self.metric)


@dataclass(frozen=True)
class Ran:
    """All trials in their order; None for those that are still to run, which `stopped` says why."""

    outcomes: list[Outcome | None]
    stopped: RunError | None = None


@dataclass(frozen=True)
class Spread:
    """Statistics of a score over runs; `deviation` is the sample's (n - 1), None for a single run."""

    runs: int
    mean: float
    deviation: float | None
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(len(values), statistics.fmean(values), deviation, min(values), max(values))


def trial_config(config: FinetuneConfig, label: str, *, folder: Path, seed: int) -> FinetuneConfig:
    """`config` as one of several runs: its own name, folder and seed, and one W&B group with the others.

    Args:
        label: what tells it from the others, of a-z, 0-9 and '-'.
    """
    return config.model_copy(
        update={
            "name": f"{config.name[: max(1, 62 - len(label))]}-{label}"[:63],
            "run_dir": str(folder),
            "seed": seed,
            "tracking": config.tracking.model_copy(update={"group": config.tracking.group or config.name}),
        }
    )


def run_all(
    config: FinetuneConfig,
    trials: Sequence[Trial],
    *,
    parallel: int = 0,
    ended: Callable[[list[Outcome | None]], None] = lambda outcomes: None,
) -> Ran:
    """Run what is not over yet, and say on the terminal how it goes; `config.folder` is the folder of them all.

    `ended` is called with all outcomes whenever a trial has ended. Retries, CPUs and the cluster are those of
    `config.scheduling`; `parallel` as in `cluster.trials.launch.run_trials`.

    Raises:
        InputError: a run folder holds a run with other settings or data, or another process works on them.
        MachineError: Ray cannot start, or has no room.
    """
    check_alone(config)
    with preflight.only_run(config.folder):
        trials = _with_one_precision(config, trials)
        outcomes = [read_outcome(trial) for trial in trials]
        _check_data(trials, outcomes)
        pending = [number for number, outcome in enumerate(outcomes) if outcome is None]
        for number, trial in enumerate(trials):
            if number in pending:
                preflight.check_run_folder(trial.config, True, changed_for_resume)
                if any(trial.config.folder.glob(f"checkpoints/*/{MANIFEST}")):
                    runs.check_same(trial.config, over=False)  # goes on although nobody typed --resume
                preflight.record_run(trial.config, [sys.executable, *sys.orig_argv[1:]])
        if not pending:
            return Ran(outcomes)
        return _run(config, trials, outcomes, pending, parallel, ended)


def check_alone(config: FinetuneConfig) -> None:
    if config.scheduling.workers > 1:
        raise InputError(
            f"scheduling.workers: {config.scheduling.workers}, but each of several runs is one process. "
            "Leave --workers out; --parallel says how many run at once."
        )


def _with_one_precision(config: FinetuneConfig, trials: Sequence[Trial]) -> list[Trial]:
    """The trials, those that leave the precision to the machine with the same one, so that their scores compare.

    On a cluster, whose nodes may differ, the first one that begins decides for those of a later call.
    """
    begun = [replace(trial, config=preflight.as_begun(trial.config)) for trial in trials]
    left = [trial.config.engine.precision == "auto" for trial in begun]
    if not any(left):
        return begun
    settled: Iterator[Precision] = (
        one.config.engine.settled_precision
        for one, before in zip(begun, trials, strict=True)
        if one.config.engine.precision != before.config.engine.precision
    )
    chosen = next(settled, None)
    # On a cluster this machine is not the one that trains.
    if chosen is None and not config.scheduling.address:
        chosen = choose_here().precision
    if chosen is None:
        return begun
    return [
        replace(trial, config=with_precision(trial.config, chosen)) if is_left else trial
        for trial, is_left in zip(begun, left, strict=True)
    ]


def read_outcome(trial: Trial) -> Outcome | None:
    """What the run folder says; None where the run is still to run or to go on.

    Raises `InputError` when what is over was run with other settings.
    """
    folder = trial.config.folder
    if (folder / FAILED).is_file():
        runs.check_same(trial.config, over=True)
        return Outcome(error=DivergedError(_read(folder / FAILED)["message"]))
    # A model may be gone to spare the disk; checkpoints go last, when all else is there.
    finished = (folder / MODEL / MANIFEST).is_file() or (
        (folder / SCORES).is_file() and not (folder / "checkpoints").exists()
    )
    if not finished:
        return None
    runs.check_same(trial.config, over=True)
    said = _read(folder / SCORES)
    return Outcome(
        said["metric"],
        said["scores"],
        chosen_on=said.get("chosen_on", next(iter(said["scores"]), "")),  # older runs scored dev sets alone
        test_sets_scored=trial.test_sets and "chosen_on" in said,
        degenerate=degenerate(said),
        data=said.get("data", ""),
    )


def degenerate(said: dict[str, Any]) -> str:
    """Why a run has failed by Mosbach et al. 2021, section 3, from its scores.json; empty if it has not.

    A classifier of single labels whose accuracy on the first held-out set is no higher than that of its most
    frequent class.
    """
    confusion = next(iter(said["details"].values()), {}).get("confusion")
    if not confusion:
        return ""
    counts: list[list[int]] = confusion["counts"]  # [true][predicted]
    right = sum(row[number] for number, row in enumerate(counts))
    most = max(range(len(counts)), key=lambda number: sum(counts[number]))
    if right > sum(counts[most]):
        return ""
    share = sum(counts[most]) / sum(map(sum, counts))
    return f"no better than always {confusion['labels'][most]} ({share:.4f})"


def spreads(outcomes: Iterable[Outcome | None]) -> dict[str, dict[str, Spread]]:
    """Statistics of every score of every set over the runs that have it."""
    values: dict[str, dict[str, list[float]]] = {}
    for outcome in outcomes:
        for part, scores in (outcome.scores if outcome else {}).items():
            for name, value in scores.items():
                if math.isfinite(value):
                    values.setdefault(part, {}).setdefault(name, []).append(value)
    return {
        part: {name: spread for name, those in scores.items() if (spread := Spread.of(those))}
        for part, scores in values.items()
    }


def failure(outcomes: Sequence[Outcome | None]) -> RunError | None:
    """What a command ends with when runs failed: their common class, with its exit code, else `MachineError`."""
    errors = [outcome.error for outcome in outcomes if outcome and outcome.error]
    if not errors:
        return None
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else MachineError
    number = f"{len(errors)} of {len(outcomes)} runs" if len(outcomes) > 1 else "the run"
    return kind(
        f"{number} failed; the reasons are above. The same command runs them again, but for those that diverged."
    )


def as_data(trial: Trial, outcome: Outcome | None) -> dict[str, Any]:
    """A run as summary.json has it."""
    return {
        "label": trial.label,
        "folder": str(trial.config.folder),
        "seed": trial.config.seed,
        "scores": outcome.scores if outcome else {},
        "degenerate": (outcome.degenerate if outcome else "") or None,
        "error": " ".join(str(outcome.error).split()) if outcome and outcome.error else None,
        "over": outcome is not None,
    }


def _run(
    config: FinetuneConfig,
    trials: Sequence[Trial],
    outcomes: list[Outcome | None],
    pending: list[int],
    parallel: int,
    ended: Callable[[list[Outcome | None]], None],
) -> Ran:
    from cluster.trials.launch import run_trials
    from cluster.trials.request import TrialEvent, TrialRequest
    from cluster.workers.request import STOP_FILE

    told = [(trial.label, trial.config.folder, trial.examples, trial.steps) for trial in trials]
    view = View(told, pending, config.folder / STOP_FILE)

    def poll(events: list[TrialEvent]) -> None:
        for event in events:
            number = pending[event.trial]
            if event.kind != "ended":
                view.started(number, again=event.kind == "restarted")
            elif isinstance(event.error, StoppedError):
                view.stopped(number)
            else:
                outcomes[number] = _end(trials[number], event.error)
                view.ended(number, outcomes[number])
                ended(outcomes)
        view.draw()

    if len(pending) < len(trials):
        print(f"  {len(trials) - len(pending)} of {len(trials)} were over before")
    stopped = None
    with view:
        try:
            run_trials(
                "finetune.train:main",
                [
                    TrialRequest(
                        trials[number].config.folder,
                        {
                            "config": trials[number].config.model_dump(mode="json"),
                            "resume": True,
                            "test_sets": trials[number].test_sets,
                        },
                    )
                    for number in pending
                ],
                name=config.name,
                run_dir=config.folder,
                poll=poll,
                parallel=parallel,
                cpus_per_trial=config.scheduling.cpus_per_worker,
                address=config.scheduling.address,
                max_failures=config.scheduling.max_failures,
            )
        except StoppedError as error:
            stopped = StoppedError(f"{' '.join(str(error).split())} The same command goes on.")
    return Ran(outcomes, stopped)


def _end(trial: Trial, error: RunError | None) -> Outcome:
    if isinstance(error, DivergedError):
        write_json(trial.config.folder / FAILED, {"message": str(error)})
    if error is not None:
        return Outcome(error=error)
    return read_outcome(trial) or Outcome(
        error=MachineError(f"{trial.config.folder}: its model is not there. Run the same command again.")
    )


def _check_data(trials: Sequence[Trial], outcomes: Sequence[Outcome | None]) -> None:
    """Refuse to put runs beside others whose files have changed since."""
    now: dict[tuple[str, bool], str] = {}
    for trial, outcome in zip(trials, outcomes, strict=True):
        if outcome is None or not outcome.data:
            continue
        config = trial.config
        with_tests = outcome.test_sets_scored
        said = config.model_dump_json(include={config.task_name, "max_length", "start_from"}), with_tests
        if said not in now:
            now[said] = runs.digest(config, test_sets=with_tests)
        if now[said] != outcome.data:
            raise InputError(
                f"{config.folder}: was trained or scored on other data than the files of {config.task_name} give now. "
                "Put them back as they were, choose another name or run_dir, or remove it."
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: damaged ({error}). Remove {path.parent}; the run is then run again.") from None

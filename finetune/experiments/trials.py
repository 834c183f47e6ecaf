"""Several fine-tunings of one command: which are finished, which are still to run, and their outcomes.

Each has a run folder below the command's. The folders decide: a finished run is not repeated, nor is one that diverged,
since it would diverge again; any other continues from its checkpoint.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.experiments.outcomes import Outcome, Trial, failure
from finetune.experiments.trials_view import TrialLine, TrialsView
from finetune.training import runs
from finetune.training.config import FinetuneConfig, changed_for_resume
from finetune.training.saved import MODEL
from pretrain.common.errors import DivergedError, InputError, MachineError, RunError, StoppedError
from pretrain.common.files import MANIFEST, checkpoint_names, write_json
from pretrain.common.run_files import FAILED, SCORES
from pretrain.common.worker import TrainingRequest
from pretrain.config import Precision, with_precision
from pretrain.model.precision import choose_here
from pretrain.run import preflight

if TYPE_CHECKING:
    from cluster.workers.trials.request import TrialEvent, TrialRequest


@dataclass(frozen=True)
class TrialRuns:
    """The outcomes of all trials in order; None for those that are still to run because of `stopped`."""

    outcomes: list[Outcome | None]
    stopped: RunError | None = None


def trial_config(config: FinetuneConfig, label: str, *, folder: Path, seed: int) -> FinetuneConfig:
    """`config` as one of several runs: its own name, W&B id, folder and seed, and one W&B group with the others.

    Args:
        label: distinguishes it from the others; of a-z, 0-9 and '-'.
    """
    tracking = config.tracking
    of_its_own = {
        "group": tracking.group or config.name,
        "run_id": tracking.run_id and _labeled(tracking.run_id, label, 64),
    }
    return config.model_copy(
        update={
            "name": _labeled(config.name, label, 63),
            "run_dir": str(folder),
            "seed": seed,
            "tracking": tracking.model_copy(update=of_its_own),
        }
    )


def _labeled(text: str, label: str, most: int) -> str:
    """`text-label` in at most `most` characters; `text` is cut first."""
    return f"{text[: max(1, most - 1 - len(label))]}-{label}"[:most]


def run_all(
    config: FinetuneConfig,
    trials: Sequence[Trial],
    *,
    parallel: int = 0,
    begin: Callable[[], None] = lambda: None,
    ended: Callable[[list[Outcome | None]], None] = lambda outcomes: None,
) -> TrialRuns:
    """Run the trials that are not finished, with progress on the terminal; `config.folder` is their common folder.

    `begin` is called before the run folders are read, when no other process uses them. `ended` is called with all
    outcomes whenever a trial finishes. `config.scheduling` sets retries, CPUs and the
    cluster. `parallel` is as in `cluster.workers.trials.launch.run_trials`.

    Raises:
        InputError: a run folder holds a run with other settings or data, or another process uses the folders.
        MachineError: Ray cannot start, or has too little capacity.
    """
    check_alone(config)
    if config.address:
        raise InputError(f"run_dir: {config.address}: several runs have to be in a local folder. Give a local run_dir.")
    with preflight.only_run(config.folder):
        begin()
        trials = with_one_precision(config, trials)
        outcomes = [read_outcome(trial) for trial in trials]
        check_data(trials, outcomes)
        pending = [number for number, outcome in enumerate(outcomes) if outcome is None]
        for number, trial in enumerate(trials):
            if number in pending:
                before = preflight.recorded_config(trial.config)
                preflight.check_run_folder(trial.config, before, changed_for_resume, resume=True)
                if checkpoint_names(trial.config.folder):
                    runs.check_same(trial.config, over=False)  # it continues without --resume
                preflight.record_run(trial.config, [sys.executable, *sys.orig_argv[1:]])
        if not pending:
            return TrialRuns(outcomes)
        return _run(config, trials, outcomes, pending, parallel, ended)


def raise_failure(ran: TrialRuns) -> None:
    """Raise the error of a command of several runs, if there is one."""
    error: RunError | None = ran.stopped or failure(ran.outcomes)
    if error is not None:
        raise error


def check_alone(config: FinetuneConfig) -> None:
    """Raise `InputError` if a run of several would use more than one worker."""
    if config.scheduling.workers > 1:
        raise InputError(
            f"scheduling.workers: {config.scheduling.workers}, but each of several runs is one process. "
            "Leave --workers out; --parallel sets how many run at once."
        )


def with_one_precision(config: FinetuneConfig, trials: Sequence[Trial]) -> list[Trial]:
    """The trials, with one common precision for those with `auto`, so that their scores are comparable.

    On a cluster, whose nodes may differ, the first trial that starts decides for those of a later call.
    """
    started = [replace(trial, config=preflight.with_resolved_precision(trial.config)) for trial in trials]
    left = [trial.config.engine.precision == "auto" for trial in started]
    if not any(left):
        return started
    settled: Iterator[Precision] = (
        one.config.engine.resolved_precision
        for one, before in zip(started, trials, strict=True)
        if one.config.engine.precision != before.config.engine.precision
    )
    chosen = next(settled, None)
    # On a cluster, other machines train.
    if chosen is None and not config.scheduling.address:
        chosen = choose_here().precision
    if chosen is None:
        return started
    return [
        replace(trial, config=with_precision(trial.config, chosen)) if is_left else trial
        for trial, is_left in zip(started, left, strict=True)
    ]


def read_outcome(trial: Trial) -> Outcome | None:
    """The outcome in the run folder; None if the run is still to run or to continue.

    Raises `InputError` if the run in the folder has other settings.
    """
    folder = trial.config.folder
    if (folder / FAILED).is_file():
        runs.check_same(trial.config, over=True)
        return Outcome(error=DivergedError(_read(folder / FAILED)["message"]))
    # The model may have been removed to save disk space. Checkpoints are removed last, after all else is written.
    finished = (folder / MODEL / MANIFEST).is_file() or (
        (folder / SCORES).is_file() and not (folder / "checkpoints").exists()
    )
    if not finished:
        return None
    runs.check_same(trial.config, over=True)
    saved = _read(folder / SCORES)
    return Outcome(
        saved["metric"],
        saved["scores"],
        chosen_on=saved.get("chosen_on", next(iter(saved["scores"]), "")),  # older runs scored only dev sets
        test_sets_scored=trial.test_sets and "chosen_on" in saved,
        degenerate=degenerate(saved),
        data=saved.get("data", ""),
    )


def degenerate(saved: dict[str, Any]) -> str:
    """Why a run counts as failed by Mosbach et al. 2021, section 3, from its scores.json; empty if it does not.

    So does a single-label classifier whose accuracy on the first held-out set is not above the share of the most
    frequent class.
    """
    confusion = next(iter(saved["details"].values()), {}).get("confusion")
    if not confusion:
        return ""
    counts: list[list[int]] = confusion["counts"]  # [true][predicted]
    right = sum(row[number] for number, row in enumerate(counts))
    most = max(range(len(counts)), key=lambda number: sum(counts[number]))
    if right > sum(counts[most]):
        return ""
    share = sum(counts[most]) / sum(map(sum, counts))
    return f"no better than always {confusion['labels'][most]} ({share:.4f})"


class _Follower:
    """Follows the running trials: updates outcomes and the terminal from the launcher's events."""

    def __init__(
        self,
        trials: Sequence[Trial],
        outcomes: list[Outcome | None],
        pending: list[int],
        view: TrialsView,
        ended: Callable[[list[Outcome | None]], None],
    ) -> None:
        self._trials, self._outcomes, self._pending = trials, outcomes, pending
        self._view, self._ended = view, ended

    def poll(self, events: list[TrialEvent]) -> None:
        for event in events:
            number = self._pending[event.trial]
            if event.kind != "ended":
                self._view.started(number, again=event.kind == "restarted")
            elif isinstance(event.error, StoppedError):
                self._view.stopped(number)
            else:
                outcome = self._outcomes[number] = _end(self._trials[number], event.error)
                self._view.ended(number, outcome)
                self._ended(self._outcomes)
        self._view.draw()


def _run(
    config: FinetuneConfig,
    trials: Sequence[Trial],
    outcomes: list[Outcome | None],
    pending: list[int],
    parallel: int,
    ended: Callable[[list[Outcome | None]], None],
) -> TrialRuns:
    from cluster.workers.trials.launch import run_trials
    from pretrain.common.worker import STOP_FILE

    lines = [TrialLine(trial.label, trial.config.folder, trial.examples, trial.steps) for trial in trials]
    view = TrialsView(lines, pending, config.folder / STOP_FILE)
    if len(pending) < len(trials):
        print(f"  {len(trials) - len(pending)} of {len(trials)} finished earlier")
    stopped = None
    with view:
        try:
            run_trials(
                "finetune.training.train:main",
                [_request(trials[number]) for number in pending],
                name=config.name,
                run_dir=config.folder,
                poll=_Follower(trials, outcomes, pending, view, ended).poll,
                parallel=parallel,
                cpus_per_trial=config.scheduling.cpus_per_worker,
                address=config.scheduling.address,
                max_failures=config.scheduling.max_failures,
            )
        except StoppedError as error:
            stopped = error.again()
    return TrialRuns(outcomes, stopped)


def _request(trial: Trial) -> TrialRequest:
    from cluster.workers.trials.request import TrialRequest

    training = TrainingRequest(trial.config.model_dump(mode="json"), resume=True, test_sets=trial.test_sets)
    return TrialRequest(trial.config.folder, training)


def _end(trial: Trial, error: RunError | None) -> Outcome:
    if isinstance(error, DivergedError):
        write_json(trial.config.folder / FAILED, {"message": str(error)})
    if error is not None:
        return Outcome(error=error)
    return read_outcome(trial) or Outcome(
        error=MachineError(f"{trial.config.folder}: has no model. Run the same command again.")
    )


def check_data(trials: Sequence[Trial], outcomes: Sequence[Outcome | None]) -> None:
    """Refuse to compare runs with others whose data files have changed since."""
    now: dict[tuple[str, bool], str] = {}
    for trial, outcome in zip(trials, outcomes, strict=True):
        if outcome is None or not outcome.data:
            continue
        config = trial.config
        with_tests = outcome.test_sets_scored
        key = config.model_dump_json(include={config.task_name, "max_length", "start_from"}), with_tests
        if key not in now:
            now[key] = runs.digest(config, test_sets=with_tests)
        if now[key] != outcome.data:
            raise InputError(
                f"{config.folder}: was trained or scored on other data than the files of {config.task_name} hold now. "
                "Restore the files, choose another name or run_dir, or remove the folder."
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            f"{path}: damaged ({error}). Remove {path.parent}; the same command then repeats the run."
        ) from None

"""Runs the trials of one command: finds the finished ones, runs the others, and returns all outcomes.

Each trial has a run folder below its config's folder, which shows its state: finished runs are not repeated, nor are
diverged ones, since they would diverge again; all other runs continue from their checkpoints.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cluster.workers.request import TrialRequest
from cluster.workers.trials import run_trials
from finetune.experiments.outcomes import Outcome, Trial, combined_error
from finetune.training import runs
from finetune.training.config import FinetuneConfig, forbidden_changes
from finetune.training.saved import MODEL
from pretrain.common.errors import DivergedError, InputError, MachineError, RunError, StoppedError
from pretrain.common.files import MANIFEST, checkpoint_names, write_json
from pretrain.common.packages import expect
from pretrain.common.run_files import FAILED, SCORES
from pretrain.common.wording import counted, score_title
from pretrain.common.worker import STOP_FILE, TrainingRequest
from pretrain.config import Precision, with_precision
from pretrain.model.precision import choose_local_precision
from pretrain.run import preflight


def trial_config(config: FinetuneConfig, suffix: str, *, folder: Path, seed: int) -> FinetuneConfig:
    """Return the config of one of several runs, with a separate name, W&B id, folder and seed, and a common W&B group.

    Args:
        suffix: distinguishes the run's name from the others; consists of a-z, 0-9 and '-'.
    """
    tracking = config.tracking
    wandb_names = {
        "group": tracking.group or config.name,
        "run_id": tracking.run_id and _with_suffix(tracking.run_id, suffix, 64),
    }
    return config.model_copy(
        update={
            "name": _with_suffix(config.name, suffix, 63),
            "run_dir": str(folder),
            "seed": seed,
            "tracking": tracking.model_copy(update=wandb_names),
        }
    )


def _with_suffix(name: str, suffix: str, max_length: int) -> str:
    """Return `name-suffix` in at most `max_length` characters; the name is cut first."""
    return f"{name[: max(1, max_length - 1 - len(suffix))]}-{suffix}"[:max_length]


def run_all(
    configs: Sequence[FinetuneConfig],
    trials: Sequence[Trial],
    *,
    parallel: int,
    on_result: Callable[[list[Outcome | None]], None],
) -> list[Outcome | None]:
    """Run the unfinished trials, print a line for each result, and return all outcomes; after a stop, some are None.

    The trials belong to `configs`. Ray's log and the stop file are in the folder of the first config. `on_result` is
    called with all outcomes after each trial. `parallel` is passed on to `cluster.workers.trials.run_trials`.

    Raises:
        InputError: a run folder has a run with other settings or data, or is in use by another process.
        MachineError: Ray cannot start, or has too little capacity.
    """
    expect("several fine-tunings", "deepspeed", "ray")
    for config in configs:
        _check_config(config, configs[0])
    with contextlib.ExitStack() as locks:
        for config in configs:
            locks.enter_context(preflight.locked_run(config.folder))
        trials = with_one_precision(configs[0], trials)
        outcomes = [read_outcome(trial) for trial in trials]
        check_data(trials, outcomes)
        pending = [index for index, outcome in enumerate(outcomes) if outcome is None]
        for index in pending:
            _prepare(trials[index].config)
        if pending:
            _run_pending(configs[0], trials, outcomes, pending, parallel, on_result)
    return outcomes


def raise_failure(folder: Path, outcomes: Sequence[Outcome | None]) -> None:
    """Raise an error if some of the runs in or below `folder` were stopped or failed."""
    if unfinished := outcomes.count(None):
        raise StoppedError(f"{folder}: stopped with {counted(unfinished, 'run')} unfinished.").for_rerun()
    if error := combined_error(outcomes):
        raise error


def _prepare(config: FinetuneConfig) -> None:
    """Check the folder of a run that starts or continues, and record its config and environment there."""
    with preflight.checked_run_folder(config, preflight.recorded_config(config), forbidden_changes, resume=True):
        if checkpoint_names(config.folder):
            runs.check_same_settings(config, finished=False)  # trials always resume
        preflight.record_run(config, [sys.executable, *sys.orig_argv[1:]])


def _check_config(config: FinetuneConfig, first_config: FinetuneConfig) -> None:
    """Raise `InputError` if a config cannot have several runs, or cannot be combined with the first config."""
    if config.scheduling.workers > 1:
        raise InputError(
            f"scheduling.workers: {config.scheduling.workers}, but each of several runs is one process. "
            "Leave --workers out; --parallel sets the number of concurrent runs."
        )
    if config.address:
        raise InputError(f"run_dir: {config.address}: several runs have to be in a local folder. Give a local run_dir.")
    if config.scheduling != first_config.scheduling:
        raise InputError(
            f"scheduling: differs between {first_config.name} and {config.name}, but one command runs both. Set the "
            "same values with --set."
        )


def with_one_precision(config: FinetuneConfig, trials: Sequence[Trial]) -> list[Trial]:
    """Replace the precision `auto` by the same precision in all trials, so that their scores are comparable.

    On a cluster, whose nodes may differ, the first trial that starts determines the precision for later calls.
    """
    with_recorded = [replace(trial, config=preflight.with_resolved_precision(trial.config)) for trial in trials]
    if not any(trial.config.engine.precision == "auto" for trial in with_recorded):
        return with_recorded
    pairs = zip(with_recorded, trials, strict=True)
    changed = (trial.config.engine for trial, original in pairs if trial.config.engine != original.config.engine)
    chosen: Precision | None = next((engine.resolved_precision for engine in changed), None)
    if chosen is None:
        if config.scheduling.address:  # training runs on other machines
            return with_recorded
        chosen = choose_local_precision().precision
    return [
        replace(trial, config=with_precision(trial.config, chosen))
        if trial.config.engine.precision == "auto"
        else trial
        for trial in with_recorded
    ]


def read_outcome(trial: Trial) -> Outcome | None:
    """Read the outcome from the run folder; None if the run has to start or continue.

    Raises `InputError` if the run in the folder has other settings.
    """
    folder = trial.config.folder
    # The model may have been removed to save disk space. Checkpoints are removed last, after everything is written.
    finished = (folder / MODEL / MANIFEST).is_file() or (
        (folder / SCORES).is_file() and not (folder / "checkpoints").exists()
    )
    if (folder / FAILED).is_file():
        outcome = Outcome(error=DivergedError(*_read_values(folder / FAILED, "message")))
    elif finished:
        keys = ("metric", "scores", "chosen_on", "details", "data")
        metric, scores, chosen_on, details, digest = _read_values(folder / SCORES, *keys)
        positive = next(iter(details.values()), {}).get("positive", "")
        reason, chosen_on = degenerate_reason(details), "fold" if trial.config.fold else chosen_on
        outcome = Outcome(metric, scores, chosen_on=chosen_on, degenerate=reason, data_digest=digest, positive=positive)
    else:
        return None
    runs.check_same_settings(trial.config, finished=True)
    return outcome


def degenerate_reason(details: dict[str, Any]) -> str:
    """Return the reason why a finished run counts as failed (Mosbach et al. 2021, section 3); "" if it does not.

    `details` is {set: details}. A single-label classifier has failed if its accuracy on the first held-out set is not
    above the share of the most frequent class.
    """
    confusion = next(iter(details.values()), {}).get("confusion")
    if not confusion:
        return ""
    counts: list[list[int]] = confusion["counts"]  # [true][predicted]
    correct = sum(row[label] for label, row in enumerate(counts))
    majority = max(range(len(counts)), key=lambda label: sum(counts[label]))
    if correct > sum(counts[majority]):
        return ""
    share = sum(counts[majority]) / sum(map(sum, counts))
    return f"no better than always {confusion['labels'][majority]} ({share:.4f})"


def outcome_line(label: str, outcome: Outcome) -> str:
    """Return a line with the score of a run, or the reason why it failed."""
    if outcome.error is not None:
        return f"{label}  failed: {' '.join(str(outcome.error).split())}"
    title = f"{outcome.chosen_on} {score_title(outcome.metric, outcome.positive)}"
    score = "done" if outcome.score is None else f"{title} {outcome.score:.4f}"
    return "  ".join(filter(None, [label, score, outcome.degenerate]))


def _run_pending(
    config: FinetuneConfig,
    trials: Sequence[Trial],
    outcomes: list[Outcome | None],
    pending: list[int],
    parallel: int,
    on_result: Callable[[list[Outcome | None]], None],
) -> None:
    """Run the trials with the indices `pending`, and fill in their outcomes; after a stop, some remain None."""
    stop_file = config.folder / STOP_FILE
    stopping = False

    def record_results(results: dict[int, RunError | None]) -> None:
        nonlocal stopping
        for index, error in ((pending[position], error) for position, error in results.items()):
            if not isinstance(error, StoppedError):
                outcome = outcomes[index] = _record_outcome(trials[index], error)
                progress = f"{len(outcomes) - outcomes.count(None)} of {len(outcomes)}"
                print(f"  {progress}  {outcome_line(trials[index].label, outcome)}", flush=True)
                on_result(outcomes)
        if not stopping and stop_file.exists():
            stopping = True
            print("  stopping: running trials save a checkpoint; Ctrl-C again kills them immediately", flush=True)

    log = trials[pending[0]].config.folder / "logs/training-0.log"
    print(f"  {len(pending)} of {len(trials)} to run, each with its log, such as {log}", flush=True)
    with contextlib.suppress(StoppedError):
        run_trials(
            "finetune.training.train:main",
            [_request(trials[index].config) for index in pending],
            name=config.name,
            run_dir=config.folder,
            poll=record_results,
            parallel=parallel,
            cpus_per_trial=config.scheduling.cpus_per_worker,
            address=config.scheduling.address,
            max_failures=config.scheduling.max_failures,
        )
        # Trials that ended without reporting a result.
        record_results({position: None for position, index in enumerate(pending) if outcomes[index] is None})


def _request(config: FinetuneConfig) -> TrialRequest:
    return TrialRequest(config.folder, TrainingRequest(config.model_dump(mode="json"), resume=True))


def _record_outcome(trial: Trial, error: RunError | None) -> Outcome:
    if isinstance(error, DivergedError):
        write_json(trial.config.folder / FAILED, {"message": str(error)})
    if error is None and (outcome := read_outcome(trial)):
        return outcome
    return Outcome(error=error or MachineError(f"{trial.config.folder}: has no model. Run the same command again."))


def check_data(trials: Sequence[Trial], outcomes: Sequence[Outcome | None]) -> None:
    """Raise `InputError` if the data of a finished run have changed, so that the scores would not be comparable."""
    digests: dict[str, str] = {}
    for trial, outcome in zip(trials, outcomes, strict=True):
        if outcome is None or not outcome.data_digest:
            continue
        config = trial.config
        key = config.model_dump_json(include={config.task_name, "max_length", "start_from", "fold"})
        if key not in digests:
            digests[key] = runs.current_data_digest(config)
        if digests[key] != outcome.data_digest:
            raise InputError(
                f"{config.folder}: the files of {config.task_name} have changed since this run was trained and scored. "
                "Restore the files, choose another name or run_dir, or remove the folder."
            )


def _read_values(path: Path, *keys: str) -> list[Any]:
    """Read the values of these keys from a JSON file."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        return [saved[key] for key in keys]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: damaged ({error}). Remove {path.parent}; the same command then repeats the run."
        ) from None

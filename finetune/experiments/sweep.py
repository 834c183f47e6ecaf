"""Runs the fine-tunings of several configs, points of a grid, seeds and folds, and reports their scores."""

import itertools
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from finetune.experiments.candidates import Candidate, group_trials, rank, removable_trials
from finetune.experiments.grid import Grid, GridPoint, auto_grid, check_effect, expand
from finetune.experiments.outcomes import Outcome, Trial
from finetune.experiments.results import count_line, glue_best, glue_rows, score_table, summary, write_submission
from finetune.experiments.trials import raise_failure, run_all, trial_config
from finetune.tasks.datasets import glue
from finetune.training import runs
from finetune.training.config import FinetuneConfig, load_config
from finetune.training.rows import write_rows
from finetune.training.saved import MODEL, PREDICTIONS
from pretrain.common.errors import InputError
from pretrain.common.files import atomic_open, write_json
from pretrain.common.run_files import SUMMARY
from pretrain.common.settings import dump
from pretrain.common.wording import counted, print_table

BEST = "best.yaml"
FOLDS = "folds.jsonl"

Plans = dict[str, runs.FinetunePlan]  # cache: {settings that determine the data's windows: plan}


def run_sweep(
    paths: Sequence[Path],
    overrides: Sequence[str],
    grid: Grid,
    *,
    auto: bool = False,
    seeds: int = 1,
    folds: int = 1,
    parallel: int = 0,
    keep: str = "best",
    submission: Path | None = None,
    dry_run: bool = False,
    show_config: bool = False,
) -> None:
    """Fine-tune once for each config, combination in `grid`, seed and fold, and print tables of scores.

    Writes summary.json into each config's folder, and best.yaml if the grid has several points.

    Args:
        auto: whether to add `grid.auto_grid` of each config, except for settings that are in `grid`.
        seeds: number of seeds: seed, seed + 1, ...
        folds: number K of folds of a cross-validation; 1 for none. Each run becomes K runs, no model is kept, and
            folds.jsonl gets the predictions of the best settings with the first seed.
        keep: "best" keeps only the model of each config's best run, "all" keeps the models of all runs.
        submission: folder for the files for gluebenchmark.com, from each GLUE task's best run.

    Raises the errors of `trials.run_all`, `StoppedError` on a signal, an error at the end if runs failed, and
    `InputError` if there is no held-out set to compare settings on.
    """
    plans: Plans = {}
    trials = _read_trials(paths, overrides, grid, seeds, folds, plans if auto else None)
    configs = list({trial.base.folder: trial.base for trial in trials}.values())
    for config in configs:
        plan = _check_and_plan([trial for trial in trials if trial.base is config], plans)
        print(runs.describe(config, plan, show_config=show_config) if dry_run else runs.describe_start(config, plan))
    if dry_run:
        print(f"\n{counted(len(trials), 'run')}:\n" + "\n".join(f"  {trial.config.folder}" for trial in trials))
        return

    def remove_models(outcomes: list[Outcome | None]) -> None:
        finished = [index for index, outcome in enumerate(outcomes) if outcome]
        for group in group_trials(trials, outcomes) if keep == "best" or folds > 1 else ():
            for index in finished if folds > 1 else removable_trials(group):  # cross-validation keeps no model
                shutil.rmtree(trials[index].config.folder / MODEL, ignore_errors=True)

    outcomes = run_all(configs, trials, parallel=parallel, on_result=remove_models)
    remove_models(outcomes)
    _report(trials, outcomes, submission)
    if folds > 1 and None not in outcomes:
        _write_folds(trials, outcomes, folds)
    raise_failure(configs[0].folder, outcomes)


def sweep_trials(
    config: FinetuneConfig,
    path: Path,
    overrides: Sequence[str],
    points: Sequence[GridPoint],
    seeds: int,
    folds: int = 1,
) -> list[Trial]:
    """Return the trials of all points; the seeds and folds of a point are adjacent."""
    trials, folder_names = [], set()
    for point in points:
        point_config = load_config(path, [*overrides, *point.overrides])
        check_effect(point_config, point)
        if point.folder_name in folder_names:
            raise InputError(f"--grid-set: two points would share the folder {point.folder_name}. Remove one of them.")
        folder_names.add(point.folder_name)
        fold_names = [f"{number}/{folds}" for number in range(1, folds + 1)] if folds > 1 else [""]
        for seed, fold in itertools.product(range(config.seed, config.seed + seeds), fold_names):
            show_seed = seeds > 1 or not point.settings
            suffix = fold and f"fold-{fold.replace('/', '-of-')}"
            name = "-".join(filter(None, [point.name, f"seed-{seed}" if show_seed else "", suffix]))
            label = ", ".join(filter(None, [point.label, f"seed {seed}" if show_seed else "", fold and f"fold {fold}"]))
            folder = config.folder / point.folder_name / f"seed-{seed}" / suffix
            run_config = trial_config(point_config, name, folder=folder, seed=seed).model_copy(update={"fold": fold})
            trials.append(Trial(label, run_config, config, point))
    return trials


def _read_trials(
    paths: Sequence[Path], overrides: Sequence[str], grid: Grid, seeds: int, folds: int, plans: Plans | None
) -> list[Trial]:
    """Return the trials of all configs. With `plans` (a cache), each config's `auto_grid` is added to the grid."""
    trials: list[Trial] = []
    for path in paths:
        config = load_config(path, overrides, imports=True)
        if any(trial.base.folder == config.folder for trial in trials):
            raise InputError(f"{path}: another config has the same run folder {config.folder}. Rename one of them.")
        plan = None if plans is None else _cached_plan(config, config, plans)
        auto_axes = auto_grid(config.filled(plan.model.hidden, plan.units).training) if plan else {}
        new_trials = sweep_trials(config, path, overrides, expand({**auto_axes, **grid}), seeds, folds)
        prefix = f"{config.name}, " if len(paths) > 1 else ""
        trials += [replace(trial, label=prefix + trial.label) for trial in new_trials]
    return trials


def _check_and_plan(trials: Sequence[Trial], plans: Plans) -> runs.FinetunePlan:
    """Check all trials of a config, and return the plan of the first trial.

    Raises the errors of `runs.plan`, and `InputError` if there is no held-out set to choose the best settings on.
    """
    for config in (trial.config for trial in trials):
        plan = _cached_plan(trials[0].base, config, plans)
        runs.check_max_length(config, plan.model)
        if not plan.held_out and not config.fold and trials[0].point.settings:
            raise InputError(f"{trials[0].base.name}: no dev set, so the settings cannot be compared. Give one.")
    return _cached_plan(trials[0].base, trials[0].config, plans)


def _cached_plan(base: FinetuneConfig, config: FinetuneConfig, plans: Plans) -> runs.FinetunePlan:
    """Return the plan of a config derived from `base`; configs with the same windows share one plan."""
    settings = config.model_dump_json(include={config.task_name, "max_length", "start_from", "fold"})
    key = f"{base.folder} {config.engine.micro_batch_tokens} {settings}"
    if key not in plans:
        plans[key] = runs.plan(config, in_process=True)
    return plans[key]


def _report(trials: Sequence[Trial], outcomes: Sequence[Outcome | None], submission: Path | None) -> None:
    """Write summary.json and best.yaml, and print the tables."""
    ranked = [rank(group) for group in group_trials(trials, outcomes)]
    leaders, model_name = glue_best(ranked), Path(trials[0].config.start_from).name
    glue_table = glue_rows(leaders, model_name) if leaders and len(ranked) > 1 else []
    print_table(score_table(ranked))
    for group in ranked:
        config, best = group[0].base, group[0]
        indices = sorted(index for candidate in group for index in candidate.outcomes)
        config_outcomes = [outcomes[index] for index in indices]
        values = summary([trials[index] for index in indices], config_outcomes, group)
        write_json(config.folder / SUMMARY, {**values, "glue": glue_table})
        print(f"{config.folder / SUMMARY}: {count_line(config_outcomes)}")
        if best.point.settings and best.best_trial is not None:
            _write_best(best, trials[best.best_trial].config)
    if glue_table:
        print(f"\n{glue.format_table(glue_table)}")
    if submission is not None and None not in outcomes:
        best_trials = {task: leader.best_trial for task, leader in leaders.items() if leader.best_trial is not None}
        write_submission({task: trials[index].config.folder for task, index in best_trials.items()}, submission)


def _write_folds(trials: Sequence[Trial], outcomes: Sequence[Outcome | None], num_folds: int) -> None:
    """Write folds.jsonl for each config: the predictions of all folds, in the order of the training set."""
    for group in group_trials(trials, outcomes):
        best, config = rank(group)[0], group[0].base
        files = [trials[index].config.folder / PREDICTIONS / "fold.jsonl" for index in list(best.outcomes)[:num_folds]]
        if not all(path.is_file() for path in files):
            continue
        task = config.make_task()
        lines_by_fold = [iter(path.read_text(encoding="utf-8").splitlines()) for path in files]
        fold_indices = task.folds(task.read_train(), num_folds)  # index of each example's fold
        rows = ({"fold": fold + 1, **json.loads(next(lines_by_fold[fold]))} for fold in fold_indices)
        num_rows = write_rows(config.folder / FOLDS, rows)
        print(f"{config.folder / FOLDS}: {counted(num_rows, 'prediction')}, each by a run not trained on the example")


def _write_best(candidate: Candidate, run_config: FinetuneConfig) -> None:
    """Write best.yaml, a config with the settings of the candidate, and print the path of its best run's model."""
    config = candidate.base
    changes = {"name": f"{config.name[:58]}-best", "run_dir": "", "seed": config.seed, "tracking": config.tracking}
    with atomic_open(config.folder / BEST, "w") as file:
        file.write(dump(run_config.model_copy(update={**changes, "fold": ""})))
    print(f"best: {candidate.point.label}; written to {config.folder / BEST}")
    if (run_config.folder / MODEL).is_dir():
        print(f"{run_config.folder / MODEL}: model of the best run. {runs.next_command(run_config)}")

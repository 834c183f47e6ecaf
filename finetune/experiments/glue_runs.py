"""All GLUE tasks whose files exist, from one checkpoint, and the table of the BERT paper (Devlin et al., table 1)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.artifacts.predictor import Predictor
from finetune.experiments.outcomes import Outcome, Trial, spreads
from finetune.experiments.results import SUMMARY, count_line, summary
from finetune.experiments.trials import raise_failure, run_all, trial_config
from finetune.tasks.classification import ClassificationSettings
from finetune.tasks.datasets import glue
from finetune.training import runs
from finetune.training.config import FinetuneConfig, load_config
from finetune.training.saved import MODEL, PREDICTIONS, write_predictions
from pretrain.common.errors import InputError
from pretrain.common.files import MANIFEST, write_json
from pretrain.common.wording import counted

TEMPLATE = Path(__file__).with_name("glue.yaml")
RESULTS = "glue.json"

Results = dict[str, dict[str, dict[str, float]]]  # task -> set -> score -> mean over seeds


@dataclass(frozen=True)
class _GlueRun:
    task: str
    trial: Trial


def run_glue(
    path: Path | None,
    overrides: Sequence[str],
    *,
    folder: str = "",
    tasks: Sequence[str] = (),
    seeds: int = 1,
    parallel: int = 0,
    submission: Path | None = None,
    dry_run: bool = False,
    show_config: bool = False,
) -> None:
    """Fine-tune to the GLUE tasks in `folder`; print and write the paper's table with our row.

    Args:
        path: settings for all tasks, without a task section; None: those of the paper.
        folder: GLUE's downloads; empty: classification.glue_dir of `path`.
        tasks: names as in `glue.TASKS`; empty: all whose files exist.
        submission: folder for gluebenchmark.com's files, from each task's best run by the dev set.

    Raises what `trials.run_all` raises, `StoppedError` on a signal, and at the end an error if runs failed.
    """
    source = path or TEMPLATE
    folder = folder or _folder_of(path, overrides)
    chosen = find_tasks(folder, tasks)
    configs = {name: _task_config(source, overrides, name, folder) for name in chosen}
    config = next(iter(configs.values()))
    plans = {name: runs.plan(one, alone=True, test_sets=submission is not None) for name, one in configs.items()}
    # Small sets first: faults show early.
    order = sorted(configs, key=lambda name: plans[name].steps)
    members = [
        _GlueRun(name, trial)
        for name in order
        for trial in _task_trials(configs[name], config.folder, name, plans[name].steps, seeds)
    ]
    if dry_run:
        print(runs.describe(config, plans[chosen[0]], show_config=show_config))
        print(f"\n{counted(len(members), 'run')}:\n" + "\n".join(f"  {one.trial.config.folder}" for one in members))
        return
    print(runs.describe_checkpoint(config, plans[chosen[0]]))
    for name in order:
        print(_size(name, plans[name]))
    ran = run_all(config, [one.trial for one in members], parallel=parallel)
    _report(config, members, ran.outcomes, seeds)
    if submission is not None and ran.stopped is None:
        _submit(members, ran.outcomes, submission)
    raise_failure(ran)


def find_tasks(folder: str, requested: Sequence[str]) -> list[str]:
    """The tasks to run, in GLUE's order. Raises `InputError` for unknown tasks and missing files."""
    unknown = [name for name in requested if name not in glue.TASKS]
    if unknown:
        raise InputError(f"--tasks: {unknown[0]} is not a GLUE task; expected {', '.join(glue.TASKS)}.")
    missing_files = glue.tasks_in(folder)
    for name in requested:
        if missing_files.get(name, "missing"):
            problem = missing_files.get(name) or f"{folder}: no folder {glue.TASKS[name].title}"
            raise InputError(f"--tasks {name}: {problem}.")
    if requested:
        return [name for name in glue.TASKS if name in requested]
    for name, missing in missing_files.items():
        if missing:
            print(f"{glue.TASKS[name].title}: left out, {missing}")
    complete = [name for name, missing in missing_files.items() if not missing]
    if not complete:
        raise InputError(
            f"--glue-dir: {folder}: has no task with train.tsv and dev.tsv. Give the folder with GLUE's downloads "
            f"({', '.join(task.title for task in glue.TASKS.values())})."
        )
    return complete


def glue_results(tasks: Sequence[str], outcomes: Sequence[Outcome | None]) -> Results:
    """task -> set -> score -> mean over the finished runs of the task."""
    by_task: dict[str, list[Outcome | None]] = {}
    for name, outcome in zip(tasks, outcomes, strict=True):
        by_task.setdefault(name, []).append(outcome)
    return {
        name: {part: {score: one.mean for score, one in those.items()} for part, those in spreads(members).items()}
        for name, members in by_task.items()
        if any(member and member.scores for member in members)
    }


def _size(name: str, plan: runs.FinetunePlan) -> str:
    sets = ", ".join(f"{count:,} in {part}" for part, count in plan.held_out.items())
    return f"{glue.TASKS[name].title}: {counted(plan.examples, 'example')}, {sets}; {counted(plan.steps, 'step')}"


def _report(
    config: FinetuneConfig, members: Sequence[_GlueRun], outcomes: Sequence[Outcome | None], seeds: int
) -> None:
    """Write summary.json and glue.json, and print the table."""
    results = glue_results([one.task for one in members], outcomes)
    write_json(config.folder / SUMMARY, summary([one.trial for one in members], outcomes))
    _write_results(config, results, seeds)
    _print_results(config, results, seeds)
    print(f"{config.folder / RESULTS}: {count_line(outcomes)}")


def _write_results(config: FinetuneConfig, results: Results, seeds: int) -> None:
    write_json(
        config.folder / RESULTS,
        {
            "start_from": config.start_from,
            "seeds": seeds,
            "columns": [heading for heading, *_ in glue.COLUMNS],
            "row": glue.paper_row(results),
            "results": results,
        },
    )


def _print_results(config: FinetuneConfig, results: Results, seeds: int) -> None:
    print()
    print(glue.format_table(results, name=config.name))
    for name in results.keys() - {task for _, task, _, _ in glue.COLUMNS}:
        metric = glue.TASKS[name].metric
        value = results[name].get("dev", {}).get(metric, 0)
        print(f"{glue.TASKS[name].title}, which is not in that table: {metric} {100 * value:.1f}")
    if seeds > 1:
        print(f"Our row is the mean over {seeds} seeds; {config.folder / SUMMARY} has every run.")


def _task_config(source: Path, overrides: Sequence[str], name: str, folder: str) -> FinetuneConfig:
    places = [f"classification.glue={name}", f"classification.glue_dir={json.dumps(folder)}"]
    return load_config(source, [*overrides, *places])


def _folder_of(path: Path | None, overrides: Sequence[str]) -> str:
    """classification.glue_dir of the config."""
    needed = InputError("--glue-dir: name the folder with GLUE's downloads (CoLA, SST-2, ...).")
    if path is None:
        raise needed
    try:
        config = load_config(path, [*overrides, "classification.glue=cola"])
    except InputError as error:
        others = [line for line in str(error).splitlines() if "glue_dir" not in line]
        raise (InputError("\n".join(others)) if others else needed) from None
    section = config.task_settings
    return section.glue_dir if isinstance(section, ClassificationSettings) else ""


def _task_trials(config: FinetuneConfig, folder: Path, name: str, steps: int, seeds: int) -> list[Trial]:
    title = glue.TASKS[name].title
    return [
        Trial(
            f"{title}, seed {seed}" if seeds > 1 else title,
            trial_config(config, f"{name}-seed-{seed}", folder=folder / name / f"seed-{seed}", seed=seed),
            steps,
            test_sets=False,  # only the best run predicts them, for a submission
        )
        for seed in range(config.seed, config.seed + seeds)
    ]


def _submit(members: Sequence[_GlueRun], outcomes: Sequence[Outcome | None], folder: Path) -> None:
    """Predict the official test sets with the best run of every task, and write the files for GLUE's site."""
    best: dict[str, tuple[float, Path]] = {}
    for one, outcome in zip(members, outcomes, strict=True):
        score = outcome.score if outcome else None
        if score is not None and (one.task not in best or score > best[one.task][0]):
            best[one.task] = (score, one.trial.config.folder)
    written = [path for name, (_, run) in best.items() for path in _submit_task(name, run, folder)]
    absent = [task.title for name, task in glue.TASKS.items() if name not in best]
    print(f"{folder}: {', '.join(path.name for path in written) or 'nothing, since there are no test sets'}")
    if absent:
        print(f"  GLUE's site needs all tasks; missing: {', '.join(absent)}")


def _submit_task(name: str, run: Path, folder: Path) -> list[Path]:
    """Predict the test sets of a task with the model of `run`; returns the written submission files."""
    if not (run / MODEL / MANIFEST).is_file():
        raise InputError(f"{run / MODEL}: missing, so nothing predicts {name}. Remove {run} to train it again.")
    predictor = Predictor(run)
    predictions: dict[str, list[dict[str, Any]]] = {}
    for part, examples in predictor.task.read_test().items():
        predictions[part] = predictor.predict(examples)
        write_predictions(run / PREDICTIONS / f"{part}.jsonl", predictor.task, examples, predictions[part])
    return glue.write_submission(name, predictions, folder)

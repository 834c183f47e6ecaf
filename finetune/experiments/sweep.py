"""Several seeds of one fine-tuning, and grids of settings."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from finetune.experiments.candidates import Candidate, candidates, rank, to_drop
from finetune.experiments.grid import Grid, GridPoint, check_effect, expand
from finetune.experiments.outcomes import Outcome, Trial
from finetune.experiments.results import SUMMARY, count_line, metric_of, seeds_table, show, summary, sweep_table
from finetune.experiments.trials import TrialRuns, raise_failure, run_all, trial_config
from finetune.training import runs
from finetune.training.config import FinetuneConfig, load_config
from finetune.training.saved import MODEL
from pretrain.common.errors import InputError
from pretrain.common.files import atomic_open, write_json
from pretrain.common.settings import dump
from pretrain.common.wording import counted

BEST = "best.yaml"


def run_seeds(
    config: FinetuneConfig, seeds: int, *, parallel: int = 0, dry_run: bool = False, show_config: bool = False
) -> None:
    """Fine-tune with seeds config.seed, config.seed + 1, ...; print a table and write summary.json.

    Raises what `trials.run_all` raises, `StoppedError` on a signal, and at the end an error if runs failed.
    """
    plan = runs.plan(config, alone=True)
    trials = [
        Trial(
            f"seed {seed}",
            trial_config(config, f"seed-{seed}", folder=config.folder / f"seed-{seed}", seed=seed),
            plan.steps,
        )
        for seed in range(config.seed, config.seed + seeds)
    ]
    if dry_run:
        print(runs.describe(config, plan, show_config=show_config))
        print(f"\n{counted(len(trials), 'run')}: " + ", ".join(str(trial.config.folder) for trial in trials))
        return
    print(runs.describe_start(config, plan))
    ran = run_all(config, trials, parallel=parallel)
    write_json(config.folder / SUMMARY, summary(trials, ran.outcomes))
    show(seeds_table(trials, ran.outcomes))
    print(f"{config.folder / SUMMARY}: {count_line(ran.outcomes)}")
    raise_failure(ran)


def run_sweep(
    path: Path,
    overrides: Sequence[str],
    grid: Grid,
    *,
    seeds: int = 1,
    parallel: int = 0,
    keep: str = "best",
    dry_run: bool = False,
    show_config: bool = False,
) -> None:
    """Fine-tune with every combination of `grid`; print the table, best first, and write summary.json and best.yaml.

    Args:
        keep: "best" keeps the model of the best run only, "all" those of all runs.

    Raises as `run_seeds` does, and `InputError` without a held-out set, which chooses the best settings.
    """
    config = load_config(path, overrides, imports=True)
    pairs = sweep_trials(config, path, overrides, expand(grid), seeds)
    points, members = [point for point, _ in pairs], [trial for _, trial in pairs]
    plans = _plans(members)
    plan = plans[0]
    if not plan.held_out:
        raise InputError(f"{path}: no dev set, so the settings cannot be compared. Give one.")
    members = [replace(trial, steps=its.steps_of(trial.config)) for trial, its in zip(members, plans, strict=True)]
    if dry_run:
        print(runs.describe(config, plan, show_config=show_config))
        print(f"\n{counted(len(members), 'run')}:\n" + "\n".join(f"  {trial.config.folder}" for trial in members))
        return
    print(runs.describe_start(config, plan))

    def remove_models(outcomes: list[Outcome | None]) -> None:
        if keep == "best":
            for number in to_drop(candidates(points, outcomes)):
                shutil.rmtree(members[number].config.folder / MODEL, ignore_errors=True)

    ran = run_all(config, members, parallel=parallel, ended=remove_models)
    remove_models(ran.outcomes)
    ranking = rank(candidates(points, ran.outcomes))
    _write_summary(config, members, ran, ranking)
    show(sweep_table(ranking, metric_of(ran.outcomes)))
    print(f"{config.folder / SUMMARY}: {count_line(ran.outcomes)}")
    if ranking[0].scores:
        best = load_config(path, [*overrides, *ranking[0].point.overrides])
        _write_best(config, best, ranking[0], members)
    raise_failure(ran)


def sweep_trials(
    config: FinetuneConfig, path: Path, overrides: Sequence[str], points: Sequence[GridPoint], seeds: int
) -> list[tuple[GridPoint, Trial]]:
    """The trials of all points, the seeds of a point next to each other. Their steps are not known yet."""
    trials, folders = [], set()
    for point in points:
        chosen = load_config(path, [*overrides, *point.overrides])
        check_effect(chosen, point)
        if point.folder in folders:
            raise InputError(f"--grid-set: two points would share the folder {point.folder}. Remove one of them.")
        folders.add(point.folder)
        for seed in range(config.seed, config.seed + seeds):
            several = f"seed-{seed}" if seeds > 1 else ""
            label = f"{point.label}, seed {seed}" if several else point.label
            one = trial_config(
                chosen,
                "-".join(filter(None, [point.name, several])),
                folder=config.folder / point.folder / f"seed-{seed}",
                seed=seed,
            )
            trials.append((point, Trial(label, one, 0)))
    return trials


def _plans(members: Sequence[Trial]) -> list[runs.FinetunePlan]:
    """The plan of each trial. Those that train on the same windows share one, since reading the data takes long.

    Raises what `runs.plan` raises.
    """
    made: dict[tuple[str, int], runs.FinetunePlan] = {}
    plans = []
    for trial in members:
        config = trial.config
        windows = config.model_dump_json(include={config.task_name, "max_length", "start_from"})
        key = windows, config.engine.micro_batch_tokens
        if key not in made:
            made[key] = runs.plan(config, alone=True)
        runs.check_fit(config, made[key].model)
        plans.append(made[key])
    return plans


def _write_summary(
    config: FinetuneConfig, members: Sequence[Trial], ran: TrialRuns, ranking: Sequence[Candidate]
) -> None:
    data = summary(members, ran.outcomes)
    data["settings"] = [
        {**one.point.settings, "metric": spread.mean, "deviation": spread.deviation, "runs": spread.runs}
        for one in ranking
        if (spread := one.spread) is not None
    ]
    write_json(config.folder / SUMMARY, data)


def _write_best(config: FinetuneConfig, best: FinetuneConfig, candidate: Candidate, members: Sequence[Trial]) -> None:
    """Write best.yaml, the config of a run of its own, and print where the best run's model is."""
    best = best.model_copy(update={"name": f"{config.name[:58]}-best", "run_dir": ""})
    with atomic_open(config.folder / BEST, "w") as file:
        file.write(dump(best))
    print(f"best: {candidate.point.label}; written to {config.folder / BEST}")
    assert candidate.best_run is not None
    run = members[candidate.best_run].config
    if (run.folder / MODEL).is_dir():
        print(f"{run.folder / MODEL}: the best of its runs. {runs.next_command(run)}")

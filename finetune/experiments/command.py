"""The commands `finetune` and `sweep`. Large libraries are imported only when a command runs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.common.commands import (
    add_command,
    add_config,
    add_dry_run,
    add_run_options,
    add_workers,
    check_effects,
    overrides,
    parse_path,
    positive_int,
    run_options,
)
from pretrain.common.errors import InputError
from pretrain.common.wording import for_terminal
from pretrain.common.worker import torchrun_rank

if TYPE_CHECKING:
    from finetune.training.config import FinetuneConfig

_START_HELP = "checkpoint to start from"


def add_to(commands: Any) -> None:
    """Add `finetune` and `sweep` to the subcommands of a parser."""
    _add_finetune(commands)
    _add_sweep(commands)


# ---------------------------------------------------------------- the commands


def _finetune(arguments: argparse.Namespace) -> None:
    from finetune.training import api, runs

    option = "--seeds" if arguments.seeds is not None else "--folds" if arguments.folds > 1 else ""
    check_effects(
        {
            "--parallel": (arguments.parallel, option, "without --seeds N or --folds K"),
            "--resume": (arguments.resume, not option, f"with {option}: finished runs are kept, the others continue"),
        }
    )
    if option:
        if arguments.no_ray or torchrun_rank():
            raise InputError(f"{option}: several runs need Ray. Remove --no-ray, and do not use torchrun.")
        _run_several([arguments.config], arguments, {}, keep="all")
        return
    if arguments.dry_run:
        _dry_run(api.read_config(arguments.config, overrides(arguments), start_from=arguments.start_from), arguments)
        return
    run = api.train(arguments.config, **run_options(arguments))
    if run.trained:
        print(f"{run} {runs.next_command(run.config)}")


def _dry_run(config: FinetuneConfig, arguments: argparse.Namespace) -> None:
    from finetune.training import runs
    from pretrain.run import launch, preflight

    in_process = launch.trains_in_process(config.scheduling.workers, arguments.no_ray)
    if launch.is_follower():
        return
    finished = runs.has_model(config)
    if finished and arguments.resume:
        runs.check_same_settings(config, finished=True)
    plan = runs.plan(config, in_process)
    config = preflight.with_resolved_precision(config) if arguments.resume or finished else config
    state = preflight.run_state(config.folder, finished=finished)
    description = runs.describe(config, plan, show_config=arguments.show_config)
    print(for_terminal(f"{config.folder}: {state}\n{description}"))


def _sweep(arguments: argparse.Namespace) -> None:
    from finetune.experiments.grid import parse_grid

    grid_name = arguments.grid or ("" if arguments.grid_set or len(arguments.config) > 1 else "auto")
    auto = grid_name == "auto"  # this grid depends on each config, so `run_sweep` makes it
    grid = parse_grid("" if auto else grid_name, arguments.grid_set)
    _run_several(arguments.config, arguments, grid, auto=auto, keep=arguments.keep, submission=arguments.submission)


def _run_several(
    configs: Sequence[Path], arguments: argparse.Namespace, grid: Mapping[str, Sequence[str]], **options: Any
) -> None:
    from finetune.experiments.sweep import run_sweep
    from pretrain.common.settings import with_start

    common_options = {name: getattr(arguments, name) for name in ("folds", "parallel", "dry_run", "show_config")}
    all_overrides = with_start(overrides(arguments), arguments.start_from)
    run_sweep(configs, all_overrides, grid, seeds=arguments.seeds or 1, **common_options, **options)


# ---------------------------------------------------------------- parsers


def _add_finetune(commands: Any) -> None:
    parser = add_command(
        commands,
        "finetune",
        _finetune,
        "train a model for one task from a checkpoint",
        """
  ./launch.sh finetune configs/finetune/sst2.yaml --from exported/bert-mini
  ./launch.sh finetune my-task.yaml --from bert-base-uncased/ --workers 2
  ./launch.sh finetune my-task.yaml --set training.preset=stable --resume
  ./launch.sh finetune my-task.yaml --from bert-base-uncased/ --seeds 5
  ./launch.sh finetune my-task.yaml --from bert-base-uncased/ --folds 5""",
    )
    add_config(parser, _START_HELP)
    _add_several_runs(parser)
    add_run_options(parser)


def _add_sweep(commands: Any) -> None:
    parser = add_command(
        commands,
        "sweep",
        _sweep,
        "fine-tune with several configs, or over a grid",
        """
  ./launch.sh sweep my-task.yaml --from bert-base-uncased/
  ./launch.sh sweep my-task.yaml --from exported/bert-mini --grid small-bert --parallel 2
  ./launch.sh sweep my-task.yaml --grid-set training.learning_rate=1e-5,3e-5 --seeds 3
  ./launch.sh sweep configs/finetune/glue/* --from bert-base-uncased/ --seeds 5 --submission out/""",
    )
    add_config(parser, _START_HELP, several=True)
    _add_several_runs(parser)
    parser.add_argument(
        "--grid",
        choices=("auto", "devlin", "small-bert"),
        help="auto: 9 points around the config's learning rate and epochs (default for a single config); devlin: the "
        "18 points of Devlin et al. 2019; small-bert: the 20 points of the smaller BERT models",
    )
    parser.add_argument(
        "--grid-set",
        action="append",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="values of a setting, added to the grid or replacing its values; may be repeated",
    )
    parser.add_argument(
        "--keep", choices=("best", "all"), default="best", help="which models of each config to keep (default: best)"
    )
    parser.add_argument(
        "--submission",
        type=parse_path,
        metavar="DIR",
        help="write the files for gluebenchmark.com from the best run of each GLUE task",
    )


def _add_several_runs(parser: argparse.ArgumentParser) -> None:
    add_workers(parser)
    parser.add_argument(
        "--seeds",
        type=positive_int,
        metavar="N",
        help="number of runs per config, with seeds seed, seed + 1, ..., each in a separate folder (default: one run)",
    )
    parser.add_argument(
        "--folds",
        type=positive_int,
        default=1,
        metavar="K",
        help="cross-validation: K runs, each scored on one fold of the training set and trained on the rest; prints "
        "mean and standard deviation, writes folds.jsonl, and keeps no model",
    )
    parser.add_argument(
        "--parallel",
        type=positive_int,
        default=0,
        metavar="N",
        help="number of concurrent runs (default: one per GPU, or one per machine without GPUs)",
    )
    add_dry_run(parser, "print the plan, then exit")

"""The commands that fine-tune: one run, several seeds, a grid, GLUE. Each imports what it needs when it runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pretrain.common.commands import (
    add_command,
    add_config,
    add_dry_run,
    add_run_options,
    add_workers,
    local_path,
    overrides,
    positive_int,
    run_options,
)
from pretrain.common.errors import InputError
from pretrain.common.worker import torchrun_place

if TYPE_CHECKING:
    from finetune.training.config import FinetuneConfig

_START = "checkpoint to start from"


def add_to(commands: Any) -> None:
    """Add `finetune`, `sweep` and `glue` to the subcommands of a parser."""
    for add in (_add_finetune, _add_sweep, _add_glue):
        add(commands)


# ---------------------------------------------------------------- what the commands do


def _finetune(arguments: argparse.Namespace) -> None:
    from finetune.training import api, runs

    if arguments.parallel and arguments.seeds is None:
        raise InputError("--parallel: limits how many runs train at once, so it needs --seeds N.")
    if arguments.dry_run or arguments.seeds is not None:
        config = api.read_config(arguments.config, overrides(arguments), start_from=arguments.start_from)
        (_dry_run if arguments.seeds is None else _finetune_seeds)(config, arguments)
        return
    run = api.train(arguments.config, **run_options(arguments))
    if run.trained:
        print(f"{run} {runs.next_command(run.config)}")


def _dry_run(config: FinetuneConfig, arguments: argparse.Namespace) -> None:
    from finetune.training import runs
    from pretrain.run import launch, preflight

    alone = launch.is_alone(config.scheduling.workers, arguments.no_ray)
    if launch.is_follower():
        return
    finished = runs.has_model(config)
    if finished and arguments.resume:
        runs.check_same(config, over=True)
    plan = runs.plan(config, alone)
    config = preflight.with_resolved_precision(config) if arguments.resume or finished else config
    state = preflight.run_state(config.folder, finished=finished)
    print(f"{config.folder}: {state}\n{runs.describe(config, plan, show_config=arguments.show_config)}")


def _finetune_seeds(config: FinetuneConfig, arguments: argparse.Namespace) -> None:
    from finetune.experiments.sweep import run_seeds

    if arguments.no_ray or torchrun_place():
        raise InputError("--seeds: several runs need Ray. Remove --no-ray, and do not use torchrun.")
    run_seeds(
        config,
        arguments.seeds,
        parallel=arguments.parallel,
        dry_run=arguments.dry_run,
        show_config=arguments.show_config,
    )


def _sweep(arguments: argparse.Namespace) -> None:
    from finetune.experiments.grid import parse_grid
    from finetune.experiments.sweep import run_sweep
    from pretrain.common.settings import with_start

    name = arguments.grid or ("" if arguments.grid_set else "devlin")
    run_sweep(
        arguments.config,
        with_start(overrides(arguments), arguments.start_from),
        parse_grid(name, arguments.grid_set),
        seeds=arguments.seeds or 1,
        parallel=arguments.parallel,
        keep=arguments.keep,
        dry_run=arguments.dry_run,
        show_config=arguments.show_config,
    )


def _glue(arguments: argparse.Namespace) -> None:
    from finetune.experiments.glue_runs import run_glue
    from pretrain.common.settings import with_start

    run_glue(
        arguments.config,
        with_start(overrides(arguments), arguments.start_from),
        folder=arguments.glue_dir or "",
        tasks=[name for name in (arguments.tasks or "").split(",") if name],
        seeds=arguments.seeds or 1,
        parallel=arguments.parallel,
        submission=arguments.submission,
        dry_run=arguments.dry_run,
        show_config=arguments.show_config,
    )


# ---------------------------------------------------------------- their parsers


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
  ./launch.sh finetune my-task.yaml --from bert-base-uncased/ --seeds 5""",
    )
    add_config(parser, _START)
    _add_several(parser)
    add_run_options(parser)


def _add_sweep(commands: Any) -> None:
    parser = add_command(
        commands,
        "sweep",
        _sweep,
        "fine-tune with every combination of a grid of settings",
        """
  ./launch.sh sweep my-task.yaml --from bert-base-uncased/
  ./launch.sh sweep my-task.yaml --from exported/bert-mini --grid small-bert --parallel 2
  ./launch.sh sweep my-task.yaml --grid-set training.learning_rate=1e-5,3e-5 --seeds 3""",
    )
    add_config(parser, _START)
    _add_several(parser)
    parser.add_argument(
        "--grid",
        choices=("devlin", "small-bert"),
        help="grid of Devlin et al. 2019 (18 points, the default) or of the smaller BERT models (20 points)",
    )
    parser.add_argument(
        "--grid-set",
        action="append",
        default=[],
        metavar="KEY=VALUE,VALUE",
        help="values of one setting, added to --grid or replacing its values; may be repeated",
    )
    parser.add_argument(
        "--keep", choices=("best", "all"), default="best", help="models to keep on disk (default: best)"
    )


def _add_glue(commands: Any) -> None:
    parser = add_command(
        commands,
        "glue",
        _glue,
        "fine-tune on every GLUE task and print the results table of the BERT paper",
        """
  ./launch.sh glue --from bert-base-uncased/ --glue-dir glue_data/
  ./launch.sh glue --from exported/bert-mini --glue-dir glue_data/ --tasks sst2,rte --seeds 5
  ./launch.sh glue template.yaml --from exported/bert-mini --glue-dir glue_data/ --submission out/""",
    )
    add_config(parser, _START, "settings for all tasks (default: those of Devlin et al. 2019)", optional=True)
    _add_several(parser)
    parser.add_argument(
        "--glue-dir", metavar="DIR", help="GLUE data with folders CoLA, SST-2, ... (sets classification.glue_dir)"
    )
    parser.add_argument(
        "--tasks",
        metavar="NAME,NAME",
        help="some of cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli (default: all in --glue-dir)",
    )
    parser.add_argument(
        "--submission",
        type=local_path,
        metavar="DIR",
        help="predict the official test sets with each task's best run, and write the files for gluebenchmark.com",
    )


def _add_several(parser: argparse.ArgumentParser) -> None:
    add_workers(parser)
    parser.add_argument(
        "--seeds",
        type=positive_int,
        metavar="N",
        help="runs of each config, with seeds seed, seed + 1, ..., each in its own folder (default: one run)",
    )
    parser.add_argument(
        "--parallel",
        type=positive_int,
        default=0,
        metavar="N",
        help="concurrent runs (default: one per GPU, or one per machine without GPUs)",
    )
    add_dry_run(parser, "print the plan, then exit")

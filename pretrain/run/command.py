"""The commands `prepare` and `pretrain`. Each imports what it needs when it runs."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from pretrain.common.addresses import display_path
from pretrain.common.commands import (
    add_command,
    add_config,
    add_dry_run,
    add_run_options,
    add_workers,
    overrides,
    program,
    run_options,
)
from pretrain.common.wording import for_terminal


def add_to(commands: Any) -> None:
    """Add `prepare` and `pretrain` to the subcommands of a parser."""
    _add_prepare(commands)
    _add_pretrain(commands)


# ---------------------------------------------------------------- the commands


def _prepare(arguments: argparse.Namespace) -> None:
    from pretrain.run import api

    settings, start_from = overrides(arguments), arguments.start_from
    if not arguments.dry_run:
        print(api.prepare(arguments.config, overrides=settings, start_from=start_from))
        return
    from pretrain.corpus.description import describe
    from pretrain.planning import estimate

    config = api.read_config(arguments.config, settings, start_from=start_from)
    plan = describe(config, api.start_tokenizer_options(config).get("tokenizer"))
    print(for_terminal(estimate.preparation_lines(plan)))


def _pretrain(arguments: argparse.Namespace) -> None:
    if arguments.dry_run:
        print(for_terminal(_dry_run_text(arguments)))
        return
    from pretrain.run import api

    run = api.train(arguments.config, fork_from=arguments.fork, minutes=arguments.minutes, **run_options(arguments))
    if run.trained:
        imports = f" --import {run.config.objective}" if run.config.objective else ""
        print(f"{run} Next: {program()} export {shlex.quote(str(run.location))} DIR{imports}")


def _dry_run_text(arguments: argparse.Namespace) -> str:
    """Return the text that a dry run prints: the run's state and its estimated cost."""
    from pretrain.planning import estimate
    from pretrain.planning.text import mean_lengths, reading_lines
    from pretrain.run import api, preflight
    from pretrain.run.fork import find_parent_checkpoint

    resume = arguments.resume
    start = {"start_from": arguments.start_from, "fork_from": arguments.fork}
    config = api.read_config(arguments.config, overrides(arguments), **start, resume=resume, dry_run=True)
    if arguments.minutes is not None:
        config = api.fit_minutes(config, arguments.minutes, resume=resume, dry_run=True)
    state = preflight.run_state(config.folder, finished=preflight.is_finished(config))
    config = preflight.with_resolved_precision(config) if resume else config
    length = arguments.mean_length
    estimates = estimate.dry_run(
        config,
        on=arguments.on,
        mean_length=length,
        measured=mean_lengths(config) if length is None else [],
        readings=reading_lines(config),
        show_config=arguments.show_config,
    )
    if config.fork_from and state == "new":
        step, _ = find_parent_checkpoint(config)
        state = f"new; forks from {config.fork_from}, with {config.total_steps - step:,} steps left"
    return f"Run\n  {display_path(config.folder)}: {state}\n\n{estimates}"


# ---------------------------------------------------------------- the parsers


def _add_prepare(commands: Any) -> None:
    parser = add_command(
        commands,
        "prepare",
        _prepare,
        "tokenize raw text into a vocabulary and token shards",
        """
  ./launch.sh prepare configs/pretrain/bert-mini.yaml
  ./launch.sh prepare configs/pretrain/bert-mini.yaml --dry-run
  ./launch.sh prepare configs/pretrain/adapt.yaml --from bert-base-uncased/
  ./launch.sh prepare my.yaml --set corpus.dir=/data/wiki --set corpus.processes=8""",
    )
    add_config(parser, "checkpoint whose tokenizer is used")
    parser.add_argument("--dry-run", action="store_true", help="print what would be read and written, then exit")


def _add_pretrain(commands: Any) -> None:
    parser = add_command(
        commands,
        "pretrain",
        _pretrain,
        "train an encoder on a prepared corpus",
        """
  ./launch.sh pretrain configs/pretrain/bert-mini.yaml --workers 2
  ./launch.sh pretrain configs/pretrain/bert-mini.yaml --resume
  ./launch.sh pretrain anneal.yaml --fork runs/bert-mini@8000
  ./launch.sh pretrain configs/pretrain/mini.yaml --minutes 60
  ./launch.sh pretrain configs/pretrain/adapt.yaml --from bert-base-uncased/
  ./launch.sh pretrain configs/pretrain/bert-large-phase1-phase2.yaml --dry-run --on 8xH100
  ./launch.sh pretrain my.yaml --set phases.0.steps=100 --set engine.zero_stage=2
  torchrun --nproc-per-node 8 -m finetune.cli pretrain my.yaml""",
    )
    add_config(parser, "checkpoint to continue from")
    add_dry_run(parser, "print the run folder, parameters, memory, FLOPs and time, then exit")
    parser.add_argument(
        "--fork",
        metavar="RUN@STEP",
        help="start from a checkpoint of another run, with its optimizer state and its position in the data",
    )
    add_workers(parser)
    add_run_options(parser)
    parser.add_argument(
        "--minutes",
        type=float,
        metavar="M",
        help="train about this long on this machine: time a few steps first, then scale the steps of all phases",
    )
    parser.add_argument(
        "--on",
        metavar="CLUSTER",
        help="with --dry-run: estimate the time on this cluster, such as 8xH100, or `here` to measure this machine",
    )
    parser.add_argument(
        "--mean-length",
        type=float,
        metavar="TOKENS",
        help="with --dry-run: mean tokens per sequence (default: the prepared corpus's mean, or 0.8 of the maximum)",
    )

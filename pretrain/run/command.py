"""The commands that prepare a corpus, train on it and export what was trained. Each imports what it needs when run."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrain.common.commands import (
    add_command,
    add_dry_run,
    add_run_options,
    add_set,
    add_workers,
    config_argument,
    local_path,
    model_argument,
    next_step,
    overrides,
    target_path,
)
from pretrain.common.errors import InputError
from pretrain.run.arguments import run_path, store_target

if TYPE_CHECKING:
    from pretrain.config import PretrainConfig


def add_to(commands: Any) -> None:
    """Add `prepare`, `pretrain` and `export` to the subcommands of a parser."""
    for add in (_add_prepare, _add_pretrain, _add_export):
        add(commands)


def load(path: Path, overrides: Sequence[str]) -> PretrainConfig:
    """The config of a run that is to start on another machine."""
    from pretrain.config import load_config

    return load_config(path, overrides, imports=True)


# ---------------------------------------------------------------- what the commands do


def _prepare(arguments: argparse.Namespace) -> None:
    from pretrain.corpus import prepare
    from pretrain.planning.text import counts_readings

    config, tokenizer, declared = _config(arguments), None, {}
    if config.start_from:
        from pretrain.checkpoint.start import start_tokenizer
        from pretrain.checkpoint.tokenizer import tokenizer_folder
        from pretrain.corpus.special_tokens import declared_settings
        from pretrain.storage.runs import fetched_model

        tokenizer = start_tokenizer(fetched_model(config.start_from))
        declared = declared_settings(tokenizer_folder(fetched_model(config.start_from)))
    if arguments.dry_run:
        from pretrain.planning import estimate

        print(estimate.preparation_lines(prepare.describe(config, tokenizer)))
        return
    counted = counts_readings(config)
    print(prepare.prepare(config, tokenizer=tokenizer, declared=declared, count_readings=counted))
    _print_lengths(config)


def _print_lengths(config: PretrainConfig) -> None:
    """Mean tokens of a sequence of each phase, which decide what a step costs."""
    from pretrain.planning.text import measured_phases

    # Text that is too short for the phases is prepared all the same; the run refuses it.
    with contextlib.suppress(InputError):
        for number, text in enumerate(measured_phases(config)):
            most = config.phases[number].sequence_length
            print(
                f"phases.{number}: {text.samples_per_epoch:,} sequences in an epoch, of {text.mean_length:.1f} tokens "
                f"in the mean ({most} at most)"
            )


def _pretrain(arguments: argparse.Namespace) -> None:
    _check_budget(arguments)
    config = _config(arguments)
    if arguments.budget is not None:
        from pretrain.planning.recommend import recommendation

        print(recommendation(config, arguments.budget, arguments.on, arguments.law))
        return
    if arguments.minutes is not None:
        if config.fork_from:
            raise InputError("--minutes: changes the length of phases that a fork has in common. Leave it out.")
        config = _fit(config, arguments)
    if arguments.dry_run:
        from pretrain.planning import estimate
        from pretrain.planning.text import measured_phases, reading_lines
        from pretrain.run import preflight
        from pretrain.run.fork import find_fork

        state = preflight.run_state(config.folder, finished=preflight.is_finished(config))
        config = preflight.with_resolved_precision(config) if arguments.resume else config
        given = arguments.mean_length
        measured = [phase.mean_length for phase in measured_phases(config)] if given is None else []
        estimates = estimate.dry_run(
            config,
            on=arguments.on,
            mean_length=given,
            measured=measured,
            readings=reading_lines(config),
            show_config=arguments.show_config,
        )
        if config.fork_from and state == "new":
            step, _ = find_fork(config)
            state = f"new; forks from {config.fork_from}, so that {config.total_steps - step:,} steps are left"
        print(f"Run\n  {config.folder}: {state}\n\n{estimates}")
        return
    from pretrain.config import changed_for_resume
    from pretrain.objectives import objective_of
    from pretrain.run import launch, preflight
    from pretrain.run.fork import begin_fork

    forks = bool(config.fork_from) and (launch.is_follower() or begin_fork(config))
    resume = arguments.resume or forks
    started = launch.start_run(
        "pretrain.run.train:main",
        config,
        resume=resume,
        ray=arguments.ray,
        no_ray=arguments.no_ray,
        check=functools.partial(_check, resume=resume),
        is_finished=preflight.is_finished,
        changed=changed_for_resume,
        metrics=objective_of(config).metrics,
    )
    if started is not None:
        place = config.address or config.folder
        own = f" --import {config.objective}" if config.objective else ""
        print(f"{place}: finished.{next_step(f'export {shlex.quote(str(place))} DIR{own}')}")


def _check(config: PretrainConfig, alone: bool, *, resume: bool) -> int:
    """Check what the run reads, and print what it begins from; returns its steps."""
    from pretrain.config import began_from
    from pretrain.corpus.stored import fetch_corpus
    from pretrain.model.cost import check_names
    from pretrain.objectives import objective_of
    from pretrain.run import launch, preflight

    check_names(config.model)
    fetch_corpus(config.corpus)
    begins = config.start_from and not (resume and began_from(config.folder))
    if begins:
        from pretrain.checkpoint.start import check_start_corpus, start_table

        check_start_corpus(config)
    preflight.check_corpus(config)
    if (objective := objective_of(config)).frozen_role:
        from pretrain.checkpoint.start import read_frozen

        objective.check(read_frozen)
    launch.check_cores(config, alone)
    if begins:
        print(f"{config.start_from}:\n{textwrap.indent(start_table(config), '  ')}")
    return config.total_steps


def _check_budget(arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    if arguments.budget is None:
        if arguments.law is not None:
            raise InputError("--law: has no effect without --budget.")
        return
    if not arguments.dry_run:
        raise InputError("--budget: recommends a size, and trains nothing. Give --dry-run with it.")
    for name in ("minutes", "mean_length"):
        if getattr(arguments, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"{option}: has no effect with --budget. Leave one of them out.")


def _fit(config: PretrainConfig, arguments: argparse.Namespace) -> PretrainConfig:
    """The config with as many steps as fit into the given minutes here; a resumed run keeps those it began with."""
    from pretrain.common.files import checkpoint_names
    from pretrain.config import changed_for_resume
    from pretrain.planning import pace
    from pretrain.planning.text import read_text
    from pretrain.run import preflight

    if arguments.resume and checkpoint_names(config.folder):
        return pace.recorded(config)
    preflight.check_corpus(config)
    if not arguments.dry_run:
        preflight.check_run_folder(config, arguments.resume, changed_for_resume)
    return pace.fit(config, arguments.minutes, read_text(config).lengths)


def _export(arguments: argparse.Namespace) -> None:
    from pretrain.checkpoint import hf
    from pretrain.common.addresses import is_remote, local, shown
    from pretrain.config import load_config
    from pretrain.objectives import objective_of
    from pretrain.storage.runs import StoredRun

    address = shown(arguments.run)
    if arguments.checkpoint and is_remote(address):
        stored = StoredRun(address, arguments.run)
        stored.download_checkpoints(stored.names())
    own = hf.export_run(
        arguments.run,
        local(arguments.out),
        arguments.checkpoint,
        averaged=arguments.averaged,
        others=arguments.average,
    )
    if is_remote(arguments.out):
        for part in objective_of(load_config(arguments.run / "config.yaml")).exported:
            store_target(f"{arguments.out}{part.suffix}")
    if own:
        print(f"{arguments.out}: written for bertrain's own commands. transformers cannot load it ({own}).")
    else:
        loader = hf.auto_class(local(arguments.out))
        print(f"{arguments.out}: written. transformers loads it with {loader}.from_pretrained.")


def _config(arguments: argparse.Namespace) -> PretrainConfig:
    from pretrain.common import settings
    from pretrain.config import PretrainConfig, began_from, load_config, run_folder
    from pretrain.run import launch

    resume, settings_given = getattr(arguments, "resume", False), overrides(arguments)
    if arguments.start_from is not None:
        settings_given.append(f"start_from={json.dumps(str(arguments.start_from))}")
    if getattr(arguments, "fork", None) is not None:
        settings_given.append(f"fork_from={json.dumps(arguments.fork)}")
    given = settings.given_values(arguments.config, PretrainConfig, settings_given)
    if resume and not arguments.dry_run:
        launch.download(given.get("run_dir"))
    if given.get("start_from") or (resume and began_from(run_folder(given))):
        from pretrain.checkpoint.start import start_overrides

        settings_given += start_overrides(arguments.config, settings_given, resume=resume)
    return load_config(arguments.config, settings_given, imports=True)


# ---------------------------------------------------------------- their parsers


def _add_prepare(commands: Any) -> None:
    parser = add_command(
        commands,
        "prepare",
        _prepare,
        "tokenize raw text into a vocabulary, token shards and a corpus card",
        """
  ./launch.sh prepare configs/pretrain/bert-mini.yaml
  ./launch.sh prepare configs/pretrain/bert-mini.yaml --dry-run
  ./launch.sh prepare configs/pretrain/adapt.yaml --from bert-base-uncased/
  ./launch.sh prepare my.yaml --set corpus.dir=/data/wiki --set corpus.processes=8""",
    )
    _add_config(parser)
    parser.add_argument("--dry-run", action="store_true", help="print what would be read and written, then exit")
    _add_from(parser, "checkpoint whose tokenizer is used: folder or address of a released model, an export or a run")
    add_set(parser)


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
  ./launch.sh pretrain configs/pretrain/mini.yaml --dry-run --budget 2h --on here
  ./launch.sh pretrain configs/pretrain/adapt.yaml --from bert-base-uncased/
  ./launch.sh pretrain configs/pretrain/bert-large-phase1-phase2.yaml --dry-run --on 8xH100
  ./launch.sh pretrain my.yaml --set phases.0.steps=100 --set engine.zero_stage=2
  torchrun --nproc-per-node 8 -m pretrain pretrain my.yaml""",
    )
    _add_config(parser)
    add_dry_run(parser, "print the run folder, parameters, memory, FLOPs and time, then exit")
    _add_from(parser, "checkpoint to continue from: folder or address of a released model, an export or a run")
    parser.add_argument(
        "--fork",
        metavar="RUN@STEP",
        help="begin with a checkpoint of another run, its moments and its place in the data",
    )
    add_set(parser)
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
        "--budget",
        metavar="TIME|FLOP",
        help="with --dry-run: recommend the size, batch, steps and rate for this budget, such as 2h, 30m or 0.5e15",
    )
    parser.add_argument(
        "--law",
        type=local_path,
        metavar="FILE",
        help="with --budget: scaling law that `bench law` fitted (default: the published one)",
    )
    parser.add_argument(
        "--mean-length",
        type=float,
        metavar="TOKENS",
        help="with --dry-run: mean tokens per sequence (default: as in the prepared corpus, else 0.8 of the length)",
    )


def _add_export(commands: Any) -> None:
    parser = add_command(
        commands,
        "export",
        _export,
        "write a run's checkpoint in the Hugging Face layout",
        """
  ./launch.sh export runs/bert-mini exported/bert-mini
  ./launch.sh export runs/bert-mini exported/best --checkpoint best

Fine-tuned models are exported by the same command, also as ONNX:
  ./launch.sh export runs/sst2 exported/sst2 --onnx""",
    )
    parser.add_argument("run", type=run_path, metavar="RUN", help="run folder, name of a run in runs/, or address")
    parser.add_argument("out", type=target_path, metavar="DIR", help="folder or address to write")
    parser.add_argument("--checkpoint", metavar="NAME", help="checkpoint of the run (default: the newest)")
    parser.add_argument(
        "--average",
        type=run_path,
        nargs="+",
        default=[],
        metavar="RUN",
        help="write the mean of this run's weights and those of these, such as forks of one run",
    )
    parser.add_argument(
        "--averaged",
        action="store_true",
        help="write the mean of the last steps' weights (see phases.N.averaged_share)",
    )


def _add_from(parser: argparse.ArgumentParser, purpose: str) -> None:
    parser.add_argument(
        "--from", dest="start_from", type=model_argument, metavar="DIR", help=f"{purpose} (overrides start_from)"
    )


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=config_argument, metavar="CONFIG", help="YAML file of the run, or a name of `configs`"
    )

"""The functions of `import pretrain`, which the commands call: prepare a corpus, train on it, export the model."""

from __future__ import annotations

import contextlib
import functools
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pretrain.common.addresses import display_path, is_remote, local_path
from pretrain.common.commands import target_path
from pretrain.common.errors import InputError
from pretrain.common.files import checkpoint_names
from pretrain.common.packages import expect
from pretrain.common.settings import AnyConfig, Overrides, as_overrides, unvalidated_values, with_start
from pretrain.config import PretrainConfig, config_of, forbidden_changes, load_config, run_folder, used_start_from
from pretrain.objectives import make_objective
from pretrain.run import launch, preflight, probes
from pretrain.run.arguments import run_path, store_target
from pretrain.run.results import Run, SavedOutput


def prepare(config: AnyConfig, *, overrides: Overrides = (), start_from: Any = None) -> SavedOutput:
    """Turn raw text into a vocabulary, token shards and a corpus card, or continue where an earlier call stopped.

    Args:
        config: YAML file, example name, nested dict or `PretrainConfig`. Paths are relative to the working directory.
        overrides: settings by dotted key, such as {"corpus.processes": 2}; or strings `key.path=value`.
        start_from: checkpoint whose tokenizer is used: folder or address (object store URL) of a released model, an
            export or a run, the name of a run in runs/, or a result of `train` or `export`; overrides the config.

    Raises a `RunError`: `InputError` for errors in the config or the sources, `MachineError` for a full disk or a
    killed process, `StoppedError` after Ctrl-C.
    """
    expect("prepare", "mwparserfromhell", "pyarrow", "rensa", "sentencex")
    from pretrain.corpus import prepare
    from pretrain.planning.text import reading_counter

    resolved = read_config(config, overrides, start_from=start_from)
    count_readings = reading_counter(resolved)  # counts, for the corpus card, how often an epoch reads each token
    summary = prepare.prepare(resolved, **start_tokenizer_options(resolved), count_readings=count_readings)
    return SavedOutput(resolved.corpus.folder, resolved.corpus.dir, "\n".join([summary, *_describe_lengths(resolved)]))


def train(
    config: AnyConfig,
    *,
    overrides: Overrides = (),
    start_from: Any = None,
    fork_from: str | None = None,
    resume: bool = False,
    minutes: float | None = None,
    ray: bool = False,
    no_ray: bool = False,
    callbacks: Sequence[Any] = (),
) -> Run[PretrainConfig]:
    """Train an encoder on a prepared corpus to the end, with its progress on standard output.

    Ctrl-C saves a checkpoint and stops the run; a second Ctrl-C stops it immediately.

    Args:
        config, overrides, start_from: as for `prepare`. {"scheduling.workers": 2} trains in two processes.
        fork_from: checkpoint of another run to start from, as "RUN@STEP"; overrides the config.
        resume: continue the run from its latest checkpoint, if there is one.
        minutes: train for about this long on this machine: a few steps are timed first, then all phases are scaled.
        ray: use Ray even for one worker on this machine.
        no_ray: train in this process.
        callbacks: functions f(hook, record), and objects with methods step_end, evaluation, checkpoint and run_end,
            each with the argument record; called in addition to the config's callbacks. Other processes get copies.

    Raises a `RunError`: `InputError` for errors in the config or the corpus, or if the run was started before and
    `resume` is off; `MachineError`; `DivergedError`; `StoppedError` if the run was stopped (`resume` continues it).
    """
    from pretrain.run.fork import start_fork, undo_fork_if_refused

    resolved = read_config(config, overrides, start_from=start_from, fork_from=fork_from, resume=resume)
    if minutes is not None:
        resolved = fit_minutes(resolved, minutes, resume=resume)
    starts_fork = bool(resolved.fork_from) and (launch.is_follower() or start_fork(resolved))
    resume = resume or starts_fork

    @contextlib.contextmanager
    def training_context(config: PretrainConfig) -> Iterator[None]:
        with undo_fork_if_refused(config) if starts_fork else contextlib.nullcontext(), probes.probing(config):
            yield

    kind = launch.RunKind(
        "pretrain.run.train:main",
        check=functools.partial(_check, resume=resume),
        is_finished=preflight.is_finished,
        find_changed=forbidden_changes,
        metrics=make_objective(resolved).metrics,
        training_context=training_context,
        callbacks=tuple(callbacks),
    )
    old_config = launch.earlier_config(resolved, resume)
    return Run(resolved, launch.start_run(kind, resolved, old_config, resume=resume, ray=ray, no_ray=no_ray))


def export(
    run: Any,
    folder: Path | str,
    *,
    checkpoint: str | None = None,
    averaged: bool = False,
    average: Sequence[Any] = (),
) -> SavedOutput:
    """Export a run's checkpoint in the Hugging Face layout, or in bertrain's if transformers has no fitting class.

    Args:
        run: a result of `train`, a run folder, the name of a run in runs/, or an address.
        folder: folder or address to write to.
        checkpoint: name of the checkpoint, or "best"; None for the latest.
        averaged: export the mean of the weights of the run's last steps (phases.N.averaged_share).
        average: other runs of the same model, such as forks of `run`; the mean of the weights of all runs is exported.

    Raises `InputError` if the run, the checkpoint or the corpus's tokenizer is missing, damaged or from another run.
    """
    from pretrain.checkpoint import hf
    from pretrain.storage.runs import StoredRun

    path, target = run_path(run), target_path(str(folder))
    run_address, out = display_path(path), local_path(target)
    if checkpoint and is_remote(run_address):
        stored = StoredRun(run_address, path)
        stored.download_checkpoints(stored.checkpoint_names())
    unsupported = hf.export_run(path, out, checkpoint, averaged=averaged, other_runs=[run_path(run) for run in average])
    if is_remote(target):
        for model in make_objective(config_of(path)).exported:
            store_target(f"{target}{model.suffix}")
    if unsupported:
        usage = f"written for bertrain's own commands. transformers cannot load it ({unsupported})."
    else:
        usage = f"written. transformers loads it with {hf.auto_class(out)}.from_pretrained."
    return SavedOutput(out, target, f"{target}: {usage}")


# ---------------------------------------------------------------- functions that a dry run also calls


def read_config(
    config: AnyConfig,
    overrides: Overrides = (),
    *,
    start_from: Any = None,
    fork_from: str | None = None,
    resume: bool = False,
    dry_run: bool = False,
) -> PretrainConfig:
    """Read the config, completed with the model and vocabulary of the checkpoint `start_from`, if any.

    With `resume`, the files of a run in an object store are fetched first, except for a `dry_run`.
    """
    settings = with_start(overrides, start_from) + as_overrides({"fork_from": fork_from} if fork_from else {})
    values = unvalidated_values(config, PretrainConfig, settings)
    if resume and not dry_run:
        launch.download(values.get("run_dir"))
    if values.get("start_from") or (resume and used_start_from(run_folder(values))):
        from pretrain.checkpoint.start import start_overrides

        settings += start_overrides(config, settings, resume=resume)
    return load_config(config, settings, imports=True)


def start_tokenizer_options(config: PretrainConfig) -> dict[str, Any]:
    """Return the options of `prepare.prepare` that `start_from` determines: its tokenizer and tokenizer_config.json."""
    if not config.start_from:
        return {}
    from pretrain.checkpoint.start import start_tokenizer
    from pretrain.checkpoint.tokenizer import tokenizer_folder
    from pretrain.corpus.special_tokens import declared_settings
    from pretrain.storage.runs import fetched_model

    model = fetched_model(config.start_from)
    return {"tokenizer": start_tokenizer(model), "tokenizer_config": declared_settings(tokenizer_folder(model))}


def fit_minutes(config: PretrainConfig, minutes: float, *, resume: bool, dry_run: bool = False) -> PretrainConfig:
    """Return the config with as many steps as this machine can do in `minutes`; a resumed run keeps its steps."""
    from pretrain.planning import pace
    from pretrain.planning.text import mean_lengths

    if config.fork_from:
        raise InputError("--minutes: changes the length of phases that a fork shares with its parent. Leave it out.")
    if resume and checkpoint_names(config.folder):
        return pace.with_recorded_schedule(config)
    preflight.check_corpus(config)
    if not dry_run:
        with preflight.checked_run_folder(config, None, forbidden_changes, resume=resume):
            pass  # raise errors before the measurement, not after it
    return pace.fit(config, minutes, mean_lengths(config))


def _describe_lengths(config: PretrainConfig) -> Iterator[str]:
    """Describe the mean sequence length of each phase, which determines the cost of a step."""
    from pretrain.planning.text import measured_phases

    # Text that is too short for the phases is prepared anyway; training on it raises the error.
    with contextlib.suppress(InputError):
        for index, text in enumerate(measured_phases(config)):
            longest = config.phases[index].sequence_length
            yield (
                f"phases.{index}: {text.samples_per_epoch:,} sequences in an epoch, {text.mean_length:.1f} tokens on "
                f"average (max {longest})"
            )


def _check(config: PretrainConfig, in_process: bool, *, resume: bool) -> int:
    """Check the run's inputs, print what it loads from `start_from`, and return its number of steps."""
    from pretrain.corpus.stored import fetch_corpus, is_streamed
    from pretrain.model.cost import check_names

    launch.check_callbacks_and_workers(config, in_process)
    check_names(config.model)
    fetch_corpus(config.corpus)
    if is_streamed(config.corpus):
        print(
            f"{config.corpus.dir}: streamed; at most {config.corpus.cache.human_readable(decimal=True)} are cached here"
        )
    loads_start = config.start_from and not (resume and used_start_from(config.folder))
    if loads_start:
        from pretrain.checkpoint.start import check_start_corpus, start_table

        check_start_corpus(config)
    preflight.check_corpus(config)
    if (objective := make_objective(config)).frozen_role:  # the objective also runs a frozen model
        from pretrain.checkpoint.start import read_frozen

        objective.check(read_frozen)
    probes.check(config)
    if loads_start:
        print(f"{config.start_from}:\n{textwrap.indent(start_table(config), '  ')}")
    return config.total_steps

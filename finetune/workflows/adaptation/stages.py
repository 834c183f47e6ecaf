"""Runs the stages of `adapt`: prepare, pretrain, export, report. The same command continues a stopped adaptation."""

from __future__ import annotations

import argparse
import contextlib
import math
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from finetune.workflows.adaptation.settings import (
    CONFIG_FILE,
    choose_steps,
    corpus_settings,
    run_settings,
    sequences_per_step,
    with_run_sequence_length,
    write_config,
)
from finetune.workflows.adaptation.texts import find_sources, held_out_share
from pretrain.common import settings
from pretrain.common.addresses import hub_hint
from pretrain.common.commands import program
from pretrain.common.errors import DivergedError, InputError, MachineError, StoppedError
from pretrain.common.files import check_outputs_differ, checkpoint_names
from pretrain.config import load_config
from pretrain.corpus.sources import find_inputs
from pretrain.reporting.gains import gain_lines
from pretrain.run import api as pretraining


def run(arguments: argparse.Namespace) -> None:
    """Run all stages; `arguments` come from the parser in `command`.

    Raises:
        InputError: a path is wrong, or a run of this command with the same --out had different options.
        RunError: a stage failed.
    """
    check_arguments(arguments)
    started = time.monotonic()
    try:
        Stages(arguments).run()
    except StoppedError as error:
        raise error.for_rerun() from None
    except KeyboardInterrupt:
        raise StoppedError(f"{arguments.out}: stopped.").for_rerun() from None
    except (MachineError, DivergedError):  # not after an InputError: the same command would fail again
        print(f"The adaptation stopped. Run the same command again to continue it in {arguments.out}.")
        raise
    _finish(arguments, started)


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise `InputError` for option values out of range and for unusable paths."""
    if arguments.minutes is not None and not 0 < arguments.minutes < math.inf:
        raise InputError(f"--minutes: {arguments.minutes:g}; expected a number above 0.")
    if not 0 <= arguments.replay < 1:
        raise InputError(f"--replay: {arguments.replay:g}; expected a number >= 0 and < 1.")
    if not arguments.start_from.is_dir():
        hint = hub_hint(arguments.start_from)
        raise InputError(f"--from: {arguments.start_from}: no such folder. Give the folder of a checkpoint.{hint}")
    outputs = [arguments.out / f"{name}.{suffix}" for name in ("corpus", "general") for suffix in ("jsonl", "yaml")]
    check_outputs_differ([*outputs, arguments.out / CONFIG_FILE], [*arguments.texts, *(arguments.general or ())])


class Stages:
    """The stages of an adaptation; each reads the files that earlier stages wrote."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._out: Path = arguments.out
        self._num_stages = 3 + bool(arguments.general)
        self._stage_number = 0

    def run(self) -> None:
        arguments, out = self._arguments, self._out
        corpus_config = self._write_corpus_config("corpus", arguments.texts, arguments.new_words)
        self._print_title("tokenizing the text")
        print(pretraining.prepare(corpus_config))
        if arguments.general:
            general_config = self._write_corpus_config("general", arguments.general, 0)
            self._print_title("tokenizing the general text")
            print(pretraining.prepare(general_config))
        run_config = self._write_run_config(corpus_config)
        self._print_title("training")
        run = pretraining.train(run_config, resume=True, no_ray=load_config(run_config).scheduling.workers == 1)
        self._print_title("export")
        print(pretraining.export(run, out / "model"))

    def _print_title(self, title: str) -> None:
        self._stage_number += 1
        print(f"\n[{self._stage_number}/{self._num_stages}] {title}", flush=True)

    def _write_corpus_config(self, name: str, paths: Sequence[Path], added_words: int) -> Path:
        """Write the config of a corpus of the files and folders `paths`, and return the path of the config."""
        sources = find_sources(paths, self._out / f"{name}.jsonl")
        files = (file for path in paths for file in ([path] if path.is_file() else path.rglob("*")))
        share = held_out_share(sum(file.stat().st_size for file in files))
        values = corpus_settings(name, self._out / name, self._arguments.start_from, sources, share)
        if added_words:
            values["corpus"]["vocabulary"] = {"added_words": added_words}
        overrides = [item for item in self._arguments.set if item.startswith("corpus.") and item[:10] != "corpus.dir"]
        config = with_run_sequence_length(pretraining.read_config(values, overrides))
        for index, source in enumerate(config.corpus.sources):
            find_inputs(source, f"--set corpus.sources.{index}")  # raises an error if a table lacks the text column
        config_path = self._out / f"{name}.yaml"
        write_config(config_path, config, started=(self._out / name).exists())
        return config_path

    def _write_run_config(self, corpus_config: Path) -> Path:
        """Write the config of the run, with batch size and steps for the prepared text, and return its path."""
        arguments, path = self._arguments, self._out / CONFIG_FILE
        corpus = settings.read_values(corpus_config)["corpus"]
        corpus["vocabulary"] = {"added_words": arguments.new_words}
        model = load_config(corpus_config).model
        one_step_config = pretraining.read_config(run_settings(arguments, corpus, model, 1), arguments.set)
        sequences = sequences_per_step(one_step_config)
        started = path.is_file() and bool(checkpoint_names(self._out / "run"))  # otherwise the config may change
        if started and not arguments.steps:
            steps = load_config(path).total_steps
        else:
            values = run_settings(arguments, corpus, model, 1, sequences)
            steps = choose_steps(pretraining.read_config(values, arguments.set), arguments)
        values = run_settings(arguments, corpus, model, steps, sequences)
        write_config(path, pretraining.read_config(values, arguments.set), started=started)
        return path


def _finish(arguments: argparse.Namespace, started: float) -> None:
    """Write the report; print its summary, the changes of the held-out metrics, and the next command."""
    from pretrain.reporting import report

    out: Path = arguments.out
    with contextlib.suppress(OSError):  # without symbolic links, the report shows no predictions
        (out / "run" / "export").symlink_to(Path("..") / "model")
    page = report.write_report([out / "run"], out / "run" / "report.html")
    print(f"\n{report.summary([out / 'run'])}")
    print("\n".join(["\nChanges since the initial checkpoint", *(f"  {line}" for line in gain_lines(out / "run"))]))
    if not arguments.general:
        print("  Forgetting was not measured. To measure it, give general text with --general.")
    print(f"\nAll stages took {time.monotonic() - started:.0f} s. Curves and scores: {page.resolve().as_uri()}")
    next_command = shlex.join(["finetune", "CONFIG", "--from", str(out / "model")])
    print(f"{out / 'model'}: finished. Next: {program()} {next_command}")

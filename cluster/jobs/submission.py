"""Makes jobs from configs. All checks that this machine can make precede the submission to a cluster."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cluster.jobs.client import Job
from pretrain.common.commands import Parser, add_config, program
from pretrain.common.errors import InputError
from pretrain.common.settings import AnyConfig, Overrides, as_overrides, unvalidated_values, with_start
from pretrain.config import PretrainConfig

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
# The functions that a job can run, with the console command of each.
_COMMANDS = {"pretrain.train": "pretrain", "pretrain.prepare": "prepare", "finetune.train": "finetune"}


def make_job(
    function: Callable[..., Any],
    config: AnyConfig,
    *,
    overrides: Overrides = (),
    start_from: Any = None,
    workers: int | str | None = None,
    folder: Path | str | None = None,
) -> Job:
    """Make a job that runs a config.

    Args:
        function: `pretrain.train`, `pretrain.prepare` or `finetune.train`; its module reads the config.
        config, overrides, start_from: see `pretrain.train`.
        workers: number of worker processes, or an elastic range such as "2-4".
        folder: working directory of the job, shared by the cluster's machines; None for the current one.

    Raises `InputError` for mistakes that would end the run before its first step, as far as this machine can find them.
    """
    module = getattr(function, "__module__", "")
    command = _COMMANDS.get(f"{module.partition('.')[0]}.{getattr(function, '__name__', '')}")
    if command is None:
        raise InputError(f"submit: {function!r} cannot be a job. Pass one of the functions {', '.join(_COMMANDS)}.")
    is_training = command != "prepare"
    worker_overrides = [] if workers is None else _worker_overrides(str(workers))
    settings = with_start([*as_overrides(overrides), *worker_overrides], start_from)
    loaded = sys.modules[module].load_config(config, settings, imports=True)  # the checkpoint is read on the cluster
    values = loaded.model_dump(mode="json")
    if isinstance(loaded, PretrainConfig) and loaded.start_from:
        values |= _explicit_sections(config, settings, values)
    if is_training:
        loaded.tracking.check_names()
        values["tracking"]["run_id"] = loaded.tracking.run_id or loaded.name
    scheduling = loaded.scheduling
    return Job(
        kind=command,
        resumes=is_training,
        name=loaded.name if is_training else f"{command}-{loaded.name}"[:63],
        config=values,
        run_dir=loaded.address or str(loaded.folder),
        folder=Path(folder or Path.cwd()).absolute(),
        workers=(scheduling.min_workers or scheduling.workers, scheduling.workers),
        cpus_per_worker=scheduling.cpus_per_worker,
    )


def parse_run(arguments: Sequence[str]) -> tuple[str, Path, dict[str, Any]]:
    """Parse `COMMAND CONFIG [--set KEY=VALUE]... [--from DIR]` into (command, config, options of `make_job`)."""
    parser = Parser(prog=f"{program()} submit", allow_abbrev=False)
    parser.add_argument("kind", choices=tuple(_COMMANDS.values()), metavar="COMMAND")
    add_config(parser, "checkpoint to start from")
    options, unknown = argparse.ArgumentParser.parse_known_args(parser, list(arguments))
    if unknown:
        raise InputError(
            f"submit: unrecognized after `--`: {' '.join(unknown)}. Options of submit, such as --workers, go before "
            "it. Jobs always resume, so --resume is not needed."
        )
    return options.kind, options.config, {"overrides": options.set, "start_from": options.start_from}


def _explicit_sections(config: AnyConfig, overrides: Overrides, values: dict[str, Any]) -> dict[str, Any]:
    """Return `model`, and `corpus` with its `vocabulary`, both without defaults, which the checkpoint provides."""
    explicit = unvalidated_values(config, PretrainConfig, overrides)
    vocabulary = explicit.get("corpus", {}).get("vocabulary", {})
    return {"model": explicit.get("model", {}), "corpus": {**values["corpus"], "vocabulary": vocabulary}}


def _worker_overrides(workers: str) -> list[str]:
    match = _RANGE.fullmatch(workers)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise InputError(f"--workers: {workers!r}; expected an integer >= 1 or a range such as 2-4.")
    return [f"scheduling.workers={high}", f"scheduling.min_workers={low if low < high else 0}"]

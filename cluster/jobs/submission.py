"""What a user types after `submit --`, read and checked here, before anything is sent."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.jobs.client import KINDS, Job
from pretrain.common.commands import local_path, run_argument
from pretrain.common.errors import InputError

if TYPE_CHECKING:
    from pretrain.config import RunConfig

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def read_job(arguments: Sequence[str], *, folder: Path, workers: str | None) -> Job:
    """The job of `pretrain|finetune|prepare CONFIG [--set KEY=VALUE]... [--from DIR]`.

    Raises `InputError` for any mistake that would end the run before its first step and is visible from here.
    """
    options, unknown = _parser().parse_known_args(list(arguments))
    if unknown:
        raise InputError(
            f"submit: unrecognized after `--`: {' '.join(unknown)}. Options of submit, such as --workers, go before "
            "it; a job resumes without --resume."
        )
    overrides = list(options.set)
    if workers is not None:
        overrides += _workers(workers)
    config = _load(options, overrides)
    name = config.name if options.kind != "prepare" else f"prepare-{config.name}"[:63]
    values = config.model_dump(mode="json")
    if options.kind != "finetune" and values["start_from"]:
        values |= _undecided(options.config, overrides, values)
    if options.kind != "prepare":
        config.tracking.check_names()
        values["tracking"]["run_id"] = config.tracking.run_id or config.name
    scheduling = config.scheduling
    return Job(
        options.kind,
        name,
        values,
        config.address or str(config.folder),
        folder.absolute(),
        (scheduling.min_workers or scheduling.workers, scheduling.workers),
        scheduling.cpus_per_worker,
    )


def _undecided(path: Path, overrides: list[str], values: dict[str, Any]) -> dict[str, Any]:
    """The sections that a checkpoint on the cluster decides, only as they are given: defaults would contradict it."""
    from pretrain.common.settings import given_values
    from pretrain.config import PretrainConfig

    given = given_values(path, PretrainConfig, overrides)
    vocabulary = given.get("corpus", {}).get("vocabulary", {})
    return {"model": given.get("model", {}), "corpus": {**values["corpus"], "vocabulary": vocabulary}}


def _load(options: argparse.Namespace, overrides: list[str]) -> RunConfig:
    if options.kind == "finetune":
        from finetune.training.config import load_config as load

        if options.start_from:
            overrides.append(f"start_from={json.dumps(str(options.start_from))}")
        return load(options.config, overrides)
    from pretrain.config import load_config

    if options.start_from:
        overrides.append(f"start_from={json.dumps(str(options.start_from))}")
    return load_config(options.config, overrides)


def _workers(text: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise InputError(f"--workers: is {text!r}; expected a number of at least 1, or a range such as 2-4.")
    return [f"scheduling.workers={high}", f"scheduling.min_workers={low if low < high else 0}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="submit --", allow_abbrev=False)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("config", type=local_path, metavar="CONFIG")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--from", dest="start_from", type=run_argument, metavar="DIR")
    return parser

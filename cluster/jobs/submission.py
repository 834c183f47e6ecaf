"""What a user types after `submit --`, read and checked here, before anything is sent."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.jobs.client import Job
from pretrain.common.commands import config_argument, run_argument
from pretrain.common.errors import InputError
from pretrain.config import PretrainConfig, RunConfig


@dataclass(frozen=True)
class Kind:
    """What a job can run."""

    load: Callable[[Path, Sequence[str]], RunConfig]  # reads its config, with overrides
    module: str  # the command line that runs it, which the cluster imports
    trains: bool = True


_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def read_job(arguments: Sequence[str], kinds: Mapping[str, Kind], *, folder: Path, workers: str | None) -> Job:
    """The job of `KIND CONFIG [--set KEY=VALUE]... [--from DIR]`, with one of `kinds`.

    Raises `InputError` for any mistake that would end the run before its first step and is visible from here.
    """
    options, unknown = _parser(tuple(kinds)).parse_known_args(list(arguments))
    if unknown:
        raise InputError(
            f"submit: unrecognized after `--`: {' '.join(unknown)}. Options of submit, such as --workers, go before "
            "it; a job resumes without --resume."
        )
    overrides = list(options.set)
    if workers is not None:
        overrides += _workers(workers)
    if options.start_from:
        overrides.append(f"start_from={json.dumps(str(options.start_from))}")
    kind = kinds[options.kind]
    config = kind.load(options.config, overrides)
    name = config.name if kind.trains else f"{options.kind}-{config.name}"[:63]
    values = config.model_dump(mode="json")
    if isinstance(config, PretrainConfig) and config.start_from:
        values |= _undecided(options.config, overrides, values)
    if kind.trains:
        config.tracking.check_names()
        values["tracking"]["run_id"] = config.tracking.run_id or config.name
    scheduling = config.scheduling
    return Job(
        options.kind,
        kind.module,
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

    given = given_values(path, PretrainConfig, overrides)
    vocabulary = given.get("corpus", {}).get("vocabulary", {})
    return {"model": given.get("model", {}), "corpus": {**values["corpus"], "vocabulary": vocabulary}}


def _workers(text: str) -> list[str]:
    match = _RANGE.fullmatch(text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise InputError(f"--workers: is {text!r}; expected a number of at least 1, or a range such as 2-4.")
    return [f"scheduling.workers={high}", f"scheduling.min_workers={low if low < high else 0}"]


def _parser(kinds: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="submit --", allow_abbrev=False)
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("config", type=config_argument, metavar="CONFIG")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--from", dest="start_from", type=run_argument, metavar="DIR")
    return parser

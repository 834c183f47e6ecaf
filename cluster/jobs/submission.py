"""A job made of a config and sent to a cluster, checked here before anything is sent."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.jobs import client
from cluster.jobs.client import Job, Jobs
from pretrain.common.commands import config_argument, run_argument
from pretrain.common.errors import InputError
from pretrain.common.kinds import not_one_of
from pretrain.common.settings import AnyConfig, Overrides, as_overrides, given_values, with_start
from pretrain.config import PretrainConfig, RunConfig

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


@dataclass(frozen=True)
class Kind:
    """What a job can run."""

    load: Callable[[AnyConfig, Overrides], RunConfig]  # reads its config, with overrides
    target: str  # "package.module:function", called on the cluster with the config
    trains: bool = True  # and takes `resume`


@dataclass(frozen=True, repr=False)
class SubmittedJob:
    """A job on a cluster, by the name of its run."""

    name: str
    jobs: Jobs

    def state(self) -> str:
        """Such as "running", or why it ended."""
        return client.state(self.jobs.get(self.name))

    def log(self) -> str:
        """All that it has printed."""
        return self.jobs.log(self.name)

    def stop(self) -> str:
        """Let it save a checkpoint and stop, and wait for it; returns its state."""
        return client.state(self.jobs.stop(self.name))

    def __repr__(self) -> str:
        return f"{self.name}: submitted to {self.jobs.shown}."


def submit(
    command: str,
    config: AnyConfig,
    kinds: Mapping[str, Kind],
    *,
    overrides: Overrides = (),
    start_from: Any = None,
    workers: int | str | None = None,
    folder: Path | str | None = None,
    address: str = "",
    wait_for_nodes: bool = False,
    plain_http: bool = False,
) -> SubmittedJob:
    """Run a config as a job on a cluster, or continue its run there; it outlives this process.

    Args:
        command: one of `kinds`: pretrain, finetune or prepare.
        config: a YAML file, the name of an example, nested values or a config object.
        kinds: what a job can run, by name.
        overrides: settings by dotted key, or texts `key.path=value`.
        start_from: checkpoint to start from, as for `pretrain.train`; overrides that of the config.
        workers: number of worker processes, or an elastic range such as "2-4".
        folder: working directory of the job, shared by the cluster's machines; None for the current one.
        address: dashboard URL of the cluster; empty for the one that `up` started here.
        wait_for_nodes: submit even if the cluster is too small now; an autoscaler will add nodes.
        plain_http: send the token over http to other machines, too.

    Raises:
        InputError: any mistake that would end the run before its first step and is visible from here; it runs already.
        MachineError: nothing answers at the address, or the cluster is too small.
    """
    job = make_job(command, config, kinds, overrides=overrides, start_from=start_from, folder=folder, workers=workers)
    jobs = Jobs(address, plain_http=plain_http)
    if jobs.is_open():
        print(
            f"warning: {jobs.shown}: this cluster accepts jobs without a token, so anyone who can connect to it can "
            "run code there. Restart its Ray with RAY_AUTH_MODE=token; see SECURITY.md.",
            file=sys.stderr,
        )
    jobs.submit(job, wait_for_nodes=wait_for_nodes)
    return SubmittedJob(job.name, jobs)


def make_job(
    command: str,
    config: AnyConfig,
    kinds: Mapping[str, Kind],
    *,
    overrides: Overrides = (),
    start_from: Any = None,
    folder: Path | str | None = None,
    workers: int | str | None = None,
) -> Job:
    """The job that `submit` sends, which see."""
    if command not in kinds:
        raise InputError(f"submit: {not_one_of(command, kinds)}")
    kind = kinds[command]
    given = with_start([*as_overrides(overrides), *([] if workers is None else _workers(str(workers)))], start_from)
    read = kind.load(config, given)
    values = read.model_dump(mode="json")
    if isinstance(read, PretrainConfig) and read.start_from:
        values |= _undecided(config, given, values)
    if kind.trains:
        read.tracking.check_names()
        values["tracking"]["run_id"] = read.tracking.run_id or read.name
    scheduling = read.scheduling
    return Job(
        kind=command,
        target=kind.target,
        resumes=kind.trains,
        name=read.name if kind.trains else f"{command}-{read.name}"[:63],
        config=values,
        run_dir=read.address or str(read.folder),
        folder=Path(folder or Path.cwd()).absolute(),
        workers=(scheduling.min_workers or scheduling.workers, scheduling.workers),
        cpus_per_worker=scheduling.cpus_per_worker,
    )


def read_words(words: Sequence[str], kinds: Mapping[str, Kind]) -> tuple[str, Path, list[str], Path | str | None]:
    """(command, config, overrides, start_from) of `COMMAND CONFIG [--set KEY=VALUE]... [--from DIR]`."""
    options, unknown = _parser(tuple(kinds)).parse_known_args(list(words))
    if unknown:
        raise InputError(
            f"submit: unrecognized after `--`: {' '.join(unknown)}. Options of submit, such as --workers, go before "
            "it; a job resumes without --resume."
        )
    return options.kind, options.config, options.set, options.start_from


def _undecided(config: AnyConfig, overrides: Overrides, values: dict[str, Any]) -> dict[str, Any]:
    """The sections that a checkpoint on the cluster decides, only as they are given: defaults would contradict it."""
    given = given_values(config, PretrainConfig, overrides)
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

"""Reads the runs of a report: pretraining and fine-tuning runs, recognized by the files in their folders."""

import dataclasses
import datetime
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.files import find_run
from pretrain.common.records import is_training, read_records
from pretrain.common.run_files import CONFIG_FILE, ENVIRONMENT_FILE, FAILED, METRICS, PROBES, SCORES
from pretrain.common.settings import read_values
from pretrain.reporting.panels import panels_for
from pretrain.reporting.subjects import Subject, subject_of

FindJobFolder = Callable[..., "Path | None"]  # signature of `cluster.jobs.client.run_folder`

UNFINISHED = "not finished"
_END_STATES = {"stop": "stopped", "diverged": "diverged"}  # {event that ended a run: state of the run}

_MAX_DEPTH = 3  # number of folder levels searched for runs; in the folder that contains glue/, TASK/seed-N is level 3


@dataclass(frozen=True)
class Score:
    """A fine-tuning's scores on one held-out set; if the run failed, `values` is empty and `error` has the reason."""

    split: str
    metric: str  # the main metric
    values: dict[str, float]
    error: str = ""
    positive: str = ""  # the class whose F1 is computed, if there are two classes


@dataclass(frozen=True)
class RunRecords:
    """The records of one run folder. `label` distinguishes it from a report's other runs."""

    folder: Path
    label: str
    config: dict[str, Any]
    training: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    probes: list[dict[str, Any]]
    events: list[dict[str, Any]]
    scores: list[Score]

    @property
    def name(self) -> str:
        """The run's name, or its folder's."""
        return str(self.config.get("name") or self.folder.resolve().name)

    @property
    def subject(self) -> Subject | None:
        """Data, initial checkpoint and settings of a fine-tuning; None for other runs."""
        return subject_of(self.config)

    @property
    def main_metric(self) -> str:
        """A fine-tuning's main metric; before it has scores, the first metric of its evaluations; "" without any."""
        names = [metric for panel in panels_for(self.evaluations) if panel.kind == "scores" for metric in panel.metrics]
        return next((name for name in (*(score.metric for score in self.scores), *names) if name in names), "")

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of training, then of evaluations, then of probes."""
        return [*self.training, *self.evaluations, *self.probes]

    @property
    def step(self) -> int:
        """The last recorded training step; 0 before the first."""
        return self.training[-1]["step"] if self.training else 0

    @property
    def total_steps(self) -> int | None:
        """The planned number of steps; None for an unfinished fine-tuning, whose config does not contain it."""
        phases = self.config.get("phases")
        if phases:
            return sum(int(phase["steps"]) for phase in phases)
        return self.step if any(score.values for score in self.scores) else None

    @property
    def state(self) -> str:
        """The state: "finished", "diverged", "stopped", or `UNFINISHED` if the run is training or was killed."""
        if (self.folder / FAILED).is_file():
            return "diverged"
        if self.total_steps is not None and self.step >= self.total_steps:
            return "finished"
        return _END_STATES.get(self.stop_event.get("event", ""), UNFINISHED)

    @property
    def stop_event(self) -> dict[str, Any]:
        """The event that stopped the run early; {} if there is none, or the run was started again."""
        last = next((event for event in reversed(self.events) if event["event"] in _END_STATES), {})
        return last if last.get("time", math.inf) >= _last_start(self.folder) else {}

    def values(self, field: str) -> list[float]:
        """Return the values of a field in the training records that have it."""
        return [record[field] for record in self.training if record.get(field) is not None]


def find_folder(name: str, address: str = "", find_job_folder: FindJobFolder = lambda *_: None) -> Path:
    """Find the folder `name`, runs/`name`, or the run folder of the job `name` on this machine's cluster.

    Args:
        name: a folder, a run's name or a job's name.
        address: URL of a cluster's dashboard; `name` is then a job of that cluster.
        find_job_folder: returns the run folder of a job, given its name and `address`; None if there is no such job.

    Raises:
        InputError: there is no such run, or its folder is not accessible from this machine.
    """
    if not address:
        folder = find_run(name)
        if folder.is_dir():
            return folder
    folder = find_job_folder(name, address)
    if folder is None:
        raise InputError(
            f"{name}: not a folder, and runs/{name} is not a folder either. Give a run folder or the name of a run."
        )
    if not folder.is_dir():
        raise InputError(
            f"{name}: its run folder {folder} is not on this machine. Run this command where the folder is."
        )
    return folder


def read_runs(folders: Sequence[Path]) -> list[RunRecords]:
    """Read the run in each folder or, if it has none, all runs below it, in the order of their paths.

    Raises `InputError` if a folder has no run, none of its runs has a record, or a file is damaged.
    """
    by_path: dict[str, RunRecords] = {}
    for folder in folders:
        paths = [folder] if (folder / METRICS).is_file() else _run_folders_below(folder)
        if not paths:
            raise InputError(f"{folder}: no {METRICS} in this folder or below it. Give a run folder.")
        runs = [_read_run(path) for path in paths]
        if not any(run.training or run.evaluations for run in runs):
            raise InputError(f"{folder}: no record yet. Wait for the first one, or start the training.")
        by_path |= {str(run.folder.resolve()): run for run in runs if run.records or run.scores}
    if len(by_path) == 1:
        return list(by_path.values())
    common_path = os.path.commonpath(by_path)
    return [dataclasses.replace(run, label=os.path.relpath(path, common_path)) for path, run in by_path.items()]


def _run_folders_below(folder: Path) -> list[Path]:
    folders = {
        path.parent
        for depth in range(_MAX_DEPTH)
        for name in (METRICS, SCORES, FAILED)
        for path in folder.glob("*/" * depth + name)
    }
    return sorted(folders)


def _read_run(folder: Path) -> RunRecords:
    records = read_records(folder)
    return RunRecords(
        folder,
        folder.resolve().name,
        _read_config(folder / CONFIG_FILE),
        _without_undone([record for record in records if is_training(record)]),
        _without_undone([record for record in records if record.get("split") == "validation"]),
        _without_undone(read_records(folder, PROBES)),
        [record for record in records if "event" in record and isinstance(record.get("step"), int)],
        [score for name in (SCORES, FAILED) for score in _read_scores(folder / name)],
    )


def _without_undone(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop records that a rollback has undone: their steps occur again later."""
    remaining: list[dict[str, Any]] = []
    for record in records:
        if not isinstance(record.get("step"), int):
            continue
        while remaining and remaining[-1]["step"] >= record["step"]:
            remaining.pop()
        remaining.append(record)
    return remaining


def _read_config(path: Path) -> dict[str, Any]:
    """Read the run's config; {} if it has none. Checks only the phases' fields that every report uses."""
    if not path.exists():
        return {}
    config = read_values(path)
    phases = config.get("phases") or []
    if not isinstance(phases, list) or not all(map(_is_phase, phases)):
        raise InputError(f"{path}: phases must be a list of sections with steps and sequence_length. Restore the file.")
    return config


def _last_start(folder: Path) -> float:
    """Return the time of the last start of the run, in seconds since 1970; 0 if unknown."""
    try:
        environment = json.loads((folder / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
        return datetime.datetime.fromisoformat(environment["started"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0.0


def _is_phase(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), int) for key in ("steps", "sequence_length"))


def _read_scores(path: Path) -> Iterator[Score]:
    if not path.is_file():
        return
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if path.name == FAILED:
            yield Score("", "", {}, str(content["message"]))
        elif "models" not in content:  # a scores.json of evaluate-pretrained has "models"
            for split, values in content["scores"].items():
                details = content["details"].get(split, {})
                yield Score(split, content["metric"], values, positive=details.get("positive", ""))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path}: damaged ({error!r}). Restore it, or remove it and run the same command again."
        ) from None

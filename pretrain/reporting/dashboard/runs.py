"""Reads the data of a dashboard: one run folder, or a folder of several runs.

Run folders of pretraining and of fine-tuning are recognized by the files in them.
"""

import datetime
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pretrain.common.errors import InputError
from pretrain.common.files import find_run
from pretrain.common.records import is_training, read_records
from pretrain.common.run_files import FAILED, METRICS, PROBES, SCORES
from pretrain.common.settings import read_values
from pretrain.reporting.dashboard.panels import panels_for
from pretrain.reporting.dashboard.subjects import Subject, subject

UNFINISHED = "not finished"
_ENDS = {"stop": "stopped", "diverged": "diverged"}  # event that ends a run -> its state

_DEPTH = 3  # levels of run folders below a folder of several runs, such as glue/TASK/seed-N


@dataclass(frozen=True)
class RunRecords:
    """The records of one run folder. `label` distinguishes it from the other runs of a dashboard."""

    folder: Path
    label: str
    config: dict[str, Any]
    training: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    probes: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """The run's name, or its folder's."""
        return str(self.config.get("name") or self.folder.resolve().name)

    @property
    def subject(self) -> Subject | None:
        """What a fine-tuning was trained on; None for other runs."""
        return subject(self.config)

    @property
    def score(self) -> str:
        """The main metric of a fine-tuning; until the run ends, the first metric of its evaluations; "" without any."""
        names = [metric for panel in panels_for(self.evaluations) if panel.kind == "scores" for metric in panel.metrics]
        path = self.folder / SCORES
        main = [score.metric for score in _read_scores(path, self.folder)] if path.is_file() else []
        return next((name for name in (*main, *names) if name in names), "")

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of training, then those of evaluations and of probes."""
        return [*self.training, *self.evaluations, *self.probes]

    @property
    def step(self) -> int:
        """The last recorded training step; 0 before the first."""
        return self.training[-1]["step"] if self.training else 0

    @property
    def total_steps(self) -> int | None:
        """The planned number of steps; None for an unfinished fine-tuning, where it depends on the training set."""
        phases = self.config.get("phases")
        if phases:
            return sum(int(phase["steps"]) for phase in phases)
        return self.step if (self.folder / SCORES).is_file() else None

    @property
    def state(self) -> str:
        """ "finished", "diverged", "stopped" or `UNFINISHED`, which a run is that trains or was killed."""
        if (self.folder / FAILED).is_file():
            return "diverged"
        if self.total_steps is not None and self.step >= self.total_steps:
            return "finished"
        ends = [event for event in self.events if event["event"] in _ENDS]
        if not ends or ends[-1]["step"] < self.step or ends[-1].get("time", math.inf) < _last_start(self.folder):
            return UNFINISHED
        return _ENDS[ends[-1]["event"]]

    @property
    def updated(self) -> float:
        """When the last record was written, in seconds since 1970."""
        return (self.folder / METRICS).stat().st_mtime


@dataclass(frozen=True)
class Score:
    """The scores of one fine-tuning on one held-out set; `values` is empty if the run failed."""

    label: str
    part: str
    metric: str  # the main metric
    values: dict[str, float]
    step: int | None
    subject: Subject | None
    remark: str = ""


def no_job(name: str, address: str) -> Path | None:
    """Finds no job's run folder."""
    return None


def find_folder(name: str, address: str = "", find_job: Callable[[str, str], Path | None] = no_job) -> Path:
    """The folder `name`, or runs/`name`, or the run folder of the job `name` on the cluster that runs on this machine.

    Args:
        name: folder, run or job.
        address: URL of a cluster's dashboard; `name` is then a job of that cluster.
        find_job: as `write_dashboard`.

    Raises:
        InputError: there is no such run, or its folder is not accessible from this machine.
    """
    if not address:
        folder = find_run(name)
        if folder.is_dir():
            return folder
    folder = find_job(name, address)
    if folder is None:
        raise InputError(
            f"{name}: not a folder, and runs/{name} is not a folder either. Give a run folder or the name of a run."
        )
    if not folder.is_dir():
        raise InputError(
            f"{name}: its run folder {folder} is not on this machine. Run this command where the folder is."
        )
    return folder


def read_runs(folder: Path) -> list[RunRecords]:
    """The run in `folder`, or else the runs below it in the order of their paths.

    Raises `InputError` if there is no run, no run has a record yet, or a metrics.jsonl is damaged.
    """
    paths = [folder / METRICS] if (folder / METRICS).is_file() else _below(folder, METRICS)
    if not paths:
        raise InputError(f"{folder}: no {METRICS} in this folder or below it. Give a run folder.")
    runs = [_read_run(path.parent, folder) for path in paths]
    runs = [run for run in runs if run.training or run.evaluations]
    if not runs:
        raise InputError(f"{paths[0]}: no record yet. Wait for the first one, or start the training.")
    return runs


def read_scores(folder: Path) -> list[Score]:
    """The scores of every fine-tuning in or below `folder`, in the order of their paths."""
    paths = [path for name in (SCORES, FAILED) for path in _below(folder, name)]
    return [score for path in sorted(paths) for score in _read_scores(path, folder)]


def _below(folder: Path, name: str) -> list[Path]:
    return sorted(path for depth in range(_DEPTH) for path in folder.glob("*/" * depth + name))


def _read_run(folder: Path, top: Path) -> RunRecords:
    records = read_records(folder)
    return RunRecords(
        folder,
        _label(folder, top),
        _read_config(folder / "config.yaml"),
        _ascending([record for record in records if is_training(record)]),
        _ascending([record for record in records if record.get("split") == "validation"]),
        _ascending(read_records(folder, PROBES)),
        [record for record in records if "event" in record and isinstance(record.get("step"), int)],
    )


def _label(folder: Path, top: Path) -> str:
    return folder.name if folder == top else folder.relative_to(top).as_posix()


def _ascending(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without those that a rollback undid: their steps occur again later."""
    kept: list[dict[str, Any]] = []
    for record in records:
        if not isinstance(record.get("step"), int):
            continue
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    return kept


def _read_config(path: Path) -> dict[str, Any]:
    """The run's config; {} without one. Only the fields of the phases that the dashboard uses are checked."""
    if not path.exists():
        return {}
    config = read_values(path)
    phases = config.get("phases") or []
    if not isinstance(phases, list) or not all(map(_is_phase, phases)):
        raise InputError(f"{path}: phases must be a list of sections with steps and sequence_length. Restore the file.")
    return config


def _last_start(folder: Path) -> float:
    """When the last start of the run began, in seconds since 1970; 0 if that is unknown."""
    try:
        environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
        return datetime.datetime.fromisoformat(environment["started"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0.0


def _is_phase(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), int) for key in ("steps", "sequence_length"))


def _read_scores(path: Path, top: Path) -> Iterator[Score]:
    label, trained_on = _label(path.parent, top), subject(_read_config(path.parent / "config.yaml"))
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if path.name == FAILED:
            yield Score(label, "", "", {}, None, trained_on, str(content["message"]))
            return
        if "models" in content:  # a scores.json of evaluate-pretrained
            return
        for part, values in content["scores"].items():
            yield Score(label, part, content["metric"], values, content.get("step"), trained_on)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InputError(
            f"{path}: damaged ({error!r}). Restore it, or remove it and run the same command again."
        ) from None

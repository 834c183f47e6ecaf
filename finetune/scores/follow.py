"""Scores of a run's checkpoints while it trains: `evaluate-pretrained RUN --follow`.

A due checkpoint is exported, the export is scored as any model, and the scores become a line of the run's probes.jsonl.
What was not finished when the process ended is continued by the next one. `pretrain.run.probes` starts such a process
with a run.
"""

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from finetune.scores import blimp, common_words, finetuning, held_out, positions, whole_words
from finetune.scores.finetuning_runs import FINETUNED
from finetune.scores.record import MODELS, Record, read_record
from pretrain.checkpoint import hf, store
from pretrain.common.errors import InputError, RunError
from pretrain.common.files import append_open, checkpoint_names, disk_errors, locked
from pretrain.common.records import read_records
from pretrain.common.run_files import CONFIG_FILE, PROBES

Measure = Callable[..., tuple[Record, RunError | None]]  # called with the model, the folder `out` and a name

_FOLDER = "probes"  # of a run: what is kept between checkpoints
_CHECKPOINTS = "checkpoints"
_POLL_SECONDS, _WATCH_SECONDS = 2.0, 0.5
# Part of a record -> the figure that stands for it.
_FIELDS = {common_words.PART: "bits", whole_words.PART: "lower", held_out.PART: "nats_per_token", blimp.PART: "overall"}

logger = logging.getLogger(__name__)


def follow(run: Path, measure: Measure, pid: int | None = None) -> None:
    """Score the newest due checkpoint again and again, until the run's last one is scored; `pid` as `end_with`.

    Raises:
        InputError: `run` is not the folder of a pretraining, another process follows it (with `pid`, it is waited for),
            or its probes.jsonl is damaged.
        MachineError: the disk is full.
    """
    if pid is not None:
        end_with(pid)
    if not (run / CONFIG_FILE).is_file():
        raise InputError(f"--follow: {run} is not a run folder (no {CONFIG_FILE}). Give one.")
    refusal = f"--follow: {run}: another process scores the checkpoints of this run. Wait for it, or end it."
    with locked(run / _FOLDER / ".lock", "" if pid is not None else refusal):
        _follow(run, measure)


def _follow(run: Path, measure: Measure) -> None:
    while True:
        name, done = next(reversed(checkpoint_names(run)), ""), _scored(run)
        state = _state(run, name) if name else {}
        if not state:
            time.sleep(_POLL_SECONDS)
            continue
        newest, config = store.step_of(run / name), state["config"]
        every = config["evaluation"].get("probes", {"every_steps": 1000})["every_steps"]  # runs of earlier versions
        is_last = newest >= sum(phase["steps"] for phase in config["phases"])
        due = newest // every - done // every
        if newest > done and (due or is_last):
            _score(run, newest, state, max(0, due - 1), measure)
        elif is_last:
            return
        else:
            time.sleep(_POLL_SECONDS)


def end_with(pid: int) -> None:
    """End this process as soon as the process `pid` is gone, whatever this one does then."""

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(_WATCH_SECONDS)
        os._exit(0)

    threading.Thread(target=watch, name="pid", daemon=True).start()


def _state(run: Path, name: str) -> dict[str, Any]:
    """The state of a checkpoint; {} if it was removed meanwhile."""
    try:
        return store.read_state(run / _CHECKPOINTS / name)
    except (RunError, OSError):
        if (run / _CHECKPOINTS / name).is_dir():
            raise
        return {}


def _scored(run: Path) -> int:
    """The last step whose checkpoint was scored, or could not be; 0 if there is none."""
    return max((record["step"] for record in read_records(run, PROBES)), default=0)


def _score(run: Path, step: int, state: Mapping[str, Any], passed_over: int, measure: Measure) -> None:
    """Score the checkpoint of a step and record it; nothing if it was removed meanwhile."""
    name, out, averaged = store.name_of(step), run / _FOLDER, state.get("averaged") or 0
    model, began = out / "model", time.time()
    try:
        shutil.rmtree(model, ignore_errors=True)
        hf.export_run(run, model, name, averaged=averaged > 0)
        _, failure = measure(model=model, out=out, name=name)
    except Exception as error:
        failure = error
        if not (run / _CHECKPOINTS / name).is_dir():
            logger.warning("%s was removed before it could be scored", name)
            return
        if not isinstance(error, RunError):
            logger.exception("%s", name)
    path = out / MODELS / f"{name}.json"
    record = {
        "split": "probe",
        "step": step,
        "time": time.time(),
        "seconds": time.time() - began,
        "averaged": averaged,
        "passed_over": passed_over,
        **(flat(read_record(path)) if path.is_file() else {}),
    }
    if failure is not None:
        record["error"] = f"{type(failure).__name__}: {' '.join(str(failure).split())}"
    line = json.dumps(record)
    with disk_errors(run / PROBES), append_open(run / PROBES) as file:
        file.write(f"{line}\n".encode())
    print(line, flush=True)
    for folder in (model, out / FINETUNED):
        shutil.rmtree(folder, ignore_errors=True)


def flat(content: Mapping[str, Any]) -> dict[str, float]:
    """The scores in a record by the names that they have in probes.jsonl (`pretrain.tracking.events`)."""
    return dict(_flat({part: one["scores"] for part, one in content.items() if "scores" in one}))


def _flat(scores: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    fields = {
        common_words.PART: "bits",
        whole_words.PART: "lower",
        held_out.PART: "nats_per_token",
        blimp.PART: "overall",
    }
    for part, field in fields.items():
        if field in scores.get(part, {}):
            yield part, scores[part][field]
    for name, nats in scores.get(positions.PART, {}).get("nats", {}).items():
        yield f"{positions.PART}/{name}", nats
    for name, one in scores.get(finetuning.PART, {}).items():
        if "pretrained_mean" in one:
            yield f"{finetuning.PART}/{name}", one["pretrained_mean"]

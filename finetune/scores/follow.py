"""Scores of a run's checkpoints as they come: `evaluate-pretrained RUN --follow`, which `pretrain.run.probes` starts.

A due checkpoint is exported, the export is scored as any model, and the scores become a line of the run's probes.jsonl.
What was not finished when the process ended is continued by the next one.
"""

import contextlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from finetune.scores import blimp, common_words, finetuning, held_out, positions, whole_words
from finetune.scores.finetuning_runs import FINETUNED
from finetune.scores.masked_model import fingerprint
from finetune.scores.record import MODEL, MODELS, Record, read_record
from pretrain.checkpoint import hf, store
from pretrain.common.errors import InputError, RunError
from pretrain.common.files import append_open, checkpoint_names, disk_errors, locked
from pretrain.common.records import keep_until, read_records, with_nulls
from pretrain.common.run_files import CONFIG_FILE, PROBES

Measure = Callable[..., tuple[Record, RunError | None]]  # called with the model, the folder `out` and a name

_FOLDER = "probes"  # of a run: what is kept between checkpoints
_POLL_SECONDS, _WATCH_SECONDS = 2.0, 0.5
# Part of a record -> the figure that stands for it.
_FIELDS = {common_words.PART: "bits", whole_words.PART: "lower", held_out.PART: "nats_per_token", blimp.PART: "overall"}

logger = logging.getLogger(__name__)


def follow(run: Path, measure: Measure, pid: int | None = None) -> None:
    """Score the newest due checkpoint again and again, until the run's last is scored, or the process `pid` is gone.

    Raises `InputError` if `run` is no run folder, or another process follows it; with `pid`, that is waited for.
    """
    if pid is not None:
        threading.Thread(target=_end_with, args=[pid], name="pid", daemon=True).start()
    if not (run / CONFIG_FILE).is_file():
        raise InputError(f"--follow: {run} is not a run folder (no {CONFIG_FILE}). Give one.")
    refusal = f"--follow: {run}: another process scores the checkpoints of this run. Wait for it, or end it."
    with locked(run / _FOLDER / ".lock", "" if pid is not None else refusal):
        keep_until(run / PROBES, sys.maxsize)  # without the half line of a process that was killed
        is_last = False
        while not is_last:
            for name in checkpoint_names(run)[-1:]:
                try:
                    is_last = _score_if_due(run, run / "checkpoints" / name, measure)
                except (RunError, OSError):
                    if (run / "checkpoints" / name).is_dir():
                        raise
                    logger.warning("%s was removed before it could be scored", name)
            time.sleep(0 if is_last else _POLL_SECONDS)


def _end_with(pid: int) -> None:
    """End this process as soon as the process `pid` is gone, whatever this one does then."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_WATCH_SECONDS)
    os._exit(0)


def _score_if_due(run: Path, checkpoint: Path, measure: Measure) -> bool:
    """Score the newest checkpoint if it is due; whether it is the run's last one.

    Raises a `RunError` or an `OSError` if the checkpoint was removed meanwhile.
    """
    state, step = store.read_state(checkpoint), store.step_of(checkpoint)
    config, done = state["config"], max((one["step"] for one in read_records(run, PROBES)), default=0)
    every = max(config["evaluation"]["probes"]["every_steps"], config["checkpoint"]["every_steps"])
    # A fork's first checkpoint has its parent's config, and that of a run that was made longer its former one.
    phases = yaml.safe_load((run / CONFIG_FILE).read_text(encoding="utf-8"))["phases"]
    is_last, due = step >= sum(phase["steps"] for phase in phases), step // every - done // every
    if step > done and (due or is_last):
        averaged = state.get("averaged") or 0
        _score(run, checkpoint, measure, {"averaged": averaged, "skipped": max(0, due - 1)})
    return is_last


def _score(run: Path, checkpoint: Path, measure: Measure, facts: Mapping[str, int]) -> None:
    name, out, began = checkpoint.name, run / _FOLDER, time.time()
    model, path = out / "model", out / MODELS / f"{checkpoint.name}.json"
    shutil.rmtree(model, ignore_errors=True)
    try:
        hf.export_run(run, model, name, averaged=facts["averaged"] > 0)
        if path.is_file() and read_record(path)[MODEL]["fingerprint"] != fingerprint(model):  # a step done again
            path.unlink()
        _, failure = measure(model=model, out=out, name=name)
    except Exception as error:
        if not (model / "config.json").is_file() and not checkpoint.is_dir():  # the export did not come about
            raise InputError(f"{checkpoint}: removed") from error
        failure = error
        logger.warning("%s", name, exc_info=error)
    record = {"split": "probe", "step": store.step_of(checkpoint), "time": time.time(), "seconds": time.time() - began}
    record |= {**facts, **(flat(read_record(path)) if path.is_file() else {})}
    record |= {} if failure is None else {"error": f"{type(failure).__name__}: {' '.join(str(failure).split())}"}
    line = json.dumps(with_nulls(record))
    with disk_errors(run / PROBES), append_open(run / PROBES) as file:
        file.write(f"{line}\n".encode())
    print(line, flush=True)
    for folder in (model, out / FINETUNED):
        shutil.rmtree(folder, ignore_errors=True)


def flat(content: Mapping[str, Any]) -> dict[str, float]:
    """The scores in a record by the names that they have in probes.jsonl (`pretrain.tracking.events`)."""
    scores = {part: one["scores"] for part, one in content.items() if "scores" in one}
    ranges, tuned = scores.get(positions.PART, {}).get("nats", {}), scores.get(finetuning.PART, {})
    return {
        **{part: scores[part][field] for part, field in _FIELDS.items() if field in scores.get(part, {})},
        **{f"{positions.PART}/{name}": nats for name, nats in ranges.items()},
        **{
            f"{finetuning.PART}/{name}": one["pretrained_mean"]
            for name, one in tuned.items()
            if "pretrained_mean" in one
        },
    }

"""Score a run's checkpoints as they are saved: `evaluate-pretrained RUN --follow`, which `pretrain.run.probes` starts.

A checkpoint that is due is exported, its export is scored like any model, and the scores are appended to probes.jsonl.
"""

import contextlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from finetune.scores import blimp, common_words, held_out, whole_words
from pretrain.checkpoint import hf, store
from pretrain.common.errors import InputError, RunError
from pretrain.common.files import append_open, checkpoint_names, disk_errors, locked
from pretrain.common.records import drop_records_after, read_records, with_nulls
from pretrain.common.run_files import CONFIG_FILE, PROBES

# Given the folder of an exported checkpoint, yields (name of a score, result) as soon as each score is computed.
ComputeScores = Callable[[Path], Iterable[tuple[str, Mapping[str, Any]]]]

_FOLDER = "probes"  # subfolder of the run for the lock and the exported checkpoint
_POLL_SECONDS, _WATCH_SECONDS = 2.0, 0.5  # intervals of checks for a new checkpoint, and for the exit of `pid`
# {name of a score: field of its result that is written to probes.jsonl under this name (`events.PROBE_SCORES`)}
_FIELDS = {common_words.NAME: "bits", whole_words.NAME: "lower", held_out.NAME: "nats_per_token", blimp.NAME: "overall"}

logger = logging.getLogger(__name__)


def follow(run: Path, compute_scores: ComputeScores, pid: int | None = None) -> None:
    """Score the latest checkpoint whenever it is due, until the run's last one is scored or the process `pid` exits.

    If another process already follows the run, wait for it if `pid` is given, else raise `InputError`. Also raises
    `InputError` if `run` is not a run folder.
    """
    if pid is not None:
        threading.Thread(target=_exit_after, args=[pid], name="pid", daemon=True).start()
    if not (run / CONFIG_FILE).is_file():
        raise InputError(f"--follow: {run} is not a run folder (no {CONFIG_FILE}). Give one.")
    error_message = f"--follow: {run}: another process scores the checkpoints of this run. Wait for it, or stop it."
    with locked(run / _FOLDER / ".lock", "" if pid is not None else error_message):
        drop_records_after(run / PROBES, sys.maxsize)  # drops the partial line of a killed process
        is_last = False
        while not is_last:
            for name in checkpoint_names(run)[-1:]:
                try:
                    is_last = _score_if_due(run, run / "checkpoints" / name, compute_scores)
                except (RunError, OSError):
                    if (run / "checkpoints" / name).is_dir():
                        raise
                    logger.warning("%s was removed before it could be scored", name)
            time.sleep(0 if is_last else _POLL_SECONDS)


def _exit_after(pid: int) -> None:
    """Wait until the process `pid` has exited, then exit this process, whatever its other threads are doing."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(_WATCH_SECONDS)
    os._exit(0)


def _score_if_due(run: Path, checkpoint: Path, compute_scores: ComputeScores) -> bool:
    """Score the checkpoint if it is due; return whether it is the run's last one.

    A checkpoint is due if it is the run's last one, or the first at or after a multiple of `interval` steps. Raises a
    `RunError` or an `OSError` if it is removed before it is exported.
    """
    state, step = store.read_state(checkpoint), store.step_of(checkpoint)
    config, last_scored = state["config"], max((record["step"] for record in read_records(run, PROBES)), default=0)
    interval = max(config["evaluation"]["every_steps"], config["checkpoint"]["every_steps"])
    # The phases in the checkpoint's config may be outdated: before a fork, or before steps were added to the run.
    phases = yaml.safe_load((run / CONFIG_FILE).read_text(encoding="utf-8"))["phases"]
    is_last, num_intervals = step >= sum(phase["steps"] for phase in phases), step // interval - last_scored // interval
    if step > last_scored and (num_intervals or is_last):
        averaged = state.get("averaged") or 0
        _score(run, checkpoint, compute_scores, {"averaged": averaged, "skipped": max(0, num_intervals - 1)})
    return is_last


def _score(run: Path, checkpoint: Path, compute_scores: ComputeScores, counts: Mapping[str, int]) -> None:
    model, start = run / _FOLDER / "model", time.time()
    scores, error = dict[str, float](), dict[str, str]()
    shutil.rmtree(model, ignore_errors=True)
    try:
        hf.export_run(run, model, checkpoint.name, averaged=counts["averaged"] > 0)
        for score_name, result in compute_scores(model):
            if (field := _FIELDS[score_name]) in result["scores"]:
                scores[score_name] = result["scores"][field]
    except Exception as failure:
        if not (model / "config.json").is_file() and not checkpoint.is_dir():  # nothing was exported
            raise InputError(f"{checkpoint}: removed") from failure
        error = {"error": f"{type(failure).__name__}: {' '.join(str(failure).split())}"}
        logger.warning("%s", checkpoint.name, exc_info=failure)
    record = {"split": "probe", "step": store.step_of(checkpoint), "time": time.time(), "seconds": time.time() - start}
    line = json.dumps(with_nulls({**record, **counts, **scores, **error}))
    with disk_errors(run / PROBES), append_open(run / PROBES) as file:
        file.write(f"{line}\n".encode())
    print(line, flush=True)
    shutil.rmtree(model, ignore_errors=True)

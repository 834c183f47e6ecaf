"""The names of the small files in a run folder. A run with an address also stores the files in `STORED` there."""

import json
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.yaml"  # the settings that the run was started with
ENVIRONMENT_FILE = "environment.json"
METRICS = "metrics.jsonl"
PROBES = "probes.jsonl"  # scores of checkpoints, measured during the run
LAST_SENT = "wandb-step.json"  # the last step sent to W&B
START_FILE = "start.json"  # the origin of the initial weights, and the released model that the run started from
FORK_FILE = "fork.json"  # the run and step that the run forked from
ATTENTION_HISTORY = "attention.json"  # attention patterns of the heads at evaluations
SCORES = "scores.json"  # scores of a finished fine-tuning run
SUMMARY = "summary.json"  # scores of several fine-tuning runs, in the folder that contains them
FAILED = "failed.json"  # the error of a fine-tuning run, if it is one of several

STORED = (CONFIG_FILE, ENVIRONMENT_FILE, METRICS, PROBES, LAST_SENT, START_FILE, FORK_FILE, ATTENTION_HISTORY, SCORES)


def read_fork(folder: Path) -> dict[str, Any]:
    """Return the origin of a forked run, as `pretrain.run.fork` writes it; {} if the run in `folder` was not forked."""
    path = folder / FORK_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

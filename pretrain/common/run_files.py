"""The names of the small files of a run folder. One room writes each; others read it, or store it at an address."""

import json
from pathlib import Path
from typing import Any

CONFIG_FILE = "config.yaml"  # how the run was started: its settings, and the environment
ENVIRONMENT_FILE = "environment.json"
METRICS = "metrics.jsonl"
PROBES = "probes.jsonl"  # scores of checkpoints, measured while the run went on
LAST_SENT = "wandb-step.json"  # the last step that W&B has
START_FILE = "start.json"  # what the run began with, and the release that it continues
FORK_FILE = "fork.json"  # the run and step that the run forked from
HISTORY = "attention.json"  # what the heads attended to at evaluations
SCORES = "scores.json"  # of a finished fine-tuning
SUMMARY = "summary.json"  # of several fine-tunings, in the folder of theirs
FAILED = "failed.json"  # why a fine-tuning among several failed

STORED = (CONFIG_FILE, ENVIRONMENT_FILE, METRICS, PROBES, LAST_SENT, START_FILE, FORK_FILE, HISTORY, SCORES)


def read_fork(folder: Path) -> dict[str, Any]:
    """What the run in `folder` forked from, as `pretrain.run.fork` writes it; {} if it did not fork."""
    path = folder / FORK_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

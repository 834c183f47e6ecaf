"""The names of the small files of a run folder. One room writes each; others read it, or store it at an address."""

CONFIG_FILE = "config.yaml"  # how the run was started: its settings, and the environment
ENVIRONMENT_FILE = "environment.json"
METRICS = "metrics.jsonl"
LAST_SENT = "wandb-step.json"  # the last step that W&B has
START_FILE = "start.json"  # what the run began with, and the release that it continues
HISTORY = "attention.json"  # what the heads attended to at evaluations
COMPARED = "adaptation.json"  # scores of fine-tunings from the checkpoint and from the result
SCORES = "scores.json"  # of a finished fine-tuning
FAILED = "failed.json"  # why a fine-tuning among several failed

STORED = (CONFIG_FILE, ENVIRONMENT_FILE, METRICS, LAST_SENT, START_FILE, HISTORY, COMPARED, SCORES)

"""What a dashboard shows, as data: the W&B workspace and the HTML page are both made from `PANELS`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["curve", "ranks", "scores"]
Unit = Literal["nats", "share", "tokens/s", "s", "bytes", "steps", ""]


@dataclass(frozen=True)
class Panel:
    """One chart over the steps of a run.

    `metrics` are keys of metrics.jsonl. A `curve` shows those of training and of evaluations, `ranks` a list with
    a number for each rank, and `scores` whatever the evaluations of a fine-tuning are measured by.
    """

    title: str
    metrics: tuple[str, ...]
    unit: Unit
    section: str
    kind: Kind = "curve"


PANELS = (
    Panel("Scores on held-out examples", (), "", "Learning", "scores"),
    Panel("Loss", ("loss",), "nats", "Learning"),
    Panel("Masked-token loss", ("mlm_loss",), "nats", "Learning"),
    Panel("Masked-token accuracy", ("mlm_accuracy",), "share", "Learning"),
    Panel("Next-sentence loss", ("nsp_loss",), "nats", "Learning"),
    Panel("Next-sentence accuracy", ("nsp_accuracy",), "share", "Learning"),
    Panel("Gradient norm before clipping", ("grad_norm",), "", "Learning"),
    Panel("Learning rate", ("lr",), "", "Learning"),
    Panel("Useful tokens per second", ("tokens_per_second",), "tokens/s", "Speed"),
    Panel("MFU", ("mfu",), "share", "Speed"),
    Panel("Share of time waiting for batches", ("data_stall_fraction",), "share", "Speed"),
    Panel("Evaluations and checkpoints", ("evaluation_seconds", "checkpoint_seconds"), "s", "Speed"),
    Panel("Time of a forward pass by rank", ("rank_forward_seconds",), "s", "Workers", "ranks"),
    Panel("Time waiting for batches by rank", ("rank_wait_seconds",), "s", "Workers", "ranks"),
    Panel("Peak memory of worker 0", ("memory_bytes",), "bytes", "Workers"),
    Panel("Steps skipped for NaN or infinity", ("skipped_steps",), "steps", "Workers"),
)

EVENTS = (
    "restart",
    "rollback",
    "straggler",
    "resize",
    "waited",
    "left_out",
    "hang",
    "data_stall",
    "storage",
    "stop",
    "diverged",
)
"""Kinds of events that runs record; each is a line across all panels."""

# What evaluations have beside scores.
_NO_SCORES = {"split", "step", "epoch", "samples", "tokens", "seconds", "best"}


def panels_for(records: Iterable[dict[str, Any]]) -> Iterator[Panel]:
    """`PANELS` with the scores that `records` have filled in; those without a record are left out."""
    kinds = dict.fromkeys(map(tuple, records))  # records have few different sets of keys
    there = {key for keys in kinds for key in keys}
    elsewhere = {metric for panel in PANELS for metric in panel.metrics} | _NO_SCORES
    scores = dict.fromkeys(key for keys in kinds if "split" in keys for key in keys if key not in elsewhere)
    for panel in PANELS:
        if panel.kind == "scores":
            panel = replace(panel, metrics=tuple(scores))
        if there.intersection(panel.metrics):
            yield panel

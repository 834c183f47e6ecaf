"""The panels of a dashboard as data. Both the W&B workspace and the HTML page are generated from `panels`."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from pretrain.run.metrics import objective_metrics

Kind = Literal["curve", "ranks", "scores"]
Unit = Literal["nats", "share", "tokens/s", "s", "bytes", "steps", ""]


_UNITS: dict[str, Unit] = {"fraction": "share", "nats": "nats"}  # of a metric


@dataclass(frozen=True)
class Panel:
    """One chart over the steps of a run.

    `metrics` are fields of metrics.jsonl. A panel of the kind `curve` shows training and evaluation values, `ranks` a
    list with a value per rank, and `scores` the metrics of a fine-tuning's evaluations.
    """

    title: str
    metrics: tuple[str, ...]
    unit: Unit
    section: str
    kind: Kind = "curve"


_LEARNING = (
    Panel("Scores on held-out examples", (), "", "Learning", "scores"),
    Panel("Loss", ("loss",), "nats", "Learning"),
)
_OTHERS = (
    Panel("Gradient norm before clipping", ("grad_norm",), "", "Learning"),
    Panel("Learning rate", ("lr",), "", "Learning"),
    Panel("Useful tokens per second", ("tokens_per_second",), "tokens/s", "Speed"),
    Panel("MFU", ("mfu",), "share", "Speed"),
    Panel("Data stalls, share of the time", ("data_stall_fraction",), "share", "Speed"),
    Panel("Time of evaluations and checkpoints", ("evaluation_seconds", "checkpoint_seconds"), "s", "Speed"),
    Panel("Forward time by rank", ("rank_forward_seconds",), "s", "Workers", "ranks"),
    Panel("Data wait by rank", ("rank_wait_seconds",), "s", "Workers", "ranks"),
    Panel("Peak memory of worker 0", ("memory_bytes",), "bytes", "Workers"),
    Panel("Steps skipped (NaN or infinite gradients)", ("skipped_steps",), "steps", "Workers"),
)


def panels() -> tuple[Panel, ...]:
    """All panels: those of each objective's metrics come after the loss."""
    metrics = objective_metrics().items()
    return (
        *_LEARNING,
        *(Panel(one.title, (name,), _UNITS.get(one.unit, ""), "Learning") for name, one in metrics),
        *_OTHERS,
    )


EVENTS = (
    "resume",
    "restart",
    "rollback",
    "straggler",
    "resize",
    "waited",
    "left_out",
    "hang",
    "data_stall",
    "average",
    "storage",
    "stop",
    "diverged",
)
"""Kinds of events that runs record; each event of a single run is a vertical line in every panel."""

# Fields of evaluation records that are not scores.
_NO_SCORES = {"split", "step", "epoch", "samples", "tokens", "seconds", "best"}


def panels_for(records: Iterable[dict[str, Any]]) -> Iterator[Panel]:
    """The `panels` for which `records` have data; the metrics of the panel `scores` are taken from the records."""
    key_sets = dict.fromkeys(map(tuple, records))  # few distinct ones
    measured = {key for keys in key_sets for key in keys}
    not_scores = {metric for panel in panels() for metric in panel.metrics} | _NO_SCORES
    scores = dict.fromkeys(key for keys in key_sets if "split" in keys for key in keys if key not in not_scores)
    for panel in panels():
        if panel.kind == "scores":
            panel = replace(panel, metrics=tuple(scores))
        if measured.intersection(panel.metrics):
            yield panel

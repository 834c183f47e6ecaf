"""Definitions of the panels, from which a report's charts and the W&B workspace are generated."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from pretrain.common.records import SOURCE_LOSS
from pretrain.run.metrics import objective_metrics
from pretrain.tracking.events import PROBE_FIELDS, PROBE_SCORES

GENERAL_TEXT_PREFIX = "general_"  # prefix of losses and accuracies on `adaptation.replay_corpus`

Kind = Literal["curve", "ranks", "scores", "probes"]
Unit = Literal["nats", "share", "tokens/s", "s", "bytes", "steps", ""]


_UNITS: dict[str, Unit] = {"fraction": "share", "nats": "nats"}  # unit of a metric -> unit of its panel


@dataclass(frozen=True)
class Panel:
    """One chart over the steps of a run.

    `metrics` are fields of metrics.jsonl; a name with a trailing / means all fields with this prefix. A `curve` panel
    shows training and evaluation values, `ranks` a list with a value per rank, `scores` the metrics of a fine-tuning's
    evaluations, and `probes` the scores of checkpoints, from probes.jsonl.
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
_AFTER_OBJECTIVES = (
    Panel("Held-out loss by source", (SOURCE_LOSS,), "nats", "Learning"),
    Panel("Gradient norm before clipping", ("grad_norm",), "", "Learning"),
    Panel("Learning rate", ("lr",), "", "Learning"),
)
_SPEED_AND_WORKERS = (
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
    """Return all panels; the metrics of each objective come after the loss."""
    metrics, scores = objective_metrics().items(), PROBE_SCORES.items()
    return (
        *_LEARNING,
        *(Panel(metric.title, (name,), _UNITS.get(metric.unit, ""), "Learning") for name, metric in metrics),
        *_AFTER_OBJECTIVES,
        *(Panel(score.title, (name,), _UNITS.get(score.unit, ""), "Probes", "probes") for name, score in scores),
        *_SPEED_AND_WORKERS,
    )


# Fields of evaluation records that are not scores.
_NOT_SCORES = {"split", "step", "time", "epoch", "samples", "tokens", "seconds", "best", *PROBE_FIELDS}


def panels_for(records: Iterable[dict[str, Any]]) -> Iterator[Panel]:
    """Yield the `panels` for which `records` have data, with metrics from the records for `scores` and prefixes."""
    key_sets = dict.fromkeys(map(tuple, records))  # distinct sets of fields; only a few
    fields = dict.fromkeys(key for keys in key_sets for key in keys)
    not_scores = {metric for panel in panels() for metric in panel.metrics} | _NOT_SCORES
    evaluation_fields = dict.fromkeys(key for keys in key_sets if "split" in keys for key in keys)
    for panel in panels():
        if panel.kind == "scores":
            names = {key: _panel_name(key.removeprefix(GENERAL_TEXT_PREFIX)) for key in evaluation_fields}
            panel = replace(panel, metrics=tuple(key for key, name in names.items() if name not in not_scores))
        elif panel.metrics[0].endswith("/"):
            panel = replace(panel, metrics=tuple(key for key in fields if _panel_name(key) == panel.metrics[0]))
        if fields.keys() & set(panel.metrics):
            yield panel


def _panel_name(field: str) -> str:
    """Return a field's name in `Panel.metrics`: source_loss/ for source_loss/wiki, else the field itself."""
    return "".join(field.partition("/")[:2])

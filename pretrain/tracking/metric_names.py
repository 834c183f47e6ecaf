"""Every field of metrics.jsonl with its unit and meaning, as data; docs/reference/metrics.md is made from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One field of a record. `unit` is empty for names, counts without a unit, and pure numbers."""

    name: str
    unit: str
    meaning: str


TRAINING = (
    Metric("step", "steps", "Optimizer steps taken so far."),
    Metric("epoch", "epochs", "Epochs of the current phase, or of the training set."),
    Metric("samples", "sequences", "Sequences trained on so far."),
    Metric("tokens", "tokens", "Useful tokens trained on so far. Padding does not count."),
    Metric("loss", "nats", "Mean loss since the last record. Pretraining: the sum of `mlm_loss` and `nsp_loss`."),
    Metric("mlm_loss", "nats", "Mean masked-token loss since the last record."),
    Metric("nsp_loss", "nats", "Mean next-sentence loss since the last record."),
    Metric("mlm_accuracy", "share", "Share of masked tokens predicted correctly since the last record."),
    Metric("nsp_accuracy", "share", "Share of sentence pairs classified correctly since the last record."),
    Metric("lr", "", "Learning rate of the last step."),
    Metric("grad_norm", "", "Global gradient norm of the last step, before clipping."),
    Metric("tokens_per_second", "tokens/s", "Useful tokens per second of training time since the last record."),
    Metric(
        "mfu",
        "share",
        "Model FLOPs utilisation: useful FLOPs per second over the matmul peak measured at the start. "
        "Skipped work does not count.",
    ),
    Metric("data_stall_fraction", "share", "Share of the time spent waiting for batches, mean over all workers."),
    Metric("seconds", "s", "Training time over all starts of the run."),
    Metric("evaluation_seconds", "s", "Time spent on evaluations since the last record. Not part of `seconds`."),
    Metric("checkpoint_seconds", "s", "Time that checkpoints held up training since the last record."),
    Metric("rank_forward_seconds", "s", "One number per rank: mean time of a forward pass since the last record."),
    Metric("rank_wait_seconds", "s", "One number per rank: time spent waiting for batches since the last record."),
    Metric("skipped_steps", "steps", "Steps skipped so far because of NaN or infinity."),
    Metric("memory_bytes", "bytes", "Peak memory of worker 0."),
)
"""Fields of a training record, which has neither `split` nor `event`."""

EVALUATION = (
    Metric("split", "", "Always `validation`: held-out sequences, or the first dev set."),
    Metric("step", "steps", "Optimizer steps taken before the evaluation."),
    Metric("best", "", "Whether this evaluation is the best so far."),
    Metric("seconds", "s", "Time that the evaluation took."),
)
"""Fields of an evaluation, beside its losses, accuracies and scores."""

EVENT = (
    Metric("event", "", "What happened: one of the events below."),
    Metric("step", "steps", "Optimizer step at which it was recorded."),
    Metric("time", "s", "Seconds since 1970."),
    Metric("message", "", "The event in words."),
)
"""Fields that every event has; some have more, such as `rank` or `seconds`."""

EVENTS = {
    "restart": "All workers were restarted from a checkpoint.",
    "hang": "A worker made no progress for `scheduling.hang_seconds`.",
    "data_stall": "A worker waited 5 s or longer for one batch, or for the storage.",
    "resize": "The number of workers changed.",
    "waited": "The run waited for nodes.",
    "left_out": "A node was excluded after repeated crashes.",
    "rollback": "Training went back to an earlier checkpoint after a loss spike or repeated NaN.",
    "straggler": "A rank was slower than the others for a while.",
    "storage": "Storage failed and was tried again.",
    "stop": "The run was stopped; it can be resumed.",
    "diverged": "The run ended because training diverged.",
}
"""Kinds of events and their meaning."""

OLD_NAMES = {"peak_fraction": "mfu"}
"""Names in runs made by earlier versions, and the name of today."""

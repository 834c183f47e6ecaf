"""Definitions of the evaluation and event fields in metrics.jsonl, and of the kinds of events.

`pretrain.run.metrics` defines the fields of training records; docs/reference/metrics.md is generated from both.
"""

from pretrain.common.records import SOURCE_LOSS, Metric

EVALUATION_FIELDS: dict[str, Metric] = {
    "split": Metric("", "Always `validation`: held-out sequences or, in fine-tuning, the first dev set."),
    "step": Metric("steps", "Optimizer steps taken before the evaluation."),
    "best": Metric("", "Whether this evaluation is the best so far."),
    "seconds": Metric("s", "Time that the evaluation took."),
    f"{SOURCE_LOSS}NAME": Metric(
        "nats",
        "Loss on the held-out text of a source, if there are several sources. Those with fewer held-out "
        "sequences than 16, or than workers, are combined, as in `a + b`. `loss` is the mean over all.",
    ),
    "general_mlm_loss": Metric(
        "nats", "mlm_loss on `adaptation.replay_corpus`. Other losses and accuracies on it have the same prefix."
    ),
}
"""Fields of an evaluation other than losses, accuracies and scores."""

PROBE_SCORES: dict[str, Metric] = {
    "common_words": Metric("bits", "Mean bits per masked common word.", "Bits per common word", "common words"),
    "whole_words": Metric("bits", "Bits per character of masked whole words (lower bound).", "Bits of whole words"),
    "held_out": Metric("nats", "Loss per masked token of the held-out text.", "Loss on the probes' text", "held-out"),
    "blimp": Metric("fraction", "Mean accuracy over BLiMP's paradigms.", "BLiMP", "BLiMP"),
}
"""Fields of probes.jsonl: scores of a checkpoint."""

PROBE_FIELDS: dict[str, Metric] = {
    "step": Metric("steps", "Step of the checkpoint."),
    "seconds": Metric("s", "Time that scoring took."),
    "averaged": Metric("steps", "Number of steps whose weights were averaged; 0 means the weights of the step itself."),
    "skipped": Metric("checkpoints", "Checkpoints since the last record that were skipped, so that scoring keeps up."),
    "error": Metric("", "Reason why scores are missing."),
    **PROBE_SCORES,
}
"""All fields of probes.jsonl."""

EVENT_FIELDS: dict[str, Metric] = {
    "event": Metric("", "What happened: one of the kinds below."),
    "step": Metric("steps", "Optimizer step at which the event was recorded."),
    "time": Metric("s", "Seconds since 1970."),
    "message": Metric("", "The event in words."),
}
"""Fields of every event; some have more, such as `rank` or `seconds`."""

EVENTS: dict[str, str] = {
    "resume": "Training continued from a checkpoint: with `--resume`, or after a restart.",
    "fork": "The run started from a checkpoint of another run: its weights, moments and position in the data.",
    "restart": "All workers were restarted from a checkpoint.",
    "hang": "A worker made no progress for `scheduling.hang_seconds`.",
    "data_stall": "A worker waited too long for a batch (5 s), the storage or a callback.",
    "resize": "The number of workers changed.",
    "waited": "The run waited for nodes.",
    "left_out": "A node was excluded after repeated crashes.",
    "rollback": "Training went back to an earlier checkpoint after a loss spike or repeated NaN.",
    "straggler": "A rank was slower than the others for a while.",
    "average": "The averaged weights were evaluated at the end of training.",
    "callback": "A callback raised an error for the first time.",
    "storage": "A checkpoint was delayed by failing storage, or could not be stored at the object store.",
    "wandb": "W&B failed. The run continues without it.",
    "stop": "The run was stopped; it can be resumed.",
    "diverged": "The run stopped because training diverged.",
}
"""Kinds of events and their meaning."""

"""Unit and definition of every training metric in metrics.jsonl."""

from pretrain.common.records import Metric
from pretrain.objectives import objective_metrics

__all__ = ["TRAINING_METRICS", "objective_metrics"]


TRAINING_METRICS: dict[str, Metric] = {
    "step": Metric("steps", "Optimizer steps so far."),
    "epoch": Metric("", "Epoch of the current phase, counted from 0."),
    "samples": Metric("sequences", "Sequences trained on so far."),
    "tokens": Metric("tokens", "Tokens trained on so far, without padding."),
    "loss": Metric(
        "nats",
        "Weighted sum of the objective's losses, such as mlm_loss and nsp_loss; for fine-tuning, the loss of the task.",
    ),
    **objective_metrics(),
    "lr": Metric("", "Learning rate of the last step."),
    "grad_norm": Metric("", "Global gradient norm of the last step, before clipping."),
    "tokens_per_second": Metric("tokens/s", "Throughput over all workers, without padding."),
    "mfu": Metric(
        "fraction",
        "Model FLOPs utilization: model FLOP/s over the measured matmul peak. The numerator counts the matrix "
        "products of the forward and backward pass. It leaves out padding, recomputation and positions that the "
        "last layer does not compute because no loss needs them. The usual definition counts these positions, so it is "
        "higher. Fine-tuning counts only the encoder. The denominator is the matmul rate in the run's precision, "
        "measured on all workers simultaneously when the run starts.",
    ),
    "data_stall_fraction": Metric("fraction", "Share of time spent waiting for batches; mean over workers."),
    "seconds": Metric("s", "Training time so far, over all starts of the run."),
    "evaluation_seconds": Metric("s", "Time spent on evaluations since the last record; not part of seconds."),
    "checkpoint_seconds": Metric("s", "Time that training waited for checkpoints since the last record."),
    "rank_forward_seconds": Metric(
        "s",
        "Per rank: mean time of a forward pass since the last record; with `engine.cuda_graphs`, forward and backward.",
    ),
    "rank_wait_seconds": Metric("s", "Per rank: time spent waiting for batches since the last record."),
    "skipped_steps": Metric("steps", "Steps skipped so far because of NaN or infinite gradients."),
    "memory_bytes": Metric("bytes", "Peak memory of worker 0 since it started: GPU memory, or RAM without a GPU."),
}
"""Fields of a training record in metrics.jsonl: name -> unit and definition."""

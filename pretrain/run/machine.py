"""What a machine can do for a run, measured: for the command `doctor`, which is handed this module's name."""

from pretrain.model.precision import is_faster_in_fp32, measure_matmul

__all__ = ["deepspeed_version", "is_faster_in_fp32", "measure_matmul"]


def deepspeed_version() -> str:
    """The version of DeepSpeed; fails as its import does."""
    from pretrain.training.engine import import_deepspeed

    return import_deepspeed().__version__

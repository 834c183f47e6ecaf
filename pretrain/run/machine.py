"""Measurements of a machine for the command `doctor`, which is passed this module's name."""

from pretrain.model.precision import is_faster_in_fp32, measure_matmul

__all__ = ["deepspeed_version", "is_faster_in_fp32", "measure_matmul"]


def deepspeed_version() -> str:
    """Return the version of DeepSpeed; raises the errors of its import."""
    from pretrain.training.engine import import_deepspeed

    return import_deepspeed().__version__

"""Optimizers and the learning-rate schedule."""

from pretrain.training.optim.choice import make_optimizer, parameter_groups
from pretrain.training.optim.lamb import Lamb
from pretrain.training.optim.muon import Muon, matrix_shapes
from pretrain.training.optim.schedule import learning_rate
from pretrain.training.optim.skipping import SkippingOptimizer
from pretrain.training.optim.stable_adamw import StableAdamW
from pretrain.training.optim.tensorwise import (
    Segment,
    TensorwiseOptimizer,
    assign_tensor_ids,
    cut_segments,
    sum_of_squares,
    sums_of_squares,
)

__all__ = [
    "Lamb",
    "Muon",
    "Segment",
    "SkippingOptimizer",
    "StableAdamW",
    "TensorwiseOptimizer",
    "assign_tensor_ids",
    "cut_segments",
    "learning_rate",
    "make_optimizer",
    "matrix_shapes",
    "parameter_groups",
    "sum_of_squares",
    "sums_of_squares",
]

"""Initializes a new output layer with the best linear model on the frozen encoder's features.

With random weights, the first steps would move the encoder toward noise, and few labels cannot undo this (Kumar et al.
2022, "Fine-Tuning Can Distort Pretrained Features", arXiv:2202.10054, section 4: linear probing, then fine-tuning).
The fitted layer is also the run's baseline: a linear model on the frozen encoder.

Shape letters: R feature vectors (one per query position or pooled window), C output units, H hidden size.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.training.model.batches import Batches, LabeledBatch
from finetune.training.model.task_model import TaskModel

MAX_VECTORS = 20_000
"""Number of feature vectors from which no batch is added; 20,000 vectors of size 1,024 are 80 MB."""

PENALTY = 0.15
"""L2 penalty added to the summed loss, for features of mean squared length 1 (scikit-learn: C = 3.3); decision 0155."""

SHRINK = 0.3
"""Factor for a classifier's fitted weights: predictions stay the same, but less confident, so gradients remain."""

_MIN_VECTORS_PER_CLASS = 16  # minimum number of feature vectors per class for which PENALTY and SHRINK apply unchanged

_MAX_ITERATIONS = 100  # maximum number of L-BFGS iterations


def fit_output_layer(model: TaskModel, batches: Batches, device: torch.device) -> dict[str, Tensor]:
    """Return weight fp32 [C, H] and bias fp32 [C] that minimize the task's loss on frozen features, by parameter name.

    Args:
        model: model in evaluation mode, on `device`; its output layer is ignored.
        batches: batches of the training set; the first examples of the first epoch are used.
        device: device of the features and of the fit.
    """
    features = [(model.features(batch), batch) for batch in _first_batches(batches, device)]
    features_RH = torch.cat([vectors_RH for vectors_RH, _ in features])
    center_H = features_RH.mean(0)
    # Computed before centering: if all examples are similar, the scale of centered features would be near 0.
    scale = features_RH.square().sum(1).mean().sqrt().clamp_min(1e-12)
    scaled_features = [((vectors_RH - center_H) / scale, batch) for vectors_RH, batch in features]
    total_weight = sum(float(batch.weights.sum()) for _, batch in scaled_features) or 1.0
    penalty, factor = regularization(model.objective, total_weight / len(model.head.out_bias))
    weight_CH, bias_C = _minimize(model, scaled_features, penalty, total_weight)
    weight_CH = weight_CH / scale
    fitted = {"head.out_weight": weight_CH, "head.out_bias": bias_C - weight_CH @ center_H}
    return {name: tensor.cpu() * factor for name, tensor in fitted.items()}


def regularization(objective: str, vectors_per_class: float) -> tuple[float, float]:
    """Return (L2 penalty, factor of the fitted weights) for the mean number of feature vectors per class.

    With few vectors, the penalty is lower and the factor higher, since fine-tuning has few steps (decision 0155).
    """
    fraction = min(1.0, vectors_per_class / _MIN_VECTORS_PER_CLASS) if objective == "classes" else 1.0
    return PENALTY * fraction**3, 1.0 if objective == "value" else SHRINK * (2 - fraction)


def _first_batches(batches: Batches, device: torch.device) -> Iterator[LabeledBatch]:
    """Yield micro-batches of the first examples of the first epoch, until they have `MAX_VECTORS` query positions."""
    start = num_vectors = 0
    while start < batches.examples and num_vectors < MAX_VECTORS:
        count = min(64, batches.examples - start)
        for batch in batches.step(start, count).micro_batches:
            num_vectors += len(batch.query_positions)
            yield batch.to(device)
        start += count


def _minimize(
    model: TaskModel, features: Sequence[tuple[Tensor, LabeledBatch]], penalty: float, total_weight: float
) -> tuple[Tensor, Tensor]:
    """Fit weight [C, H] and bias [C] by L-BFGS from zeros, on features of mean squared length 1."""
    vectors_RH = features[0][0]
    num_outputs, hidden = len(model.head.out_bias), vectors_RH.shape[1]
    weight_CH = torch.zeros(num_outputs, hidden, device=vectors_RH.device, requires_grad=True)
    bias_C = torch.zeros(num_outputs, device=vectors_RH.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight_CH, bias_C], max_iter=_MAX_ITERATIONS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = [model.loss(F.linear(vectors_RH, weight_CH, bias_C), batch) for vectors_RH, batch in features]
        loss = (torch.stack(losses).sum() + penalty * weight_CH.square().sum()) / total_weight
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    return weight_CH.detach(), bias_C.detach()

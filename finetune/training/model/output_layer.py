"""Initializes a new output layer: the best linear model on the frozen encoder's features.

With random weights the first steps move the encoder toward noise, and few labels do not bring it back (Kumar et al.
2022, "Fine-Tuning Can Distort Pretrained Features", arXiv:2202.10054, section 4: linear probing, then fine-tuning).
The fitted layer is also the frozen linear baseline of the run.

Shape letters: R rows (or windows, or examples' windows), C outputs, H hidden width.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from finetune.training.model.batches import Batches, LabeledBatch
from finetune.training.model.task_model import TaskModel

MAX_ROWS = 20_000
"""Maximum number of rows that the layer is fitted to; 20,000 of width 1,024 are 80 MB."""

PENALTY = 0.15
"""L2 penalty added to the summed loss, for features of mean squared length 1 (C = 3.3); decision 0155."""

SHRINK = 0.3
"""Factor of the fitted weights of classes: decisions stay the same, but less confident, so that gradients remain."""

_FULL_ROWS = 16  # training rows per class, from which on penalty and factor have these values

_MAX_ITERATIONS = 100  # of L-BFGS


def fit_output_layer(model: TaskModel, batches: Batches, device: torch.device) -> dict[str, Tensor]:
    """Return weight fp32 [C, H] and bias fp32 [C] that minimize the task's loss on frozen features, by `model`'s names.

    Args:
        model: in evaluation mode, on `device`; its output layer is not read.
        batches: of the training set; the first examples of its first epoch are used.
        device: device of the features and of the fit.
    """
    features = [(model.features(batch), batch) for batch in _first_batches(batches, device)]
    features_RH = torch.cat([rows_RH for rows_RH, _ in features])
    center_H = features_RH.mean(0)
    # Of the features before centering: if all examples are similar, centered ones would allow weights of any size.
    scale = features_RH.square().sum(1).mean().sqrt().clamp_min(1e-12)
    scaled = [((rows_RH - center_H) / scale, batch) for rows_RH, batch in features]
    total = sum(float(batch.weights.sum()) for _, batch in scaled) or 1.0
    penalty, factor = regularization(model.objective, total / len(model.head.out_bias))
    weight_CH, bias_C = _minimize(model, scaled, penalty, total)
    weight_CH = weight_CH / scale
    fitted = {"head.out_weight": weight_CH, "head.out_bias": bias_C - weight_CH @ center_H}
    return {name: tensor.cpu() * factor for name, tensor in fitted.items()}


def regularization(objective: str, rows: float) -> tuple[float, float]:
    """Return (L2 penalty, factor of the fitted weights) for the mean number of training rows per class.

    With few rows, features are further apart, and fine-tuning has few steps, which change less; see decision 0155.
    """
    few = min(1.0, rows / _FULL_ROWS) if objective == "classes" else 1.0
    return PENALTY * few**3, 1.0 if objective == "value" else SHRINK * (2 - few)


def _first_batches(batches: Batches, device: torch.device) -> Iterator[LabeledBatch]:
    """Yield micro-batches of the first examples of the first epoch, until they have `MAX_ROWS` rows."""
    first = rows = 0
    while first < batches.examples and rows < MAX_ROWS:
        count = min(64, batches.examples - first)
        for batch in batches.step(first, count).micro_batches:
            rows += len(batch.rows)
            yield batch.to(device)
        first += count


def _minimize(
    model: TaskModel, features: Sequence[tuple[Tensor, LabeledBatch]], penalty: float, total: float
) -> tuple[Tensor, Tensor]:
    """Fit weight [C, H] and bias [C] by L-BFGS from zeros, to features of mean squared length 1 and weight `total`."""
    first = features[0][0]
    outputs = len(model.head.out_bias)
    weight_CH = torch.zeros(outputs, first.shape[1], device=first.device, requires_grad=True)
    bias_C = torch.zeros(outputs, device=first.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight_CH, bias_C], max_iter=_MAX_ITERATIONS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = [model.loss(F.linear(rows_RH, weight_CH, bias_C), batch) for rows_RH, batch in features]
        loss = (torch.stack(losses).sum() + penalty * weight_CH.square().sum()) / total
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # pyright: ignore[reportArgumentType]
    return weight_CH.detach(), bias_C.detach()

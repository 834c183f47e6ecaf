"""Linear layers with weight gradients that are fast on CPUs with AMX.

The weight gradient of x @ weight.T is g.T @ x, where g is the gradient of the product. With AMX, oneDNN reads a
transposed operand at about half the rate of the other products of a layer; on other CPUs there is no difference. So
with AMX, the narrower operand is copied in transposed order first, if a measurement shows that this is faster.

Shape letters: T rows, I input width, O output width.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.common.measured import cached_rate, cpu_has

MEASURED_SIZES = 2048, 768, 768  # T, I, O
_ROUNDS = 9  # number of measurements
_MIN_GAIN = 1.15  # minimum gain to use copies: a lower one could be measurement noise

copies_operand = False  # whether weight gradients in bf16 use `weight_gradient_by_copy`


def choose_weight_gradient() -> None:
    """Choose how weight gradients in bf16 are computed from now on, by a measurement if this CPU has AMX."""
    global copies_operand
    rate_name = f"gain of weight gradients from transposed copies, {torch.get_num_threads()} threads"
    copies_operand = cpu_has("amx_bf16") and cached_rate(rate_name, measure_gain) > _MIN_GAIN


def linear_product(x: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x @ weight.T: [..., I] -> [..., O]."""
    if copies_operand and x.is_cpu and x.dtype == torch.bfloat16 and torch.is_grad_enabled():
        return _LinearProduct.apply(x, weight_OI)  # pyright: ignore[reportReturnType]
    return F.linear(x, weight_OI)


def weight_gradient(g_TO: Tensor, x_TI: Tensor) -> Tensor:
    """Return g.T @ x, [O, I], in any memory layout."""
    if copies_operand and g_TO.is_cpu and g_TO.dtype == torch.bfloat16:
        return weight_gradient_by_copy(g_TO, x_TI)
    return g_TO.T @ x_TI


def weight_gradient_by_copy(g_TO: Tensor, x_TI: Tensor) -> Tensor:
    """Return g.T @ x, [O, I], using a transposed copy of the narrower operand."""
    if x_TI.shape[1] < g_TO.shape[1]:
        return (x_TI.T.contiguous() @ g_TO).T
    return g_TO.T.contiguous() @ x_TI


def measure_gain() -> float:
    """Measure the factor by which `weight_gradient_by_copy` is faster."""
    rows, inputs, outputs = MEASURED_SIZES
    # Not random: a start that finds the gain in the cache must draw the same random numbers.
    g_TO, x_TI = (torch.ones(rows, width, dtype=torch.bfloat16) for width in (outputs, inputs))
    gains = []
    for _ in range(_ROUNDS):
        direct = _seconds(lambda: g_TO.T @ x_TI)
        gains.append(direct / _seconds(lambda: weight_gradient_by_copy(g_TO, x_TI)))
    return statistics.median(gains)


def _seconds(product: Callable[[], Tensor]) -> float:
    started = time.perf_counter()
    product()
    return time.perf_counter() - started


class _LinearProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return F.linear(x, weight_OI)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight_OI) = grads, ctx.saved_tensors
        grad_x = g @ weight_OI if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        return grad_x, weight_gradient(g.flatten(0, -2), x.flatten(0, -2))

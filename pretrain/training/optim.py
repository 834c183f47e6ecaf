"""Optimizers and the learning-rate schedule: AdamW, and a LAMB that stays correct when ZeRO shards it.

LAMB scales each tensor's step by |weight| / |update|. ZeRO hands an optimizer flat shards that hold pieces of many
tensors. So `Lamb` takes a table of which piece belongs to which tensor, adds up squared norms by tensor, and sums them
over the workers before it steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pretrain.model.parameters import has_weight_decay, stacked_parts

if TYPE_CHECKING:
    from pretrain import config

# torch sums a norm in fp32: over the 31 M entries of BERT-Large's word embeddings that is 1.1e-3 off
# (measured, torch 2.13 CPU). Norms of rows this long are exact to 1e-7; their squares are added in fp64.
_NORM_ROW = 1 << 16


def parameter_groups(named_parameters: Iterable[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """The two optimizer groups of BERT: with weight decay, and without it (biases and norms).

    Args:
        named_parameters: (name, parameter) as `Module.named_parameters` yields them; the order is kept.
        weight_decay: decoupled decay of the first group.

    Returns:
        Groups with `params`, their `names`, `weight_decay` and `layer_adaptation` (whether LAMB's trust ratio
        applies). Parameters exempt from decay are exempt from the ratio too, as in NVIDIA's FusedLAMB with
        its default `use_nvlamb=False` (apex csrc/multi_tensor_lamb.cu) and in Google's LAMBOptimizer, whose
        `exclude_from_layer_adaptation` defaults to `exclude_from_weight_decay` (google-research/albert
        lamb_optimizer.py). A group without parameters is left out.
    """
    groups = [
        {"params": [], "names": [], "weight_decay": weight_decay, "layer_adaptation": True},
        {"params": [], "names": [], "weight_decay": 0.0, "layer_adaptation": False},
    ]
    for name, parameter in named_parameters:
        group = groups[0 if has_weight_decay(name) else 1]
        group["params"].append(parameter)
        group["names"].append(name)
    return [group for group in groups if group["params"]]


def make_optimizer(settings: config.OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The configured optimizer over `parameter_groups`.

    Its learning rate starts at 0, so that a step taken before the loop has set one changes no weight
    (DeepSpeed's FP16_UnfusedOptimizer takes such a step to allocate the moments).
    """
    betas = (settings.beta1, settings.beta2)
    if settings.name == "lamb":
        return Lamb(groups, lr=0.0, betas=betas, eps=settings.epsilon)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=settings.epsilon, fused=True)


def learning_rate(phases: Sequence[config.PhaseConfig], step: int) -> float:
    """The rate of the 0-based optimizer `step`; each phase restarts the schedule.

    Linear warm-up from 1 / warmup_steps of the peak to the peak, which the last warm-up step has, then decay over the
    phase's remaining steps. This is transformers' get_{constant,linear,polynomial_decay}_schedule_with_warmup over one
    more step, without its first step: a rate of 0 would waste a global batch.
    """
    for phase in phases:
        if step < phase.steps:
            return _phase_rate(phase, step)
        step -= phase.steps
    raise IndexError("past the last phase")


def _phase_rate(phase: config.PhaseConfig, step: int) -> float:
    peak_step = max(0, phase.warmup_steps - 1)
    if step < peak_step:
        return phase.peak_learning_rate * (step + 1) / phase.warmup_steps
    if phase.decay == "constant":
        return phase.peak_learning_rate
    remaining = (phase.steps - step) / (phase.steps - peak_step)
    power = phase.decay_power if phase.decay == "polynomial" else 1.0
    return phase.final_learning_rate + (phase.peak_learning_rate - phase.final_learning_rate) * remaining**power


class Segment(NamedTuple):
    """Entries `start` to `stop` of a flat parameter that belong to tensor number `tensor_id`."""

    start: int
    stop: int
    tensor_id: int


def number_tensors(names: Iterable[str]) -> dict[str, range]:
    """Tensor ids for LAMB, by parameter name: one each, three for the stacked query, key and value."""
    ids: dict[str, range] = {}
    count = 0
    for name in names:
        parts = stacked_parts(name)
        ids[name] = range(count, count + parts)
        count += parts
    return ids


def cut_segments(ids: range, numel: int, first: int, last: int, at: int) -> list[Segment]:
    """The segments of entries `first` to `last` of one parameter, which lie in a flat shard from offset `at` on.

    Args:
        ids: the parameter's tensor ids, from `number_tensors`; its `numel` entries divide evenly among them.
        numel: entries of the whole parameter.
        first, last: the half-open range of its entries that this shard holds; may be empty.
        at: where entry `first` lies in the shard.
    """
    part = numel // len(ids)
    segments = []
    for number, tensor_id in enumerate(ids):
        start, stop = max(first, number * part), min(last, (number + 1) * part)
        if start < stop:
            segments.append(Segment(at + start - first, at + stop - first, tensor_id))
    return segments


class Lamb(torch.optim.Optimizer):
    """LAMB, You et al. 2020 (arXiv:1904.00962), Algorithm 2 with NVIDIA's choices.

    From apex's FusedLAMB, which NVIDIA's BERT recipe uses: bias-corrected moments, decay inside the update,
    phi the identity, trust ratio 1 where either norm is 0. Gradient clipping is the engine's work. A stacked
    `qkv_weight` counts as the three tensors it holds.

    Groups carry `names` and `layer_adaptation` as `parameter_groups` makes them. Parameters must be
    contiguous fp32. `step` uses up the gradient: it holds the update afterwards, which saves a buffer.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "layer_adaptation": True,
        }
        super().__init__(groups, defaults)
        self._segments: dict[Tensor, Sequence[Segment]] | None = None
        self._tensor_count = 0
        self._reduce: Callable[[Tensor], Any] = lambda norms: None

    def set_segments(
        self,
        segments: Mapping[Tensor, Sequence[Segment]],
        tensor_count: int,
        reduce: Callable[[Tensor], Any],
    ) -> None:
        """Set what the flat parameters hold, once a wrapper has flattened and sharded them.

        Args:
            segments: for each flat parameter of an adapted group, its pieces in ascending order. Entries
                in no piece are padding and are not changed.
            tensor_count: how many tensors there are over all workers; ids are below it.
            reduce: sums an fp64 vector [2 * tensor_count] over the workers, in place. `step` calls it once
                if any of its groups is adapted, so all workers must step the same groups in the same order.
        """
        for flat, pieces in segments.items():
            end = 0
            for piece in pieces:
                if not end <= piece.start < piece.stop <= flat.numel() or not 0 <= piece.tensor_id < tensor_count:
                    raise ValueError(f"{piece} does not fit: shard of {flat.numel()}, {tensor_count} tensors")
                end = piece.stop
        self._segments, self._tensor_count, self._reduce = dict(segments), tensor_count, reduce

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over the gradients present. Returns what `closure`, if given, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        adapted: list[tuple[float, Tensor, Tensor, int]] = []  # rate, weights, update, tensor id
        count = self._tensor_count
        for group in self.param_groups:
            for parameter, pieces in self._pieces(group, count):
                count = max([count, *(piece.tensor_id + 1 for piece in pieces)])
                if parameter.grad is None:
                    continue
                weights, update = parameter.view(-1), self._update(group, parameter, pieces)
                if not group["layer_adaptation"]:
                    weights.add_(update, alpha=-group["lr"])
                    continue
                for start, stop, tensor_id in pieces:
                    adapted.append((group["lr"], weights[start:stop], update[start:stop], tensor_id))
        if any(group["layer_adaptation"] for group in self.param_groups):
            self._apply_adapted(adapted, count)
        return loss

    def _apply_adapted(self, adapted: list[tuple[float, Tensor, Tensor, int]], count: int) -> None:
        """Step each piece at its tensor's trust ratio; every worker calls this, even without a piece."""
        device = next(p.device for group in self.param_groups for p in group["params"])
        squares = torch.zeros(2, count, dtype=torch.float64, device=device)
        for _, weights, update, tensor_id in adapted:
            squares[0, tensor_id] += square_sum(weights)
            squares[1, tensor_id] += square_sum(update)
        self._reduce(squares.view(-1))
        weight_norms, update_norms = squares.sqrt()
        measurable = (weight_norms > 0) & (update_norms > 0)
        ratios = torch.where(measurable, weight_norms / update_norms, 1.0).to(torch.float32)
        for rate, weights, update, tensor_id in adapted:
            weights.addcmul_(update, ratios[tensor_id], value=-rate)

    def _pieces(self, group: dict[str, Any], count: int) -> Iterator[tuple[Tensor, Sequence[Segment]]]:
        """The group's parameters with their pieces; a group that is not adapted needs none cut."""
        if not group["layer_adaptation"]:
            for parameter in group["params"]:
                yield parameter, (Segment(0, parameter.numel(), -1),)
        elif self._segments is not None:
            for parameter in group["params"]:
                yield parameter, self._segments[parameter]
        else:
            names = group["names"]
            if len(names) != len(group["params"]):
                raise RuntimeError("Lamb: the parameters were flattened by a wrapper; call set_segments first")
            for parameter, name in zip(group["params"], names, strict=True):
                ids = range(count, count + stacked_parts(name))
                count = ids.stop
                yield parameter, cut_segments(ids, parameter.numel(), 0, parameter.numel(), 0)

    def _update(self, group: dict[str, Any], parameter: Tensor, pieces: Sequence[Segment]) -> Tensor:
        """Advance the moments of `parameter` and turn its gradient into the update, flat [numel]."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # on the CPU, as torch's AdamW keeps it
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        # The count stays on its device: to read it would wait for all work queued there.
        step, (beta1, beta2) = state["step"].double(), group["betas"]
        correction1, correction2 = 1 - beta1**step, 1 - beta2**step
        gradient = parameter.grad
        assert gradient is not None
        flat = (
            gradient.view(-1),
            parameter.view(-1),
            state["exp_avg"].view(-1),
            state["exp_avg_sq"].view(-1),
        )
        for start, stop, _ in pieces:  # piece by piece: the temporaries stay small
            grad, weights, mean, square = (whole[start:stop] for whole in flat)
            mean.lerp_(grad, 1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            denominator = (square / correction2).sqrt_().add_(group["eps"])
            torch.div(mean, denominator.mul_(correction1), out=grad)
            if group["weight_decay"]:
                grad.add_(weights, alpha=group["weight_decay"])
        return flat[0]


def square_sum(values: Tensor) -> Tensor:
    """Sum of squares of `values` [n], as an fp64 scalar."""
    whole = values.numel() // _NORM_ROW * _NORM_ROW
    rows = torch.linalg.vector_norm(values[:whole].view(-1, _NORM_ROW), dim=1, dtype=torch.float32).double()
    rest = torch.linalg.vector_norm(values[whole:], dtype=torch.float32).double()
    return rows.square().sum() + rest.square()

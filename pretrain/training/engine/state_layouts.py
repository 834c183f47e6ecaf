"""How each ZeRO stage lays out the optimizer's state over the ranks: one class for each stage.

A checkpoint is made of fragments: "entries start to stop of the parameter of this name, with their moments". Every
layout can name the fragments that its rank holds. So any number of workers at any stage can read what any other wrote,
without a conversion.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pretrain.config import EngineConfig
from pretrain.training.engine import deepspeed_patches
from pretrain.training.engine.buckets import WeightGather
from pretrain.training.engine.gradient_sums import GradientSums, norm_over_workers
from pretrain.training.optim import Segment, SkippingOptimizer, cut_segments, number_tensors, square_sums
from pretrain.training.optim.lists import foreach

MOMENTS = ("exp_avg", "exp_avg_sq")
AVERAGE = "average"  # the running mean of the weights
ROW_MOMENT = "row_square"  # second moments of the rows of a matrix, one number each


@dataclass(frozen=True)
class Fragment:
    """Entries [start, start + numel) of the flattened parameter `name`, as this rank holds them.

    `tensors` are 1-D fp32 views into the optimizer: "weight", and those of `MOMENTS` and `AVERAGE` that it keeps. Or
    `ROW_MOMENT` alone: then start and numel count rows. `shared` is true if every rank holds the same entries.
    """

    name: str
    start: int
    tensors: dict[str, Tensor]
    shared: bool

    @property
    def numel(self) -> int:
        """Number of elements of its weights, or of rows."""
        return next(iter(self.tensors.values())).numel()


class FragmentReader(Protocol):
    """The source from which `Engine.load` reads saved state; `pretrain.checkpoint.store.CheckpointReader` is one."""

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor: ...  # fp32 [numel]


class Piece(NamedTuple):
    """The place of entries `start` on of the flattened parameter `name`: `held` of `flat`, one of a layout's flats."""

    name: str
    start: int
    flat: Tensor
    held: slice

    @property
    def numel(self) -> int:
        return self.held.stop - self.held.start


@dataclass(frozen=True)
class Parts:
    """The objects that a layout uses, once DeepSpeed has wrapped model and optimizer."""

    deepspeed: Any  # DeepSpeed's engine
    optimizer: torch.optim.Optimizer  # the one that DeepSpeed's wrapper steps
    names: Sequence[Sequence[str]]  # of the parameters, by optimizer group
    parameters: Mapping[str, nn.Parameter]
    shapes: Mapping[str, torch.Size]  # of the whole parameters
    rank: int
    world_size: int
    clip_norm: float  # 0 does not clip
    scales_loss: bool  # in fp16
    own_sums: bool  # `has_own_sums`
    sum_over_workers: Callable[[Tensor], Tensor]

    @property
    def wrapper(self) -> Any:
        """DeepSpeed's optimizer, which wraps ours."""
        return self.deepspeed.optimizer


class StateLayout(ABC):
    """The storage of master weights and moments in one ZeRO stage, and its optimizer step.

    Attributes:
        deepspeed_clips: DeepSpeed clips gradients, unless its sums are replaced; else `step` does.
        deepspeed_scales: DeepSpeed scales the loss in fp16, as it does for its ZeRO optimizers (scale_if_loss).
        sums_apart: DeepSpeed sums gradients in a separate buffer, whose type can be chosen.
        shared: every rank holds the whole state.
        sums: the sums of gradients that replace DeepSpeed's; None if its own are used.
    """

    deepspeed_clips = True
    deepspeed_scales = True
    sums_apart = True
    shared = False
    sums: GradientSums | None = None
    _loss_scale = 1.0  # of the gradients in this step
    _gather: WeightGather | None = None  # of the weights that every rank updates a part of

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @abstractmethod
    def flats(self) -> list[Tensor]:
        """The fp32 tensors that the inner optimizer steps; they are the keys of its state."""

    @abstractmethod
    def pieces(self) -> Iterator[Piece]:
        """Every piece of the parameters that this rank holds."""

    def fragments(self) -> Iterator[Fragment]:
        """Every piece of weights, moments and averages that this rank holds."""
        for name, start, flat, held in self.pieces():
            state = self._parts.optimizer.state[flat]
            whole = {"weight": flat.detach(), **{kind: state[kind] for kind in (*MOMENTS, AVERAGE) if kind in state}}
            yield Fragment(name, start, {kind: x.view(-1)[held] for kind, x in whole.items()}, self.shared)

    @abstractmethod
    def refresh(self, reader: FragmentReader) -> None:
        """Bring the weights that the model computes with in line with the master weights, which were read."""

    def settle(self) -> None:
        """Wait until the weights that the model computes with are those of the last step, on every rank."""
        if self._gather is not None:
            self._gather.finish()

    def waited(self) -> float:
        """Seconds that this process has waited in forward passes for weights of other ranks."""
        return self._gather.waited if self._gather is not None else 0.0

    def whole(self, parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        """While the context lasts, `parameters` are whole on every rank. All ranks enter it together."""
        self.settle()
        return contextlib.nullcontext()

    def step(self, loss_scale: float) -> Tensor:
        """Clip, and step the optimizer unless a gradient is not finite.

        Args:
            loss_scale: that of the gradients.

        Returns:
            fp64 scalar, the gradients' global norm before clipping; not finite if the optimizer did not step.
        """
        self._loss_scale = loss_scale
        engine = self._parts.deepspeed
        engine.step()
        norm = engine.get_global_grad_norm() if engine.was_step_applied() else math.inf
        return torch.as_tensor(0.0 if norm is None else norm, dtype=torch.float64)

    def _update(self, masters: Sequence[Tensor], gradients: list[Tensor], norm: Tensor) -> bool:
        """Step the optimizer with clipped gradients; false if the step is known to be left out.

        Args:
            masters: what the optimizer steps.
            gradients: their fp32 gradients, of any shape, which are overwritten.
            norm: the global norm of the gradients with their loss scale, fp64 scalar.
        """
        if self._must_know() and not norm.isfinite():
            return False
        self._scale(gradients, norm)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.view_as(master)
        self._parts.optimizer.step()
        for master in masters:
            master.grad = None
        return True

    def _must_know(self) -> bool:
        """Whether the host must know if gradients are finite, for which it waits for the device.

        The fused AdamW leaves the step out on the device. So do ours, which takes a few kernels more; on a CPU there is
        nothing to wait for. A loss scaler is on the host.
        """
        optimizer, on_cpu = self._parts.optimizer, self.flats()[0].is_cpu
        fused = isinstance(optimizer, torch.optim.AdamW)
        return self._parts.scales_loss or not (fused or (isinstance(optimizer, SkippingOptimizer) and not on_cpu))

    def _scale(self, gradients: list[Tensor], norm: Tensor) -> None:
        """Clip and remove the loss scale. The fused AdamW does so itself, as it reads a gradient."""
        scale, clip, optimizer = self._loss_scale, self._parts.clip_norm, self._parts.optimizer
        divisor = ((norm / scale + 1e-6) / clip).clamp(min=1.0) * scale if clip else torch.full_like(norm, scale)
        left_out = norm.isfinite().logical_not().float()
        if isinstance(optimizer, torch.optim.AdamW):
            optimizer.grad_scale = divisor.float()  # pyright: ignore[reportAttributeAccessIssue]
            optimizer.found_inf = left_out  # pyright: ignore[reportAttributeAccessIssue]
            return
        if isinstance(optimizer, SkippingOptimizer) and not self._must_know():
            optimizer.found_inf = left_out
        if clip or scale != 1.0:
            foreach._foreach_mul_(gradients, divisor.reciprocal().float())


def has_own_sums(settings: EngineConfig) -> bool:
    """Whether gradients are summed and sent by `GradientSums`, in fp32 on the device, and not by DeepSpeed."""
    own = settings.deepspeed
    zero, sums, autocast = (own.get(key) or {} for key in ("zero_optimization", "data_types", "torch_autocast"))
    return (
        settings.zero_stage in (1, 2)
        and not zero.get("offload_optimizer")
        and not zero.get("zenflow")
        and zero.get("contiguous_gradients", True)  # without it, DeepSpeed hands out no gradients
        and sums.get("grad_accum_dtype") in (None, "fp32")
        and not autocast.get("enabled")
    )


def layout_class(settings: EngineConfig) -> type[StateLayout]:
    """The layout of a stage and precision. Nothing else depends on the stage."""
    if settings.zero_stage == 0:
        return Stage0Fp32Layout if settings.precision == "fp32" else Stage0HalfLayout
    return {1: Stage1Layout, 2: Stage2Layout, 3: Stage3Layout}[settings.zero_stage]


class _Stage0Layout(StateLayout):
    """Every rank has all of the state.

    DeepSpeed sums the gradients over the workers. The step is ours: in half precision, DeepSpeed's reads a number from
    the device for each parameter (runtime/utils.py, has_overflow_serial); in fp32 it neither clips with a norm that we
    can see nor notices NaN.
    """

    deepspeed_clips = False
    deepspeed_scales = False
    sums_apart = False
    shared = True

    def pieces(self) -> Iterator[Piece]:
        names = (name for group in self._parts.names for name in group)
        masters = dict(zip(names, self.flats(), strict=True))
        for name in self._parts.parameters:
            yield Piece(name, 0, masters[name], slice(0, masters[name].numel()))


class Stage0Fp32Layout(_Stage0Layout):
    """The model's parameters are the master weights."""

    def flats(self) -> list[Tensor]:
        return [parameter for group in self._parts.optimizer.param_groups for parameter in group["params"]]

    def refresh(self, reader: FragmentReader) -> None:
        """Does nothing: the model computes with the master weights."""

    def step(self, loss_scale: float) -> Tensor:
        gradients = [parameter.grad for parameter in self.flats() if parameter.grad is not None]
        norm = _norm(gradients)
        if self._must_know() and not norm.isfinite():
            self._parts.deepspeed.zero_grad()
        else:
            self._scale(gradients, norm)
            self._parts.deepspeed.step()
        return norm


class Stage0HalfLayout(_Stage0Layout):
    """fp32 master weights in addition to the model's, one tensor for each parameter."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        deepspeed_patches.replace_step(parts.wrapper, self._take_step)

    def flats(self) -> list[Tensor]:
        return deepspeed_patches.masters_of_stage_0(self._parts.wrapper)

    def refresh(self, reader: FragmentReader) -> None:
        for name, _, master, _ in self.pieces():
            parameter = self._parts.parameters[name]
            parameter.data.copy_(master.view(parameter.shape))

    @torch.no_grad()
    def _take_step(self) -> tuple[bool, Tensor]:
        """As that of `Stage1Layout`, with the gradients that DeepSpeed summed."""
        masters = self.flats()
        parameters = deepspeed_patches.parameters_of_stage_0(self._parts.wrapper)
        gradients = [
            torch.zeros_like(master) if parameter.grad is None else parameter.grad.float()
            for master, parameter in zip(masters, parameters, strict=True)
        ]
        norm = _norm(gradients)
        applied = self._update(masters, gradients, norm)
        if applied:
            foreach._foreach_copy_([parameter.data for parameter in parameters], masters)
        return applied, norm


class Stage1Layout(StateLayout):
    """Each rank has a part of every optimizer group's master weights and moments."""

    keeps_whole_sums = True  # each rank keeps the sums of all gradients, as DeepSpeed's stage 1 does too

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        wrapper = parts.wrapper
        self._group_of = {name: number for number, names in enumerate(parts.names) for name in names}
        if not parts.own_sums:
            norm = norm_over_workers(lambda: deepspeed_patches.gradients_of_zero(wrapper), parts.sum_over_workers)
            deepspeed_patches.replace_norm_of_stages_1_and_2(wrapper, norm)
            return
        self.sums = GradientSums(wrapper, whole=self.keeps_whole_sums)
        own_B = self.sums.own_B
        self._norm = norm_over_workers(lambda: own_B, parts.sum_over_workers)
        buckets = list(deepspeed_patches.weights_of_stages_1_and_2(wrapper))
        self._weights = [flat for _, flat in buckets]  # those that the model computes with
        self._gather = WeightGather(parts.deepspeed.module, buckets)
        deepspeed_patches.replace_step(wrapper, self._take_step)

    def flats(self) -> list[Tensor]:
        return deepspeed_patches.masters_of_stages_1_and_2(self._parts.wrapper)

    def pieces(self) -> Iterator[Piece]:
        flats = self.flats()
        for name, parameter in self._parts.parameters.items():
            piece = deepspeed_patches.piece_of_stages_1_and_2(parameter)
            if piece is not None:
                held = slice(piece.offset, piece.offset + piece.numel)
                yield Piece(name, piece.start, flats[self._group_of[name]], held)

    def refresh(self, reader: FragmentReader) -> None:
        """Gather the weights from the ranks that hold them, so that no rank reads more than its part."""
        if self._gather is None:
            deepspeed_patches.gather_weights_of_stages_1_and_2(self._parts.wrapper)
        else:
            self._spread_weights(self._gather)
            self._gather.finish()

    def step(self, loss_scale: float) -> Tensor:
        if self.sums is not None:
            self.sums.finish()
        return super().step(loss_scale)

    def _take_step(self) -> tuple[bool, Tensor]:
        """DeepSpeed's step with our sums.

        Returns:
            (false if the step is known to be left out, the norm of the gradients with their loss scale).
        """
        assert self.sums is not None
        assert self._gather is not None
        norm = self._norm()
        applied = self._update(self.flats(), self.sums.own_B, norm)
        if applied:
            self._spread_weights(self._gather)
        return applied, norm

    @torch.no_grad()
    def _spread_weights(self, gather: WeightGather) -> None:
        """Cast this rank's master weights to those that the model computes with, and begin to gather all of these."""
        rank, world_size = self._parts.rank, self._parts.world_size
        gather.finish()
        for flat, master in zip(self._weights, self.flats(), strict=True):
            flat.view(world_size, -1)[rank].copy_(master)
        gather.start()


class Stage2Layout(Stage1Layout):
    """Each rank also has only a part of the gradients' sums."""

    keeps_whole_sums = False


class Stage3Layout(StateLayout):
    """Each rank also has only a part of every parameter."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        wrapper = parts.wrapper
        norm = norm_over_workers(lambda: deepspeed_patches.gradients_of_zero(wrapper), parts.sum_over_workers)
        deepspeed_patches.replace_norm_of_stage_3(wrapper, norm)

    def flats(self) -> list[Tensor]:
        return deepspeed_patches.masters_of_stage_3(self._parts.wrapper)

    def pieces(self) -> Iterator[Piece]:
        wrapper, rank, flats = self._parts.wrapper, self._parts.rank, self.flats()
        for name, parameter in self._parts.parameters.items():
            located = deepspeed_patches.piece_of_stage_3(wrapper, parameter, rank, flats)
            if located is not None:
                flat, piece = located
                yield Piece(name, piece.start, flat, slice(piece.offset, piece.offset + piece.numel))

    def whole(self, parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        return deepspeed_patches.import_deepspeed().zero.GatheredParameters(parameters)

    def refresh(self, reader: FragmentReader) -> None:
        for name, parameter in self._parts.parameters.items():
            start, held = deepspeed_patches.part_of_stage_3(parameter, self._parts.rank)
            if held:
                part = deepspeed_patches.weights_of_stage_3(parameter)
                part[:held].copy_(reader.read("weight", name, start, held))
            shape = self._parts.shapes[name]
            if parameter.data.numel() == shape.numel():  # small parameters are kept whole
                parameter.data.copy_(reader.read("weight", name, 0, shape.numel()).view(shape))


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """The global norm of gradients that every rank has, an fp64 scalar."""
    return square_sums([gradient.reshape(-1) for gradient in gradients]).sum().sqrt()


def tensor_segments(layout: StateLayout, shapes: Mapping[str, torch.Size]) -> tuple[dict[Tensor, list[Segment]], int]:
    """(which entries of which flat tensor belong to which of `number_tensors`, how many tensors there are)."""
    ids = number_tensors(shapes)
    segments: dict[Tensor, list[Segment]] = {flat: [] for flat in layout.flats()}
    for piece in layout.pieces():
        numel = shapes[piece.name].numel()
        segments[piece.flat] += cut_segments(
            ids[piece.name], numel, piece.start, piece.start + piece.numel, piece.held.start
        )
    count = max(tensor_ids.stop for tensor_ids in ids.values())
    return {flat: sorted(pieces) for flat, pieces in segments.items()}, count

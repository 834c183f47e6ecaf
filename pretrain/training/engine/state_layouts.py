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
from pretrain.training.engine.gradient_sums import FusedScaling, GradientSums, norm_over_workers
from pretrain.training.optim import Segment, cut_segments, number_tensors

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
    sum_over_workers: Callable[[Tensor], Tensor]

    @property
    def wrapper(self) -> Any:
        """DeepSpeed's optimizer, which wraps ours."""
        return self.deepspeed.optimizer


class StateLayout(ABC):
    """The storage of master weights and moments in one ZeRO stage, and its optimizer step.

    Attributes:
        deepspeed_clips: DeepSpeed clips gradients; else `step` does.
        sums_apart: DeepSpeed sums gradients in a separate buffer, whose type can be chosen.
        shared: every rank holds the whole state.
        sums: the sums of gradients that replace DeepSpeed's; None if its own are used.
    """

    deepspeed_clips = True
    sums_apart = True
    shared = False
    sums: GradientSums | None = None

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

    def whole(self, parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        """While the context lasts, `parameters` are whole on every rank. All ranks enter it together."""
        return contextlib.nullcontext()

    def step(self, loss_scale: float) -> tuple[bool, float]:
        """Clip, and step the optimizer unless a gradient is not finite.

        Args:
            loss_scale: that of the gradients.

        Returns:
            (whether it stepped, the gradients' global norm before clipping).
        """
        return self._deepspeed_step(1.0)

    def _deepspeed_step(self, norm_scale: float) -> tuple[bool, float]:
        engine = self._parts.deepspeed
        engine.step()
        norm = float(engine.get_global_grad_norm() or 0.0) / norm_scale
        return bool(engine.was_step_applied()) and math.isfinite(norm), norm


def layout_class(settings: EngineConfig) -> type[StateLayout]:
    """The layout of a stage and precision. Nothing else depends on the stage."""
    if settings.zero_stage == 0:
        return Stage0Fp32Layout if settings.precision == "fp32" else Stage0HalfLayout
    return {1: Stage1Layout, 2: Stage2Layout, 3: Stage3Layout}[settings.zero_stage]


class _Stage0Layout(StateLayout):
    """Every rank has all of the state."""

    sums_apart = False
    shared = True

    def pieces(self) -> Iterator[Piece]:
        names = (name for group in self._parts.names for name in group)
        masters = dict(zip(names, self.flats(), strict=True))
        for name in self._parts.parameters:
            yield Piece(name, 0, masters[name], slice(0, masters[name].numel()))


class Stage0Fp32Layout(_Stage0Layout):
    """The model's parameters are the master weights.

    DeepSpeed neither clips with a norm that we can see nor notices NaN here, so `step` does both.
    """

    deepspeed_clips = False

    def flats(self) -> list[Tensor]:
        return [parameter for group in self._parts.optimizer.param_groups for parameter in group["params"]]

    def refresh(self, reader: FragmentReader) -> None:
        """Does nothing: the model computes with the master weights."""

    def step(self, loss_scale: float) -> tuple[bool, float]:
        norm = float(nn.utils.clip_grad_norm_(list(self._parts.parameters.values()), self._parts.clip_norm or math.inf))
        if not math.isfinite(norm):
            self._parts.deepspeed.zero_grad()
            return False, norm
        self._parts.deepspeed.step()
        return True, norm


class Stage0HalfLayout(_Stage0Layout):
    """fp32 master weights in addition to the model's, one tensor for each parameter."""

    def flats(self) -> list[Tensor]:
        return deepspeed_patches.masters_of_stage_0(self._parts.wrapper)

    def refresh(self, reader: FragmentReader) -> None:
        for name, _, master, _ in self.pieces():
            parameter = self._parts.parameters[name]
            parameter.data.copy_(master.view(parameter.shape))

    def step(self, loss_scale: float) -> tuple[bool, float]:
        return self._deepspeed_step(loss_scale)  # only FP16_UnfusedOptimizer reports the norm of scaled gradients


class Stage1Layout(StateLayout):
    """Each rank has a part of every optimizer group's master weights and moments."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        wrapper, optimizer = parts.wrapper, parts.optimizer
        deepspeed_patches.replace_norm_of_stages_1_and_2(wrapper, norm_over_workers(wrapper, parts.sum_over_workers))
        self._scaling: FusedScaling | None = None
        if isinstance(optimizer, torch.optim.AdamW):
            self._scaling = FusedScaling(optimizer, parts.clip_norm)
            deepspeed_patches.replace_scaling_of_stages_1_and_2(wrapper, self._scaling)
        self.sums = GradientSums.move_gradients(wrapper) if self._whole_sums_fit() else None
        self._group_of = {name: number for number, names in enumerate(parts.names) for name in names}

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
        """Gather the weights from the ranks that hold them: no rank reads more than its part of a checkpoint."""
        deepspeed_patches.gather_weights_of_stages_1_and_2(self._parts.wrapper)

    def step(self, loss_scale: float) -> tuple[bool, float]:
        if self._scaling is not None:
            self._scaling.loss_scale = loss_scale
        if self.sums is not None:
            self.sums.finish()
        return super().step(loss_scale)

    def _whole_sums_fit(self) -> bool:
        """Whether each rank may keep the sums of all gradients, as DeepSpeed's stage 1 does too."""
        return True


class Stage2Layout(Stage1Layout):
    """Each rank also has only a part of the gradients' sums."""

    def _whole_sums_fit(self) -> bool:
        return self._parts.world_size == 1


class Stage3Layout(StateLayout):
    """Each rank also has only a part of every parameter."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        norm = norm_over_workers(parts.wrapper, parts.sum_over_workers)
        deepspeed_patches.replace_norm_of_stage_3(parts.wrapper, norm)

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

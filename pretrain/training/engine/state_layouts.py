"""Sharding of the optimizer's state over the ranks, one class per ZeRO stage.

A checkpoint consists of fragments: ranges of a named parameter's entries, with their moments. Every layout lists the
fragments of its rank, so a checkpoint can be read with any number of workers at any stage, without conversion.
"""

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from pretrain.config import EngineConfig
from pretrain.model.kernels.native import step_table, supports_native
from pretrain.training.engine import deepspeed_patches
from pretrain.training.engine.buckets import WeightGather
from pretrain.training.engine.gradient_sums import GradientSums, global_norm
from pretrain.training.optim import Segment, SkippingOptimizer, assign_tensor_ids, cut_segments
from pretrain.training.optim.lists import foreach

MOMENTS = ("exp_avg", "exp_avg_sq")
AVERAGE = "average"  # key of the running mean of the weights


@dataclass(frozen=True)
class Fragment:
    """Entries [start, start + numel) of the flattened parameter `name`, stored on this rank.

    `tensors` are 1-D fp32 views, by kind: "weight" and, if they exist, `MOMENTS` and `AVERAGE`.
    `replicated` is true if every rank stores the same entries.
    """

    name: str
    start: int
    tensors: dict[str, Tensor]
    replicated: bool

    @property
    def numel(self) -> int:
        return next(iter(self.tensors.values())).numel()


class FragmentReader(Protocol):
    """A source of saved state for `Engine.load`, such as `pretrain.checkpoint.store.CheckpointReader`."""

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor: ...  # fp32 [numel]


class InitialWeights:
    """A `FragmentReader` of initial weights and zero moments.

    DeepSpeed initializes its master weights from a rounded copy of the model; these weights are exact.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self._weights = {name: weight.detach().clone().view(-1) for name, weight in weights.items()}

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        return self._weights[name][start : start + numel] if kind == "weight" else torch.zeros(numel)


class ParameterPiece(NamedTuple):
    """Entries of the flattened parameter `name` from `start` on, stored in the slice `span` of `flat`."""

    name: str
    start: int
    flat: Tensor
    span: slice

    @property
    def numel(self) -> int:
        return self.span.stop - self.span.start


@dataclass(frozen=True)
class LayoutInputs:
    """The inputs of a layout, after DeepSpeed has wrapped model and optimizer."""

    deepspeed: Any  # DeepSpeed's engine
    optimizer: torch.optim.Optimizer  # our optimizer, which DeepSpeed's wrapper steps
    group_names: Sequence[Sequence[str]]  # names of each optimizer group's parameters
    parameters: Mapping[str, nn.Parameter]  # the model's, in its dtype, sharded in stage 3
    shapes: Mapping[str, torch.Size]  # shapes of the unsharded parameters
    rank: int
    world_size: int
    clip_norm: float  # maximum gradient norm; 0 does not clip
    scales_loss: bool  # whether the loss is scaled (fp16)
    uses_gradient_sums: bool  # result of the function `uses_gradient_sums`
    sum_over_workers: Callable[[Tensor], Tensor]  # sums a tensor over all ranks in place

    @property
    def wrapper(self) -> Any:
        """DeepSpeed's optimizer, which wraps ours."""
        return self.deepspeed.optimizer


class StateLayout(ABC):
    """The storage of master weights and moments in one ZeRO stage, and its optimizer step.

    Attributes:
        deepspeed_clips: whether DeepSpeed clips the gradients that it sums (`sums` is None); otherwise `step` clips.
        deepspeed_scales: whether DeepSpeed scales the loss in fp16, as it does for its ZeRO optimizers (scale_if_loss).
        has_sum_buffer: whether DeepSpeed sums gradients in a separate buffer, whose dtype can be set.
        replicated: whether every rank stores the whole state.
        sums: the gradient sums that replace DeepSpeed's; None if DeepSpeed's are used.
    """

    deepspeed_clips = True
    deepspeed_scales = True
    has_sum_buffer = True
    replicated = False
    sums: GradientSums | None = None
    _loss_scale = 1.0  # scale of the gradients in this step
    _gather: WeightGather | None = None  # set if each rank updates only a part of the weights

    def __init__(self, inputs: LayoutInputs) -> None:
        self._inputs = inputs

    def flats(self) -> list[Tensor]:
        """Return the fp32 tensors that our optimizer updates; they are the keys of its state."""
        return [tensor for group in self._inputs.optimizer.param_groups for tensor in group["params"]]

    @abstractmethod
    def pieces(self) -> Iterator[ParameterPiece]:
        """Yield every piece of the parameters that this rank holds."""

    def fragments(self) -> Iterator[Fragment]:
        """Yield every piece of weights, moments and averages that this rank holds."""
        for name, start, flat, span in self.pieces():
            state = self._inputs.optimizer.state[flat]
            whole = {"weight": flat.detach(), **{kind: state[kind] for kind in (*MOMENTS, AVERAGE) if kind in state}}
            yield Fragment(name, start, {kind: x.view(-1)[span] for kind, x in whole.items()}, self.replicated)

    @abstractmethod
    def refresh(self, reader: FragmentReader) -> None:
        """Update the model's weights from the master weights, which were just loaded."""

    def wait_for_weights(self) -> None:
        """Wait until the model's weights are up to date on every rank."""
        if self._gather is not None:
            self._gather.finish()

    def waited_seconds(self) -> float:
        """Return the seconds that this process has waited for other ranks' weights in forward passes."""
        return self._gather.waited_seconds if self._gather is not None else 0.0

    def gathered(self, parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        """Gather `parameters` on every rank inside the context, which all ranks must enter."""
        self.wait_for_weights()
        return contextlib.nullcontext()

    def step(self, loss_scale: float) -> Tensor:
        """Clip, and step the optimizer unless a gradient is not finite.

        Args:
            loss_scale: scale of the gradients.

        Returns:
            fp64 scalar, the gradients' global norm before clipping; not finite if the optimizer did not step.
        """
        self._loss_scale = loss_scale
        engine = self._inputs.deepspeed
        engine.step()
        norm = engine.get_global_grad_norm() if engine.was_step_applied() else math.inf
        return torch.as_tensor(0.0 if norm is None else norm, dtype=torch.float64)

    def _step_optimizer(self, masters: Sequence[Tensor], gradients: list[Tensor], norm: Tensor) -> bool:
        """Step the optimizer with clipped gradients; return false if the host knows that the step is skipped.

        Args:
            masters: the tensors that the optimizer updates.
            gradients: fp32 gradients of `masters`, of any shape; they are overwritten.
            norm: global norm of the gradients, including the loss scale; fp64 scalar.
        """
        if self._checks_on_host() and not norm.isfinite():
            return False
        self._clip_and_unscale(gradients, norm)
        stepped = self._step_tables(norm)
        for index, (master, gradient) in enumerate(zip(masters, gradients, strict=True)):
            master.grad = None if index in stepped else gradient.view_as(master)
        self._inputs.optimizer.step()
        for master in masters:
            master.grad = None
        return True

    def _step_tables(self, norm: Tensor) -> set[int]:
        """Update some embedding tables without the optimizer; return their indices in `flats()`."""
        return set()

    def _checks_on_host(self) -> bool:
        """Return whether the host checks if gradients are finite, for which it waits for the device.

        The fused AdamW can skip a step on the device. So can our optimizers, with a few more kernels; on a CPU, where
        there is nothing to wait for, the host checks for them. The loss scale of fp16 is updated on the host.
        """
        optimizer, on_cpu = self._inputs.optimizer, self.flats()[0].is_cpu
        is_fused = isinstance(optimizer, torch.optim.AdamW)
        return self._inputs.scales_loss or not (is_fused or (isinstance(optimizer, SkippingOptimizer) and not on_cpu))

    def _clip_and_unscale(self, gradients: list[Tensor], norm: Tensor) -> None:
        """Clip gradients and divide them by the loss scale; the fused AdamW does both when it reads a gradient."""
        scale, clip, optimizer = self._loss_scale, self._inputs.clip_norm, self._inputs.optimizer
        divisor = ((norm / scale + 1e-6) / clip).clamp(min=1.0) * scale if clip else torch.full_like(norm, scale)
        skipped = norm.isfinite().logical_not().float()
        if isinstance(optimizer, torch.optim.AdamW):
            optimizer.grad_scale = divisor.float()  # pyright: ignore[reportAttributeAccessIssue]
            optimizer.found_inf = skipped  # pyright: ignore[reportAttributeAccessIssue]
            return
        if isinstance(optimizer, SkippingOptimizer) and not self._checks_on_host():
            optimizer.found_inf = skipped
        if clip or scale != 1.0:
            foreach._foreach_mul_(gradients, divisor.reciprocal().float())


def uses_gradient_sums(settings: EngineConfig) -> bool:
    """Return whether `GradientSums` sums and sends the gradients, instead of DeepSpeed."""
    section = settings.deepspeed
    zero, dtypes, autocast = (section.get(key) or {} for key in ("zero_optimization", "data_types", "torch_autocast"))
    return (
        settings.zero_stage in (1, 2)
        and not zero.get("offload_optimizer")
        and not zero.get("zenflow")
        and zero.get("contiguous_gradients", True)  # otherwise DeepSpeed does not call `process_gradients`
        and dtypes.get("grad_accum_dtype") in (None, "fp32")
        and not autocast.get("enabled")
    )


def layout_class(settings: EngineConfig) -> type[StateLayout]:
    """Return the layout class for a stage and precision. Nothing else depends on the stage."""
    if settings.zero_stage == 0:
        return Stage0Fp32Layout if settings.precision == "fp32" else Stage0HalfLayout
    return {1: Stage1Layout, 2: Stage2Layout, 3: Stage3Layout}[settings.zero_stage]


class CustomStepLayout(StateLayout):
    """A layout whose `_take_step` replaces the step of DeepSpeed's optimizer."""

    _norm = torch.zeros(())  # norm of the gradients, including the loss scale; not finite if the step is skipped

    def step(self, loss_scale: float) -> Tensor:
        self._loss_scale = loss_scale
        self._inputs.deepspeed.step()
        return self._norm / loss_scale

    def _replace_step(self) -> None:
        self._inputs.wrapper.step = lambda *_: self._take_step()

    @abstractmethod
    def _take_step(self) -> None:
        """Step the optimizer, and set `_norm`."""


class Stage0Fp32Layout(StateLayout):
    """Every rank stores the whole state, and the model's parameters are the master weights.

    DeepSpeed sums the gradients over the workers. It does not report the norm by which it clips, nor check for NaN.
    """

    deepspeed_clips = False
    deepspeed_scales = False
    has_sum_buffer = False
    replicated = True

    def pieces(self) -> Iterator[ParameterPiece]:
        names = (name for group in self._inputs.group_names for name in group)
        masters = dict(zip(names, self.flats(), strict=True))
        for name in self._inputs.parameters:
            yield ParameterPiece(name, 0, masters[name], slice(0, masters[name].numel()))

    def refresh(self, reader: FragmentReader) -> None:
        """Do nothing: the model computes with the master weights."""

    def step(self, loss_scale: float) -> Tensor:
        gradients = [parameter.grad for parameter in self.flats() if parameter.grad is not None]
        norm = global_norm([gradient.reshape(-1) for gradient in gradients])
        if self._checks_on_host() and not norm.isfinite():
            self._inputs.deepspeed.zero_grad()
        else:
            self._clip_and_unscale(gradients, norm)
            self._inputs.deepspeed.step()
        return norm


class Stage0HalfLayout(CustomStepLayout, Stage0Fp32Layout):
    """Every rank stores fp32 master weights besides the model's weights, one tensor per parameter.

    DeepSpeed's own step would read a number from the device for each parameter (runtime/utils.py, has_overflow_serial).
    """

    def __init__(self, inputs: LayoutInputs) -> None:
        super().__init__(inputs)
        # In the order of `flats`.
        self._weights = [inputs.parameters[name] for group in inputs.group_names for name in group]
        self._replace_step()

    def refresh(self, reader: FragmentReader) -> None:
        for weight, master in zip(self._weights, self.flats(), strict=True):
            weight.data.copy_(master.view(weight.shape))

    @torch.no_grad()
    def _take_step(self) -> None:
        """Step with the gradients that DeepSpeed summed."""
        masters = self.flats()
        gradients = [
            torch.zeros_like(master) if weight.grad is None else weight.grad.float()
            for master, weight in zip(masters, self._weights, strict=True)
        ]
        self._norm = global_norm([gradient.reshape(-1) for gradient in gradients])
        if self._step_optimizer(masters, gradients, self._norm):
            foreach._foreach_copy_([weight.data for weight in self._weights], masters)


class Stage1Layout(CustomStepLayout):
    """Each rank stores a part of every optimizer group's master weights and moments.

    DeepSpeed concatenates the weights of a group in one tensor, and each rank owns an equal part of it.
    """

    keeps_all_sums = True  # whether each rank keeps the sums of all gradients, as in DeepSpeed's stage 1

    def __init__(self, inputs: LayoutInputs) -> None:
        super().__init__(inputs)
        self._group_of = {name: index for index, names in enumerate(inputs.group_names) for name in names}
        self._seen: dict[int, Tensor] = {}  # table's index -> whether each row ever had a gradient (see `step_table`)
        self._already_cast: set[int] = set()  # indices of the weights that `step_table` has cast in this step
        buckets = []
        for names, master in zip(inputs.group_names, self.flats(), strict=True):
            parameters = [inputs.parameters[name] for name in names]
            buckets.append((parameters, whole_storage(parameters[0], master.numel() * inputs.world_size)))
        self._weights = [flat for _, flat in buckets]  # in the model's dtype
        self._gather = WeightGather(inputs.deepspeed.module, buckets)
        if inputs.uses_gradient_sums:
            self.sums = GradientSums(inputs.deepspeed, buckets, keeps_all=self.keeps_all_sums)
            self._replace_step()

    def pieces(self) -> Iterator[ParameterPiece]:
        flats = self.flats()
        for name, parameter in self._inputs.parameters.items():
            flat = flats[self._group_of[name]]
            # Offsets of the parameter and of this rank's part in the weights of the group.
            offset, part_offset = int(parameter.data.storage_offset()), self._inputs.rank * flat.numel()
            start, stop = max(offset, part_offset), min(offset + parameter.numel(), part_offset + flat.numel())
            if start < stop:
                yield ParameterPiece(name, start - offset, flat, slice(start - part_offset, stop - part_offset))

    def refresh(self, reader: FragmentReader) -> None:
        """Gather the weights from the ranks that own them: each rank has loaded only its part."""
        self._seen = {}
        self._distribute_weights()
        self.wait_for_weights()

    def step(self, loss_scale: float) -> Tensor:
        if self.sums is None:
            return StateLayout.step(self, loss_scale)
        self.sums.finish()
        return super().step(loss_scale)

    def _take_step(self) -> None:
        assert self.sums is not None
        self._norm = global_norm(self.sums.nonzero_parts(), self._inputs.sum_over_workers)
        if self._step_optimizer(self.flats(), self.sums.local_parts, self._norm):
            self._distribute_weights()

    def _step_tables(self, norm: Tensor) -> set[int]:
        """Update tables with sparse gradients faster than AdamW would: rows that never had a gradient only decay."""
        optimizer, stepped = self._inputs.optimizer, set[int]()
        if self.sums is None or not isinstance(optimizer, torch.optim.AdamW):
            return stepped
        for index, (weights, master) in enumerate(zip(self._weights, self.flats(), strict=True)):
            sparse_sums = self.sums.sparse_sums(index)
            if sparse_sums is None or not supports_native(weights):
                continue
            stepped.add(index)
            if norm.isfinite():
                gradient, rows = sparse_sums
                seen = self._seen.setdefault(index, torch.full((len(gradient),), 2, dtype=torch.uint8))
                seen[rows] = 1
                divisor = float(optimizer.grad_scale)  # pyright: ignore[reportAttributeAccessIssue]
                group, state = optimizer.param_groups[index], optimizer.state[master]
                step_table(group, state, divisor, seen, gradient, master, weights)
        self._already_cast = stepped
        return stepped

    @torch.no_grad()
    def _distribute_weights(self) -> None:
        """Cast this rank's master weights to the model's weights, and start gathering the weights of all ranks."""
        self.wait_for_weights()
        for index, (flat, master) in enumerate(zip(self._weights, self.flats(), strict=True)):
            if index in self._already_cast:
                continue
            flat.view(self._inputs.world_size, -1)[self._inputs.rank].copy_(master)
        assert self._gather is not None
        self._gather.start()
        self._already_cast = set()


class Stage2Layout(Stage1Layout):
    """Each rank also stores only a part of the gradient sums."""

    keeps_all_sums = False


class Stage3Layout(StateLayout):
    """Each rank also stores only a part of every parameter."""

    def __init__(self, inputs: LayoutInputs) -> None:
        super().__init__(inputs)
        local_part = deepspeed_patches.import_deepspeed().utils.safe_get_local_fp32_param
        # This rank's part of each parameter's master weights, including padding: views of a few flat tensors.
        self._masters = {name: local_part(inputs.parameters[name]) for names in inputs.group_names for name in names}
        self._flats = list(dict.fromkeys(master._base for master in self._masters.values()))

    def flats(self) -> list[Tensor]:
        return self._flats

    def pieces(self) -> Iterator[ParameterPiece]:
        for name in self._inputs.parameters:
            master, (start, numel) = self._masters[name], self._part_range(name)
            if numel:
                offset = master.storage_offset() - master._base.storage_offset()
                yield ParameterPiece(name, start, master._base, slice(offset, offset + numel))

    def _part_range(self, name: str) -> tuple[int, int]:
        """Return (start, entries) of this rank's part of a flattened parameter, without padding."""
        part = self._masters[name].numel()
        start = self._inputs.rank * part
        return start, max(0, min(part, self._inputs.shapes[name].numel() - start))

    def gathered(self, parameters: list[nn.Parameter]) -> contextlib.AbstractContextManager[Any]:
        return deepspeed_patches.import_deepspeed().zero.GatheredParameters(parameters)

    def refresh(self, reader: FragmentReader) -> None:
        for name, parameter in self._inputs.parameters.items():
            start, numel = self._part_range(name)
            if numel:
                part = deepspeed_patches.stage3_weights(parameter)
                part[:numel].copy_(reader.read("weight", name, start, numel))
            shape = self._inputs.shapes[name]
            if parameter.data.numel() == shape.numel():  # small parameters are not sharded
                parameter.data.copy_(reader.read("weight", name, 0, shape.numel()).view(shape))


def whole_storage(view: Tensor, numel: int) -> Tensor:
    """Return the whole storage of a view as a 1-D tensor; raise `RuntimeError` unless it has `numel` entries."""
    storage = view.data.untyped_storage()
    if storage.nbytes() != numel * view.element_size():
        raise RuntimeError(f"DeepSpeed keeps {storage.nbytes()} bytes of weights for {numel} master weights")
    return view.data.as_strided((numel,), (1,), 0)


def tensor_segments(layout: StateLayout, shapes: Mapping[str, torch.Size]) -> tuple[dict[Tensor, list[Segment]], int]:
    """Return (the segments of each flat tensor, with ids from `assign_tensor_ids`; the number of tensors)."""
    ids = assign_tensor_ids(shapes)
    segments: dict[Tensor, list[Segment]] = {flat: [] for flat in layout.flats()}
    for piece in layout.pieces():
        numel = shapes[piece.name].numel()
        segments[piece.flat] += cut_segments(
            ids[piece.name], numel, piece.start, piece.start + piece.numel, piece.span.start
        )
    count = max(tensor_ids.stop for tensor_ids in ids.values())
    return {flat: sorted(pieces) for flat, pieces in segments.items()}, count

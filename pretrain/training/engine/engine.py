"""A model trained with DeepSpeed: forward, backward, step, and the optimizer's state as named fragments.

Each loss is already divided by its number of labels over all ranks and micro-batches, so gradients are only summed: in
ZeRO 1 and 2 by `gradient_sums`, otherwise by DeepSpeed. `backward` undoes DeepSpeed's averaging over workers, and
disables its averaging over micro-batches.
"""

import contextlib
import gc
import math
import resource
import traceback
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.common.errors import InputError
from pretrain.common.memory import hold_freed_memory, return_freed_memory, share_one_heap
from pretrain.config import EngineConfig
from pretrain.model.kernels import products
from pretrain.model.parameters import is_hidden_matrix
from pretrain.training.engine import buckets, state_layouts
from pretrain.training.engine.deepspeed_config import deepspeed_config
from pretrain.training.engine.deepspeed_patches import import_deepspeed, uncompiled, use_world_group
from pretrain.training.engine.gradient_sums import use_sparse_embedding_gradients
from pretrain.training.engine.loss_scale import LossScale
from pretrain.training.engine.pass_graphs import LossAndTotals, PassGraphs
from pretrain.training.engine.state_layouts import (
    AVERAGE,
    MOMENTS,
    Fragment,
    FragmentReader,
    LayoutInputs,
    layout_class,
    tensor_segments,
)
from pretrain.training.engine.workers import RankGroup
from pretrain.training.optim import Muon, TensorwiseOptimizer, matrix_shapes

MIN_SPLIT_ENTRIES = 1 << 14  # minimum number of entries of a replicated fragment whose reading the ranks divide


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step. The norm stays on the device; reading `applied` waits for the device."""

    norm: Tensor  # global norm of the gradients before clipping, fp64 scalar; not finite if the step was skipped

    @property
    def applied(self) -> bool:
        """Return whether the weights were updated; false if the gradients contained NaN or inf."""
        return math.isfinite(self.norm)


class Usage(NamedTuple):
    """Resources that a process has used."""

    memory_bytes: int  # peak device memory on CUDA, peak resident set elsewhere
    waited_seconds: float  # time that forward passes waited for other ranks' weights, on CPUs with ZeRO 1 and 2


class ProgressWatch(Protocol):
    """An observer of a run's progress: `pretrain.training.watchdog.Watchdog`."""

    def beat(self) -> None:
        """Record that the engine has made progress."""

    def allow(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which work may take `seconds` without progress."""
        ...

    def awaiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for waiting for data or storage; `what` names what is awaited."""
        ...


class Engine:
    """A model trained with DeepSpeed ZeRO.

    Args:
        model: the model, with fp32 parameters on any device; DeepSpeed casts and moves them.
        make_optimizer: function that maps (name, parameter) pairs to an optimizer. Each param group has an entry
            `names`, one name per parameter, and may have `lr_scale`, a factor for the run's learning rate.
        settings: the config's `engine` section: ZeRO stage, precision, clipping and options for DeepSpeed.
        watch: observer of progress and waits.

    Attributes:
        shapes: the parameters' shapes, by name.
        module: the model, with the parameters that DeepSpeed cast and moved.
        averaged_steps: number of steps whose weights are in the running mean; 0 if there is none.
        variant: settings that passes depend on, such as rotary bases; a CUDA graph is recorded for each value.
        workers: the group of all ranks.
        watch: observer of progress and waits.
        loss_scale: the loss scale of fp16; None in other precisions.
        uses_cuda_graphs: whether passes run as CUDA graphs: `graphed_pass` then replaces `forward` and `backward`.

    Raises:
        InputError: DeepSpeed rejects `engine.deepspeed`, or CUDA graphs do not support it.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        settings: EngineConfig,
        watch: ProgressWatch,
    ) -> None:
        if not torch.cuda.is_available():
            hold_freed_memory()
            share_one_heap()
            products.choose_weight_gradient()
        deepspeed = import_deepspeed()
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        use_world_group()
        self.settings, self.watch = settings, watch
        named_parameters = list(model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in named_parameters}
        self._optimizer = make_optimizer(named_parameters)
        uses_gradient_sums = state_layouts.uses_gradient_sums(settings)
        if uses_gradient_sums:
            buckets.divide_groups(self._optimizer, list(self.shapes), buckets.BUCKET_ENTRIES)
        group_names = [list(group["names"]) for group in self._optimizer.param_groups]
        self._deepspeed = _initialize(
            deepspeed, model, self._optimizer, deepspeed_config(settings, self.world_size), settings
        )
        return_freed_memory()  # memory of the whole fp32 model, which ZeRO has now partitioned
        self.module = self._deepspeed.module
        self.device = torch.device(self._deepspeed.device)
        self.workers = RankGroup(self.rank, self.world_size, self.device)
        is_fp16 = settings.precision == "fp16"
        self.loss_scale = LossScale.from_config(settings.deepspeed.get("fp16") or {}) if is_fp16 else None
        inputs = LayoutInputs(
            deepspeed=self._deepspeed,
            optimizer=self._optimizer,
            group_names=group_names,
            parameters=dict(self.module.named_parameters()),
            shapes=self.shapes,
            rank=self.rank,
            world_size=self.world_size,
            clip_norm=settings.gradient_clip_norm,
            scales_loss=is_fp16,
            uses_gradient_sums=uses_gradient_sums,
            sum_over_workers=self.workers.sum_over_workers,
        )
        self.layout = layout_class(settings)(inputs)
        self._set_loss_scale()
        self.sums = self.layout.sums
        if self.sums is not None and self.sums.accepts_sparse:
            use_sparse_embedding_gradients(self.module)
        self.uses_cuda_graphs = settings.cuda_graphs is True and self.device.type == "cuda"
        self.graphs = None
        if self.uses_cuda_graphs:
            if self.sums is None:
                raise InputError("engine.cuda_graphs: conflicts with engine.deepspeed. Set cuda_graphs to false.")
            self.graphs = PassGraphs(self.module, self.sums)
        self.averaged_steps = 0
        self.variant: Hashable = None
        self._prepare_moments()
        self._describe_shards()

    def forward(self, batch: Any) -> Any:
        """Return the module's output for one micro-batch."""
        self.watch.beat()
        return self._deepspeed(batch)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Backpropagate `loss`, this rank's share of the global loss, and accumulate the gradients.

        `last` is whether the micro-batch is the last one of the step.
        """
        self._deepspeed.set_gradient_accumulation_boundary(last)
        if self.sums is None:  # DeepSpeed's reduction divides by the number of workers
            # Apply the fp16 loss scale, unless DeepSpeed does.
            scale = 1.0 if self.layout.deepspeed_scales or not self.loss_scale else self.loss_scale.cur_scale
            self._deepspeed.backward(loss * (self.world_size * scale), scale_wrt_gas=False)
            return
        self.sums.begin_backward(last=last)
        self._deepspeed.backward(loss, scale_wrt_gas=False)
        self.sums.end_backward()

    def graphed_pass(
        self,
        batch: Any,
        loss_weights: Sequence[float],
        compute: LossAndTotals,
        *,
        last: bool,
        timer: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> Tensor:
        """Run the forward and backward pass of a micro-batch; only call it if `uses_cuda_graphs`.

        Args:
            batch: the micro-batch, on the device; batches should have few different shapes.
            loss_weights: weights of the losses.
            compute: function that maps (the module's output, the weights as a tensor) to (this rank's share of the
                global loss, sums for metrics); must be the same function in each call.
            last: whether this is the last micro-batch of the step.
            timer: function that returns a context manager; it times the work that does not wait for other ranks.

        Returns:
            The sums for metrics.
        """
        assert self.graphs is not None
        self.watch.beat()
        self.layout.wait_for_weights()
        with timer():
            totals = self.graphs.run(batch, loss_weights, compute, self.variant)
        if last:
            assert self.sums is not None
            self._deepspeed.set_gradient_accumulation_boundary(True)
            self.sums.begin_backward(last=True)
            self.sums.end_backward()
        return totals

    def _set_loss_scale(self) -> None:
        if self.loss_scale and self.layout.deepspeed_scales:
            self._deepspeed.optimizer.override_loss_scale(self.loss_scale.cur_scale)

    def step(self, learning_rate: float, weight_decay: float | None = None) -> StepResult:
        """Clip gradients, step the optimizer unless a gradient is not finite, and clear the gradients.

        `weight_decay` applies to the param groups whose entry `decays` is true; None leaves it unchanged.
        """
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
            if weight_decay is not None and group["decays"]:
                group["weight_decay"] = weight_decay
        norm = self.layout.step(self.loss_scale.cur_scale if self.loss_scale else 1.0)
        if self.loss_scale:
            self.loss_scale.update(overflow=not math.isfinite(norm))
            self._set_loss_scale()
        return StepResult(norm)

    def scale_updates(self, name: str, entries: int, factor: float) -> None:
        """Scale all future updates of a parameter's first `entries` entries by `factor`; 0 freezes these entries."""
        tensors = [
            fragment.tensors["weight"][: entries - fragment.start]
            for fragment in self.fragments()
            if fragment.name == name and fragment.start < entries
        ]
        old_weights: list[Tensor] = []

        def save_old_weights(*_: Any) -> None:
            old_weights[:] = [weights.clone() for weights in tensors]

        @torch.no_grad()
        def scale_update(*_: Any) -> None:
            for weights, old in zip(tensors, old_weights, strict=True):
                weights.copy_(old.lerp(weights, factor) if factor else old)

        self._optimizer.register_step_pre_hook(save_old_weights)
        self._optimizer.register_step_post_hook(scale_update)

    def fragments(self) -> Iterator[Fragment]:
        """Yield every piece of weights, moments and averages that this rank holds."""
        yield from self.layout.fragments()

    @torch.no_grad()
    def average(self, steps: int) -> None:
        """Add the current weights to their running fp32 mean, which is "average" in `fragments`.

        Args:
            steps: number of steps averaged so far, including this one. 1 starts a new mean; 0 removes the mean.
        """
        if not steps and not self.averaged_steps:
            return
        self.averaged_steps = self.averaged_steps + 1 if steps > 1 else steps
        for flat in self.layout.flats():
            state = self._optimizer.state[flat]
            if not steps:
                del state[AVERAGE]
            elif self.averaged_steps == 1:
                state[AVERAGE] = flat.detach().clone()
            else:
                state[AVERAGE].lerp_(flat.detach(), 1 / self.averaged_steps)

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[dict[str, Tensor]]:
        """Yield the unsharded parameters by name, in the model's dtype. Read-only; all ranks must enter together."""
        parameters = dict(self.module.named_parameters())
        with self.layout.gathered(list(parameters.values())):
            yield {name: parameter.data for name, parameter in parameters.items()}

    def load(self, reader: FragmentReader, state: Mapping[str, Any] | None = None) -> None:
        """Load weights, moments and averages from `reader`.

        Args:
            reader: reader of the saved fragments.
            state: the result of `state()` when the fragments were saved; None for a new run.
        """
        state = state or {}
        self.averaged_steps = state.get("averaged", 0)
        for flat in self.layout.flats():
            self._optimizer.state[flat].pop(AVERAGE, None)
            if self.averaged_steps:
                self._optimizer.state[flat][AVERAGE] = torch.zeros_like(flat, requires_grad=False)
        with torch.no_grad():
            for fragment in self.layout.fragments():
                for kind, tensor in fragment.tensors.items():
                    tensor.copy_(self._read(reader, kind, fragment))
            self.layout.refresh(reader)
        for flat in self.layout.flats():
            self._optimizer.state[flat]["step"].fill_(float(state.get("updates", 0)))
        if self.loss_scale:
            self.loss_scale.load(state.get("scaler") or {})
            self._set_loss_scale()

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides `fragments`: step counts, the fp16 loss scale, parameter shapes."""
        updates = self._optimizer.state[self.layout.flats()[0]]["step"]  # skipped steps are not counted
        return {
            "updates": int(updates.item()),
            "scaler": self.loss_scale.state() if self.loss_scale else {},
            **({"averaged": self.averaged_steps} if self.averaged_steps else {}),
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
        }

    def usage(self) -> Usage:
        """Return the resources that this process has used so far."""
        if self.uses_cuda_graphs:  # recordings use memory that is not counted as allocated
            memory = torch.cuda.max_memory_reserved(self.device)
        elif self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device)
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Usage(memory, self.layout.waited_seconds())

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers."""
        self.layout.wait_for_weights()
        self.graphs = None
        self._deepspeed.destroy()
        gc.collect()

    def _read(self, reader: FragmentReader, kind: str, fragment: Fragment) -> Tensor:
        """Read a fragment, fp32 [numel]. If every rank stores it, each reads a part, and an all-gather joins them."""
        start, numel = fragment.start, fragment.numel
        if not fragment.replicated or self.world_size == 1 or numel < MIN_SPLIT_ENTRIES:
            return reader.read(kind, fragment.name, start, numel)
        part_numel = -(-numel // self.world_size)
        offset = min(self.rank * part_numel, numel)
        count = min(part_numel, numel - offset)
        part = torch.zeros(part_numel, device=self.device)
        part[:count] = reader.read(kind, fragment.name, start + offset, count)
        whole = part.new_empty(part_numel * self.world_size)
        buckets.all_gather(whole, part)
        return whole[:numel]

    def _describe_shards(self) -> None:
        """Tell optimizers that need whole tensors where each tensor is in ZeRO's flat tensors."""
        segments, count = tensor_segments(self.layout, self.shapes)
        if isinstance(self._optimizer, TensorwiseOptimizer):
            reduce = (lambda norms: None) if self.layout.replicated else self.workers.sum_over_workers
            self._optimizer.set_segments(segments, count, reduce)
        elif isinstance(self._optimizer, Muon):
            uses_bf16 = self.device.type == "cuda" or self.settings.resolved_precision == "bf16"
            self._optimizer.set_shards(
                segments,
                matrix_shapes(self.shapes),
                self.workers,
                replicated=self.layout.replicated,
                dtype=torch.bfloat16 if uses_bf16 else torch.float32,
            )

    def _prepare_moments(self) -> None:
        """Set the moments and step counts of all master weights to zero; DeepSpeed may step while it initializes."""
        muon = isinstance(self._optimizer, Muon)
        matrices = {piece.flat for piece in self.layout.pieces() if muon and is_hidden_matrix(piece.name)}
        for flat in self.layout.flats():
            state = self._optimizer.state[flat]
            for key in MOMENTS[:1] if flat in matrices else MOMENTS:
                if key in state:
                    state[key].zero_()
                else:
                    state[key] = torch.zeros_like(flat, requires_grad=False)
            # torch's fused AdamW needs its step count on the device of the weights, as fp32.
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)


def _initialize(
    deepspeed: Any, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], settings: EngineConfig
) -> Any:
    """Create DeepSpeed's engine. Raises `InputError` if DeepSpeed rejects `engine.deepspeed`."""
    try:
        with uncompiled():
            return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    except Exception as error:
        is_machine_error = isinstance(error, (torch.OutOfMemoryError, dist.DistError))
        if not settings.deepspeed or is_machine_error or _raised_in_our_code(error):
            raise
        raise InputError(f"engine.deepspeed: DeepSpeed rejects it ({error}).") from error


def _raised_in_our_code(error: Exception) -> bool:
    """Return whether our code raised the error: DeepSpeed calls our optimizers and patches."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]

"""A model under DeepSpeed: forward, backward, step, and the optimizer's state as named fragments.

DeepSpeed averages gradients over workers and over accumulation steps. Here a loss is already divided by its
count over all ranks and micro-batches. So the engine undoes the average over workers and disables that over steps.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import resource
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.common.errors import InputError
from pretrain.common.memory import hold_freed_memory, return_freed_memory, share_one_heap
from pretrain.config import EngineConfig
from pretrain.model.parameters import is_hidden_matrix
from pretrain.training.engine import buckets, state_layouts
from pretrain.training.engine.deepspeed_config import deepspeed_config
from pretrain.training.engine.deepspeed_patches import LossScaler, import_deepspeed, use_world_group
from pretrain.training.engine.gradient_sums import use_sparse_embedding_gradients
from pretrain.training.engine.pass_graphs import LossAndTotals, PassGraphs
from pretrain.training.engine.state_layouts import (
    AVERAGE,
    MOMENTS,
    ROW_MOMENT,
    Fragment,
    FragmentReader,
    Parts,
    layout_class,
    tensor_segments,
)
from pretrain.training.optim import Muon, TensorwiseOptimizer, matrix_shapes, number_tensors

_LEAST_DIVIDED = 1 << 14  # entries of a tensor; at resume in ZeRO-0, every rank reads smaller ones whole


@dataclass(frozen=True)
class StepResult:
    """The outcome of one optimizer step. It stays on the device until it is read, which waits for the device.

    Attributes:
        norm: fp64 scalar, the global norm of the gradients before clipping; not finite if the step was left out.
    """

    norm: Tensor

    @property
    def applied(self) -> bool:
        """False if the weights were not changed because of NaN or inf in the gradients."""
        return math.isfinite(self.norm)


class ProgressWatch(Protocol):
    """Observes a run's progress; `pretrain.training.watchdog.Watchdog` is one."""

    def beat(self) -> None:
        """Called whenever the engine makes progress."""

    def allow(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Wraps work without progress that may take `seconds`."""
        ...

    def awaiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        """Wraps waits for data or storage; `what` names them."""
        ...


class NullWatchdog:
    """No watchdog."""

    def beat(self) -> None:
        pass

    def allow(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def awaiting(self, what: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class Engine:
    """A model under DeepSpeed ZeRO.

    Args:
        model: parameters in fp32 on any device; DeepSpeed casts and moves them.
        make_optimizer: from (name, parameter) pairs to an optimizer whose groups carry `names`, and `rate_share`
            where a group's learning rate is a share of the run's.
        settings: stage, precision, clipping and DeepSpeed's own section.
        watch: called with progress and waits.

    Attributes:
        shapes: of the parameters, by name.
        module: the model as DeepSpeed has it.
        averaged: how many steps' weights are in the running mean.
        beat, allow, awaiting: those of `watch`.

    Raises:
        InputError: DeepSpeed refuses what its own section asks for.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        settings: EngineConfig,
        watch: ProgressWatch | None = None,
    ) -> None:
        if not torch.cuda.is_available():
            hold_freed_memory()
            share_one_heap()
        deepspeed = import_deepspeed()
        if not dist.is_initialized():
            raise RuntimeError("the process group must be initialised before the engine")
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        use_world_group()
        self.settings = settings
        watch = watch or NullWatchdog()
        self.beat, self.allow, self.awaiting = watch.beat, watch.allow, watch.awaiting
        named = list(model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in named}
        self._optimizer = make_optimizer(named)
        own_sums = state_layouts.has_own_sums(settings)
        if own_sums:
            buckets.divide_groups(self._optimizer, list(self.shapes), buckets.ENTRIES)
        names = [list(group["names"]) for group in self._optimizer.param_groups]
        self._deepspeed = _initialise(
            deepspeed, model, self._optimizer, deepspeed_config(settings, self.world_size), settings
        )
        return_freed_memory()  # of the whole fp32 model, which ZeRO has partitioned by now
        self.module = self._deepspeed.module
        self.device = torch.device(self._deepspeed.device)
        self._scaler = LossScaler(self._deepspeed.optimizer) if settings.precision == "fp16" else None
        parts = Parts(
            deepspeed=self._deepspeed,
            optimizer=self._optimizer,
            names=names,
            parameters=dict(self.module.named_parameters()),
            shapes=self.shapes,
            rank=self.rank,
            world_size=self.world_size,
            clip_norm=settings.gradient_clip_norm,
            scales_loss=settings.precision == "fp16",
            own_sums=own_sums,
            sum_over_workers=self.sum_over_workers,
        )
        self._layout = layout_class(settings)(parts)
        self._sums = self._layout.sums
        if self._sums is not None and self._sums.takes_rows:
            use_sparse_embedding_gradients(self.module)
        self._graphs: PassGraphs | None = None
        if settings.cuda_graphs and self.device.type == "cuda":
            if self._sums is None:
                raise InputError("engine.cuda_graphs: does not fit what engine.deepspeed asks for. Set it to false.")
            self._graphs = PassGraphs(self.module, self._sums)
        self.averaged = 0
        self._prepare_moments()
        self._show_shards()

    def forward(self, batch: Any) -> Any:
        """The module's output for one micro-batch."""
        self.beat()
        return self._deepspeed(batch)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`, this rank's share of the global loss; `last` micro-batch of the step or not."""
        self._deepspeed.set_gradient_accumulation_boundary(last)
        if self._sums is None:  # DeepSpeed's own reduction divides by the number of workers
            self._deepspeed.backward(loss * (self.world_size * self._own_loss_scale()), scale_wrt_gas=False)
            return
        self._sums.begin_backward(last=last)
        self._deepspeed.backward(loss, scale_wrt_gas=False)
        self._sums.end_backward()

    @property
    def records_passes(self) -> bool:
        """Whether passes are recorded as CUDA graphs, with `recorded_pass` in place of `forward` and `backward`."""
        return self._graphs is not None

    def recorded_pass(self, batch: Any, weights: Sequence[float], compute: LossAndTotals) -> Tensor:
        """Forward and backward pass of a micro-batch, between `await_weights` and `send_gradients`.

        Args:
            batch: of few different shapes, on the device.
            weights: of the losses.
            compute: from the module's output and the weights on the device to this rank's share of the global loss, and
                totals; the same function each time.

        Returns:
            The totals.
        """
        assert self._graphs is not None
        self.beat()
        return self._graphs.run(batch, weights, compute)

    def await_weights(self) -> None:
        """Before a recorded pass: wait until all weights are those of the last step."""
        self._layout.settle()

    def send_gradients(self) -> None:
        """After the recorded passes of a step."""
        assert self._sums is not None
        self._deepspeed.set_gradient_accumulation_boundary(True)
        self._sums.begin_backward(last=True)
        self._sums.end_backward()

    def _own_loss_scale(self) -> float:
        """fp16's scale of the loss, where DeepSpeed leaves it to us."""
        return 1.0 if self._layout.deepspeed_scales else self.scaler_state().get("cur_scale", 1.0)

    def step(self, learning_rate: float) -> StepResult:
        """Clip, and step the optimizer unless a gradient is not finite; gradients are cleared either way."""
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("rate_share", 1.0)
        return StepResult(self._layout.step(self.scaler_state().get("cur_scale", 1.0)))

    def slow_entries(self, name: str, entries: int, share: float) -> None:
        """From now on apply only `share` of every update of a parameter's first `entries`; 0 keeps them bit for bit."""
        held = [
            fragment.tensors["weight"][: entries - fragment.start]
            for fragment in self.fragments()
            if fragment.name == name and fragment.start < entries
        ]
        before: list[Tensor] = []

        def keep(*_: Any) -> None:
            before[:] = [weights.clone() for weights in held]

        @torch.no_grad()
        def scale(*_: Any) -> None:
            for weights, old in zip(held, before, strict=True):
                weights.copy_(old.lerp(weights, share) if share else old)

        self._optimizer.register_step_pre_hook(keep)
        self._optimizer.register_step_post_hook(scale)

    def fragments(self) -> Iterator[Fragment]:
        """Every piece of weights, moments and averages that this rank holds."""
        yield from self._layout.fragments()
        yield from self._row_moments()

    @torch.no_grad()
    def average(self) -> None:
        """Take the current weights into their running mean, in fp32, which `fragments` has as "average"."""
        self.averaged += 1
        for flat in self._layout.flats():
            state = self._optimizer.state[flat]
            if self.averaged == 1:
                state[AVERAGE] = flat.detach().clone()
            else:
                state[AVERAGE].lerp_(flat.detach(), 1 / self.averaged)

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[dict[str, Tensor]]:
        """Every parameter, whole, by name, as the model computes with it; to be read only, on every rank at once."""
        parameters = dict(self.module.named_parameters())
        with self._layout.whole(list(parameters.values())):
            yield {name: parameter.data for name, parameter in parameters.items()}

    def load(self, reader: FragmentReader, steps_taken: int, averaged: int = 0) -> None:
        """Take weights, moments and averages from `reader`.

        Args:
            reader: the saved state.
            steps_taken: the optimizer's own count of updates.
            averaged: how many steps' weights are in the saved mean; without any, the current mean is dropped.
        """
        self.averaged = averaged
        for flat in self._layout.flats():
            self._optimizer.state[flat].pop(AVERAGE, None)
            if averaged:
                self._optimizer.state[flat][AVERAGE] = torch.zeros_like(flat, requires_grad=False)
        with torch.no_grad():
            for fragment in (*self._layout.fragments(), *self._row_moments(everywhere=True)):
                for kind, tensor in fragment.tensors.items():
                    tensor.copy_(self._read(reader, kind, fragment))
            self._layout.refresh(reader)
        for flat in self._layout.flats():
            self._optimizer.state[flat]["step"].fill_(float(steps_taken))

    def updates(self) -> int:
        """How many updates the optimizer has made (skipped steps do not count)."""
        return int(self._optimizer.state[self._layout.flats()[0]]["step"].item())

    def scaler_state(self) -> dict[str, Any]:
        """The fp16 loss scaler's state; empty in other precisions."""
        return self._scaler.state() if self._scaler else {}

    def load_scaler_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `scaler_state` returned; nothing in other precisions than fp16."""
        if self._scaler:
            self._scaler.load(state)

    def sum_over_workers(self, values: Tensor) -> Tensor:
        """`values`, on any device, summed over all ranks in place."""
        if self.world_size > 1:
            there = values.to(self.device)  # NCCL knows no other
            dist.all_reduce(there)
            if there is not values:
                values.copy_(there)
        return values

    def all_to_all(self, values: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send `sent[r]` entries of 1-D `values` to each rank r, in order; the `received[r]` entries from each."""
        there = values.to(self.device)
        if self.world_size == 1:
            return there
        gathered = there.new_empty(sum(received))
        dist.all_to_all_single(gathered, there, received, sent)
        return gathered

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.world_size > 1:
            dist.barrier()

    def gather_objects(self, value: Any) -> list[Any]:
        """One small JSON-like value of each rank, on every rank."""
        return gather_objects(value)

    def collect_objects(self, value: Any) -> list[Any]:
        """One small JSON-like value of each rank, on rank 0; an empty list on the others."""
        return collect_objects(value)

    def first_object(self, value: Any) -> Any:
        """The small JSON-like value of rank 0, on every rank."""
        return first_object(value)

    def side_group(self) -> SideGroup:
        """The same ranks for another thread: its collectives are separate from those of training."""
        if self.world_size == 1:
            return SideGroup(self.rank, self.world_size, None)
        ranks: Any = dist.group.WORLD
        timeout = ranks._get_backend(self.device).options._timeout  # a new group has torch's own
        return SideGroup(self.rank, self.world_size, dist.new_group(backend="gloo", timeout=timeout))

    def seed_device(self, seed: int, start: int) -> None:
        """Seed the device's generator, for the dropout of flash attention: differently for each rank and start."""
        if self.device.type == "cuda":
            state = np.random.SeedSequence([seed, self.rank, start]).generate_state(1, np.uint64)
            torch.cuda.manual_seed(int(state[0]) >> 1)

    def waited_for_weights(self) -> float:
        """Seconds that this process has waited in forward passes for weights of other ranks (CPU, ZeRO 1 and 2)."""
        return self._layout.waited()

    def peak_memory_bytes(self) -> int:
        """Peak memory of this worker: device memory on CUDA, resident set elsewhere."""
        if self.records_passes:  # recordings keep memory that nothing has allocated
            return torch.cuda.max_memory_reserved(self.device)
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers."""
        self._layout.settle()
        self._graphs = None
        self._deepspeed.destroy()
        gc.collect()

    def _read(self, reader: FragmentReader, kind: str, fragment: Fragment) -> Tensor:
        """fp32 [numel] of a fragment. Of what every rank holds, each reads a part and takes the others' from them."""
        start, numel = fragment.start, fragment.numel
        if not fragment.shared or self.world_size == 1 or numel < _LEAST_DIVIDED:
            return reader.read(kind, fragment.name, start, numel)
        share = -(-numel // self.world_size)
        first = min(self.rank * share, numel)
        count = min(share, numel - first)
        part = torch.zeros(share, device=self.device)
        part[:count] = reader.read(kind, fragment.name, start + first, count)
        whole = part.new_empty(share * self.world_size)
        buckets.all_gather(whole, part)
        return whole[:numel]

    def _show_shards(self) -> None:
        """Tell an optimizer whose step depends on whole tensors what ZeRO's flat tensors hold."""
        segments, count = tensor_segments(self._layout, self.shapes)
        if isinstance(self._optimizer, TensorwiseOptimizer):
            reduce = (lambda norms: None) if self._layout.shared else self.sum_over_workers
            self._optimizer.set_segments(segments, count, reduce)
        elif isinstance(self._optimizer, Muon):
            low = self.device.type == "cuda" or self.settings.resolved_precision == "bf16"
            self._optimizer.set_shards(
                segments,
                matrix_shapes(self.shapes),
                self,
                shared=self._layout.shared,
                dtype=torch.bfloat16 if low else torch.float32,
            )

    def _row_moments(self, *, everywhere: bool = False) -> Iterator[Fragment]:
        """The second moments of rows that this rank saves, or those of all matrices."""
        if not isinstance(self._optimizer, Muon):
            return
        numbers = number_tensors(self.shapes)
        places = {tensor_id: (name, part) for name, ids in numbers.items() for part, tensor_id in enumerate(ids)}
        for tensor_id, moment in self._optimizer.row_moments(everywhere=everywhere):
            name, part = places[tensor_id]
            yield Fragment(name, part * len(moment), {ROW_MOMENT: moment}, shared=False)

    def _prepare_moments(self) -> None:
        """Give every master tensor moments of zero and a step count of zero, whatever DeepSpeed did to them."""
        muon = isinstance(self._optimizer, Muon)
        matrices = {piece.flat for piece in self._layout.pieces() if muon and is_hidden_matrix(piece.name)}
        for flat in self._layout.flats():
            state = self._optimizer.state[flat]
            for key in MOMENTS[:1] if flat in matrices else MOMENTS:
                if key in state:
                    state[key].zero_()
                else:
                    state[key] = torch.zeros_like(flat, requires_grad=False)
            # torch's fused AdamW needs its step count on the device of the weights, as fp32.
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)


@dataclass(frozen=True)
class SideGroup:
    """All ranks in a process group of their own, on CPU; what checkpoints and batches need of a group."""

    rank: int
    world_size: int
    _group: Any

    def collect_objects(self, value: Any) -> list[Any]:
        """One small JSON-like value of each rank, on rank 0; an empty list on the others."""
        return collect_objects(value, self._group)

    def first_object(self, value: Any) -> Any:
        """The small JSON-like value of rank 0, on every rank."""
        return first_object(value, self._group)

    def sum_and_largest(self, sums: list[int], largest: int) -> tuple[list[int], int]:
        """The sums of all ranks' `sums`, and the largest of all ranks' `largest`, on every rank."""
        if self.world_size == 1:
            return sums, largest
        total, most = torch.tensor(sums), torch.tensor([largest])
        dist.all_reduce(total, group=self._group)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        return total.tolist(), int(most)


def gather_objects(value: Any) -> list[Any]:
    """One small JSON-like value of each rank, on every rank."""
    world_size = dist.get_world_size()
    if world_size == 1:
        return [value]
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, value)
    return gathered


def collect_objects(value: Any, group: Any = None) -> list[Any]:
    """One small JSON-like value of each rank of `group` (by default all), on its rank 0; an empty list elsewhere."""
    if dist.get_world_size(group) == 1:
        return [value]
    is_first = dist.get_rank(group) == 0
    collected: list[Any] = [None] * dist.get_world_size(group) if is_first else []
    dist.gather_object(value, collected if is_first else None, group=group, group_dst=0)
    return collected


def first_object(value: Any, group: Any = None) -> Any:
    """The small JSON-like value of rank 0 of `group` (by default all), on every rank."""
    values = [value]
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def end_process_group() -> None:
    """Destroy the process group and DeepSpeed's state of it, so that this process can start another run."""
    if "deepspeed" in sys.modules and sys.modules["deepspeed"].comm.is_initialized():
        sys.modules["deepspeed"].comm.destroy_process_group()
    else:
        dist.destroy_process_group()


def _initialise(
    deepspeed: Any, model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], settings: EngineConfig
) -> Any:
    """DeepSpeed's engine. Raises `InputError` if it refuses `engine.deepspeed`."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # BF16_Optimizer prints what memory it sees
            return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    except Exception as error:
        of_the_machine = isinstance(error, (torch.OutOfMemoryError, dist.DistError))
        if not settings.deepspeed or of_the_machine or _raised_in_our_code(error):
            raise
        raise InputError(f"engine.deepspeed: DeepSpeed refuses it ({error}).") from error


def _raised_in_our_code(error: Exception) -> bool:
    """Whether the innermost frame is ours: DeepSpeed calls our optimizers and patches, whose bugs are not its own."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame.f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]

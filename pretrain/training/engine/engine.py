"""The one module that knows DeepSpeed: forward, backward, step, and the optimizer's state as named fragments.

DeepSpeed averages gradients over workers and over accumulation steps. Here a loss comes in already divided by
its global count (law 3), so this module undoes the average over workers and asks for none over steps.

A checkpoint is made of fragments, "entries start to stop of the parameter called so, with their moments", which
every ZeRO stage can tell of the piece it holds. Any number of workers at any stage can therefore read what
any other wrote, without a conversion.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import math
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pretrain.common.memory import hold_freed_memory, return_freed_memory, share_one_heap
from pretrain.config import EngineConfig as EngineSettings
from pretrain.model.encoder import Embeddings
from pretrain.training.optim import Lamb, Segment, cut_segments, number_tensors, square_sum

_STEPS_NEVER = 1 << 60
# Gradients on their way between workers. Bigger ones save no time and are copied three times on that way.
_BUCKET_ENTRIES = 10_000_000
_SUM_ENTRIES = 1 << 20  # of gradients that are added in one go


class StepResult(NamedTuple):
    """What became of one optimizer step."""

    applied: bool  # false when NaN or inf in the gradients made DeepSpeed or us leave the weights alone
    gradient_norm: float  # global, before clipping; inf when not applied


@dataclass(frozen=True)
class Fragment:
    """Entries [start, start + numel) of the flattened parameter `name`, as this rank holds them.

    `tensors` are 1-D fp32 views into the optimizer: "weight", "exp_avg", "exp_avg_sq". `shared` says that other
    ranks hold the same entries.
    """

    name: str
    start: int
    tensors: dict[str, Tensor]
    shared: bool

    @property
    def numel(self) -> int:
        return self.tensors["weight"].numel()


class FragmentReader(Protocol):
    """Where `Engine.load` finds what was saved; `pretrain.checkpoint.store.CheckpointReader` is one."""

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor: ...  # fp32 [numel]


@dataclass(frozen=True)
class SideGroup:
    """All ranks in a process group of their own, on CPU; what `pretrain.checkpoint.store` needs of a group."""

    rank: int
    world_size: int
    _group: Any

    def gather_objects(self, value: Any) -> list[Any]:
        """One small JSON-like value of each rank, on every rank."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered


class Engine:
    """A model under DeepSpeed ZeRO.

    Args:
        model: parameters in fp32 on any device; DeepSpeed casts and moves them.
        make_optimizer: from (name, parameter) pairs to an optimizer whose groups carry `names`, and `rate_share`
            where a group's learning rate is a share of the run's.
        settings: stage, precision, clipping and DeepSpeed's own section.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer],
        settings: EngineSettings,
    ) -> None:
        if not torch.cuda.is_available():
            hold_freed_memory()
            share_one_heap()
        deepspeed = _import_deepspeed()
        if not dist.is_initialized():
            raise RuntimeError("the process group must be initialised before the engine")
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        self.settings = settings
        self._loss_scale = 1.0  # of the gradients of this step
        self.beat: Callable[[], None] = lambda: None  # called as the engine comes on
        # Around work that takes long without that, with the seconds it may take.
        self.allow: Callable[[float], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
        # Around waits for data or storage, with what is waited for.
        self.awaiting: Callable[[str], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
        # DeepSpeed's fp32 stage 0 neither clips with a norm we can see nor notices NaN: there we do both.
        self._bare = settings.zero_stage == 0 and settings.precision == "fp32"
        named = list(model.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in named}
        self._optimizer = make_optimizer(named)
        self._groups = [list(group["names"]) for group in self._optimizer.param_groups]
        with contextlib.redirect_stdout(io.StringIO()):  # BF16_Optimizer prints what memory it sees
            self._deepspeed, *_ = deepspeed.initialize(
                model=model, optimizer=self._optimizer, config=deepspeed_config(settings, self.world_size)
            )
        return_freed_memory()  # of the whole fp32 model, which ZeRO has cut up by now
        self.module = self._deepspeed.module
        self.device = torch.device(self._deepspeed.device)
        self._parameters = dict(self.module.named_parameters())
        if hasattr(self._scaler(), "raise_error_at_min_scale"):
            self._scaler().raise_error_at_min_scale = False  # `loop` ends such a run, with its checkpoint named
        if settings.zero_stage:
            self._take_over_norm()
        # Several workers of stage 2 have no room for whole sums, and a GPU reduces while it computes.
        ours = settings.zero_stage in (1, 2) if self.world_size == 1 else settings.zero_stage == 1
        ours &= self.world_size == 1 or self.device.type == "cpu"
        self._sums = _Sums.take_over(self._deepspeed.optimizer) if ours else None
        if self._sums:
            ask_for_rows(self.module)
        self._prepare_moments()
        if isinstance(self._optimizer, Lamb):
            self._tell_lamb()

    def forward(self, batch: Any) -> Any:
        """The module's output for one micro-batch."""
        self.beat()
        return self._deepspeed(batch)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of `loss`, this rank's share of the global loss; `last` micro-batch of the step or not."""
        self._deepspeed.set_gradient_accumulation_boundary(last)
        # DeepSpeed's own reduction divides by the number of workers.
        self._deepspeed.backward(loss if self._sums else loss * self.world_size, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> StepResult:
        """Clip, and step the optimizer unless a gradient is not finite; gradients are cleared either way."""
        for group in self._deepspeed.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("rate_share", 1.0)
        if self._bare:
            return self._bare_step()
        # FP16_UnfusedOptimizer alone reports the norm of the scaled gradients.
        self._loss_scale = self.scaler_state().get("cur_scale", 1.0)
        scale = self._loss_scale if self.settings.zero_stage == 0 else 1.0
        if self._sums:
            self._sums.finish()
        self._deepspeed.step()
        norm = float(self._deepspeed.get_global_grad_norm() or 0.0) / scale
        applied = bool(self._deepspeed.was_step_applied()) and math.isfinite(norm)
        return StepResult(applied, norm if applied else math.inf)

    def fragments(self) -> Iterator[Fragment]:
        """Every piece of weights and moments that this rank holds."""
        wrapper, stage = self._deepspeed.optimizer, self.settings.zero_stage
        for name, parameter in self._parameters.items():
            if stage == 0:
                held = self._master(name)
                yield self._fragment(name, 0, held, held, slice(None), shared=True)
            elif stage == 3:
                piece = wrapper.get_local_fp32_param(parameter)
                start = self.rank * parameter.ds_tensor.ds_numel
                numel = max(0, min(parameter.ds_tensor.ds_numel, parameter.ds_numel - start))
                if numel:
                    flat = self._stage3_flat(piece)
                    offset = piece.storage_offset() - flat.storage_offset()
                    yield self._fragment(name, start, flat, flat, slice(offset, offset + numel), shared=False)
            elif (mapping := getattr(parameter, "_hp_mapping", None)) is not None:
                flat = self._flats()[self._group_of(name)]
                address = mapping.hp_fragment_address
                piece = slice(address.start, address.start + address.numel)
                yield self._fragment(name, mapping.lp_fragment_address.start, flat, flat, piece, shared=False)

    def load(self, reader: FragmentReader, steps_taken: int) -> None:
        """Take weights and moments from `reader`; `steps_taken` is the optimizer's own count of updates."""
        with torch.no_grad():
            for fragment in self.fragments():
                for kind, tensor in fragment.tensors.items():
                    tensor.copy_(reader.read(kind, fragment.name, fragment.start, fragment.numel))
            for name, parameter in self._parameters.items():
                self._refresh(name, parameter, reader)
        for flat in self._flats():
            self._optimizer.state[flat]["step"].fill_(float(steps_taken))

    def updates(self) -> int:
        """How many updates the optimizer has made (skipped steps do not count)."""
        return int(self._optimizer.state[self._flats()[0]]["step"].item())

    def scaler_state(self) -> dict[str, Any]:
        """The fp16 loss scaler's state; empty in other precisions."""
        scaler = self._scaler()
        return {key: getattr(scaler, key) for key in _SCALER_FIELDS if hasattr(scaler, key)} if scaler else {}

    def load_scaler_state(self, state: Mapping[str, Any]) -> None:
        scaler = self._scaler()
        for key, value in state.items():
            if scaler is not None and key in _SCALER_FIELDS:
                setattr(scaler, key, value)

    def sum_over_workers(self, values: Tensor) -> Tensor:
        """`values`, on any device, summed over all ranks in place."""
        if self.world_size > 1:
            there = values.to(self.device)  # NCCL knows no other
            dist.all_reduce(there)
            if there is not values:
                values.copy_(there)
        return values

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def gather_objects(self, value: Any) -> list[Any]:
        """One small JSON-like value of each rank, on every rank."""
        gathered: list[Any] = [None] * self.world_size
        if self.world_size == 1:
            return [value]
        dist.all_gather_object(gathered, value)
        return gathered

    def side_group(self) -> SideGroup:
        """The same ranks for another thread: its collectives do not meet those of training."""
        return SideGroup(self.rank, self.world_size, dist.new_group(backend="gloo") if self.world_size > 1 else None)

    def seed_device(self, seed: int, start: int) -> None:
        """Seed the device's generator, which flash attention's dropout draws from: apart for each rank and start."""
        if self.device.type == "cuda":
            state = np.random.SeedSequence([seed, self.rank, start]).generate_state(1, np.uint64)
            torch.cuda.manual_seed(int(state[0]) >> 1)

    def peak_memory_bytes(self) -> int:
        """The most memory this worker has held: device memory on CUDA, resident set elsewhere."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def close(self) -> None:
        """Let go of DeepSpeed's hooks and buffers."""
        self._deepspeed.destroy()
        gc.collect()

    # ZeRO's wrappers differ in where they keep master weights; everything that depends on it is below.

    def _flats(self) -> list[Tensor]:
        """The fp32 tensors that the inner optimizer steps, its state's keys."""
        wrapper = self._deepspeed.optimizer
        if self._bare:
            return [p for group in self._optimizer.param_groups for p in group["params"]]
        for attribute in (
            "fp32_partitioned_groups_flat",  # stage 3
            "single_partition_of_fp32_groups",  # stages 1 and 2
        ):
            if hasattr(wrapper, attribute):
                return list(getattr(wrapper, attribute))
        return [p for group in wrapper.fp32_groups for p in group]  # stage 0 in half precision

    def _master(self, name: str) -> Tensor:
        """Stage 0: the whole fp32 weight of a parameter."""
        if self._bare:
            return self._parameters[name]
        position = [n for group in self._groups for n in group].index(name)
        return self._flats()[position]

    def _group_of(self, name: str) -> int:
        return next(number for number, names in enumerate(self._groups) if name in names)

    def _stage3_flat(self, piece: Tensor) -> Tensor:
        storage = piece.untyped_storage().data_ptr()
        return next(flat for flat in self._flats() if flat.untyped_storage().data_ptr() == storage)

    def _fragment(self, name: str, start: int, key: Tensor, held: Tensor, where: slice, *, shared: bool) -> Fragment:
        state = self._optimizer.state[key]
        whole = {"weight": held.detach(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
        return Fragment(name, start, {kind: x.view(-1)[where] for kind, x in whole.items()}, shared)

    def _take_over_norm(self) -> None:
        """Have ZeRO use our norm of the gradients, and take from it, too, whether all of them are finite.

        Its own copies whole gradients to fp64 (twice their size) and takes a collective for each group; whether all are
        finite it asks in another pass and another collective.
        """
        wrapper = self._deepspeed.optimizer

        def norm() -> Tensor:
            gradients = (x.reshape(-1) for group in wrapper.averaged_gradients.values() for x in group)
            return self.sum_over_workers(torch.stack([square_sum(x) for x in gradients]).sum()).sqrt()

        if self.settings.zero_stage == 3:
            wrapper._get_norm_groups = lambda: [norm()]
        else:
            wrapper.scaled_global_norm = norm
        wrapper.has_overflow = lambda *_, **__: False
        if self.settings.zero_stage < 3 and isinstance(self._optimizer, torch.optim.AdamW):
            wrapper.unscale_and_clip_grads = self._scale_in_optimizer

    def _scale_in_optimizer(self, _: Any, norm: Tensor) -> None:
        """Leave clipping and the loss scale to the fused AdamW, which divides by `grad_scale` as it reads a gradient."""
        scale = self._loss_scale  # DeepSpeed's is by now that of the next step
        clip = self.settings.gradient_clip_norm
        factor = (norm / scale + 1e-6) / clip if clip else torch.ones_like(norm)
        self._optimizer.grad_scale = factor.clamp(min=1.0).float() * scale  # pyright: ignore[reportAttributeAccessIssue]

    def _prepare_moments(self) -> None:
        """Give every master tensor moments of zero and a step count of zero, whatever DeepSpeed did to them."""
        for flat in self._flats():
            state = self._optimizer.state[flat]
            for key in ("exp_avg", "exp_avg_sq"):
                if key in state:
                    state[key].zero_()
                else:
                    state[key] = torch.zeros_like(flat, requires_grad=False)
            # torch's fused AdamW wants its step count beside the weights, as fp32.
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)

    def _refresh(self, name: str, parameter: nn.Parameter, reader: FragmentReader) -> None:
        """Bring the weights that the model computes with in line with the master weights."""
        numel = self.shapes[name].numel()
        if self.settings.zero_stage == 3:
            start = self.rank * parameter.ds_tensor.ds_numel  # pyright: ignore[reportAttributeAccessIssue]
            held = max(0, min(parameter.ds_tensor.ds_numel, numel - start))  # pyright: ignore[reportAttributeAccessIssue]
            if held:
                parameter.ds_tensor.data.view(-1)[:held].copy_(reader.read("weight", name, start, held))  # pyright: ignore[reportAttributeAccessIssue]
        if parameter.data.numel() == numel:  # stage 3 keeps small parameters whole
            parameter.data.copy_(reader.read("weight", name, 0, numel).view(self.shapes[name]))

    def _scaler(self) -> Any:
        if self.settings.precision != "fp16":
            return None
        wrapper = self._deepspeed.optimizer
        return getattr(wrapper, "loss_scaler", None) or getattr(wrapper, "loss_scale_config", None)

    def _bare_step(self) -> StepResult:
        parameters = list(self._parameters.values())
        clip = self.settings.gradient_clip_norm or math.inf
        norm = float(nn.utils.clip_grad_norm_(parameters, clip))
        if math.isfinite(norm):
            self._deepspeed.step()
            return StepResult(True, norm)
        self._deepspeed.zero_grad()
        return StepResult(False, math.inf)

    def _tell_lamb(self) -> None:
        """Tell LAMB which entries of which flat shard belong to which tensor."""
        ids = number_tensors(self.shapes)
        segments: dict[Tensor, list[Segment]] = {flat: [] for flat in self._flats()}
        for fragment in self.fragments():
            weight = fragment.tensors["weight"]
            flat = next(f for f in segments if f.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr())
            at = weight.storage_offset() - flat.storage_offset()
            segments[flat] += cut_segments(
                ids[fragment.name],
                self.shapes[fragment.name].numel(),
                fragment.start,
                fragment.start + fragment.numel,
                at,  # pyright: ignore[reportArgumentType]
            )
        tensor_count = max(r.stop for r in ids.values())
        shared = self.settings.zero_stage == 0
        reduce = (lambda norms: None) if shared else self.sum_over_workers
        assert isinstance(self._optimizer, Lamb)
        self._optimizer.set_segments(
            {flat: sorted(pieces) for flat, pieces in segments.items()},
            tensor_count,
            lambda norms: void(reduce(norms)),
        )


class _Sums:
    """The fp32 sums of gradients, added to as gradients come, and brought to their owners at the end of the step.

    DeepSpeed copies every gradient to fp32, to a bucket, divides it by the workers, flattens and copies it back, adds it to
    zeros: some 50 bytes of memory traffic for each entry. Its stage 1 also rounds the sums to half precision on that way, and
    gloo after each worker's part; here each worker's part is rounded once, to be sent, and the owner's is not.

    For several workers these are whole sums, as DeepSpeed's stage 1 has them, cut into the owners' equal parts.
    """

    @classmethod
    def take_over(cls, wrapper: Any) -> _Sums | None:
        """None where sums are not fp32 beside half-precision weights, or not kept beside them (the user's section)."""
        groups = range(len(wrapper.bit16_groups))
        plain = not wrapper.cpu_offload and all(map(wrapper._use_compact_grad_partition_buffer, groups))
        return cls(wrapper) if plain else None

    def __init__(self, wrapper: Any) -> None:
        self._sent = wrapper.dtype
        weights_G = wrapper.bit16_groups_flat
        # fp32 [workers, owner's part] of each group, laid out as its weights are.
        self._sums_G = [
            torch.zeros(weights.numel(), device=weights.device).view(dist.get_world_size(), -1) for weights in weights_G
        ]
        self._places = {
            id(parameter): sums.view(-1).narrow(
                0, parameter.storage_offset() - weights.storage_offset(), parameter.numel()
            )
            for group, weights, sums in zip(wrapper.bit16_groups, weights_G, self._sums_G, strict=True)
            for parameter in group
        }
        self._begun: set[int] = set()  # places that hold a gradient of this step
        own = [wrapper._build_compact_grad_partition_buffer(i) for i in range(len(weights_G))]
        for buffers, sums in zip(own, self._sums_G, strict=True):
            buffers.flat_partition = sums[dist.get_rank()]
            buffers.move_flat_partition(sums.device)  # which cuts it up as DeepSpeed wants it
        wrapper.process_gradients = self._add
        wrapper.reduce_ipg_grads = lambda *_, **__: None
        wrapper._build_compact_grad_partition_buffer = own.__getitem__

    def finish(self) -> None:
        """All gradients of a step have come, and those that have not are zero: every worker gets the sums of its part."""
        for key, place in self._places.items():
            if key not in self._begun:
                place.zero_()
        self._begun.clear()
        if dist.get_world_size() > 1:
            for sums in self._sums_G:
                for part in sums.split(max(1, _BUCKET_ENTRIES // len(sums)), dim=1):
                    self._exchange(part)

    def _exchange(self, sums: Tensor) -> None:
        """Add the other workers' fp32 [workers, entries] to this worker's row."""
        rank, sent = dist.get_rank(), sums.to(self._sent)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        for other, row in enumerate(received):
            if other != rank:
                _add_entries(sums[rank], row)

    def _add(self, parameter: nn.Parameter, _: int) -> None:
        place, first = self._places[id(parameter)], id(parameter) not in self._begun
        self._begun.add(id(parameter))
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            _add_rows(place.view(parameter.shape), gradient, first)
        elif first:
            place.copy_(gradient.reshape(-1))
        else:
            _add_entries(place, gradient.reshape(-1))


def _add_entries(place: Tensor, more: Tensor) -> None:
    """Add to fp32 [entries] as many of any type."""
    if place.is_cuda:
        place.add_(more)
        return
    # A mixed sum is not vectorised on CPUs (seven times slower), and a whole fp32 copy leaves the cache.
    for piece, new in zip(place.split(_SUM_ENTRIES), more.split(_SUM_ENTRIES), strict=True):
        piece.add_(new.float())


def _add_rows(place: Tensor, gradient: Tensor, first: bool) -> None:
    """Add an uncoalesced sparse [V, H] to fp32 `place`, or put it there."""
    if first:
        place.zero_()
    place.index_add_(0, gradient._indices()[0], gradient._values().float())


def ask_for_rows(model: nn.Module) -> None:
    """Have look-ups give the gradients of their rows alone where nothing else uses the table.

    A fine-tuning step of 400 tokens would clear, carry and add up 23 MB for them.
    """
    for part in model.modules():
        if isinstance(part, Embeddings):
            part.sparse_gradient = not part.tied


def end_process_group() -> None:
    """Destroy the process group with what DeepSpeed remembers of it, so that another run may follow in this process."""
    if "deepspeed" in sys.modules and sys.modules["deepspeed"].comm.is_initialized():
        sys.modules["deepspeed"].comm.destroy_process_group()
    else:
        dist.destroy_process_group()


_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis", "scale_window")


def void(_: Any) -> None:
    return None


def deepspeed_config(settings: EngineSettings, world_size: int) -> dict[str, Any]:
    """DeepSpeed's JSON for `settings`; the user's `deepspeed:` section goes over it, key by key."""
    half = settings.precision != "fp32"
    config: dict[str, Any] = {
        # Micro-batches have as many tokens as fit and steps as many micro-batches as they need: these three
        # only have to agree with one another.
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": _STEPS_NEVER,
        # `Engine` clips where DeepSpeed shows no norm; clipping again costs a collective.
        "gradient_clipping": settings.gradient_clip_norm if half or settings.zero_stage else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": settings.zero_stage,
            "contiguous_gradients": True,
            "overlap_comm": torch.cuda.is_available(),
            "reduce_bucket_size": _BUCKET_ENTRIES,
            "allgather_bucket_size": 5 * _BUCKET_ENTRIES,
            # Stages 1 and 2: a gradient goes to its owner alone, half the bytes of telling all workers.
            "use_multi_rank_bucket_allreduce": False,
            # Stage 3: small parameters are gathered together with the others, not one by one.
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": _BUCKET_ENTRIES,
        },
        settings.precision if half else "fp16": {"enabled": half},
    }
    if settings.precision == "bf16":
        config["bf16"]["check_grad_overflow"] = True
    if settings.precision == "fp16":
        config["fp16"] |= {"loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2}
    if half and settings.zero_stage:
        # Summing many micro-batches in 8 bits of mantissa loses the later ones. Stage 0 has no such buffer.
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merge(config, settings.deepspeed)


def _merge(config: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in over.items():
        merged[key] = (
            _merge(merged[key], value) if isinstance(merged.get(key), dict) and isinstance(value, dict) else value
        )
    return merged


def deepspeed_ops() -> tuple[dict[str, bool], tuple[str, ...]]:
    """DeepSpeed's compiled ops, each with whether it could be compiled here, and those that came built."""
    deepspeed = _import_deepspeed()
    from deepspeed.git_version_info import installed_ops

    could = {name: can for name, can in deepspeed.ops.__compatible_ops__.items() if name in installed_ops}
    return could, tuple(name for name, built in installed_ops.items() if built)


def _import_deepspeed() -> Any:
    """DeepSpeed, told to do without what it would have to compile first."""
    os.environ.setdefault("LOCAL_RANK", "0")  # it insists on the variable even for one process
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops

    # Its shared-memory collectives for CPU take 18 to 25 s of C++ compilation at the first start.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _choose_zero_for_bf16(deepspeed)
    return deepspeed


def _choose_zero_for_bf16(deepspeed: Any) -> None:
    """Have DeepSpeed's own ZeRO-1 also where weights are bf16 and gradients are summed in fp32.

    There alone it takes `BF16_Optimizer`, which tells every worker all gradients (1.5 times the bytes) and keeps
    them twice. The class that it takes for fp16 and fp32 does the same arithmetic.
    """
    module = deepspeed.runtime.engine
    choose = module.DeepSpeedEngine._do_optimizer_sanity_check
    if hasattr(choose, "__wrapped__"):
        return

    @functools.wraps(choose)
    def choose_zero(engine: Any, optimizer: Any) -> Any:
        chosen = choose(engine, optimizer)
        return module.ZERO_OPTIMIZATION if chosen == module.BFLOAT16 and engine.zero_optimization() else chosen

    module.DeepSpeedEngine._do_optimizer_sanity_check = choose_zero

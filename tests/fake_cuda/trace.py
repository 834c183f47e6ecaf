"""python -m tests.fake_cuda.trace CASE...: a step of each case on fake CUDA tensors, as a line of JSON each.

A case is a dictionary as JSON: `model` and `optimizer` (sections of the config), `stage` and `precision`; `compile`,
`electra` and `cuda_graphs` where they are true; for a fine-tuning `task`, its head, objective and pooling. A line has
`host_reads`: where the host waited for the device, read a value of it, copied from it, or copied to it in a way that
waits, while the loop launched a step; for pretraining `host_reads_of_evaluation`; `collectives` of the step, by name;
and `launches`, the Python functions from which it put work on the device. What would be recorded is launched. Tensors
on two devices, shapes that depend on values, and collectives of tensors that are not on the device are errors.
"""

import contextlib
import dataclasses
import functools
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pretrain.model.kernels import grouped_op
from pretrain.model.kernels.grouping import group_sequences
from tests.distributed import NullWatchdog

STEPS = 3  # the first ones keep constants; DeepSpeed's timers, if they were on, would wait from the third on
PACKAGES = ("pretrain", "finetune", "deepspeed")
VOCABULARY, LENGTHS, TYPES = 30_522, (40, 128, 9, 77), {"bf16": torch.bfloat16, "fp16": torch.float16}
# {operator of ours: its body}: for these operators, fake tensors would compute only shapes.
ATTENTION: dict[Any, Any] = {
    torch.ops.bertrain.grouped_attention.default: grouped_op.forward_op._init_fn,
    torch.ops.bertrain.grouped_attention_backward.default: grouped_op.backward_op._init_fn,
}
WRAPPERS = ("torch._dynamo.eval_frame", "torch._compile")  # of `__torch_dispatch__`
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
host_reads: list[str] = []
host_reads_of_evaluation: list[str] = []
collectives: Counter[str] = Counter()
launches: set[str] = set()


def main(cases: list[str]) -> None:
    """Print what a step of each case does; torch has already found the device that the library registers."""
    pretend_to_have_a_gpu()
    from pretrain.training.engine import end_process_group

    for case in map(json.loads, cases):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.get("ranks", 8))
        take_a_step(case)
        end_process_group()
        reads = {"host_reads": host_reads, "host_reads_of_evaluation": host_reads_of_evaluation}
        print(json.dumps({**reads, "collectives": collectives, "launches": sorted(launches)}), flush=True)


def take_a_step(case: dict[str, Any]) -> None:
    """Run steps of two micro-batches as the training loop does, and record what happens in the last step."""
    from pretrain.batches.batch import StepBatch, copy_to
    from pretrain.config import EngineConfig, OptimizerConfig
    from pretrain.model import attention
    from pretrain.training.engine import Engine
    from pretrain.training.engine.pass_graphs import PassGraphs
    from pretrain.training.optim import make_optimizer, parameter_groups

    switches = {name: case.get(name, False) for name in ("compile", "cuda_graphs")}
    settings = EngineConfig.model_validate({"zero_stage": case["stage"], "precision": case["precision"], **switches})
    PassGraphs.run = launch_what_would_be_recorded  # type: ignore[method-assign]
    optimizer = OptimizerConfig.model_validate(case["optimizer"])
    host_reads_of_evaluation.clear()
    attention.supports_flash = lambda *_: case["precision"] != "fp32"  # type: ignore[assignment]
    batch = batch_of(case)
    with fake_mode() as mode:
        grouped_op.group_sequences = groups_of(mode)  # type: ignore[assignment]
        with torch.device("meta"):
            model = model_of(case)
        put_on_the_device(model, TYPES.get(case["precision"], torch.float32))
        engine = Engine(
            model, lambda named: make_optimizer(optimizer, parameter_groups(named, 0.01)), settings, NullWatchdog()
        )
        fakes = {name: mode.from_tensor(value) for name, value in vars(batch).items() if isinstance(value, Tensor)}
        there = copy_to(dataclasses.replace(batch, **fakes), engine.device)
        fit = fit_of(engine)
        for number in range(STEPS):
            host_reads.clear()
            collectives.clear()
            launches.clear()
            with Copies():
                fit.launch_step(number, StepBatch((there, there), *(1, 1, 1), epoch=0, first_sample=0), False)
        if "task" not in case:
            note_reads_of_evaluation(engine, dataclasses.replace(batch, **fakes))


def launch_what_would_be_recorded(
    graphs: Any, batch: Any, weights: tuple[float, ...], compute: Any, _variant: Any
) -> Tensor:
    """Replace `PassGraphs.run`, since a fake device cannot record graphs."""
    from pretrain.training.engine.pass_graphs import with_common_lengths

    graphs._loss_weights = torch.tensor(weights).pin_memory().to(batch.input_ids.device, non_blocking=True)
    return graphs._run_pass(with_common_lengths(batch), compute)[0]


def note_reads_of_evaluation(engine: Any, batch: Any) -> None:
    """Record the host reads of two evaluation steps, each of two micro-batches in the host's memory."""
    from pretrain.batches.batch import StepBatch
    from pretrain.run.train import Pretraining

    task: Any = object.__new__(Pretraining)
    task._device = engine.device
    task._objective = SimpleNamespace(
        totals=lambda output: loss_of(output).detach()[None], counts=lambda _: torch.ones(1), means=lambda *_: {}
    )
    before, of_step, launches_of_step = len(host_reads), Counter(collectives), set(launches)
    with torch.no_grad(), Copies():
        task._means(engine, [StepBatch((batch, batch), *(1, 1, 1), epoch=0, first_sample=0)] * 2)
    host_reads_of_evaluation.extend(host_reads[before:])
    del host_reads[before:]
    collectives.clear()
    collectives.update(of_step)
    launches.intersection_update(launches_of_step)


def model_of(case: dict[str, Any]) -> nn.Module:
    from finetune.training.model.task_model import TaskModel
    from pretrain.checkpoint.layouts import TaskHead
    from pretrain.config import ElectraConfig, ModelConfig
    from pretrain.model.heads import PretrainingModel
    from pretrain.objectives.replaced_tokens import ElectraModel

    shape = ModelConfig.model_validate(case["model"])
    if "task" in case:
        head, objective, pooling = case["task"]
        return TaskModel(shape, VOCABULARY, head, objective, 2, TaskHead("tanh", pooling=pooling))
    if case.get("electra"):
        return ElectraModel(shape, VOCABULARY, settings=ElectraConfig(generator_width=0.5))
    return PretrainingModel(shape, VOCABULARY, compile=case.get("compile", False))


def batch_of(case: dict[str, Any]) -> Any:
    """Return a batch with sequences of `LENGTHS`; for a task, two are the windows of one example."""
    from finetune.training.model.batches import LabeledBatch
    from tests.batches_by_hand import make_batch

    batch = make_batch(LENGTHS, VOCABULARY, seed=0)
    if "task" not in case:
        return batch
    head, objective, _ = case["task"]
    lengths, windows = torch.tensor(batch.lengths), torch.arange(len(LENGTHS))
    rows = batch.cu_seqlens[:-1].long() if head == "sequence" else torch.arange(sum(batch.lengths))
    inputs = ("input_ids", "token_types", "positions", "cu_seqlens", "token_keys", "lengths")
    return LabeledBatch(
        **{name: getattr(batch, name) for name in inputs},
        query_positions=rows,
        window_of_query=windows if head == "sequence" else windows.repeat_interleave(lengths),
        example_of_window=windows // 2,
        examples=len(windows) // 2,
        labels=torch.zeros((len(rows), 2) if objective in ("labels", "span") else len(rows), dtype=torch.long),
        weights=torch.ones(len(rows)),
        query_indices=rows.numpy(),
    )


def fit_of(engine: Any) -> Any:
    """The loop's state, as far as it launches steps."""
    from pretrain.run.forward_backward import ForwardBackward
    from pretrain.run.loop import Fit
    from pretrain.run.stragglers import RankTimes

    fit: Any = object.__new__(Fit)
    fit.engine, fit.stragglers, fit.stalled_before = engine, RankTimes(engine), 0.0
    fit.plan, fit.saver = (
        SimpleNamespace(learning_rate=lambda _: 1e-3, weight_decay=lambda _: None),
        SimpleNamespace(failed=False),
    )
    task: Any = SimpleNamespace(
        loss_weights=lambda _: (0.01,),
        loss=lambda output, weights: loss_of(output) * weights[0],
        totals=lambda output: loss_of(output)[None],
        flops=lambda _: 1.0,
        stalled_seconds=lambda: 0.0,
        validation_set=lambda: "",
    )
    fit.interruptible, fit.save_is_due = contextlib.nullcontext, lambda: False
    fit.task, fit.forward_backward = task, ForwardBackward(engine, task, fit.stragglers.timed_forward)
    return fit


def loss_of(output: Any) -> Tensor:
    losses = [getattr(output, name) for name in ("mlm_loss", "nsp_loss", "rtd_loss") if hasattr(output, name)]
    return functools.reduce(torch.add, losses) if losses else output.loss


def groups_of(mode: FakeTensorMode) -> Callable[..., Any]:
    """`group_sequences` on the host, where its values are, and its tensors copied to the device as they would be."""
    from pretrain.common.transfers import to_device

    @functools.cache
    def group(boundaries: Any, queries: Any, heads: int, device: torch.device, *more: int) -> Any:
        with unset_fake_temporarily():
            groups = group_sequences(boundaries, queries, heads, torch.device("cpu"), *more)
        return tree_map_only(Tensor, lambda x: to_device(mode.from_tensor(x), device), groups)

    return group


class Copies(TorchDispatchMode):
    """Notes every operation that reads the device and returns something in the host's memory, and every copy to the
    device that waits: all but those from pinned memory that are told not to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self if func in ATTENTION else contextlib.nullcontext():
            result = ATTENTION.get(func, func)(*args, **(kwargs or {}))
        given, made = ([x for x in tree_leaves(part) if isinstance(x, Tensor)] for part in ((args, kwargs), result))
        if any(x.is_cuda for x in given) and any(x.device.type == "cpu" for x in made):
            note_a_read()
        if any(x.is_cuda for x in made):
            caller: Any = sys._getframe(1)
            while caller.f_globals["__name__"] in WRAPPERS:
                caller = caller.f_back
            launches.add(f"{caller.f_globals['__name__']}.{caller.f_code.co_name}")
        if func in COPIES and not made[0].is_cpu and any(x.is_cpu and x.dim() for x in given):
            source = next(x for x in given if x.is_cpu)
            asked = (kwargs or {}).get("non_blocking") or (len(args) > 2 and args[2])
            if not (asked and getattr(source, "_in_pinned_memory", False)):
                note_a_read()
        return result


def note_a_read() -> None:
    ours = [f for f in traceback.extract_stack() if any(f"/{name}/" in f.filename for name in PACKAGES)]
    host_reads.append(f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].line}")


@contextlib.contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """Fake tensors; a value that the host reads is noted, and is 1."""

    def read(mode: Any, func: Any, value: Tensor) -> Any:
        if value.is_cuda:
            note_a_read()
        return True if value.dtype == torch.bool else 1.0

    def constant(values: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
        with unset_fake_temporarily():
            real = make(values, dtype=dtype)
        return mode.from_tensor(real).to(device or "cpu")  # torch keeps the values of its own, and moves them really

    fake_impls.op_implementations_dict[torch.ops.aten._local_scalar_dense.default] = read
    make = torch.tensor
    with FakeTensorMode() as mode, torch.autograd.set_multithreading_enabled(False):
        torch.tensor = constant  # type: ignore[assignment]
        try:
            yield mode
        finally:
            torch.tensor = make


def put_on_the_device(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace parameters and buffers; `Module.to` cannot swap fake ones."""
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device="cuda"))
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")
    model.to = model.bfloat16 = model.half = model.float = lambda *_, **__: model  # type: ignore[assignment]


def pretend_to_have_a_gpu() -> None:
    """Make torch and DeepSpeed take the way of CUDA, and collectives return at once."""
    torch.cuda.is_available = lambda: True
    torch.cuda.synchronize = lambda *_: note_a_read()
    torch.cuda.Event = lambda **_: SimpleNamespace(record=lambda: None)  # type: ignore[assignment,misc]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    FakeTensor.data_ptr = lambda _: 0  # type: ignore[assignment]
    Tensor.is_pinned = lambda self, *_: hasattr(self, "_in_pinned_memory")  # type: ignore[assignment,method-assign]
    Tensor.pin_memory = pin  # type: ignore[assignment,method-assign]
    for name in (
        *("broadcast", "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_single"),
        *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single"),
    ):
        if hasattr(dist, name):
            setattr(dist, name, collective(name))
    dist.barrier = lambda *_, **__: None
    dist.all_gather_object = lambda out, value, **_: out.__setitem__(slice(None), [value] * len(out))

    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class FakeAccelerator(CPU_Accelerator):
        def device_name(self, device_index: int | None = None) -> str:
            return "cuda" if device_index is None else f"cuda:{device_index}"

        def current_device_name(self) -> str:
            return "cuda:0"

        def current_device(self) -> int:
            return 0

        def synchronize(self, device_index: int | None = None) -> None:
            note_a_read()

        def on_accelerator(self, tensor: Tensor) -> bool:
            return tensor.is_cuda

        def create_op_builder(self, class_name: str) -> None:  # CUDA's has no collectives of a CPU to compile
            pass

    accelerator = FakeAccelerator()
    accelerator._name = "cuda"
    set_accelerator(accelerator)


def pin(tensor: Tensor, *_: Any) -> Tensor:
    pinned = tensor.clone()
    pinned._in_pinned_memory = True  # type: ignore[attr-defined]
    return pinned


def collective(name: str) -> Any:
    """A collective that checks the devices of its tensors, as NCCL does, and moves nothing."""

    class Done:
        def wait(self) -> bool:
            return True

    def call(*arguments: Any, async_op: bool = False, **options: Any) -> Any:
        tensors = [x for x in tree_leaves((arguments, options)) if isinstance(x, Tensor)]
        if not all(x.is_cuda for x in tensors):
            raise RuntimeError(f"{name} of a tensor that is not on the device")
        collectives[name] += 1
        return Done() if async_op else None

    return call


if __name__ == "__main__":
    main(sys.argv[1:])

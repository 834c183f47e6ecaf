"""The bytes that workers exchange in one optimizer step, against ZeRO's own arithmetic.

Counted is what any library hands to torch's process group, Python's last station before gloo or NCCL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from pretrain.config import EngineConfig as EngineSettings
from pretrain.config import ModelConfig, OptimizerConfig
from pretrain.model.heads import PretrainingModel
from pretrain.training.engine import Engine
from pretrain.training.optim import make_optimizer, parameter_groups
from tests.batches_by_hand import make_batch
from tests.distributed import run_workers

SHAPE = ModelConfig(size="custom", layers=2, hidden=64, heads=2, max_positions=64)
VOCABULARY = 101
GROUPS = 2  # parameters with weight decay and without
RECORD = 7  # doubles: what `loop` sums over workers after each step


def formula_bytes(stage: int, parameters: int, width: int, workers: int, micro_batches: int) -> float:
    """Bytes that each of `workers` sends in one optimizer step; `width` is that of a gradient and of a weight.

    Rajbhandari et al., ZeRO (arXiv:1910.02054), section 7, in its unit, a (workers - 1) / workers of all parameters:
    plain data parallelism reduces and gathers gradients (2); stages 1 and 2 reduce gradients and gather weights (2).
    Stage 3 reduces gradients and gathers weights twice (3), or once (2) where, as here, all of them may stay live
    between forward and backward. The paper has one micro-batch; stages 2 and 3 keep no whole gradient for the next.
    """
    unit = width * parameters * (workers - 1) / workers
    return unit * {0: 2, 1: 2, 2: micro_batches + 1, 3: 2 * micro_batches}[stage]


class Call(NamedTuple):
    name: str
    dtype: torch.dtype
    sent: float  # bytes, by each worker on average


def sent_bytes(name: str, tensors: list[list[torch.Tensor]], workers: int) -> float:
    """What the best algorithm sends for a collective; whole is its largest argument."""
    whole = max(sum(t.numel() * t.element_size() for t in argument) for argument in tensors)
    return whole * (2 if name.startswith("allreduce") else 1) * (workers - 1) / workers


def listen(calls: list[Call]) -> None:
    """Have every collective of this process, of all methods of a process group, noted in `calls`."""
    group = torch._C._distributed_c10d.ProcessGroup  # pyright: ignore[reportAttributeAccessIssue]
    words = ("reduce", "gather", "scatter", "broadcast", "alltoall", "all_to_all", "barrier", "send", "recv")
    for name in dir(group):
        if any(word in name for word in words):
            setattr(group, name, noted(name, getattr(group, name), calls))


def noted(name: str, method: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        tensors = [found for argument in (*arguments, *options.values()) if (found := tensors_in(argument))]
        dtype = tensors[0][0].dtype if tensors else torch.bool
        calls.append(Call(name, dtype, sent_bytes(name, tensors or [[]], dist.get_world_size())))
        return method(self, *arguments, **options)

    return call


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for part in value for t in tensors_in(part)] if isinstance(value, list | tuple) else []


def take_step(engine: Engine, micro_batches: int) -> None:
    """As `loop` does, with other tokens on every worker."""
    for number in range(micro_batches):
        batch = make_batch((7, 12, 20), VOCABULARY, seed=number + 100 * engine.rank)
        losses = engine.forward(batch)
        engine.backward(losses.mlm_loss / 100 + losses.nsp_loss / 10, last=number == micro_batches - 1)
    assert engine.step(1e-3).applied
    engine.sum_over_workers(torch.zeros(RECORD, dtype=torch.float64))


def count_steps(cases: list[tuple[int, str]]) -> dict[tuple[int, str, int], tuple[int, list[Call]]]:
    """(parameters, calls of one step) by (stage, precision, micro-batches)."""
    calls: list[Call] = []
    listen(calls)
    found = {}
    for stage, precision in cases:
        settings = EngineSettings(zero_stage=stage, precision=precision, compile=False)  # type: ignore[arg-type]
        engine = Engine(
            PretrainingModel(SHAPE, VOCABULARY),
            lambda named: make_optimizer(OptimizerConfig(), parameter_groups(named, 0.01)),
            settings,
        )
        for _ in range(2):
            take_step(engine, 1)  # ZeRO-3 compares the workers' orders of modules in the first two
        for micro_batches in (1, 2):
            calls.clear()
            take_step(engine, micro_batches)
            numel = sum(shape.numel() for shape in engine.shapes.values())
            found[stage, precision, micro_batches] = (numel, list(calls))
        engine.close()
    return found


@pytest.fixture(scope="module")
def counted() -> dict[int, Any]:
    both = [(stage, precision) for stage in range(4) for precision in ("bf16", "fp32")]
    return {2: run_workers(2, count_steps, both)[0], 3: run_workers(3, count_steps, both[::2])[0]}


CASES = [(2, s, p) for s in range(4) for p in ("bf16", "fp32")] + [(3, s, "bf16") for s in range(4)]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("workers", "stage", "precision"), CASES)
def test_a_step_sends_what_zero_says(counted, workers: int, stage: int, precision: str, micro_batches: int) -> None:
    parameters, calls = counted[workers][stage, precision, micro_batches]
    width, dtype = (2, torch.bfloat16) if precision == "bf16" else (4, torch.float32)
    payload = [call for call in calls if call.dtype == dtype]
    # ZeRO pads parameters or groups to a multiple of the workers.
    assert sum(call.sent for call in payload) == pytest.approx(
        formula_bytes(stage, parameters, width, workers, micro_batches), rel=2e-3
    )
    # Beyond the formula: the gradients' norm, where no worker has all of them, and the record.
    beyond = [call.sent for call in calls if call.dtype != dtype]
    ring = 2 * (workers - 1) / workers
    assert beyond == pytest.approx(([8 * ring] if stage else []) + [8 * RECORD * ring])


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("workers", "stage", "precision"), CASES)
def test_collectives_are_few(counted, workers: int, stage: int, precision: str, micro_batches: int) -> None:
    _, calls = counted[workers][stage, precision, micro_batches]
    names = Counter(call.name for call in calls if call.dtype != torch.float64)
    if stage == 0:
        assert names == {"allreduce": 1}
    elif stage == 3:
        gathers, scatters = (sum(n for name, n in names.items() if word in name) for word in ("gather", "scatter"))
        assert gathers + scatters == names.total()
        assert scatters == micro_batches
        assert gathers <= 2 * micro_batches  # the first module, and all that were fetched ahead with it
    elif stage == 1 and precision == "bf16":
        assert sorted(names.values()) == [GROUPS, GROUPS]  # parts to their owners, weights from them
        assert "alltoall_base" in names or "all_to_all_single" in names
    else:
        assert names.pop("reduce") == workers * (micro_batches if stage == 2 else 1)  # one for each owner
        assert list(names.values()) == [GROUPS]  # gathers

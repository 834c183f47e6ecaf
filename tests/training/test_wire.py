"""The bytes that workers exchange in one optimizer step, against ZeRO's own arithmetic.

Counted is what any library hands to torch's process group, Python's last station before gloo or NCCL.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.config import ModelConfig
from pretrain.model.heads import PretrainingModel
from pretrain.training.engine import Engine
from tests import wire
from tests.batches_by_hand import make_batch
from tests.distributed import engine_of, run_simulated, run_workers
from tests.wire import Call, formula_bytes, listen

SHAPE = ModelConfig(size="custom", layers=2, hidden=64, heads=2, max_positions=64)
VOCABULARY = 101
GROUPS = 2  # parameters with weight decay and without
RECORD = 7  # doubles: what `loop` sums over workers after each step


def take_step(engine: Engine, micro_batches: int) -> None:
    """As `loop` does, with other tokens on every worker."""
    for number in range(micro_batches):
        batch = make_batch((7, 12, 20), VOCABULARY, seed=number + 100 * engine.rank)
        losses = engine.forward(batch)
        engine.backward(losses.mlm_loss / 100 + losses.nsp_loss / 10, last=number == micro_batches - 1)
    assert engine.step(1e-3).applied
    engine.workers.sum_over_workers(torch.zeros(RECORD, dtype=torch.float64))


def count_steps(cases: list[tuple[int, str]]) -> dict[tuple[int, str, int], tuple[int, list[Call]]]:
    """(parameters, calls of one step) by (stage, precision, micro-batches)."""
    # What other ranks would send is what was in memory, and may not be finite.
    torch.empty, torch.empty_like, Tensor.new_empty = torch.zeros, torch.zeros_like, Tensor.new_zeros
    calls: list[Call] = []
    listen(calls)
    found = {}
    for stage, precision in cases:
        engine = engine_of(PretrainingModel(SHAPE, VOCABULARY), zero_stage=stage, precision=precision)
        for _ in range(2):
            take_step(engine, 1)  # ZeRO-3 compares the workers' orders of modules in the first two
        for micro_batches in (1, 2):
            calls.clear()
            take_step(engine, micro_batches)
            numel = sum(shape.numel() for shape in engine.shapes.values())
            found[stage, precision, micro_batches] = (numel, list(calls))
        engine.close()
    return found


CASES = [(stage, precision) for stage in range(4) for precision in ("bf16", "fp32")]


@pytest.fixture(scope="module")
def counted() -> Any:
    return run_workers(2, count_steps, CASES)[0]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(("stage", "precision"), CASES)
def test_a_step_sends_what_zero_says_in_few_collectives(
    counted: Any, stage: int, precision: str, micro_batches: int
) -> None:
    parameters, calls = counted[stage, precision, micro_batches]
    width, dtype = (2, torch.bfloat16) if precision == "bf16" else (4, torch.float32)
    payload = [call for call in calls if call.dtype == dtype]
    # ZeRO pads parameters or groups to a multiple of the workers.
    formula = formula_bytes(stage, parameters, width, 2, micro_batches)
    assert sum(call.sent for call in payload) == pytest.approx(formula, rel=2e-3)
    # Beyond the formula: the gradients' norm, where no worker has all of them (DeepSpeed's own of two groups), and the
    # record. A ring of two sends every byte once.
    beyond = [call.sent for call in calls if call.dtype != dtype]
    assert beyond == pytest.approx([8] * {0: 0, 3: 2}.get(stage, 1) + [8 * RECORD])
    names = Counter(call.name for call in calls if call.dtype != torch.float64)
    if stage == 0:
        assert names == {"allreduce": 1}
    elif stage == 3:
        gathers, scatters = (sum(n for name, n in names.items() if word in name) for word in ("gather", "scatter"))
        assert gathers + scatters == names.total()
        assert scatters == micro_batches
        assert gathers <= 2 * micro_batches  # the first module, and all that were fetched ahead with it
    else:  # parts to their owners, weights from them
        sends = GROUPS * (micro_batches if stage == 2 else 1)
        assert sorted(names.values()) == sorted([sends, GROUPS])
        assert "alltoall_base" in names or "all_to_all_single" in names


RANKS = (8, 1024)
IN_BF16 = CASES[::2]


@pytest.fixture(scope="module")
def simulated() -> dict[int, Any]:
    return {ranks: run_simulated(ranks, count_steps, IN_BF16) for ranks in RANKS}


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("stage", range(4))
def test_many_ranks_send_what_zero_says_in_as_many_collectives(simulated, stage: int, micro_batches: int) -> None:
    for ranks in RANKS:
        parameters, calls = simulated[ranks][stage, "bf16", micro_batches]
        sent = sum(call.sent for call in calls if call.dtype == torch.bfloat16)
        formula = formula_bytes(stage, parameters, 2, ranks, micro_batches)
        # Bytes: ZeRO pads groups, or single parameters, to 16 of each rank.
        padding = 16 * ranks * len(calls)
        assert formula <= sent <= formula * 1.001 + (padding if stage < 3 else 0.3 * formula)
        if stage in (1, 2):
            names = Counter(call.name for call in calls if call.dtype != torch.float64)
            sums = GROUPS * (micro_batches if stage == 2 else 1)
            assert sorted(names.values()) == sorted([sums, GROUPS]), "sums of gradients, and gathers of weights"
            assert any("scatter" in name for name in names)


def count_steps_apart(cases: list[tuple[int, str]]) -> dict[tuple[int, str, int], tuple[int, list[Call]]]:
    """`count_steps` on a rank that nothing reaches, so that its order of modules is compared with no other."""
    from deepspeed.runtime.zero import partitioned_param_coordinator

    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda ints: None
    return count_steps(cases)


@pytest.mark.parametrize(("rank", "ranks"), [(7, 8), (512, 1024)])
def test_all_ranks_call_the_same_collectives_in_the_same_order(simulated, rank: int, ranks: int) -> None:
    """The name, type and bytes of each; else ranks wait for each other for ever."""
    assert run_simulated(ranks, count_steps_apart, IN_BF16, rank=rank) == simulated[ranks]


def test_a_step_a_start_and_a_resume_of_a_real_size() -> None:
    row, of_many = (run_simulated(ranks, wire.count, "mini", 1, ranks, 1) for ranks in (4, 64))
    assert row["bytes"] == pytest.approx(row["formula"], rel=1e-3)
    assert sum(row["collectives"].values()) == 2 * 3, "11.3 M entries with weight decay are 2 buckets"
    assert row["resume_bytes"] == pytest.approx(row["state_bytes"] / 4, rel=1e-3)
    for name in ("start_collectives", "resume_collectives"):
        assert row[name] == of_many[name]
        assert row[name]

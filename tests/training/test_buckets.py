"""Buckets of gradients are sent while the backward pass runs, and weights gathered while the next forward pass does."""

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pretrain.run import loop
from pretrain.run.forward_backward import ForwardBackward
from pretrain.training.engine import Engine, StepResult, buckets, gradient_sums
from pretrain.training.engine.gradient_sums import GradientSums
from tests.batches_by_hand import make_batch
from tests.distributed import engine_of, run_workers
from tests.training.test_engine import (
    LENGTHS,
    MICRO_BATCHES,
    RATE,
    VOCABULARY,
    make_engine,
    make_model,
    reference,
    take_steps,
    whole_state,
)

STAGES = (1, 2)


@pytest.mark.parametrize("entries", [1, 40, 100, 10_000])
def test_buckets_hold_all_parameters_in_the_order_of_the_backward_pass(entries: int) -> None:
    sizes = {"embeddings": 70, "a": 10, "b": 30, "c": 10, "head": 5}
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    optimizer = torch.optim.AdamW([{"params": list(parameters.values()), "names": list(sizes), "lr_scale": 0.5}])
    buckets.divide_groups(optimizer, list(sizes), entries)
    groups = optimizer.param_groups
    assert [name for group in groups for name in group["names"]] == list(reversed(sizes))
    for group in groups:
        assert all(parameters[name] is one for name, one in zip(group["names"], group["params"], strict=True))
        assert group["lr_scale"] == 0.5
        assert len(group["names"]) == 1 or sum(sizes[name] for name in group["names"]) <= entries
    for group, following in itertools.pairwise(groups):
        held = sum(sizes[name] for name in group["names"])
        assert held + sizes[following["names"][0]] > entries, "no bucket is smaller than it must be"


def test_a_bucket_follows_those_that_are_complete_before_it() -> None:
    """Groups by depth, as for layer-wise learning rates, and one that all depths are in."""
    names = ["embeddings", "layer 0", "layer 1", "head"]
    parameters = {name: nn.Parameter(torch.zeros(10)) for name in names} | {
        f"{name} bias": nn.Parameter(torch.zeros(1)) for name in names
    }
    matrices = [{"params": [parameters[name]], "names": [name]} for name in names]
    biases = {"params": [parameters[f"{name} bias"] for name in names], "names": [f"{name} bias" for name in names]}
    optimizer = torch.optim.AdamW([*matrices, biases])
    buckets.divide_groups(optimizer, [name for one in names for name in (one, f"{one} bias")], 100)
    order = [group["names"][0] for group in optimizer.param_groups]
    assert order == ["head", "layer 1", "layer 0", "head bias", "embeddings"]


def take_one_step(engine: Engine, *, without_pairs: bool) -> None:
    """As `take_steps`; with `without_pairs`, the second rank has no NSP loss in its last micro-batch."""
    for number in range(2):
        losses = engine.forward(make_batch(LENGTHS, VOCABULARY, seed=10 * engine.rank + number))
        loss = losses.mlm_loss / 30
        if not (without_pairs and engine.rank == 1 and number == 1):
            loss = loss + losses.nsp_loss / (MICRO_BATCHES * len(LENGTHS))
        engine.backward(loss, last=number == 1)
    assert engine.step(RATE).applied


def record_sends(without_pairs: bool) -> list[list[Any]]:
    """What a step of small buckets does, in order: "gradient", or the entries of a piece that is sent; by stage."""
    found, events = [], list[Any]()
    add, send = GradientSums._add, dist.all_to_all_single

    def noted_add(self: GradientSums, parameter: nn.Parameter, number: int) -> None:
        events.append("gradient")
        add(self, parameter, number)

    def noted_send(received: torch.Tensor, sent: torch.Tensor, *rest: Any, **options: Any) -> Any:
        events.append(sent.numel())
        return send(received, sent, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_ENTRIES", 3000)
        patch.setattr(GradientSums, "_add", noted_add)
        patch.setattr(gradient_sums.dist, "all_to_all_single", noted_send)
        for stage in STAGES:
            events.clear()
            engine = make_engine(stage, "bf16")
            take_one_step(engine, without_pairs=without_pairs)
            engine.close()
            found.append(list(events))
    return found


def test_a_bucket_is_sent_before_the_backward_pass_ends() -> None:
    for events in itertools.chain(*run_workers(2, record_sends, False)):
        sends = [number for number, event in enumerate(events) if event != "gradient"]
        last_gradient = max(number for number, event in enumerate(events) if event == "gradient")
        assert len(sends) > 6
        assert sends[0] < last_gradient
        # The embeddings' own, and that of all biases and norms, which ends with the norm of the embeddings.
        assert sum(number > last_gradient for number in sends) <= 3


def test_ranks_with_other_gradients_send_the_same_buckets() -> None:
    for ours, theirs in zip(*run_workers(2, record_sends, True), strict=True):
        assert ours.count("gradient") > theirs.count("gradient"), "the second rank has none for the NSP classifier"
        assert [event for event in ours if event != "gradient"] == [event for event in theirs if event != "gradient"]


_GATHER = buckets.all_gather


class _Later:
    """A collective that does nothing until it is waited for."""

    def __init__(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        self._whole, self._own = whole, own

    def wait(self) -> None:
        _GATHER(self._whole, self._own.clone())


def train_with_late_gathers(stage: int) -> list[Any]:
    return [train_with_gathers(stage, late) for late in (True, False)]


def train_with_gathers(stage: int, late: bool) -> Any:
    waited = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_ENTRIES", 3000)
        if late:
            gather = lambda whole, own, async_op: waited.append(len(whole)) or _Later(whole, own)  # noqa: E731
            patch.setattr(buckets, "all_gather", gather)
        engine = make_engine(stage, "bf16")
        results = take_steps(engine, range(3))
        with engine.whole_parameters() as parameters:
            lent = {name: parameter.float().clone() for name, parameter in parameters.items()}
        state = whole_state(engine)
        engine.close()
    return results, lent, state, len(waited)


@pytest.mark.parametrize("stage", STAGES)
def test_no_layer_runs_before_its_weights_are_gathered(stage: int) -> None:
    (results, lent, state, waited), expected = run_workers(2, train_with_late_gathers, stage)[0]
    expected, expected_lent, expected_state, _ = expected
    assert waited > 6
    assert results == expected
    assert all(torch.equal(lent[name], value) for name, value in expected_lent.items())
    assert all(torch.equal(state[name], value) for name, value in expected_state.items())


def train_where_one_rank_lacks(rank: int) -> Any:
    """Two steps in which `rank` never has the NSP loss; the gradients' norms, and the moments of NSP's weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_ENTRIES", 3000)
        norms, moments = [], []
        for stage in STAGES:
            engine = make_engine(stage)
            for step in range(2):
                for number in range(2):
                    seed = 100 * step + 10 * engine.rank + number
                    losses = engine.forward(make_batch(LENGTHS, VOCABULARY, seed=seed))
                    pairs = losses.nsp_loss / 40 if engine.rank != rank else 0.0
                    engine.backward(losses.mlm_loss / 30 + pairs, last=number == 1)
                norms.append(float(engine.step(RATE).norm))
            state = whole_state(engine)
            moments.append({name: value for name, value in state.items() if "exp_avg|" in name})
            engine.close()
    return norms, moments


def plain_norm(without: int) -> float:
    """The norm of the first of those steps, in plain torch."""
    model = make_model()
    for rank in range(2):
        for number in range(2):
            losses = model(make_batch(LENGTHS, VOCABULARY, seed=10 * rank + number))
            (losses.mlm_loss / 30 + (losses.nsp_loss / 40 if rank != without else 0.0)).backward()
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_a_gradient_takes_the_others(rank: int) -> None:
    """Also where it owns the parameter."""
    norms, (whole, parts) = run_workers(2, train_where_one_rank_lacks, rank)[0]
    assert norms[0] == pytest.approx(plain_norm(rank), rel=1e-4)
    assert norms[2:] == pytest.approx(norms[:2], rel=1e-4)
    for name, value in whole.items():
        assert value.abs().sum() > 0, name
        torch.testing.assert_close(parts[name], value, rtol=1e-3, atol=1e-6)


UNUSUAL: dict[str, dict[str, Any]] = {
    "no contiguous gradients": {"zero_optimization": {"contiguous_gradients": False}},
    "gradients sent in fp32": {"communication_data_type": "fp32"},
    "sums in bf16": {"data_types": {"grad_accum_dtype": "bf16"}},
}


def train_with_unusual_settings() -> dict[str, list[float]]:
    norms = {}
    for name, section in UNUSUAL.items():
        precision = "fp32" if "contiguous" in name else "bf16"
        engine = engine_of(make_model(), zero_stage=1, precision=precision, deepspeed=section)
        norms[name] = [norm for _, norm, _ in take_steps(engine, range(2))]
        if "sent in fp32" in name:
            assert engine.sums is not None
            assert engine.sums._sent_dtype == torch.float32
        engine.close()
    return norms


def test_settings_of_deepspeed_that_our_sums_do_not_know() -> None:
    expected = [norm for _, norm, _ in reference("adamw")[0][:2]]
    for name, norms in run_workers(2, train_with_unusual_settings)[0].items():
        assert norms == pytest.approx(expected, rel=5e-2), name


def test_the_sums_of_a_step_do_not_wait_for_its_gathers() -> None:
    """Collectives of one group follow one another."""
    calls: list[str] = []

    def noted(name: str, result: Any) -> Any:
        return lambda *_, **__: calls.append(name) or result

    one = torch.ones(1)
    engine: Any = SimpleNamespace(
        forward=noted("forward", one),
        backward=noted("backward", None),
        step=noted("step", StepResult(torch.tensor(2.0, dtype=torch.float64))),
        workers=SimpleNamespace(sum_over_workers=lambda values: calls.append("sum") or values),
        uses_cuda_graphs=False,
    )
    task: Any = SimpleNamespace(
        loss_weights=lambda _: (1.0,),
        loss=lambda *_: one,
        totals=lambda *_: one,
        flops=lambda _: 1.0,
        stalled_seconds=lambda: 0.0,
        validation_set=lambda: "",
    )
    fit: Any = SimpleNamespace(
        engine=engine,
        task=task,
        plan=SimpleNamespace(learning_rate=lambda _: 0.1, weight_decay=lambda _: None),
        stragglers=SimpleNamespace(timed_forward=contextlib.nullcontext, waited=0.0),
        saver=SimpleNamespace(failed=False),
        stalled_before=0.0,
        interruptible=contextlib.nullcontext,
        save_is_due=lambda: False,
        forward_backward=ForwardBackward(engine, task),
    )
    launched = loop.Fit.launch_step(fit, 0, SimpleNamespace(micro_batches=(1, 2), epoch=0), False)
    assert calls == ["forward", "backward"] * 2 + ["sum", "step"]
    assert launched.results.wait().tolist() == [2.0, 0.0, 0.0, 0.0, 2.0, 0.0, 2.0], (
        "sums, stop, save, failed, FLOPs, stalled, norm"
    )

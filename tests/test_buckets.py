"""Buckets of gradients are sent while the backward pass runs, and weights gathered while the next forward pass does."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pretrain.training.engine import Engine, buckets, gradient_sums
from pretrain.training.engine.gradient_sums import GradientSums
from tests.batches_by_hand import make_batch
from tests.distributed import run_workers
from tests.test_engine import LENGTHS, MICRO_BATCHES, RATE, VOCABULARY, make_engine, take_steps, whole_state

STAGES = (1, 2)


@pytest.mark.parametrize("entries", [1, 40, 100, 10_000])
def test_buckets_hold_all_parameters_in_the_order_of_the_backward_pass(entries: int) -> None:
    sizes = {"embeddings": 70, "a": 10, "b": 30, "c": 10, "head": 5}
    parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
    optimizer = torch.optim.AdamW([{"params": list(parameters.values()), "names": list(sizes), "rate_share": 0.5}])
    buckets.divide_groups(optimizer, entries)
    groups = optimizer.param_groups
    assert [name for group in groups for name in group["names"]] == list(reversed(sizes))
    for group in groups:
        assert [parameters[name] is one for name, one in zip(group["names"], group["params"], strict=True)]
        assert group["rate_share"] == 0.5
        assert len(group["names"]) == 1 or sum(sizes[name] for name in group["names"]) <= entries
    for group, following in itertools.pairwise(groups):
        held = sum(sizes[name] for name in group["names"])
        assert held + sizes[following["names"][0]] > entries, "no bucket is smaller than it must be"


def take_one_step(engine: Engine, *, without_pairs: bool) -> None:
    """As `take_steps`; with `without_pairs`, the second rank has no NSP loss in its last micro-batch."""
    for number in range(2):
        losses = engine.forward(make_batch(LENGTHS, VOCABULARY, seed=10 * engine.rank + number))
        loss = losses.mlm_loss / 30
        if not (without_pairs and engine.rank == 1 and number == 1):
            loss = loss + losses.nsp_loss / (MICRO_BATCHES * len(LENGTHS))
        engine.backward(loss, last=number == 1)
    assert engine.step(RATE).applied


def record_sends(stage: int, without_pairs: bool) -> list[Any]:
    """What a step of small buckets does, in order: "gradient", or the entries of a piece that is sent."""
    events: list[Any] = []
    add, send = GradientSums._add, dist.all_to_all_single

    def noted_add(self: GradientSums, parameter: nn.Parameter, number: int) -> None:
        events.append("gradient")
        add(self, parameter, number)

    def noted_send(received: torch.Tensor, sent: torch.Tensor, *rest: Any, **options: Any) -> Any:
        events.append(sent.numel())
        return send(received, sent, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "ENTRIES", 3000)
        patch.setattr(GradientSums, "_add", noted_add)
        patch.setattr(gradient_sums.dist, "all_to_all_single", noted_send)
        engine = make_engine(stage, "bf16")
        take_one_step(engine, without_pairs=without_pairs)
        engine.close()
    return events


@pytest.mark.parametrize("stage", STAGES)
def test_a_bucket_is_sent_before_the_backward_pass_ends(stage: int) -> None:
    for events in run_workers(2, record_sends, stage, False):
        sends = [number for number, event in enumerate(events) if event != "gradient"]
        last_gradient = max(number for number, event in enumerate(events) if event == "gradient")
        assert len(sends) > 6
        assert sends[0] < last_gradient
        # The embeddings' own, and that of all biases and norms, which ends with the norm of the embeddings.
        assert sum(number > last_gradient for number in sends) <= 3


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_with_other_gradients_send_the_same_buckets(stage: int) -> None:
    ours, theirs = run_workers(2, record_sends, stage, True)
    assert ours.count("gradient") > theirs.count("gradient"), "the second rank has none for the NSP classifier"
    assert [event for event in ours if event != "gradient"] == [event for event in theirs if event != "gradient"]


class _Later:
    """A collective that does nothing until it is waited for."""

    def __init__(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        self._whole, self._own = whole, own

    def wait(self) -> None:
        dist.all_gather_single(self._whole, self._own.clone())


def train_with_late_gathers(stage: int, late: bool) -> Any:
    waited = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "ENTRIES", 3000)
        if late:
            gather = lambda whole, own, async_op: waited.append(len(whole)) or _Later(whole, own)  # noqa: E731
            patch.setattr(buckets.dist, "all_gather_into_tensor", gather)
        engine = make_engine(stage, "bf16")
        results = take_steps(engine, range(3))
        with engine.whole_parameters() as parameters:
            lent = {name: parameter.float().clone() for name, parameter in parameters.items()}
        state = whole_state(engine)
        engine.close()
    return results, lent, state, len(waited)


@pytest.mark.parametrize("stage", STAGES)
def test_no_layer_runs_before_its_weights_are_gathered(stage: int) -> None:
    results, lent, state, waited = run_workers(2, train_with_late_gathers, stage, True)[0]
    expected, expected_lent, expected_state, _ = run_workers(2, train_with_late_gathers, stage, False)[0]
    assert waited > 6
    assert results == expected
    assert all(torch.equal(lent[name], value) for name, value in expected_lent.items())
    assert all(torch.equal(state[name], value) for name, value in expected_state.items())

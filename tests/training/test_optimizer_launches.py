"""Optimizers and the gradients' norm do not go tensor by tensor on a GPU: kernels of a step of BERT-Base."""

import math
from typing import Any

import pytest
import torch

from pretrain.config import OptimizerConfig
from pretrain.training.optim import (
    Muon,
    SkippingOptimizer,
    assign_tensor_ids,
    cut_segments,
    lists,
    make_optimizer,
    matrix_shapes,
    muon,
    parameter_groups,
    stable_adamw,
    sum_of_squares,
    sums_of_squares,
    tensorwise,
)
from tests import launches
from tests.distributed import Alone, give_moments, of_whole_tensors
from tests.training.test_muon import SHAPES, make_gradients, make_parameters

KINDS = ("lamb", "stable_adamw", "muon")


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    ("values", "most"),
    [
        # A trust ratio for each of the tensors that decay.
        ({"name": "lamb"}, (270, 630)),
        # Two factors for each tensor.
        ({"name": "stable_adamw"}, (640, 1030)),
        ({"name": "muon"}, (250, 250)),
        ({"name": "adamw"}, (6, 7)),
    ],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "",
)
def test_a_step_has_few_kernels(values: dict[str, Any], most: tuple[int, int], flat: bool) -> None:
    found = launches.of_step(OptimizerConfig.model_validate(values), flat=flat, size="base")
    assert found.total <= most[0 if flat else 1], found.counts.most_common(12)


def test_the_norm_of_the_gradients_has_few_kernels() -> None:
    assert launches.of_norm("base").total <= 20


def train(values: dict[str, Any], *, flat: bool) -> list[torch.Tensor]:
    """The weights after four steps, of which every other has large gradients."""
    generator, named = torch.Generator().manual_seed(1), make_parameters()
    ids, segments = assign_tensor_ids(named), {}
    optimizer = make_optimizer(OptimizerConfig.model_validate(values), parameter_groups(named.items(), 0.1))
    for group in optimizer.param_groups:
        group["lr"] = 0.02
        if not flat:
            continue
        joined = torch.nn.Parameter(torch.cat([named[name].detach().flatten() for name in group["names"]]))
        segments[joined], at = [], 0
        for name in group["names"]:
            numel = named[name].numel()
            segments[joined] += cut_segments(ids[name], numel, 0, numel, at)
            at += numel
        group["params"] = [joined]
    if not flat:
        of_whole_tensors(optimizer)
    elif isinstance(optimizer, Muon):
        give_moments(optimizer).set_shards(segments, matrix_shapes(SHAPES), Alone())
    else:
        give_moments(optimizer).set_segments(segments, max(one.stop for one in ids.values()), lambda _: None)
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(4):
        for parameter in weights:
            parameter.grad = torch.randn(parameter.shape, generator=generator) * (10 if step % 2 else 1)
        optimizer.step()
    return [parameter.detach() for parameter in weights]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_many_tensors_at_a_time_step_as_one_does(kind: str, flat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, on a CPU."""
    values = {"name": kind}
    one_at_a_time = train(values, flat=flat)
    for module in (lists, tensorwise, stable_adamw, muon):
        monkeypatch.setattr(module, "uses_foreach", lambda _: True)
    torch.testing.assert_close(train(values, flat=flat), one_at_a_time, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(lists, "BATCH_ENTRIES", 300)
    torch.testing.assert_close(train(values, flat=flat), one_at_a_time, rtol=1e-5, atol=1e-6)


def test_norms_of_lists_are_those_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (1, 70, 70_000)]
    expected = torch.stack([sum_of_squares(x) for x in values])
    assert sums_of_squares(values).equal(expected)
    monkeypatch.setattr(tensorwise, "uses_foreach", lambda _: True)
    torch.testing.assert_close(sums_of_squares(values), expected, rtol=1e-5, atol=0)


# ---- a step that is left out on the device, and a step that is taken is the one without a flag


class Training:
    """An optimizer and its parameters."""

    def __init__(self, kind: str, found_inf: torch.Tensor | None = None) -> None:
        self.parameters = make_parameters()
        settings = OptimizerConfig.model_validate({"name": kind, "weight_decay": 0.1})
        optimizer = make_optimizer(settings, parameter_groups(self.parameters.items(), 0.1))
        assert isinstance(optimizer, SkippingOptimizer)
        for group in optimizer.param_groups:
            group["lr"] = 0.02
        self.optimizer, optimizer.found_inf = of_whole_tensors(optimizer), found_inf

    def step(self, number: int, bad: float = 0.0) -> None:
        """Take a step; with `bad`, the first gradient of each parameter is this."""
        for name, gradient in make_gradients(number).items():
            if bad:
                gradient.view(-1)[0] = bad
            self.parameters[name].grad = gradient
        self.optimizer.step()

    def everything(self) -> list[torch.Tensor]:
        """Copies of the weights and of all state."""
        states = [value for parameter in self.parameters.values() for value in self.optimizer.state[parameter].values()]
        return [tensor.detach().clone() for tensor in (*self.parameters.values(), *states)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("first", [True, False])
def test_a_step_with_a_bad_gradient_is_left_out_on_the_device(kind: str, bad: float, first: bool) -> None:
    training = Training(kind, torch.zeros(()))
    training.step(0)
    if first:  # as before any step
        for state in training.optimizer.state.values():
            for value in state.values():
                value.zero_()
    before = training.everything()
    training.optimizer.found_inf = torch.ones(())
    training.step(1, bad)
    assert len(before) >= 3 * len(training.parameters)
    assert all(map(torch.equal, before, training.everything()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_the_device_takes_is_the_one_that_the_host_takes(kind: str) -> None:
    ends = []
    for found_inf in (None, torch.zeros(())):
        training = Training(kind, found_inf)
        for number in range(3):
            training.step(number)
        ends.append(training.everything())
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-7)

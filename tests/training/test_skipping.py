"""LAMB, StableAdamW and Muon leave out a step on the device, and a step that they take is the one without a flag."""

import math

import pytest
import torch

from pretrain.config import OptimizerConfig
from pretrain.training.optim import SkippingOptimizer, make_optimizer, parameter_groups
from tests.distributed import of_whole_tensors
from tests.training.test_muon import make_gradients, make_parameters

KINDS = ("lamb", "stable_adamw", "muon")


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

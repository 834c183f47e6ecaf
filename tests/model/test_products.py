"""Weight gradients from a transposed copy, as CPUs with AMX compute them, are those of `F.linear`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pretrain.model.kernels import products


def gradients(function, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = function(x, weight)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype))
    assert x.grad is not None
    assert weight.grad is not None
    return out.detach(), x.grad, weight.grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("copies_operand", [False, True])
@pytest.mark.parametrize("wide", [24, 96])
def test_gradients_are_those_of_linear(
    monkeypatch: pytest.MonkeyPatch, wide: int, copies_operand: bool, compiled: bool
) -> None:
    monkeypatch.setattr(products, "copies_operand", copies_operand)
    used: list[int] = []
    by_copy = products.weight_gradient_by_copy
    monkeypatch.setattr(products, "weight_gradient_by_copy", lambda g, x: used.append(1) or by_copy(g, x))
    x, weight = torch.randn(7, 5, 48).bfloat16(), torch.randn(wide, 48).bfloat16()
    function = torch.compile(products.linear_product, backend="aot_eager") if compiled else products.linear_product
    for ours, theirs in zip(gradients(function, x, weight), gradients(F.linear, x, weight), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 if copies_operand else 0)
    assert bool(used) == copies_operand


def test_a_frozen_weight_or_input_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "copies_operand", True)
    x, weight = torch.randn(4, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    for leaf in (x, weight):
        leaf.requires_grad_()
        products.linear_product(x, weight).sum().backward()
        assert leaf.grad is not None
        assert (weight if leaf is x else x).grad is None
        leaf.requires_grad_(False).grad = None


def test_measuring_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the first start of a run, which measures, would differ from later ones, which read the cache."""
    monkeypatch.setattr(products, "MEASURED_SIZES", (8, 8, 8))
    state = torch.get_rng_state()
    assert products.measure_gain() > 0
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("amx", [False, True])
def test_only_cpus_with_amx_are_measured(monkeypatch: pytest.MonkeyPatch, amx: bool) -> None:
    calls: list[str] = []
    monkeypatch.setattr(products, "cpu_has", lambda flag: amx and flag == "amx_bf16")
    monkeypatch.setattr(products, "cached_rate", lambda what, measure: calls.append(what) or measure())
    monkeypatch.setattr(products, "measure_gain", lambda: 1.5)
    monkeypatch.setattr(products, "copies_operand", False)
    products.choose_weight_gradient()
    assert (products.copies_operand, len(calls)) == (amx, amx)

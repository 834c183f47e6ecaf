"""Optimizers and the gradients' norm do not go tensor by tensor on a GPU: kernels of a step of BERT-Base."""

from typing import Any

import pytest
import torch

from pretrain.config import OptimizerConfig
from pretrain.training.optim import (
    Muon,
    cut_segments,
    lists,
    make_optimizer,
    matrix_shapes,
    muon,
    number_tensors,
    parameter_groups,
    square_sum,
    square_sums,
    stable_adamw,
    tensorwise,
)
from tests import launches
from tests.distributed import Alone, give_moments, of_whole_tensors

TENSORS, MATRICES = 246, 72  # three for a stacked query, key and value


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


SHAPES = {
    "embeddings.word": (50, 8),
    "embeddings.norm_weight": (8,),
    "layers.0.qkv_weight": (24, 8),
    "layers.0.qkv_bias": (24,),
    "layers.0.attention_out_weight": (8, 8),
    "layers.0.ffn_in_weight": (32, 8),
    "layers.1.ffn_in_weight": (32, 8),
    "layers.1.ffn_out_weight": (8, 32),
    "heads.mlm_bias": (50,),
}


def train(values: dict[str, Any], *, flat: bool) -> list[torch.Tensor]:
    """The weights after four steps, of which every other has large gradients."""
    generator = torch.Generator().manual_seed(1)
    named = {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    ids, segments = number_tensors(named), {}
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
@pytest.mark.parametrize(
    "values",
    [{"name": "lamb"}, {"name": "stable_adamw"}, {"name": "muon"}],
    ids=lambda values: "-".join(map(str, values.values())),
)
def test_many_tensors_at_a_time_step_as_one_does(
    values: dict[str, Any], flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a GPU does, on a CPU."""
    one_at_a_time = train(values, flat=flat)
    for module in (lists, tensorwise, stable_adamw, muon):
        monkeypatch.setattr(module, "in_lists", lambda _: True)
    torch.testing.assert_close(train(values, flat=flat), one_at_a_time, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(lists, "ENTRIES_AT_ONCE", 300)
    torch.testing.assert_close(train(values, flat=flat), one_at_a_time, rtol=1e-5, atol=1e-6)


def test_norms_of_lists_are_those_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (1, 70, 70_000)]
    expected = torch.stack([square_sum(x) for x in values])
    assert square_sums(values).equal(expected)
    monkeypatch.setattr(tensorwise, "in_lists", lambda _: True)
    torch.testing.assert_close(square_sums(values), expected, rtol=1e-5, atol=0)

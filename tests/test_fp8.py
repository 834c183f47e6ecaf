"""Matrix products in FP8: close to bf16, independent of a token's batch, and only where they fit."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from batches_by_hand import make_batch, take_sequence
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.config import FinetuneConfig
from pretrain.common.errors import MachineError
from pretrain.config import ModelConfig, PretrainConfig
from pretrain.model.fp8 import fp8_linear
from pretrain.model.heads import PretrainingModel
from pretrain.objectives.masked import MaskedTokens
from pretrain.training import session
from tests.fp8_products import needs_fp8
from tests.test_batches_loader import run_config

VOCABULARY = 101
FAMILIES: dict[str, dict[str, Any]] = {"bert": {}, "modernbert": {"family": "modernbert", "qk_norm": True}}


def tensors(*shapes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@needs_fp8
def test_products_and_gradients_are_close_to_those_of_bf16() -> None:
    x, weight, grad = tensors((24, 64), (32, 64), (24, 32))
    results = []
    for product in (fp8_linear, F.linear):
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = product(*inputs)
        y.backward(grad)
        results.append([y.detach(), *(one.grad for one in inputs)])
    (y, of_x, of_weight), expected = results
    assert 1e-3 < relative(y, expected[0]) < 0.05
    assert 1e-3 < relative(of_x, expected[1]) < 0.05
    assert of_weight.equal(expected[2]), "the gradient of a weight is a product of bf16"


@needs_fp8
def test_scaling_itself_rounds_nothing() -> None:
    x, weight = (one.to(torch.float8_e4m3fn).bfloat16() for one in tensors((16, 32), (16, 32)))
    scale = torch.tensor([2.0**n for n in range(-30, 34, 4)], dtype=torch.bfloat16)[:, None]
    assert fp8_linear(x * scale, weight).equal(fp8_linear(x, weight) * scale)
    torch.testing.assert_close(fp8_linear(x, weight), F.linear(x, weight), rtol=2e-2, atol=2e-2)


@needs_fp8
def test_a_token_does_not_depend_on_others() -> None:
    x, weight = tensors((16, 32), (16, 32))
    together = fp8_linear(torch.cat([x, 1000 * x]), weight)
    assert together[:16].equal(fp8_linear(x, weight))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@needs_fp8
def test_values_that_are_not_finite_are_not_hidden(bad: float) -> None:
    x, weight = tensors((16, 32), (16, 32))
    x[3, 5] = bad
    y = fp8_linear(x, weight)
    assert not y[3].isfinite().any()
    assert y[:3].isfinite().all()
    assert not fp8_linear(torch.zeros_like(x), weight).any()


class Products(TorchDispatchMode):
    """Counts products in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[bool] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted["scaled" in str(func) and "mm" in str(func)] += 1
        return func(*args, **(kwargs or {}))


def make_model(family: str, *, fp8: bool, compile: bool = False) -> PretrainingModel:
    shape = {"size": "custom", "layers": 2, "hidden": 32, "heads": 2, "max_positions": 128, **FAMILIES[family]}
    torch.manual_seed(0)
    model = PretrainingModel(ModelConfig.model_validate(shape), VOCABULARY, fp8=fp8, compile=compile)
    return model.to(torch.bfloat16)


@pytest.mark.parametrize("family", FAMILIES)
@needs_fp8
def test_all_products_of_the_layers_are_in_fp8(family: str) -> None:
    batch, losses = make_batch([20, 40]), []
    for fp8 in (True, False):
        with Products() as products:
            output = make_model(family, fp8=fp8).eval()(batch)
            (output.mlm_loss + output.nsp_loss).backward()
        assert products.counted[True] == (2 * 4 * 2 if fp8 else 0), "query-key-value, output and two of the network"
        losses.append(output.mlm_loss.detach())
    assert 0 < relative(*losses) < 0.02


@needs_fp8
def test_compiled_layers_scale_and_cast_in_fused_kernels() -> None:
    model, batch = make_model("modernbert", fp8=True, compile=True), make_batch([20, 40])
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            output = model(batch)
            (output.mlm_loss + output.nsp_loss).backward()
    ran = Counter(event.name for event in profile.events() or ())
    assert ran["aten::_scaled_mm"] == 2 * 4 * 2
    assert not ran["aten::exp2"], "each scaling is a power of two"


@needs_fp8
def test_a_sequence_has_the_same_loss_in_any_batch() -> None:
    model, batch = make_model("bert", fp8=True).eval(), make_batch([20, 40, 60])
    alone = [model(take_sequence(batch, number)).mlm_loss.float() for number in range(3)]
    torch.testing.assert_close(model(batch).mlm_loss.float(), torch.stack(alone).sum(), rtol=2e-3, atol=0)


@needs_fp8
def test_training_learns_as_in_bf16() -> None:
    batch, ends = make_batch([60, 60, 60, 60]), []
    for fp8 in (True, False):
        model = make_model("bert", fp8=fp8, compile=fp8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(25):
            output = model(batch)
            loss = output.mlm_loss / len(batch.masked_rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(float(loss.detach()))
    assert ends[0] < 2.5, "from 4.6"
    assert abs(ends[0] - ends[1]) < 0.25 * (4.6 - ends[1])


def test_fp8_needs_bf16_and_widths_of_its_kernels() -> None:
    fp8: dict[str, Any] = {"engine": {"fp8": True, "micro_batch_tokens": 512}}
    config = run_config(**fp8)
    assert config.engine.precision == "bf16"
    layer: Any = MaskedTokens(config, VOCABULARY).model.layers[0]
    assert layer.functions.product is fp8_linear
    custom = {"size": "custom", "layers": 1, "hidden": 40, "heads": 2}
    pairs = {"objective": "none"}
    refused: list[tuple[dict[str, Any], str]] = [
        ({"engine": {**fp8["engine"], "precision": "fp32"}}, "engine.precision is fp32"),
        ({**fp8, "model": custom}, "model.hidden is 40"),
        ({**fp8, "model": {**custom, "hidden": 64, "intermediate": 100}}, "model.intermediate is 100"),
        ({**fp8, "model": {**custom, "hidden": 32, "heads": 8, "kv_heads": 1}}, "keys and values are 8"),
        ({**fp8, "pairs": pairs, "electra": {"generator_width": 0.25}}, "does not fit electra"),
    ]
    for wrong, message in refused:
        with pytest.raises(ValueError, match=message):
            run_config(**wrong)
    task = yaml.safe_load(next(Path("configs/finetune").glob("*.yaml")).read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="fp8 is for pretraining"):
        FinetuneConfig.model_validate({**task, "engine": {"fp8": True}})


def test_a_gpu_before_hopper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(engine={"fp8": True, "micro_batch_tokens": 512})
    assert isinstance(config, PretrainConfig)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, has=capability: has)
        if capability == (9, 0):
            session._check_device(config, torch.device("cuda"))
        else:
            with pytest.raises(MachineError, match=r"needs compute capability 9\.0; A100 has 8\.0"):
                session._check_device(config, torch.device("cuda"))

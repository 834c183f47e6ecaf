"""`engine.flash_attention`: other kernels of flash attention than torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.nn.attention as attention

from finetune.config import FinetuneConfig
from pretrain.common.errors import InputError, MachineError
from pretrain.config import EngineConfig, load_config
from pretrain.model.attention.flash import use_kernel
from pretrain.model.precision import unsupported

MODERNBERT = Path(__file__).parent.parent / "configs" / "pretrain" / "modernbert-base.yaml"


@pytest.fixture
def activated() -> Iterator[list[str]]:
    """The kernels that were activated; torch's registry has a stand-in for FA4 meanwhile."""
    registry = pytest.importorskip("torch.nn.attention._registry")
    names: list[str] = []
    before = registry._FLASH_ATTENTION_IMPLS["FA4"]
    attention.register_flash_attention_impl("FA4", register_fn=lambda: names.append("FA4"))
    yield names
    attention.register_flash_attention_impl("FA4", register_fn=before)


def test_torch_takes_the_kernel(activated: list[str]) -> None:
    use_kernel("fa4")
    assert activated == ["FA4"]


@pytest.mark.parametrize(("kernel", "package"), [("fa3", "flash_attn_interface"), ("fa4", "flash-attn-4")])
def test_a_kernel_that_is_not_installed_is_named(kernel: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn_interface", "flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(MachineError, match=f"engine.flash_attention: {kernel}: cannot be used .*{package}"):
        use_kernel(kernel)


def test_a_torch_without_the_choice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention, "activate_flash_attention_impl")
    with pytest.raises(MachineError, match="offers no other kernels"):
        use_kernel("fa4")


def test_kernels_without_dropout_are_refused_with_it() -> None:
    assert load_config(MODERNBERT, ["engine.flash_attention=fa4"]).engine.flash_attention == "fa4"
    with pytest.raises(InputError, match=r"fa4 has no dropout, but model\.attention_dropout is 0\.1"):
        load_config(MODERNBERT, ["engine.flash_attention=fa4", "model.attention_dropout=0.1"])


@pytest.mark.parametrize(
    "without",
    [["engine.precision=fp32"], ["model.size=custom", "model.layers=2", "model.hidden=768", "model.heads=2"]],
    ids=["precision", "width of heads"],
)
def test_kernels_are_refused_where_they_had_no_effect(without: list[str]) -> None:
    with pytest.raises(InputError, match="fa4 would have no effect"):
        load_config(MODERNBERT, ["engine.flash_attention=fa4", *without])


def test_they_are_for_pretraining() -> None:
    values = {"name": "x", "classification": {"train": "t.csv", "dev": "d.csv"}, "engine": {"flash_attention": "fa3"}}
    with pytest.raises(ValueError, match=r"engine\.flash_attention is for pretraining"):
        FinetuneConfig.model_validate(values)


@pytest.mark.parametrize(
    ("kernel", "capability", "has_it"),
    [("fa3", (9, 0), True), ("fa3", (10, 0), False), ("fa4", (10, 0), True), ("fa4", (8, 0), False)],
)
def test_each_kernel_is_for_its_gpus(kernel: str, capability: tuple[int, int], has_it: bool) -> None:
    engine = EngineConfig.model_validate({"precision": "bf16", "flash_attention": kernel})
    assert (not unsupported(engine, capability)) == has_it

"""What torch.compile makes of a step, compiled to machine code of three kinds of GPUs without one; needs triton."""

from typing import Any

import pytest
import torch

from tests import fake_cuda

pytest.importorskip("triton", reason="triton is not installed; torch's build for CPUs does not bring it")
pytestmark = pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch has a CUDA device of its own")

# All layers of a model share their programs. BERT has dropout. In fp32, attention has kernels of its own.
LARGE = {"size": "large", "layers": 2, "max_positions": 512}
MODERN = {"family": "modernbert", "size": "base", "layers": 2}
CASES: dict[str, dict[str, Any]] = {
    "bert-large": {"model": LARGE, "precision": "bf16"},
    "modernbert-base": {"model": MODERN, "precision": "bf16"},
    "fp32": {"model": {"size": "mini", "max_positions": 128}, "precision": "fp32"},
}
LAYER = {"pretrain.model.block.after_attention", "pretrain.model.block.embed", "pretrain.model.heads.mlm_transform"}
ATTENTION = {
    f"pretrain.model.kernels.kernels.{name}" for name in ("heads_kernel", "softmax_kernel", "softmax_backward_kernel")
}
LOSS = "pretrain.model.kernels.fused_cross_entropy.losses_and_gradient"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = [{**case, "stage": 1, "optimizer": {"name": "adamw"}} for case in CASES.values()]
    return dict(zip(CASES, fake_cuda.run("kernels", cases, tmp_path_factory.mktemp("kernels")), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_every_kernel_of_a_compiled_step_becomes_machine_code(compiled: dict[str, dict[str, Any]], name: str) -> None:
    assert {*LAYER, LOSS, *(ATTENTION if name == "fp32" else ())} <= set(compiled[name]["functions"])
    assert compiled[name]["kernels"].keys() == {"80", "90", "100"}
    for kernels in compiled[name]["kernels"].values():
        assert len(kernels) >= 10
        assert all(size > 1000 for size in kernels.values())


@pytest.mark.parametrize("name", CASES)
def test_no_address_is_computed_with_a_division_by_a_size_of_the_model(
    compiled: dict[str, dict[str, Any]], name: str
) -> None:
    """Such a division takes longer than to read an element."""
    assert compiled[name]["divides"] == []

"""The scores of a vocabulary lie in rows that cuBLAS's fast kernels take, and gaps between rows change nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.model.kernels import fused_cross_entropy
from pretrain.model.kernels.fused_cross_entropy import SoftTargets, empty_scores, soft_target_losses, vocabulary_losses
from pretrain.objectives.replaced_tokens import sample_tokens

WIDTH, VOCABULARY, TOKENS = 16, 30_522, 6


class Products(TorchDispatchMode):
    """Records the operands and outputs of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.matrices += [*args, result]
        return result


def inputs(device: str, dtype: torch.dtype, vocabulary: int = VOCABULARY) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden, word, bias = (
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in ((TOKENS, WIDTH), (vocabulary, WIDTH), (vocabulary,))
    )
    return hidden, word, bias, torch.randint(0, vocabulary, (TOKENS,), generator=generator).to(device)


def soft(hidden: Tensor, word: Tensor, bias: Tensor) -> SoftTargets:
    return SoftTargets(hidden.detach() + 0.5, word.detach(), bias.detach(), 2.0, 0.7, 0.3)


LOSSES = {
    "labels": lambda h, w, b, labels, fused: vocabulary_losses(h, w, b, labels, fused),
    "teacher": lambda h, w, b, labels, fused: soft_target_losses(h, w, b, labels, soft(h, w, b), fused),
}


@pytest.mark.parametrize("name", LOSSES)
def test_every_product_of_the_loss_has_aligned_rows(name: str) -> None:
    hidden, word, bias, labels = inputs("meta", torch.bfloat16)
    with Products() as products:
        LOSSES[name](hidden, word, bias, labels, False)[0].backward()
    assert len(products.matrices) == 3 * (4 if name == "teacher" else 3)
    scores = 0
    for matrix in products.matrices:
        assert 1 in matrix.stride()
        scores += tuple(matrix.shape) == (TOKENS, VOCABULARY)
        assert max(matrix.stride()) * matrix.itemsize % 16 == 0, (matrix.shape, matrix.stride())
    assert scores >= 2  # the product's output, and the gradient as an operand


def test_a_generators_samples_have_them_too() -> None:
    hidden, word, bias, labels = inputs("meta", torch.bfloat16)
    with Products() as products:
        sample_tokens(hidden, word, bias, labels.int())
    assert all(max(matrix.stride()) * matrix.itemsize % 16 == 0 for matrix in products.matrices)
    assert len(products.matrices) == 3


@pytest.mark.parametrize("rows", [1, TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_written_where_it_belongs(rows: int, dtype: torch.dtype) -> None:
    """torch neither moves nor copies an output with gaps between its rows."""
    hidden, word, *_ = (x.detach() for x in inputs("cpu", dtype, 101))
    hidden, buffer = hidden[:rows], torch.full((rows, 128), 7.0, dtype=dtype)
    out = buffer[:, :101]
    product = torch.mm(hidden, word.T, out=out)
    assert product.data_ptr() == buffer.data_ptr()
    assert product.stride() == out.stride() == buffer.stride()
    torch.testing.assert_close(buffer[:, :101], hidden @ word.T)
    assert (buffer[:, 101:] == 7).all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_gaps_change_nothing(name: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute() -> list[Tensor]:
        hidden, word, bias, labels = inputs("cpu", torch.float32, 101)
        losses = LOSSES[name](hidden, word, bias, labels, fused)
        return [*losses, *torch.autograd.grad(losses[0], (hidden, word, bias))]

    monkeypatch.setattr(fused_cross_entropy, "LOGITS_PER_CHUNK", 4 * 101)  # pieces of three tokens
    expected = compute()

    def with_gaps(rows: int, word: Tensor) -> Tensor:
        return word.new_full((rows, 128), float("nan"))[:, : len(word)]

    monkeypatch.setattr(fused_cross_entropy, "empty_scores", with_gaps)
    torch.testing.assert_close(compute(), expected, rtol=1e-5, atol=1e-6)


def test_a_cpu_has_no_gaps() -> None:
    assert empty_scores(3, torch.empty(101, 2)).is_contiguous()
    assert empty_scores(3, torch.empty(101, 2, device="meta")).stride() == (128, 1)
    assert empty_scores(3, torch.empty(128, 2, device="meta")).is_contiguous()

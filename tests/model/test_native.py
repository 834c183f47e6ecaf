"""The loops in C++ equal torch's operations, in values and gradients; without a compiler torch's take their place."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pretrain.config import ModelConfig
from pretrain.model.block import BlockFunctions, LayerWeights, after_attention
from pretrain.model.encoder import Encoder
from pretrain.model.kernels import fused_cross_entropy, grouped_op, native
from pretrain.model.kernels.fused_cross_entropy import vocabulary_losses
from pretrain.model.kernels.grouped_op import grouped_attention
from pretrain.model.kernels.layout import AttentionOptions, TokenLayout
from pretrain.model.kernels.native import prefer_native_attention
from pretrain.model.positions import rotation
from tests.batches_by_hand import make_batch

LENGTHS = (1, 2, 5, 17, 33, 64, 100)
# Of bf16, one rounding of results; torch also rounds queries, scores and weights in between.
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 5e-2}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CXX", "no-such-compiler")
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def apart(one: Tensor, other: Tensor) -> float:
    """The norm of the difference, as a share of the other's norm."""
    return float((one.float() - other.float()).norm() / other.float().norm().clamp_min(1e-12))


def results(compute: Callable[[], Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of its inputs."""
    for tensor in inputs:
        tensor.grad = None
    output = compute()
    output.backward(torch.sin(torch.arange(output.numel()) * 1.0).view_as(output).to(output.dtype))
    return [output.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


ASKED = (0, 1, 3, 10, 10, 60, 61, 221)  # one token twice; sequences without a query


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("width", [16, 48, 64])
@pytest.mark.parametrize(("dropout", "asked"), [(0.0, None), (0.1, None), (0.0, ASKED), (0.1, ASKED)])
@pytest.mark.parametrize(
    ("window", "rotary"), [(0, ""), (0, "halves"), (0, "interleaved"), (30, "halves"), (3, ""), (3, "interleaved")]
)
def test_attention_equals_batched_matmuls(
    dtype: torch.dtype, width: int, dropout: float, asked: tuple[int, ...] | None, window: int, rotary: str
) -> None:
    torch.manual_seed(0)
    if 0 < 4 * window <= max(LENGTHS):
        dropout = 0.0  # the masks differ, because batched matmuls cut long sequences into chunks
    batch, options = make_batch(LENGTHS), AttentionOptions(heads=3, dropout=dropout, window=window)
    rows = None if asked is None else torch.tensor(asked)
    turns = rotation(batch.positions, width, 500.0, interleaved=rotary == "interleaved") if rotary else None
    layout = TokenLayout(batch.cu_seqlens, LENGTHS, rows, batch.token_keys, turns)
    qkv = torch.randn(sum(LENGTHS), 9 * width).to(dtype).requires_grad_()
    bias = torch.randn(9 * width).to(dtype).requires_grad_()
    assert prefer_native_attention(qkv, 3, max(LENGTHS), window)
    made = results(lambda: grouped_attention(qkv, bias, layout, options)[0], [qkv, bias])
    lse = grouped_attention(qkv, bias, layout, options)[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped_op, "prefer_native_attention", lambda *_: False)
        wanted = results(lambda: grouped_attention(qkv, bias, layout, options)[0], [qkv, bias])
        wanted_lse = grouped_attention(qkv, bias, layout, options)[1]
    assert len(made) == 3
    assert not torch.equal(made[0], wanted[0])  # these are two computations
    assert max(map(apart, made, wanted)) < CLOSE[dtype]
    assert apart(lse, wanted_lse) < CLOSE[dtype]


def test_the_loops_are_used_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_amx", lambda: False)
    fp32 = torch.zeros(1, 9 * 16)
    assert prefer_native_attention(fp32, 3, 512, 0)
    assert not prefer_native_attention(fp32, 3, 513, 0)
    assert prefer_native_attention(fp32, 3, 513, 64)
    assert prefer_native_attention(fp32.bfloat16(), 3, 513, 0)
    monkeypatch.setattr(native, "has_amx", lambda: True)
    assert not prefer_native_attention(fp32.bfloat16(), 3, 513, 0)
    assert not prefer_native_attention(fp32.half(), 3, 40, 0)
    assert not prefer_native_attention(fp32, 9 * 2, 40, 0)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("words", [32, 101])
def test_cross_entropy_equals_torchs(
    dtype: torch.dtype, with_bias: bool, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    hidden, decoder = (torch.randn(rows, 16).to(dtype).requires_grad_() for rows in (40, words))
    bias = torch.randn(words).to(dtype).requires_grad_() if with_bias else None
    labels = torch.randint(words, (40,))
    labels[30:35] = -1  # ignored
    with torch.no_grad():
        labels[:20] = (hidden[:20] @ decoder.T + (0 if bias is None else bias)).argmax(1)  # some are predicted
        decoder[7] = decoder[8]  # and some tie
        if bias is not None:
            bias[7] = bias[8]
    inputs = [hidden, decoder, *([] if bias is None else [bias])]

    def losses() -> list[Tensor]:
        total, correct = vocabulary_losses(hidden, decoder, bias, labels, fused=False)
        with torch.no_grad():
            assert torch.equal(total, vocabulary_losses(hidden, decoder, bias, labels, fused=False)[0])
        return [correct, total.detach(), *torch.autograd.grad(total, inputs)]

    made = losses()
    monkeypatch.setattr(fused_cross_entropy, "supports_native", lambda _: False)
    wanted = losses()
    assert made[0] > 5
    assert torch.equal(made[0], wanted[0])
    assert max(map(apart, made, wanted)) < (1e-5 if dtype == torch.float32 else 5e-3)


def test_a_label_outside_the_vocabulary_is_an_error() -> None:
    with pytest.raises(IndexError, match="35 of 32"):
        vocabulary_losses(torch.zeros(2, 16), torch.zeros(32, 16), None, torch.tensor([1, 35]), fused=False)


def test_autocast_and_other_defaults_of_torch_leave_results_right() -> None:
    expected = encoded()
    with torch.autocast("cpu", torch.bfloat16):
        assert apart(encoded(), expected) < CLOSE[torch.bfloat16]
    labels, inputs = torch.tensor([3, 1]), (torch.ones(2, 16), torch.eye(32, 16))
    torch.set_default_dtype(torch.float64)
    try:
        loss = vocabulary_losses(*inputs, None, labels, fused=False)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(loss, vocabulary_losses(*inputs, None, labels, fused=False)[0])


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_rest_of_a_layer_equals_its_definition(dtype: torch.dtype, dropout: float) -> None:
    torch.manual_seed(0)
    rows, hidden, inner = 50, 48, 100

    def made(*shape: int) -> Tensor:
        return (torch.randn(shape) * 0.3).to(dtype).requires_grad_()

    norms = [(made(hidden), made(hidden)) for _ in range(2)]
    first, second = (made(hidden, hidden), made(hidden)), (made(inner, hidden), made(inner))
    weights = LayerWeights(*first, norms[0], *second, made(hidden, inner), made(hidden), norms[1])
    context, state, keys = made(rows, hidden), made(rows, hidden), make_batch((rows,)).token_keys
    shape = ModelConfig(layers=1, hidden=48, heads=3, intermediate=100)
    inputs = [
        context,
        state,
        *(x for part in weights for x in (part if isinstance(part, tuple) else (part,)) if x is not None),
    ]
    functions = BlockFunctions.of(shape)._replace(eps=1e-12)
    natively = native.prefer_native(after_attention, shape, compile=False)
    assert natively is not after_attention
    ours = results(lambda: natively(context, state, keys, weights, functions, dropout), inputs)
    wanted = results(lambda: after_attention(context, state, keys, weights, functions, dropout), inputs)
    assert len(ours) == len(inputs) + 1
    # A gradient of zero but for rounding has no digits to compare.
    assert all(apart(*pair) < CLOSE[dtype] for pair in zip(ours, wanted, strict=True))


def encoded(activation: str = "gelu") -> Tensor:
    torch.manual_seed(0)
    shape = ModelConfig(layers=2, hidden=48, heads=3, intermediate=96, activation=activation)
    model = Encoder(shape, 101).train()
    batch = make_batch((3, 20, 30))
    state = model.encode(batch, torch.tensor([1, 30]))
    state.square().sum().backward()
    weight = model.embeddings.word.grad
    assert weight is not None
    return torch.cat([state.detach().flatten(), weight.flatten()])


@pytest.mark.parametrize("activation", ["gelu", "relu"])  # the loops have only one of them
def test_an_encoder_is_the_same_without_a_compiler(request: pytest.FixtureRequest, activation: str) -> None:
    assert native.library() is not None
    ours = encoded(activation)
    request.getfixturevalue("no_compiler")
    assert native.library() is None
    assert apart(ours, encoded(activation)) < CLOSE[torch.float32]


def test_code_that_a_compiler_refuses_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_compiler: None
) -> None:
    (tmp_path / "c++").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert native.library() is None
    assert not list((tmp_path / "cache" / "bertrain").iterdir())


def write_damaged(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
    Path(command[-1]).write_bytes(b"damaged")
    return subprocess.CompletedProcess(command, 0)


def test_a_damaged_library_is_compiled_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_compiler: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", write_damaged)
        assert native.library() is None
    native.library.cache_clear()
    assert native.library() is not None
    (compiled,) = (tmp_path / "bertrain").glob("native-*.so")
    assert compiled.stat().st_size > 1000


@pytest.mark.parametrize("dtype", CLOSE)
def test_a_table_is_stepped_as_by_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table = torch.randn(10, 48)
    expected, ours, weights = table.clone().requires_grad_(), table.clone(), table.to(dtype)
    torchs = torch.optim.AdamW([expected], lr=1e-2, weight_decay=0.1, fused=True)
    state = {"step": torch.zeros(()), "exp_avg": torch.zeros(480), "exp_avg_sq": torch.zeros(480)}
    group, seen = torchs.param_groups[0], torch.full((10,), 2, dtype=torch.uint8)
    for rows in ([1, 4], [4, 7], [9]):  # a row with moments moves without a gradient, too
        gradient = torch.zeros(10, 48)
        gradient[rows] = torch.randn(len(rows), 48)
        seen[rows] = 1
        expected.grad = gradient / 2.5
        torchs.step()
        native.step_table(group, state, 2.5, seen, gradient, ours, weights)
        torch.testing.assert_close(ours, expected.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(weights, ours.to(dtype))
        # As after a restart, where moments say which rows had gradients.
        assert seen.tolist().count(1) == int((state["exp_avg_sq"].view(10, 48) != 0).any(1).sum())
        seen.fill_(2)

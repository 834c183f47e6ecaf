"""Windows and biases of the attention equal a dense mask, at a cost linear in the length; computed positions."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.model.kernels.distances import DistanceTables
from pretrain.model.kernels.grouped_op import Arguments, grouped_attention, sequence_groups
from pretrain.model.kernels.grouping import cut_into_units
from pretrain.model.kernels.layout import AttentionOptions, TokenLayout
from pretrain.model.positions import relative_buckets, rotate, rotation, sinusoids
from pretrain.model.projection import form_qkv
from tests.batches_by_hand import make_batch

HEADS, WIDTH = 3, 8


def layout_of(lengths: tuple[int, ...], rows: Tensor | None = None, bias: Tensor | None = None) -> TokenLayout:
    batch = make_batch(lengths)
    return TokenLayout(batch.cu_seqlens, lengths, rows, batch.token_keys, None, bias)


def dense(qkv: Tensor, lengths: tuple[int, ...], window: int, table_NM: Tensor | None) -> Tensor:
    """One sequence at a time, with a mask of all pairs."""
    contexts, first = [], 0
    for length in lengths:
        q, k, v = qkv[first : first + length].unflatten(-1, (3, HEADS, -1)).permute(1, 2, 0, 3)
        first += length
        distance_LL = torch.arange(length)[None] - torch.arange(length)[:, None]
        mask = torch.where(distance_LL.abs() > (window or length), -math.inf, 0.0)
        if table_NM is not None:
            mask = mask + table_NM[:, distance_LL + table_NM.shape[1] // 2]
        contexts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1).flatten(1))
    return torch.cat(contexts)


MIXED = (1, 2, 5, 9, 15, 16, 17, 30, 31, 70)


@pytest.mark.parametrize("how", ["whole", "in pieces", "fused"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    ("lengths", "window", "asked"),
    [
        ((6, 7), 4, None),  # shorter than two chunks
        (MIXED, 4, None),
        (MIXED, 4, (0, 1, 3, 40, 41, 100, 125, 190)),
        (MIXED, 4, (60,)),
        (MIXED, 0, None),
        (MIXED, 0, (0, 1, 3, 40, 41, 100, 125, 190)),
        ((70, 3, 40, 1), 1, None),  # in any order
        ((100,), 3, (99,)),
        ((1,), 0, None),
        ((5, 5, 5), 0, None),
    ],
)
def test_windows_and_biases_equal_a_dense_mask(
    lengths: tuple[int, ...],
    window: int,
    asked: tuple[int, ...] | None,
    with_bias: bool,
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if how != "whole" and lengths != MIXED:
        pytest.skip("compiled, and cut, once")
    if how == "in pieces":
        monkeypatch.setattr("pretrain.model.kernels.grouped_op.SCORES_PER_MATMUL", 1)
    torch.manual_seed(0)
    tokens, width = sum(lengths), HEADS * WIDTH
    inputs = [torch.randn(tokens, 3 * width, requires_grad=True), torch.randn(3 * width, requires_grad=True)]
    table = torch.randn(HEADS, 2 * max(lengths) - 1, requires_grad=True) if with_bias else None
    inputs += [] if table is None else [table]
    rows = None if asked is None else torch.tensor(asked)
    options = AttentionOptions(HEADS, 0.0, how == "fused", window)
    ours, lse = grouped_attention(inputs[0], inputs[1], layout_of(lengths, rows, table), options)
    theirs = dense(inputs[0] + inputs[1], lengths, window, table)
    theirs = theirs if rows is None else theirs[rows]
    assert lse.isfinite().all()
    torch.testing.assert_close(ours, theirs)
    probe = torch.randn_like(ours)
    found = torch.autograd.grad((ours * probe).sum(), inputs)
    expected = torch.autograd.grad((theirs * probe).sum(), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def scores(lengths: tuple[int, ...], window: int, rows: Tensor | None = None) -> int:
    """Scores that the grouped operator computes for a head."""
    options = AttentionOptions(1, window=window)
    groups = sequence_groups(Arguments.of(torch.empty(0), None, layout_of(lengths, rows), options, DistanceTables()))
    return sum(g.queries.index_GL.shape[1] * g.keys.index_GL.numel() for g in groups)


def test_the_cost_of_a_window_is_linear_in_the_length() -> None:
    window = 64
    counts = [scores((length,), window) for length in (1024, 2048, 4096, 8192)]
    for shorter, longer in itertools.pairwise(counts):
        assert longer == pytest.approx(2 * shorter, rel=0.02)
    # Of 8,192 tokens a query sees 129; chunks of 128 queries read 256 keys.
    assert counts[-1] == 8192 * 256
    assert scores((8192,), 0) == 8192 * 8192
    # Few queries, few scores: the chunks are padded to the one with the most.
    asked = torch.arange(0, 8192, 16)
    assert scores((8192,), window, asked) == counts[-1] // 16


@pytest.mark.parametrize("window", [1, 4, 7])
def test_units_cover_every_query_once_and_every_key_in_reach(window: int) -> None:
    lengths = tuple(range(1, 60))
    boundaries = torch.tensor([0, *lengths]).cumsum(0).tolist()
    units, first = cut_into_units(tuple(boundaries), window)
    assert units.query_start[1:].tolist() == units.query_end[:-1].tolist()
    assert [units.query_start[n] for n in first[:-1]] == boundaries[:-1]
    for begin, end, key_begin, key_end in zip(*units, strict=True):
        sequence = next(n for n in range(len(lengths)) if begin < boundaries[n + 1])
        assert key_begin in (boundaries[sequence], begin - window)
        assert key_end in (boundaries[sequence + 1], end + window)
        assert key_begin >= boundaries[sequence]
        assert key_end <= boundaries[sequence + 1]
        if end - begin < lengths[sequence]:
            assert 2 * window <= end - begin <= 3 * window


@pytest.mark.parametrize("window", [0, 5])
def test_dropout_of_attention_has_the_right_rate_and_gradient(window: int) -> None:
    torch.manual_seed(0)
    lengths, options = (20, 50), AttentionOptions(HEADS, 0.3, False, window)
    qkv = torch.randn(70, 3 * HEADS * WIDTH, dtype=torch.float64, requires_grad=True)
    probe, direction = torch.randn(70, HEADS * WIDTH, dtype=torch.float64), torch.randn_like(qkv)

    def run(x: Tensor) -> Tensor:
        return grouped_attention(x, None, layout_of(lengths), options)[0]

    # Values of 1: a row's context is then the sum of its weights, 1 in the mean.
    ones = torch.cat([torch.zeros(70, 2 * HEADS * WIDTH), torch.ones(70, HEADS * WIDTH)], 1).double()
    assert run(ones).mean() == pytest.approx(1, abs=0.05)
    assert run(ones).std() > 0.05
    assert torch.equal(run(qkv), run(qkv))
    (gradient,) = torch.autograd.grad((run(qkv) * probe).sum(), qkv)
    # fp64 in, but weights are computed in fp32: a central difference is good to three digits.
    step = 1e-3
    difference = ((run(qkv + step * direction) - run(qkv - step * direction)) * probe).sum() / (2 * step)
    assert (gradient * direction).sum().item() == pytest.approx(difference.item(), rel=2e-3)


def test_extreme_scores_leave_finite_gradients_where_few_ask() -> None:
    """Padding repeats a query of another sequence, whose sum of exponentials is not its own."""
    lengths, width = (30, 31, 32), HEADS * WIDTH
    qkv = torch.randn(93, 3 * width)
    qkv[30:61] *= 40
    qkv.requires_grad_()
    rows = torch.tensor([2, 3, 4, 70])  # none in the second sequence
    context, _ = grouped_attention(qkv, None, layout_of(lengths, rows), AttentionOptions(HEADS))
    (gradient,) = torch.autograd.grad(context.square().sum(), qkv)
    assert gradient.isfinite().all()


# ---- positions


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_product_of_complex_numbers(interleaved: bool) -> None:
    """And scores depend on the distance alone (Su et al. 2021, section 3.2.1)."""
    torch.manual_seed(0)
    positions, base = torch.arange(50), 500.0
    by = rotation(positions, WIDTH, base, interleaved=interleaved)
    x_TND = torch.randn(50, HEADS, WIDTH)
    rotated = rotate(x_TND, by)
    angles = positions[:, None] * base ** (-2 * torch.arange(WIDTH // 2) / WIDTH)
    turn_T1K = torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = x_TND.unflatten(-1, (-1, 2)) if interleaved else x_TND.unflatten(-1, (2, -1)).mT
    expected = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn_T1K)
    expected = expected.flatten(-2) if interleaved else expected.mT.flatten(-2)
    torch.testing.assert_close(rotated, expected, rtol=1e-4, atol=1e-4)
    q, k = torch.randn(WIDTH), torch.randn(WIDTH)
    q_TND, k_TND = (rotate(x.expand(50, 1, -1), by)[:, 0] for x in (q, k))
    scores_TT = q_TND @ k_TND.T
    torch.testing.assert_close(scores_TT[:-7, 7:].diagonal(), scores_TT[0, 7].expand(43), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("window", "asked"), [(0, None), (0, (0, 1, 3, 3, 41, 190)), (4, None), (4, (0, 60, 190))])
def test_rotation_in_the_operator_equals_rotation_before_it(
    window: int, asked: tuple[int, ...] | None, interleaved: bool, fused: bool
) -> None:
    if fused and (interleaved or not window or not asked):
        pytest.skip("compiled once")
    torch.manual_seed(0)
    tokens, width = sum(MIXED), HEADS * WIDTH
    qkv, bias = torch.randn(tokens, 3 * width, requires_grad=True), torch.randn(3 * width, requires_grad=True)
    by = rotation(torch.cat([torch.arange(length) for length in MIXED]), WIDTH, 500.0, interleaved=interleaved)
    layout = layout_of(MIXED, None if asked is None else torch.tensor(asked))
    options = AttentionOptions(HEADS, 0.0, fused, window)
    ours, _ = grouped_attention(qkv, bias, layout._replace(rotation=by), options)
    theirs, _ = grouped_attention(form_qkv((qkv,), (bias,), by, HEADS), None, layout, options)
    torch.testing.assert_close(ours, theirs)
    probe = torch.randn_like(ours)
    found = torch.autograd.grad((ours * probe).sum(), [qkv, bias])
    expected = torch.autograd.grad((theirs * probe).sum(), [qkv, bias])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_sinusoids_are_those_of_the_paper() -> None:
    table = sinusoids(torch.tensor([0, 1, 37]), 6)
    for row, position in enumerate((0, 1, 37)):
        for column in range(6):
            angle = position / 10_000 ** (2 * (column // 2) / 6)
            assert table[row, column] == pytest.approx(math.cos(angle) if column % 2 else math.sin(angle), abs=1e-6)


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 20), (4, 9)])
def test_buckets_are_those_of_t5(buckets: int, farthest: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(-300, 301)
    expected = t5.T5Attention._relative_position_bucket(distances, True, buckets, farthest)
    found = relative_buckets(distances, buckets, farthest)
    assert torch.equal(found, expected)
    assert set(found.tolist()) <= set(range(buckets))

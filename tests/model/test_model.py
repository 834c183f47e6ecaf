"""The encoder equals transformers' BERT, and the tricks that make it fast change nothing."""

import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pretrain.batches.batch import MicroBatch
from pretrain.checkpoint.layouts import BERT, Architecture
from pretrain.checkpoint.released_writer import released_tensors
from pretrain.config import MAX_WIDTH, ModelConfig
from pretrain.model.attention import ProjectionWeights, self_attention
from pretrain.model.compile import SUPPORTS_UNBACKED_SIZES
from pretrain.model.encoder import Embeddings, Encoder, look_up
from pretrain.model.heads import PretrainingModel
from pretrain.model.initialization import normal
from pretrain.model.kernels import grouped_op
from pretrain.model.kernels.fused_cross_entropy import vocabulary_losses
from pretrain.model.kernels.grouped_op import grouped_attention, seeds_per_head
from pretrain.model.kernels.grouping import SCORES_PER_GROUP, group_sequences
from pretrain.model.kernels.hash_rng import COLUMN_STEP, LAYER_STEP, hash_dropout, keep_mask
from pretrain.model.kernels.layout import AttentionOptions, TokenLayout
from pretrain.model.positions import rotate, rotations
from tests import parity
from tests.batches_by_hand import make_batch, next_sentence_logits
from tests.bench.baselines import pad

VOCABULARY = 101
SHAPE = ModelConfig(size="custom", layers=3, hidden=48, heads=4, intermediate=96, max_positions=64)
LENGTHS = (7, 20, 21, 21, 40, 64)


def make_model(*, next_sentence: bool = True) -> PretrainingModel:
    """Weights away from their initialization, so that biases and norms matter."""
    torch.manual_seed(0)
    model = PretrainingModel(SHAPE, VOCABULARY, next_sentence)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def total(model: PretrainingModel, batch: MicroBatch) -> Tensor:
    losses = model(batch)
    return losses.mlm_loss / len(batch.masked_rows) + losses.nsp_loss / len(batch.lengths)


def gradients(model: PretrainingModel, batch: MicroBatch) -> dict[str, Tensor]:
    total(model, batch).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_logits_losses_and_gradients_equal_transformers() -> None:
    """With the classifier of pairs, which no other family has (tests/parity.py)."""
    transformers = pytest.importorskip("transformers")
    model, batch = make_model().eval(), make_batch(LENGTHS)
    sizes = parity.usual(parity.Shape(SHAPE.layers, SHAPE.hidden, SHAPE.heads, 96, ()))
    config = transformers.BertConfig(**{**sizes, "max_position_embeddings": SHAPE.max_positions})
    baseline = transformers.BertForPreTraining(config).eval()
    arch = Architecture(BERT, SHAPE)
    state = released_tensors({name: p.detach() for name, p in model.named_parameters()}, arch)
    missing, unexpected = baseline.load_state_dict(state, strict=False)
    assert set(missing) <= {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
    assert not unexpected
    baseline.tie_weights()
    inputs = pad(batch)
    theirs = baseline(**inputs)
    with torch.no_grad():
        rows = theirs.prediction_logits[inputs["attention_mask"].bool()][batch.masked_rows]
        torch.testing.assert_close(model.masked_logits(batch), rows, atol=1e-4, rtol=0)
        nsp = theirs.seq_relationship_logits
        torch.testing.assert_close(next_sentence_logits(model, batch), nsp, atol=1e-4, rtol=0)
        torch.testing.assert_close(total(model, batch), theirs.loss, atol=1e-5, rtol=0)
        losses = model(batch)
    assert losses.mlm_correct == (rows.argmax(-1) == batch.masked_labels).sum()
    assert losses.nsp_correct == (nsp.argmax(-1) == batch.nsp_labels).sum()
    ours = gradients(model, batch)
    assert set(ours) == {name for name, _ in model.named_parameters()}
    theirs.loss.backward()
    expected = {name: p.grad for name, p in baseline.named_parameters()}
    for name, gradient in released_tensors(ours, arch).items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("asked", [(0,), (0, 2, 5, 12, 13, 40, 41, 41, 76), (3, 4), tuple(range(77))])
def test_attention_for_some_queries_is_a_part_of_all(asked: tuple[int, ...]) -> None:
    """Sequences that ask nothing or everything; the same context, and gradients of exactly those rows, with dropout."""
    torch.manual_seed(0)
    lengths, rows = (5, 7, 21, 21, 23), torch.tensor(asked)
    batch = make_batch(lengths)
    qkv, bias = torch.randn(77, 3 * 24, requires_grad=True), torch.randn(3 * 24, requires_grad=True)
    probe = torch.randn(len(rows), 24)
    results = []
    for queries in (None, rows):
        layout = TokenLayout(batch.cu_seqlens, lengths, queries, batch.token_keys)
        context, _ = grouped_attention(qkv, bias, layout, AttentionOptions(3, 0.2))
        context = context if queries is not None else context[rows]
        results.append((context, *torch.autograd.grad((context * probe).sum(), (qkv, bias))))
    torch.testing.assert_close(results[0], results[1])


@given(st.lists(st.integers(1, 600), min_size=1, max_size=8), st.integers(1, 16))
def test_no_other_groups_cost_less(lengths: list[int], heads: int) -> None:
    """Against all ways to cut a batch, in any order of its sequences. Every token is in one group."""
    boundaries = torch.tensor([0, *lengths]).cumsum(0).tolist()
    groups = group_sequences(tuple(boundaries), None, heads, torch.device("cpu"))
    rows = [list(range(sum(lengths)))[group.keys.range] for group in groups]
    assert [row for group in rows for row in group] == list(range(sum(lengths)))
    for group, expected in zip(groups, rows, strict=True):
        assert group.keys.index_GL.flatten()[group.keys.slot_T].tolist() == expected
        assert group.keys.index_GL[group.keys.valid_GL].tolist() == expected
    shapes = [group.keys.index_GL.shape for group in groups]
    chosen = sum(cost(shape[0], shape[1], heads) for shape in shapes)
    ways = []
    for marks in itertools.product([False, True], repeat=len(lengths) - 1):
        cuts = [0, *(place + 1 for place, mark in enumerate(marks) if mark), len(lengths)]
        parts = [lengths[a:b] for a, b in itertools.pairwise(cuts)]
        ways.append(sum(cost(len(part), max(part), heads) for part in parts))
    assert chosen == min(ways)


def test_a_gpu_takes_a_batch_in_few_groups_and_pieces() -> None:
    # BERT-Base without the flash kernel. What fits a CPU's cache would be over a hundred pieces a layer.
    lengths, heads = [*range(385, 513, 4)], 12
    boundaries = tuple(torch.tensor([0, *lengths]).cumsum(0).tolist())
    counts = {}
    for name in ("cpu", "meta"):
        device = torch.device(name)
        groups = group_sequences(boundaries, None, heads, device)
        pieces = 0
        for group in groups:
            units, length = group.keys.index_GL.shape
            x_BLD = torch.empty(units * heads, length, 64, device=device)
            slices = grouped_op.head_slices(x_BLD, x_BLD, 1)
            assert sum(len(range(*b.indices(len(x_BLD)))) for b in slices) == len(x_BLD)
            pieces += len(slices)
        counts[name] = len(groups), pieces
    assert counts["cpu"][0] > 2
    assert counts["cpu"][1] > 50
    assert counts["meta"][0] == 1
    assert counts["meta"][1] <= 4


def cost(sequences: int, longest: int, heads: int) -> int:
    return SCORES_PER_GROUP + heads * sequences * longest * (longest + 128)


def test_dropout_draws_from_the_keys() -> None:
    keys = make_batch([4096]).token_keys
    keep = keep_mask(keys, 0.1)
    assert (~keep).float().mean() == pytest.approx(0.1, abs=0.02)
    model, batch = make_model(), make_batch(LENGTHS)
    other = make_batch(LENGTHS, seed=1)
    with torch.no_grad():
        first = model(batch).mlm_loss
        assert torch.equal(first, model(batch).mlm_loss)
        rekeyed = MicroBatch(**{**vars(batch), "token_keys": other.token_keys})
        assert not torch.equal(first, model(rekeyed).mlm_loss)
        assert not torch.equal(first, model.eval()(batch).mlm_loss)


def test_dropout_is_independent_between_layers_features_and_tokens() -> None:
    keys = make_batch([2000]).token_keys
    ones = torch.ones(2000, 64)
    masks = [hash_dropout(ones, keys + layer * LAYER_STEP, use, 0.5) > 0 for layer in range(3) for use in (1, 2)]
    flat = torch.stack([mask.flatten().float() for mask in masks])
    correlations = torch.corrcoef(flat) - torch.eye(len(masks))
    assert correlations.abs().max() < 0.02
    assert torch.corrcoef(masks[0].float().T).fill_diagonal_(0).abs().max() < 0.12
    assert (masks[0].float().mean(0) - 0.5).abs().max() < 0.06


def test_no_pooler_without_next_sentence_prediction() -> None:
    model, batch = make_model(next_sentence=False), make_batch(LENGTHS)
    names = {name for name, _ in model.named_parameters()}
    assert not {name for name in names if "pooler" in name or "nsp" in name}
    assert set(gradients(model, batch)) == names
    assert model(batch).nsp_loss == 0


def test_gradients_of_embeddings_in_bf16_are_rounded_once() -> None:
    """Rows that hundreds of tokens read: words, positions and segments, against the same sums in fp64."""
    shape = ModelConfig(size="custom", layers=1, hidden=8, heads=1, max_positions=16, hidden_dropout=0.0)
    torch.manual_seed(0)
    tokens, words = 4000, 10
    embeddings = Embeddings(shape, words, False).to(torch.bfloat16)
    frequent = torch.rand(tokens) < 0.5
    ids = torch.where(frequent, 4, torch.randint(words, (tokens,)))
    types, positions = torch.randint(2, (tokens,)), torch.randint(16, (tokens,))
    gradient = (torch.randn(tokens, 8) + 0.3).bfloat16()
    embeddings(ids, types, positions, torch.zeros(tokens, dtype=torch.int32)).backward(gradient)
    exact = Embeddings(shape, words, False).double()
    exact.load_state_dict(embeddings.state_dict())
    with pytest.MonkeyPatch.context() as patch:  # `embed` computes in fp32, whatever it is given
        patch.setattr(Tensor, "float", Tensor.double)
        exact(ids, types, positions, torch.zeros(tokens, dtype=torch.int32)).backward(gradient.double())
    one_rounding = torch.finfo(torch.bfloat16).eps / 2
    for name in ("word", "position", "token_type"):
        found, expected = (getattr(it, name).grad.double() for it in (embeddings, exact))
        for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert (ours - theirs).norm() < 2 * one_rounding * theirs.norm(), f"{name} {row}"


def test_a_look_up_in_half_precision_has_the_gradient_of_torchs() -> None:
    """Repeated, unread and last rows, in any order; nothing else of the table is touched."""
    table = torch.randn(7, 3).half().requires_grad_()
    ids, gradient = torch.tensor([6, 0, 6, 2, 0, 6]), torch.randn(6, 3).half()
    found = look_up(table, ids)
    assert torch.equal(found, table[ids])
    found.backward(gradient)
    expected = torch.zeros(7, 3, dtype=torch.float64).index_add_(0, ids, gradient.double())
    assert table.grad is not None
    assert table.grad.dtype == torch.float16
    torch.testing.assert_close(table.grad.double(), expected, rtol=1e-3, atol=1e-4)
    assert not table.grad[[1, 3, 4, 5]].any()


def test_initialization_is_truncated_normal() -> None:
    torch.manual_seed(0)
    model = PretrainingModel(SHAPE, VOCABULARY)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif name.endswith("norm_weight"):
            assert (parameter == 1).all(), name
        else:
            assert parameter.abs().max() <= 2 * SHAPE.init_std, name
            # A normal cut at two deviations has 0.88 of its deviation.
            margin = 0.02 + 3 / math.sqrt(2 * parameter.numel())
            assert parameter.std().item() == pytest.approx(0.88 * SHAPE.init_std, rel=margin), name


@pytest.mark.parametrize("size", ["mini", "base"])
def test_attention_initialized_to_neighbors_looks_there(size: Literal["mini", "base"]) -> None:
    torch.manual_seed(0)
    shape = ModelConfig(size=size, layers=3, hidden_dropout=0, attention_init="neighbors")
    encoder = Encoder(shape, VOCABULARY).eval()
    length, width = 128, shape.hidden // shape.heads
    batch = make_batch((length,))
    with torch.no_grad():
        hidden_TH = encoder.embeddings(batch.input_ids, batch.token_types, batch.positions, batch.token_keys)
        for number, layer in enumerate(encoder.layers):
            firsts: list[float] = []  # from or to the first token, which is [CLS]
            query_TH, key_TH, _ = F.linear(hidden_TH, layer.get_parameter("qkv_weight")).chunk(3, dim=-1)
            for head in range(shape.heads):
                columns = slice(head * width, (head + 1) * width)
                attention_TT = (query_TH[:, columns] @ key_TH[:, columns].T / math.sqrt(width)).softmax(-1)
                offset = (-1, 1, -2, 2, -3, 3, -4, 4, -5, 5, -6, 6)[head]
                if number == 2:  # the upper half begins as BERT's
                    assert attention_TT.max() < 0.1
                    continue
                there, mirrored = attention_TT.diagonal(offset), attention_TT.diagonal(-offset)
                firsts.append(there[0].item())
                assert there.median() > 0.15, (head, offset)
                assert there.median() > 5 * mirrored.median(), (head, offset)
            assert number == 2 or statistics.median(firsts) > 0.2
            hidden_TH = layer(hidden_TH, TokenLayout(batch.cu_seqlens, batch.lengths, None, batch.token_keys))


@pytest.mark.parametrize(
    "part", [{"positions": "rotary"}, {"positions": "rotary_interleaved"}, {"embedding": 64, "recursions": 2}]
)
def test_rotary_attention_initialized_to_neighbors_looks_there(part: dict[str, Any]) -> None:
    torch.manual_seed(0)
    values = {"family": "modernbert", "size": "mini", "attention_bias": True, "attention_init": "neighbors"}
    shape = ModelConfig.model_validate({**values, **part})
    encoder = Encoder(shape, VOCABULARY).eval()
    batch = make_batch((128,))
    with torch.no_grad():
        hidden_TH = encoder.embeddings(batch.input_ids, batch.token_types, batch.positions, batch.token_keys)
        for number, layer in enumerate(encoder.layers):
            turn = rotations(shape, batch.positions)[shape.rotary_base_of(number)]
            qkv = F.linear(hidden_TH, layer.get_parameter("qkv_weight"), layer.get_parameter("qkv_bias"))
            query_TND, key_TND, _ = qkv.unflatten(-1, (3, shape.heads, -1)).unbind(1)
            scores_NTT = torch.einsum("qnd,knd->nqk", rotate(query_TND, turn), rotate(key_TND, turn))
            attention_NTT = (scores_NTT / math.sqrt(shape.head_width)).softmax(-1)
            if number >= 2:
                assert attention_NTT.max() < 0.1, "the upper half begins as it is"
                continue
            for attention_TT, offset in zip(attention_NTT, (-1, 1, -2, 2), strict=True):
                around = {n: attention_TT.diagonal(n).median().item() for n in range(-8, 9)}
                assert 0.4 < around[offset] < 0.6
                assert sum(around[offset + n] for n in (-1, 0, 1)) > 0.65
                assert all(share < 0.01 for n, share in around.items() if abs(n - offset) > 1)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"attention_bias": False}, "needs attention_bias: true where positions are rotary"),
        ({"kv_heads": 2}, "needs kv_heads: 0, not 2"),
        ({"family": "bert", "positions": "sinusoidal"}, "needs learned or rotary positions, not sinusoidal"),
        ({"family": "bert", "embedding": 128}, r"needs embedding \(128\) to be 0 or hidden"),
        ({"family": "bert", "size": "custom", "layers": 1, "hidden": 10, "heads": 2}, "an even head width, not 5"),
    ],
)
def test_a_shape_that_cannot_be_initialized_to_neighbors_is_refused(part: dict[str, Any], reason: str) -> None:
    values = {"family": "modernbert", "size": "mini", "attention_bias": True, "attention_init": "neighbors"}
    with pytest.raises(ValueError, match=f"attention_init: neighbors .*{reason}"):
        ModelConfig.model_validate({**values, **part})


def test_the_stride_of_dropout_seeds_stays_within_int32() -> None:
    """Past it compiled code wrote out of bounds: C++ takes an overflowing loop variable for impossible."""
    assert COLUMN_STEP * MAX_WIDTH < 1 << 31
    with pytest.raises(ValueError, match="less than or equal to 8192"):
        ModelConfig(size="custom", layers=1, hidden=MAX_WIDTH + 64, heads=1)


def test_every_head_of_every_layer_has_its_own_dropout_mask() -> None:
    keys_GQ = torch.arange(64, dtype=torch.int32)[None]
    masks = []
    for _ in range(4):
        keys_GQ = keys_GQ + LAYER_STEP
        masks += [keep_mask(seeds, 0.5) for seeds in seeds_per_head(keys_GQ, 4)]
    for number, mask in enumerate(masks):
        assert not any(torch.equal(mask, other) for other in masks[:number])


def test_a_tie_for_the_top_score_counts_as_its_share() -> None:
    _, correct = vocabulary_losses(torch.zeros(6, 8), torch.zeros(10, 8), torch.zeros(10), torch.arange(6), False)
    assert correct.item() == pytest.approx(6 / 10)


@pytest.mark.parametrize("entries", [1 << 26, 3 * 50])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_the_vocabulary_loss_equals_its_slow_twin(entries: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.model.kernels.fused_cross_entropy.LOGITS_PER_CHUNK", entries)
    torch.manual_seed(0)
    inputs = [torch.randn(*size, requires_grad=True) for size in ((count, 8), (50, 8), (50,))]
    hidden, word, bias = inputs
    labels = torch.randint(50, (count,))
    ours, correct = vocabulary_losses(hidden, word, bias, labels, False)
    logits = F.linear(hidden, word, bias)
    theirs = F.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(ours, theirs)
    assert correct == (logits.argmax(-1) == labels).sum()
    torch.testing.assert_close(torch.autograd.grad(3 * ours, inputs), torch.autograd.grad(3 * theirs, inputs))
    with torch.no_grad():
        torch.testing.assert_close(vocabulary_losses(hidden, word, bias, labels, False)[0], theirs)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.skipif(not SUPPORTS_UNBACKED_SIZES, reason="this torch compiles again")
def test_a_group_of_one_sequence_or_one_query_compiles_nothing_new(threads: int) -> None:
    """It would in the middle of training: torch.compile takes a size of 1 for a constant.

    The compiler compiles for a number of threads, so the sizes of each must be marked.
    """
    stats = torch._dynamo.utils.counters["stats"]
    weight, bias = torch.randn(3 * 32, 32) * 0.1, torch.randn(3 * 32)
    seen = []
    for lengths, rows in (((9, 9, 30), None), ((12,), None), ((9, 9, 30), [0, 9, 18]), ((12,), [0]), ((40,), [3, 4])):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        hidden = torch.randn(sum(lengths), 32, requires_grad=True)
        asking = None if rows is None else torch.tensor(rows)
        keys = torch.randint(1 << 20, (sum(lengths),), dtype=torch.int32)
        layout = TokenLayout(cu_seqlens, lengths, asking, keys)
        projection = ProjectionWeights((weight,), (bias,))
        out = [self_attention(hidden, projection, layout, AttentionOptions(4, 0.1, fused)) for fused in (False, True)]
        torch.testing.assert_close(out[1], out[0], rtol=1e-5, atol=1e-5)
        plain, fused = (torch.autograd.grad(one.square().sum(), hidden)[0] for one in out)
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
        seen.append(stats["unique_graphs"])
    assert len(set(seen)) == 1


def test_weights_begin_as_a_normal_distribution_cut_at_two_deviations() -> None:
    torch.manual_seed(0)
    weights = normal(0.02, 300, 1000).detach().flatten().double()
    assert weights.abs().max() <= 0.04 + 1e-9
    cut = torch.distributions.Normal(0.0, 0.02)
    quantiles = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    within = cut.cdf(torch.tensor(0.04)).double() - cut.cdf(torch.tensor(-0.04)).double()
    expected = cut.icdf(cut.cdf(torch.tensor(-0.04)).double() + quantiles * within)
    torch.testing.assert_close(weights.quantile(quantiles), expected, rtol=0, atol=2e-4)

"""One place to change the architecture: other parts and other families, and everything follows or says why not."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.checkpoint.assembly import Released, assemble
from pretrain.checkpoint.layouts import BERT, LAYOUTS, ReleasedFacts, read_config, write_config
from pretrain.checkpoint.released_writer import released_tensors
from pretrain.common.errors import InputError
from pretrain.config import ModelConfig
from pretrain.model import activations, norms
from pretrain.model.cost import activation_bytes, encoder_flops, flops, head_flops, parameter_count
from pretrain.model.encoder import Encoder
from pretrain.model.heads import PretrainingModel
from pretrain.model.kernels import native
from pretrain.model.padded import PaddedEncoder
from pretrain.model.parameters import has_weight_decay, layer_of, stacked_parts
from tests.batches_by_hand import make_batch, next_sentence_logits, take_sequence

VOCABULARY, LENGTHS = 101, (7, 20, 21, 40)
# Every entry of the tables, so one that is added is tested, and what a test swaps in besides.
TABLES = [{"norm": name} for name in norms.NORMS] + [{"activation": name} for name in activations.ACTIVATIONS]
SWAPPED = {"norm": "rms_norm", "activation": "relu"}
LOCAL = {"local_attention": 8, "global_every": 2}
GEGLU: dict[str, Any] = {"family": "modernbert", "local_attention": 8, "positions": "disentangled"}
GEGLU |= {"rotary_base": 0, "local_rotary_base": 0}
# What a config can replace. The longest sequences are cut into chunks by the windows.
PARTS: list[dict[str, Any]] = [
    {},
    {"family": "modernbert", "local_attention": 8},
    {"family": "eurobert", "kv_heads": 2},
    {"family": "nomic_bert"},
    {"family": "gte"},
    {"norm_placement": "pre"},
    {"norm_placement": "pre", "embedding_norm": False},
    {"positions": "sinusoidal"},
    {"positions": "rotary_interleaved", "rotary_base": 1e4},
    {"positions": "relative", "relative_buckets": 8, "relative_max_distance": 20},
    {"positions": "none", **LOCAL},
    {"gated": True},
    {"attention_bias": False, "ffn_in_bias": False, "ffn_out_bias": False, "mlm_transform_bias": False},
    {"kv_heads": 1},
    {"mlm_transform": False, "decoder_bias": False},
    {"tied_decoder": False, "token_types": False},
    {"pooling": "mean"},
    {"pooling": "max"},
    {"norm": "rms_norm", "norm_placement": "pre", "gated": True},
    {"positions": "rotary", "rotary_base": 1e4, "kv_heads": 2, "attention_bias": False},
    {"embedding": 16},
    {"recursions": 2},
    {"recursions": 3, "norm_placement": "pre", "positions": "none", "layers": 2} | LOCAL,
    # Buckets of one distance up to 3, and more distances than there are buckets.
    {"family": "deberta", "relative_buckets": 6, "relative_max_distance": 20},
    {"family": "deberta", "relative_buckets": 0, "relative_max_distance": 9, "relative_projections": True},
    {**GEGLU, "relative_buckets": 8, "relative_max_distance": 30, "relative_terms": "p2c", "kv_heads": 2}
    | {"relative_projections": True, "local_attention": 8},
    {**GEGLU, "relative_max_distance": 30, "relative_terms": "c2p", "relative_norm": True, "kv_heads": 1},
]
COMPILED = [PARTS[0], PARTS[1], PARTS[2], PARTS[9]]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467)."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(x.dtype)


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    """An encoder with RMSNorm and ReLU: a norm is one entry of a table."""
    # Torch keeps x, its inverse deviation and their product.
    monkeypatch.setitem(norms.NORMS, "rms_norm", norms.Norm(rms_norm, {"weight": "ones"}, saved=2))
    return make_shape(**SWAPPED)


def make_shape(**values: Any) -> ModelConfig:
    sizes = {"size": "custom", "layers": 3, "hidden": 32, "heads": 4, "intermediate": 48, "max_positions": 64}
    return ModelConfig.model_validate({**sizes, **values})


def make_model(shape: ModelConfig, **options: bool) -> PretrainingModel:
    """Weights away from their initial values, so that norms matter."""
    torch.manual_seed(0)
    model = PretrainingModel(shape, VOCABULARY, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def loss_of(model: PretrainingModel, batch: Any) -> Tensor:
    losses = model(batch)
    return losses.mlm_loss / len(batch.masked_rows) + losses.nsp_loss / len(batch.lengths)


def reference_loss(state: dict[str, Tensor], shape: ModelConfig, batch: Any) -> Tensor:
    """The swapped model in plain torch, a sequence at a time, without dropout."""

    def dense(x: Tensor, name: str) -> Tensor:
        return F.linear(x, state[f"{name}_weight"], state[f"{name}_bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), state[f"{name}_weight"], shape.layer_norm_eps)

    rows, first = [], 0
    for length in batch.lengths:
        part = slice(first, first + length)
        first += length
        x = state["embeddings.word"][batch.input_ids[part]] + state["embeddings.position"][batch.positions[part]]
        x = norm(x + state["embeddings.token_type"][batch.token_types[part]], "embeddings.norm")
        for number in range(shape.layers):
            at = f"layers.{number}."
            q, k, v = dense(x, f"{at}qkv").unflatten(-1, (3, shape.heads, -1)).permute(1, 2, 0, 3)
            context = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
            x = norm(x + dense(context, f"{at}attention_out"), f"{at}attention_norm")
            x = norm(x + dense(dense(x, f"{at}ffn_in").relu(), f"{at}ffn_out"), f"{at}ffn_norm")
        rows.append(x)
    hidden = torch.cat(rows)
    masked = norm(dense(hidden[batch.masked_rows], "heads.mlm_transform").relu(), "heads.mlm_norm")
    scores = F.linear(masked, state["embeddings.word"], state["heads.mlm_bias"])
    pooled = dense(hidden[batch.cu_seqlens[:-1].long()], "heads.pooler").tanh()
    pairs = F.cross_entropy(dense(pooled, "heads.nsp"), batch.nsp_labels)
    return F.cross_entropy(scores, batch.masked_labels) + pairs


@pytest.mark.parametrize("options", [{}, {"activation_checkpointing": True}, {"compile": True}], ids=str)
def test_their_gradients_are_those_of_plain_torch(swapped: ModelConfig, options: dict[str, bool]) -> None:
    # In training, because layers are recomputed only there.
    model = make_model(swapped.model_copy(update={"hidden_dropout": 0.0}), **options).train()
    batch = make_batch(LENGTHS)
    loss_of(model, batch).backward()
    state = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    expected = reference_loss(state, swapped, batch)
    expected.backward()
    torch.testing.assert_close(loss_of(model, batch), expected, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, state[name].grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("option", ["activation_checkpointing", "compile"])
@pytest.mark.parametrize("entry", PARTS, ids=str)
def test_parts_train_alike_compiled_and_recomputed(entry: dict[str, Any], option: str) -> None:
    """With dropout everywhere, which is a hash: the same losses and gradients, of every parameter."""
    if option == "compile" and entry not in COMPILED:
        pytest.skip("takes long")
    shape, batch = make_shape(**{"hidden_dropout": 0.1, "attention_dropout": 0.1, **entry}), make_batch(LENGTHS)
    results = []
    for options in ({}, {option: True}):
        model = make_model(shape, **options)
        loss = loss_of(model, batch)
        loss.backward()
        results.append({"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}})
    for name, expected in results[0].items():
        assert expected.abs().max() > 0, name
        torch.testing.assert_close(results[1][name], expected, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("entry", PARTS, ids=str)
def test_a_sequence_of_any_parts_does_not_see_its_neighbors(entry: dict[str, Any]) -> None:
    model, batch = make_model(make_shape(**{"hidden_dropout": 0.1, **entry})), make_batch(LENGTHS)
    with torch.no_grad():
        together = model.encode(batch)
        for number in range(len(LENGTHS)):
            first, last = batch.cu_seqlens[number : number + 2]
            alone = model.encode(take_sequence(batch, number))
            torch.testing.assert_close(together[first:last], alone, atol=2e-5, rtol=1e-4)
        rows = torch.tensor([0, 5, 30, 80])
        torch.testing.assert_close(model.encode(batch, rows), together[rows], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_pooling_reads_all_tokens(pooling: str) -> None:
    model, batch = make_model(make_shape(pooling=pooling)).eval(), make_batch(LENGTHS)
    with torch.no_grad():
        parts = model.encode(batch).split(LENGTHS)
        pooled = torch.stack([part.mean(0) if pooling == "mean" else part.amax(0) for part in parts])
        heads = model.heads
        dense = F.linear(pooled, heads.pooler_weight, heads.pooler_bias).tanh()
        logits = F.linear(dense, heads.nsp_weight, heads.nsp_bias)
        torch.testing.assert_close(next_sentence_logits(model, batch), logits)
        expected = F.cross_entropy(logits, batch.nsp_labels, reduction="sum")
        torch.testing.assert_close(model(batch).nsp_loss, expected)
        scores = model.masked_logits(batch)
        mlm = F.cross_entropy(scores, batch.masked_labels, reduction="sum")
        torch.testing.assert_close(model(batch).mlm_loss, mlm)


@pytest.mark.parametrize("entry", [*TABLES, *PARTS, SWAPPED, {**SWAPPED, "embedding": 24}], ids=str)
@pytest.mark.usefixtures("swapped")
def test_the_padded_twin_computes_the_same(entry: dict[str, Any]) -> None:
    shape = make_shape(**entry)
    torch.manual_seed(0)
    encoder, batch = Encoder(shape, VOCABULARY).eval(), make_batch(LENGTHS)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
        ids = torch.full(mask.shape, 7).masked_scatter(mask, batch.input_ids)
        types = torch.zeros(mask.shape, dtype=torch.long).masked_scatter(mask, batch.token_types)
        padded = PaddedEncoder(shape, encoder.state_dict()).encode(ids, mask.long(), types)
        torch.testing.assert_close(padded[mask], encoder.encode(batch), rtol=1e-4, atol=2e-5)


def test_onnxruntime_computes_the_same(swapped: ModelConfig, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from finetune.artifacts.export import write_onnx
    from finetune.artifacts.padded import PaddedModel

    model = PaddedModel(make_released(swapped), "sequence").eval()
    assert write_onnx(model, tmp_path / "model.onnx") < 1e-4


def make_released(shape: ModelConfig) -> Released:
    """A run of ours, as fine-tuning reads it, with an output layer."""
    state = {name: p.detach() for name, p in make_model(shape).named_parameters()}
    backbone = {name: p for name, p in state.items() if not name.startswith("heads.")}
    head = {f"dense_{kind}": state[f"heads.pooler_{kind}"] for kind in ("weight", "bias")}
    head |= {"out_weight": torch.randn(3, shape.hidden), "out_bias": torch.randn(3)}
    return Released("bert", shape, backbone, head, {}, (), 2, {})


@pytest.mark.parametrize("next_sentence", [True, False])
@pytest.mark.parametrize("entry", [*TABLES, *PARTS, SWAPPED], ids=str)
@pytest.mark.usefixtures("swapped")
def test_estimates_count_the_real_parameters(entry: dict[str, Any], next_sentence: bool) -> None:
    shape = make_shape(**entry)
    model = PretrainingModel(shape, VOCABULARY, next_sentence)
    count = parameter_count(shape, VOCABULARY, next_sentence)
    parts = {"embeddings": 0, "layers": 0, "heads": 0, "relative": 0, "final": 0}
    for name, parameter in model.named_parameters():
        parts[name.partition(".")[0]] += parameter.numel()
    assert count.embeddings == parts["embeddings"] + parts["relative"]
    assert count.layers == parts["layers"] + parts["final"]
    assert count.heads == parts["heads"]


@pytest.mark.parametrize(
    ("entry", "itemsize", "kernels"),
    [
        *((entry, 4, "compiled") for entry in (SWAPPED, *COMPILED)),
        *((entry, itemsize, "torch") for entry in [*TABLES, *PARTS, SWAPPED] for itemsize in (2, 4)),
        *((entry, itemsize, "native") for entry in ({}, SWAPPED) for itemsize in (2, 4)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("swapped")
def test_estimates_of_activations_are_what_torch_saves(
    entry: dict[str, Any], itemsize: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels != "native":
        monkeypatch.setattr("pretrain.model.kernels.native.runs_natively", lambda _: False)  # a GPU has no such loops
    elif native.library() is None:
        pytest.skip("needs g++")
    compiled = kernels == "compiled"
    shape = make_shape(**{"layers": 4, "hidden": 128, "intermediate": 512, **entry})
    model = PretrainingModel(shape, VOCABULARY, compile=compiled).to(torch.float32 if itemsize == 4 else torch.bfloat16)
    batch = make_batch([64] * 8)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = model(batch)
    assert losses.mlm_loss.isfinite()
    tokens = sum(batch.lengths)
    rows = len(batch.masked_rows) + len(batch.lengths) if shape.pooling == "cls" else tokens
    working = itemsize * tokens * (2 * shape.intermediate * (1 + shape.gated) + 10 * shape.hidden)
    how = {"itemsize": itemsize, "compiled": compiled, "checkpointing": False, "native": kernels == "native"}
    estimated = activation_bytes(shape, tokens, rows, **how)
    assert estimated - working == pytest.approx(sum(saved.values()), rel=0.08)


def test_flops_count_the_scores_within_the_window() -> None:
    shape, whole = (make_shape(positions="none", **x) for x in ({"local_attention": 8, "global_every": 3}, {}))
    for length in (1, 4, 5, 6, 40):
        distance = (torch.arange(length)[None] - torch.arange(length)[:, None]).abs()
        unseen = int((distance > 4).sum())
        # Of three layers, two are local.
        assert flops(whole, VOCABULARY, [length], 0) - flops(shape, VOCABULARY, [length], 0) == 12 * 32 * 2 * unseen
        assert encoder_flops(whole, [length], length) - encoder_flops(shape, [length], length) == 12 * 32 * 2 * unseen
    # The last layer is local: what it skips is counted there, too.
    skipped = encoder_flops(shape, [40], 40) - encoder_flops(shape, [40], 4)
    assert skipped == pytest.approx((6 * 32 * (32 + 2 * 48) * 36) + 12 * 32 * (40 * 9 - 20) * (1 - 4 / 40))
    whole = encoder_flops(shape, [40], 40) + head_flops(shape, VOCABULARY, 3, 1)
    assert whole == flops(shape, VOCABULARY, [40], 3)


@pytest.mark.parametrize("entry", [*TABLES, *PARTS, SWAPPED], ids=str)
@pytest.mark.usefixtures("swapped")
def test_decay_depth_and_parts_follow_the_names(entry: dict[str, Any]) -> None:
    for name, parameter in PretrainingModel(make_shape(**entry), VOCABULARY).named_parameters():
        assert has_weight_decay(name) == (parameter.dim() == 2), name
        stacked = {"qkv": 3, "kv": 2, "gated_in": 2}
        assert stacked_parts(name) == stacked.get(name.split(".")[-1].rpartition("_")[0], 1)
        first, second = name.split(".")[:2]
        depth = {"embeddings": 0, "relative": 0, "heads": 4, "final": 4}
        assert layer_of(name, 3) == (int(second) + 1 if first == "layers" else depth[first])


# ---- released layouts


def test_relu_follows_into_the_released_layout_and_back() -> None:
    transformers = pytest.importorskip("transformers")
    shape = make_shape(activation="relu")
    model, batch = make_model(shape).eval(), make_batch([12])
    values = write_config({}, ReleasedFacts(BERT, shape), "ForPreTraining", VOCABULARY, 0)
    assert values["hidden_act"] == "relu"
    state = {name: p.detach() for name, p in model.named_parameters()}
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**values)).eval()
    assert not theirs.load_state_dict(released_tensors(state, ReleasedFacts(BERT, shape)), strict=False).unexpected_keys
    theirs.tie_weights()
    with torch.no_grad():
        output = theirs(batch.input_ids[None], token_type_ids=batch.token_types[None])
        torch.testing.assert_close(
            model.masked_logits(batch), output.prediction_logits[0][batch.masked_rows], rtol=0, atol=1e-4
        )
    back = assemble(released_tensors(state, ReleasedFacts(BERT, shape)), read_config(values), values)
    assert back.model.activation == "relu"
    assert {**back.backbone, **back.pretraining}.keys() == state.keys()


def test_what_has_no_counterpart_is_named(swapped: ModelConfig) -> None:
    for family in ("bert", "distilbert", "electra", "roberta"):
        with pytest.raises(InputError) as error:
            write_config({}, ReleasedFacts(LAYOUTS[family], swapped), "", VOCABULARY, 0)
        message = str(error.value)
        assert f"the released layout of {family} cannot hold this model: model.norm is rms_norm" in message.lower()
        for name in ("embeddings.norm_bias", "layers.*.attention_norm_bias", "layers.*.ffn_norm_bias"):
            assert name in message


def test_a_parameter_without_a_place_in_a_layout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a contributor adds it: a norm with a third vector."""
    entry = norms.NORMS["layer_norm"]
    grown = entry._replace(parameters={**entry.parameters, "gate": "ones"})
    monkeypatch.setitem(norms.NORMS, "layer_norm", grown)
    reason = BERT.without_counterpart(make_shape())
    assert "no counterpart of embeddings.norm_gate, layers.*.attention_norm_gate" in reason
    sizes = {"intermediate_size": 48, "max_position_embeddings": 64}
    with pytest.raises(ValueError, match="no counterpart of"):
        read_config({"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, **sizes})


def test_an_activation_unknown_to_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = activations.Activation(lambda x: x.sigmoid() * x, saves_input=True)
    monkeypatch.setitem(activations.ACTIVATIONS, "own", own)
    assert "model.activation is own" in BERT.without_counterpart(make_shape(activation="own"))
    assert LAYOUTS["roberta"].without_counterpart(make_shape(activation="relu")).endswith("head has gelu")


def test_the_settings_of_the_compiler_have_one_place() -> None:
    root = Path(norms.__file__).parents[2]
    names = ("_dynamo.config", "_functorch.config", "experimental._config", "_inductor.config")
    files = [path for package in ("pretrain", "finetune", "cluster") for path in (root / package).rglob("*.py")]
    users = [path.relative_to(root).as_posix() for path in files if any(name in path.read_text() for name in names)]
    assert users == ["pretrain/model/compile.py"]


# ---- configs


@pytest.mark.parametrize(("field", "value"), [("norm", "batch_norm"), ("activation", "swish")])
def test_unknown_names_are_refused_with_the_known_ones(field: str, value: str) -> None:
    shape = make_shape(**{field: value})
    with pytest.raises(InputError, match=rf"model\.{field}: '{value}' is not one of "):
        parameter_count(shape, VOCABULARY)
    with pytest.raises(InputError, match=rf"model\.{field}: '{value}'"):
        PretrainingModel(shape, VOCABULARY)

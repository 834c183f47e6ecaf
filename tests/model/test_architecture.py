"""One place to change the architecture: other parts and other families, and everything follows or says why not."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.checkpoint.assembly import assemble
from pretrain.checkpoint.layouts import BERT, BERTRAIN, LAYOUTS, Architecture, read_config, write_config
from pretrain.checkpoint.released_writer import released_tensors
from pretrain.common.errors import InputError
from pretrain.config import ModelConfig
from pretrain.model import activations, norms
from pretrain.model import compile as compiler
from pretrain.model.cost import activation_bytes, encoder_flops, flops, head_flops, parameter_count
from pretrain.model.encoder import Encoder
from pretrain.model.heads import PretrainingModel
from pretrain.model.kernels import native
from pretrain.model.padded import PaddedEncoder
from pretrain.model.parameters import has_weight_decay, layer_of, stacked_parts
from pretrain.model.positions import rotate, rotation
from tests.batches_by_hand import make_batch, next_sentence_logits, take_sequence

VOCABULARY, LENGTHS = 101, (7, 20, 21, 40)
# Every entry of the tables, so one that is added is tested, and what a test swaps in besides.
TABLES = [{"norm": name} for name in norms.NORMS] + [{"activation": name} for name in activations.ACTIVATIONS]
SWAPPED = {"norm": "rms_norm", "activation": "relu"}
GATED = {"gated": True, "recursions": 2}
ROTARY = {**GATED, "positions": "rotary", "rotary_base": 100.0}
UNUSUAL = [{"recursions": 3}, {"embedding": 16, "recursions": 2}, GATED, ROTARY, SWAPPED]
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


def make_encoder(shape: ModelConfig) -> Encoder:
    """Weights away from their initial values, so that each of them matters."""
    torch.manual_seed(0)
    encoder = Encoder(shape, VOCABULARY)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return encoder


def loss_of(model: PretrainingModel, batch: Any) -> Tensor:
    losses = model(batch)
    return losses.mlm_loss / len(batch.masked_rows) + losses.nsp_loss / len(batch.lengths)


class Reference:
    """The encoder in plain torch, one sequence at a time."""

    def __init__(self, shape: ModelConfig, state: dict[str, Tensor]) -> None:
        self.shape, self.state = shape, state

    def encode(self, batch: Any) -> Tensor:
        return torch.cat(
            [self._sequence(batch, first, n) for first, n in zip(batch.cu_seqlens, batch.lengths, strict=False)]
        )

    def _sequence(self, batch: Any, first: int, length: int) -> Tensor:
        shape, state, part = self.shape, self.state, slice(first, first + length)
        x = state["embeddings.word"][batch.input_ids[part]] + state["embeddings.token_type"][batch.token_types[part]]
        if shape.positions == "learned":
            x = x + state["embeddings.position"][batch.positions[part]]
        x = self._norm(x, "embeddings.norm")
        if shape.embedding:
            x = self._dense(x, "embeddings.project")
        for _ in range(shape.recursions):
            for number in range(shape.layers):
                x = self._layer(x, f"layers.{number}.")
        return self._norm(x, "final.norm") if shape.norm_placement == "pre" else x

    def _layer(self, x: Tensor, at: str) -> Tensor:
        before = self.shape.norm_placement == "pre"
        normed = self._norm(x, f"{at}attention_norm") if before and f"{at}attention_norm_weight" in self.state else x
        x = x + self._dense(self._context(normed, at), f"{at}attention_out")
        if not before:
            x = self._norm(x, f"{at}attention_norm")
        inner = self._feed_forward(self._norm(x, f"{at}ffn_norm") if before else x, at)
        x = x + self._dense(inner, f"{at}ffn_out")
        return x if before else self._norm(x, f"{at}ffn_norm")

    def _context(self, normed: Tensor, at: str) -> Tensor:
        shape = self.shape
        q, k, v = self._dense(normed, f"{at}qkv").unflatten(-1, (3, shape.heads, -1)).unbind(1)
        if shape.positions == "rotary":
            by = rotation(torch.arange(len(normed)), shape.head_width, shape.rotary_base)
            q, k = rotate(q, by), rotate(k, by)
        q, k, v = (y.transpose(0, 1) for y in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)

    def _feed_forward(self, x: Tensor, at: str) -> Tensor:
        if self.shape.gated:
            activated, gate = self._dense(x, f"{at}gated_in").chunk(2, -1)
            return F.gelu(activated) * gate
        inner = self._dense(x, f"{at}ffn_in")
        return inner.relu() if self.shape.activation == "relu" else F.gelu(inner)

    def _dense(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.state[f"{name}_weight"], self.state.get(f"{name}_bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, eps = self.state[f"{name}_weight"], self.shape.layer_norm_eps
        if self.shape.norm == "rms_norm":
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.layer_norm(x, weight.shape, weight, self.state[f"{name}_bias"], eps)


@pytest.mark.parametrize("placement", ["post", "pre"])
@pytest.mark.parametrize(
    "entry", [{"recursions": 3}, {"embedding": 16, "recursions": 2}, GATED, ROTARY, SWAPPED], ids=str
)
def test_states_and_gradients_are_those_of_plain_torch(entry: dict[str, Any], placement: str) -> None:
    """Of parts that no released family has."""
    shape = make_shape(**entry, norm_placement=placement, hidden_dropout=0.0)
    encoder, batch = make_encoder(shape), make_batch(LENGTHS)
    state = {name: p.detach().clone().requires_grad_() for name, p in encoder.named_parameters()}
    # Only some rows of the last layer, as in pretraining.
    rows = torch.tensor([0, 5, 8, 30])
    found, expected = encoder.encode(batch, rows), Reference(shape, state).encode(batch)[rows]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, parameter in encoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, state[name].grad, rtol=1e-3, atol=1e-4, msg=name)


def test_every_application_of_the_first_layer_reads_normalized_states() -> None:
    """Normalized embeddings need no norm before attention; the output of the last layer does."""
    for recursions in (1, 2):
        encoder = make_encoder(make_shape(norm_placement="pre", recursions=recursions))
        assert ("layers.0.attention_norm_weight" in dict(encoder.named_parameters())) == (recursions == 2)


def test_each_application_of_a_layer_has_a_dropout_mask_of_its_own() -> None:
    """Two layers with the same weights, applied once, drop as one that is applied twice."""
    encoder = make_encoder(make_shape(layers=1, recursions=2, hidden_dropout=0.3))
    other, batch = make_encoder(make_shape(layers=2, hidden_dropout=0.3)), make_batch(LENGTHS)
    state = encoder.state_dict()
    other.load_state_dict(state | {n.replace("layers.0", "layers.1"): p for n, p in state.items() if "layers.0" in n})
    torch.testing.assert_close(encoder.encode(batch), other.encode(batch))


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
def test_the_padded_twin_computes_the_same(entry: dict[str, Any]) -> None:
    shape = make_shape(**entry)
    encoder, batch = make_encoder(shape).eval(), make_batch(LENGTHS)
    with torch.no_grad():
        mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
        ids = torch.full(mask.shape, 7).masked_scatter(mask, batch.input_ids)
        types = torch.zeros(mask.shape, dtype=torch.long).masked_scatter(mask, batch.token_types)
        padded = PaddedEncoder(shape, encoder.state_dict()).encode(ids, mask.long(), types)
        torch.testing.assert_close(padded[mask], encoder.encode(batch), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("next_sentence", [True, False])
@pytest.mark.parametrize("entry", [*TABLES, *PARTS, SWAPPED], ids=str)
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


def saved_bytes(model: PretrainingModel, batch: Any) -> int:
    """What torch keeps for the backward pass."""
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
    return sum(saved.values())


@pytest.fixture
def saving_as_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled programs save what Inductor's do, but no C++ is made of them, which takes long."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager_decomp_partition"))
    monkeypatch.setattr(compiler, "compiled_function", functools.cache(compiler.compiled_function.__wrapped__))
    compiler.maybe_compile.cache_clear()
    yield
    compiler.maybe_compile.cache_clear()


@pytest.mark.usefixtures("saving_as_compiled")
@pytest.mark.parametrize(
    ("entry", "itemsize", "kernels"),
    [
        *((entry, 4, "compiled") for entry in (SWAPPED, *COMPILED)),
        *((entry, itemsize, "torch") for entry in [*TABLES, *PARTS, SWAPPED] for itemsize in (2, 4)),
        *((entry, itemsize, "native") for entry in ({}, SWAPPED) for itemsize in (2, 4)),
    ],
    ids=str,
)
def test_estimates_of_activations_are_what_torch_saves(
    entry: dict[str, Any], itemsize: int, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels != "native":
        monkeypatch.setattr("pretrain.model.kernels.native.supports_native", lambda _: False)  # a GPU has no such loops
    elif native.library() is None:
        pytest.skip("needs g++")
    compiled = kernels == "compiled"
    shape = make_shape(**{"layers": 4, "hidden": 128, "intermediate": 512, **entry})
    model = PretrainingModel(shape, VOCABULARY, compile=compiled).to(torch.float32 if itemsize == 4 else torch.bfloat16)
    batch = make_batch([64] * 8)
    saved, tokens = saved_bytes(model, batch), sum(batch.lengths)
    rows = len(batch.masked_rows) + len(batch.lengths) if shape.pooling == "cls" else tokens
    working = itemsize * tokens * (2 * shape.intermediate * (1 + shape.gated) + 10 * shape.hidden)
    how = {"itemsize": itemsize, "compiled": compiled, "checkpointing": False, "native": kernels == "native"}
    estimated = activation_bytes(shape, tokens, rows, **how)
    assert estimated - working == pytest.approx(saved, rel=0.08)


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
    values = write_config({}, Architecture(BERT, shape), "ForPreTraining", VOCABULARY, 0)
    assert values["hidden_act"] == "relu"
    state = {name: p.detach() for name, p in model.named_parameters()}
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**values)).eval()
    assert not theirs.load_state_dict(released_tensors(state, Architecture(BERT, shape)), strict=False).unexpected_keys
    theirs.tie_weights()
    with torch.no_grad():
        output = theirs(batch.input_ids[None], token_type_ids=batch.token_types[None])
        torch.testing.assert_close(
            model.masked_logits(batch), output.prediction_logits[0][batch.masked_rows], rtol=0, atol=1e-4
        )
    back = assemble(released_tensors(state, Architecture(BERT, shape)), read_config(values), values)
    assert back.model.activation == "relu"
    assert {**back.backbone, **back.pretraining}.keys() == state.keys()


def test_what_has_no_counterpart_is_named() -> None:
    for family, layout in LAYOUTS.items():
        shape = make_shape(family=layout.model_family, recursions=3, max_positions=128)
        if layout is not BERTRAIN:
            with pytest.raises(InputError, match=f"model.recursions is 3, and {family} supports only 1"):
                write_config({}, Architecture(layout, shape), "", VOCABULARY, 0)
    for family in ("bert", "distilbert", "electra", "roberta"):
        with pytest.raises(InputError) as error:
            write_config({}, Architecture(LAYOUTS[family], make_shape(**SWAPPED)), "", VOCABULARY, 0)
        message = str(error.value)
        assert f"the released layout of {family} cannot represent this model: model.norm is rms_norm" in message.lower()
        for name in ("embeddings.norm_bias", "layers.*.attention_norm_bias", "layers.*.ffn_norm_bias"):
            assert name in message


def test_a_parameter_without_a_place_in_a_layout_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a contributor adds it: a norm with a third vector."""
    entry = norms.NORMS["layer_norm"]
    grown = entry._replace(parameters={**entry.parameters, "gate": "ones"})
    monkeypatch.setitem(norms.NORMS, "layer_norm", grown)
    reason = BERT.unsupported_parts(make_shape())
    assert "no counterpart of embeddings.norm_gate, layers.*.attention_norm_gate" in reason
    sizes = {"intermediate_size": 48, "max_position_embeddings": 64}
    with pytest.raises(ValueError, match="no counterpart of"):
        read_config({"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, **sizes})


def test_an_activation_unknown_to_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    own = activations.Activation(lambda x: x.sigmoid() * x, saves_input=True)
    monkeypatch.setitem(activations.ACTIVATIONS, "own", own)
    assert "model.activation is own" in BERT.unsupported_parts(make_shape(activation="own"))
    assert LAYOUTS["roberta"].unsupported_parts(make_shape(activation="relu")).endswith("head has gelu")


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

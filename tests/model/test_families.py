"""Every family computes what transformers' class of it computes: logits, loss and gradients on padded batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from pretrain.config import ModelConfig
from pretrain.model.heads import PretrainingModel
from tests.batches_by_hand import make_batch
from tests.bench.baselines import pad

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTHS = 101, (3, 7, 20, 21, 40, 64)
SIZES = {"size": "custom", "layers": 4, "hidden": 48, "heads": 4, "intermediate": 80, "max_positions": 64}
THEIR_SIZES = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}


class Case(NamedTuple):
    """A family in one shape."""

    classes: str
    family: str
    ours: dict[str, Any]
    theirs: dict[str, Any]
    names: dict[str, str]  # ours -> theirs; several of theirs that one of ours stacks are separated by blanks


MODERNBERT = {
    "embeddings.word": "model.embeddings.tok_embeddings.weight",
    "embeddings.norm_weight": "model.embeddings.norm.weight",
    "attention_norm_weight": "model.layers.N.attn_norm.weight",
    "qkv_weight": "model.layers.N.attn.Wqkv.weight",
    "attention_out_weight": "model.layers.N.attn.Wo.weight",
    "ffn_norm_weight": "model.layers.N.mlp_norm.weight",
    "gated_in_weight": "model.layers.N.mlp.Wi.weight",
    "ffn_out_weight": "model.layers.N.mlp.Wo.weight",
    "final.norm_weight": "model.final_norm.weight",
    "heads.mlm_transform_weight": "head.dense.weight",
    "heads.mlm_norm_weight": "head.norm.weight",
    "heads.mlm_bias": "decoder.bias",
}


def llama_layer(model: str, *, grouped: bool = False) -> dict[str, str]:
    """The layer of EuroBERT, Nomic-BERT and GTE, without its norms."""
    at = f"{model}.layers.N"
    q, k, v = (f"{at}.self_attn.{part}_proj.KIND" for part in "qkv")
    projections = {"q_KIND": q, "kv_KIND": f"{k} {v}"} if grouped else {"qkv_KIND": f"{q} {k} {v}"}
    modules = {
        **projections,
        "attention_out_KIND": f"{at}.self_attn.o_proj.KIND",
        "gated_in_KIND": f"{at}.mlp.gate_proj.KIND {at}.mlp.up_proj.KIND",
        "ffn_out_KIND": f"{at}.mlp.down_proj.KIND",
    }
    kinds = ("weight", "bias")
    return {ours.replace("KIND", kind): n.replace("KIND", kind) for ours, n in modules.items() for kind in kinds}


def eurobert(**options: bool) -> dict[str, str]:
    return {
        **llama_layer("model", **options),
        "embeddings.word": "model.embed_tokens.weight",
        "attention_norm_weight": "model.layers.N.input_layernorm.weight",
        "ffn_norm_weight": "model.layers.N.post_attention_layernorm.weight",
        "final.norm_weight": "model.norm.weight",
        "heads.decoder": "lm_head.weight",
    }


def post_norm(model: str, transform: str, norm: str, bias: str) -> dict[str, str]:
    """Nomic-BERT and GTE."""
    modules = {
        "embeddings.norm": f"{model}.embeddings.LayerNorm",
        "attention_norm": f"{model}.layers.N.post_attention_layernorm",
        "ffn_norm": f"{model}.layers.N.post_mlp_layernorm",
        "heads.mlm_transform": transform,
        "heads.mlm_norm": norm,
    }
    return {
        **llama_layer(model),
        **{f"{ours}_{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in ("weight", "bias")},
        "embeddings.word": f"{model}.embeddings.word_embeddings.weight",
        "embeddings.token_type": f"{model}.embeddings.token_type_embeddings.weight",
        "heads.mlm_bias": bias,
    }


_NOMIC = "cls.predictions.transform"
NOMIC = post_norm("nomic_bert", f"{_NOMIC}.dense", f"{_NOMIC}.layer_norm", "cls.predictions.bias")
GTE = post_norm("gte", "lm_head.dense", "lm_head.layer_norm", "lm_head.decoder.bias")
EUROBERT_GROUPED = eurobert(grouped=True)
_LAYER = "deberta.encoder.layer.N"
_DEBERTA = {
    "embeddings.norm": "deberta.embeddings.LayerNorm",
    "relative.norm": "deberta.encoder.LayerNorm",
    "attention_out": f"{_LAYER}.attention.output.dense",
    "attention_norm": f"{_LAYER}.attention.output.LayerNorm",
    "position_key": f"{_LAYER}.attention.self.pos_key_proj",
    "position_query": f"{_LAYER}.attention.self.pos_query_proj",
    "ffn_in": f"{_LAYER}.intermediate.dense",
    "ffn_out": f"{_LAYER}.output.dense",
    "ffn_norm": f"{_LAYER}.output.LayerNorm",
    "heads.mlm_transform": f"{_NOMIC}.dense",
    "heads.mlm_norm": f"{_NOMIC}.LayerNorm",
}
_QKV = [f"{_LAYER}.attention.self.{part}_proj" for part in ("query", "key", "value")]
DEBERTA = {
    **{f"{ours}_{kind}": f"{theirs}.{kind}" for ours, theirs in _DEBERTA.items() for kind in ("weight", "bias")},
    **{f"qkv_{kind}": " ".join(f"{part}.{kind}" for part in _QKV) for kind in ("weight", "bias")},
    "embeddings.word": "deberta.embeddings.word_embeddings.weight",
    "relative.table": "deberta.encoder.rel_embeddings.weight",
    "heads.mlm_bias": "cls.predictions.bias",
}
# Without its dropout, which ours lacks in attention.
V3: dict[str, Any] = {
    "relative_attention": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
    "pos_att_type": "p2c|c2p",
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_buckets": 10,
    "max_relative_positions": 30,
}
WINDOW, WIDE = {"local_attention": 16}, {"local_attention": 128, "max_positions": 128}
CASES = {
    "modernbert": Case("ModernBert", "modernbert", WINDOW, WINDOW, MODERNBERT),
    # The window is wider than every sequence.
    "modernbert-global": Case("ModernBert", "modernbert", WIDE, {"local_attention": 128}, MODERNBERT),
    "modernbert-other": Case(
        "ModernBert",
        "modernbert",
        {"local_attention": 6, "global_every": 2, "rotary_base": 500.0, "local_rotary_base": 0.0, "heads": 6},
        {
            "local_attention": 6,
            "num_attention_heads": 6,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 500.0} for kind in ("full_attention", "sliding_attention")
            },
        },
        MODERNBERT,
    ),
    "eurobert": Case("EuroBert", "eurobert", {}, {}, eurobert()),
    "eurobert-grouped": Case("EuroBert", "eurobert", {"kv_heads": 2}, {"num_key_value_heads": 2}, EUROBERT_GROUPED),
    "eurobert-one-kv-head": Case("EuroBert", "eurobert", {"kv_heads": 1}, {"num_key_value_heads": 1}, EUROBERT_GROUPED),
    "nomic_bert": Case("NomicBert", "nomic_bert", {}, {}, NOMIC),
    "gte": Case("Gte", "gte", {}, {"type_vocab_size": 2}, GTE),
    "gte-one-type": Case("Gte", "gte", {"token_types": False}, {"type_vocab_size": 0}, GTE),
    # Its buckets are single distances up to 5; the longest sequences are beyond its last.
    "deberta": Case("DebertaV2", "deberta", {"relative_buckets": 10, "relative_max_distance": 30}, V3, DEBERTA),
    "deberta-as-released": Case(
        "DebertaV2", "deberta", {}, {**V3, "position_buckets": 256, "max_relative_positions": 512}, DEBERTA
    ),
    "deberta-c2p": Case(
        "DebertaV2",
        "deberta",
        {"relative_buckets": 7, "relative_max_distance": 64, "relative_terms": "c2p", "relative_projections": True},
        {**V3, "position_buckets": 7, "max_relative_positions": -1, "pos_att_type": ["c2p"], "share_att_key": False},
        DEBERTA,
    ),
    "deberta-p2c": Case(
        "DebertaV2",
        "deberta",
        {"relative_buckets": 0, "relative_max_distance": 21, "relative_terms": "p2c", "relative_norm": False},
        {**V3, "position_buckets": -1, "max_relative_positions": 21, "pos_att_type": "p2c", "norm_rel_ebd": "none"},
        DEBERTA,
    ),
}
_BASES = {"eurobert": 250_000.0, "nomic_bert": 1_000.0, "gte": 160_000.0}


def make_pair(case: Case, **options: bool) -> tuple[PretrainingModel, Any]:
    """Our model, and transformers' with the same weights, away from their initial values."""
    torch.manual_seed(0)
    shape = ModelConfig.model_validate({**SIZES, "family": case.family, "hidden_dropout": 0.0, **case.ours})
    model = PretrainingModel(shape, VOCABULARY, False, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    values = {**THEIR_SIZES, "type_vocab_size": 2, **case.theirs}
    if case.family in _BASES:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": _BASES[case.family]}
    config = getattr(transformers, f"{case.classes}Config")(**values)
    theirs = getattr(transformers, f"{case.classes}ForMaskedLM")(config).eval()
    released: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        names = their_names(case, name)
        released |= zip(names, parameter.detach().clone().chunk(len(names)), strict=True)
    missing, unexpected = theirs.load_state_dict(released, strict=False)
    assert not unexpected
    assert set(missing) <= {"decoder.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"} | {
        "lm_head.decoder.weight"
    }
    theirs.tie_weights()
    return model.eval(), theirs


def their_names(case: Case, ours: str) -> list[str]:
    first, _, rest = ours.partition(".")
    if first != "layers":
        return case.names[ours].split()
    number, _, name = rest.partition(".")
    return case.names[name].replace(".N.", f".{number}.").split()


def their_loss(theirs: Any, inputs: dict[str, Tensor], *, token_types: bool) -> tuple[Tensor, Tensor]:
    wanted = ["input_ids", "attention_mask", "labels", *(["token_type_ids"] if token_types else [])]
    output = theirs(**{name: inputs[name] for name in wanted})
    return output.loss, output.logits


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_and_gradients_equal_transformers(case: Case) -> None:
    model, theirs = make_pair(case)
    batch = make_batch(LENGTHS)
    inputs = pad(batch)
    loss, logits = their_loss(theirs, inputs, token_types=model.shape.token_types)
    rows = logits[inputs["attention_mask"].bool()][batch.masked_rows]
    torch.testing.assert_close(model.masked_logits(batch), rows, rtol=0, atol=1e-4)
    ours = model(batch).mlm_loss / len(batch.masked_rows)
    torch.testing.assert_close(ours, loss, rtol=0, atol=1e-5)
    ours.backward()
    loss.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in model.named_parameters():
        expected = torch.cat([gradients[other] for other in their_names(case, name)])
        assert expected.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5, msg=name)

"""Families of released encoders: their config.json in every spelling, their names, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import SPECIALS, write_tokenizer
from safetensors.torch import load_file, save_file
from tiny_checkpoints import write_again
from torch import Tensor

from pretrain.checkpoint import hf
from pretrain.checkpoint.layouts import LAYOUTS, layout_of, read_config, write_config
from pretrain.checkpoint.released import read_released
from pretrain.common import files
from pretrain.common.errors import InputError
from pretrain.config import ModelConfig
from pretrain.model.heads import PretrainingModel
from tests import parity

transformers: Any = pytest.importorskip("transformers")

SHAPE = parity.SHAPES[0]
# Hub files of answerdotai/ModernBERT-base and jhu-clsp/mmBERT, made small.
OLD_MODERNBERT: dict[str, Any] = json.loads("""
{"architectures": ["ModernBertForMaskedLM"], "attention_bias": false, "attention_dropout": 0.0,
"classifier_activation": "gelu", "classifier_bias": false, "classifier_dropout": 0.0, "classifier_pooling": "mean",
"decoder_bias": true, "embedding_dropout": 0.0, "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0,
"hidden_activation": "gelu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 48,
"layer_norm_eps": 1e-05, "local_attention": 8, "local_rope_theta": 20000.0, "max_position_embeddings": 66,
"mlp_bias": false, "model_type": "modernbert", "norm_bias": false, "norm_eps": 1e-05, "num_attention_heads": 4,
"num_hidden_layers": 5, "pad_token_id": 0, "position_embedding_type": "sans_pos", "vocab_size": 101}
""")
GTE = {**parity.usual(SHAPE), "model_type": "gte"}
EUROBERT = {**parity.usual(SHAPE), "model_type": "eurobert"}
NOMIC = {**parity.usual(SHAPE), "model_type": "nomic_bert"}
DEBERTA = {**parity.usual(SHAPE), **parity._DEBERTA, "model_type": "deberta-v2"}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}
PARTIAL = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
FULL, SLIDING = "full_attention", "sliding_attention"


def modern(**change: Any) -> dict[str, Any]:
    """The configuration as transformers 5 writes it, with changes; None removes a key."""
    values = json.loads(json.dumps(transformers.ModernBertConfig(**OLD_MODERNBERT).to_dict()))
    values.update(change)
    return {key: value for key, value in values.items() if value is not None}


def without(config: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


# ---- config.json


def test_old_and_new_configs_of_modernbert_are_one() -> None:
    old, new = read_config(OLD_MODERNBERT), read_config(modern())
    assert "layer_types" in modern()
    assert old == new
    model = old.model
    assert [model.window(n) for n in range(5)] == [0, 4, 4, 0, 4]
    assert [model.rotary_base_of(n) for n in range(3)] == [160000, 20000, 20000]
    assert (model.pooling, model.norm, model.max_positions) == ("mean", "layer_norm_no_bias", 66)
    # A null base is that of the global layers.
    model = read_config({**OLD_MODERNBERT, "global_rope_theta": 90000.0, "local_rope_theta": None}).model
    assert [model.rotary_base_of(n) for n in range(3)] == [90000, 90000, 90000]
    model = read_config({**OLD_MODERNBERT, "global_rope_theta": None}).model
    assert [model.rotary_base_of(n) for n in range(3)] == [160000, 20000, 20000]
    arch = read_config(modern(layer_types=[FULL] * 5, global_attn_every_n_layers=None))
    assert (arch.model.local_attention, arch.model.global_every) == (0, 1)
    assert read_config(write_config({}, arch, "", 101, 0)) == arch


@pytest.mark.parametrize("family", parity.FAMILIES)
def test_a_written_config_reads_the_same_in_both_programs(family: str) -> None:
    name, values = parity.FAMILIES[family]
    theirs = getattr(transformers, name)(**values(SHAPE))
    arch = read_config(theirs.to_dict())
    given = theirs.to_dict()
    written = json.loads(json.dumps(write_config(given, arch, "ForMaskedLM", 101, 0)))
    assert given == theirs.to_dict()
    assert read_config(written) == arch
    again = getattr(transformers, name)(**written)
    expected, found = theirs.to_dict(), again.to_dict()
    # DeBERTa's two heads have other names, and one of them is written.
    other = ("architectures", "dtype", "global_attn_every_n_layers", "rope_theta", "legacy")
    same = {key for key in expected if key not in other}
    assert {key: found[key] for key in same} == {key: expected[key] for key in same}
    # Without the config that was read, as for a run of ours.
    bare = write_config({}, arch, "ForMaskedLM", 101, 0)
    assert read_config(bare).model == arch.model or "late" in family


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (modern(layer_types=[FULL, SLIDING, FULL, FULL, SLIDING]), "layer_types is .*every n-th layer"),
        (modern(layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING]), "layer_types is .*every n-th layer"),
        (modern(layer_types=["chunked_attention"] * 5), r"layer_types has \['chunked_attention'\]"),
        (modern(rope_parameters={FULL: YARN}), r"rope_parameters\.full_attention\.rope_type is 'yarn'; only 'default'"),
        (modern(rope_parameters={SLIDING: PARTIAL}), r"sliding_attention\.partial_rotary_factor is 0\.5"),
        ({**OLD_MODERNBERT, "rope_scaling": {"type": "linear", "factor": 2}}, "rope_type is 'linear'"),
        (modern(classifier_pooling="late"), "classifier_pooling is 'late'"),
        (modern(classifier_activation="relu"), "classifier_activation is 'relu'"),
        (modern(hidden_activation="gelu_new"), "hidden_activation is 'gelu_new'; only 'gelu'"),
        (modern(local_attention=80), r"local_attention \(80\) exceeds max_positions \(66\)"),
        ({**EUROBERT, "rope_scaling": {"rope_type": "llama3"}}, r"rope_scaling\.rope_type is 'llama3'"),
        ({**EUROBERT, "head_dim": 16}, "head_dim is 16"),
        ({**EUROBERT, "num_key_value_heads": 3}, "multiple of kv_heads"),
        ({**EUROBERT, "classifier_pooling": "last"}, "classifier_pooling is 'last'"),
        ({**GTE, "model_type": "new", "rope_scaling": {"type": "ntk", "factor": 8.0}}, "rope_type is 'ntk'"),
        ({**GTE, "layer_norm_type": "rms_norm"}, "layer_norm_type is 'rms_norm'"),
        ({**NOMIC, "prenorm": True}, "prenorm is True"),
        ({**NOMIC, "rotary_emb_fraction": 0.5}, "rotary_emb_fraction is 0.5"),
        ({**NOMIC, "type_vocab_size": 16}, "type_vocab_size is 16"),
        ({**DEBERTA, "type_vocab_size": 2}, "type_vocab_size is 2; only 0 is supported"),
        ({**DEBERTA, "position_biased_input": True}, "position_biased_input is True; only False is supported"),
        (without(DEBERTA, "position_biased_input"), "position_biased_input is True; only False"),
        (without(DEBERTA, "relative_attention"), "relative_attention is False; only True"),
        ({**DEBERTA, "conv_kernel_size": 3}, "conv_kernel_size is 3; only 0"),
        ({**DEBERTA, "attention_head_size": 16}, "attention_head_size is 16; only 8"),
        ({**DEBERTA, "embedding_size": 16}, "embedding_size is 16; only 32"),
        ({**DEBERTA, "pooler_hidden_size": 16}, "pooler_hidden_size is 16; only 32"),
        ({**DEBERTA, "pos_att_type": "c2p|p2p"}, r"pos_att_type is 'c2p\|p2p'; 'c2p', 'p2c' or both"),
        ({**DEBERTA, "pos_att_type": None}, r"pos_att_type is None; 'c2p'"),
        ({**DEBERTA, "norm_rel_ebd": "batch_norm"}, "norm_rel_ebd is 'batch_norm'"),
        ({**DEBERTA, "hidden_act": "gelu_new"}, "hidden_act is 'gelu_new'"),
        ({**DEBERTA, "pooler_hidden_act": "gelu_new"}, "pooler_hidden_act is 'gelu_new'; only 'gelu'"),
        ({**DEBERTA, "num_attention_heads": 0}, "heads"),
    ],
)
def test_what_our_encoder_lacks_is_refused_by_field_and_value(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InputError, match=rf"config\.json: bertrain's encoder does not support this model \(.*{message}"
    ):
        read_released(tmp_path)


def test_older_keys_of_nomic_are_todays() -> None:
    older: dict[str, Any] = json.loads("""
        {"model_type": "nomic_bert", "activation_function": "swiglu", "n_embd": 32, "n_head": 4, "n_inner": 48,
        "n_layer": 4, "n_positions": 8192, "max_trained_positions": 2048, "rotary_scaling_factor": 2.0,
        "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "resid_pdrop": 0.0,
        "attn_pdrop": 0.0, "type_vocab_size": 2, "vocab_size": 101}
    """)
    assert read_config(older).model == read_config({**NOMIC, "max_position_embeddings": 2048}).model
    written = write_config(older, read_config(older), "ForMaskedLM", 101, 0)
    assert read_config(written).model == read_config(older).model
    assert transformers.NomicBertConfig(**written).hidden_size == 32


@pytest.mark.parametrize(
    ("family", "change", "reason"),
    [
        ("modernbert", {"norm": "rms_norm"}, "model.norm is rms_norm, and modernbert supports only layer_norm_no_bias"),
        ("modernbert", {"ffn_in_bias": True}, "model.ffn_out_bias is False, and modernbert supports only True"),
        ("modernbert", {"positions": "rotary_interleaved"}, "model.positions is rotary_interleaved"),
        ("modernbert", {"kv_heads": 2}, "model.kv_heads is 2, and modernbert supports only 4"),
        ("modernbert", {"pooling": "max"}, "classifier_pooling is 'max'"),
        ("eurobert", {"decoder_bias": True}, "model.decoder_bias is True"),
        ("gte", {"ffn_out_bias": False}, "the model lacks layers.*.ffn_out_bias"),
        ("nomic_bert", {"token_types": False}, "model.token_types is False"),
        ("bert", {"gated": True}, "no counterpart of layers.*.gated_in_bias, layers.*.gated_in_weight"),
        ("bert", {"positions": "sinusoidal"}, "model.positions is sinusoidal, and bert supports only learned"),
        ("bert", {"pooling": "mean"}, "model.pooling is mean"),
    ],
)
def test_parts_that_a_layout_cannot_hold_are_named(family: str, change: dict[str, Any], reason: str) -> None:
    sizes = {"family": family, "size": "custom", "layers": 4, "hidden": 32, "heads": 4}
    assert layout_of(ModelConfig.model_validate(sizes)).unsupported_parts(ModelConfig.model_validate(sizes)) == ""
    model = ModelConfig.model_validate({**sizes, **change})
    assert reason in LAYOUTS[family].unsupported_parts(model)


# ---- names


def native(model: Any, folder: Path) -> Path:
    """A model saved under the names that its class has, without transformers' conversion to older ones."""
    model.config.save_pretrained(folder)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [type(model).__name__]}))
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", ["GTE", "Nomic BERT"])
def test_the_hubs_older_names_and_todays_give_one_model(family: str, tmp_path: Path) -> None:
    theirs = parity.make_theirs("AutoModelForMaskedLM", family, SHAPE)
    assert theirs is not None
    theirs.save_pretrained(tmp_path / "older")
    stacked = {"GTE": "up_gate_proj", "Nomic BERT": "Wqkv"}[family]
    assert any(stacked in name for name in load_file(tmp_path / "older" / "model.safetensors"))
    older, today = read_released(tmp_path / "older"), read_released(native(theirs, tmp_path / "today"))
    assert all(tensor.is_read or "tied" in tensor.target for tensor in (*older.mapping, *today.mapping))
    assert_same({**older.backbone, **older.pretraining}, {**today.backbone, **today.pretraining})
    # The encoder alone, as embedding models are saved, without a prefix or with an older one.
    prefix = {"GTE": "gte.", "Nomic BERT": "nomic_bert."}[family]
    tensors = load_file(tmp_path / "older" / "model.safetensors")
    for other in ("", {"GTE": "new.", "Nomic BERT": "bert."}[family]):
        alone = {name.replace(prefix, other, 1): t for name, t in tensors.items() if name.startswith(prefix)}
        save_file(alone, tmp_path / "older" / "model.safetensors")
        assert_same(read_released(tmp_path / "older").backbone, today.backbone)


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert not [name for name in first if not torch.equal(first[name], second[name])]


def test_an_encoder_saved_alone_or_by_a_trainer_is_read(tmp_path: Path) -> None:
    for family in ("ModernBERT", "EuroBERT, fewer key heads, late"):
        theirs = parity.make_theirs("AutoModelForMaskedLM", family, SHAPE)
        assert theirs is not None
        whole = read_released(native(theirs, tmp_path / family))
        tensors = load_file(tmp_path / family / "model.safetensors")
        for rename in (lambda name: name.removeprefix("model."), lambda name: f"_orig_mod.module.{name}"):
            save_file({rename(name): t for name, t in tensors.items()}, tmp_path / family / "model.safetensors")
            again = read_released(tmp_path / family)
            assert_same(again.backbone, whole.backbone)
            assert_same(again.pretraining, whole.pretraining)


def test_a_missing_tensor_and_a_further_layer_are_named(tmp_path: Path) -> None:
    theirs = parity.make_theirs("AutoModelForMaskedLM", "EuroBERT, fewer key heads, late", SHAPE)
    assert theirs is not None
    tensors = load_file(native(theirs, tmp_path) / "model.safetensors")
    without = {name: t for name, t in tensors.items() if name != "model.layers.2.mlp.up_proj.weight"}
    save_file(without, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.layers\.2\.mlp\.up_proj\.weight is missing"):
        read_released(tmp_path)
    further = {"model.layers.4.mlp.up_proj.weight": tensors["model.layers.3.mlp.up_proj.weight"].clone()}
    save_file({**tensors, **further}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"layers\.4\.\S*, beyond the 4 layers"):
        read_released(tmp_path)
    changed = {"model.layers.1.self_attn.k_proj.weight": torch.zeros(32, 32)}
    save_file({**tensors, **changed}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"k_proj\.weight has the shape \[32, 32\]; expected \[16, 32\]"):
        read_released(tmp_path)


def test_the_prediction_head_of_modernbert_begins_a_task(tmp_path: Path) -> None:
    theirs = parity.make_theirs("AutoModelForMaskedLM", "ModernBERT", SHAPE)
    assert theirs is not None
    released = parity.read_back(theirs, tmp_path)
    assert set(released.head) == {"dense_weight", "norm_weight"}
    assert torch.equal(released.head["dense_weight"], released.pretraining["heads.mlm_transform_weight"])
    assert torch.equal(released.head["norm_weight"], theirs.head.norm.weight)
    # A classifier has that head, but no decoder's bias: no masked-language-modeling head can be made of it.
    theirs = parity.make_theirs("AutoModelForSequenceClassification", "ModernBERT", SHAPE)
    assert theirs is not None
    released = parity.read_back(theirs, tmp_path)
    assert set(released.head) == {"dense_weight", "norm_weight", "out_weight", "out_bias"}
    assert not released.pretraining


VARIANTS = ["DeBERTa-v3 with lm_predictions", "ModernBERT with biases, untied, mean"]
VARIANTS += ["EuroBERT, tied, first token", "GTE without segments"]
KINDS = {"mlm": "AutoModelForMaskedLM", **parity.CLASSES}
WRITTEN = [(family, purpose) for family in parity.FAMILIES for purpose in KINDS]
WRITTEN += [(family, "mlm") for family in parity.OTHERS]


@pytest.mark.parametrize(
    ("family", "purpose"), [one for one in WRITTEN if one[0] not in VARIANTS or one[1] in ("mlm", "sequence")]
)
def test_a_written_model_is_whole_in_transformers_and_comes_back(family: str, purpose: str, tmp_path: Path) -> None:
    kind, out = KINDS[purpose], tmp_path / "ours"
    theirs = parity.make_theirs(kind, family, SHAPE)
    if theirs is None:
        pytest.skip("transformers has no such class")
    released = parity.read_back(theirs, tmp_path / "theirs")
    write_tokenizer(tmp_path, [*SPECIALS, *"abc"])
    if purpose == "mlm":
        state = {**released.backbone, **released.pretraining}
        begun: dict[str, Any] = {"family": released.family, "config": released.config}
        hf.export(state, released.model, tmp_path, out, next_sentence=False, card="", **begun)
    else:
        config = {**released.config, "problem_type": "single_label_classification"}
        write_again(released, out, tmp_path, purpose, config=config)
    files.verify_manifest(out)
    loaded, report = getattr(transformers, kind).from_pretrained(out, output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert type(loaded) is type(theirs)
    assert loaded.config.id2label == theirs.config.id2label
    assert loaded.config.problem_type == (None if purpose == "mlm" else "single_label_classification")
    inputs = parity.inputs_of(parity.batch_for(released, SHAPE), released)
    head: Any = "tokens" if purpose == "mlm" else purpose
    with torch.no_grad():
        expected, found = (parity.their_logits(model.eval(), inputs, head) for model in (theirs, loaded))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    again = read_released(out)
    assert (again.family, again.model) == (released.family, released.model)
    for part in ("backbone", "pretraining", "head"):
        assert_same(getattr(again, part), getattr(released, part))


@pytest.mark.parametrize("family", ["roberta", "modernbert", "eurobert", "nomic_bert", "gte", "deberta"])
def test_a_pretrained_family_is_exported_in_its_own_layout(family: str, tmp_path: Path) -> None:
    sizes = {"layers": 3, "hidden": 32, "heads": 4, "max_positions": 66}
    window = {"local_attention": 8} if family == "modernbert" else {}
    shape = ModelConfig.model_validate({"family": family, "size": "custom", **sizes, **window})
    torch.manual_seed(0)
    vocabulary = [*SPECIALS, *"abcdefgh"]
    model = PretrainingModel(shape, len(vocabulary), next_sentence=True)
    write_tokenizer(tmp_path, vocabulary)
    hf.export(model.state_dict(), shape, tmp_path, tmp_path / "out", next_sentence=True, card="")
    loaded, report = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert loaded.config.model_type == {"deberta": "deberta-v2"}.get(family, family)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").pad_token_id == loaded.config.pad_token_id == 0
    read, state, has_pair = hf.load(tmp_path / "out")
    assert not has_pair
    assert layout_of(read).unsupported_parts(shape) == ""
    ours = {name: tensor for name, tensor in model.state_dict().items() if "pooler" not in name and "nsp" not in name}
    assert_same(state, ours)

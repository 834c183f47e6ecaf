"""DeBERTa-v2 and -v3, as in transformers 5.23 (models/deberta_v2/modeling_deberta_v2.py, configuration_deberta_v2.py).

The masked-language-modeling head has two sets of names: `cls.predictions`, and `lm_predictions.lm_head`, which
Microsoft's files have and transformers reads if config.json has `legacy: false`. Both are read. The first is written,
because only that head's decoder can be untied.
"""

from collections.abc import Mapping
from typing import Any

from pretrain.checkpoint.layouts.families import bert
from pretrain.checkpoint.layouts.layout import Layout, activation_name
from pretrain.checkpoint.layouts.task_heads import HeadDropout, TaskHead, pooled_head
from pretrain.config import ModelConfig

# Setting relative_terms -> pos_att_type in config.json.
_TERMS = {"both": ["p2c", "c2p"], "c2p": ["c2p"], "p2c": ["p2c"]}
# Field that has only one supported value -> (transformers' default if the field is missing, supported value).
_SUPPORTED = {
    "relative_attention": (False, True),
    "position_biased_input": (True, False),
    "type_vocab_size": (0, 0),
    "conv_kernel_size": (0, 0),
}


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    for key, (default, supported) in _SUPPORTED.items():
        if config.get(key, default) != supported:
            raise ValueError(f"{key} is {config.get(key, default)!r}; only {supported!r} is supported")
    _pooler_activation(config)  # raises an error if it is not supported
    hidden = config["hidden_size"]
    derived = {
        "attention_head_size": hidden // max(1, config["num_attention_heads"]),  # `ModelConfig` rejects 0
        "embedding_size": hidden,
        "pooler_hidden_size": hidden,
    }
    for key, supported in derived.items():
        if config.get(key, supported) != supported:
            raise ValueError(f"{key} is {config[key]!r}; only {supported} is supported with hidden_size {hidden}")
    max_distance = config.get("max_relative_positions", -1)
    return {
        "relative_buckets": max(0, config.get("position_buckets", -1)),
        "relative_max_distance": max_distance if max_distance > 0 else config["max_position_embeddings"],
        "relative_terms": _read_terms(config),
        "relative_norm": _read_norm(config),
        "relative_projections": not config.get("share_att_key", False),
        # With legacy: false, the decoder is always the word embeddings.
        "tied_decoder": config.get("tie_word_embeddings") is not False or config.get("legacy") is False,
    }


def _read_terms(config: Mapping[str, Any]) -> str:
    value = config.get("pos_att_type")
    terms = {term.strip() for term in (value.lower().split("|") if isinstance(value, str) else value or [])}
    name = next((name for name, known in _TERMS.items() if set(known) == terms), None)
    if name is None:
        raise ValueError(f"pos_att_type is {value!r}; 'c2p', 'p2c' or both are supported")
    return name


def _read_norm(config: Mapping[str, Any]) -> bool:
    value = str(config.get("norm_rel_ebd", "none"))
    norms = {norm.strip() for norm in value.lower().split("|")}
    if not norms <= {"none", "layer_norm"}:
        raise ValueError(f"norm_rel_ebd is {value!r}; only 'none' and 'layer_norm' are supported")
    return "layer_norm" in norms


def _write(model: ModelConfig, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{key: supported for key, (_, supported) in _SUPPORTED.items()},
        "position_buckets": model.relative_buckets or -1,
        "max_relative_positions": model.relative_max_distance,
        "pos_att_type": _TERMS[model.relative_terms],
        "norm_rel_ebd": "layer_norm" if model.relative_norm else "none",
        "share_att_key": not model.relative_projections,
        "legacy": True,
        "tie_word_embeddings": model.tied_decoder,
        "pooler_hidden_size": model.hidden,
    }


def _head(config: Mapping[str, Any], model: ModelConfig, purpose: str) -> TaskHead:
    if purpose == "spans":
        return TaskHead()
    if purpose == "tokens":
        return TaskHead(dropout=HeadDropout(0.0, model.hidden_dropout))
    rate = config.get("cls_dropout")
    rate = model.hidden_dropout if rate is None else rate
    if pooled := pooled_head(config, rate):
        return pooled
    dropout = HeadDropout(config.get("pooler_dropout") or 0.0, rate)
    return TaskHead(_pooler_activation(config), dropout=dropout)


def _pooler_activation(config: Mapping[str, Any]) -> str:
    return activation_name("pooler_hidden_act", config.get("pooler_hidden_act", "gelu"))


_EMBEDDING_MODULES = bert.embedding_modules("deberta")

LAYOUT = Layout(
    family="deberta",  # name of this layout
    model_type="deberta-v2",  # in config.json
    class_prefix="DebertaV2",
    layer="encoder.layer",
    layer_modules={
        **bert.LAYER_MODULES,
        "qkv": ("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
        "position_key": ("attention.self.pos_key_proj",),
        "position_query": ("attention.self.pos_query_proj",),
    },
    other_modules={
        **{ours: _EMBEDDING_MODULES[ours] for ours in ("embeddings.word", "embeddings.norm")},
        "relative.table": "deberta.encoder.rel_embeddings",
        "relative.norm": "deberta.encoder.LayerNorm",
        "heads.mlm_transform": "cls.predictions.transform.dense",
        "heads.mlm_norm": "cls.predictions.transform.LayerNorm",
        "heads.mlm": "cls.predictions",
        "heads.decoder": "cls.predictions.decoder",
        "head.dense": "pooler.dense",
    },
    decoder="cls.predictions.decoder",
    out_modules=bert.OUT_MODULES,
    config_keys=bert.CONFIG_KEYS,
    task_head=_head,
    model_family="deberta",
    bare_prefixes=("embeddings.", "encoder."),
    spellings=(  # older names of parameters -> names in `other_modules`
        (r"^lm_predictions\.lm_head\.(dense|LayerNorm)\.", r"cls.predictions.transform.\1."),
        (r"^lm_predictions\.lm_head\.", "cls.predictions."),
    ),
    unused={
        "mask_predictions.": "the head that detects replaced tokens",
        "deberta.embeddings.position_embeddings.": "absolute positions, which this model does not use",
    },
    defaults=bert.DEFAULTS,
    read=_read,
    write=_write,
    # DeBERTa's tokenizer class in transformers would convert every vocabulary to a Unigram model.
    tokenizer_class="PreTrainedTokenizerFast",
)

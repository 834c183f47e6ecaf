"""ModernBERT, Ettin and mmBERT, as in transformers 5.23 (models/modernbert/modeling_modernbert.py).

config.json is read with the keys of transformers 5 (layer_types, rope_parameters) or of most released files
(global_attn_every_n_layers, global_rope_theta, local_rope_theta), and written with both. The prediction head is the
first part of the masked-language-modeling head and of every task's head.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pretrain.checkpoint.layouts.layout import Layout, activation_name
from pretrain.checkpoint.layouts.rotary import read_base, write_base
from pretrain.checkpoint.layouts.task_heads import HeadDropout, TaskHead
from pretrain.config import ModelConfig
from pretrain.model.activations import get_activation

_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_EVERY_KEY = "global_attn_every_n_layers"
# Layer type -> (key of its rotary base in transformers 4, default base from ModernBertConfig.default_theta).
_BASES = {_GLOBAL: ("global_rope_theta", 160_000.0), _LOCAL: ("local_rope_theta", 10_000.0)}


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    activation = activation_name("hidden_activation", config.get("hidden_activation", "gelu"))
    head_act = activation_name("classifier_activation", config.get("classifier_activation", "gelu"))
    if head_act != activation:
        raise ValueError(f"classifier_activation is {head_act!r}; only hidden_activation's {activation!r} is supported")
    ffn_bias = bool(config.get("mlp_bias", False))
    return {
        **_read_layers(config),
        "norm": "layer_norm" if config.get("norm_bias", False) else "layer_norm_no_bias",
        "attention_bias": bool(config.get("attention_bias", False)),
        "ffn_in_bias": ffn_bias,
        "ffn_out_bias": ffn_bias,
        "hidden_dropout": max(config.get("embedding_dropout", 0.0), config.get("mlp_dropout", 0.0)),
        "mlm_transform_bias": bool(config.get("classifier_bias", False)),
        "decoder_bias": bool(config.get("decoder_bias", True)),
        "tied_decoder": config.get("tie_word_embeddings") is not False,
        "pooling": _pooling(config),
    }


def _read_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read which layers are local, their window, and the rotary bases."""
    global_every = _read_global_every(config)
    window = config.get("local_attention", 128)
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    old_bases = {kind: config.get(key, base) for kind, (key, base) in _BASES.items()}
    # In transformers 4, null means the base of the global layers.
    default = _BASES[_GLOBAL][1] if old_bases[_GLOBAL] is None else old_bases[_GLOBAL]
    bases = {
        kind: read_base(
            {**scaling, **(parameters.get(kind) or {})}, f"rope_parameters.{kind}", default if value is None else value
        )
        for kind, value in old_bases.items()
    }
    has_local = global_every > 1
    return {
        "global_every": global_every,
        "local_attention": window - window % 2 if has_local else 0,
        "rotary_base": bases[_GLOBAL],
        "local_rotary_base": bases[_LOCAL] if has_local else 0.0,
    }


def _read_global_every(config: Mapping[str, Any]) -> int:
    """Read `ModelConfig.global_every`; raise ValueError unless every n-th layer is global, starting with the first."""
    layers = config["num_hidden_layers"]
    every = config.get(_EVERY_KEY, 3)
    layer_types = config.get("layer_types")
    if layer_types is None or layer_types == _layer_types(layers, every):
        return every
    if unknown := set(layer_types) - {_GLOBAL, _LOCAL}:
        raise ValueError(f"layer_types has {sorted(unknown)}; only {_GLOBAL}, {_LOCAL} are supported")
    later_global = [index for index, kind in enumerate(layer_types) if kind == _GLOBAL and index]
    every = later_global[0] if later_global else max(2, len(layer_types))
    if layer_types != _layer_types(layers, every):
        raise ValueError(
            f"layer_types is {_shorten(layer_types)}; only {_GLOBAL} in every n-th layer, from the first, is supported"
        )
    return every


def _shorten(layer_types: Sequence[str]) -> str:
    first_types = ", ".join(layer_types[:6])
    return f"[{first_types}, ...]" if len(layer_types) > 6 else f"[{first_types}]"


def _layer_types(layers: int, every: int) -> list[str]:
    return [_LOCAL if index % every else _GLOBAL for index in range(layers)]


def _pooling(config: Mapping[str, Any]) -> str:
    pooling = config.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise ValueError(f"classifier_pooling is {pooling!r}; only 'cls' and 'mean' are supported")
    return pooling


def _write(model: ModelConfig, config: Mapping[str, Any]) -> dict[str, Any]:
    window, local_base = model.local_attention, model.local_rotary_base or model.rotary_base
    return {
        "classifier_activation": get_activation(model.activation).released_names[0],
        "layer_types": _layer_types(model.layers, model.global_every),
        _EVERY_KEY: model.global_every,
        "local_attention": window or config.get("local_attention", 128),
        "rope_parameters": {_GLOBAL: write_base(model.rotary_base), _LOCAL: write_base(local_base)},
        "global_rope_theta": model.rotary_base,
        "local_rope_theta": local_base,
        "norm_bias": model.norm == "layer_norm",
        "attention_bias": model.attention_bias,
        "mlp_bias": model.ffn_in_bias,
        "embedding_dropout": model.hidden_dropout,
        "mlp_dropout": model.hidden_dropout,
        "classifier_bias": model.mlm_transform_bias,
        "decoder_bias": model.decoder_bias,
        "tie_word_embeddings": model.tied_decoder,
        "classifier_pooling": model.pooling,
    }


def _head(config: Mapping[str, Any], model: ModelConfig, purpose: str) -> TaskHead:
    pooling = "mean" if purpose == "sequence" and model.pooling == "mean" else "cls"
    dropout = HeadDropout(before_out=config.get("classifier_dropout") or 0.0)
    return TaskHead(model.activation, model.mlm_transform_bias, model.norm, pooling, dropout)


LAYOUT = Layout(
    family="modernbert",
    class_prefix="ModernBert",
    layer="layers",
    layer_modules={
        "attention_norm": ("attn_norm",),
        "qkv": ("attn.Wqkv",),
        "attention_out": ("attn.Wo",),
        "ffn_norm": ("mlp_norm",),
        "gated_in": ("mlp.Wi",),
        "ffn_out": ("mlp.Wo",),
    },
    other_modules={
        "embeddings.word": "model.embeddings.tok_embeddings",
        "embeddings.norm": "model.embeddings.norm",
        "final.norm": "model.final_norm",
        "heads.mlm_transform": "head.dense",
        "heads.mlm_norm": "head.norm",
        "heads.mlm": "decoder",
        "heads.decoder": "decoder",
        "head.dense": "head.dense",
        "head.norm": "head.norm",
    },
    decoder="decoder",
    out_modules={"sequence": "classifier", "tokens": "classifier", "spans": "classifier"},
    config_keys={
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "intermediate": "intermediate_size",
        "max_positions": "max_position_embeddings",
        "attention_dropout": "attention_dropout",
        "init_std": "initializer_range",
        "layer_norm_eps": "norm_eps",
    },
    task_head=_head,
    model_family="modernbert",
    prefix="model.",
    bare_prefixes=("embeddings.", "layers.", "final_norm."),
    read=_read,
    write=_write,
    activation_key="hidden_activation",
    special_ids={"cls_token_id": "cls", "sep_token_id": "sep", "bos_token_id": "cls", "eos_token_id": "sep"},
    tokenizer_class="PreTrainedTokenizerFast",
)

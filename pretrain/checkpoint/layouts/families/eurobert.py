"""EuroBERT, as in transformers 5.23 (models/eurobert/modeling_eurobert.py and configuration_eurobert.py).

transformers has no class for question answering; such models are written with BERT's names.
"""

from collections.abc import Mapping
from typing import Any

from pretrain.checkpoint.layouts.layout import Layout
from pretrain.checkpoint.layouts.rotary import read_shared_base, write_shared_base
from pretrain.checkpoint.layouts.task_heads import TaskHead
from pretrain.config import ModelConfig

# classifier_pooling in config.json (sentence-transformers writes cls) -> `ModelConfig.pooling`.
_POOLINGS = {"bos": "cls", "cls": "cls", "mean": "mean", "late": "mean"}


def _modernize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rename clf_pooling, which is the key in EuroBERT's original code."""
    return {"classifier_pooling": config.get("clf_pooling", "late"), **config}


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim")
    if head_dim is not None and head_dim * heads != config["hidden_size"]:
        raise ValueError(f"head_dim is {head_dim}; only hidden_size / num_attention_heads is supported")
    kv_heads = config.get("num_key_value_heads") or heads
    pooling = config["classifier_pooling"]
    if pooling not in _POOLINGS:
        raise ValueError(f"classifier_pooling is {pooling!r}; only {', '.join(map(repr, _POOLINGS))} are supported")
    ffn_bias = bool(config.get("mlp_bias", False))
    return {
        "rotary_base": read_shared_base(config, 10_000.0),
        "kv_heads": 0 if kv_heads == heads else kv_heads,
        "attention_bias": bool(config.get("attention_bias", False)),
        "ffn_in_bias": ffn_bias,
        "ffn_out_bias": ffn_bias,
        "decoder_bias": ffn_bias,  # EuroBertForMaskedLM
        "tied_decoder": bool(config.get("tie_word_embeddings", False)),
        "pooling": _POOLINGS[pooling],
    }


def _write(model: ModelConfig, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **write_shared_base(model.rotary_base),
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": model.head_width,
        "attention_bias": model.attention_bias,
        "mlp_bias": model.ffn_in_bias,
        "tie_word_embeddings": model.tied_decoder,
        "classifier_pooling": _pooling(config, model),
    }


def _pooling(config: Mapping[str, Any], model: ModelConfig) -> str:
    """Return EuroBERT's name of the pooling. A mean is late pooling if config.json says so or does not name one."""
    if config and model.pooling == "mean" and _modernize(config)["classifier_pooling"] == "late":
        return "late"
    return {"cls": "bos"}.get(model.pooling, model.pooling)


def _head(config: Mapping[str, Any], model: ModelConfig, purpose: str) -> TaskHead:
    if purpose != "sequence":
        return TaskHead()
    pooling = _pooling(config, model)
    return TaskHead("gelu", pooling="cls" if pooling == "bos" else "late" if pooling == "late" else "mean")


LAYOUT = Layout(
    family="eurobert",
    class_prefix="EuroBert",
    layer="layers",
    layer_modules={
        "attention_norm": ("input_layernorm",),
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "q": ("self_attn.q_proj",),
        "kv": ("self_attn.k_proj", "self_attn.v_proj"),
        "attention_out": ("self_attn.o_proj",),
        "ffn_norm": ("post_attention_layernorm",),
        "gated_in": ("mlp.gate_proj", "mlp.up_proj"),
        "ffn_out": ("mlp.down_proj",),
    },
    other_modules={
        "embeddings.word": "model.embed_tokens",
        "final.norm": "model.norm",
        "heads.mlm": "lm_head",
        "heads.decoder": "lm_head",
        "head.dense": "dense",
    },
    decoder="lm_head",
    out_modules={"sequence": "classifier", "tokens": "classifier", "spans": "qa_outputs"},
    config_keys={
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "intermediate": "intermediate_size",
        "max_positions": "max_position_embeddings",
        "attention_dropout": "attention_dropout",
        "init_std": "initializer_range",
        "layer_norm_eps": "rms_norm_eps",
    },
    task_head=_head,
    model_family="eurobert",
    prefix="model.",
    bare_prefixes=("embed_tokens.", "layers.", "norm."),
    modernize=_modernize,
    read=_read,
    write=_write,
    special_ids={"bos_token_id": "cls", "eos_token_id": "sep", "mask_token_id": "mask"},
    tokenizer_class="PreTrainedTokenizerFast",
)

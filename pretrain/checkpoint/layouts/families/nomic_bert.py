"""Nomic BERT, as implemented in transformers 5.23 (models/nomic_bert/modeling_nomic_bert.py).

Older files on the Hub use the parameter names (Wqkv) and config keys (n_embd) of contrastors, Nomic's training code;
transformers maps the names in conversion_mapping.py ("nomic_bert"). transformers has no NomicBertForQuestionAnswering.
"""

from collections.abc import Mapping
from typing import Any

from pretrain.checkpoint.layouts.families import bert, gte
from pretrain.checkpoint.layouts.layout import Layout
from pretrain.checkpoint.layouts.rotary import read_shared_base
from pretrain.checkpoint.layouts.task_heads import sequence_head

# Key of an older config.json -> current key.
_CURRENT_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}


def _modernize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if "n_embd" not in config or "hidden_size" in config:
        return config
    values = {**config, **{key: config[old_key] for old_key, key in _CURRENT_KEYS.items() if old_key in config}}
    activation = config.get("activation_function", "swiglu")
    if activation not in ("swiglu", "geglu"):
        raise ValueError(f"activation_function is {activation!r}; only 'swiglu' and 'geglu' are supported")
    values["hidden_act"] = {"swiglu": "silu", "geglu": "gelu"}[activation]
    # Dynamic NTK scaling applies only beyond max_trained_positions. It is not supported, so that length is the maximum.
    if config.get("rotary_scaling_factor") and config.get("max_trained_positions"):
        values["max_position_embeddings"] = config["max_trained_positions"]
    return values


def _read(config: Mapping[str, Any]) -> dict[str, Any]:
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim")
    if head_dim is not None and head_dim * num_heads != config["hidden_size"]:
        raise ValueError(f"head_dim is {head_dim}; only hidden_size / num_attention_heads is supported")
    return {"rotary_base": read_shared_base(config, 1_000.0), **bert.read_tying(config)}


LAYOUT = Layout(
    family="nomic_bert",
    class_prefix="NomicBert",
    layer="layers",
    layer_modules=gte.LAYER_MODULES,
    other_modules={
        **gte.other_modules("nomic_bert"),
        "heads.mlm_transform": "cls.predictions.transform.dense",
        "heads.mlm_norm": "cls.predictions.transform.layer_norm",
        "heads.mlm": "cls.predictions",
        "heads.decoder": "cls.predictions.decoder",
    },
    decoder="cls.predictions.decoder",
    out_modules=bert.OUT_MODULES,
    config_keys=bert.CONFIG_KEYS,
    task_head=sequence_head("tanh"),
    model_family="nomic_bert",
    bare_prefixes=gte.BARE_PREFIXES,
    spellings=(
        (r"^(bert|nomic_bert)\.", ""),
        (r"^encoder\.layers\.", "layers."),
        (r"^emb_ln\.", "embeddings.LayerNorm."),
        (r"^cls\.predictions\.transform\.LayerNorm\.", "cls.predictions.transform.layer_norm."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.fc11\.", ".up_proj."),
        (r"\.fc12\.", ".gate_proj."),
        (r"\.fc2\.", ".down_proj."),
        (r"\.norm1\.", ".post_attention_layernorm."),
        (r"\.norm2\.", ".post_mlp_layernorm."),
    ),
    fused={"attn.Wqkv": gte.LAYER_MODULES["qkv"]},
    supported={
        "prenorm": (False, None),
        "use_rms_norm": (False, None),
        "parallel_block": (False, None),
        "causal": (False, None),
        "qkv_proj_bias": (False, None),
        "mlp_fc1_bias": (False, None),
        "mlp_fc2_bias": (False, None),
        "rotary_emb_fraction": (1.0,),
        "rotary_emb_interleaved": (False, None),
        "rotary_emb_scale_base": (None,),
        "scale_attn_by_inverse_layer_idx": (False, None),
    },
    modernize=_modernize,
    read=_read,
    write=gte.config_json_fields,
    default_token_types=2,
    tokenizer_class="BertTokenizer",
)

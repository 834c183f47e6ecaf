"""GTE, the encoder of Alibaba's embedding models, as in transformers 5.23 (models/gte/modeling_gte.py).

Older files on the Hub (model_type "new") have other tensor names, converted as in transformers' conversion_mapping.py.
transformers has no class for question answering; such heads are written with BERT's names.
"""

from collections.abc import Mapping
from typing import Any

from pretrain.checkpoint.layouts.families import bert
from pretrain.checkpoint.layouts.layout import Layout
from pretrain.checkpoint.layouts.rotary import read_shared_base, write_shared_base
from pretrain.checkpoint.layouts.task_heads import sequence_head
from pretrain.config import ModelConfig

# Names of modules in a layer, which Nomic BERT also uses.
LAYER_MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "attention_norm": ("post_attention_layernorm",),
    "gated_in": ("mlp.gate_proj", "mlp.up_proj"),
    "ffn_out": ("mlp.down_proj",),
    "ffn_norm": ("post_mlp_layernorm",),
}
BARE_PREFIXES = ("embeddings.", "layers.", "pooler.")  # of tensors that a bare encoder stores without "gte."


def other_modules(prefix: str) -> dict[str, str]:
    """Return the modules outside layers that are common to GTE and Nomic BERT: our module -> the family's."""
    modules = bert.embedding_modules(prefix)
    del modules["embeddings.position"]
    # "heads." are the pretraining heads, "head." is the task head.
    return {**modules, "heads.pooler": f"{prefix}.pooler.dense", "head.dense": f"{prefix}.pooler.dense"}


def _read_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    default = 10_000.0 if config.get("model_type") == "new" else 160_000.0
    return {
        "rotary_base": read_shared_base(config, default),
        "token_types": bool(config.get("type_vocab_size", 1)),
        **bert.read_tying(config),
    }


def config_json_fields(model: ModelConfig, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that GTE and Nomic BERT share."""
    return {**write_shared_base(model.rotary_base), "tie_word_embeddings": model.tied_decoder}


LAYOUT = Layout(
    family="gte",  # name of the layout
    class_prefix="Gte",
    layer="layers",
    layer_modules=LAYER_MODULES,
    other_modules={
        **other_modules("gte"),
        "heads.mlm_transform": "lm_head.dense",
        "heads.mlm_norm": "lm_head.layer_norm",
        "heads.mlm": "lm_head.decoder",
        "heads.decoder": "lm_head.decoder",
    },
    decoder="lm_head.decoder",
    out_modules=bert.OUT_MODULES,
    config_keys=bert.CONFIG_KEYS,
    task_head=sequence_head("tanh"),
    model_family="gte",  # value of `ModelConfig.family`
    bare_prefixes=BARE_PREFIXES,
    spellings=(  # (regular expression, replacement) for older tensor names
        (r"^(new|gte)\.", ""),
        (r"^encoder\.layer\.", "layers."),
        (r"\.attention\.o_proj\.", ".self_attn.o_proj."),
        (r"\.attn_ln\.", ".post_attention_layernorm."),
        (r"\.mlp_ln\.", ".post_mlp_layernorm."),
        (r"^lm_head\.norm\.", "lm_head.layer_norm."),
    ),
    fused={
        "attention.qkv_proj": LAYER_MODULES["qkv"],
        "mlp.up_gate_proj": ("mlp.up_proj", "mlp.gate_proj"),
    },
    supported={
        "position_embedding_type": ("rope", "absolute", None),
        "layer_norm_type": ("layer_norm",),
        "logn_attention_scale": (False, None),
    },
    read=_read_settings,
    write=config_json_fields,
    mlm_activation="gelu",
    default_token_types=1,
    tokenizer_class="PreTrainedTokenizerFast",
    legacy_model_types=("new",),  # Alibaba-NLP/new-impl
)

"""DistilBERT, as in transformers 5.23 (models/distilbert/modeling_distilbert.py and configuration_distilbert.py).

It has no token types. Our models train embeddings for them; on export, type 0's embedding is added to all positions'.
"""

from collections.abc import Mapping
from typing import Any

from pretrain.checkpoint.layouts.families import bert
from pretrain.checkpoint.layouts.layout import Layout
from pretrain.checkpoint.layouts.task_heads import HeadDropout, TaskHead, pooled_head
from pretrain.config import ModelConfig


def _head(config: Mapping[str, Any], model: ModelConfig, purpose: str) -> TaskHead:
    keys_and_defaults = {"sequence": ("seq_classif_dropout", 0.2), "spans": ("qa_dropout", 0.1)}
    rate = config.get(*keys_and_defaults[purpose]) if purpose in keys_and_defaults else model.hidden_dropout
    if purpose == "sequence" and (pooled := pooled_head(config, rate)):
        return pooled
    return TaskHead("relu" if purpose == "sequence" else "", dropout=HeadDropout(before_out=rate))


def _write(model: ModelConfig, config: Mapping[str, Any]) -> dict[str, Any]:
    return {} if model.tied_decoder else {"tie_word_embeddings": False}


LAYOUT = Layout(
    family="distilbert",
    class_prefix="DistilBert",
    layer="transformer.layer",
    layer_modules={
        "qkv": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention_out": ("attention.out_lin",),
        "attention_norm": ("sa_layer_norm",),
        "ffn_in": ("ffn.lin1",),
        "ffn_out": ("ffn.lin2",),
        "ffn_norm": ("output_layer_norm",),
    },
    other_modules={
        "embeddings.word": "distilbert.embeddings.word_embeddings",
        "embeddings.position": "distilbert.embeddings.position_embeddings",
        "embeddings.norm": "distilbert.embeddings.LayerNorm",
        "heads.mlm_transform": "vocab_transform",  # `heads` are for pretraining, `head` is for a task
        "heads.mlm_norm": "vocab_layer_norm",
        "heads.mlm": "vocab_projector",
        "heads.decoder": "vocab_projector",
        "head.dense": "pre_classifier",
    },
    decoder="vocab_projector",
    out_modules=bert.OUT_MODULES,
    config_keys={
        "layers": "n_layers",
        "hidden": "dim",
        "heads": "n_heads",
        "intermediate": "hidden_dim",
        "max_positions": "max_position_embeddings",
        "hidden_dropout": "dropout",
        "attention_dropout": "attention_dropout",
        "init_std": "initializer_range",
    },
    task_head=_head,
    bare_prefixes=("embeddings.", "transformer."),
    defaults=bert.DEFAULTS,
    supported=bert.SUPPORTED,
    read=bert.read_tying,
    write=_write,
    activation_key="activation",
)

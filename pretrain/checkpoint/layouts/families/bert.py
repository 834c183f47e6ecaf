"""BERT, as in transformers 5.23 (models/bert/modeling_bert.py and configuration_bert.py).

Other families use the names within a layer and the keys of config.json that are defined here.
"""

from collections.abc import Mapping
from typing import Any

from pretrain.checkpoint.layouts.layout import Layout
from pretrain.checkpoint.layouts.task_heads import sequence_head
from pretrain.config import ModelConfig

LAYER_MODULES = {
    "qkv": ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention_out": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "ffn_in": ("intermediate.dense",),
    "ffn_out": ("output.dense",),
    "ffn_norm": ("output.LayerNorm",),
}
CONFIG_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "intermediate": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "init_std": "initializer_range",
    "layer_norm_eps": "layer_norm_eps",
}
DEFAULTS = {"attention_dropout": 0.1}  # transformers' default, if config.json has no attention_probs_dropout_prob
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "add_cross_attention": (False, None),
    "pruned_heads": ({}, None),
}
# Names in checkpoints of NVIDIA DeepLearningExamples (modeling.py, LinearActivation), and transformers' names.
SPELLINGS = ((r"\.dense_act\.", ".dense."),)
BARE_PREFIXES = ("embeddings.", "embeddings_project.", "encoder.", "pooler.")
OUT_MODULES = {"sequence": "classifier", "tokens": "classifier", "spans": "qa_outputs"}


def embedding_modules(prefix: str) -> dict[str, str]:
    """Return the embedding modules of BERT and its relatives: our module -> the family's."""
    return {
        "embeddings.word": f"{prefix}.embeddings.word_embeddings",
        "embeddings.position": f"{prefix}.embeddings.position_embeddings",
        "embeddings.token_type": f"{prefix}.embeddings.token_type_embeddings",
        "embeddings.norm": f"{prefix}.embeddings.LayerNorm",
    }


def read_tying(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read whether the decoder is tied to the word embeddings, which is the default."""
    return {"tied_decoder": config.get("tie_word_embeddings") is not False}


def write_tying(model: ModelConfig, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of config.json: `position_embedding_type` and, for an untied decoder, `tie_word_embeddings`."""
    positions = {"position_embedding_type": "absolute"}
    return positions if model.tied_decoder else {**positions, "tie_word_embeddings": False}


LAYOUT = Layout(
    family="bert",
    class_prefix="Bert",
    layer="encoder.layer",
    layer_modules=LAYER_MODULES,
    other_modules={
        **embedding_modules("bert"),
        "heads.mlm_transform": "cls.predictions.transform.dense",
        "heads.mlm_norm": "cls.predictions.transform.LayerNorm",
        "heads.mlm": "cls.predictions",
        "heads.decoder": "cls.predictions.decoder",
        "heads.nsp": "cls.seq_relationship",
        "heads.pooler": "bert.pooler.dense",  # first layer of the next-sentence head
        "head.dense": "bert.pooler.dense",  # first layer of a task's head
    },
    decoder="cls.predictions.decoder",
    out_modules=OUT_MODULES,
    config_keys=CONFIG_KEYS,
    task_head=sequence_head("tanh"),
    bare_prefixes=BARE_PREFIXES,
    spellings=SPELLINGS,
    defaults=DEFAULTS,
    supported=SUPPORTED,
    read=read_tying,
    write=write_tying,
    default_token_types=2,
    next_sentence=True,
)

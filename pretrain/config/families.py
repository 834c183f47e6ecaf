"""Definitions of `model.family`: the parts of the block and the published sizes. Does not import torch."""

from typing import Any, NamedTuple


class PublishedSize(NamedTuple):
    """The dimensions of a model of published size."""

    layers: int
    hidden: int
    heads: int
    intermediate: int


def _bert_size(layers: int, hidden: int, heads: int) -> PublishedSize:
    return PublishedSize(layers, hidden, heads, 4 * hidden)


# google-research/bert README.md (the 24 smaller models) and Devlin et al. section 3.
_BERT_SIZES = {
    "mini": _bert_size(4, 256, 4),
    "small": _bert_size(4, 512, 8),
    "medium": _bert_size(8, 512, 8),
    "base": _bert_size(12, 768, 12),
    "large": _bert_size(24, 1024, 16),
}
# Warner et al. 2024, arXiv:2412.13663, table 4 (base, large); Weller et al. 2025, Ettin, table 1. Mini, small and
# medium are not published: they have BERT's layers, hidden and heads, and an intermediate of 1.5 x hidden.
_MODERNBERT_SIZES = {
    "mini": PublishedSize(4, 256, 4, 384),
    "small": PublishedSize(4, 512, 8, 768),
    "medium": PublishedSize(8, 512, 8, 768),
    "base": PublishedSize(22, 768, 12, 1152),
    "large": PublishedSize(28, 1024, 16, 2624),
    "ettin-17m": PublishedSize(7, 256, 4, 384),
    "ettin-32m": PublishedSize(10, 384, 6, 576),
    "ettin-68m": PublishedSize(19, 512, 8, 768),
    "ettin-150m": PublishedSize(22, 768, 12, 1152),
    "ettin-400m": PublishedSize(28, 1024, 16, 2624),
    "ettin-1b": PublishedSize(28, 1792, 28, 3840),
}
# He et al. 2021, arXiv:2111.09543, section 5, and the models' config.json. Mini is not published; it has BERT's size.
_DEBERTA_SIZES = {
    "mini": _bert_size(4, 256, 4),
    "xsmall": _bert_size(12, 384, 6),
    "small": _bert_size(6, 768, 12),
    "base": _bert_size(12, 768, 12),
    "large": _bert_size(24, 1024, 16),
}
SIZES: dict[str, dict[str, PublishedSize]] = {
    "bert": _BERT_SIZES,
    "roberta": _BERT_SIZES,
    "modernbert": _MODERNBERT_SIZES,
    "eurobert": {},
    "nomic_bert": {},
    "gte": {},
    "deberta": _DEBERTA_SIZES,
}

# The families' names in prose, as in their papers.
FAMILY_TITLES = {
    "bert": "BERT",
    "roberta": "RoBERTa",
    "modernbert": "ModernBERT",
    "eurobert": "EuroBERT",
    "nomic_bert": "Nomic BERT",
    "gte": "GTE",
    "deberta": "DeBERTa",
}

# Settings of families that differ from BERT's (the defaults of `ModelConfig`); sources: transformers and the Hub.
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "bert": {},
    # FacebookAI/roberta-base and xlm-roberta-base, config.json.
    "roberta": {"layer_norm_eps": 1e-5},
    # transformers models/modernbert/configuration_modernbert.py; dropout as in ModernBERT's training recipe.
    "modernbert": {
        "norm": "layer_norm_no_bias",
        "layer_norm_eps": 1e-5,
        "norm_placement": "pre",
        "positions": "rotary",
        "rotary_base": 160_000.0,
        "local_rotary_base": 10_000.0,
        "local_attention": 128,
        "global_every": 3,
        "max_positions": 8192,
        "token_types": False,
        "gated": True,
        "attention_bias": False,
        "ffn_in_bias": False,
        "ffn_out_bias": False,
        "mlm_transform_bias": False,
        "hidden_dropout": 0.0,
    },
    # models/eurobert/configuration_eurobert.py and modeling_eurobert.py.
    "eurobert": {
        "norm": "rms_norm",
        "layer_norm_eps": 1e-5,
        "norm_placement": "pre",
        "embedding_norm": False,
        "positions": "rotary",
        "rotary_base": 250_000.0,
        "max_positions": 8192,
        "token_types": False,
        "activation": "silu",
        "gated": True,
        "attention_bias": False,
        "ffn_in_bias": False,
        "ffn_out_bias": False,
        "mlm_transform": False,
        "decoder_bias": False,
        "tied_decoder": False,
        "hidden_dropout": 0.0,
    },
    # models/nomic_bert/configuration_nomic_bert.py and modeling_nomic_bert.py.
    "nomic_bert": {
        "positions": "rotary",
        "rotary_base": 1_000.0,
        "max_positions": 2048,
        "activation": "silu",
        "gated": True,
        "attention_bias": False,
        "ffn_in_bias": False,
        "ffn_out_bias": False,
        "hidden_dropout": 0.0,
    },
    # models/gte/configuration_gte.py and modeling_gte.py.
    "gte": {
        "positions": "rotary",
        "rotary_base": 160_000.0,
        "max_positions": 8192,
        "gated": True,
        "ffn_in_bias": False,
    },
    # microsoft/deberta-v3-base config.json.
    "deberta": {
        "layer_norm_eps": 1e-7,
        "positions": "disentangled",
        "relative_buckets": 256,
        "relative_max_distance": 512,
        "relative_norm": True,
        "token_types": False,
    },
}

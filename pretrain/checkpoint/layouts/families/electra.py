"""ELECTRA, as in transformers 5.23 (models/electra/modeling_electra.py and configuration_electra.py).

The generator's masked-language-modeling head is read and written as `heads.mlm_*`. The discriminator's
head (`heads.rtd_*`) is only written; on reading, the mapping lists it as left out.
"""

from pretrain.checkpoint.layouts.families import bert
from pretrain.checkpoint.layouts.layout import Layout
from pretrain.checkpoint.layouts.task_heads import sequence_head

LAYOUT = Layout(
    family="electra",
    class_prefix="Electra",
    layer="encoder.layer",
    layer_modules=bert.LAYER_MODULES,
    other_modules={
        **bert.embedding_modules("electra"),
        "embeddings.project": "electra.embeddings_project",
        "heads.mlm_transform": "generator_predictions.dense",
        "heads.mlm_norm": "generator_predictions.LayerNorm",
        "heads.mlm": "generator_lm_head",
        "heads.decoder": "generator_lm_head",
        "heads.rtd_dense": "discriminator_predictions.dense",
        "heads.rtd_out": "discriminator_predictions.dense_prediction",
        "head.dense": "classifier.dense",
    },
    decoder="generator_lm_head",
    out_modules={**bert.OUT_MODULES, "sequence": "classifier.out_proj"},
    config_keys={**bert.CONFIG_KEYS, "embedding": "embedding_size"},
    task_head=sequence_head("gelu", input_dropout=True),
    bare_prefixes=bert.BARE_PREFIXES,
    spellings=bert.SPELLINGS,
    unused={"discriminator_predictions.": "the head that detects replaced tokens"},
    defaults=bert.DEFAULTS,
    supported=bert.SUPPORTED,
    read=bert.read_tying,
    write=bert.write_tying,
    mlm_activation="gelu",
    default_token_types=2,
)

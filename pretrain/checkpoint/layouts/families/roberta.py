"""RoBERTa, XLM-R and CamemBERT, which share a layout, as in transformers 5.23 (models/roberta/modeling_roberta.py)."""

from pretrain.checkpoint.layouts.families import bert
from pretrain.checkpoint.layouts.layout import Layout
from pretrain.checkpoint.layouts.task_heads import sequence_head

LAYOUT = Layout(
    family="roberta",
    class_prefix="Roberta",
    layer="encoder.layer",
    layer_modules=bert.LAYER_MODULES,
    other_modules={
        **bert.embedding_modules("roberta"),
        "heads.mlm_transform": "lm_head.dense",
        "heads.mlm_norm": "lm_head.layer_norm",
        "heads.mlm": "lm_head",
        "heads.decoder": "lm_head.decoder",
        "head.dense": "classifier.dense",
    },
    decoder="lm_head.decoder",
    out_modules={**bert.OUT_MODULES, "sequence": "classifier.out_proj"},
    config_keys=bert.CONFIG_KEYS,
    task_head=sequence_head("tanh", input_dropout=True),
    bare_prefixes=bert.BARE_PREFIXES,
    spellings=bert.SPELLINGS,
    unused={"roberta.pooler.": "a pooler, which RoBERTa's heads do not use"},
    defaults=bert.DEFAULTS,
    supported=bert.SUPPORTED,
    read=bert.read_tying,
    write=bert.write_tying,
    mlm_activation="gelu",
    default_token_types=2,
    padded_positions=True,
    special_ids={"bos_token_id": "cls", "eos_token_id": "sep"},
    # models/xlm_roberta/modular_xlm_roberta.py, models/camembert/modular_camembert.py
    variants={"xlm-roberta": "XLMRoberta", "camembert": "Camembert"},
)

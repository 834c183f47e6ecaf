"""The layouts of released models: the names of our parameters in each family's files, and its config.json.

A model that no family's layout can represent is written in ours, `families/bertrain.py`.

A family is one module of `families` with a `LAYOUT`: a new family is a new file.
"""

from pretrain.checkpoint.layouts.facts import (
    BERT,
    LAYOUTS,
    OWN,
    ReleasedFacts,
    brings_code,
    layout_of,
    read_config,
    refuse_foreign,
    task_head,
    why_own,
    write_config,
)
from pretrain.checkpoint.layouts.layout import KeyMapping, StackedName, encoder_shapes
from pretrain.checkpoint.layouts.task_heads import HeadDropout, TaskHead

__all__ = [
    "BERT",
    "LAYOUTS",
    "OWN",
    "HeadDropout",
    "KeyMapping",
    "ReleasedFacts",
    "StackedName",
    "TaskHead",
    "brings_code",
    "encoder_shapes",
    "layout_of",
    "read_config",
    "refuse_foreign",
    "task_head",
    "why_own",
    "write_config",
]

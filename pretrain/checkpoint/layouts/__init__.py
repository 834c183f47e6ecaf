"""The layouts of released models: the names that each family's files give to our parameters, and its config.json.

A model that no family's layout can hold is written in our own, `families/bertrain.py`.

A family is one module of `families` with a `LAYOUT`: adding one is adding a file.
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

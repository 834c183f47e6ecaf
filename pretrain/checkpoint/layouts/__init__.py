"""The layouts of released models: the names that each family's files give to our parameters, and its config.json.

A family is one module of `families` with a `LAYOUT`: adding one is adding a file.
"""

from pretrain.checkpoint.layouts.facts import (
    BERT,
    LAYOUTS,
    ReleasedFacts,
    layout_of,
    read_config,
    refuse_foreign,
    task_head,
    write_config,
)
from pretrain.checkpoint.layouts.layout import KeyMapping, StackedName, encoder_shapes
from pretrain.checkpoint.layouts.task_heads import HeadDropout, TaskHead

__all__ = [
    "BERT",
    "LAYOUTS",
    "HeadDropout",
    "KeyMapping",
    "ReleasedFacts",
    "StackedName",
    "TaskHead",
    "encoder_shapes",
    "layout_of",
    "read_config",
    "refuse_foreign",
    "task_head",
    "write_config",
]

"""The layouts of released models: the names of our parameters in each family's files, and its config.json.

Each module of `families` defines the `LAYOUT` of one family; to support another family, add a module. A model that no
family's layout can represent is written in our own layout, `families/bertrain.py`.
"""

from pretrain.checkpoint.layouts.facts import (
    BERT,
    BERTRAIN,
    LAYOUTS,
    Architecture,
    check_supported,
    layout_of,
    needs_custom_code,
    read_config,
    task_head,
    unsupported_parts,
    write_config,
)
from pretrain.checkpoint.layouts.layout import Layout, StackedName, encoder_shapes
from pretrain.checkpoint.layouts.task_heads import HeadDropout, TaskHead

__all__ = [
    "BERT",
    "BERTRAIN",
    "LAYOUTS",
    "Architecture",
    "HeadDropout",
    "Layout",
    "StackedName",
    "TaskHead",
    "check_supported",
    "encoder_shapes",
    "layout_of",
    "needs_custom_code",
    "read_config",
    "task_head",
    "unsupported_parts",
    "write_config",
]

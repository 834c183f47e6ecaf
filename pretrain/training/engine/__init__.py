"""The engine: the only code that uses DeepSpeed."""

from pretrain.training.engine.deepspeed_config import deepspeed_config
from pretrain.training.engine.deepspeed_patches import import_deepspeed
from pretrain.training.engine.engine import Engine, ProgressWatch, StepResult
from pretrain.training.engine.pass_graphs import WARMUP_PASSES
from pretrain.training.engine.state_layouts import Fragment, InitialWeights
from pretrain.training.engine.workers import RankGroup, broadcast_object, end_process_group, gather_objects

__all__ = [
    "WARMUP_PASSES",
    "Engine",
    "Fragment",
    "InitialWeights",
    "ProgressWatch",
    "RankGroup",
    "StepResult",
    "broadcast_object",
    "deepspeed_config",
    "end_process_group",
    "gather_objects",
    "import_deepspeed",
]

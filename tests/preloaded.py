"""What the workers of `tests.distributed` are forked with: importing it costs more than most tests."""

import finetune.training.train  # noqa: F401
import pretrain.run.train  # noqa: F401
from pretrain.training.engine.deepspeed_patches import import_deepspeed

import_deepspeed()

"""Modules that the fork server of `tests.distributed` imports once: importing them takes longer than most tests."""

import finetune.training.train  # noqa: F401
import pretrain.run.train  # noqa: F401
from pretrain.training.engine.deepspeed_patches import import_deepspeed

import_deepspeed()

"""What holds for every test: no network, no one's keys, no cluster but our own."""

from __future__ import annotations

import os

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="offline", MPLBACKEND="agg")
for name in ("WANDB_API_KEY", "RAY_ADDRESS"):
    os.environ.pop(name, None)

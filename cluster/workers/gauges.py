"""Publishes a run's state as Ray metrics, which every node of a cluster serves to Prometheus."""

import time
from collections.abc import Mapping
from typing import Any

GAUGES = {
    "step": "Optimizer steps so far.",
    "loss": "Training loss of the last step.",
    "tokens_per_second": "Tokens per second of all workers since the last record.",
    "data_stall_fraction": "Share of the time since the last record that workers waited for data.",
    "restarts": "How often this command has restarted the workers.",
    "checkpoint_timestamp_seconds": "Unix time of the latest checkpoint since the last start.",
}


class Gauges:
    """A callback that sets the metrics `ray_bertrain_*{run=NAME}` of this process's node."""

    every_rank = True  # hooks run on all ranks that get this callback, not only on rank 0

    def __init__(self, run: str, restarts: int) -> None:
        from ray.util.metrics import Gauge

        self._gauges = {name: Gauge(f"bertrain_{name}", description, ("run",)) for name, description in GAUGES.items()}
        for gauge in self._gauges.values():
            gauge.set_default_tags({"run": run})
        self._gauges["restarts"].set(restarts)

    def step_end(self, record: Mapping[str, Any]) -> None:
        for name, value in {**(record["logged"] or {}), **record}.items():
            if name in GAUGES:
                self._gauges[name].set(value)

    def checkpoint(self, record: Mapping[str, Any]) -> None:
        self._gauges["checkpoint_timestamp_seconds"].set(time.time())

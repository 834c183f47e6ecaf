"""Requests to drivers and workers: immutable, through JSON and back without a change."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from cluster.workers.request import DriverRequest, Launch, LaunchRequest, TrialRequest, TrialsRequest
from pretrain.common.worker import TrainingRequest

FOLDERS = Path("/runs/x"), Path("/home/me"), Path("/tmp/ray"), Path("/tmp/ray/outcome.json")
LAUNCH = Launch("a1b2", *FOLDERS, since=10**18, launcher=4711)
COMMON: dict[str, Any] = {"launch": LAUNCH, "target": "package.module:function", "name": "x"}
COMMON |= {"address": "10.0.0.5:6379", "max_failures": 3, "use_gpu": None}
REQUESTS = (
    LaunchRequest(
        in_ray=True,
        **COMMON,
        training=TrainingRequest({"seed": 1, "phases": [{"steps": 2}]}, False, ({"event": "restart"},)),
        workers=4,
        min_workers=2,
        cpus_per_worker=0,
        wait_for_nodes_seconds=0.5,
    ),
    TrialsRequest(
        **COMMON,
        trials=tuple(TrialRequest(Path("/runs/x", name), TrainingRequest({"seed": 1}, True)) for name in "ab"),
        parallel=0,
        cpus_per_trial=2,
    ),
)


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_survives_json_and_pickling(request_: DriverRequest) -> None:
    assert type(request_).from_json(request_.to_json()) == request_
    assert pickle.loads(pickle.dumps(request_)) == request_


@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("within", [(), ("launch",)])
def test_a_request_with_other_fields_is_refused(request_: DriverRequest, within: tuple[str, ...]) -> None:
    for change in (lambda fields: fields.update(color="red"), lambda fields: fields.popitem()):
        data = json.loads(request_.to_json())
        fields = data
        for name in within:
            fields = fields[name]
        change(fields)
        with pytest.raises(ValueError, match="unknown or missing fields: "):
            type(request_).from_json(json.dumps(data))


def test_a_config_that_json_cannot_represent_is_refused() -> None:
    request = dataclasses.replace(REQUESTS[0], training=TrainingRequest({"folder": Path("/runs")}, False))
    with pytest.raises(TypeError, match="not JSON serializable"):
        request.to_json()

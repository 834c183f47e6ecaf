"""The job that checks a cluster from within: one task on each node, then one all-reduce among them.

Ray starts it as `python -m cluster.doctor.driver`; `cluster.doctor.remote` submits it and reads its output.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cluster.doctor import machine, reduce, storage
from cluster.doctor.rows import FAIL, Finding
from cluster.workers.driver import join_ray, set_token_variables
from cluster.workers.launch import environment
from cluster.workers.outcomes import one_line
from pretrain.common.commands import run_for_exit_code

FINDINGS_PREFIX = "doctor: "  # start of the line with the findings as JSON

# Names of the findings (versions) that must be equal on all nodes.
_VERSIONS = ("Python", "torch", "CUDA", "NCCL", "gloo", "DeepSpeed", "Ray", "bertrain")

_CHECK_SECONDS = 100.0  # time limit of all checks on a node: import torch, compile a test program, measure
_REDUCE_SECONDS = 80.0  # time limit of the all-reduce


def main() -> int:
    """Check the cluster that this job runs on. Returns 0 even if findings are bad, unless the checks cannot run."""
    metadata = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]
    return run_for_exit_code(lambda: _check(metadata["measures"], Path(metadata["folder"])))


def _check(measurement_module: str, folder: Path) -> None:
    os.environ.update(environment())  # the workers' environment, with this project in PYTHONPATH
    address = os.environ["RAY_ADDRESS"]
    set_token_variables(address)
    join_ray(address, lambda error: print(f"error: {error}", flush=True))
    import ray

    head_id = ray.get_runtime_context().get_node_id()
    alive_nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != head_id)
    rows: list[Finding] = []
    with storage.hold_lock(folder) as (lock_name, failure):
        rows += [replace(failure, where="head")] if failure else []
        arguments = [(measurement_module, folder, lock_name, *_cpus_and_gpus(node)) for node in alive_nodes]
        outcomes = _run_on_nodes(alive_nodes, machine.check_node, arguments, _CHECK_SECONDS)
    for node, outcome in zip(alive_nodes, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            advice = "Check that machine and its ports. All nodes need the same .venv and the same files."
            outcome = [Finding("node", one_line(outcome), FAIL, advice)]
        rows += [replace(row, where=_node_name(node, alive_nodes)) for row in outcome]
    responding = [node for node, outcome in zip(alive_nodes, outcomes, strict=True) if isinstance(outcome, list)]
    order = list(dict.fromkeys(row.what for row in rows))
    rows = sorted(compare_versions(rows), key=lambda row: order.index(row.what))
    rows.append(_measure_all_reduce(responding, alive_nodes[0]["NodeManagerAddress"]))
    print(FINDINGS_PREFIX + json.dumps([asdict(row) for row in rows]), flush=True)
    ray.shutdown()


def _run_on_nodes(
    nodes: Sequence[dict[str, Any]], function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], timeout: float
) -> list[Any]:
    """Call `function` on each node with that node's arguments. Return the result or the exception of each call."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(function)
    calls = [
        task.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(*values)
        for node, values in zip(nodes, arguments, strict=True)
    ]
    ready, _ = ray.wait(calls, num_returns=len(calls), timeout=timeout)
    outcomes = []
    for call in calls:
        try:
            outcomes.append(ray.get(call) if call in ready else TimeoutError(f"no answer within {timeout:.0f} s"))
        except Exception as error:
            outcomes.append(getattr(error, "cause", None) or error)  # without Ray's traceback around it
    return outcomes


def _cpus_and_gpus(node: dict[str, Any]) -> tuple[int, int]:
    """Return how many CPUs and GPUs Ray uses on a node."""
    cpus, gpus = (int(node["Resources"].get(kind, 0)) for kind in ("CPU", "GPU"))
    return cpus, gpus


def _node_name(node: dict[str, Any], alive_nodes: Sequence[dict[str, Any]]) -> str:
    address = node["NodeManagerAddress"]
    is_unique = [each["NodeManagerAddress"] for each in alive_nodes].count(address) == 1
    return address if is_unique else f"{address} {node['NodeID'][:4]}"


def compare_versions(rows: Sequence[Finding]) -> list[Finding]:
    """Return the rows; the row of a version that differs from the first node's becomes a failure."""
    first_rows: dict[str, Finding] = {}
    compared = []
    for row in rows:
        expected = first_rows.setdefault(row.what, row)
        if row.what in _VERSIONS and row.found != expected.found:
            advice = "Install the same .venv and files on all nodes, with the versions of requirements.lock."
            row = replace(row, found=f"{row.found}; {expected.where} has {expected.found}", mark=FAIL, advice=advice)
        compared.append(row)
    return compared


def _measure_all_reduce(nodes: Sequence[dict[str, Any]], host: str) -> Finding:
    """Time an all-reduce among the nodes that can run workers, with NCCL if any of them has GPUs."""
    with_gpus = [node for node in nodes if _cpus_and_gpus(node)[1]]
    members = with_gpus or [node for node in nodes if _cpus_and_gpus(node)[0]]
    if len(members) < 2:
        return Finding("all-reduce", f"not measured: {len(members)} node runs workers, so nodes exchange nothing")
    backend, store = "nccl" if with_gpus else "gloo", reduce.serve_store(host)
    arguments = [
        (backend, node["NodeManagerAddress"], host, store.port, rank, len(members)) for rank, node in enumerate(members)
    ]
    return reduce.judge(backend, _run_on_nodes(members, reduce.time_all_reduce, arguments, _REDUCE_SECONDS), "nodes")


if __name__ == "__main__":
    sys.exit(main())

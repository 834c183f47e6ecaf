"""The job that checks a cluster from within: a process on each node runs one check after the other, all at once.

Ray starts it as `python -m cluster.doctor.driver`; `cluster.doctor.remote` submits it and reads what it prints.
"""

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from cluster.doctor import machine, nodes, reduce, verdicts
from cluster.doctor.rows import FAIL, Finding
from cluster.doctor.task import Probe
from cluster.workers.driver import choose_token, join_ray
from cluster.workers.launch import environment
from cluster.workers.nodes import usable_nodes
from cluster.workers.outcomes import one_line
from pretrain.common.commands import exit_code

MARK = "doctor: "  # before the line of JSON that is the result

_START_SECONDS = 40.0  # for a process on each node, which imports torch
_ANSWER_SECONDS = 20.0
_INSPECT_SECONDS = 60.0
_REDUCE_SECONDS = 60.0


@dataclass(frozen=True)
class CheckedNode:
    """A node that Ray reports as alive."""

    name: str
    id: str
    address: str
    cpus: int
    gpus: int
    draining: bool
    answers: bool

    @property
    def works(self) -> bool:
        """Whether workers can be placed there."""
        return bool(self.cpus or self.gpus)


class ProbeGroup:
    """A `Probe` on each node. A node that does not answer is reported once, in `rows`, and no longer called."""

    def __init__(self, checked: Iterable[CheckedNode], measures: str) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        probe: Any = ray.remote(Probe)
        self.rows: list[Finding] = []
        self.checked = {node.name: node for node in checked}
        self._probes = {
            name: probe.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
            ).remote(node.address, node.cpus, node.works, measures)
            for name, node in self.checked.items()
        }

    def call(
        self,
        method: str,
        each: Callable[[str], tuple[Any, ...]] = lambda name: (),
        *,
        among: Iterable[str] | None = None,
        seconds: float = _ANSWER_SECONDS,
    ) -> dict[str, Any]:
        """What `method` of the nodes' probes returns for the arguments `each(name)`, by name."""
        import ray

        names = list(self.checked if among is None else among)
        calls = {name: getattr(self._probes[name], method).remote(*each(name)) for name in names}
        ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=seconds)
        answers = {}
        for name, reference in calls.items():
            try:
                if reference not in ready:
                    raise TimeoutError(f"no answer within {seconds:.0f} s")
                answers[name] = ray.get(reference)
            except Exception as error:
                advice = "Its other checks were skipped. All nodes need the same .venv and the same files."
                self.rows.append(Finding("answer", f"{method}: {_cause(error)}", FAIL, advice, name))
                self.drop(name)
        return answers

    def drop(self, name: str) -> None:
        """Stop checking this node."""
        import ray

        del self.checked[name]
        ray.kill(self._probes.pop(name))


def main() -> int:
    """Check the cluster that this job runs on; returns 0 for any findings."""
    job = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]
    return exit_code(lambda: _check(job["folder"], job["measures"]))


def _check(folder: str, measures: str) -> None:
    os.environ.update(environment())  # as for workers, which get our path
    address = os.environ["RAY_ADDRESS"]
    choose_token(address)
    join_ray(address, lambda error: print(f"error: {error}", flush=True))
    import ray

    checked, head = _alive_nodes(), machine.versions(machine.measures_of(measures))
    probes = ProbeGroup((node for node in checked if node.answers), measures)
    rows = _about(probes, checked, head)
    rows += _clocks(probes)
    rows += storage(probes, folder)
    rows += _machines(probes, folder)
    rows += _reduce(probes)
    rows += probes.rows
    print(MARK + json.dumps({"rows": [asdict(row) for row in rows], "head": head}), flush=True)
    ray.shutdown()


def _alive_nodes() -> list[CheckedNode]:
    """The alive nodes, the one that this runs on first."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    usable = {node.id: node for node in usable_nodes(_ANSWER_SECONDS)}
    alive = [node for node in ray.nodes() if node["Alive"]]
    addresses = [node["NodeManagerAddress"] for node in alive]
    checked = []
    for node in sorted(alive, key=lambda node: node["NodeID"] != here):
        address, identity = node["NodeManagerAddress"], node["NodeID"]
        name = address if addresses.count(address) == 1 else f"{address} {identity[:4]}"
        cpus, gpus = (int(node["Resources"].get(kind, 0)) for kind in ("CPU", "GPU"))
        known = usable.get(identity)
        draining = known is not None and known.draining
        checked.append(CheckedNode(name, identity, address, cpus, gpus, draining, known is not None))
    return checked


def _about(probes: ProbeGroup, checked: list[CheckedNode], head: dict[str, str]) -> list[Finding]:
    """Nodes, versions, addresses. Nodes whose sources differ from ours are dropped: their answers may differ, too."""
    about = probes.call("about", seconds=_START_SECONDS)
    rows = [
        nodes.judge_node(node.name, node.cpus, node.gpus, about.get(node.name), node.draining, node.answers)
        for node in checked
    ]
    rows += nodes.judge_versions({name: answer["versions"] for name, answer in about.items()}, head)
    addresses = {node.address for node in checked}
    rows += [
        nodes.judge_name(name, probes.checked[name].address, answer["own_name"], answer["interface"], addresses)
        for name, answer in about.items()
    ]
    for name, answer in about.items():
        if answer["versions"]["bertrain"] != head["bertrain"]:
            probes.drop(name)
    return rows


def _clocks(probes: ProbeGroup) -> list[Finding]:
    rows = []
    for name in list(probes.checked):
        with contextlib.suppress(KeyError):  # it stopped answering
            offset, doubt = nodes.clock_offset(lambda name=name: probes.call("clock", among=[name])[name], time.time)
            rows.append(nodes.judge_skew(name, offset, doubt))
    return rows


def storage(probes: ProbeGroup, folder: str) -> list[Finding]:
    """Every node writes a file into the folder; then every node checks that it sees all of them."""
    token = secrets.token_hex(8)
    files = {name: f".doctor-{token}-{number}" for number, name in enumerate(probes.checked)}
    written = probes.call("write_probe", lambda name: (folder, files[name], f"{token} {name}"))
    rows = [nodes.judge_write(name, folder, *outcome) for name, outcome in written.items()]
    good = {files[name]: f"{token} {name}" for name, (_, error) in written.items() if not error}
    seen = probes.call("see_probes", lambda name: (folder, good)) if good else {}
    writers = {file: name for name, file in files.items()}
    good_names = [writers[file] for file in good]
    for name, (seconds, missing) in seen.items():
        others = [writers[file] for file in missing]
        rows.append(nodes.judge_seen(name, folder, seconds, others, len(good)))
    sharing = [name for name, (_, missing) in seen.items() if name in good_names and not missing]
    rows += _locks(probes, folder, f".doctor-{token}.lock", sharing)
    probes.call("remove_probe", lambda name: (folder, files[name]))
    return rows


def _locks(probes: ProbeGroup, folder: str, file: str, names: list[str]) -> list[Finding]:
    """Whether the other nodes, which see its files, also see a lock that the first of these nodes holds."""
    if not names:
        return []
    holder, *others = names
    held = probes.call("hold_lock", lambda name: (folder, file), among=[holder])
    rows = [nodes.judge_lock(holder, folder, holder, outcome) for outcome in held.values() if outcome != nodes.HELD]
    if held and not rows:
        tried = probes.call("try_lock", lambda name: (folder, file), among=others)
        rows = [nodes.judge_lock(name, folder, holder, outcome) for name, outcome in tried.items()]
    probes.call("release_lock", lambda name: (folder, file), among=held)
    return rows


def _machines(probes: ProbeGroup, folder: str) -> list[Finding]:
    """What `doctor` shows for one machine, for each, check by check; measured on all at once, as in training."""
    facts = probes.call("inspect", lambda name: (folder,), seconds=_INSPECT_SECONDS)
    rows = [row for name, of_node in facts.items() for row in verdicts.rows(of_node, name)]
    order = list(dict.fromkeys(row.what for row in rows))
    return [*sorted(rows, key=lambda row: order.index(row.what)), *nodes.judge_pace(facts)]


def _reduce(probes: ProbeGroup) -> list[Finding]:
    """All-reduce among the nodes that run workers: NCCL if any of them has GPUs."""
    with_gpus = [name for name, node in probes.checked.items() if node.gpus]
    names = with_gpus or [name for name, node in probes.checked.items() if node.works]
    backend = "nccl" if with_gpus else "gloo"
    if len(names) < 2:
        return [
            Finding(reduce.WHAT, f"not measured: {len(names)} node runs workers, so there is no traffic between nodes")
        ]
    host = probes.checked[names[0]].address
    port = probes.call("listen", among=names[:1]).get(names[0])
    if port is None:
        return []
    outcomes = probes.call(
        "reduce",
        lambda name: (backend, names.index(name), len(names), host, port),
        among=names,
        seconds=_REDUCE_SECONDS,
    )
    return [nodes.judge_reduce(backend, outcomes, len(names))]


def _cause(error: Exception) -> str:
    """The error of a node, without Ray's traceback around it."""
    cause = getattr(error, "cause", None)
    return one_line(cause if isinstance(cause, BaseException) else error)


if __name__ == "__main__":
    sys.exit(main())

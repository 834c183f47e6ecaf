"""The job that checks a cluster from within: a process on each node, asked one thing after the other, all at once.

Started by Ray as `python -m cluster.doctor.driver`; `cluster.doctor.remote` submits it and reads what it prints.
"""

from __future__ import annotations

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
from pretrain.commands import exit_code

MARK = "doctor: "  # before the line of JSON that is the result

_START_SECONDS = 40.0  # for a process on each node, which imports torch
_ANSWER_SECONDS = 20.0
_LOOK_SECONDS = 60.0
_REDUCE_SECONDS = 60.0


@dataclass(frozen=True)
class Member:
    """A node that lives, by Ray."""

    name: str
    id: str
    address: str
    cpus: int
    gpus: int
    draining: bool
    answers: bool

    @property
    def works(self) -> bool:
        """Whether workers can come there."""
        return bool(self.cpus or self.gpus)


class Team:
    """A `Probe` on each node. Who does not answer is told once, in `rows`, and asked no more."""

    def __init__(self, members: Iterable[Member]) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        probe: Any = ray.remote(Probe)
        self.rows: list[Finding] = []
        self.members = {member.name: member for member in members}
        self._probes = {
            name: probe.options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(member.id, soft=False)
            ).remote(member.address, member.cpus, member.works)
            for name, member in self.members.items()
        }

    def ask(
        self,
        method: str,
        each: Callable[[str], tuple[Any, ...]] = lambda name: (),
        *,
        among: Iterable[str] | None = None,
        seconds: float = _ANSWER_SECONDS,
    ) -> dict[str, Any]:
        """What `method` of the nodes' probes returns for the arguments `each(name)`, by name."""
        import ray

        names = list(self.members if among is None else among)
        asked = {name: getattr(self._probes[name], method).remote(*each(name)) for name in names}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=seconds)
        found = {}
        for name, reference in asked.items():
            try:
                if reference not in ready:
                    raise TimeoutError(f"no answer within {seconds:.0f} s")
                found[name] = ray.get(reference)
            except Exception as error:
                advice = "It was not asked the rest. All nodes need the same .venv and the same files."
                self.rows.append(Finding("answer", f"{method}: {_cause(error)}", FAIL, advice, name))
                self.drop(name)
        return found

    def drop(self, name: str) -> None:
        """Ask this node no more."""
        import ray

        del self.members[name]
        ray.kill(self._probes.pop(name))


def main() -> int:
    """Check the cluster that this job runs on; 0 whatever is found."""
    job = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])["metadata"]
    return exit_code(lambda: _check(job["folder"]))


def _check(folder: str) -> None:
    os.environ.update(environment())  # as for workers, who get our path
    address = os.environ["RAY_ADDRESS"]
    choose_token(address)
    join_ray(address, lambda error: print(f"error: {error}", flush=True))
    import ray

    members, head = _members(), machine.versions()
    team = Team(member for member in members if member.answers)
    rows = _about(team, members, head)
    rows += _clocks(team)
    rows += _storage(team, folder)
    rows += _machines(team, folder)
    rows += _reduce(team)
    rows += team.rows
    print(MARK + json.dumps({"rows": [asdict(row) for row in rows], "head": head}), flush=True)
    ray.shutdown()


def _members() -> list[Member]:
    """The living nodes, the one that this runs on first."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    usable = {node.id: node for node in usable_nodes()}
    living = [node for node in ray.nodes() if node["Alive"]]
    addresses = [node["NodeManagerAddress"] for node in living]
    members = []
    for node in sorted(living, key=lambda node: node["NodeID"] != here):
        address, identity = node["NodeManagerAddress"], node["NodeID"]
        name = address if addresses.count(address) == 1 else f"{address} {identity[:4]}"
        cpus, gpus = (int(node["Resources"].get(kind, 0)) for kind in ("CPU", "GPU"))
        known = usable.get(identity)
        draining = known is not None and known.draining
        members.append(Member(name, identity, address, cpus, gpus, draining, known is not None))
    return members


def _about(team: Team, members: list[Member], head: dict[str, str]) -> list[Finding]:
    """Nodes, versions, addresses. Nodes with other sources than ours are asked no more: they may answer otherwise."""
    about = team.ask("about", seconds=_START_SECONDS)
    rows = [
        nodes.judge_node(member.name, member.cpus, member.gpus, about.get(member.name), member.draining, member.answers)
        for member in members
    ]
    rows += nodes.judge_versions({name: found["versions"] for name, found in about.items()}, head)
    addresses = {member.address for member in members}
    rows += [
        nodes.judge_name(name, team.members[name].address, found["own_name"], found["interface"], addresses)
        for name, found in about.items()
    ]
    for name, found in about.items():
        if found["versions"]["bertrain"] != head["bertrain"]:
            team.drop(name)
    return rows


def _clocks(team: Team) -> list[Finding]:
    rows = []
    for name in list(team.members):
        with contextlib.suppress(KeyError):  # it fell silent
            offset, doubt = nodes.clock_offset(lambda name=name: team.ask("clock", among=[name])[name], time.time)
            rows.append(nodes.judge_skew(name, offset, doubt))
    return rows


def _storage(team: Team, folder: str) -> list[Finding]:
    """Every node writes a file into the folder; when all have, every node looks for all of them."""
    token = secrets.token_hex(8)
    files = {name: f".doctor-{token}-{number}" for number, name in enumerate(team.members)}
    written = team.ask("write_probe", lambda name: (folder, files[name], f"{token} {name}"))
    rows = [nodes.judge_write(name, folder, *outcome) for name, outcome in written.items()]
    good = {files[name]: f"{token} {name}" for name, (_, error) in written.items() if not error}
    seen = team.ask("see_probes", lambda name: (folder, good)) if good else {}
    writers = {file: name for name, file in files.items()}
    good_names = [writers[file] for file in good]
    for name, (seconds, missing) in seen.items():
        others = [writers[file] for file in missing]
        rows.append(nodes.judge_seen(name, folder, seconds, others, len(good)))
    sharing = [name for name, (_, missing) in seen.items() if name in good_names and not missing]
    rows += _locks(team, folder, f".doctor-{token}.lock", sharing)
    team.ask("remove_probe", lambda name: (folder, files[name]))
    return rows


def _locks(team: Team, folder: str, file: str, names: list[str]) -> list[Finding]:
    """Whether a lock that the first of these nodes holds is seen by the others, which see its files."""
    if not names:
        return []
    holder, *others = names
    held = team.ask("hold_lock", lambda name: (folder, file), among=[holder])
    rows = [nodes.judge_lock(holder, folder, holder, what) for what in held.values() if what != nodes.HELD]
    if held and not rows:
        tried = team.ask("try_lock", lambda name: (folder, file), among=others)
        rows = [nodes.judge_lock(name, folder, holder, outcome) for name, outcome in tried.items()]
    team.ask("release_lock", lambda name: (folder, file), among=held)
    return rows


def _machines(team: Team, folder: str) -> list[Finding]:
    """What `doctor` says of one machine, of each, check by check; measured on all at once, as in training."""
    facts = team.ask("look", lambda name: (folder,), seconds=_LOOK_SECONDS)
    rows = [row for name, found in facts.items() for row in verdicts.rows(found, name)]
    order = list(dict.fromkeys(row.what for row in rows))
    return [*sorted(rows, key=lambda row: order.index(row.what)), *nodes.judge_pace(facts)]


def _reduce(team: Team) -> list[Finding]:
    """All-reduce among the nodes that hold workers: NCCL where any of them has GPUs."""
    with_gpus = [name for name, member in team.members.items() if member.gpus]
    names = with_gpus or [name for name, member in team.members.items() if member.works]
    backend = "nccl" if with_gpus else "gloo"
    if len(names) < 2:
        return [Finding(reduce.WHAT, f"not measured: {len(names)} node holds workers, so nothing goes between nodes")]
    host = team.members[names[0]].address
    port = team.ask("listen", among=names[:1]).get(names[0])
    if port is None:
        return []
    outcomes = team.ask(
        "reduce",
        lambda name: (backend, names.index(name), len(names), host, port),
        among=names,
        seconds=_REDUCE_SECONDS,
    )
    return [nodes.judge_reduce(backend, outcomes, len(names))]


def _cause(error: Exception) -> str:
    """What went wrong on a node, without Ray's traceback around it."""
    cause = getattr(error, "cause", None)
    return one_line(cause if isinstance(cause, BaseException) else error)


if __name__ == "__main__":
    sys.exit(main())

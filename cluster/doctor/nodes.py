"""What the nodes of a cluster have told, judged; nothing is asked or measured here."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.doctor import reduce, verdicts
from cluster.doctor.machine import NONE, MachineFacts
from cluster.doctor.rows import FAIL, PASS, WARN, Finding, above, listed, so_many_nodes

_SKEW_WARN_SECONDS, _SKEW_FAIL_SECONDS = 0.5, 5.0
_PROBE_SLOW_SECONDS = 2.0
_SLOW_DEVICE = 0.7  # of the median of its kind: a step takes as long as its slowest worker

_LOCKS = "storage, locks"
# What comes of trying to lock a file: it is held now, another holds it, or the file system has no locks.
HELD, TAKEN, NO_LOCKS = "held", "taken", "no locks"

Versions = Mapping[str, str]


def judge_access(is_open: bool) -> Finding:
    """Whether a cluster asks for a token."""
    if is_open:
        advice = (
            "Whoever reaches it can run code there. Start Ray anew with RAY_AUTH_MODE=token; SECURITY.md says more."
        )
        return Finding("access", "answers without a token", WARN, advice)
    return Finding("access", "asks for a token")


def judge_node(
    name: str, cpus: int, gpus: int, about: Mapping[str, Any] | None, draining: bool, answers: bool
) -> Finding:
    """A living node, by what Ray says it has and by what it says itself (`about`, where it did)."""
    found = f"{cpus} CPU, {gpus} GPU for Ray"
    if not answers:
        advice = "Look at that machine, and whether its ports are let through."
        return Finding("node", f"{found}; its raylet does not answer", FAIL, advice, name)
    if draining:
        return Finding("node", f"{found}; is to leave the cluster", WARN, "Runs will go on without it.", name)
    if about is not None and cpus > about["cores"]:
        advice = f"Start it with --num-cpus={about['cores']}: workers that share a core hold all others up."
        return Finding("node", f"{found}, but {about['cores']} cores", WARN, advice, name)
    if about is not None and gpus != about["gpus"]:
        advice = f"Start it with --num-gpus={about['gpus']}, or see why torch sees another number."
        return Finding("node", f"{found}, but torch sees {about['gpus']} GPUs", FAIL, advice, name)
    return Finding("node", found if cpus or gpus else f"{found}: holds no workers", where=name)


def judge_versions(found: Mapping[str, Versions], head: Versions) -> list[Finding]:
    """A row for each library that is the same everywhere, else one for each node that differs from the head."""
    rows = []
    for library, wanted in head.items():
        different = {
            node: versions.get(library, NONE) for node, versions in found.items() if versions.get(library) != wanted
        }
        if not different:
            [alone] = verdicts.judge_versions({library: wanted})
            rows.append(Finding(alone.what, alone.found, alone.mark, alone.advice, so_many_nodes(len(found))))
        for node, version in different.items():
            advice = "Install the same .venv and files on all nodes, as requirements.lock has them."
            rows.append(Finding(library, f"{version}; the head has {wanted}", FAIL, advice, node))
    return rows


def judge_client(mine: Versions, head: Versions) -> Finding:
    """This machine, which submits, against the head, which reads what was submitted."""
    different = [name for name in ("bertrain", "Ray") if mine[name] != head[name]]
    found = ", ".join(f"{name} {mine[name]}" for name in different or ("bertrain", "Ray"))
    if not different:
        return Finding("client", f"{found}: as the head", where="here")
    there = ", ".join(f"{name} {head[name]}" for name in different)
    advice = "What is submitted may mean something else there, or be refused. Use the same version."
    return Finding("client", f"{found}; the head has {there}", WARN, advice, "here")


def judge_name(node: str, address: str, own_name: str, interface: str, addresses: set[str]) -> Finding:
    """Whether gloo, as training starts it, is reached by other machines; `addresses` are all nodes'."""
    if interface:
        return Finding("gloo's address", f"GLOO_SOCKET_IFNAME={interface}", where=node)
    if own_name == address or len(addresses) == 1:
        return Finding("gloo's address", own_name, where=node)
    advice = (
        "Workers on CPUs would listen where others do not look: start the node with GLOO_SOCKET_IFNAME set to its "
        f"interface, or have its own name mean {address} (/etc/hosts)."
    )
    return Finding("gloo's address", f"{own_name}, but Ray knows it as {address}", WARN, advice, node)


def clock_offset(ask: Callable[[], float], now: Callable[[], float], rounds: int = 5) -> tuple[float, float]:
    """(Seconds that the asked clock is ahead of ours, how far that can be off), by the quickest of several questions."""
    best = (0.0, float("inf"))
    for _ in range(rounds):
        began = now()
        there = ask()
        half = (now() - began) / 2
        if half < best[1]:
            best = there - (began + half), half
    return best


def judge_skew(node: str, offset: float, doubt: float) -> Finding:
    found = f"{offset:+.3f} s of the head's (within {doubt:.3f})"
    advice = "Run a time service there (chrony, systemd-timesyncd): logs and the times in metrics are mixed up."
    mark = above(abs(offset) - doubt, _SKEW_WARN_SECONDS, _SKEW_FAIL_SECONDS)
    if mark == PASS and doubt > _SKEW_WARN_SECONDS:
        return Finding(
            "clock", found, WARN, "The answer took too long to tell; check again when it is less busy.", node
        )
    return Finding("clock", found, mark, advice, node)


def judge_write(node: str, folder: str, seconds: float, error: str) -> Finding:
    """What came of writing a probe file."""
    if error:
        advice = "Let all nodes write and rename there; --dir names another folder that they share."
        return Finding("storage, write", f"{folder}: {error}", FAIL, advice, node)
    mark = WARN if seconds > _PROBE_SLOW_SECONDS else PASS
    advice = "Two files of a few bytes should not take so long: checkpoints will be slow."
    return Finding("storage, write", f"{folder}: written and renamed in {seconds:.2f} s", mark, advice, node)


def judge_seen(node: str, folder: str, seconds: float, missing: Sequence[str], of: int) -> Finding:
    """What a node saw of all nodes' probe files; `missing` are the names of nodes."""
    if missing:
        found = f"{folder}: not seen within {seconds:.0f} s what {listed(missing)} wrote"
        advice = "Mount one network folder at this path on all nodes, or name one with --dir."
        return Finding("storage, shared", found, FAIL, advice, node)
    return Finding("storage, shared", f"{folder}: all {of} nodes' files seen after {seconds:.2f} s", where=node)


def judge_lock(node: str, folder: str, holder: str, outcome: str) -> Finding:
    """What came of it when `node` tried to lock what `holder` held: `TAKEN` is right."""
    if outcome == TAKEN:
        return Finding(_LOCKS, f"{folder}: a lock of {holder} is seen", where=node)
    found = {HELD: f"a lock of {holder} is not seen", NO_LOCKS: "has no locks"}.get(outcome, outcome)
    advice = (
        "Mount it with locks that all nodes share (NFS: without nolock and local_lock; Lustre: -o flock). Until then "
        "nothing refuses a run that is started twice at once, which would damage its folder."
    )
    return Finding(_LOCKS, f"{folder}: {found}", WARN, advice, node)


def judge_reduce(backend: str, outcomes: Mapping[str, tuple[float, int] | str], world: int) -> Finding:
    """All-reduce among nodes: what all of them measured, or what the first of them says that it was not."""
    errors = [f"{node}: {told}" for node, told in outcomes.items() if isinstance(told, str)]
    if len(outcomes) < world:
        errors.append(f"{world - len(outcomes)} did not answer")
    # Who could not begin says why; the others have waited in vain.
    errors.sort(key=lambda error: "timeout" in error.lower() or "timed out" in error.lower())
    outcome = errors[0] if errors else next(iter(outcomes.values()))
    return dataclasses.replace(reduce.judge(backend, world, outcome), where=so_many_nodes(world))


def judge_pace(found: Mapping[str, MachineFacts]) -> list[Finding]:
    """A row for each device that is slower than others of its kind on other nodes."""
    rates: dict[str, list[tuple[str, str, float]]] = {}
    for node, facts in found.items():
        for device in facts.devices:
            rates.setdefault(device.kind, []).append((node, device.name, device.bf16))
    rows = []
    for kind, devices in rates.items():
        middle = statistics.median(rate for *_, rate in devices)
        for node, name, rate in devices:
            if rate < _SLOW_DEVICE * middle:
                advice = "All workers wait for the slowest: see what else runs there, its clock rate and temperature."
                text = f"{name}: {rate / middle:.0%} of the median of {len(devices)} ({kind})"
                rows.append(Finding("pace", text, WARN, advice, node))
    return rows or [Finding("pace", "no device is much slower than its kind", where=so_many_nodes(len(found)))]

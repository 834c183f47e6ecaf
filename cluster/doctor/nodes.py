"""Judges what the nodes of a cluster reported; nothing is requested or measured here."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.doctor import reduce, verdicts
from cluster.doctor.machine import NONE, MachineFacts
from cluster.doctor.rows import FAIL, PASS, WARN, Finding, above, listed, nodes_in_words
from pretrain.common.wording import counted

_SKEW_WARN_SECONDS, _SKEW_FAIL_SECONDS = 0.5, 5.0
_PROBE_SLOW_SECONDS = 2.0
_SLOW_DEVICE = 0.7  # of the median of its kind: a step takes as long as its slowest worker

_LOCKS = "storage, locks"
# Outcomes of trying to lock a file: it is locked now, another process holds the lock, or there are no locks.
HELD, TAKEN, NO_LOCKS = "held", "taken", "no locks"

Versions = Mapping[str, str]


def judge_access(is_open: bool) -> Finding:
    """Whether a cluster requires a token."""
    if is_open:
        advice = (
            "Anyone who can connect to it can run code there. Restart Ray with RAY_AUTH_MODE=token; see SECURITY.md."
        )
        return Finding("access", "answers without a token", WARN, advice)
    return Finding("access", "requires a token")


def judge_node(
    name: str, cpus: int, gpus: int, about: Mapping[str, Any] | None, draining: bool, answers: bool
) -> Finding:
    """An alive node, by what Ray knows about it and by what it reports itself (`about`, if it did)."""
    resources = f"{cpus} CPU, {gpus} GPU for Ray"
    if not answers:
        advice = "Check that machine, and whether its ports are open."
        return Finding("node", f"{resources}; its raylet does not answer", FAIL, advice, name)
    if draining:
        return Finding(
            "node", f"{resources}; will leave the cluster soon", WARN, "Runs will continue without it.", name
        )
    if about is not None and cpus > about["cores"]:
        advice = f"Start it with --num-cpus={about['cores']}: workers that share a core slow down all others."
        return Finding("node", f"{resources}, but {counted(about['cores'], 'core')}", WARN, advice, name)
    if about is not None and gpus != about["gpus"]:
        advice = f"Start it with --num-gpus={about['gpus']}, or find out why torch sees another number."
        return Finding("node", f"{resources}, but torch sees {counted(about['gpus'], 'GPU')}", FAIL, advice, name)
    return Finding("node", resources if cpus or gpus else f"{resources}: runs no workers", where=name)


def judge_versions(by_node: Mapping[str, Versions], head: Versions) -> list[Finding]:
    """A row for each library that all nodes have in the same version, else one for each node that differs."""
    rows = []
    for library, wanted in head.items():
        different = {
            node: versions.get(library, NONE) for node, versions in by_node.items() if versions.get(library) != wanted
        }
        if not different:
            [alone] = verdicts.judge_versions({library: wanted})
            rows.append(Finding(alone.what, alone.found, alone.mark, alone.advice, nodes_in_words(len(by_node))))
        for node, version in different.items():
            advice = "Install the same .venv and files on all nodes, with the versions of requirements.lock."
            rows.append(Finding(library, f"{version}; the head has {wanted}", FAIL, advice, node))
    return rows


def judge_client(mine: Versions, head: Versions) -> Finding:
    """This machine, which submits, against the head, which reads what was submitted."""
    different = [name for name in ("bertrain", "Ray") if mine[name] != head[name]]
    here = ", ".join(f"{name} {mine[name]}" for name in different or ("bertrain", "Ray"))
    if not different:
        return Finding("client", f"{here}: as the head", where="here")
    there = ", ".join(f"{name} {head[name]}" for name in different)
    advice = "A submitted config may have another meaning there, or be refused. Use the same version."
    return Finding("client", f"{here}; the head has {there}", WARN, advice, "here")


def judge_name(node: str, address: str, own_name: str, interface: str, addresses: set[str]) -> Finding:
    """Whether other machines reach gloo as training starts it; `addresses` are those of all nodes."""
    if interface:
        return Finding("gloo's address", f"GLOO_SOCKET_IFNAME={interface}", where=node)
    if own_name == address or len(addresses) == 1:
        return Finding("gloo's address", own_name, where=node)
    advice = (
        "Workers on CPUs would listen at an address that others do not use: start the node with GLOO_SOCKET_IFNAME set "
        f"to its interface, or make its host name resolve to {address} (/etc/hosts)."
    )
    return Finding("gloo's address", f"{own_name}, but Ray knows it as {address}", WARN, advice, node)


def clock_offset(read: Callable[[], float], now: Callable[[], float], rounds: int = 5) -> tuple[float, float]:
    """(Seconds that the other clock is ahead of ours, uncertainty in seconds), from the fastest of several requests."""
    best = (0.0, float("inf"))
    for _ in range(rounds):
        began = now()
        there = read()
        half = (now() - began) / 2
        if half < best[1]:
            best = there - (began + half), half
    return best


def judge_skew(node: str, offset: float, uncertainty: float) -> Finding:
    """The row of a node's clock: `offset` from the head's in seconds, known within `uncertainty` seconds."""
    text = f"{offset:+.3f} s from the head's (within {uncertainty:.3f})"
    advice = "Run a time service there (chrony, systemd-timesyncd): otherwise the times in logs and metrics disagree."
    mark = above(abs(offset) - uncertainty, _SKEW_WARN_SECONDS, _SKEW_FAIL_SECONDS)
    if mark == PASS and uncertainty > _SKEW_WARN_SECONDS:
        return Finding(
            "clock", text, WARN, "The answer took too long to compare; check again when it is less busy.", node
        )
    return Finding("clock", text, mark, advice, node)


def judge_write(node: str, folder: str, seconds: float, error: str) -> Finding:
    """The outcome of writing a probe file."""
    if error:
        advice = "Allow all nodes to write and rename there, or give another shared folder with --dir."
        return Finding("storage, write", f"{folder}: {error}", FAIL, advice, node)
    mark = WARN if seconds > _PROBE_SLOW_SECONDS else PASS
    advice = "Two files of a few bytes should be faster: checkpoints will be slow."
    return Finding("storage, write", f"{folder}: written and renamed in {seconds:.2f} s", mark, advice, node)


def judge_seen(node: str, folder: str, seconds: float, missing: Sequence[str], of: int) -> Finding:
    """Which of the nodes' probe files a node saw; `missing` are the names of the other nodes."""
    if missing:
        text = f"{folder}: the files of {listed(missing)} were not seen within {seconds:.0f} s"
        advice = "Mount one network folder at this path on all nodes, or give one with --dir."
        return Finding("storage, shared", text, FAIL, advice, node)
    return Finding("storage, shared", f"{folder}: all {of} nodes' files seen after {seconds:.2f} s", where=node)


def judge_lock(node: str, folder: str, holder: str, outcome: str) -> Finding:
    """The outcome of `node` trying to lock a file that `holder` holds: `TAKEN` is correct."""
    if outcome == TAKEN:
        return Finding(_LOCKS, f"{folder}: a lock of {holder} is seen", where=node)
    text = {HELD: f"a lock of {holder} is not seen", NO_LOCKS: "does not support locks"}.get(outcome, outcome)
    advice = (
        "Mount it with locks that all nodes share (NFS: without nolock and local_lock; Lustre: -o flock). Without them "
        "a second start of a run that is still running is not refused and would damage its folder."
    )
    return Finding(_LOCKS, f"{folder}: {text}", WARN, advice, node)


def judge_reduce(backend: str, outcomes: Mapping[str, tuple[float, int] | str], world: int) -> Finding:
    """All-reduce among nodes: what they measured, or the first error."""
    errors = [f"{node}: {outcome}" for node, outcome in outcomes.items() if isinstance(outcome, str)]
    if len(outcomes) < world:
        errors.append(f"{world - len(outcomes)} did not answer")
    # A node that could not start reports the cause; the others report a timeout.
    errors.sort(key=lambda error: "timeout" in error.lower() or "timed out" in error.lower())
    outcome = errors[0] if errors else next(iter(outcomes.values()))
    return dataclasses.replace(reduce.judge(backend, world, outcome), where=nodes_in_words(world))


def judge_pace(by_node: Mapping[str, MachineFacts]) -> list[Finding]:
    """A row for each device that is slower than others of its kind on other nodes."""
    rates: dict[str, list[tuple[str, str, float]]] = {}
    for node, facts in by_node.items():
        for device in facts.devices:
            rates.setdefault(device.kind, []).append((node, device.name, device.bf16))
    rows = []
    for kind, devices in rates.items():
        middle = statistics.median(rate for *_, rate in devices)
        for node, name, rate in devices:
            if rate < _SLOW_DEVICE * middle:
                advice = "All workers wait for the slowest: check its other programs, clock rate and temperature."
                text = f"{name}: {rate / middle:.0%} of the median of {len(devices)} ({kind})"
                rows.append(Finding("pace", text, WARN, advice, node))
    return rows or [Finding("pace", "no device is much slower than its kind", where=nodes_in_words(len(by_node)))]

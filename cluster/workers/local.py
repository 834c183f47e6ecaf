"""A Ray cluster of several node processes on this machine, to try jobs, failures and elasticity.

It is closed to everybody without its token, uses only this machine, and is stopped by the ids of its own processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cluster.workers.launch import RAY_FOLDER, end_session, environment, interpreter, last_line
from pretrain.common.commands import program
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import disk_errors, write_json
from pretrain.common.wording import counted

_UP_SECONDS = 60.0
_ANSWER_SECONDS = 3.0
_ENDED = "ZX"  # of a process's states in Linux: zombie, dead
_NO_TICKS = -1  # of a process that is gone
_ALIVE = 0  # GcsNodeInfo.GcsNodeState of Ray's protocol
_OBJECT_STORE_BYTES = 100 << 20
# How long a stopped job may take for its last checkpoint before Ray kills it (Ray's default: 3 s).
STOP_SECONDS = 600

# Of every process of the cluster; jobs and workers inherit it.
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
    "RAY_USAGE_STATS_ENABLED": "0",
    "MALLOC_ARENA_MAX": "1",  # as cluster.workers.driver sets it for workers of its own
}


@dataclass(frozen=True)
class NodeProcess:
    """One `ray start --block`, leader of a session of its own."""

    pid: int
    boot: str  # of the machine; with `ticks` it distinguishes the process from a later one of the same id
    ticks: int
    cpus: int

    @classmethod
    def of(cls, pid: int, cpus: int) -> NodeProcess:
        """The process that has this id now."""
        return cls(pid, _boot(), _stat(pid)[1], cpus)

    def is_alive(self) -> bool:
        """Whether the process that was started still runs."""
        state, ticks = _stat(self.pid)
        return self.boot == _boot() and ticks == self.ticks and state not in _ENDED

    def end(self) -> None:
        """Kill its session, which outlives it if it was killed: raylet and workers are children of the process."""
        if self.boot == _boot() and _stat(self.pid)[1] in (self.ticks, _NO_TICKS):
            end_session(self.pid)


@dataclass(frozen=True)
class LocalCluster:
    """What `up` writes for the other commands to find."""

    folder: str  # Ray's session and the token, of mode 0700
    address: str  # host:port of the GCS, for scheduling.address
    dashboard: str  # URL for jobs
    nodes: tuple[NodeProcess, ...]

    @property
    def token_file(self) -> Path:
        """The file of the cluster's token; only its owner can read it."""
        return Path(self.folder) / "token"


def up(nodes: int, cpus_per_node: int, host: str = "") -> LocalCluster:
    """Start a cluster of node processes.

    Args:
        nodes: how many.
        cpus_per_node: 0 divides the machine's cores among them.
        host: this machine's address at which other machines reach its nodes; empty takes the one that Ray detects.

    Raises:
        InputError: a cluster is already running.
        MachineError: it did not start.
    """
    running = find()
    if running is not None:
        raise InputError(
            f"up: a cluster of {counted(len(running.nodes), 'node')} is already running ({running.dashboard}). "
            "Stop it with `down` first."
        )
    down()  # the rest of one whose head has died
    cores = len(os.sched_getaffinity(0))
    cpus = cpus_per_node or max(1, cores // nodes)
    folder = Path(tempfile.mkdtemp(prefix="bertrain-", dir="/tmp"))  # mode 0700; sockets need a short path
    port, dashboard_port = _free_ports(2)
    cluster = LocalCluster(str(folder), "", f"http://127.0.0.1:{dashboard_port}", ())
    try:
        _write_token(cluster.token_file)
        use_token(cluster)  # Ray reads it while it is imported
        host = host or _own_address()
        cluster = replace(cluster, address=f"{host}:{port}")
        write_description(cluster)
        cluster = _with(cluster, start_node(cluster, _head_arguments(folder, port, dashboard_port), cpus, host))
        _await(cluster, lambda: _listens(host, port) and _listens("127.0.0.1", dashboard_port))
        for _ in range(nodes - 1):
            cluster = _with(cluster, start_node(cluster, [f"--address={cluster.address}"], cpus, host))
        _await(cluster, lambda: len(_alive_nodes(cluster)) == nodes)
    except BaseException:
        _end(_read() or cluster)
        raise
    return cluster


def _head_arguments(folder: Path, port: int, dashboard_port: int) -> list[str]:
    return [
        "--head",
        f"--port={port}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard_port}",
        f"--temp-dir={folder}/{RAY_FOLDER}",
        "--include-dashboard=true",
    ]


def join(cpus: int, host: str = "") -> LocalCluster:
    """Add a node process to the cluster that runs here; `cpus` 0 takes as many as its first. `host` as for `up`."""
    cluster = find()
    if cluster is None:
        raise InputError(f"up --join: no cluster is running on this machine. Start one with {program()} up.")
    use_token(cluster)
    before = _alive_nodes(cluster)
    arguments, host = [f"--address={cluster.address}"], host or cluster.address.rpartition(":")[0]
    cluster = _with(cluster, start_node(cluster, arguments, cpus or cluster.nodes[0].cpus, host))
    _await(cluster, lambda: bool(_alive_nodes(cluster) - before), cluster.nodes[-1:])
    return cluster


def down() -> LocalCluster | None:
    """Stop the local cluster's own processes and remove its folder; None if there is no cluster."""
    cluster = _read()
    if cluster is None:
        return None
    _end(cluster)
    return cluster


def _end(cluster: LocalCluster) -> None:
    for node in reversed(cluster.nodes):
        node.end()
    shutil.rmtree(cluster.folder, ignore_errors=True)
    with disk_errors(_state_file()):
        _state_file().unlink(missing_ok=True)


def find() -> LocalCluster | None:
    """The local cluster; None if its head does not run."""
    cluster = _read()
    return cluster if cluster and cluster.nodes and cluster.nodes[0].is_alive() else None


def use_token(cluster: LocalCluster) -> None:
    """Let this process's Ray connect to the local cluster; call it before `ray` is imported."""
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(cluster.token_file))


def _alive_nodes(cluster: LocalCluster) -> set[str]:
    """Ids of the cluster's nodes, as its control store reports them; none before it answers. The token must be set."""
    from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]

    with contextlib.suppress(Exception):
        nodes = GcsClient(address=cluster.address).get_all_node_info(timeout=_ANSWER_SECONDS)
        return {str(number) for number, node in nodes.items() if node.state == _ALIVE}
    return set()


def start_node(cluster: LocalCluster, arguments: list[str], cpus: int, host: str) -> NodeProcess:
    """Start a process of Ray that is one node."""
    folder = Path(cluster.folder)
    python = interpreter(folder)
    with (folder / "nodes.log").open("ab") as log:
        child = subprocess.Popen(
            [
                python,
                "-c",
                "from ray.scripts.scripts import main; main()",
                "start",
                "--block",
                f"--dashboard-agent-listen-port={_free_ports(1)[0]}",  # the default is one port for the whole machine
                "--disable-usage-stats",
                f"--num-cpus={cpus}",
                f"--object-store-memory={_OBJECT_STORE_BYTES}",
                f"--node-ip-address={host}",
                *arguments,
            ],
            env={
                **environment(),
                **_ENVIRONMENT,
                "RAY_AUTH_TOKEN_PATH": str(cluster.token_file),
                # A job's command is `python`, which must be this interpreter.
                "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return NodeProcess.of(child.pid, cpus)


def _boot() -> str:
    """An id of this machine's last boot; empty if it gives none."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _stat(pid: int) -> tuple[str, int]:
    """A process's state, and when it was started, in ticks since the boot: the clock may be set meanwhile."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", _NO_TICKS
    return fields[0], int(fields[19])


def _with(cluster: LocalCluster, node: NodeProcess) -> LocalCluster:
    grown = replace(cluster, nodes=(*cluster.nodes, node))
    try:
        write_description(grown)
    except BaseException:
        node.end()  # nothing else will know of it
        raise
    return grown


def _await(cluster: LocalCluster, ready: Callable[[], bool], nodes: Sequence[NodeProcess] | None = None) -> None:
    """Wait until `ready()`; `MachineError` if one of `nodes`, otherwise of all nodes, dies or a minute has passed."""
    deadline = time.monotonic() + _UP_SECONDS
    log = Path(cluster.folder) / "nodes.log"
    while not ready():
        dead = [node for node in nodes or cluster.nodes if not node.is_alive()]
        if dead or time.monotonic() > deadline:
            why = "exited" if dead else f"did not start within {_UP_SECONDS:.0f} s"
            raise MachineError(
                f"up: a node {why}; last line of its log: {last_line(log)!r}. {program()} doctor checks the machine."
            )
        time.sleep(0.2)


def _listens(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=1).close()
        return True
    return False


def _own_address() -> str:
    """The address that Ray gives its nodes here: it replaces 127.0.0.1 by the host's own."""
    from ray.util import get_node_ip_address

    return get_node_ip_address()


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _write_token(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


def _state_file() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(home) / "bertrain" / "cluster.json"


def write_description(cluster: LocalCluster) -> None:
    """Keep what later commands need to find the cluster."""
    with disk_errors(_state_file()):
        _state_file().parent.mkdir(parents=True, exist_ok=True)
        write_json(_state_file(), asdict(cluster))


def _read() -> LocalCluster | None:
    try:
        values = json.loads(_state_file().read_text(encoding="utf-8"))
        return LocalCluster(**{**values, "nodes": tuple(NodeProcess(**node) for node in values["nodes"])})
    except (OSError, ValueError, TypeError, KeyError):  # the last two of another version
        return None

"""Runs a Ray cluster of several nodes on this machine, for trying out jobs, failures and elasticity.

Only clients with the cluster's token can connect. Its processes stop with `up`, even if `up` is killed.
"""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.workers.launch import RAY_FOLDER, end_session, environment, interpreter, last_line, private_folder
from pretrain.common.commands import program
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import disk_errors, write_json
from pretrain.common.packages import expect
from pretrain.common.wording import counted

# How long a stopped job may take to save its last checkpoint before Ray kills it (Ray's default: 3 s).
STOP_SECONDS = 600
NODE_LOG = "nodes.log"  # log file in the cluster's folder, shared by all nodes of this machine

# Program of a node: runs `ray start`; once `up` has exited, it kills the node's session and removes the folder.
NODE_PROGRAM = """import pathlib, sys
from cluster.workers.driver import exit_with_parent
exit_with_parent(int(sys.argv.pop(1)), pathlib.Path(sys.argv.pop(1)))
from ray.scripts.scripts import main
main()"""


@dataclass(frozen=True)
class LocalCluster:
    """The local cluster that `up` runs, as its state file describes it to the other commands."""

    folder: str  # private folder (mode 0700) with Ray's session and the token
    address: str  # host:port, for scheduling.address
    dashboard: str  # URL of the dashboard, to which jobs are submitted

    @property
    def token_file(self) -> Path:
        """The file of the cluster's token; only its owner can read it."""
        return Path(self.folder) / "token"


def up(nodes: int, cpus_per_node: int) -> None:
    """Run a cluster of `nodes` nodes until Ctrl-C; with `cpus_per_node` 0 they share the machine's cores equally.

    Raises:
        InputError: a cluster is already running.
        MachineError: a node did not start, or the head stopped.
    """
    expect("up", "ray")
    if running := find_cluster():
        raise InputError(f"up: a cluster is already running ({running.dashboard}). Press Ctrl-C in its terminal first.")
    cpus = cpus_per_node or max(1, len(os.sched_getaffinity(0)) // nodes)
    # Cleaned up in reverse order: the processes are killed, then their files are removed.
    with contextlib.suppress(KeyboardInterrupt), private_folder() as folder, contextlib.ExitStack() as cleanup:
        port, dashboard_port = _free_port(), _free_port()
        cluster = LocalCluster(str(folder), f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard_port}")
        cluster.token_file.touch(0o600)
        cluster.token_file.write_text(secrets.token_hex(32))
        with disk_errors(_state_file()):
            write_json(_state_file(), asdict(cluster))
        cleanup.callback(_state_file().unlink, missing_ok=True)
        use_token(cluster)  # Ray reads the token when it is imported
        head_options = ["--head", f"--port={port}", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}"]
        head_options.append(f"--temp-dir={folder}/{RAY_FOLDER}")
        head = start_node(folder, cpus, head_options, cleanup)
        _await_nodes(cluster, 1, [head])
        others = [start_node(folder, cpus, [f"--address={cluster.address}"], cleanup) for _ in range(nodes - 1)]
        _await_nodes(cluster, nodes, [head, *others])
        print(
            f"{counted(nodes, 'node')} with {counted(cpus, 'CPU')} each; jobs at {cluster.dashboard}, workers at "
            f"{cluster.address}\nThe cluster's token is in {cluster.token_file}; only you can read it.\n"
            f"Next, in another terminal: {program()} submit -- pretrain CONFIG. Ctrl-C stops the cluster and its jobs.",
            flush=True,
        )
        head.wait()
        raise _exit_error(cluster)


def find_cluster() -> LocalCluster | None:
    """Return the cluster that `up` runs on this machine; None if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError):  # TypeError: another version wrote the file
        cluster = LocalCluster(**json.loads(_state_file().read_text(encoding="utf-8")))
        if cluster.token_file.exists():
            socket.create_connection(("127.0.0.1", int(cluster.dashboard.rpartition(":")[2])), timeout=1).close()
            return cluster
    return None


def use_token(cluster: LocalCluster) -> None:
    """Let this process's Ray connect to the local cluster; call it before `ray` is imported."""
    os.environ.pop("RAY_AUTH_TOKEN", None)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(cluster.token_file))


def start_node(folder: Path, cpus: int, arguments: list[str], cleanup: contextlib.ExitStack) -> subprocess.Popen[bytes]:
    """Start `ray start` with `arguments` in a new session, which `cleanup` kills; the log is in `folder`."""
    python = interpreter(folder)
    options = ["--block", f"--num-cpus={cpus}", f"--object-store-memory={100 << 20}", *arguments]
    options.append(f"--dashboard-agent-listen-port={_free_port()}")  # the default is one port for the whole machine
    with (folder / NODE_LOG).open("ab") as log:
        process = cleanup.enter_context(
            subprocess.Popen(
                [python, "-c", NODE_PROGRAM, str(os.getpid()), str(folder), "start", *options],
                env={
                    **environment(),
                    "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
                    "RAY_USAGE_STATS_ENABLED": "0",
                    "MALLOC_ARENA_MAX": "1",  # see cluster.workers.driver
                    # The command `bertrain` of jobs must be the one that belongs to this interpreter.
                    "PATH": f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        )
    cleanup.callback(end_session, process.pid)
    return process


def _await_nodes(cluster: LocalCluster, count: int, processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until the cluster lists `count` nodes; `MachineError` if one of `processes` exits."""
    from ray.util.state import list_nodes

    while True:
        with contextlib.suppress(Exception):  # the dashboard does not respond yet
            if len(list_nodes(cluster.dashboard, timeout=3)) == count:
                return
        if any(process.poll() is not None for process in processes):
            raise _exit_error(cluster)
        time.sleep(0.2)


def _exit_error(cluster: LocalCluster) -> MachineError:
    last = last_line(Path(cluster.folder) / NODE_LOG)
    return MachineError(f"up: a node exited; last line of its log: {last!r}. {program()} doctor checks the machine.")


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return probe.getsockname()[1]


def _state_file() -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(home) / "bertrain" / "cluster.json"

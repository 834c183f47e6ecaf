"""Helpers for tests that break a real local cluster: start it, submit runs, find processes, wait, compare losses."""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from cluster.workers.actors import PROCESS_TITLE
from cluster.workers.launch import end_session
from tests.distributed import free_port
from tests.starts import pretraining

ROOT = Path(__file__).parent.parent
_TAIL_BYTES = 1 << 16  # long enough for many records


def settings(corpus: Path, run_dir: Path, *, steps: int = 100, workers: int = 2, **more: Any) -> dict[str, Any]:
    """Return the config of a tiny pretraining with dropout in fp32: logs every step, saves every 25th."""
    changes = {"engine__micro_batch_tokens": 256, "evaluation__every_steps": 10**6, "checkpoint__every_steps": 25}
    values = pretraining(corpus, run_dir, [(32, 12, steps)], name=run_dir.name, **changes)
    values["phases"][0]["decay"] = "constant"
    scheduling = {"workers": workers, "cpus_per_worker": 1, "hang_seconds": 8}
    return {**values, "scheduling": scheduling, **more}


def start(values: dict[str, Any], *, resume: bool = False, **environment: str) -> subprocess.Popen[str]:
    """Start a pretraining without Ray in a separate process."""
    path = Path(values["run_dir"]).parent / f"{values['name']}.yaml"
    path.write_text(yaml.safe_dump(values))
    return subprocess.Popen(
        [sys.executable, "-m", "finetune.cli", "pretrain", str(path), "--no-ray", *(["--resume"] if resume else [])],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class Cluster:
    """A local cluster for one test. Each node is the leader of a process session; the first is the head node."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.nodes: list[int] = []  # process ids of the nodes

    def command(self, *arguments: str, code: int | None = 0, seconds: float = 120) -> str:
        """Run `bertrain ARGUMENTS`; return its output."""
        done = subprocess.run(
            [sys.executable, "-m", "finetune.cli", *arguments],
            cwd=ROOT,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
        )
        assert code is None or done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}"
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "XDG_STATE_HOME": str(self.state), "PYTHONPATH": str(ROOT / "tests")}

    @property
    def described(self) -> dict[str, Any]:
        return json.loads((self.state / "bertrain/cluster.json").read_text())

    def submit(self, values: dict[str, Any], *options: str) -> Path:
        """Submit a pretraining; return its run folder."""
        path = self.state / f"{values['name']}.yaml"
        path.write_text(yaml.safe_dump(values))
        self.command("submit", *options, "--", "pretrain", str(path))
        return Path(values["run_dir"])

    def state_of(self, name: str) -> str:
        return self.command("status", name).partition(": ")[2].split()[0]

    def wait_end(self, name: str, seconds: float = 120) -> str:
        wait_for(lambda: self.state_of(name) not in ("running", "pending", "queued"), seconds)
        return self.state_of(name)

    def processes(self) -> list[psutil.Process]:
        """Return all live processes of the cluster's nodes, including the nodes themselves."""
        found: dict[int, psutil.Process] = {}
        sessions = set(self.nodes)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                above = {process.pid, os.getsid(process.pid), *(one.pid for one in process.parents())}
                if above & sessions and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = process
        return list(found.values())

    def join(self, **environment: str) -> None:
        """Add a node with one CPU by `ray start`, as on another machine."""
        options = [
            "--num-cpus=1",
            f"--dashboard-agent-listen-port={free_port()}",
            f"--address={self.described['address']}",
        ]
        node = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *options],
            env={**psutil.Process(self.nodes[0]).environ(), **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.nodes.append(node.pid)

    def workers(self) -> list[psutil.Process]:
        """Return the training workers, in start order."""
        return self.named(PROCESS_TITLE)

    def named(self, part: str) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if part in " ".join(process.cmdline()):
                    found.append(process)
        return found


@contextlib.contextmanager
def cluster(state: Path, *options: str) -> Iterator[Cluster]:
    """Run `up` with these options, and Ctrl-C at the end; assert that no process is left."""
    state.mkdir(parents=True, exist_ok=True)
    running, command = Cluster(state), [sys.executable, "-m", "finetune.cli", "up", *options]
    started: list[int] = []
    with subprocess.Popen(command, cwd=ROOT, env=running.environment, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        try:
            assert up.stdout.readline().endswith(f"workers at {running.described['address']}\n")
            started = sorted(child.pid for child in psutil.Process(up.pid).children())
            running.nodes += started
            yield running
        finally:
            processes = running.processes()
            for joined in set(running.nodes) - set(started):
                end_session(joined)
            up.send_signal(signal.SIGINT)
            up.communicate(timeout=60)
    psutil.wait_procs(processes, timeout=5)  # drivers see that their launcher is gone
    left = [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not left, f"left behind: {left}"
    assert not (state / "bertrain/cluster.json").exists()


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.1)


def records(run_dir: Path) -> list[dict[str, Any]]:
    """Return all complete records; [] before there is one."""
    with contextlib.suppress(FileNotFoundError):
        lines = (run_dir / "metrics.jsonl").read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]
    return []


def losses(run_dir: Path) -> dict[int, str]:
    """Return the loss of each step in hexadecimal, to compare bits."""
    return {
        one["step"]: float(one["loss"]).hex() for one in records(run_dir) if "event" not in one and "split" not in one
    }


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [one for one in records(run_dir) if one.get("event") == kind]


def last_step(run_dir: Path) -> int:
    """Return the step of the latest training record; 0 before there is one."""
    with contextlib.suppress(FileNotFoundError), (run_dir / "metrics.jsonl").open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        for line in reversed(file.read().split(b"\n")[:-1]):
            with contextlib.suppress(ValueError):  # the first line may be truncated
                record = json.loads(line)
                if "event" not in record and "split" not in record:
                    return record["step"]
    return 0


def wait_for_step(run_dir: Path, step: int, seconds: float = 60) -> None:
    wait_for(lambda: last_step(run_dir) >= step, seconds)


def newest_checkpoint(run_dir: Path) -> int:
    return max((int(path.parent.name[5:]) for path in run_dir.glob("checkpoints/step-*/manifest.json")), default=-1)


def fingerprint(run_dir: Path) -> str:
    """Return a hash of the weights and moments of the latest checkpoint, for any division among ranks."""
    from pretrain.checkpoint.store import CheckpointReader
    from pretrain.common.files import read_manifest

    checkpoint = run_dir / f"checkpoints/step-{newest_checkpoint(run_dir):08d}"
    digest = hashlib.sha256()
    with CheckpointReader(checkpoint) as reader:
        for name, shape in sorted(read_manifest(checkpoint)["shapes"].items()):
            numel = 1
            for size in shape:
                numel *= size
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                digest.update(reader.read(kind, name, 0, numel).numpy().tobytes())
    return digest.hexdigest()


def recovery_seconds(run_dir: Path, began: float) -> float:
    """Wait for the first record of a restarted run; return the seconds since `began` (time.time())."""

    def restarts() -> int:
        return sum(len(events(run_dir, kind)) for kind in ("restart", "hang", "data_stall"))

    before, path = restarts(), run_dir / "metrics.jsonl"
    wait_for(lambda: restarts() > before, 120)  # data may stall for 80 s
    size = path.stat().st_size
    wait_for(lambda: path.stat().st_size > size, 60)
    return time.time() - began


def report(name: str, **figures: object) -> None:
    """Save measurements for docs/reliability.md."""
    path = os.environ.get("BERTRAIN_CHAOS_RESULTS")
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps({"scenario": name, **figures}) + "\n")

"""Jobs on a Ray cluster of two machines, started by `ray start` on each, as users start theirs.

The machines are namespaces of this one, with a switch between them. Needs root and iproute2:
`pytest -m machines tests/jobs/test_machines.py`.
"""

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from cluster.workers.actors import PROCESS_TITLE
from tests.chaos import ROOT, events, last_step, losses, newest_checkpoint, recovery_seconds, settings, wait_for
from tests.corpora import make_corpus

pytestmark = [
    pytest.mark.machines,
    pytest.mark.skipif(not shutil.which("ip") or os.geteuid() != 0, reason="needs root and iproute2"),
]
SCRIPT = Path(__file__).with_name("machines.sh")
STEPS = 1500
HEAD = "10.78.0.1"
METRICS = 9100
OUTSIDE = "--address", f"http://{HEAD}:8265", "--allow-plain-http"


class Machines:
    """m1, the head, and m2, with one CPU each; `folder` is what they share."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "machines"
        (folder / "token").write_text(secrets.token_hex(32))

    def script(self, command: str, *arguments: object, code: int | None = 0, seconds: float = 180) -> str:
        """What a command of machines.sh printed."""
        ours = {name: value for name, value in os.environ.items() if "bertrain-tests" not in value}
        done = subprocess.run(
            ["bash", SCRIPT, command, self.state, *map(str, arguments)],
            env={**ours, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            cwd=self.folder,
        )
        assert code is None or done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}"
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        return {
            "KEEP": " ".join(str(one) for one in (self.folder, ROOT) if one.parts[1] == "tmp"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_JOB_STOP_WAIT_TIME_S": "120",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def ray(self, machine: int) -> None:
        """`ray start` on a machine; it joins the first one."""
        head = ["--head", "--port=6379", "--dashboard-host=0.0.0.0", f"--node-ip-address={HEAD}"]
        place = head if machine == 1 else [f"--address={HEAD}:6379"]
        options = ["--num-cpus=1", "--object-store-memory=100000000", f"--metrics-export-port={METRICS}", "--block"]
        self.script("bg", f"m{machine}", self.folder / f"ray-m{machine}.log", "ray", "start", *place, *options)
        wait_for(lambda: "started" in (self.folder / f"ray-m{machine}.log").read_text(), 90)

    def bertrain(self, *arguments: object, machine: int = 1, code: int | None = 0) -> str:
        command = [sys.executable, "-m", "finetune.cli", *arguments]
        return self.script("on", f"m{machine}", "env", f"--chdir={self.folder}", *command, code=code)

    def submit(self, name: str, *options: str, steps: int = STEPS, every: int = 10**6, **scheduling: int) -> Path:
        """Submit a run of two workers from the head; its folder."""
        values = settings(self.folder / "corpus", self.folder / "runs" / name, steps=steps)
        values["checkpoint"]["every_steps"] = every
        values["scheduling"] |= {"hang_seconds": 60, **scheduling}
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
        self.bertrain("submit", *OUTSIDE, *options, "--", "pretrain", f"{name}.yaml")
        return self.folder / "runs" / name

    def state_of(self, name: str) -> str:
        shown = self.bertrain("status", *OUTSIDE, name, code=None)
        return shown.partition(": ")[2].split()[0] if ": " in shown else shown

    def wait_end(self, name: str, seconds: float = 300) -> str:
        wait_for(lambda: self.state_of(name) not in ("running", "pending", "queued", "waiting"), seconds)
        return self.state_of(name)

    def metrics(self, machine: int) -> dict[str, float]:
        """The run's numbers that a machine serves to Prometheus."""
        url = f"http://10.78.0.{machine}:{METRICS}/metrics"
        code = f"import urllib.request as u; print(u.urlopen('{url}').read().decode())"
        text = self.script("on", "m1", sys.executable, "-c", code, code=None)
        found = re.findall(r"^ray_bertrain_(\w+)\{[^}]*run=\"[\w-]+\"[^}]*\} (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    made = Machines(tmp_path_factory.mktemp("two"))
    make_corpus(made.folder / "corpus", vocabulary_size=300)
    try:
        made.script("up", 2)
        made.ray(1)
        made.ray(2)
        yield made
    finally:
        made.script("down", code=None)


@pytest.fixture(scope="module")
def undisturbed(machines: Machines) -> dict[int, str]:
    """Losses by step, as text, of a run that nothing disturbs."""
    run = machines.submit("undisturbed")
    assert machines.wait_end("undisturbed") == "succeeded"
    return losses(run)


def test_two_machines_and_their_metrics(machines: Machines, undisturbed: dict[int, str]) -> None:
    assert list(undisturbed) == list(range(1, STEPS + 1))
    run = machines.submit("measured", every=50)
    wait_for(lambda: last_step(run) > 200)
    wait_for(lambda: all("checkpoint_timestamp_seconds" in machines.metrics(one) for one in (1, 2)), 60)
    for one in (1, 2):
        found = machines.metrics(one)
        assert set(found) >= {"step", "loss", "tokens_per_second", "data_stall_fraction", "restarts"}
        assert 0 < found["step"] <= STEPS
        assert found["restarts"] == 0
        assert abs(time.time() - found["checkpoint_timestamp_seconds"]) < 300
    assert machines.wait_end("measured") == "succeeded"


def test_a_lost_worker_node_comes_back(machines: Machines, undisturbed: dict[int, str]) -> None:
    run = machines.submit("lost", every=100)
    wait_for(lambda: newest_checkpoint(run) >= 200, 120)
    began = time.time()
    machines.script("kill", "m2")
    time.sleep(5)
    machines.script("boot", "m2")
    machines.ray(2)
    assert machines.wait_end("lost") == "succeeded"
    (event,) = events(run, "restart")
    print(f"next step {event['time'] - began:.1f} s after the loss: {event['message']}")
    assert losses(run) == undisturbed


def test_a_killed_worker_costs_a_few_seconds(machines: Machines, undisturbed: dict[int, str]) -> None:
    run = machines.submit("killed", every=100)
    wait_for(lambda: newest_checkpoint(run) >= 200, 120)
    began = time.time()
    workers = [
        one for one in psutil.process_iter() if one.cmdline()[:1] == [f"{PROCESS_TITLE}.run"] and is_ours(one, machines)
    ]
    workers[-1].kill()
    seconds = recovery_seconds(run, began)
    log = (run / "logs/ray.log").read_text().splitlines()
    print(f"{seconds:.1f} s to the next step:", *log[-6:], sep="\n")
    assert machines.wait_end("killed") == "succeeded"
    assert losses(run) == undisturbed


def test_a_lost_head_takes_the_job_and_the_same_submit_resumes(machines: Machines, undisturbed: dict[int, str]) -> None:
    run = machines.submit("headless", every=100)
    wait_for(lambda: newest_checkpoint(run) >= 200, 120)
    machines.script("kill", "m1")
    shown = machines.bertrain("logs", *OUTSIDE, "headless", machine=2, code=3)
    print(shown)
    assert "No" in shown
    assert shown.count("\n") == 1
    machines.script("boot", "m1")
    machines.ray(1)
    machines.script("kill", "m2")
    machines.script("boot", "m2")
    machines.ray(2)
    machines.submit("headless", every=100)
    assert machines.wait_end("headless") == "succeeded"
    assert losses(run) == undisturbed


def test_a_drained_node_loses_no_step(machines: Machines, undisturbed: dict[int, str]) -> None:
    """Its last step is saved, though checkpoints are further apart than the run; the run needs one worker."""
    run = machines.submit("drained", "--workers", "1-2")
    wait_for(lambda: last_step(run) >= 200, 120)
    nodes = machines.script("on", "m1", "ray", "list", "nodes", "--format=yaml")
    node = next(one["node_id"] for one in yaml.safe_load(nodes[nodes.index("-") :]) if one["node_ip"] != HEAD)
    why = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test", "--deadline-remaining-seconds=600"]
    machines.script("on", "m1", "ray", "drain-node", f"--address={HEAD}:6379", f"--node-id={node}", *why)
    ended = machines.wait_end("drained")
    machines.script("kill", "m2")
    machines.script("boot", "m2")
    machines.ray(2)
    assert ended == "succeeded"
    assert [one["message"] for one in events(run, "resize")] == ["a node is drained"]
    found = losses(run)
    assert list(found) == list(undisturbed)
    numbers, expected = (list(map(float.fromhex, one.values())) for one in (found, undisturbed))
    assert numbers == pytest.approx(expected, abs=1e-5)


def test_a_killed_driver(machines: Machines, undisturbed: dict[int, str]) -> None:
    run = machines.submit("undriven", every=100)
    wait_for(lambda: newest_checkpoint(run) >= 200, 120)
    next(one for one in psutil.process_iter() if is_driver(one, machines)).kill()
    assert machines.wait_end("undriven") == "failed"
    machines.submit("undriven", every=100)
    assert machines.wait_end("undriven") == "succeeded"
    assert losses(run) == undisturbed


def test_a_stop_from_outside_loses_no_step(machines: Machines, undisturbed: dict[int, str]) -> None:
    run = machines.submit("outside")
    wait_for(lambda: last_step(run) >= 200, 120)
    shown = machines.bertrain("stop", *OUTSIDE, "outside", machine=2)
    assert newest_checkpoint(run) == last_step(run)
    assert f"step-{last_step(run):08d}" in shown
    machines.submit("outside")
    assert machines.wait_end("outside") == "succeeded"
    assert losses(run) == undisturbed


def test_two_jobs_wait_for_each_other(machines: Machines, undisturbed: dict[int, str]) -> None:
    first, second = machines.submit("first", steps=1500), machines.submit("second", steps=1500)
    wait_for(lambda: machines.state_of("second") == "queued", 60)
    assert not second.exists()
    assert machines.wait_end("first") == machines.wait_end("second") == "succeeded"
    assert losses(first) == losses(second)


def is_driver(process: psutil.Process, machines: Machines) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()[-1:] == ["job"] and is_ours(process, machines)
    return False


def is_ours(process: psutil.Process, machines: Machines) -> bool:
    name = "RAY_AUTH_TOKEN_PATH"
    return process.environ().get(name) == machines.environment[name]

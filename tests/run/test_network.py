"""Two machines for real, as far as the network goes: namespaces joined by a cable that is pulled and put back."""

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from chaos import ROOT, events, last_step, records, report, settings, wait_for, wait_for_step
from corpora import make_corpus

from cluster.workers.launch import end_session

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(os.getuid() != 0 or not shutil.which("ip"), reason="needs root and iproute2"),
]

NAMES = ("bertrain-a", "bertrain-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@pytest.fixture
def cable() -> Iterator[str]:
    """The first machine's end of a cable between two machines; both are gone at the end."""
    for name in NAMES:
        ip("netns", "add", name)
    try:
        ip("link", "add", "bertrain-va", "type", "veth", "peer", "name", "bertrain-vb")
        for name, end, address in zip(NAMES, ("bertrain-va", "bertrain-vb"), ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield "bertrain-va"
    finally:
        for name in NAMES:
            ip("netns", "del", name)


class Machine:
    """One of the two, whose Ray is started as docs/guides/multi-gpu.md says."""

    def __init__(self, name: str, address: str, token: Path) -> None:
        self.name, self.address, self.nodes = name, address, list[subprocess.Popen[bytes]]()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_JOB_STOP_WAIT_TIME_S": "600"}
        self.environment = {**os.environ, **variables, "PATH": path, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"}

    def ray_start(self, *options: str) -> None:
        words = ["start", "--block", "--disable-usage-stats", "--num-cpus=1", f"--node-ip-address={self.address}"]
        self.nodes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", self.name, "ray", *words, *options],
                env=self.environment,
                start_new_session=True,
            )
        )

    def end(self) -> None:
        for node in self.nodes:
            end_session(node.pid)
            node.wait()

    def jobs(self, command: str, *arguments: str, code: int | None = 0) -> bool:
        words = [sys.executable, "-m", "finetune.cli", command, "--address", "http://127.0.0.1:8265", *arguments]
        done = subprocess.run(
            ["ip", "netns", "exec", self.name, *words],
            cwd=ROOT,
            text=True,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=90,
        )
        assert code in (None, done.returncode), done.stdout
        return done.returncode == 0


def test_a_cable_that_is_pulled_and_put_back(
    cable: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    corpus = make_corpus(tmp_path / "corpus", documents=60, vocabulary_size=300)
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    first, second = (Machine(name, address, token) for name, address in zip(NAMES, ADDRESSES, strict=True))
    values = settings(corpus, tmp_path / "cable", steps=100_000)
    config, run_dir = tmp_path / "cable.yaml", Path(values["run_dir"])
    config.write_text(yaml.safe_dump(values))
    try:
        folder = f"--temp-dir={tmp_path_factory.mktemp('r')}"  # short: unix sockets
        first.ray_start("--head", "--port=6379", "--dashboard-host=127.0.0.1", folder)
        wait_for(lambda: first.jobs("list", code=None), 90)
        second.ray_start(f"--address={ADDRESSES[0]}:6379")
        first.jobs("submit", "--workers", "1-2", "--wait-for-nodes", "--", "pretrain", str(config))
        wait_for_step(run_dir, 60)
        assert len(records(run_dir)[-1]["rank_forward_seconds"]) == 2
        ip("-n", NAMES[0], "link", "set", cable, "down")
        began = time.time()
        wait_for(lambda: events(run_dir, "restart") or events(run_dir, "hang"), 90)
        alone = (events(run_dir, "restart") or events(run_dir, "hang"))[0]["step"]
        wait_for_step(run_dir, alone + 20, 90)
        without = time.time() - began
        assert len(records(run_dir)[-1]["rank_forward_seconds"]) == 1, "it continues with one"
        ip("-n", NAMES[0], "link", "set", cable, "up")
        # Its node was given up and has ended, as a pod would; its supervisor restarts it.
        second.ray_start(f"--address={ADDRESSES[0]}:6379")
        began = time.time()
        wait_for(lambda: events(run_dir, "resize"), 60)
        wait_for_step(run_dir, events(run_dir, "resize")[0]["step"] + 5, 60)
        again = time.time() - began
        assert len(records(run_dir)[-1]["rank_forward_seconds"]) == 2
        assert last_step(run_dir) > alone
        first.jobs("stop", "cable")
    finally:
        second.end()
        first.end()
    report("22 cable pulled", alone=round(without, 1), again=round(again, 1))

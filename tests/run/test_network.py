"""Two machines for real, as far as the network goes: namespaces joined by a cable that is pulled and put back."""

import os
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
    """One of the two."""

    def __init__(self, name: str, state: Path) -> None:
        self.name, self.state = name, state

    def cluster(self, *arguments: str, seconds: float = 90) -> str:
        done = subprocess.run(
            ["ip", "netns", "exec", self.name, sys.executable, "-m", "finetune.cli", *arguments],
            cwd=ROOT,
            text=True,
            env={**os.environ, "XDG_STATE_HOME": str(self.state)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout


def test_a_cable_that_is_pulled_and_put_back(cable: str, tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", documents=60, vocabulary_size=300)
    first, second = (Machine(name, tmp_path / "state") for name in NAMES)
    values = settings(corpus, tmp_path / "cable", steps=100_000)
    config, run_dir = tmp_path / "cable.yaml", Path(values["run_dir"])
    config.write_text(yaml.safe_dump(values))
    try:
        first.cluster("up", "--nodes", "1", "--cpus-per-node", "1", "--host", ADDRESSES[0])
        second.cluster("up", "--join", "--host", ADDRESSES[1])
        first.cluster("submit", "--workers", "1-2", "--", "pretrain", str(config))
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
        second.cluster("up", "--join", "--host", ADDRESSES[1])
        began = time.time()
        wait_for(lambda: events(run_dir, "resize"), 60)
        wait_for_step(run_dir, events(run_dir, "resize")[0]["step"] + 5, 60)
        again = time.time() - began
        assert len(records(run_dir)[-1]["rank_forward_seconds"]) == 2
        assert last_step(run_dir) > alone
        first.cluster("stop", "cable")
    finally:
        first.cluster("down")
    report("22 cable pulled", alone=round(without, 1), again=round(again, 1))

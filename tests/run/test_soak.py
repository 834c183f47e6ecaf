"""A long run with a random fault every minute or two, and beside it the same one undisturbed: -m soak asks for it.

BERTRAIN_SOAK_MINUTES (60) says about how long on 2 cores; below 20 faults come closer together.
"""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from chaos import (
    Cluster,
    cluster,
    events,
    fingerprint,
    last_step,
    losses,
    newest_checkpoint,
    report,
    settings,
    wait_for,
    wait_for_step,
)
from corpora import make_corpus

pytestmark = pytest.mark.soak

MINUTES = float(os.environ.get("BERTRAIN_SOAK_MINUTES", "60"))
STEPS = round(MINUTES * 60 * 18)


def kill_worker(on: Cluster, run_dir: Path, rng: random.Random) -> None:
    rng.choice(on.workers()).kill()


def stop_worker(on: Cluster, run_dir: Path, rng: random.Random) -> None:
    rng.choice(on.workers()).send_signal(signal.SIGSTOP)


def kill_driver(on: Cluster, run_dir: Path, rng: random.Random) -> None:
    on.named("cluster.workers.driver")[0].kill()


def flip_a_bit(on: Cluster, run_dir: Path, rng: random.Random) -> None:
    """In the newest checkpoint, and then make it needed."""
    checkpoint = run_dir / f"checkpoints/step-{newest_checkpoint(run_dir):08d}"
    with contextlib.suppress(FileNotFoundError):  # pruned meanwhile
        path = rng.choice(sorted(checkpoint.glob("*.safetensors")))
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    kill_worker(on, run_dir, rng)


def cut_short(on: Cluster, run_dir: Path, rng: random.Random) -> None:
    checkpoint = run_dir / f"checkpoints/step-{newest_checkpoint(run_dir):08d}"
    with contextlib.suppress(FileNotFoundError):
        path = rng.choice(sorted(checkpoint.glob("*")))
        os.truncate(path, path.stat().st_size // 2)
    kill_worker(on, run_dir, rng)


FAULTS = (kill_worker, stop_worker, kill_driver, flip_a_bit, cut_short)


def test_soak(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus", documents=60, vocabulary_size=300)
    done = Counter[str]()
    size = ("--nodes", "1", "--cpus-per-node", "2")
    with cluster(tmp_path / "calm", *size) as calm, cluster(tmp_path / "stormy", *size) as stormy:
        undisturbed = calm.submit(long_run(corpus, tmp_path / "undisturbed"))
        run_dir = stormy.submit(long_run(corpus, tmp_path / "soak"))
        wait_for_step(run_dir, 100)
        before, began = held(stormy), time.monotonic()
        wait_for_step(undisturbed, STEPS // 20, 600)
        calm_before = memory(calm.workers())
        disturb(stormy, run_dir, done)
        assert stormy.wait_end("soak", 300) == "succeeded"
        after, minutes = held(stormy), (time.monotonic() - began) / 60
        calm_after = memory(calm.workers()) or calm_before  # where it has ended sooner
        assert not list(run_dir.rglob("*.tmp"))
        assert calm.wait_end("undisturbed", MINUTES * 60 + 300) == "succeeded"
    assert losses(run_dir) == losses(undisturbed)
    assert fingerprint(run_dir) == fingerprint(undisturbed)
    assert after["files"] < before["files"] * 1.5 + 50
    assert after["memory"] < before["memory"] * 1.5
    assert calm_after < calm_before * 1.2, "the workers of a run that goes on and on"
    damaged = len(list(run_dir.glob("checkpoints/damaged-*")))
    restarts = {kind: len(events(run_dir, kind)) for kind in ("restart", "hang")}
    report(
        "soak",
        minutes=round(minutes, 1),
        steps=STEPS,
        faults=done,
        damaged=damaged,
        **restarts,
        before=before,
        after=after,
        workers=[calm_before, calm_after],
    )


def long_run(corpus: Path, run_dir: Path) -> dict[str, Any]:
    return settings(corpus, run_dir, steps=STEPS, checkpoint={"every_steps": 50, "keep_last": 3})


def disturb(on: Cluster, run_dir: Path, done: Counter[str]) -> None:
    """One fault after another until the run is at its end."""
    rng = random.Random(1)
    while True:
        until = time.monotonic() + rng.uniform(60, 120) * min(1.0, MINUTES / 20)
        wait_for(lambda until=until: time.monotonic() > until or last_step(run_dir) == STEPS, 200)
        reached = last_step(run_dir)
        if reached == STEPS or not on.workers():
            return
        fault = FAULTS[sum(done.values()) % len(FAULTS)]
        fault(on, run_dir, rng)
        done[fault.__name__] += 1
        if fault is kill_driver:
            assert on.wait_end("soak") == "failed"
            on.submit(yaml.safe_load((on.state / "soak.yaml").read_text()))
        wait_for_step(run_dir, min(STEPS, reached + 1), 300)  # past where it was: what was lost is made good
        time.sleep(1)


def memory(processes: list[psutil.Process]) -> int:
    """Bytes in main memory, of those that still live."""
    found = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found += process.memory_info().rss
    return found


def held(on: Cluster) -> dict[str, int]:
    """Open files and memory of the cluster's own processes (its workers come and go)."""
    files = memory = 0
    for process in on.processes():
        with contextlib.suppress(psutil.Error):
            if "raylet" in process.name() or "gcs_server" in process.name():
                files += process.num_fds()
                memory += process.memory_info().rss
    return {"files": files, "memory": memory}

"""Failures of a real cluster: processes are killed, stopped and drained during a run (table in docs/reliability.md)."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from chaos import (
    Cluster,
    cluster,
    events,
    fingerprint,
    last_step,
    losses,
    newest_checkpoint,
    recovery_seconds,
    report,
    settings,
    start,
    wait_for,
    wait_for_step,
)

from cluster.jobs.client import run_folder
from pretrain.checkpoint import store
from pretrain.reporting.runs import find_folder

pytestmark = pytest.mark.chaos


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("one"), "--nodes", "1", "--cpus-per-node", "2") as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, one_node: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 300 steps that nobody disturbs."""
    run_dir = tmp_path_factory.mktemp("runs") / "undisturbed"
    one_node.submit(settings(corpus, run_dir, steps=300))
    assert one_node.wait_end("undisturbed") == "succeeded"
    return run_dir


def assert_equal(run_dir: Path, undisturbed: Path) -> None:
    """Bitwise the same losses at every step and the same state at the end."""
    assert losses(run_dir) == losses(undisturbed)
    assert fingerprint(run_dir) == fingerprint(undisturbed)


def test_five_killed_workers(corpus: Path, one_node: Cluster, undisturbed: Path, tmp_path: Path) -> None:
    run_dir = one_node.submit(settings(corpus, tmp_path / "killed", steps=300))
    seconds = []
    for number, step in enumerate((40, 90, 140, 190, 240)):
        wait_for_step(run_dir, step)
        victim = one_node.workers()[number % 2]
        began = time.time()
        victim.send_signal(signal.SIGTERM if number == 3 else signal.SIGKILL)
        if number == 3:  # a worker takes SIGTERM as Ray does: it ends
            time.sleep(0.5)
            if victim.is_running():
                victim.kill()
        seconds.append(recovery_seconds(run_dir, began))
    assert one_node.wait_end("killed") == "succeeded"
    assert_equal(run_dir, undisturbed)
    assert len(events(run_dir, "restart")) == 5
    report("1 kill workers", recoveries=[round(one, 1) for one in seconds])


def test_killed_driver_and_resubmission(corpus: Path, one_node: Cluster, undisturbed: Path, tmp_path: Path) -> None:
    values = settings(corpus, tmp_path / "driver", steps=300)
    run_dir = one_node.submit(values)
    wait_for_step(run_dir, 60)
    drivers = one_node.named("cluster.workers.driver")
    assert len(drivers) == 1
    drivers[0].kill()
    assert one_node.wait_end("driver") == "failed"
    wait_for(lambda: not one_node.workers(), 15)
    one_node.submit(values)
    assert one_node.wait_end("driver") == "succeeded"
    assert_equal(run_dir, undisturbed)


def test_lost_head_and_resubmission(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    values = settings(corpus, tmp_path / "head", steps=300)
    with cluster(tmp_path / "state", "--nodes", "1", "--cpus-per-node", "2") as first:
        run_dir = first.submit(values)
        wait_for_step(run_dir, 60)
        kill_all(first.processes())
    began = time.time()
    before = newest_checkpoint(run_dir)
    with cluster(tmp_path / "state", "--nodes", "1", "--cpus-per-node", "2") as second:
        second.submit(values)
        wait_for(lambda: len(losses(run_dir)) and last_step(run_dir) > before + 1, 60)
        seconds = time.time() - began
        assert second.wait_end("head") == "succeeded"
    assert_equal(run_dir, undisturbed)
    report("6 head lost", seconds=round(seconds, 1))


def test_stop_saves_the_current_step(corpus: Path, one_node: Cluster, undisturbed: Path, tmp_path: Path) -> None:
    """A step takes longer than the second within which Ray lets a driver end by a signal, and none was saved before."""
    slow = {"checkpoint": {"every_steps": 10**6}, "callbacks": ["cluster_targets:slow_step"]}
    run_dir = one_node.submit(settings(corpus, tmp_path / "stopped", steps=300, **slow))
    wait_for_step(run_dir, 4)
    began = time.time()
    said = one_node.command("stop", "stopped")
    seconds = time.time() - began
    assert newest_checkpoint(run_dir) == last_step(run_dir) >= 4
    assert said == f"stopped: stopped; checkpoint step-{last_step(run_dir):08d} is saved\n"
    assert events(run_dir, "stop")
    assert one_node.state_of("stopped") == "stopped"
    assert one_node.command("stop", "stopped") == said, "once more changes nothing"
    one_node.submit(settings(corpus, tmp_path / "stopped", steps=300))
    assert one_node.wait_end("stopped") == "succeeded"
    assert_equal(run_dir, undisturbed)
    report("10 stop", seconds=round(seconds, 1))


def test_a_finished_run_submitted_again_changes_nothing(
    one_node: Cluster, corpus: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written(undisturbed)
    began = time.time()
    one_node.submit(settings(corpus, undisturbed, steps=300))
    assert one_node.wait_end("undisturbed") == "succeeded"
    seconds = time.time() - began
    assert written(undisturbed) == before
    monkeypatch.setenv("XDG_STATE_HOME", str(one_node.state))
    assert find_folder("undisturbed", find_job_folder=run_folder) == undisturbed, "a report finds the job's folder"
    report("19 rerun of a finished run", seconds=round(seconds, 1))


def written(run_dir: Path) -> dict[Path, int]:
    """When each file was written; the lock is only held, and each start has its logs."""
    files = [path for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path: path.stat().st_mtime_ns for path in files if "logs" not in path.parts}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_process_is_noticed(
    corpus: Path, one_node: Cluster, undisturbed: Path, tmp_path: Path, rank: int
) -> None:
    run_dir = one_node.submit(settings(corpus, tmp_path / f"hang-{rank}", steps=300))
    wait_for_step(run_dir, 60)
    victim = next(p for p in one_node.workers() if pid_of_rank(run_dir, rank) == p.pid)
    began = time.time()
    victim.send_signal(signal.SIGSTOP)
    seconds = recovery_seconds(run_dir, began)
    hang = json.loads((run_dir / "logs/hang.json").read_text())
    assert hang["rank"] == rank
    assert one_node.wait_end(f"hang-{rank}") == "succeeded"
    assert_equal(run_dir, undisturbed)
    assert "Thread" in (run_dir / f"logs/stacks-{1 - rank}.txt").read_text()
    assert "fit" in (run_dir / f"logs/stacks-{rank}.txt").read_text(), "the stopped process, read from outside"
    assert not victim.is_running() or victim.status() == "zombie"
    report("11 SIGSTOP", rank=rank, noticed=round(hang["time"] - began, 1), recovered=round(seconds, 1))


# A thread in every process of the cluster waits for a file; the first training worker that sees it makes no further
# batch.
_ASLEEP = """
import os, sys, threading, time

def wait():
    while True:
        time.sleep(0.1)
        loader, distributed = (sys.modules.get(name) for name in ("pretrain.batches.loader", "torch.distributed"))
        if loader is None or distributed is None or not distributed.is_initialized():
            continue
        try:
            os.unlink({mark!r})
        except OSError:
            continue
        loader.BatchMaker.make = lambda *_: time.sleep(1e6)
        return

threading.Thread(target=wait, daemon=True).start()
"""


def test_a_loader_that_sleeps_without_end_is_noticed(
    corpus: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "sleep"
    (tmp_path / "path").mkdir()
    (tmp_path / "path/sitecustomize.py").write_text(_ASLEEP.format(mark=str(mark)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"), prepend=os.pathsep)
    with cluster(tmp_path / "state", "--nodes", "1", "--cpus-per-node", "2") as one:
        run_dir = one.submit(settings(corpus, tmp_path / "asleep", steps=300))
        wait_for_step(run_dir, 60)
        began = time.time()
        mark.touch()
        seconds = recovery_seconds(run_dir, began)
        hang = json.loads((run_dir / "logs/hang.json").read_text())
        assert not mark.exists(), "a worker took it"
        assert one.wait_end("asleep") == "succeeded"
    assert_equal(run_dir, undisturbed)
    stacks = [(run_dir / f"logs/stacks-{rank}.txt").read_text() for rank in (0, 1)]
    assert "_produce" in stacks[hang["rank"]]
    report("11 a loader asleep", rank=hang["rank"], noticed=round(hang["time"] - began, 1), recovered=round(seconds, 1))


def kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def pid_of_rank(run_dir: Path, rank: int) -> int:
    starts = [line for line in (run_dir / f"logs/worker-{rank}.log").read_text().splitlines() if ", process " in line]
    return int(starts[-1].split(", process ")[1].split()[0])


def test_a_lost_node_shrinks_the_group_and_its_return_grows_it(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    with cluster(tmp_path / "state", "--nodes", "2", "--cpus-per-node", "1") as two:
        values = settings(corpus, tmp_path / "elastic", steps=1500)
        run_dir = two.submit(values, "--workers", "1-2")
        wait_for_step(run_dir, 60)
        second = two.nodes[1]
        began = time.time()
        kill_all([process for process in two.processes() if os.getsid(process.pid) == second])
        shrunk = recovery_seconds(run_dir, began)
        assert len(two.workers()) == 1
        wait_for_step(run_dir, last_step(run_dir) + 20)
        began, at = time.time(), last_step(run_dir)
        two.join()
        wait_for(lambda: events(run_dir, "resize"), 60)
        resized = events(run_dir, "resize")[0]["step"]
        wait_for_step(run_dir, resized + 5)
        grown = time.time() - began
        assert len(two.workers()) == 2
        assert resized >= at, "nothing is done twice on growth"
        two.command("stop", "elastic")
    expected, found = losses(undisturbed), losses(run_dir)
    for step in range(1, min(300, last_step(run_dir)) + 1):
        assert float.fromhex(found[step]) == pytest.approx(float.fromhex(expected[step]), rel=1e-2), step
    report("7 node lost and back", shrunk=round(shrunk, 1), grown=round(grown, 1))


def test_a_drained_node_is_left_with_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    with cluster(tmp_path / "state", "--nodes", "2", "--cpus-per-node", "1") as two:
        run_dir = two.submit(settings(corpus, tmp_path / "drained", steps=3000), "--workers", "1-2")
        wait_for_step(run_dir, 60)
        began = time.time()
        drain(two, node=1)
        wait_for(lambda: events(run_dir, "resize"), 30)
        event = events(run_dir, "resize")[0]
        seconds = time.time() - began
        assert "drained" in event["message"]
        wait_for_step(run_dir, event["step"] + 5)
        assert len(two.workers()) == 1
        two.command("stop", "drained")
    report("9 drain", seconds=round(seconds, 1))


def drain(on: Cluster, node: int) -> None:
    """Announce that a node is to go, as an autoscaler does after a spot notice."""
    described = on.described
    script = (
        "import sys, time\n"
        "from cluster.workers import local\n"
        "local.use_token(local.find_cluster())\n"
        "import ray\n"
        "from ray._raylet import GcsClient\n"
        "from ray.core.generated import autoscaler_pb2\n"
        "ray.init(address=sys.argv[1], log_to_driver=False)\n"
        "alive = [n for n in ray.nodes() if n['Alive']]\n"
        "nodes = sorted(alive, key=lambda n: 'node:__internal_head__' not in n['Resources'])\n"
        "reason = autoscaler_pb2.DrainNodeReason.Value('DRAIN_NODE_REASON_PREEMPTION')\n"
        "deadline = int((time.time() + 30) * 1000)\n"
        "client, node = GcsClient(address=sys.argv[1]), nodes[int(sys.argv[2])]\n"
        "print(client.drain_node(node['NodeID'], reason, 'spot', deadline))\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, described["address"], str(node)],
        check=True,
        env=on.environment,
        cwd=Path(__file__).parents[2],
        timeout=60,
    )


def test_ten_jobs_run_in_order(corpus: Path, one_node: Cluster, tmp_path: Path) -> None:
    runs = [tmp_path / f"queued-{number}" for number in range(10)]
    for run_dir in runs:
        one_node.submit(settings(corpus, run_dir, steps=5))
    one_node.command("stop", "queued-9", code=130)  # one that waits can be stopped
    assert one_node.state_of("queued-9") == "stopped"
    for run_dir in runs[:9]:
        assert one_node.wait_end(run_dir.name, 300) == "succeeded"
    begins = [(run_dir / "environment.json").stat().st_mtime for run_dir in runs[:9]]
    ended = [(run_dir / "metrics.jsonl").stat().st_mtime for run_dir in runs[:9]]
    assert all(end <= next_begin + 2 for end, next_begin in zip(ended, begins[1:], strict=False))
    assert not (runs[9] / "metrics.jsonl").exists()


CANARIES = {
    "WANDB_API_KEY": "canary" + "0" * 34,
    "AWS_SECRET_ACCESS_KEY": "canary-aws-secret",
    "HF_TOKEN": "hf_canarytoken",
}


def test_no_secret_is_written_and_nobody_gets_in_without_the_token(corpus: Path, tmp_path: Path) -> None:
    import requests

    for name, value in CANARIES.items():
        os.environ[name] = value
    try:
        with cluster(tmp_path / "state", "--nodes", "1", "--cpus-per-node", "2") as one:
            values = settings(corpus, tmp_path / "canary", steps=30, tracking={"wandb": "offline"})
            run_dir = one.submit(values)
            assert one.wait_end("canary") == "succeeded"
            described = one.described
            folder, dashboard = Path(described["folder"]), described["dashboard"]
            token = (folder / "token").read_text()
            assert (folder / "token").stat().st_mode & 0o777 == 0o600
            assert folder.stat().st_mode & 0o777 == 0o700
            jobs = dashboard + "/api/jobs/"
            answers = [
                requests.get(jobs, headers=headers, timeout=10)
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {token}"})
            ]
            assert [answer.status_code for answer in answers] == [401, 403, 200]
            port = int(dashboard.rsplit(":", 1)[1])
            sockets: list[Any] = [one.laddr for one in psutil.net_connections() if one.status == "LISTEN"]
            listening = {place.ip for place in sockets if place.port == port}
            assert listening == {"127.0.0.1"}
            shown = answers[2].text + one.command("logs", "canary") + one.command("status", "canary")
            written = "".join(
                path.read_text(errors="replace")
                for place in (run_dir, folder)
                for path in place.rglob("*")
                if path.is_file() and path.name != "token"
            )
            for secret in (*CANARIES.values(), token):
                assert secret not in shown
                assert secret not in written
    finally:
        for name in CANARIES:
            del os.environ[name]


def test_a_second_submission_and_impossible_resources_are_refused(
    corpus: Path, one_node: Cluster, tmp_path: Path
) -> None:
    values = settings(corpus, tmp_path / "busy", steps=3000)
    run_dir = one_node.submit(values)
    path = str(one_node.state / "busy.yaml")
    began = time.time()
    assert "is " in one_node.command("submit", "--", "pretrain", path, code=2)
    large = ["--set", "name=large", "--set", "phases.0.global_sequences=64"]
    said = one_node.command("submit", "--workers", "64", "--", "pretrain", path, *large, code=3)
    assert "too few for 64 workers" in said
    assert time.time() - began < 15
    wait_for_step(run_dir, 5)
    # Beside the cluster, in the same folder.
    values["scheduling"]["workers"] = 1
    beside = start(values, resume=True)
    said, _ = beside.communicate(timeout=60)
    assert beside.returncode == 2
    assert "another process is training in it" in said
    one_node.command("stop", "busy")
    one_node.command("delete", "busy")
    assert "no such job" in one_node.command("status", "busy", code=2)
    assert run_dir.is_dir()


def test_a_control_store_that_is_away_for_a_while_interrupts_nothing(
    corpus: Path, undisturbed: Path, tmp_path: Path
) -> None:
    with cluster(tmp_path / "state", "--nodes", "1", "--cpus-per-node", "2") as one:
        run_dir = one.submit(settings(corpus, tmp_path / "gcs", steps=1500))
        wait_for_step(run_dir, 60)
        servers = one.named("gcs_server")
        assert len(servers) == 1
        servers[0].send_signal(signal.SIGSTOP)
        longest, before, began = 0.0, last_step(run_dir), time.time()
        while time.time() - began < 10:
            at = time.time()
            wait_for(lambda before=before: last_step(run_dir) > before, 20)
            longest, before = max(longest, time.time() - at), last_step(run_dir)
        servers[0].send_signal(signal.SIGCONT)
        wait_for_step(run_dir, before + 50)
        assert not events(run_dir, "restart")
        one.command("stop", "gcs")
    expected, found = losses(undisturbed), losses(run_dir)
    assert all(found[step] is not None for step in range(1, before))
    assert expected.keys() <= found.keys() or last_step(run_dir) < 300
    report("5 GCS away for 10 s", longest_gap=round(longest, 1))


def test_a_kill_while_a_checkpoint_is_written_costs_that_one_only(corpus: Path, tmp_path: Path) -> None:
    """Ten kills, each as soon as the folder of an unfinished checkpoint is seen, or a little later."""
    values = settings(corpus, tmp_path / "saving", steps=4000, checkpoint={"every_steps": 5, "keep_last": 3})
    values["scheduling"]["workers"] = 1
    run_dir, rng = Path(values["run_dir"]), random.Random(0)
    for number in range(10):
        started = start(values, resume=number > 0)
        first = newest_checkpoint(run_dir)
        wait_for(lambda first=first: newest_checkpoint(run_dir) > first + 10, 60)
        deadline = time.monotonic() + 10
        while not list(run_dir.glob("checkpoints/.step-*.tmp")) and time.monotonic() < deadline:
            pass
        time.sleep(rng.uniform(0, 0.02))
        started.kill()
        said = started.communicate()[0]
        newest = newest_checkpoint(run_dir)
        assert newest > first, said
        found = store.latest(run_dir / "checkpoints")
        assert found is not None
        assert found.name == f"step-{newest:08d}", "what has its name is whole"
    assert losses(run_dir).keys() >= set(range(1, newest))
    report("3 kill during save", trials=10)

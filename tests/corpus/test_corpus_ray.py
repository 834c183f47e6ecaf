"""`prepare` on a Ray cluster: the bytes of the local way, each split once, stops, mistakes and lost processes."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cluster_preparation
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.workers.launch import end_session
from pretrain.common.errors import InputError, MachineError
from pretrain.config import PretrainConfig, SourceConfig
from pretrain.corpus import stages
from pretrain.corpus.description import WORK, describe
from pretrain.corpus.prepare import prepare
from pretrain.planning import estimate
from pretrain.storage.objects import ObjectStore
from tests.corpus.preparing import preparation
from tests.corpus.test_prepare import text, write_wiki
from tests.distributed import free_port
from tests.object_store import BUCKET, FaultyProxy

ROOT = Path(__file__).parents[2]
TOKEN = "0" * 64


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder for Ray's unix sockets, which have short names: pytest's own is too deep in a worker's."""
    with tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    """A cluster of one node with two cores, open to nobody without a token."""
    port = free_port()
    start = f"start --head --block --port={port} --num-cpus=2 --include-dashboard=false --disable-usage-stats"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_AUTH_TOKEN", TOKEN)
        head = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                *start.split(),
                "--node-ip-address=127.0.0.1",
                f"--temp-dir={place}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "RAY_AUTH_MODE": "token"},
            start_new_session=True,
        )
        try:
            _wait_for(lambda: _answers(port) and (place / "session_latest/sockets/raylet").exists())
            yield f"127.0.0.1:{port}"
            assert head.poll() is None, "the cluster is not ours to end"
        finally:
            end_session(head.pid)
            head.wait()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, with sources that are cut and sources that can only be read in order."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    write_wiki(tmp_path / "wiki-a.txt", [text(seed) for seed in range(33)] + ["Too short."] * 3)
    write_wiki(tmp_path / "wiki-b.txt", [text(seed) for seed in range(29, 57)])
    lines = [json.dumps({"text": text(seed)}) for seed in range(100, 130)]
    with gzip.open(tmp_path / "lines.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join([*lines, '{"text": "broken\n']))
    rows = [f'{n},"{text(n)}"\n' for n in range(200, 220)]
    (tmp_path / "table.csv").write_text("".join(["id,text\n", *rows, "1,2,3\n"]), encoding="utf-8")
    return tmp_path


def _config(corpus_dir: str, address: str = "", **changes: Any) -> PretrainConfig:
    sources = (
        SourceConfig(kind="wikiextractor", path="wiki*.txt"),
        SourceConfig(kind="jsonl", path="lines.jsonl.gz"),
        SourceConfig(kind="csv", path="table.csv"),
    )
    given = {"sources": sources, "processes": 0 if address else 1, **changes}
    return preparation(corpus_dir, address=address, **given)


def _content(folder: str) -> dict[str, bytes]:
    """All files, hidden ones too, and those of counts."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_the_cluster_filters_as_the_local_way_does(folder: Path, address: str) -> None:
    Path("quiz.txt").write_text(text(105).split("\n")[0])
    repeated = [json.dumps({"text": f"{text(seed)} And one more."}) for seed in range(5)]
    Path("more.jsonl").write_text("\n".join(repeated))
    filters = {
        "contamination": {"sets": [{"path": "quiz.txt"}]},
        "near_duplicates": {"enabled": True},
    }
    sources = (*_config("here").corpus.sources, SourceConfig(kind="jsonl", path="more.jsonl"))
    for out, cluster in (("here", ""), ("there", address)):
        prepare(_config(out, cluster, sources=sources, filters=filters), quiet=True)
    card = json.loads(_content("here")["card.json"])
    counts = {entry["filter"]: entry["documents"] for entry in card["filters"]}
    assert counts == {"contamination": 1, "near_duplicates": 5}
    assert _content("there") == _content("here")


def test_the_cluster_writes_the_bytes_of_the_local_way(folder: Path, address: str, proxy: FaultyProxy) -> None:
    """And they are stored, though the tasks of the cluster have no credentials."""
    assert "107 documents" in prepare(_config("here", processes=2), quiet=True)
    there, objects = f"s3://{BUCKET}/corpora/cluster", ObjectStore()
    prepare(_config(there, address), quiet=True)
    here = _content("here")
    assert {"manifest.json", "card.md", "vocab.txt", "train-00000.tokens.npy"} <= here.keys()
    assert {name: objects.read(f"{there}/{name}") for name in here} == here
    problems = json.loads(here["card.json"])["problems"]
    assert {Path(problem["path"]).name for problem in problems} == {"lines.jsonl.gz", "table.csv"}


@pytest.mark.slow
def test_killed_processes_cost_nothing_but_time(folder: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(_config("here"), quiet=True)
    monkeypatch.setattr(stages, "read", cluster_preparation.read)
    monkeypatch.setattr(stages, "write_shard", cluster_preparation.write_shard)
    prepare(_config("there", address), quiet=True)
    assert _content("there") == _content("here")
    runs = cluster_preparation.runs()
    twice = {"read-000-000001-000000", "write_shard-train-00001"}
    assert runs == {job: 2 if job in twice else 1 for job in runs}
    assert len(runs) == 4 + len(list(Path("there").glob("*.tokens.npy"))), "a task for each split and shard"


@pytest.mark.slow
def test_a_job_that_always_dies_and_a_bug_end_the_preparation(folder, address, monkeypatch) -> None:
    monkeypatch.setattr(stages, "count_words", cluster_preparation.always_die)
    one_chunk = (SourceConfig(kind="csv", path="table.csv"),)
    with pytest.raises(MachineError, match=r"^A job's process on the cluster .* died 4 times[^\n]*again;[^\n]*$"):
        prepare(_config("there", address, sources=one_chunk), quiet=True)
    assert cluster_preparation.runs() == {"die": 4}
    monkeypatch.setattr(stages, "count_words", cluster_preparation.bug)
    with pytest.raises(RuntimeError, match=r"Traceback[^$]*cluster_preparation\.py[^$]*ZeroDivisionError: a bug"):
        prepare(_config("there", address, sources=one_chunk), quiet=True)
    monkeypatch.undo()
    os.chdir(folder)
    prepare(_config("there", address, sources=one_chunk), quiet=True)
    prepare(_config("here", sources=one_chunk), quiet=True)
    assert _content("there") == _content("here")


@pytest.mark.slow
def test_the_users_mistake_is_reported_as_on_this_machine(folder: Path, address: str) -> None:
    pq.write_table(pa.table({"text": [text(1)]}), "a.parquet")
    pq.write_table(pa.table({"body": [text(2)]}), "b.parquet")
    messages = []
    for place in ("", address):
        with pytest.raises(InputError, match=r"^b\.parquet: no column 'text'; it has body\.$") as caught:
            prepare(_config("out", place, sources=(SourceConfig(kind="parquet", path="?.parquet"),)), quiet=True)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.slow
def test_a_stopped_or_killed_preparation_resumes_here_or_on_a_cluster(folder: Path, address: str) -> None:
    for number in range(12):
        write_wiki(folder / f"wiki{number}.txt", [text(1000 * number + seed, 40) for seed in range(400)])
    phase = "[{sequence_length: 32, global_sequences: 2, steps: 1, peak_learning_rate: 1e-3}]"
    (folder / "run.yaml").write_text(
        f"name: trial\nphases: {phase}\ncorpus:\n  dir: out\n"
        "  sources: [{kind: wikiextractor, path: 'wiki*.txt'}]\n  vocabulary: {size: 200}\n"
    )
    work = Path("out", WORK)

    def start(*settings: str) -> subprocess.Popen[str]:
        options = [option for setting in settings for option in ("--set", setting)]
        return subprocess.Popen(
            [sys.executable, "-m", "finetune.cli", "prepare", "run.yaml", *options],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def written(pattern: str) -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in work.glob(pattern)}

    def more(pattern: str) -> Callable[[], bool]:
        before = len(written(pattern))
        return lambda: len(written(pattern)) > before

    there = f"scheduling.address={address}"
    # Ctrl-C while it reads.
    process, condition = start(there, "corpus.processes=1"), more("000-*.json")
    _wait_for(condition)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 75
    assert "error: out: stopped. Run the same command again; it resumes." in errors
    stopped = written("000-*.json")
    # Ray's driver is killed.
    process, condition = start(there, "corpus.processes=1"), more("000-*.json")
    _wait_for(condition)
    _driver(process.pid).kill()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 3
    assert re.search(r"error: .*ray\.log: Ray's driver exited with code -9; .* it resumes\.\n$", errors)
    # The command is killed; the driver does not outlive it.
    process, condition = start(there, "corpus.processes=1"), more("*.tokens")
    _wait_for(condition)
    driver = _driver(process.pid)
    process.kill()
    process.communicate()
    driver.wait(10)
    assert not Path("out/manifest.json").exists()
    # Begun there, it ends here; and the other way round.
    read = written("000-*.json")
    assert len(read) == 14
    assert stopped.items() < read.items(), "what was done was done again"
    process = start("corpus.processes=1", "corpus.dir=here")
    _wait_for(lambda: any(Path("here", WORK).glob("000-*.json")))
    process.kill()
    process.communicate()
    for last in (start("corpus.processes=2"), start(there, "corpus.dir=here")):
        _, errors = last.communicate(timeout=120)
        assert last.returncode == 0, errors
    assert _content("out") == _content("here")
    assert len(list(Path("out").glob("train-*.tokens.npy"))) == 1


def _driver(command: int) -> psutil.Process:
    (child,) = psutil.Process(command).children()
    assert any("cluster.workers.pool" in word for word in child.cmdline())
    return child


def test_an_unreachable_cluster_is_reported_at_once(folder: Path) -> None:
    with pytest.raises(MachineError, match=r"^No Ray cluster answers at 127\.0\.0\.1:\d+ .*refused[^\n]*$"):
        prepare(_config("out", f"127.0.0.1:{free_port()}"), quiet=True)
    with pytest.raises(InputError, match="not host:port"):
        prepare(_config("out", "ray://10.0.0.1:10001"), quiet=True)


@pytest.mark.slow
def test_a_server_that_is_not_ray_is_refused(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        began = time.monotonic()
        with pytest.raises(MachineError, match=r"^The server at 127\.0\.0\.1:\d+ did not answer as Ray within 6 s"):
            prepare(_config("out", f"127.0.0.1:{server.getsockname()[1]}"), quiet=True)
        assert time.monotonic() - began < 15


@pytest.mark.slow
def test_a_killed_command_takes_its_driver_along(folder: Path) -> None:
    """Even one that hangs and so does not see that nobody listens any more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        script = (
            "from tests.corpus.test_corpus_ray import _config, prepare\n"
            f"prepare(_config('out', '127.0.0.1:{server.getsockname()[1]}'), quiet=True)\n"
        )
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        command = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path})
        server.settimeout(60)
        server.accept()[0].close()  # the driver asks whether anything is there, and waits for an answer after that
        driver = _driver(command.pid)
        command.kill()
        command.wait()
        driver.wait(4)  # it would give up by itself after 6 s


def test_missing_files_of_a_node_are_not_faults_of_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_process", None)
    monkeypatch.setattr(stages, "hold_freed_memory", lambda max_bytes: None)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    settings = stages.PreparationSettings("work", True, "en", 10, False)
    with pytest.raises(MachineError, match=r"work/lock: missing on the machine .* same files"):
        stages.start_task(settings, None)
    Path("work").mkdir()
    Path("work/lock").touch()
    stages.start_task(settings, None)
    with pytest.raises(MachineError, match=r"gone\.txt: missing on the machine"):
        stages.hash_files(["wiki-a.txt", "gone.txt"])


def test_a_part_tokenized_twice_is_tokenized_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray may do a job again whose first run was heard of and whose words are deleted."""
    monkeypatch.setattr(stages, "_process", None)
    stages.start_process(stages.PreparationSettings(".", True, "en", 10, False), None, child=False)
    Path("part.tokens").touch()
    stages.tokenize_part("part.tokens", "part.words")
    assert not Path("part.tokens").stat().st_size
    with pytest.raises(FileNotFoundError):
        stages.tokenize_part("other.tokens", "other.words")


def test_a_dry_run_names_the_cluster(folder: Path) -> None:
    lines = estimate.preparation_lines(describe(_config("out", "10.0.0.5:6379")))
    assert lines.endswith("to read by all cores of the Ray cluster at 10.0.0.5:6379")
    lines = estimate.preparation_lines(describe(_config("out", "10.0.0.5:6379", processes=3)))
    assert lines.endswith("to read by 3 processes of the Ray cluster at 10.0.0.5:6379")


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_for(condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)

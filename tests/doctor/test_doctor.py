"""doctor: every rule with made-up values, every measurement once, and a real cluster with a node that is not fit."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from chaos import Cluster, cluster
from rich.console import Console

from cluster.doctor import check as doctor
from cluster.doctor import driver, machine, nodes, reduce, remote, verdicts
from cluster.doctor.machine import Device, Disk, MachineFacts
from cluster.doctor.rows import FAIL, PASS, WARN, Finding, show
from cluster.doctor.task import Probe
from finetune.cli import MEASURES
from finetune.cli import main as cli
from pretrain.common.errors import MachineError

GIB = 1 << 30
CORES = len(os.sched_getaffinity(0))
VERSIONS = {"Python": "3.11.7", "torch": "2.13.0", "CUDA": "12.8", "NCCL": "2.27.3", "gloo": "in torch"}
VERSIONS |= {"DeepSpeed": "0.19.8", "Ray": "2.60.0", "bertrain": "01234567 (hash of the project's source files)"}
CPU = Device("CPU, threads: 2", "CPU, threads: 2", bf16=800e9, fp32=200e9, prefers_fp32=False)
SLOW = dataclasses.replace(CPU, bf16=100e9, prefers_fp32=True)
FACTS = MachineFacts(
    system="Linux",
    cores=2,
    busy=0.0,
    memory=16 * GIB,
    memory_free=8 * GIB,
    disks=(Disk("disk", "/data", 50 * GIB, 10 * GIB, GIB),),
    versions=VERSIONS,
    compiler="/usr/bin/g++",
    headers="Python.h",
    compile_error="",
    ops={"cpu_adam": True},
    old_locks=(),
    gpu_files=0,
    gpus=0,
    visible=None,
    devices=(CPU,),
    sequences_per_second=50_000.0,
    sequence_flops=87e9,
)


def test_a_fit_machine_passes() -> None:
    assert {row.mark for row in verdicts.rows_here(FACTS)} == {PASS}


@pytest.mark.parametrize(
    ("changes", "what", "mark", "expected"),
    [
        ({"busy": 0.6}, "cores", WARN, "Other programs"),
        ({"memory_free": 3 * GIB}, "memory", WARN, "close other programs"),
        ({"memory_free": GIB // 2}, "memory", FAIL, "close other programs"),
        ({"disks": (Disk("disk", "/d", 5 * GIB, 10 * GIB, GIB),)}, "disk", WARN, "Free 10 GiB"),
        ({"disks": (Disk("disk, temporary", "/t", 5, GIB, GIB // 4),)}, "disk, temporary", FAIL, "TMPDIR"),
        ({"disks": (Disk("shared memory", "/dev/shm", 5, GIB, GIB // 4),)}, "shared memory", FAIL, "--shm-size"),
        ({"compiler": ""}, "C++ compiler", FAIL, "apt-get install g++"),
        ({"headers": ""}, "C++ compiler", FAIL, "python3-dev"),
        ({"compile_error": "no cmath"}, "C++ compiler", FAIL, "engine.compile: false"),
        ({"ops": {}}, "DeepSpeed ops", WARN, "row of DeepSpeed"),
        ({"old_locks": ("/x/lock",)}, "DeepSpeed ops", WARN, "Remove /x/lock"),
        ({"gpu_files": 8}, "GPUs", FAIL, "does not support CUDA 12.8"),
        ({"gpu_files": 8, "versions": {**VERSIONS, "CUDA": "none"}}, "GPUs", FAIL, "built for CPUs"),
        ({"gpu_files": 8, "visible": ""}, "GPUs", WARN, "Unset"),
        ({"gpus": 8, "versions": {**VERSIONS, "NCCL": "none"}}, "GPUs", FAIL, "with NCCL"),
        ({"devices": (SLOW,)}, "matmul", WARN, "engine.precision: auto"),
        ({"sequences_per_second": 1.0}, "loader", WARN, "A worker could train"),
        ({"versions": {**VERSIONS, "Python": "3.9.2"}}, "Python", FAIL, "3.10 to 3.13"),
        ({"versions": {**VERSIONS, "torch": "none: ImportError"}}, "torch", FAIL, ".venv"),
        ({"versions": {**VERSIONS, "gloo": "none"}}, "gloo", FAIL, ".venv"),
    ],
)
def test_rules_of_one_machine(changes: dict[str, Any], what: str, mark: str, expected: str) -> None:
    rows = {row.what: row for row in verdicts.rows_here(dataclasses.replace(FACTS, **changes))}
    assert rows[what].mark == mark
    assert expected in rows[what].advice
    assert {row.mark for name, row in rows.items() if name != what} == {PASS}


def test_a_node_that_holds_no_workers_is_not_measured() -> None:
    rows = verdicts.rows(dataclasses.replace(FACTS, devices=(), sequences_per_second=0.0), "head")
    assert not {"matmul", "loader"} & {row.what for row in rows}
    assert {row.where for row in rows} == {"head"}


def test_this_machine_is_measured(tmp_path: Path) -> None:
    facts = machine.inspect(MEASURES, tmp_path)
    assert facts.cores == CORES
    assert facts.versions["torch"].startswith("2.")
    assert 0 < facts.memory_free <= facts.memory
    assert {disk.what for disk in facts.disks} >= {"disk", "disk, temporary"}
    assert facts.compile_error == ""
    assert "cpu_adam" in facts.ops
    assert facts.devices
    rates = [rate for device in facts.devices for rate in (device.bf16, device.fp32)]
    assert all(1e6 < rate < 1e18 for rate in rates), "FLOP/s of any processor"
    assert 0 < facts.sequences_per_second < math.inf


def test_all_reduce_between_processes_here() -> None:
    row = reduce.row_here()
    assert row.mark == PASS, row
    assert "GB/s" in row.found


def test_all_reduce_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    row = reduce.row_here()
    assert row.mark == FAIL
    assert "nowhere0" in row.found or "ifa" in row.found


def test_a_compiler_that_does_not_work_or_is_missing_is_detected(tmp_path: Path, monkeypatch: Any) -> None:
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'g++: fatal error: no cc1plus' >&2; exit 1\n")
    broken.chmod(broken.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    compiler, _, error = machine.try_compiler()
    assert (compiler, error) == (str(broken), "g++: fatal error: no cc1plus")
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.try_compiler()[0] == ""


def test_a_library_that_cannot_be_imported_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    versions = machine.versions(machine.measures_of(MEASURES))
    assert versions["Ray"].startswith("none: ")
    assert [row.what for row in verdicts.judge_versions(versions) if row.mark == FAIL] == ["Ray"]


def test_locks_of_unfinished_compilations_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for name, seconds in (("old", 0), ("new", 2e9)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
        os.utime(tmp_path / name / "lock", (seconds, 4 * seconds))
    assert machine.find_old_locks() == (str(tmp_path / "old" / "lock"),)


def test_other_sources_are_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine.own_version()
    (tmp_path / "cluster" / "doctor").mkdir(parents=True)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "cluster/doctor/machine.py"))
    (tmp_path / "cluster" / "run.py").write_text("one")
    one = machine.own_version()
    (tmp_path / "cluster" / "run.py").write_text("two")
    assert len({before, one, machine.own_version()}) == 3
    assert re.fullmatch(r"[0-9a-f]{8} \(hash of the project's source files\)", before)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """A machine of made rows; the test may add to them."""
    rows = [Finding("fine", "yes"), Finding("tight", "somewhat", WARN, "Mind it.")]
    monkeypatch.setattr(doctor, "machine_checks", lambda measures: rows)
    return rows


def test_warnings_do_not_fail_and_failures_do(here: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["doctor"]) == 0
    assert "1 pass, 1 warn, 0 fail" in capsys.readouterr().out
    here.append(Finding("broken", "[red]", FAIL, "Mend it."))
    assert cli(["doctor"]) == MachineError.exit_code
    printed = capsys.readouterr().out
    assert "[red]" in printed
    assert "Mend it." in printed


def test_json_has_every_row(here: list[Finding], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["doctor", "--json"]) == 0
    assert [Finding(**row) for row in json.loads(capsys.readouterr().out)] == here


def test_the_key_is_never_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-canary")
    monkeypatch.setattr(machine, "inspect", lambda measures, folder: FACTS)
    monkeypatch.setattr(reduce, "row_here", lambda: Finding("all-reduce", "1 GB/s"))
    assert cli(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "canary" not in printed
    assert "W&B key" in printed


@pytest.mark.parametrize(
    ("address", "code", "expected"), [("nonsense", 2, "not the URL"), ("http://127.0.0.1:1", 3, "No cluster answers")]
)
def test_a_cluster_that_is_not_there(address: str, code: int, expected: str, capsys: Any) -> None:
    assert cli(["doctor", "--address", address]) == code
    [line] = capsys.readouterr().err.strip().splitlines()
    assert expected in line


def test_a_job_without_a_result_is_reported() -> None:
    job = SimpleNamespace(status=SimpleNamespace(value="FAILED"), driver_exit_code=1, message="")
    with pytest.raises(MachineError, match=r"did not run: ModuleNotFoundError: cluster\.doctor"):
        remote.result_of("noise\nModuleNotFoundError: cluster.doctor\n", "doctor-1", job)
    assert remote.result_of(f'noise\n{driver.MARK}{{"rows": []}}\n', "doctor-1", job) == {"rows": []}


@pytest.mark.parametrize(("is_open", "mark"), [(True, WARN), (False, PASS)])
def test_a_cluster_without_a_token_is_warned_of(is_open: bool, mark: str, monkeypatch: Any, tmp_path: Path) -> None:
    log = f"{driver.MARK}{json.dumps({'rows': [], 'head': machine.versions(machine.measures_of(MEASURES))})}\n"
    jobs = MagicMock()
    jobs.return_value.is_open.return_value = is_open
    jobs.return_value.log.return_value = log
    monkeypatch.setattr(remote.client, "Jobs", jobs)
    row = remote.check(MEASURES, "http://head:8265", tmp_path, plain_http=True)[0]
    assert (row.what, row.mark) == ("access", mark)
    assert ("RAY_AUTH_MODE=token" in row.advice) == is_open
    jobs.assert_called_once_with("http://head:8265", plain_http=True)


def _shown(rows: list[Finding]) -> str:
    file = io.StringIO()
    show(rows, Console(file=file, width=80))
    return file.getvalue()


def test_the_table_fits_and_shows_once_what_all_nodes_report() -> None:
    rows = [Finding("torch", "2.13", where=f"10.0.0.{number}") for number in range(64)]
    rows += [Finding("disk", f"{number} GiB free", where=f"10.0.0.{number}") for number in range(64)]
    rows += [Finding("clock", "late " * 20, FAIL, "Run a time service. " * 5, f"10.0.0.{n}") for n in (7, 8, 9, 10)]
    printed = _shown(rows)
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("torch" in line for line in lines) == sum("disk" in line for line in lines) == 1
    assert sum(line.startswith("fail") for line in lines) == 1
    assert "64 nodes" in printed
    assert "10.0.0.9 and 1" in printed


@pytest.mark.parametrize(
    ("changes", "mark", "expected"),
    [
        ({}, PASS, "8 CPU, 0 GPU"),
        ({"cpus": 0}, PASS, "runs no workers"),
        ({"cpus": 9}, WARN, "8 cores"),
        ({"gpus": 1}, FAIL, "torch sees 0"),
        ({"draining": True}, WARN, "leave"),
        ({"answers": False}, FAIL, "does not answer"),
    ],
)
def test_judge_node(changes: dict[str, Any], mark: str, expected: str) -> None:
    given = {"cpus": 8, "gpus": 0, "about": {"cores": 8, "gpus": 0}, "draining": False, "answers": True}
    row = nodes.judge_node("n", **{**given, **changes})
    assert row.mark == mark
    assert expected in row.found


def test_versions_that_differ_from_the_heads_fail() -> None:
    other = {**VERSIONS, "torch": "2.12.0"}
    rows = nodes.judge_versions({"a": VERSIONS, "b": other, "c": VERSIONS}, VERSIONS)
    [bad] = [row for row in rows if row.mark != PASS]
    assert (bad.what, bad.where, bad.mark) == ("torch", "b", FAIL)
    assert bad.found == "2.12.0; the head has 2.13.0"
    assert {row.where for row in rows if row.mark == PASS} == {"3 nodes"}


def test_a_library_that_no_node_has_fails_and_a_client_of_another_version_is_warned() -> None:
    lacking = {**VERSIONS, "DeepSpeed": "none: ImportError"}
    [bad] = [row for row in nodes.judge_versions({"a": lacking}, lacking) if row.mark != PASS]
    assert (bad.what, bad.mark) == ("DeepSpeed", FAIL)
    assert nodes.judge_client(VERSIONS, VERSIONS).mark == PASS
    row = nodes.judge_client({**VERSIONS, "Ray": "2.59.0"}, VERSIONS)
    assert row.mark == WARN
    assert "Ray 2.59.0; the head has Ray 2.60.0" in row.found


@pytest.mark.parametrize(
    ("own_name", "interface", "addresses", "mark"),
    [
        ("10.0.0.1", "", {"10.0.0.1", "10.0.0.2"}, PASS),
        ("127.0.1.1", "", {"10.0.0.1", "10.0.0.2"}, WARN),  # what Debian's /etc/hosts says
        ("127.0.1.1", "eth0", {"10.0.0.1", "10.0.0.2"}, PASS),
        ("127.0.1.1", "", {"10.0.0.1"}, PASS),  # one machine
    ],
)
def test_judge_name(own_name: str, interface: str, addresses: set[str], mark: str) -> None:
    assert nodes.judge_name("n", "10.0.0.1", own_name, interface, addresses).mark == mark


@pytest.mark.parametrize(
    ("offset", "uncertainty", "mark"),
    [(0.1, 0.01, PASS), (-0.7, 0.01, WARN), (9.0, 0.01, FAIL), (-9.0, 0.01, FAIL), (0.7, 0.3, PASS), (0.0, 3.0, WARN)],
)
def test_judge_skew(offset: float, uncertainty: float, mark: str) -> None:
    assert nodes.judge_skew("n", offset, uncertainty).mark == mark


def test_the_clock_is_read_by_the_quickest_answer() -> None:
    now, ways = [100.0], iter([(0.4, 0.0), (0.01, 0.01), (0.0, 0.5)])

    def ask() -> float:
        there, back = next(ways)
        now[0] += there
        answer = now[0] + 7.0
        now[0] += back
        return answer

    offset, uncertainty = nodes.clock_offset(ask, lambda: now[0], rounds=3)
    assert offset == pytest.approx(7.0)
    assert uncertainty == pytest.approx(0.01)


def test_rules_of_shared_storage() -> None:
    assert nodes.judge_write("n", "/s", 0.1, "").mark == PASS
    assert nodes.judge_write("n", "/s", 9.0, "").mark == WARN
    assert nodes.judge_write("n", "/s", 0.0, "OSError: no locks").mark == FAIL
    assert nodes.judge_seen("n", "/s", 0.1, [], 3).mark == PASS
    row = nodes.judge_seen("n", "/s", 5.0, ["a", "b"], 3)
    assert row.mark == FAIL
    assert "a, b" in row.found


def test_a_device_slower_than_its_kind_is_warned() -> None:
    def of(rate: float) -> MachineFacts:
        return dataclasses.replace(FACTS, devices=(dataclasses.replace(CPU, bf16=rate),))

    [row] = nodes.judge_pace({"a": of(100e9), "b": of(98e9), "c": of(50e9)})
    assert (row.where, row.mark) == ("c", WARN)
    [row] = nodes.judge_pace({"a": of(100e9), "b": of(98e9)})
    assert row.mark == PASS


def test_rules_of_all_reduce() -> None:
    fast, slow = (5e9, 64 << 20), (0.05e9, 1 << 20)
    assert nodes.judge_reduce("gloo", {"a": fast, "b": fast}, 2).mark == PASS
    assert nodes.judge_reduce("nccl", {"a": slow, "b": slow}, 2).mark == WARN
    row = nodes.judge_reduce("gloo", {"a": "DistStoreError: wait timeout", "b": "no nowhere0"}, 2)
    assert row.mark == FAIL
    assert "b: no nowhere0" in row.found
    assert nodes.judge_reduce("gloo", {"a": fast}, 2).mark == FAIL


def test_storage_that_is_shared_and_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.doctor.task.SEEN_SECONDS", 0.2)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    probe, one, two = Probe("127.0.0.1", 1, True, MEASURES), str(tmp_path / "one"), str(tmp_path / "two")
    texts = {".doctor-0": "a", ".doctor-1": "b"}
    assert probe.write_probe(one, ".doctor-0", "a")[1] == ""
    assert probe.write_probe(two, ".doctor-1", "b")[1] == ""
    assert probe.see_probes(one, texts)[1] == [".doctor-1"]
    probe.write_probe(one, ".doctor-1", "b")
    assert probe.see_probes(one, texts)[1] == []
    for name in texts:
        probe.remove_probe(one, name)
    assert not list(Path(one).iterdir())
    assert probe.write_probe(str(tmp_path / "no"), "x", "a")[1] == "is not a folder on this machine"
    assert not (tmp_path / "no").exists()


class OneProcessGroup:
    """`driver.ProbeGroup` without Ray: each node is a folder, which nodes share or not."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self.folders = folders
        self.checked = dict.fromkeys(folders)
        self.probes = {name: Probe("127.0.0.1", 1, True, MEASURES) for name in folders}

    def call(self, method: str, each: Any, among: Any = None) -> dict[str, Any]:
        return {
            name: getattr(self.probes[name], method)(str(self.folders[name]), *each(name)[1:])
            for name in (self.checked if among is None else list(among))
        }


def locks(group: OneProcessGroup) -> list[tuple[str, str, str]]:
    rows: Any = driver.storage(group, "/s")  # pyright: ignore[reportArgumentType]
    return [(row.where, row.mark, row.found) for row in rows if row.what == "storage, locks"]


def test_a_lock_of_one_node_must_be_seen_by_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = OneProcessGroup(dict.fromkeys("abc", tmp_path))
    assert locks(group) == [(name, PASS, "/s: a lock of a is seen") for name in "bc"]
    assert not list(tmp_path.iterdir())

    # Locks that each node keeps to itself: an NFS mount with local_lock, Lustre with -o localflock.
    monkeypatch.setattr("pretrain.common.files.fcntl.flock", lambda *_: None)
    assert locks(group) == [(name, WARN, "/s: a lock of a is not seen") for name in "bc"]
    assert not list(tmp_path.iterdir())

    def refuse(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("pretrain.common.files.fcntl.flock", refuse)
    assert locks(group) == [("a", WARN, "/s: does not support locks")]


def test_locks_are_checked_among_nodes_that_share_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.doctor.task.SEEN_SECONDS", 0.2)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert locks(OneProcessGroup({"a": tmp_path / "one", "b": tmp_path / "two"})) == []
    assert locks(OneProcessGroup({"a": tmp_path / "one"})) == []


@pytest.mark.slow
def test_a_real_cluster_and_a_node_that_is_not_fit(tmp_path: Path) -> None:
    with cluster(tmp_path / "state", "--nodes", "2", "--cpus-per-node", "1") as one:
        rows = _checked(one, 0, "--dir", str(tmp_path))
        reduced = next(row for row in rows if row.what == "all-reduce")
        assert reduced.mark == PASS
        assert "2 nodes" in reduced.found
        assert {row.where for row in rows if row.what == "storage, shared" and row.mark == PASS} == _places(rows)
        assert len(_places(rows)) == 2
        assert {row.what for row in rows} >= {"bertrain", "clock", "disk", "memory", "matmul", "loader", "pace"}
        assert one.command("list") == "no jobs\n"
        assert [path.name for path in tmp_path.iterdir()] == ["state"]

        rows = _checked(one, 3, "--dir", str(tmp_path / "nowhere"))
        assert {row.where for row in rows if row.mark == FAIL} == _places(rows)
        assert {row.what for row in rows if row.mark == FAIL} == {"storage, write"}

        command = [sys.executable, "-m", "finetune.cli", "up", "--join"]
        environment = {**one.environment, "GLOO_SOCKET_IFNAME": "nowhere0"}
        subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env=environment)
        rows = _checked(one, 3, "--dir", str(tmp_path))
        assert {row.what for row in rows if row.mark == FAIL} == {"all-reduce"}


def _checked(one: Cluster, code: int, *options: str) -> list[Finding]:
    return [Finding(**row) for row in json.loads(one.command("doctor", "--cluster", "--json", *options, code=code))]


def _places(rows: list[Finding]) -> set[str]:
    return {row.where for row in rows if row.what == "node"}

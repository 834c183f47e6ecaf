"""doctor: every rule with made-up values, every measurement once, and a real cluster with a node that is not fit."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from chaos import Cluster, cluster, wait_for
from rich.console import Console

from cluster.doctor import driver, machine, reduce, remote, storage, verdicts
from cluster.doctor.rows import FAIL, PASS, WARN, Finding, show
from finetune.cli import MEASUREMENT_MODULE
from finetune.cli import main as cli
from pretrain.common.errors import MachineError
from pretrain.run import machine as measurements

GIB = 1 << 30
CORES = len(os.sched_getaffinity(0))
VERSIONS = {"Python": "3.11.7", "torch": "2.13.0", "CUDA": "12.8", "NCCL": "2.27.3", "gloo": "in torch"}
VERSIONS |= {"DeepSpeed": "0.19.8", "Ray": "2.60.0", "bertrain": "01234567 (hash of the project's source files)"}


@pytest.mark.parametrize(
    ("row", "mark", "expected"),
    [
        (verdicts.judge_cores(2, 0.1), PASS, ""),
        (verdicts.judge_cores(2, 0.6), WARN, "Other programs"),
        (verdicts.judge_memory(16 * GIB, 8 * GIB), PASS, ""),
        (verdicts.judge_memory(16 * GIB, 3 * GIB), WARN, "close other programs"),
        (verdicts.judge_memory(16 * GIB, GIB // 2), FAIL, "close other programs"),
        (verdicts.judge_disk("disk", Path("/d"), 50 * GIB, 10 * GIB, GIB), PASS, ""),
        (verdicts.judge_disk("disk", Path("/d"), 5 * GIB, 10 * GIB, GIB), WARN, "Free 10 GiB"),
        (verdicts.judge_disk("disk, temporary", Path("/t"), 5, GIB, GIB // 4), FAIL, "TMPDIR"),
        (verdicts.judge_disk("shared memory", Path("/dev/shm"), 5, GIB, GIB // 4), FAIL, "--shm-size"),
        (verdicts.judge_compiler("/usr/bin/g++", "Python.h", ""), PASS, ""),
        (verdicts.judge_compiler("", "", ""), FAIL, "apt-get install g++"),
        (verdicts.judge_compiler("/usr/bin/g++", "", ""), FAIL, "python3-dev"),
        (verdicts.judge_compiler("/usr/bin/g++", "Python.h", "no cmath"), FAIL, "engine.compile: false"),
        (verdicts.judge_gpus(0, 0, VERSIONS, None), PASS, ""),
        (verdicts.judge_gpus(8, 8, VERSIONS, None), PASS, ""),
        (verdicts.judge_gpus(8, 0, VERSIONS, None), FAIL, "does not support CUDA 12.8"),
        (verdicts.judge_gpus(8, 0, {**VERSIONS, "CUDA": "none"}, None), FAIL, "built for CPUs"),
        (verdicts.judge_gpus(8, 0, VERSIONS, ""), WARN, "Unset"),
        (verdicts.judge_gpus(8, 8, {**VERSIONS, "NCCL": "none"}, None), FAIL, "with NCCL"),
        (verdicts.judge_matmul("CPU", 800e9, 200e9, False), PASS, ""),
        (verdicts.judge_matmul("CPU", 100e9, 200e9, True), WARN, "engine.precision: auto"),
    ],
)
def test_rules_of_one_machine(row: Finding, mark: str, expected: str) -> None:
    assert row.mark == mark
    assert mark == PASS or expected in row.advice


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"Python": "3.9.2"}, "3.10 to 3.13"),
        ({"torch": "none: ImportError"}, ".venv"),
        ({"gloo": "none"}, ".venv"),
    ],
)
def test_rules_of_versions(changes: dict[str, str], expected: str) -> None:
    rows = verdicts.judge_versions({**VERSIONS, **changes})
    assert [row.what for row in rows] == list(VERSIONS)
    assert {row.what for row in rows if row.mark == FAIL} == set(changes)
    assert all(expected in row.advice for row in rows if row.mark == FAIL)


def test_this_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduce, "local_bandwidth", lambda: Finding("all-reduce", "1 GB/s"))
    rows = {row.what: row for row in machine.check(MEASUREMENT_MODULE, tmp_path)}
    assert rows["torch"].found.startswith("2.")
    assert rows["cores"].found.startswith(f"{CORES}, ")
    assert str(tmp_path) in rows["disk"].found
    assert "compiles an extension" in rows["C++ compiler"].found
    assert re.fullmatch(r"[\d,]+ GFLOP/s in bf16, [\d,]+ in fp32 \(.*\)", rows["matmul"].found)


def test_a_node_that_holds_no_workers_is_not_measured(tmp_path: Path) -> None:
    names = {row.what for row in machine.check_node(MEASUREMENT_MODULE, tmp_path, "", cpus=0, gpus=0)}
    assert {"torch", "disk", "GPUs"} <= names
    assert not {"matmul", "storage", "all-reduce"} & names


def test_all_reduce_between_processes_here() -> None:
    row = reduce.local_bandwidth()
    assert row.mark == PASS, row
    assert "GB/s" in row.found


def test_all_reduce_that_cannot_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    row = reduce.local_bandwidth()
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
    versions = machine.versions(measurements)
    assert versions["Ray"].startswith("none: ")
    (row,) = [row for row in verdicts.judge_versions(versions) if row.mark != PASS]
    assert (row.what, row.mark) == ("Ray", WARN)
    assert row.advice.endswith(" -m pip install 'bertrain[cluster]'")
    *_, last = verdicts.judge_versions({"Ray": versions["Ray"], "gloo": "none"})
    assert "cluster" not in last.advice
    monkeypatch.setattr(verdicts, "is_installed", lambda module: True)  # installed, and broken
    assert [row.what for row in verdicts.judge_versions(versions) if row.mark == FAIL] == ["Ray"]


def test_other_sources_are_another_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = machine.source_version()
    (tmp_path / "cluster" / "doctor").mkdir(parents=True)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "cluster/doctor/machine.py"))
    (tmp_path / "cluster" / "run.py").write_text("one")
    one = machine.source_version()
    (tmp_path / "cluster" / "run.py").write_text("two")
    assert len({before, one, machine.source_version()}) == 3
    assert re.fullmatch(r"[0-9a-f]{8} \(hash of the project's source files\)", before)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """A machine of made rows; the test may add to them."""
    rows = [Finding("fine", "yes"), Finding("tight", "somewhat", WARN, "Mind it.")]
    monkeypatch.setattr(machine, "check", lambda measurements, folder: rows)
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
    monkeypatch.setattr(machine, "check", lambda measurements, folder: [verdicts.judge_wandb_key()])
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
        remote.parse_findings("noise\nModuleNotFoundError: cluster.doctor\n", "doctor-1", job)
    assert remote.parse_findings(f'x\n{driver.FINDINGS_PREFIX}[{{"what": "a", "found": "b"}}]\n', "d", job) == [
        Finding("a", "b")
    ]


@pytest.mark.parametrize(("is_open", "mark"), [(True, WARN), (False, PASS)])
def test_a_cluster_without_a_token_is_warned_of(is_open: bool, mark: str, monkeypatch: Any, tmp_path: Path) -> None:
    jobs = MagicMock()
    jobs.return_value.is_open.return_value = is_open
    jobs.return_value.log.return_value = f"{driver.FINDINGS_PREFIX}[]\n"
    monkeypatch.setattr(remote.client, "JobsClient", jobs)
    row = remote.check(MEASUREMENT_MODULE, "http://head:8265", tmp_path, plain_http=True)[0]
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
    rows += [Finding("storage", "unseen " * 20, FAIL, "Mount one folder. " * 5, f"10.0.0.{n}") for n in (7, 8, 9, 10)]
    printed = _shown(rows)
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("torch" in line for line in lines) == sum("disk" in line for line in lines) == 1
    assert sum(line.startswith("fail") for line in lines) == 1
    assert "64 nodes" in printed
    assert "10.0.0.9 and 1" in printed


def test_versions_that_differ_between_nodes_fail() -> None:
    rows = [Finding("Ray", version, where=node) for node, version in (("a", "2.60"), ("b", "2.60"), ("c", "2.59"))]
    rows += [Finding("disk", free, where=node) for node, free in (("a", "9 GiB"), ("b", "8 GiB"))]
    compared = driver.compare_versions(rows)
    assert [row.mark for row in compared] == [PASS, PASS, FAIL, PASS, PASS]
    assert compared[2].found == "2.59; a has 2.60"


def test_rules_of_all_reduce() -> None:
    assert reduce.judge("gloo", [0.01, 0.02], "nodes").mark == PASS
    row = reduce.judge("nccl", [0.1, 0.2, 0.1, 0.1], "nodes")
    assert row.mark == WARN
    assert row.found.startswith("0.50 GB/s"), "2 x 3/4 of 64 MiB in the time of the slowest"
    row = reduce.judge("gloo", [RuntimeError("wait timeout"), RuntimeError("no nowhere0"), 0.1], "nodes")
    assert row.mark == FAIL
    assert row.found == "gloo among 3 nodes: RuntimeError: no nowhere0"
    assert "one GPU" in reduce.judge("nccl", [0.1], "local processes").found


def storage_row(held: Path, seen: Path) -> tuple[str, str]:
    """The mark and what was found where the job holds a lock in one folder and a node tries it in another."""
    with storage.hold_lock(held) as (name, problem):
        row = problem or storage.try_lock(seen, name)
    assert not list(held.glob(".doctor-*")), "no file is left"
    return row.mark, row.found.replace(str(seen), "/s")


def test_a_lock_of_the_head_must_be_seen_by_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SEEN_SECONDS", 0.2)
    (tmp_path / "other").mkdir()
    assert storage_row(tmp_path, tmp_path) == (PASS, "/s: shared, a lock of the head is seen")
    assert storage_row(tmp_path, tmp_path / "other") == (FAIL, "/s: a file of the head was not seen within 0 s")
    assert not list((tmp_path / "other").iterdir())
    nowhere = tmp_path / "nowhere"
    assert storage_row(nowhere, nowhere) == (FAIL, "/s: is not a folder on this machine")
    assert not nowhere.exists()

    # Locks that each node keeps to itself: an NFS mount with local_lock, Lustre with -o localflock.
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert storage_row(tmp_path, tmp_path) == (WARN, "/s: a lock of the head is not seen")

    def refuse(*_: Any) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert storage_row(tmp_path, tmp_path) == (WARN, "/s: does not support locks")


@pytest.mark.slow
def test_a_real_cluster_and_a_node_that_is_not_fit(tmp_path: Path) -> None:
    with cluster(tmp_path / "state", "--nodes", "2", "--cpus-per-node", "1") as one:
        rows = _checked(one, 0, "--dir", str(tmp_path))
        reduced = next(row for row in rows if row.what == "all-reduce")
        assert reduced.mark == PASS
        assert "2 nodes" in reduced.found
        shared = [row for row in rows if row.what == "storage"]
        assert [row.mark for row in shared] == [PASS, PASS]
        assert len({row.where for row in shared}) == 2
        assert {row.what for row in rows} >= {"access", "bertrain", "disk", "memory", "matmul"}
        assert one.command("list") == "no jobs\n"
        assert [path.name for path in tmp_path.iterdir()] == ["state"]

        rows = _checked(one, 3, "--dir", str(tmp_path / "nowhere"))
        assert {row.what for row in rows if row.mark == FAIL} == {"storage"}

        one.join(GLOO_SOCKET_IFNAME="nowhere0")
        wait_for(lambda: sum(row.what == "torch" for row in _checked(one, None, "--dir", str(tmp_path))) == 3)
        rows = _checked(one, 3, "--dir", str(tmp_path))
        assert {row.what for row in rows if row.mark == FAIL} == {"all-reduce"}


def _checked(one: Cluster, code: int | None, *options: str) -> list[Finding]:
    return [Finding(**row) for row in json.loads(one.command("doctor", "--cluster", "--json", *options, code=code))]

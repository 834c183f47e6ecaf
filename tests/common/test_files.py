"""Locks, logs and shards on unusual file systems and with low limits of open files."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest
from corpora import make_vocabulary, write_corpus

from pretrain.common.addresses import local_path, local_run
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import (
    append_open,
    atomic_open,
    check_outputs_differ,
    checkpoint_names,
    disk_errors,
    locked,
    put_manifest,
    read_manifest,
    verify_manifest,
)
from pretrain.corpus import shards as shards_of
from pretrain.corpus.shards import open_shards
from pretrain.reporting.pages import write_page
from tests.distributed import run_program


def test_a_full_disk_is_recognized_without_a_number(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"disk full .*finetune: with --resume"), disk_errors(tmp_path):
        np.zeros(100_000).tofile("/dev/full")


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / ".work").write_text("")
    with pytest.raises(InputError, match="cannot write here"), locked(tmp_path / ".work" / "lock", "locked"):
        pass


def test_the_home_folder_may_be_written_as_a_tilde(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/corpora/x") == tmp_path / "corpora/x"
    assert local_run("~/runs/x") == tmp_path / "runs/x"
    assert local_path("corpora/~x") == Path("corpora/~x")


def test_only_finished_checkpoints_count(tmp_path: Path) -> None:
    for name in ("step-00000020", "step-00000010", ".step-00000030.tmp", "damaged-step-00000040", "step-00000050"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        if name != "step-00000050":
            (tmp_path / "checkpoints" / name / "manifest.json").touch()
    assert checkpoint_names(tmp_path) == ["step-00000010", "step-00000020"]


def test_a_lock_is_held_against_others(tmp_path: Path) -> None:
    path = tmp_path / "run" / ".lock"
    with locked(path, "another works there") as held:
        assert held is True
        with pytest.raises(InputError, match="another works there"), locked(path, "another works there"):
            pass
    with locked(path, "another works there"):
        pass


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_the_work_continues_with_a_warning(tmp_path, error, monkeypatch, caplog) -> None:
    def flock(*arguments: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING), locked(tmp_path / ".lock", "another works there") as held:
        assert held is False
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{tmp_path}/.lock: this file system does not support locks ({os.strerror(error)}). "
        f"Make sure that no other process uses {tmp_path}."
    )


def test_a_link_stays_and_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("there", "to be made"):
        (tmp_path / f"{name}.link").symlink_to(tmp_path / "elsewhere" / name)
    (tmp_path / "elsewhere" / "there").write_text("old")
    for name in ("there", "to be made"):
        with atomic_open(tmp_path / f"{name}.link", "w") as file:
            file.write("new")
        assert (tmp_path / f"{name}.link").is_symlink()
        assert (tmp_path / "elsewhere" / name).read_text() == "new"
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["there", "to be made"]


def test_a_pipe_and_a_device_are_written_in_place(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for name in (pipe, link):
        with atomic_open(name, "w") as file:
            file.write("a line")
        assert os.read(reader, 100) == b"a line"
        assert name.is_fifo()
    os.close(reader)
    (tmp_path / "null").symlink_to(os.devnull)
    with atomic_open(tmp_path / "null") as file:
        file.write(b"nothing")
    assert (tmp_path / "null").is_symlink()
    assert Path(os.devnull).is_char_device()


def test_an_output_is_no_input_under_any_name(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("text")
    (tmp_path / "link").symlink_to("in.csv")
    os.link(tmp_path / "in.csv", tmp_path / "hard")
    check_outputs_differ([tmp_path / "new", Path(os.devnull)], [tmp_path / "in.csv", os.devnull, "-"])
    for name in ("in.csv", "link", "hard", "../" + tmp_path.name + "/in.csv"):
        with pytest.raises(InputError, match="is also an input"):
            check_outputs_differ([tmp_path / "new", tmp_path / name], [tmp_path / "in.csv"])


def test_a_page_replaces_pages_only(tmp_path: Path) -> None:
    records = tmp_path / "metrics.jsonl"
    records.write_text('{"step": 1}')
    with pytest.raises(InputError, match=r"metrics\.jsonl: exists and is not an HTML page"):
        write_page(records, "report.html.j2")
    assert records.read_text() == '{"step": 1}'


def test_a_log_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.log"
    for text in (b"one\n", b"two\n"):
        with append_open(path) as file:
            file.write(text)
    assert path.read_text() == "one\ntwo\n"


@pytest.fixture
def many_shards(tmp_path: Path) -> Path:
    """A corpus of 40 shards, which are 120 files."""
    document = [np.arange(5, 9)]
    parts = [(0, [document]) for _ in range(40)]
    return write_corpus(
        tmp_path / "corpus", {"train": parts, "validation": parts[:1]}, make_vocabulary(200), weights=(1.0,)
    )


def open_all(corpus: Path, soft: int, hard: int) -> None:
    """Print what a process with these limits of open files finds in the corpus."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    before = len(list(Path("/proc/self/fd").iterdir()))
    try:
        shards = open_shards(corpus, "train").shards
        print(sum(int(shard.tokens.sum()) for shard in shards), len(list(Path("/proc/self/fd").iterdir())) - before)
    except MachineError as error:
        print("MachineError", error)


def opened(corpus: Path, soft: int, hard: int) -> str:
    return run_program(open_all, corpus, soft, hard).stdout


def test_more_shards_than_the_soft_limit_are_opened(many_shards: Path) -> None:
    total, descriptors = opened(many_shards, 64, 1024).split()
    assert int(total) == 40 * (5 + 6 + 7 + 8)
    assert int(descriptors) == (0 if sys.version_info >= (3, 13) else 120)


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="a mapping keeps no descriptor there")
def test_more_shards_than_the_hard_limit_are_not_damage(many_shards: Path) -> None:
    said = opened(many_shards, 64, 64)
    assert said.startswith(f"MachineError {many_shards}/")
    assert "the limit of open files is 64. Raise the limit (ulimit -n)" in said


def test_failing_storage_is_not_damage(many_shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mmap(*arguments: object, **named: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(shards_of.mmap, "mmap", mmap)
    with pytest.raises(MachineError, match=r"cannot be read \(Input/output error\)\. Check its storage"):
        open_shards(many_shards, "train")


def test_mapped_arrays_are_read_only_and_let_go_of_their_pages(many_shards: Path) -> None:
    shard = open_shards(many_shards, "train").shards[0]
    for array in (shard.tokens, shard.sentences, shard.documents):
        assert not array.flags.writeable
        assert isinstance(array.base, shards_of.mmap.mmap)


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/etc/passwd"])
def test_no_manifest_names_files_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    """Whoever gives a folder away can sign anything."""
    put_manifest(tmp_path, {"files": {name: {"bytes": 0, "sha256": ""}}})
    for read in (verify_manifest, read_manifest):
        with pytest.raises(InputError, match=r"manifest\.json: damaged \(it names files outside its folder\)"):
            read(tmp_path)

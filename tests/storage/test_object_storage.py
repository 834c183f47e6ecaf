"""Objects, folders and checkpoints in an object store: a real S3 server behind a proxy that fails."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import os
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from pretrain.checkpoint import store, writing
from pretrain.checkpoint.saver import Saver
from pretrain.common.addresses import local_path
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import checkpoint_names, locked, verify_manifest, write_manifest
from pretrain.config import SourceConfig
from pretrain.corpus import listing
from pretrain.corpus.sources import list_inputs
from pretrain.run import launch
from pretrain.storage import folders, objects, runs
from pretrain.storage.objects import ListedObject, ObjectStore, _part_file, _to_listed_object
from pretrain.storage.runs import StoredRun, fetched_model, storing
from pretrain.training.engine import Fragment
from tests.distributed import Rank, Ranks
from tests.object_store import BUCKET, Fault, FaultyProxy, forget_clients

RUN, ACCOUNT = f"s3://{BUCKET}/runs/a", "mine.dfs.core.windows.net"


def make_folder(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    write_manifest(folder, {"format": 1})
    return folder


@pytest.fixture
def stored_corpus(proxy: FaultyProxy, corpus: Path) -> str:
    folders.store(corpus, address := f"s3://{BUCKET}/corpora/one")
    proxy.requests.clear()
    return address


def test_a_fetch_that_was_cut_goes_on_and_keeps_what_is_here(proxy: FaultyProxy, stored_corpus: str) -> None:
    address = stored_corpus
    proxy.plan = [Fault("403", r"GET .*validation-00001\.tokens\.npy")]
    with pytest.raises(InputError, match=r"tokens\.npy: cannot be read"):
        folders.fetch(address)
    here = {path.name for path in local_path(address).glob("*.npy")}
    assert here
    assert not (local_path(address) / "manifest.json").exists()
    proxy.requests.clear()
    folder = folders.fetch(address)
    fetched = {request.split("/")[-1] for request in proxy.requests if request.startswith("GET")}
    assert not fetched & here
    verify_manifest(folder)
    (folder / "card.md").write_text("other")  # of another size
    (folder / "vocab.txt").unlink()
    proxy.requests.clear()
    folders.fetch(address)
    fetched = [request.split("/")[-1] for request in proxy.requests if request.startswith("GET")]
    assert sorted(fetched) == ["card.md", "manifest.json", "vocab.txt"]
    verify_manifest(folder)


def test_content_that_is_not_the_manifests_is_refused(stored_corpus: str, corpus: Path) -> None:
    content = (corpus / "vocab.txt").read_bytes()
    ObjectStore().write(f"{stored_corpus}/vocab.txt", content[:-1] + b"?")
    with pytest.raises(MachineError, match=r"vocab\.txt: the content does not match its manifest or listing"):
        folders.fetch(stored_corpus)
    assert not (local_path(stored_corpus) / "manifest.json").exists()


def test_processes_of_a_machine_fetch_a_folder_once(proxy: FaultyProxy, stored_corpus: str) -> None:
    proxy.plan = [Fault("slow", r"GET .*tokens\.npy", 2)]
    with ThreadPoolExecutor(3) as pool:  # flock excludes threads as it does processes
        assert len(set(pool.map(lambda _: folders.fetch(stored_corpus), range(3)))) == 1
    fetched = [request.split("/")[-1] for request in proxy.requests if request.startswith("GET")]
    assert len(set(fetched)) == len(fetched) - 2, "all ask for the manifest, one for the rest"
    verify_manifest(local_path(stored_corpus))


def test_a_folder_that_is_stored_again_loses_its_former_files(proxy: FaultyProxy, tmp_path: Path) -> None:
    address = f"s3://{BUCKET}/export"
    folders.store(make_folder(tmp_path / "first", a="1", b="2", c="3"), address)
    proxy.requests.clear()
    folders.store(make_folder(tmp_path / "second", b="2", c="changed"), address)
    written = [request.split("/")[-1].split("?")[0] for request in proxy.requests if request.startswith("PUT")]
    assert written == ["c", "manifest.json"]
    deleted = [request.split("/")[-1] for request in proxy.requests if request.startswith("DELETE")]
    assert deleted == ["manifest.json", "a"], "no moment has a manifest and other files"
    assert sorted(ObjectStore().listing(address)) == ["b", "c", "manifest.json"]


def test_a_file_that_was_deleted_since_an_interrupted_store_is_stored_again(proxy, tmp_path, monkeypatch) -> None:
    address, folder = f"s3://{BUCKET}/{tmp_path.name}/deleted", make_folder(tmp_path / "a", one="1", two="22")
    write = ObjectStore.write

    def fail(*_: Any) -> None:
        raise MachineError("cut")

    monkeypatch.setattr(ObjectStore, "write", fail)  # the manifest is the last
    with pytest.raises(MachineError):
        folders.store(folder, address)
    monkeypatch.setattr(ObjectStore, "write", write)
    ObjectStore().delete(f"{address}/one")
    folders.store(folder, address)
    assert (folders.fetch(address, folder=tmp_path / "b") / "one").read_text() == "1"


def test_what_was_lost_there_is_not_replaced_by_a_damaged_file(proxy: FaultyProxy, tmp_path: Path) -> None:
    address, folder = f"s3://{BUCKET}/{tmp_path.name}/lost", make_folder(tmp_path / "a", one="1", two="22")
    folders.store(folder, address)
    ObjectStore().delete(f"{address}/two")
    for damaged in ("2", "23"):
        (folder / "two").write_text(damaged)
        with pytest.raises(MachineError, match=r"two: is missing or has another size, and .*two is missing or damaged"):
            folders.store(folder, address)
    (folder / "two").write_text("22")
    folders.store(folder, address)
    assert ObjectStore().read(f"{address}/two") == b"22"


def test_only_what_is_missing_needs_space(proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"s3://{BUCKET}/{tmp_path.name}/space"
    for name in ("one", "two"):
        ObjectStore().write(f"{address}/{name}", b"x" * 1000)
    folders.fetch_files(f"{address}/one")
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10_000, 9000, 999))
    with pytest.raises(MachineError, match="fetching needs"):
        folders.fetch_files(address)
    (begun,) = folders.find(f"{address}/two").values()
    part = _part_file(local_path(f"{address}/two"), begun, "")
    part.write_bytes(b"x")
    assert len(folders.fetch_files(address)) == 2
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10_000, 10_000, 0))
    assert len(folders.fetch_files(address)) == 2


def test_a_large_file_goes_up_in_parts_and_a_part_that_fails_alone_is_sent_again(proxy, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(objects, "S3_PART_BYTES", 5 << 20)  # the least that S3 allows
    path, address = tmp_path / "large", f"s3://{BUCKET}/large"
    path.write_bytes(np.random.default_rng(0).bytes(11 << 20))
    proxy.plan = [Fault("503", "PUT .*partNumber=2")]
    ObjectStore().upload(path, address)
    parts = [request.split("&")[0] for request in proxy.requests if "partNumber" in request]
    assert sorted(part.split("=")[-1] for part in parts) == ["1", "2", "2", "3"]
    facts = ObjectStore().info(address)
    assert facts is not None
    proxy.plan = [Fault("cut", "GET .*large", 2)]
    ObjectStore().download(address, tmp_path / "back", facts)
    assert (tmp_path / "back").read_bytes() == path.read_bytes()
    assert not list(tmp_path.glob(".back*"))


def test_a_download_goes_on_where_another_process_stopped(proxy: FaultyProxy, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(objects, "CHUNK_BYTES", 4 << 20)
    content, address = np.random.default_rng(0).bytes(5 << 20), f"s3://{BUCKET}/large"
    ObjectStore().write(address, content)
    digest = hashlib.sha256(content).hexdigest()
    expected = ListedObject(len(content), "", 0.0)
    proxy.plan = [Fault("slow", "GET .*large"), Fault("403", "GET .*large")]
    with pytest.raises(InputError):
        ObjectStore().download(address, tmp_path / "back", expected, digest)
    (part,) = tmp_path.glob(".back.*.part")
    assert part.stat().st_size == 4 << 20
    proxy.requests.clear()
    ObjectStore().download(address, tmp_path / "back", expected, digest)
    assert len(proxy.requests) == 1
    assert (tmp_path / "back").read_bytes() == content


def test_a_store_keeps_what_is_written_and_says_what_is_missing(bucket, tmp_path: Path) -> None:
    (at, proxy), there, file = bucket, ObjectStore(retry_seconds=5), tmp_path / "file"
    base, one, odd = f"{at}/a", f"{at}/a/one", f"{at}/a/b c+d%é#1.txt"
    there.delete(one)
    assert (there.read(one), there.info(one), there.listing(base)) == (None, None, {})
    for content in (b"hello world", b"other", b""):
        there.write(one, content)
        assert there.read(one) == content
    there.write(odd, b"hello world")
    assert there.read_range(odd, 1, 3) == b"el"
    assert [there.create(f"{base}/new/1", content) for content in (b"1", b"1", b"2")] == [True, True, False]
    assert not there.create_can_overwrite(f"{base}/new/1", b"1")
    assert (there.info(f"{base}/new"), there.listing(one), there.listing(f"{base}/n")) == (None, {}, {})
    for size in (17 << 20, 17 << 20, 1, 0):  # in parts, and once more
        file.write_bytes(np.random.default_rng(size).bytes(size))
        there.upload(file, f"{base}/{size}")
        facts = there.listing(base)[str(size)]
        assert there.info(f"{base}/{size}") == facts
        for digest in ("", hashlib.sha256(file.read_bytes()).hexdigest()):
            there.download(f"{base}/{size}", tmp_path / "back", facts, digest)
            assert (tmp_path / "back").read_bytes() == file.read_bytes()
    there.delete(one)
    assert there.listing(base).keys() == {odd[len(base) + 1 :], "new/1", "0", "1", str(17 << 20)}
    calls = [there.read, there.info, there.listing, there.delete, functools.partial(there.upload, file)]
    for call in (*calls, *(functools.partial(one, content=b"x") for one in (there.write, there.create))):
        with pytest.raises(InputError, match=r"Create the bucket, or correct its name"):
            call(address=f"{at}-that-is-not-there/a")
        proxy.plan = [Fault("403", ".*", 100)]
        with pytest.raises(InputError, match=r"cannot be .* Check the credentials"):
            call(address=odd)
        proxy.plan = []


def test_missing_credentials_are_named(proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    forget_clients(monkeypatch)
    with pytest.raises(InputError, match=r"s3://bucket/a: cannot be written: .*AWS_ACCESS_KEY_ID and AWS_SECRET"):
        ObjectStore().write(f"s3://{BUCKET}/a", b"x")


def test_a_store_that_stays_away_is_given_up_after_the_time(proxy: FaultyProxy) -> None:
    proxy.plan = [Fault("drop", ".*", 10_000)]
    with pytest.raises(MachineError, match=r"s3://bucket/a: cannot be read; \d attempts in \d+ s \(.*\)\. Check"):
        ObjectStore(retry_seconds=0.5).read(f"s3://{BUCKET}/a")


def test_what_takes_longer_than_the_time_for_retries_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now, attempts = [0.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def upload(failures: int) -> int:
        sleep(500.0)
        attempts.append(now[0])
        if len(attempts) <= failures:
            raise ConnectionResetError("cut")
        return len(attempts)

    monkeypatch.setattr(objects, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    patient = ObjectStore(retry_seconds=60.0)
    assert patient._retry(f"s3://{BUCKET}/a", "stored", lambda: upload(1)) == 2
    attempts.clear()
    with pytest.raises(MachineError, match=r"cannot be stored; 2 attempts in 100\d s \(cut\)"):
        patient._retry(f"s3://{BUCKET}/a", "stored", lambda: upload(2))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(InputError, match=r"Run: .* -m pip install 'bertrain\[abfs\]'"):
        ObjectStore().read("abfs://container@account.dfs.core.windows.net/a")


def test_what_the_client_does_not_try_again_is_tried_again_here(proxy: FaultyProxy, tmp_path: Path) -> None:
    address = f"s3://{BUCKET}/folder/a"
    proxy.plan = [Fault("500", method, 2) for method in ("PUT", "list-type=2", "HEAD", "GET .*folder/a", "DELETE")]
    path = tmp_path / "a"
    path.write_bytes(b"x")
    objects = ObjectStore()
    objects.upload(path, address)
    assert list(objects.listing(f"s3://{BUCKET}/folder")) == ["a"]
    assert objects.read(address) == b"x"
    objects.delete(address)
    assert objects.info(address) is None
    assert not proxy.plan


def test_files_are_fetched_again_if_their_objects_changed(proxy: FaultyProxy) -> None:
    address = f"s3://{BUCKET}/texts/a.txt"
    ObjectStore().write(address, b"old")
    folders.fetch_files(f"s3://{BUCKET}/texts")
    proxy.requests.clear()
    folders.fetch_files(f"s3://{BUCKET}/texts")
    assert not [request for request in proxy.requests if request.startswith("GET") and "a.txt" in request]
    ObjectStore().write(address, b"new")
    os.utime(local_path(address), (1e9, 1e9))  # S3 tells whole seconds
    proxy.plan = [Fault("500", "HEAD .*a.txt")]  # the last request of a download
    (path,) = folders.fetch_files(f"s3://{BUCKET}/texts")
    assert path.read_bytes() == b"new"
    assert not proxy.plan


def test_patterns_match_as_those_of_local_files(proxy: FaultyProxy) -> None:
    for name in ("a.txt", "b.jsonl", "inner/c.txt", "inner/deep/d.txt.gz", "inner/.hidden.txt"):
        ObjectStore().write(f"s3://{BUCKET}/texts/{name}", b"x")
    base = f"s3://{BUCKET}/texts"

    def found(end: str) -> list[str]:
        return [name.removeprefix(f"{base}/") for name in folders.find(f"{base}{end}")]

    assert found("") == ["a.txt", "b.jsonl", "inner/.hidden.txt", "inner/c.txt", "inner/deep/d.txt.gz"]
    assert found("/*.txt") == ["a.txt"]
    assert found("/**/d**.txt.**") == ["inner/deep/d.txt.gz"]
    assert found("/**/*.txt*") == ["a.txt", "inner/.hidden.txt", "inner/c.txt", "inner/deep/d.txt.gz"]
    assert found("/a.txt") == ["a.txt"]
    assert found("/nothing") == []


def test_what_is_left_out_at_an_address_is_counted(proxy: FaultyProxy) -> None:
    base, card = f"s3://{BUCKET}/own", ("corpus/manifest.json", "corpus/card.json", "corpus/vocab.txt")
    for name in ("a.txt", "b/c.txt", "b/.hidden.txt", ".cache/d/e.txt", *card):
        ObjectStore().write(f"{base}/{name}", b"x")

    def found(path: str) -> tuple[list[str], dict[str, int]]:
        inputs = list_inputs(SourceConfig(kind="books", path=path), "corpus.sources.0")
        names = [one.removeprefix(f"{base}/") for item in inputs for one in item.paths]
        return names, {one["fault"]: one["count"] for item in inputs for one in item.problems}

    assert found(base) == (["a.txt", "b/c.txt"], {listing.HIDDEN: 2, listing.PREPARED: 1})
    assert found(f"{base}/**/*.txt") == found(base)
    assert found(f"{base}/b/.hidden.txt") == (["b/.hidden.txt"], {})
    assert found(f"{base}/.cache") == found(f"{base}/.*/*/*.txt") == ([".cache/d/e.txt"], {})


class Container(MemoryFileSystem):
    """Stands in for Azure's file system: the account is in the address, and nothing is known of S3's options."""

    protocol = "abfs"
    store: dict[str, Any] = {}  # noqa: RUF012 (as in the class above)
    pseudo_dirs = ["", "/container"]  # noqa: RUF012
    accounts: set[str] = set()  # noqa: RUF012

    def __init__(self, account_name: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.accounts.add(account_name)

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert not options
        super().put_file(lpath, rpath)

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        return {"account_name": path.split("@")[1].split(".")[0]}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        bucket, _, rest = path.removeprefix("abfs:/").strip("/").partition("/")
        return f"/{bucket.split('@')[0]}/{rest}".rstrip("/")


@pytest.fixture
def container(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("BERTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(_registry, "abfs", Container)
    forget_clients(monkeypatch)


@pytest.mark.parametrize("said", [0, 1])
def test_a_store_that_ignores_conditions_is_named_at_the_start(container, tmp_path, monkeypatch, caplog, said) -> None:
    if said:
        pipe_file = MemoryFileSystem.pipe_file
        monkeypatch.setattr(Container, "pipe_file", lambda self, path, value, mode="": pipe_file(self, path, value))
    with storing(f"abfs://container@{ACCOUNT}/{said}", tmp_path, resume=False):
        pass
    assert caplog.text.count("two launchers could train this run") == said


def test_what_other_clients_say_otherwise_is_understood(container, monkeypatch) -> None:
    there, address = ObjectStore(retry_seconds=0), f"abfs://container@{ACCOUNT}/none"
    for call in (there.read, there.info, there.listing, there.delete):
        assert not call(address)
        with pytest.raises(InputError, match=r"/a: the bucket does not exist\. Create the bucket"):
            call(f"abfs://nowhere@{ACCOUNT}/a")  # of which nothing says more than of a missing object
    monkeypatch.setattr(Container, "find", lambda _, path, detail: [path])  # an object's own name, of adlfs
    assert there.listing(address) == {}
    # What gcsfs makes of 403
    monkeypatch.setattr(Container, "cat_file", Mock(side_effect=OSError("Forbidden: b/{}/o\nno permission")))
    with pytest.raises(InputError, match=r"cannot be read: .*Check the credentials"):
        there.read(address)


def test_other_stores_get_the_account_of_the_address_and_no_option_of_s3(container, tmp_path) -> None:
    address = f"abfs://container@{ACCOUNT}/exports/one"
    folders.store(make_folder(tmp_path / "export", a="1", b="2"), address)
    verify_manifest(folders.fetch(address))
    assert (local_path(address) / "b").read_text() == "2"
    assert Container.accounts == {"mine"}


WHEN = datetime.datetime(2026, 3, 1, tzinfo=datetime.timezone.utc)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"size": 5, "ETag": '"a"', "LastModified": WHEN}, ListedObject(5, '"a"', WHEN.timestamp())),  # s3fs
        ({"size": 5, "etag": "a", "mtime": WHEN, "updated": "2026"}, ListedObject(5, "a", WHEN.timestamp())),  # gcsfs
        ({"size": 5, "etag": "a", "last_modified": WHEN}, ListedObject(5, "a", WHEN.timestamp())),  # adlfs
        ({"size": 5, "blob_id": "a", "last_commit": None}, ListedObject(5, "a", float(0xCA97811))),  # huggingface_hub
    ],
)
def test_facts_of_each_library_are_understood(facts: dict[str, Any], expected: ListedObject) -> None:
    assert _to_listed_object(facts) == expected


def make_saver(run: StoredRun, folder: Path, rank: Rank | None = None) -> Saver:
    group = rank or Rank(0, Ranks(1))
    return Saver(folder / "checkpoints", group, keep_last=1, retry_seconds=0.0, stored_run=run)


def save_on_two_ranks() -> list[Saver]:
    """The savers of the ranks of `RUN`, after its first checkpoint."""
    ranks = Ranks(2)

    def train(rank: int) -> Saver:
        saver = make_saver(StoredRun(RUN, local_path(RUN)), local_path(RUN), Rank(rank, ranks))
        save(saver, 1)
        return saver

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(train, range(2)))


def save(saver: Saver, step: int, value: float | None = None, **state: Any) -> None:
    fragment = Fragment("a", 0, {"weight": torch.full((4,), float(step if value is None else value))}, replicated=False)
    saver.save(step, [fragment], {"step": step, "shapes": {"a": [4]}, "validation_set": "0", **state})
    saver.wait()


def kept(folder: Path) -> list[str]:
    return [path.name for path in store.list_checkpoints(folder / "checkpoints")]


def test_a_store_that_fails_does_not_end_the_run_and_the_next_checkpoint_is_stored(proxy: FaultyProxy) -> None:
    run = StoredRun(RUN, local_path(RUN), retry_seconds=0.2)
    saver = make_saver(run, local_path(RUN))
    save(saver, 1, validation_loss=1.0)
    assert not saver.trouble
    proxy.plan = [Fault("drop", "PUT .*step-00000002/rank", 10_000)]
    save(saver, 2)
    assert "step-00000002 is not stored at s3://bucket/runs/a, only in" in saver.trouble
    assert not saver.failed
    assert StoredRun(RUN, local_path(RUN)).checkpoint_names() == ["step-00000001"]
    saver.trouble, proxy.plan = "", []
    save(saver, 3)
    save(saver, 4)
    assert not saver.trouble
    # The newest, and the best.
    assert StoredRun(RUN, local_path(RUN)).checkpoint_names() == ["step-00000001", "step-00000004"]
    assert not [name for name in ObjectStore().listing(f"{RUN}/checkpoints") if "00000003" in name]


def test_a_checkpoint_without_its_manifest_does_not_exist(proxy: FaultyProxy) -> None:
    folder = local_path(RUN)
    saver = make_saver(StoredRun(RUN, folder, retry_seconds=0.2), folder)
    save(saver, 1)
    proxy.plan = [Fault("403", "PUT .*step-00000002/manifest.json")]
    save(saver, 2)
    assert "step-00000002 is not stored" in saver.trouble
    shutil.rmtree(folder)
    StoredRun(RUN, folder).download()
    assert kept(folder) == ["step-00000001"]
    assert store.read_weights(folder / "checkpoints" / "step-00000001")["a"].tolist() == [1.0] * 4


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000-of-00001.safetensors"])
def test_a_damaged_stored_checkpoint_is_skipped(proxy: FaultyProxy, file: str) -> None:
    folder = local_path(RUN)
    run = StoredRun(RUN, folder)
    saver = make_saver(run, folder)
    save(saver, 1, validation_loss=1.0)
    save(saver, 2)
    (damaged,) = (name for name in ObjectStore().listing(RUN) if f"step-00000002/{file}" in name)
    damaged = f"{RUN}/{damaged}"
    content = ObjectStore().read(damaged) or b""
    ObjectStore().write(damaged, content[:-1] + b"?")
    shutil.rmtree(folder)
    StoredRun(RUN, folder).download()
    assert kept(folder) == ["step-00000001"]


def test_a_checkpoint_that_was_damaged_here_is_fetched_again(proxy, monkeypatch) -> None:
    folder = local_path(RUN)
    save(make_saver(StoredRun(RUN, folder), folder), 1)
    shard = folder / "checkpoints/step-00000001/rank-00000-of-00001.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + b"!")
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    launch.download(RUN)
    assert shard.read_bytes() != content, "torchrun's first process looks at the content for all"
    monkeypatch.setenv("RANK", "0")
    launch.download(RUN)
    assert shard.read_bytes() == content
    verify_manifest(shard.parent)


def test_a_follower_asks_for_nothing_while_others_wait_for_it(proxy, monkeypatch) -> None:
    folder, asked = local_path(RUN), []
    saver = make_saver(StoredRun(RUN, folder), folder)
    save(saver, 1, validation_loss=1.0)
    save(saver, 2, validation_loss=2.0)
    shutil.rmtree(folder)

    @contextlib.contextmanager
    def counted(path: Path) -> Iterator[bool]:
        before = len(proxy.requests)
        with locked(path) as held:
            yield held
            asked.append(len(proxy.requests) - before)

    monkeypatch.setattr(runs, "locked", counted)
    for follows, names in ((True, ["step-00000002"]), (False, ["step-00000001", "step-00000002"])):
        StoredRun(RUN, folder).download(best=not follows, is_follower=follows)
        assert checkpoint_names(folder) == names
    for _ in range(2):
        StoredRun(RUN, folder).download(is_follower=True)
    assert [count > 0 for count in asked] == [True, True, False, False]


def test_a_checkpoint_that_may_not_be_read_is_not_skipped_as_damaged(proxy: FaultyProxy) -> None:
    folder = local_path(RUN)
    saver = make_saver(StoredRun(RUN, folder), folder)
    save(saver, 1)
    save(saver, 2)
    shutil.rmtree(folder)
    proxy.plan = [Fault("403", "GET .*step-00000002/rank")]
    with pytest.raises(InputError, match=r"step-00000002/rank.*Check the credentials"):
        StoredRun(RUN, folder).download()
    StoredRun(RUN, folder).download()
    assert kept(folder) == ["step-00000002"]


def test_a_checkpoint_that_is_written_again_is_withdrawn_first(proxy: FaultyProxy) -> None:
    saver = make_saver(StoredRun(RUN, local_path(RUN), retry_seconds=0.2), local_path(RUN))
    save(saver, 1)
    proxy.plan = [Fault("403", "PUT .*step-00000001/rank")]
    save(saver, 1)
    assert StoredRun(RUN, local_path(RUN)).checkpoint_names() == []
    save(saver, 1)
    assert StoredRun(RUN, local_path(RUN)).checkpoint_names() == ["step-00000001"]


def test_every_rank_stores_its_part_and_one_process_of_a_machine_fetches_them(proxy: FaultyProxy) -> None:
    folder = local_path(RUN)
    proxy.plan = [Fault("503", "PUT .*rank-00001"), Fault("lost", "PUT .*rank-00000")]
    assert not any(saver.trouble for saver in save_on_two_ranks())
    weights = store.read_weights(folder / "checkpoints/step-00000001")["a"]
    shutil.rmtree(folder)
    proxy.requests.clear()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: StoredRun(RUN, folder).download(), range(2)))
    fetched = [request.split("/")[-1] for request in proxy.requests if "GET" in request and ".safetensors" in request]
    names = [name.rpartition(".")[0] for name in sorted(fetched)]
    assert names == [f"rank-0000{rank}-of-00002.safetensors" for rank in range(2)]
    assert torch.equal(store.read_weights(folder / "checkpoints/step-00000001")["a"], weights)


def test_a_run_that_saves_while_it_is_read_is_read_from_its_newest_checkpoint(proxy, tmp_path, monkeypatch) -> None:
    saver = make_saver(StoredRun(RUN, tmp_path / "run"), tmp_path / "run")
    save(saver, 1, validation_loss=1.0)  # the best, which is kept
    save(saver, 2)
    download = ObjectStore.download

    def slow(self: ObjectStore, *given: Any) -> None:
        if not (tmp_path / "run/checkpoints/step-00000004").exists():
            for step in (3, 4):
                save(saver, step)
        download(self, *given)

    monkeypatch.setattr(ObjectStore, "download", slow)
    monkeypatch.setattr(folders, "MAX_CONCURRENT", 1)
    folder = fetched_model(RUN)
    assert store.list_checkpoints(folder / "checkpoints") == [folder / "checkpoints" / "step-00000004"]
    assert store.latest(folder / "checkpoints") is not None


def test_machines_that_share_the_run_folder_fetch_a_checkpoint_once(proxy, tmp_path, monkeypatch) -> None:
    save(make_saver(StoredRun(RUN, tmp_path / "first"), tmp_path / "first"), 1)
    monkeypatch.setattr(folders, "cache_folder", lambda: tmp_path / threading.current_thread().name)  # each has its own
    proxy.requests.clear()
    proxy.plan = [Fault("slow", "GET .*safetensors", 2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: StoredRun(RUN, tmp_path / "shared").download(), range(2)))
    assert len([request for request in proxy.requests if "GET" in request and ".safetensors" in request]) == 1


def test_a_rank_that_cannot_store_leaves_no_manifest(proxy: FaultyProxy) -> None:
    proxy.plan = [Fault("403", "PUT .*rank-00001")]
    troubles = [saver.trouble for saver in save_on_two_ranks()]
    assert ["/rank-00001-of-00002.safetensors." in trouble for trouble in troubles] == [True, True]
    assert StoredRun(RUN, local_path(RUN)).checkpoint_names() == []


def test_what_interrupted_saves_left_is_deleted_with_the_next_checkpoint(proxy: FaultyProxy) -> None:
    for name in ("step-00000001/rank-00003-of-00004.safetensors", "step-00000009/state.json", "other/file"):
        ObjectStore().write(f"{RUN}/checkpoints/{name}", b"x")
    save(make_saver(StoredRun(RUN, local_path(RUN)), local_path(RUN)), 2)
    listed = {name.split("/")[0] for name in ObjectStore().listing(f"{RUN}/checkpoints")}
    assert listed == {"other", "step-00000002", "step-00000009"}


def test_files_of_a_checkpoint_that_is_stored_once_more_are_deleted(proxy: FaultyProxy, tmp_path: Path) -> None:
    """After a rollback or a resume, a step need not have the same values."""
    run = StoredRun(RUN, tmp_path)
    run.claim()
    saver = make_saver(run, tmp_path)
    for value in (1.0, 2.0, 3.0):
        save(saver, 1, value, validation_loss=0.5)
    save(saver, 2, validation_loss=1.0)
    listed = ObjectStore().listing(f"{RUN}/checkpoints")
    assert len([name for name in listed if name.startswith("step-00000001/rank-")]) == 1
    StoredRun(RUN, tmp_path / "fresh").download(best=True)
    assert store.read_weights(tmp_path / "fresh/checkpoints/step-00000001")["a"].tolist() == [3.0] * 4


def test_the_last_start_of_a_run_is_the_one_that_stores(proxy: FaultyProxy, tmp_path: Path) -> None:
    here, there = (StoredRun(RUN, tmp_path / name) for name in ("here", "there"))
    here.claim()
    saver = make_saver(here, tmp_path / "here")
    save(saver, 1)
    assert saver.trouble == ""
    there.claim()
    before = sorted(ObjectStore().listing(RUN))
    save(saver, 2)
    assert f"{RUN}: the run was started again on {socket.gethostname()} at 20" in saver.trouble
    assert saver.trouble.endswith(f"this one keeps its checkpoints in {tmp_path / 'here'}.")
    with pytest.raises(InputError, match="only the last start may write there"):
        here.complete()
    assert sorted(ObjectStore().listing(RUN)) == before
    other = make_saver(there, tmp_path / "there")
    save(other, 3)
    assert other.trouble == ""
    assert StoredRun(RUN, tmp_path / "fresh").checkpoint_names()[-1] == "step-00000003"


def test_starts_at_the_same_time_have_different_numbers(proxy: FaultyProxy, tmp_path: Path, monkeypatch) -> None:
    """One of them is the last; an answer that is lost, or an object that is there, is no other start."""
    proxy.plan = [Fault("lost", "PUT .*writer-1"), Fault("503", "PUT .*writer-2")]
    runs_there = [StoredRun(RUN, tmp_path / str(number)) for number in range(4)]
    runs_there[0].claim()
    seen, listing = threading.Barrier(3), ObjectStore.listing

    def together(self: ObjectStore, address: str) -> dict[str, ListedObject]:
        found = listing(self, address)
        seen.wait()
        return found

    with monkeypatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(ObjectStore, "listing", together)
        list(pool.map(StoredRun.claim, runs_there[1:]))
    assert not proxy.plan
    assert sorted(listing(ObjectStore(), RUN)) == [f"writers/writer-{number}" for number in (1, 2, 3, 4)]
    troubles = []
    for number, run in enumerate(runs_there):
        saver = make_saver(run, tmp_path / str(number))
        save(saver, 1)
        troubles.append("the run was started again" in saver.trouble)
    assert sorted(troubles) == [False, True, True, True]


def test_a_late_upload_of_a_replaced_start_overwrites_nothing(proxy, tmp_path, monkeypatch) -> None:
    here, there = (StoredRun(RUN, tmp_path / name) for name in ("here", "there"))
    here.claim()
    put = StoredRun.put

    def stall(self: StoredRun, *given: Any) -> None:
        if self is here and not (tmp_path / "there").exists():
            there.claim()
            save(make_saver(there, tmp_path / "there"), 1, 99.0)
        put(self, *given)

    monkeypatch.setattr(StoredRun, "put", stall)
    saver = make_saver(here, tmp_path / "here")
    save(saver, 1)
    assert "the run was started again" in saver.trouble
    StoredRun(RUN, tmp_path / "fresh").download()
    (checkpoint,) = store.list_checkpoints(tmp_path / "fresh" / "checkpoints")
    assert store.read_weights(checkpoint)["a"].tolist() == [99.0] * 4
    save(make_saver(there, tmp_path / "there"), 2)
    listed = ObjectStore().listing(f"{RUN}/checkpoints")
    assert not [name for name in listed if "step-00000001" in name], "what came late is deleted too"


def test_a_start_that_fails_before_a_checkpoint_gives_the_run_back(proxy: FaultyProxy, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    run = StoredRun(RUN, here)
    run.claim()
    saver = make_saver(run, here)
    save(saver, 1)
    run.put_files()
    StoredRun(RUN, there).download(best=True)
    for end in ("--resume by mistake", "and again"):
        with pytest.raises(MachineError, match=end), storing(RUN, there, resume=True):
            raise MachineError(end)
        assert not (there / "writer.json").exists()
    save(saver, 2)
    assert saver.trouble == ""
    with contextlib.suppress(MachineError), storing(RUN, there, resume=True):
        save(make_saver(StoredRun(RUN, there), there), 3)
        raise MachineError("after a checkpoint")
    save(saver, 4)
    assert "the run was started again" in saver.trouble


def test_a_start_whose_largest_batch_does_not_fit_leaves_the_run_to_the_one_that_trains(proxy, tmp_path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    run = StoredRun(RUN, here)
    run.claim()  # and trains, with nothing stored yet
    with pytest.raises(MachineError, match=r"does not fit$"), storing(RUN, there, resume=False):
        fail_untrained(there)
    assert sorted(ObjectStore().listing(RUN)) == ["writers/writer-1"]
    saver = make_saver(run, here)
    save(saver, 1)
    assert saver.trouble == ""


def fail_untrained(folder: Path) -> None:
    """As a new run, which writes a checkpoint before it tries its largest batch."""
    fragment = Fragment("a", 0, {"weight": torch.zeros(4)}, replicated=False)
    writing.save(folder / "checkpoints", 0, [fragment], {"step": 0, "shapes": {"a": [4]}}, Rank(0, Ranks(1)))
    raise MachineError("the largest micro-batch does not fit")


def test_untrained_weights_are_not_stored(proxy: FaultyProxy, tmp_path: Path) -> None:
    with contextlib.suppress(MachineError), storing(RUN, tmp_path, resume=False):
        (tmp_path / "config.yaml").write_text("name: mine")
        fail_untrained(tmp_path)
    assert StoredRun(RUN, tmp_path).checkpoint_names() == []
    assert ObjectStore().read(f"{RUN}/config.yaml") == b"name: mine"


def test_a_start_that_gives_the_run_back_stores_nothing(proxy: FaultyProxy, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    run = StoredRun(RUN, here)
    run.claim()
    saver = make_saver(run, here)
    write_files(here, "10")
    save(saver, 10)
    StoredRun(RUN, there).download(best=True)
    write_files(here, "20")
    save(saver, 20)  # which removes step 10
    run.end()
    stored = contents(RUN)
    for error in (MachineError("no GPU"), RuntimeError("a bug")):
        with contextlib.suppress(type(error)), storing(RUN, there, resume=True):
            write_files(there, "another")
            raise error
        assert contents(RUN) == stored


def write_files(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    for name in ("config.yaml", "metrics.jsonl"):
        (folder / name).write_text(f"{text}\n")


def contents(address: str) -> dict[str, bytes | None]:
    return {name: ObjectStore().read(f"{address}/{name}") for name in ObjectStore().listing(address)}


@pytest.mark.parametrize("earlier", [True, False])
def test_a_claim_that_fails_is_undone(proxy, tmp_path, monkeypatch, earlier) -> None:
    if earlier:
        StoredRun(RUN, tmp_path / "here").claim()
    before = [*ObjectStore().listing(RUN)]

    def fail(path: Path) -> Any:
        raise MachineError(f"{path}: disk full")

    monkeypatch.setattr(runs, "atomic_open", fail)
    with pytest.raises(MachineError, match=r"disk full$"), storing(RUN, tmp_path / "there", resume=False):
        pass
    assert [*ObjectStore().listing(RUN)] == before == ["writers/writer-1"] * earlier


@pytest.mark.parametrize("error", [MachineError("no memory"), RuntimeError("a bug"), KeyboardInterrupt()])
def test_what_a_start_leaves_is_stored_however_it_ends(proxy: FaultyProxy, error: BaseException) -> None:
    folder = local_path(RUN)

    def start() -> None:
        with storing(RUN, folder, resume=False):
            save(make_saver(StoredRun(RUN, folder), folder), 1)
            (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
            raise error

    with pytest.raises(type(error)):
        start()
    assert ObjectStore().read(f"{RUN}/metrics.jsonl") == b'{"step": 1}\n{"step": 2}\n'


def test_a_start_elsewhere_while_tensors_are_stored_is_noticed(proxy: FaultyProxy, tmp_path: Path) -> None:
    here, there = (StoredRun(RUN, tmp_path / name) for name in ("here", "there"))
    here.claim()
    checkpoint = tmp_path / "here" / "checkpoints" / "step-00000001"
    make_folder(checkpoint, **{"state.json": "{}"})
    here.unpublish(checkpoint.name)
    there.claim()
    with pytest.raises(InputError, match="the run was started again"):
        here.publish(checkpoint)
    assert StoredRun(RUN, tmp_path / "fresh").checkpoint_names() == []


def test_a_fetch_that_ends_between_the_checkpoint_and_the_small_files_goes_on(proxy, monkeypatch) -> None:
    """Otherwise the run would begin new records, and store them over the old ones."""
    folder = local_path(RUN)
    save(make_saver(StoredRun(RUN, folder), folder), 1)
    ObjectStore().write(f"{RUN}/metrics.jsonl", b"old\n")
    shutil.rmtree(folder)

    def stop(_: StoredRun) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StoredRun, "download_files", stop)
        with pytest.raises(KeyboardInterrupt):
            StoredRun(RUN, folder).download()
    assert store.list_checkpoints(folder / "checkpoints")
    StoredRun(RUN, folder).download()
    assert (folder / "metrics.jsonl").read_text() == "old\n"
    (folder / "metrics.jsonl").write_text("new\n")
    StoredRun(RUN, folder).download()
    assert (folder / "metrics.jsonl").read_text() == "new\n", "only what was not fetched is fetched again"


def read_value(address: str) -> tuple[str, float, str]:
    """What a reader sees of a run: the newest checkpoint, its value and the config's text."""
    fetched_model.cache_clear()
    folder = fetched_model(address)
    newest = store.latest(folder / "checkpoints")
    assert newest is not None
    return newest.name, store.read_weights(newest)["a"][0].item(), (folder / "config.yaml").read_text()


def test_a_run_that_was_deleted_and_trained_again_is_read_again_or_refused(proxy: FaultyProxy, tmp_path: Path) -> None:
    def train(value: float, step: int, *files: str) -> None:
        for name in ObjectStore().listing(RUN):
            ObjectStore().delete(f"{RUN}/{name}")
        folder = tmp_path / str(value)
        run = StoredRun(RUN, folder)
        save(make_saver(run, folder), step, value)
        for name in ("config.yaml", *files):
            (folder / name).write_text(f"{value}")
        run.complete()

    train(1.0, 10, "start.json")
    assert read_value(RUN) == ("step-00000010", 1.0, "1.0")
    train(2.0, 10)
    assert read_value(RUN) == ("step-00000010", 2.0, "2.0")
    assert not (local_path(RUN) / "start.json").exists()
    proxy.requests.clear()
    read_value(RUN)
    assert not [one for one in proxy.requests if ".safetensors" in one], "what is here is not fetched again"
    train(3.0, 5)
    for read in (read_value, launch.download):
        with pytest.raises(InputError, match=r"holds step-00000010, but s3://bucket/runs/a does not: .* Move this"):
            read(RUN)
    shutil.rmtree(local_path(RUN))
    assert read_value(RUN) == ("step-00000005", 3.0, "3.0")


def test_a_run_goes_on_here_unless_another_start_has_gone_on_elsewhere(proxy: FaultyProxy, tmp_path: Path) -> None:
    here, there = (StoredRun(RUN, tmp_path / name) for name in ("here", "there"))
    here.claim()
    save(make_saver(here, tmp_path / "here"), 1)
    proxy.plan = [Fault("403", "PUT .*step-0000000[23]/rank", 2)]
    for step in (2, 3):
        save(make_saver(here, tmp_path / "here"), step)
    StoredRun(RUN, tmp_path / "here").download()
    assert checkpoint_names(tmp_path / "here") == ["step-00000003"]
    there.download()
    there.claim()
    save(make_saver(there, tmp_path / "there"), 2)
    with pytest.raises(InputError, match=r"holds step-00000003, but .* the run was started again elsewhere"):
        StoredRun(RUN, tmp_path / "here").download()
    save(make_saver(there, tmp_path / "there"), 4)
    StoredRun(RUN, tmp_path / "here").download()
    assert checkpoint_names(tmp_path / "here") == ["step-00000003", "step-00000004"]


def test_files_of_a_released_model_that_were_deleted_are_not_read(proxy: FaultyProxy) -> None:
    address = f"s3://{BUCKET}/models/bert"
    for name in ("config.json", "model.safetensors"):
        ObjectStore().write(f"{address}/{name}", b"{}")
    (fetched_model(address) / "notes.txt").write_text("mine")
    ObjectStore().delete(f"{address}/model.safetensors")
    ObjectStore().write(f"{address}/pytorch_model.bin", b"{}")
    fetched_model.cache_clear()
    names = [path.name for path in fetched_model(address).iterdir() if not path.name.startswith(".")]
    assert sorted(names) == ["config.json", "notes.txt", "pytorch_model.bin"]


def test_a_manifest_of_another_program_is_a_file_as_others(proxy: FaultyProxy) -> None:
    address = f"s3://{BUCKET}/models/other"
    for name in ("config.json", "model.safetensors", "manifest.json"):
        ObjectStore().write(f"{address}/{name}", b'{"name": "my model", "version": 2}')
    assert (fetched_model(address) / "model.safetensors").is_file()
    ObjectStore().write(f"{address}/manifest.json", b'{"files"')  # may be one of ours
    fetched_model.cache_clear()
    with pytest.raises(InputError, match=r"manifest\.json: damaged"):
        fetched_model(address)


def test_a_resume_elsewhere_has_the_best_checkpoint_as_the_same_machine_has(proxy: FaultyProxy) -> None:
    """A fine-tuning ends with the best of the checkpoints in its folder."""
    folder = local_path(RUN)
    saver = make_saver(StoredRun(RUN, folder), folder)
    for step, loss in ((2, 0.5), (4, 0.7), (6, 0.8)):
        save(saver, step, validation_loss=loss)
    here = kept(folder)
    shutil.rmtree(folder)
    StoredRun(RUN, folder).download()  # to be read
    assert kept(folder) == ["step-00000006"]
    launch.download(RUN)
    assert kept(folder) == here
    assert store.best(folder / "checkpoints") == folder / "checkpoints" / "step-00000002"


def test_a_finished_fine_tuning_is_stored_without_checkpoints(proxy: FaultyProxy) -> None:
    folder = local_path(RUN)
    run = StoredRun(RUN, folder)
    save(make_saver(run, folder), 1)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step"')
    make_folder(folder / "model", **{"finetune.json": "{}"})
    shutil.rmtree(folder / "checkpoints")
    run.complete()
    assert sorted(ObjectStore().listing(RUN)) == [
        "metrics.jsonl",
        "model/finetune.json",
        "model/manifest.json",
    ]
    shutil.rmtree(folder)
    StoredRun(RUN, folder).download()
    verify_manifest(folder / "model")
    assert (folder / "metrics.jsonl").read_text() == '{"step": 1}\n', "a record that was half-written is not stored"

"""Runs and corpora in an object store: a real S3 server, and with `-m stores` others, behind a proxy that fails."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
import yaml
from corpora import make_corpus
from tiny_checkpoints import make_bert, write_reviews

from finetune.cli import main
from pretrain.checkpoint.tokenizer import corpus_of
from pretrain.common.addresses import local_path
from pretrain.common.errors import InputError, StoppedError
from pretrain.common.files import read_manifest, verify_manifest
from pretrain.common.worker import Worker
from pretrain.config import CorpusConfig, PretrainConfig
from pretrain.corpus.finish import PreparedCorpus
from pretrain.corpus.vocabulary import tokenizer_digest
from pretrain.run.session import check_shared
from pretrain.storage import folders
from pretrain.storage.objects import ObjectStore
from pretrain.storage.runs import StoredRun, fetched_model
from tests.distributed import run_program, run_workers
from tests.object_store import BUCKET, Fault, FaultyProxy
from tests.starts import _StopsAt, losses, pretraining

STEPS = 6


@dataclass
class Command:
    """One command of pretrain in a worker process; `stop_at` is the step in which a stop is asked for."""

    arguments: Sequence[str]
    stop_at: int = 0
    forget: str = ""  # a folder to delete first


def codes(commands: Sequence[Command]) -> list[int]:
    """Exit codes of the commands, one after another in this process."""
    if "AZURE_STORAGE_CONNECTION_STRING" in os.environ:  # its client waits 15 s before it tries again
        from azure.storage.blob.aio import ExponentialRetry  # pyright: ignore[reportMissingImports]

        ExponentialRetry.increment = lambda *_, **__: False
    found = []
    for command in commands:
        if command.forget:  # as on a fresh machine
            shutil.rmtree(command.forget, ignore_errors=True)
            fetched_model.cache_clear()
        Worker.from_environment = staticmethod(lambda step=command.stop_at: _StopsAt(0, 1, 0, 1, step=step))  # type: ignore[method-assign]
        found.append(main(list(command.arguments)))
    return found


def write_config(path: Path, corpus: Path | str, run_dir: Path | str) -> str:
    values = pretraining(Path("corpus"), Path("run"), [(32, 8, STEPS)], checkpoint__every_steps=2)
    values |= {"run_dir": str(run_dir), "corpus": {**values["corpus"], "dir": str(corpus)}}
    path.write_text(yaml.safe_dump(values))
    return str(path)


def killed(command: Command) -> None:
    """As `codes`, in a process that is killed where it would be asked to stop."""
    asked = _StopsAt.stop_requested
    _StopsAt.stop_requested = lambda self: asked(self) and os.kill(os.getpid(), signal.SIGKILL) is None
    codes([command])


def test_a_run_at_an_address_with_25_faults_and_a_kill_has_bitwise_the_losses_of_one_on_disk(
    bucket, corpus: Path, tmp_path: Path
) -> None:
    at, proxy = bucket
    address, text, put = f"{at}/runs/mini", f"{at}/corpora/one", "(PUT|POST) .*"
    folders.store(corpus, text)
    local_config = write_config(tmp_path / "local.yaml", corpus, tmp_path / "run")
    config = write_config(tmp_path / "stored.yaml", text, address)
    cache = str(tmp_path / "cache")
    kinds = "cut", "500", "drop", "503", "lost"
    others = "GET .*corpora.*manifest", "GET .*prefix=", f"{put}config.yaml", f"{put}.*rank", "GET .*metrics.jsonl"
    proxy.plan = [
        *(Fault(kind, f"GET .*train.*{part}") for kind in kinds for part in ("tokens", "sentences")),
        *(Fault("lost", f"{put}step-00000002.*{name}") for name in ("rank", "rank", "state.json")),
        *(Fault("503", request) for request in others),
        *(Fault("slow", request) for request in (r"GET .*documents\.npy", f"{put}metrics.jsonl")),
        Fault("drop", "(HEAD|GET) .*step-00000002.*rank"),
        Fault("drop", f"{put}step-0000000..*manifest.json", 2),
        Fault("drop", f"{put}writer-", 2),
        Fault("cut", "GET .*step-0000000[24].*rank", 2),
        Fault("500", f"{put}step-00000006.*state.json"),
    ]

    def changed(name: str, *changes: str) -> list[str]:
        settings = (f"run_dir={tmp_path / name}", "phases.0.steps=1", *changes)
        return [part for setting in settings for part in ("--set", setting)]

    there = ["pretrain", config, "--no-ray", "--set", "corpus.cache=1MB"]
    full = changed("more", f"corpus.dir={text}")
    assert run_program(killed, Command(there, stop_at=5)).returncode == -signal.SIGKILL
    commands = [
        Command(["pretrain", local_config, "--no-ray"]),
        Command([*there, "--resume"], forget=cache),
        Command(["export", address, f"{at}/exports/mini"], forget=cache),
        Command(["pretrain", local_config, "--no-ray", *full, "--from", f"{at}/exports/mini"]),
        Command(["pretrain", local_config, "--no-ray", *changed("student", f"distillation.teacher={address}")]),
    ]
    assert run_workers(1, codes, commands) == [[0, 0, 0, 0, 0]]
    assert not proxy.plan
    assert len(proxy.happened) >= 25
    folder = local_path(address)
    assert (folder / "metrics.jsonl").read_bytes() == ObjectStore().read(f"{address}/metrics.jsonl")
    assert losses(folder) == losses(tmp_path / "run")
    assert [step for step, _ in losses(folder)] == list(range(1, STEPS + 1))
    assert _weights(folder, STEPS) == _weights(tmp_path / "run", STEPS)
    assert StoredRun(address, folder).checkpoint_names() == ["step-00000004", "step-00000006"]
    for name in ("more", "student"):
        assert len(losses(tmp_path / name)) == 1
    verify_manifest(folders.fetch(f"{at}/exports/mini"))


def test_a_run_at_an_address_forks_from_another_there(proxy: FaultyProxy, corpus: Path, tmp_path: Path) -> None:
    """The command line of a fork, a job's first start with --resume, and a second fork of a kept step."""
    address, cache = f"s3://{BUCKET}/runs/stem", str(tmp_path / "cache")
    config = write_config(tmp_path / "run.yaml", corpus, address)
    keep = ["--set", "checkpoint.keep_last=1", "--set", "checkpoint.keep_at=[2]"]

    def forked(name: str, *more: str, at: int = 2) -> list[str]:
        run = ["--set", f"run_dir=s3://{BUCKET}/runs/{name}", "--set", f"name={name}"]
        return ["pretrain", config, "--no-ray", "--fork", f"{address}@{at}", *run, *more]

    commands = [
        Command(["pretrain", config, "--no-ray", *keep]),
        Command(forked("same", "--resume"), forget=cache),
        Command(forked("none", at=3), forget=cache),
        Command(forked("other", "--set", "phases.0.steps=2", "--dry-run"), forget=cache),
        Command(forked("other", "--set", "phases.0.steps=5"), stop_at=2),
        Command(forked("other", "--set", "phases.0.steps=5")),
        Command(forked("other", "--set", "phases.0.steps=5", "--resume"), forget=cache),
    ]
    assert run_workers(1, codes, commands) == [[0, 0, 2, 2, 75, 2, 0]]
    assert StoredRun(address, local_path(address)).checkpoint_names() == ["step-00000002", "step-00000006"]
    stem, same, other = (stored_losses(f"s3://{BUCKET}/runs/{name}") for name in ("stem", "same", "other"))
    assert same == stem
    assert other[:2] == same[:2]
    assert len(other) == 5
    assert json.loads(ObjectStore().read(f"s3://{BUCKET}/runs/other/fork.json") or b"")["run"] == address


def stored_losses(address: str) -> list[float]:
    lines = (ObjectStore().read(f"{address}/metrics.jsonl") or b"").splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "lr" in record]


def _weights(folder: Path, step: int) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / f"checkpoints/step-{step:08d}").glob("*.safetensors")}


def test_a_fine_tuning_on_s3_starts_resumes_and_ends_there(proxy: FaultyProxy, tmp_path: Path) -> None:
    released, address, exported = (f"s3://{BUCKET}/{name}" for name in ("models/bert", "runs/task", "exports/task"))
    for file in make_bert(tmp_path / "bert").iterdir():
        ObjectStore().upload(file, f"{released}/{file.name}")
    write_reviews(tmp_path, train=32, dev=8)
    config, cache = tmp_path / "task.yaml", str(tmp_path / "cache")
    config.write_text(yaml.safe_dump(finetuning(tmp_path, start_from=released, run_dir=address)))
    command = ["finetune", str(config), "--no-ray"]
    proxy.plan = [Fault("503", "GET .*bert/model"), Fault("lost", "PUT .*model/model"), Fault("drop", "DELETE .*step-")]

    def again(*arguments: str) -> Command:
        return Command(arguments, forget=cache)

    commands = [
        Command(command, stop_at=2),
        again(*command),  # refused: there is a run
        again(*command, "--resume"),
        again("export", address, exported),
        again(*command, "--resume"),  # finished
        again(*command),  # refused: there is a model
        again(*command, "--set", f"run_dir={tmp_path / 'run'}"),
    ]
    assert run_workers(1, codes, commands) == [[75, 2, 0, 0, 0, 2, 0]]
    assert not proxy.plan
    stored = ObjectStore().listing(address)
    assert not [name for name in stored if name.startswith("checkpoints")]
    model = folders.fetch(f"{address}/model")
    assert (model / "model.safetensors").read_bytes() == (tmp_path / "run/model/model.safetensors").read_bytes()
    assert "model.safetensors" in ObjectStore().listing(exported)


def finetuning(folder: Path, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "name": "task",
        "max_length": 32,
        "classification": {"train": str(folder / "train.jsonl"), "dev": str(folder / "dev.jsonl")},
        "training": {"examples_per_step": 16, "epochs": 2.0},
        "engine": {"precision": "fp32", "compile": False, "micro_batch_tokens": 160},
        "tracking": {"log_every_steps": 1, "wandb": "off"},
    }
    return values | changes


def test_workers_that_do_not_share_the_run_folder_are_refused(proxy: FaultyProxy, tmp_path: Path) -> None:
    assert run_workers(2, sharing, str(tmp_path), False) == ["", ""]
    first, second = run_workers(2, sharing, str(tmp_path), True)
    assert first == second
    assert "s3://bucket/runs/a: worker 1 does not see" in first
    assert "Set BERTRAIN_RUNS" in first
    assert not list(tmp_path.rglob(".seen-*"))


def sharing(folder: str, apart: bool) -> str:
    """What `check_shared` says where the workers' run folders are `apart`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["BERTRAIN_RUNS"] = f"{folder}/{rank if apart else 0}"
    config = PretrainConfig.model_validate(
        pretraining(Path("c"), Path("r"), [(32, 8, 2)]) | {"run_dir": f"s3://{BUCKET}/runs/a"}
    )
    config.folder.mkdir(parents=True, exist_ok=True)
    try:
        check_shared(config, Worker(rank, size, rank, size))
    except InputError as error:
        return str(error)
    return ""


def test_a_corpus_that_was_prepared_again_since_it_was_fetched_is_fetched_again(proxy, tmp_path) -> None:
    address, run = f"s3://{BUCKET}/corpora/one", tmp_path / "run"
    folders.store(make_corpus(tmp_path / "corpus", documents=20, vocabulary_size=200), address)
    folders.fetch(address)
    other = make_corpus(tmp_path / "other", documents=20, vocabulary_size=300)
    folders.store(other, address)
    state = {"tokenizer": tokenizer_digest(other)}
    (run / "checkpoints/step-00000001").mkdir(parents=True)
    (run / "checkpoints/step-00000001/state.json").write_text(json.dumps(state))
    (run / "checkpoints/step-00000001/manifest.json").write_text("{}")
    corpus = CorpusConfig.model_validate({"dir": address})
    assert tokenizer_digest(corpus_of(run, corpus, state["tokenizer"])) == state["tokenizer"]
    folders.store(make_corpus(tmp_path / "third", documents=20, vocabulary_size=250), address)
    (local_path(address) / "vocab.txt").write_text("another")
    with pytest.raises(InputError, match="its tokenizer is not the one"):
        corpus_of(run, corpus, state["tokenizer"])


def text_of(seed: int, documents: int = 30) -> list[str]:
    random = np.random.default_rng(seed)
    words = [f"{a}{b}{c}" for a in "bdfglmnprst" for b in "aeiou" for c in ("n", "st", "ll", "rk", "")]
    return [" ".join(random.choice(words, 60)) + "." for _ in range(documents)]


def write_sources(folder: Path) -> Path:
    """A text file in a folder, compressed JSONL files and a Parquet file."""
    (folder / "books" / "inner").mkdir(parents=True)
    (folder / "books" / "inner" / "a.txt").write_text("\n\n".join(text_of(1)))
    (folder / "books" / "b.txt").write_text("\n\n".join(text_of(2)))
    for number in range(2):
        with gzip.open(folder / f"lines-{number}.jsonl.gz", "wt", compresslevel=1) as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in text_of(10 + number))
    pq.write_table(pa.table({"text": text_of(20)}), folder / "rows.parquet")
    return folder


def preparation(path: Path, corpus: str, sources: str) -> str:
    values = pretraining(Path("corpus"), Path("run"), [(32, 8, 2)])
    values["corpus"] = {
        "dir": corpus,
        "vocabulary": {"size": 300},
        "processes": 1,
        "min_document_words": 5,
        "validation_fraction": 0.1,
        "sources": [
            {"kind": "books", "path": f"{sources}/books"},
            {"kind": "jsonl", "path": f"{sources}/lines-*.jsonl.gz"},
            {"kind": "parquet", "path": f"{sources}/rows.parquet"},
        ],
    }
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_a_corpus_on_s3_is_that_on_disk_and_a_cut_upload_goes_on(proxy: FaultyProxy, tmp_path: Path, capsys) -> None:
    sources, address = write_sources(tmp_path / "texts"), f"s3://{BUCKET}/corpora/mine"
    objects = ObjectStore()
    for file in sorted(path for path in sources.rglob("*") if path.is_file()):
        objects.upload(file, f"s3://{BUCKET}/texts/{file.relative_to(sources)}")
    assert main(["prepare", preparation(tmp_path / "local.yaml", str(tmp_path / "corpus"), str(sources))]) == 0
    stored = preparation(tmp_path / "stored.yaml", address, f"s3://{BUCKET}/texts")
    assert main(["prepare", stored, "--dry-run"]) == 0
    assert not local_path(f"s3://{BUCKET}/texts").exists()
    proxy.plan = [
        Fault("cut", r"GET .*texts/books/b\.txt"),
        Fault("503", r"GET .*texts/rows", 2),
        Fault("drop", "list-type=2"),
        Fault("403", r"PUT .*corpora/mine/vocab\.txt"),
    ]
    assert main(["prepare", stored]) == 2  # the credentials are refused in the middle
    assert "corpora/mine/vocab.txt: cannot be stored" in capsys.readouterr().err
    assert objects.read(f"{address}/manifest.json") is None
    proxy.requests.clear()
    assert main(["prepare", stored]) == 0
    assert not proxy.plan
    tokens = [one for one in proxy.requests if "tokens.npy" in one and not one.startswith("HEAD")]
    assert not tokens, "files that were stored before are not stored again"
    files = read_manifest(tmp_path / "corpus")["files"]
    for name in files:
        if name not in ("card.json", "card.md"):
            assert objects.read(f"{address}/{name}") == (tmp_path / "corpus" / name).read_bytes(), name
    card = json.loads(objects.read(f"{address}/card.json") or b"")
    assert list(card["sources"][1]["file_hashes"]) == [f"s3://{BUCKET}/texts/lines-{n}.jsonl.gz" for n in (0, 1)]
    shutil.rmtree(tmp_path / "cache")  # on another machine
    capsys.readouterr()
    longer = ["--dry-run", "--set", "phases.0.steps=100"]
    assert main(["pretrain", stored, *longer, "--set", "corpus.cache=1MB"]) == 0
    said = capsys.readouterr().out
    assert main(["pretrain", str(tmp_path / "local.yaml"), *longer]) == 0
    local_said = capsys.readouterr().out
    (counts,) = [line for line in local_said.splitlines() if " documents, " in line and "train:" in line]
    assert counts in said
    shares = [[float(one) for one in re.findall(r"([\d.]+)% of the tokens, ", text)] for text in (said, local_said)]
    assert shares[0] == pytest.approx(shares[1], abs=3)
    assert len(shares[0]) == 3
    assert not list(local_path(address).glob("*.npy")), "a dry run fetches no tokens"
    assert main(["prepare", stored]) == 0
    assert "already prepared" in capsys.readouterr().out


def test_shards_are_stored_as_they_are_written_and_what_is_lost_there_is_stored_again(
    proxy: FaultyProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    address, objects = f"s3://{BUCKET}/corpora/{tmp_path.name}", ObjectStore()
    config = preparation(tmp_path / "run.yaml", address, str(write_sources(tmp_path / "texts")))

    def stopped(*_: Any) -> None:
        raise StoppedError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr(PreparedCorpus, "write", stopped)
        assert main(["prepare", config, "--set", "corpus.processes=2"]) != 0
    early = [name for name in objects.listing(address) if name.endswith(".npy")]
    assert len(early) >= 6
    assert objects.read(f"{address}/manifest.json") is None
    proxy.requests.clear()
    assert main(["prepare", config]) == 0
    assert not [one for one in proxy.requests if one.startswith("PUT") and any(name in one for name in early)]
    assert read_manifest(local_path(address))["files"].keys() >= set(early)
    lost = next(name for name in early if "tokens" in name)
    objects.delete(f"{address}/{lost}")
    capsys.readouterr()
    assert main(["prepare", config]) == 0
    said = capsys.readouterr().out
    assert f"{address}: stored; missing files were restored: {lost}\n" in said
    assert f"{address}: already prepared" in said
    assert objects.read(f"{address}/{lost}") == (local_path(address) / lost).read_bytes()
    objects.write(f"{address}/{lost}", b"cut")
    (local_path(address) / lost).unlink()
    capsys.readouterr()
    assert main(["prepare", config]) == 3
    assert f"{lost}: is missing or has another size" in capsys.readouterr().err


def test_without_an_address_no_client_is_imported() -> None:
    code = (
        "import sys, pretrain.common.commands, pretrain.run.launch, pretrain.corpus.stored\n"
        "import pretrain.storage.runs as runs\n"
        "runs.fetched_model('runs/mini')\n"
        "print(sorted({'fsspec', 's3fs', 'botocore', 'aiohttp'} & set(sys.modules)))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["corpus.dir=s3://bucket/nothing"], r"s3://bucket/nothing/manifest\.json: not found.* Run `prepare`"),
        (["corpus.dir=s3://nowhere/a"], r"s3://nowhere/a.*: .*bucket does not exist\. Create the bucket"),
        (["run_dir=s3://nowhere/a"], r"s3://nowhere/a.*: .*bucket does not exist\. Create the bucket"),
        (["run_dir=hf://me/run"], "run_dir: 'hf://me/run' is read-only. Use a local path"),
        (["run_dir=s3://bucket"], "run_dir: 's3://bucket' does not name a file or folder in a bucket. Use"),
        (["run_dir=ftp://host/run"], "run_dir: 'ftp://host/run' is an address with an unknown scheme. Use"),
        (
            ["start_from=s3://bucket/nothing"],
            "s3://bucket/nothing: no config.json, tokenizer or weights are stored there. Check the address.",
        ),
        (["corpus.vocabulary.path=s3://bucket/v.txt"], "vocabulary.path: 's3://bucket/v.txt' is a remote"),
    ],
)
def test_mistakes_are_reported_in_one_line(proxy, corpus, tmp_path, capsys, changes, message) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run")
    assert main(["pretrain", config, "--no-ray", *(part for one in changes for part in ("--set", one))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)


def test_a_source_without_files_is_named(proxy, tmp_path, capsys) -> None:
    config = preparation(tmp_path / "run.yaml", str(tmp_path / "corpus"), f"s3://{BUCKET}/texts")
    for arguments in (["--dry-run"], []):
        assert main(["prepare", config, *arguments]) == 2
        assert "corpus.sources.0.path: s3://bucket/texts/books: no books file found" in capsys.readouterr().err

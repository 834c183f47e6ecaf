"""A prepared corpus that takes further sources: the old ones stay, byte for byte, and win."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pretrain.common.addresses import local_path
from pretrain.common.errors import InputError
from pretrain.config import PretrainConfig, SourceConfig, load_config
from pretrain.corpus import finish
from pretrain.corpus.description import describe
from pretrain.corpus.prepare import prepare
from pretrain.corpus.shards import open_shards, verify_shards
from pretrain.corpus.stored import fetch_corpus
from pretrain.planning import estimate
from pretrain.storage.objects import ObjectStore
from tests.corpus.preparing import content, document_tokens, preparation
from tests.corpus.test_prepare import text
from tests.object_store import BUCKET, point_to

ROOT = Path(__file__).parents[2]
OLD, NEW = range(60), range(200, 240)


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts), encoding="utf-8")
    return path


def source(path: Path, **more: Any) -> SourceConfig:
    return SourceConfig(kind="jsonl", path=str(path), **{"name": path.stem, **more})


def config(corpus_dir: Path | str, *sources: SourceConfig, **changes: Any) -> PretrainConfig:
    return preparation(corpus_dir, sources, **changes)


@pytest.fixture
def first(tmp_path: Path) -> SourceConfig:
    return source(write_lines(tmp_path / "first.jsonl", [text(seed) for seed in OLD]))


@pytest.fixture
def second(tmp_path: Path) -> SourceConfig:
    return source(write_lines(tmp_path / "second.jsonl", [text(seed) for seed in NEW]))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of the text of `first`, which nobody writes to."""
    folder = tmp_path_factory.mktemp("first")
    prepare(config(folder / "corpus", source(write_lines(folder / "first.jsonl", [text(n) for n in OLD]))), quiet=True)
    return folder / "corpus"


@pytest.fixture
def folder(tmp_path: Path, alone: Path) -> Path:
    """A copy of it, to be grown."""
    return shutil.copytree(alone, tmp_path / "corpus")


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def documents(folder: Path, split: str, number: int) -> set[tuple[int, ...]]:
    """The tokens of each document of a source."""
    found = document_tokens(open_shards(folder, split), number)
    assert len(set(found)) == len(found)
    return set(found)


def tokens(folder: Path, one: str) -> tuple[int, ...]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tuple(tokenizer.encode(one.replace("\n", " "), add_special_tokens=False).ids)


def states(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of what the training reads, which a rewritten file would change."""
    paths = [path for path in folder.iterdir() if path.suffix in (".npy", ".hashes") or "token" in path.name]
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def test_a_further_source_leaves_the_others_as_they_are(tmp_path, first, second, folder) -> None:
    before, alone = states(folder), open_shards(folder, "train")
    grown = config(folder, first, second)
    described = describe(grown)
    assert described["bytes"] == (tmp_path / "second.jsonl").stat().st_size
    assert "grows by second; 0.0 MB to read" in estimate.preparation_lines(described)
    assert "second added in" in prepare(grown, quiet=True)
    assert {name: state for name, state in states(folder).items() if name in before} == before
    verify_shards(folder)
    both = open_shards(folder, "train")
    assert both.source_fingerprint(0) == alone.source_fingerprint(0) == manifest(folder)["sources"][0]["fingerprint"]
    assert both.source_fingerprint(1) == manifest(folder)["sources"][1]["fingerprint"]
    held_out, trained = (documents(folder, split, 1) for split in ("validation", "train"))
    assert held_out | trained == {tokens(folder, text(seed)) for seed in NEW}
    assert len(held_out) >= 2
    assert max(len(shard.tokens) for shard in both.shards) <= 4000
    card = json.loads((folder / "card.json").read_text())
    assert [one["documents"] for one in card["sources"]] == [len(OLD), len(NEW)]
    assert card["totals"]["documents"] == len(OLD) + len(NEW)
    assert [one["files"] for one in card["sources"]] == [1, 1]
    assert "already prepared" in prepare(grown, quiet=True)
    assert describe(grown)["state"] == "finished"


def test_the_bytes_do_not_depend_on_processes_or_on_other_new_sources(tmp_path, first, second) -> None:
    third = source(write_lines(tmp_path / "third.jsonl", [text(seed) for seed in range(300, 330)]))
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, processes, additions in ((one, 1, ([second], [second, third])), (two, 2, ([second, third],))):
        prepare(config(folder, first, processes=processes), quiet=True)
        for more in additions:
            (folder / ".work").mkdir()  # left by a growth of what the corpus was before
            (folder / ".work" / "settings.json").write_text('{"grows": "another"}')
            prepare(config(folder, first, *more, processes=processes), quiet=True)
    ours, theirs = open_shards(one, "train"), open_shards(two, "train")
    assert [ours.source_fingerprint(n) for n in range(3)] == [theirs.source_fingerprint(n) for n in range(3)]


def test_text_that_the_corpus_has_is_not_taken_again(tmp_path: Path, first: SourceConfig, folder: Path) -> None:
    held_out = documents(folder, "validation", 0)
    (seed,) = [seed for seed in OLD if tokens(folder, text(seed)) == min(held_out)]
    (other,) = [seed for seed in OLD if tokens(folder, text(seed)) == min(documents(folder, "train", 0))]
    texts = [text(seed) for seed in (*NEW, seed, other, NEW[0])]
    again = source(write_lines(tmp_path / "again.jsonl", texts))
    before = content(folder)
    trained = source(write_lines(tmp_path / "trained.jsonl", [text(other), text(900)]), held_out=True)
    with pytest.raises(InputError, match=r"1 document to hold out \(trained: 1 equal, 0 similar\): "):
        prepare(config(folder, first, again, trained), quiet=True)
    assert content(folder) == before
    assert not (folder / ".work").exists()
    evaluated = source(write_lines(tmp_path / "evaluated.jsonl", [text(seed), text(900)]), held_out=True)
    prepare(config(folder, first, again, evaluated), quiet=True)
    assert documents(folder, "validation", 0) == held_out, "the old ones win"
    assert documents(folder, "train", 1) | documents(folder, "validation", 1) == {tokens(folder, text(n)) for n in NEW}
    assert documents(folder, "validation", 2) == {tokens(folder, text(900))}
    assert [one["duplicates"] for one in manifest(folder)["sources"]] == [0, 3, 1]
    assert [one.get("lost_to_held_out") for one in manifest(folder)["sources"]] == [None, 1, None]
    late = source(write_lines(tmp_path / "late.jsonl", [text(n) for n in (seed, other, 900, 900, *range(910, 930))]))
    line = prepare(config(folder, first, again, evaluated, late), quiet=True)
    assert manifest(folder)["sources"][3]["lost_to_held_out"] == 3
    assert "4 of them copies of held-out text" in line


def test_nothing_new_is_an_error_and_the_corpus_stays(tmp_path: Path, first: SourceConfig, folder: Path) -> None:
    before = content(folder)
    copy = source(write_lines(tmp_path / "copy.jsonl", [text(seed) for seed in reversed(OLD)]))
    with pytest.raises(InputError, match="none of 60 documents is new, all are in the corpus already"):
        prepare(config(folder, first, copy), quiet=True)
    assert content(folder) == before
    assert "already prepared" in prepare(config(folder, first), quiet=True)
    assert not (folder / ".work").exists()


def test_near_duplicates_of_old_text_are_found(tmp_path: Path, first: SourceConfig) -> None:
    def long(seed: int) -> str:
        draw = np.random.default_rng(seed)
        return " ".join(f"w{word}" for word in draw.integers(0, 5000, 200)) + "."

    folder, filters = tmp_path / "corpus", {"near_duplicates": {"enabled": True}}
    old = source(write_lines(tmp_path / "old.jsonl", [long(seed) for seed in range(40)]))
    prepare(config(folder, old, filters=filters), quiet=True)
    changed = [long(seed).replace(long(seed).split()[3], "other", 1) for seed in range(8)]
    fresh = [long(seed) for seed in range(50, 80)]
    more = source(write_lines(tmp_path / "more.jsonl", [*changed, *fresh, fresh[0].replace(" ", " so ", 1)]))
    prepare(config(folder, old, more, filters=filters), quiet=True)
    card = json.loads((folder / "card.json").read_text())
    (entry,) = card["filters"]
    assert (entry["documents"], entry["by_source"]) == (9, [0, 9])
    assert manifest(folder)["sources"][1]["documents"] == len(fresh)
    texts = [changed[0], fresh[5] + " The end.", *map(long, range(90, 99))]
    third = source(write_lines(tmp_path / "third.jsonl", texts))
    prepare(config(folder, old, more, third, filters=filters), quiet=True)
    assert manifest(folder)["sources"][2]["documents"] == 9
    card = json.loads((folder / "card.json").read_text())
    assert [entry["by_source"] for entry in card["filters"]] == [[0, 9, 1]]
    assert card["sources"][2]["duplicates"] == 1, "the text of one that was left out"
    assert "lost_to_held_out" not in card["sources"][2]
    texts = [changed[2], long(3), long(4) + " The end.", *map(long, range(200, 209))]
    dev = source(write_lines(tmp_path / "dev.jsonl", texts), held_out=True)
    with pytest.raises(InputError, match=r"2 documents to hold out \(dev: 1 equal, 1 similar\)"):
        prepare(config(folder, old, more, third, dev, filters=filters), quiet=True)


def test_sources_are_known_by_name_and_content_not_by_place(tmp_path, first, second, folder) -> None:
    prepare(config(folder, second, first), quiet=True)
    assert [one["name"] for one in manifest(folder)["sources"]] == ["first", "second"]
    before = states(folder)
    for some in ((first,), (second,), (second, first)):  # one that the config does not name stays
        assert "already prepared" in prepare(config(folder, *some), quiet=True)
    renamed = second.model_copy(update={"name": "other", "weight": 3.0})
    assert "already prepared" in prepare(config(folder, renamed), quiet=True)
    assert [(one["name"], one["weight"]) for one in manifest(folder)["sources"]] == [("first", 1), ("other", 3)]
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes((tmp_path / "second.jsonl").read_bytes())
    assert "already prepared" in prepare(config(folder, source(copy, name="moved")), quiet=True)
    assert states(folder) == before


def test_what_cannot_be_added_is_refused(
    tmp_path: Path, first: SourceConfig, second: SourceConfig, folder: Path
) -> None:
    before = content(folder)
    write_lines(tmp_path / "first.jsonl", [text(seed) for seed in NEW])
    changed = r"corpus\.sources\.1\.path: its files have changed\. .*give the changed source another name"
    other = source(tmp_path / "first.jsonl", name="second")
    for given, message in (
        (config(folder, second, first), changed),
        (config(folder, second, min_document_words=3), r"corpus\.min_document_words: was 10, is 3"),
        (config(folder, second, vocabulary={"size": 300}), r"corpus\.vocabulary\.size: was 200, is 300"),
        (config(folder, second, other), r"corpus\.sources\.1: .* already has a source named second\. To add"),
    ):
        for check in (describe, lambda given: prepare(given, quiet=True)):
            with pytest.raises(InputError, match=message):
                check(given)
    assert content(folder) == before


def test_a_grown_corpus_that_is_damaged_is_not_prepared_again(first, second, folder) -> None:
    prepare(config(folder, first, second), quiet=True)
    (folder / "train-00000.tokens.npy").write_bytes(b"")
    with pytest.raises(InputError, match="cannot be prepared again as it was: sources were added to it"):
        prepare(config(folder, first, second), quiet=True)
    assert manifest(folder)["grown"] == 1


@pytest.mark.parametrize("place", ["write_card", "add_card", "put_manifest"])
def test_an_error_at_the_end_leaves_the_old_corpus(place, tmp_path, first, second, folder, monkeypatch) -> None:
    whole = shutil.copytree(folder, tmp_path / "whole")
    prepare(config(whole, first, second), quiet=True)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as broken:
        broken.setattr(finish.card if place == "write_card" else finish, place, fail)
        with pytest.raises(RuntimeError, match="killed"):
            prepare(config(folder, first, second), quiet=True)
    verify_shards(folder)
    assert [one["name"] for one in open_shards(folder, "train").sources] == ["first"]
    assert "second added" in prepare(config(folder, first, second), quiet=True)
    assert content(folder) == content(whole)


def test_a_killed_growth_leaves_the_old_corpus_and_goes_on(tmp_path: Path) -> None:
    first = write_lines(tmp_path / "first.jsonl", [text(seed, 40) for seed in range(300)])
    second = write_lines(tmp_path / "second.jsonl", [text(seed, 40) for seed in range(1000, 3000)])
    command = [sys.executable, "-m", "finetune.cli", "prepare", str(tmp_path / "run.yaml")]

    def write(folder: str, *paths: Path) -> None:
        sources = "".join(f"\n    - {{kind: jsonl, name: {path.stem}, path: {path}}}" for path in paths)
        (tmp_path / "run.yaml").write_text(
            "name: trial\nphases: [{sequence_length: 32, global_sequences: 2, steps: 1, peak_learning_rate: 1e-3}]\n"
            f"corpus:\n  dir: {tmp_path / folder}\n  vocabulary: {{size: 200}}\n  processes: 2\n"
            f"  shard_tokens: 80000\n  sources:{sources}\n"
        )

    def start(folder: str, *paths: Path) -> subprocess.Popen[bytes]:
        write(folder, *paths)
        quiet = subprocess.DEVNULL
        return subprocess.Popen(command, cwd=ROOT, stdout=quiet, stderr=quiet, start_new_session=True)

    def prepared(folder: str, *paths: Path) -> None:
        """In this process, as the command does it."""
        write(folder, *paths)
        prepare(load_config(tmp_path / "run.yaml", ["corpus.processes=1"]), quiet=True)

    killed, kills = tmp_path / "killed", 0
    prepared("killed", first)
    shutil.copytree(killed, tmp_path / "whole")
    for pattern in (".work/*-000000-*.json", "train-00002.*", "source-00001.hashes"):
        process = start("killed", first, second)
        while process.poll() is None and not list(killed.glob(pattern)):
            time.sleep(0.002)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if len(manifest(killed)["sources"]) == 1:
                kills += 1
                verify_shards(killed)
    assert kills >= 2
    for folder in ("killed", "whole"):
        prepared(folder, first, second)
    assert content(killed) == content(tmp_path / "whole")


def test_a_phase_that_weighs_a_source_that_the_corpus_will_not_have_is_refused_first(tmp_path, first, second):
    def weighing(*sources: SourceConfig, **weights: float) -> PretrainConfig:
        made = config(tmp_path / "corpus", *sources)
        return made.model_copy(update={"phases": (made.phases[0].model_copy(update={"weights": weights}),)})

    for ask in (prepare, describe):
        with pytest.raises(InputError, match=r"phases.0.weights: .*firts.*first"):
            ask(weighing(first, firts=1.0))
    assert not (tmp_path / "corpus").exists()
    prepare(weighing(first, first=1.0), quiet=True)
    prepare(weighing(second, first=0.0, second=1.0), quiet=True)  # the corpus has it, the config has not


def test_at_an_address_only_what_is_new_is_moved(tmp_path, first, second, s3, monkeypatch) -> None:
    address = f"s3://{BUCKET}/corpora/grown"
    point_to(s3, tmp_path / "here", monkeypatch)
    s3.reset()
    texts = f"s3://{BUCKET}/texts"
    for one in (first, second):
        ObjectStore().upload(Path(one.path), f"{texts}/{one.name}.jsonl")
    first, second = (one.model_copy(update={"path": f"{texts}/{one.name}.jsonl"}) for one in (first, second))
    prepare(config(address, first), quiet=True)
    point_to(s3, tmp_path / "there", monkeypatch)  # another machine
    s3.requests.clear()
    assert describe(config(address, first, second))["state"] == "grows by second"
    assert "second added" in prepare(config(address, first, second), quiet=True)
    moved = {line.split("?")[0] for line in s3.requests if line.startswith(("GET", "PUT"))}
    shards = {line.rpartition("/")[2] for line in moved if line.endswith(".npy")}
    assert shards == {path.name for path in local_path(address).glob("*.npy")}
    assert not (local_path(address) / "manifest.json").exists(), "it lacks the old tokens"
    assert not [line for line in s3.requests if line.startswith("GET") and line.endswith(".npy")]
    assert not [line for line in moved if line.startswith("GET") and line.endswith("texts/first.jsonl")]
    assert [line for line in moved if line.startswith("GET") and line.endswith("texts/second.jsonl")]
    assert not [line for line in s3.requests if line.startswith("DELETE")], "it can be read all the time"
    s3.requests.clear()
    assert "already prepared" in prepare(config(address, first, second), quiet=True)
    assert not [line for line in s3.requests if line.startswith("PUT")]
    point_to(s3, tmp_path / "third", monkeypatch)
    fetch_corpus(config(address).corpus)
    verify_shards(local_path(address))
    assert documents(local_path(address), "train", 1)

"""`prepare` as a whole: the same bytes however it is run, nothing lost, everything counted."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import locked
from pretrain.config import PretrainConfig, SourceConfig, load_config
from pretrain.corpus import parallel, shards
from pretrain.corpus import prepare as preparing
from pretrain.corpus.description import describe
from pretrain.corpus.documents import ChunkSummary, Documents
from pretrain.corpus.parts import DOCUMENT, random_order
from pretrain.corpus.prepare import prepare
from pretrain.corpus.shards import open_shards, verify_shards
from pretrain.corpus.stage_bar import StageBar
from pretrain.corpus.stages import PreparationSettings
from pretrain.planning import estimate
from tests.corpus.preparing import card, content, document_tokens, preparation

ROOT = Path(__file__).parents[2]
WORDS = ["the", "of", "and", "river", "mountain", "1900", "café", "state"]
WORDS += ["built", "naïve", "house", "people", "water,", "light.", "long", "small"]


def text(seed: int, sentences: int = 12) -> str:
    """Sentences of random words, two paragraphs."""
    draw = random.Random(seed)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(4, 20))).capitalize() + "." for _ in range(sentences)]
    half = sentences // 2
    return f"{' '.join(lines[:half])}\n{' '.join(lines[half:])}"


def write_wiki(path: Path, texts: list[str]) -> None:
    documents = [
        f'<doc id="{n}" url="x" title="Title {n}">\nTitle {n}\n\n{body}\n\n</doc>\n' for n, body in enumerate(texts)
    ]
    path.write_text("".join(documents), encoding="utf-8")


def config(folder: Path, corpus_dir: Path, **changes: Any) -> PretrainConfig:
    sources = (
        SourceConfig(kind="wikiextractor", name="wiki", path=str(folder / "wiki*.txt"), weight=2, license="free"),
        SourceConfig(kind="jsonl", name="lines", path=str(folder / "lines.jsonl")),
    )
    return preparation(corpus_dir, **{"sources": sources, **changes})


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two WikiExtractor files of 60 documents with 4 repeated and 3 too short, and 30 lines of JSON."""
    folder = tmp_path_factory.mktemp("sources")
    write_wiki(folder / "wiki-a.txt", [text(seed) for seed in range(33)] + ["Too short."] * 3)
    write_wiki(folder / "wiki-b.txt", [text(seed) for seed in range(29, 57)])
    lines = [json.dumps({"text": text(seed)}) for seed in range(100, 130)]
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def prepared(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora") / "one"
    prepare(config(sources, folder), quiet=True)
    return folder


def test_every_sentence_is_there_once_as_the_tokenizer_reads_it(sources: Path, prepared: Path) -> None:
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    expected = {
        tuple(tokenizer.encode(text(seed).replace("\n", " "), add_special_tokens=False).ids)
        for seed in [*range(57), *range(100, 130)]
    }
    found = [one for split in ("train", "validation") for one in document_tokens(open_shards(prepared, split))]
    assert len(found) == len(expected)
    assert set(found) == expected
    assert max(len(shard.tokens) for shard in open_shards(prepared, "train").shards) <= 4000


def test_the_card_counts_what_stayed_and_what_did_not(prepared: Path) -> None:
    wiki, lines = card(prepared)["sources"]
    assert (wiki["documents_read"], wiki["too_short"], wiki["duplicates"], wiki["documents"]) == (64, 3, 4, 57)
    assert (lines["documents_read"], lines["documents"], lines["license"]) == (30, 30, "unknown")
    assert wiki["sentences"] > 57 * 2
    assert card(prepared)["totals"]["documents"] == 87
    markdown = (prepared / "card.md").read_text()
    for expected in ("wiki", "lines", "87", "free"):
        assert expected in markdown


def test_the_card_for_people_has_no_path_of_this_machine(sources, tmp_path, monkeypatch) -> None:
    import ast

    from pretrain.corpus.card import portable_path

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path.parent / "home"))
    for path, shown in (
        ("texts/a.txt", "texts/a.txt"),
        (str(tmp_path / "texts" / "a.txt"), "texts/a.txt"),
        (str(tmp_path.parent / "home" / "a.txt"), "~/a.txt"),
        ("/elsewhere/a.txt", "/elsewhere/a.txt"),
        ("hub:name@1#0/2", "hub:name@1#0/2"),
        (ast.__file__, f"{Path(ast.__file__).parent.name}/ast.py"),
    ):
        assert portable_path(path) == shown


def test_the_split_follows_the_documents_text(sources: Path, prepared: Path, tmp_path: Path) -> None:
    """More documents leave those that were held out where they were."""

    def held_out(folder: Path) -> set[str]:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return {tokenizer.decode(ids) for ids in document_tokens(open_shards(folder, "validation"))}

    for path in sources.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    write_wiki(tmp_path / "wiki-0.txt", [text(seed) for seed in range(1000, 1100)])
    prepare(config(tmp_path, tmp_path / "more", vocabulary={"path": str(prepared)}), quiet=True)
    before, after = held_out(prepared), held_out(tmp_path / "more")
    assert len(before) > 2
    assert before < after


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_forked_and_spawned_processes_write_the_same_bytes(method, sources, prepared, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(parallel, "start_method", lambda: method)
    prepare(config(sources, tmp_path / "two", processes=2), quiet=True)
    assert content(tmp_path / "two") == content(prepared)
    assert not (tmp_path / "two" / ".work").exists()


def test_no_fork_beside_other_threads() -> None:
    """A lock that another thread holds would stay locked in the forked process."""
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    try:
        assert parallel.start_method() == "spawn"
    finally:
        go_on.set()
        thread.join()


def start_preparation(folder: Path, target: str) -> subprocess.Popen[bytes]:
    """The command, in two processes of its own group, with 8 files of 200 documents."""
    if not (folder / "wiki0.txt").exists():
        for number in range(8):
            write_wiki(folder / f"wiki{number}.txt", [text(1000 * number + seed, 40) for seed in range(200)])
    (folder / "run.yaml").write_text(
        "name: trial\nphases: [{sequence_length: 32, global_sequences: 2, steps: 1, peak_learning_rate: 1e-3}]\n"
        f"corpus:\n  dir: {folder / target}\n  sources: [{{kind: wikiextractor, path: '{folder}/wiki*.txt'}}]\n"
        "  vocabulary: {size: 200}\n  processes: 2\n"
    )
    command = [sys.executable, "-m", "finetune.cli", "prepare", str(folder / "run.yaml")]
    quiet = subprocess.DEVNULL
    return subprocess.Popen(command, cwd=ROOT, stdout=quiet, stderr=quiet, start_new_session=True)


def test_a_killed_coordinator_leaves_neither_processes_nor_a_lock(tmp_path: Path) -> None:
    with start_preparation(tmp_path, "out") as coordinator:
        while coordinator.poll() is None and not list((tmp_path / "out" / ".work").glob("*.words")):
            time.sleep(0.005)
        children = psutil.Process(coordinator.pid).children(recursive=True)
        coordinator.kill()
    assert len(children) == 2
    with locked(tmp_path / "out" / ".work" / "lock", "still held"):
        pass
    assert not psutil.wait_procs(children, timeout=120)[1]


def _sleep(folder: Path, name: str) -> None:
    (folder / f"{name}.began").touch()
    time.sleep(60)
    (folder / f"{name}.ended").touch()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_error_or_ctrl_c_does_not_wait_for_the_calls_that_run(method, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(parallel, "start_method", lambda: method)
    settings = PreparationSettings(
        str(tmp_path), lowercase=True, language="en", min_document_words=1, vocabulary_given=False
    )

    def interrupted() -> None:
        with parallel.Pool(2, settings, None, "") as pool:
            for name in "abcdef":
                pool.submit(_sleep, (tmp_path, name))
            while len(list(tmp_path.glob("*.began"))) < 2:
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(list(tmp_path.glob("*.began"))) == 2
    assert not list(tmp_path.glob("*.ended"))


def test_a_vocabulary_taken_over_gives_the_same_shards(sources: Path, prepared: Path, tmp_path: Path) -> None:
    for given in (prepared / "vocab.txt", prepared / "tokenizer.json"):
        target = tmp_path / given.suffix[1:]
        prepare(config(sources, target, vocabulary={"path": str(given)}), quiet=True)
        written, expected = content(target), content(prepared)
        assert {n: b for n, b in written.items() if n.endswith(".npy")} == {
            n: b for n, b in expected.items() if n.endswith(".npy")
        }
        assert written["vocab.txt"] == expected["vocab.txt"]


def test_a_prepared_folder_stays_and_its_weights_may_change(sources: Path, prepared: Path, tmp_path: Path) -> None:
    target = tmp_path / "again"
    settings = config(sources, target)
    prepare(settings, quiet=True)
    before = content(target)
    assert "already prepared" in prepare(settings, quiet=True)
    assert content(target) == before
    first = settings.corpus.sources[0].model_copy(update={"weight": 5.0})
    prepare(config(sources, target, sources=(first, settings.corpus.sources[1])), quiet=True)
    assert json.loads((target / "manifest.json").read_text())["sources"][0]["weight"] == 5.0
    assert content(target)["manifest.json"] != before["manifest.json"], "other weights are other samples"
    prepare(settings, quiet=True)
    assert content(target) == before
    with pytest.raises(InputError, match=r"corpus\.min_document_words: was 10, is 3"):
        prepare(config(sources, target, min_document_words=3), quiet=True)
    with pytest.raises(InputError, match=r"corpus\.min_document_words: was 10, is 3"):
        describe(config(sources, target, min_document_words=3))
    described = describe(settings)
    assert described["state"] == "finished"
    assert estimate.preparation_lines(described).splitlines()[-1] == f"  {target}: finished and up to date"


def test_a_folder_with_something_else_is_left_as_it_is(sources: Path, tmp_path: Path) -> None:
    model, export, newer = tmp_path / "model", tmp_path / "export", tmp_path / "newer"
    for folder, files in (
        (model, {"config.json": "{}", "vocab.txt": "a"}),
        (export, {"manifest.json": '{"files": {}}', "tokenizer.json": "{}"}),
        (newer, {"manifest.json": '{"format": 99, "folded": true, "shards": [], "files": {}}'}),
    ):
        folder.mkdir()
        for name, value in files.items():
            (folder / name).write_text(value)
        with pytest.raises(InputError, match="not a corpus folder" if folder != newer else "another version") as error:
            prepare(config(sources, folder), quiet=True)
        assert "another corpus.dir" in str(error.value)
        with pytest.raises(InputError, match=r"another corpus\.dir"):
            describe(config(sources, folder))
        assert {path.name: path.read_text() for path in folder.iterdir()} == files


def test_a_damaged_corpus_is_prepared_again_with_its_own_settings_only(sources: Path, tmp_path: Path) -> None:
    folder, texts = tmp_path / "corpus", tmp_path / "texts"
    shutil.copytree(sources, texts)
    prepare(config(texts, folder), quiet=True)
    before, shard = content(folder), next(folder.glob("*.npy"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    manifest = (folder / "manifest.json").read_bytes()
    with pytest.raises(InputError, match="min_document_words: was 10, is 12"):
        prepare(config(texts, folder, min_document_words=12), quiet=True)
    (texts / "lines.jsonl").rename(texts / "elsewhere")
    (texts / "lines.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(InputError, match="its files have changed"):
        prepare(config(texts, folder), quiet=True)
    assert (folder / "manifest.json").read_bytes() == manifest, "the other shards can be opened"
    (texts / "elsewhere").replace(texts / "lines.jsonl")
    assert "prepared in" in prepare(config(texts, folder), quiet=True)
    assert content(folder) == before


def test_a_corpus_that_another_process_finished_meanwhile_is_not_prepared_again(
    sources: Path, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, pool = tmp_path / "corpus", preparing._Preparation._make_pool
    monkeypatch.setattr(preparing._Preparation, "_make_pool", lambda p: (shutil.copytree(prepared, folder), pool(p))[1])
    assert "already prepared" in prepare(config(sources, folder), quiet=True)
    shutil.rmtree(folder)
    with pytest.raises(InputError, match="min_document_words"):
        prepare(config(sources, folder, min_document_words=12), quiet=True)
    assert content(folder) == content(prepared)


def test_the_progress_shows_neither_an_unknown_total_nor_a_rate_of_an_instant(capfd, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    bar = StageBar(quiet=False)
    clock = itertools.chain([0.0, 0.0], itertools.repeat(2.0))
    with bar, bar.stage("hashing the sources", 5_000_000) as advance:
        advance(5_000_000)
    with bar, bar.stage("training the vocabulary", 0):
        pass
    bar.progress.get_time = lambda: next(clock)
    with bar, bar.stage("writing shards", 8_000_000) as advance:
        advance(8_000_000)
    lines = {line[:24].strip(): line for line in capfd.readouterr().err.splitlines()}
    assert "5.0/5.0 MB" in lines["hashing the sources"]
    assert "/s" not in lines["hashing the sources"]
    assert "bytes" not in lines["training the vocabulary"]
    assert "?" not in lines["training the vocabulary"]
    assert "4.0 MB/s" in lines["writing shards"]


def test_a_killed_preparation_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    work, kills = tmp_path / "killed" / ".work", 0
    for pattern in ("*.json", "vocab.txt", "*.tokens*"):  # in the middle of reading, of tokenizing, and past it
        process = start_preparation(tmp_path, "killed")
        before = set(work.glob(pattern)) if work.exists() else set()
        while process.poll() is None and not (work.exists() and set(work.glob(pattern)) - before):
            time.sleep(0.005)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            assert not (tmp_path / "killed" / "manifest.json").exists()
    assert kills, "it ended before it could be killed"
    for folder in ("killed", "whole"):
        changes = [f"corpus.dir={tmp_path / folder}", "corpus.processes=1"]
        prepare(load_config(tmp_path / "run.yaml", changes), quiet=True)
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


def test_a_preparation_begun_with_other_settings_is_refused(sources, prepared, tmp_path, monkeypatch) -> None:
    """Its part files are known by the numbers of their chunks: documents would be lost, or be there twice."""
    folder = tmp_path / "corpus"
    with monkeypatch.context() as stopped:
        stopped.setattr(preparing, "find_near_duplicates", MagicMock(side_effect=MachineError("stopped here")))
        with pytest.raises(MachineError, match="stopped here"):
            prepare(config(sources, folder), quiet=True)
    with pytest.raises(InputError, match=r"prepared with other settings\. corpus\.min_document_words: was 10, is 2"):
        prepare(config(sources, folder, min_document_words=2), quiet=True)
    prepare(config(sources, folder), quiet=True)
    assert content(folder) == content(prepared)
    with pytest.raises(InputError, match="none of 94 documents remains"):
        prepare(config(sources, tmp_path / "none", min_document_words=10_000), quiet=True)
    assert not list((tmp_path / "none").iterdir())


def test_a_full_disk_ends_in_one_line_and_passes_for_nothing(sources: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        with pytest.raises(MachineError, match=r"disk"):
            prepare(config(sources, disk / "corpus"), quiet=True)
        assert not (disk / "corpus" / "manifest.json").exists()
        subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
        prepare(config(sources, disk / "corpus"), quiet=True)
        assert sum(len(shard.tokens) for shard in open_shards(disk / "corpus", "train").shards) > 0
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("count", [1, 2])
def test_a_corpus_without_a_document_for_training_is_refused(count: int, tmp_path: Path) -> None:
    for number in range(count):
        (tmp_path / f"{number}.txt").write_text(text(number), encoding="utf-8")
    source = SourceConfig(kind="books", path=str(tmp_path / "*.txt"))
    with pytest.raises(InputError, match=rf"^corpus.sources: {count} documents?, all held out"):
        prepare(config(tmp_path, tmp_path / "refused", sources=(source,)), quiet=True)
    assert "(0 held out" in prepare(
        config(tmp_path, tmp_path / "trained", sources=(source,), validation_fraction=0), quiet=True
    )
    # A corpus that is only evaluated on says so of its sources.
    only_held_out = source.model_copy(update={"held_out": True})
    summary = prepare(config(tmp_path, tmp_path / "evaluated", sources=(only_held_out,)), quiet=True)
    assert f"({count} held out" in summary


def test_an_altered_or_truncated_shard_is_refused(sources: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    prepare(config(sources, target), quiet=True)
    path = next(target.glob("train-*.tokens.npy"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(InputError, match=path.name):
        open_shards(target, "train")
    path.write_bytes(whole)
    verify_shards(target)
    data = bytearray(whole)
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match=rf"{path.name}: its SHA-256 differs"):
        verify_shards(target)
    prepare(config(sources, target), quiet=True)
    assert path.read_bytes() == whole, "preparing again repairs it"


def test_a_proven_file_is_not_read_again(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify_shards(prepared)
    monkeypatch.setattr(shards, "sha256_file", lambda path: pytest.fail(f"{path} was read"))
    verify_shards(prepared)


def _documents(folder: Path, tables: list[tuple[int, np.ndarray]], fraction: float = 0.0) -> Documents:
    """Parts of (source, DOCUMENT table) as documents."""
    summaries = []
    for number, (source, table) in enumerate(tables):
        np.save(folder / f"{number}.npy", table)
        summaries.append(ChunkSummary(source, len(table), [f"{number}.npy"]))
    return Documents.load(folder, summaries, fraction)


def _table(hashes: Any) -> np.ndarray:
    table = np.zeros(len(hashes), DOCUMENT)
    table["hash"] = hashes
    table["items"], table["sentences"], table["bytes"] = 20, 3, 80
    return table


def _in_order(table: np.ndarray) -> np.ndarray:
    return table[np.argsort(random_order(table["hash"]))]


def _in_small_partitions(monkeypatch: pytest.MonkeyPatch, documents: int) -> None:
    monkeypatch.setattr("pretrain.corpus.documents.MAX_DOCUMENTS", documents)
    monkeypatch.setattr("pretrain.corpus.buckets.MAX_BUFFERED_ROWS", documents)


def test_memory_does_not_grow_with_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _in_small_partitions(monkeypatch, 4000)
    generator = np.random.default_rng(0)

    def peak(parts: int) -> int:
        folder = tmp_path / str(parts)
        folder.mkdir()
        hashes = generator.integers(0, 1 << 62, (parts, 2000, 2))
        tables = [(number // (parts // 2), _in_order(_table(hashes[number]))) for number in range(parts)]
        tracemalloc.start()
        try:
            documents = _documents(folder, tables, 0.005)
            assert sum(int(chosen.sum()) for _, chosen, _ in documents.sample(1 << 60)) > 1900 * parts
            plan = documents.plan(100_000)
            selected = sum(len(numbers) for shard in plan for _, numbers in shard.document_range.documents(folder))
            assert selected == sum(counts["documents"] for counts in documents.statistics(2)) == 2000 * parts
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(64) < 1.2 * peak(8)


@pytest.mark.parametrize("at_once", [2, 3, 1000])
def test_repeated_documents_are_found_across_partitions(at_once, tmp_path, monkeypatch) -> None:
    _in_small_partitions(monkeypatch, at_once)
    high = 1 << 62
    hashes = [(5, 1), (high, 1), (5, 1), (5, 2), (high, 1), (5, 1), (3, 1), (5, 2), (high, 2), (5, 1)]
    documents = _documents(tmp_path, [(0, _table(hashes[:4])), (1, _table(hashes[4:]))])
    chosen = np.concatenate([chosen for _, chosen, _ in documents.sample(1 << 60)])
    assert chosen.tolist() == [True, True, False, True, False, False, True, False, True, False]


def test_a_sample_is_the_documents_with_the_lowest_hashes(tmp_path: Path) -> None:
    """A hash's first bits decide the bin, and those of one bin are compared exactly."""
    high = 1 << 60
    seconds = [high + 3, 7, high + 1, 5, 6, high + 2]
    table = _table(list(enumerate(seconds)))
    table["bytes"] = [10, 20, 30, 40, 50, 60]
    documents = _documents(tmp_path, [(0, table[:3]), (0, table[3:])])
    for most, expected in ((1, {5}), (109, {5, 6}), (110, {5, 6, 7}), (139, {5, 6, 7}), (140, {5, 6, 7, high + 1})):
        parts = list(documents.sample(most))
        chosen = np.concatenate([chosen for _, chosen, _ in parts])
        assert {second for second, is_chosen in zip(seconds, chosen, strict=True) if is_chosen} == expected
        assert sum(size for _, _, size in parts) == int(table["bytes"][chosen].sum())


def test_shards_are_neighbors_in_a_random_order_of_one_source(tmp_path: Path) -> None:
    """Every document is in one shard; places ascend from shard to shard, and each has about as many tokens."""
    generator = np.random.default_rng(1)
    tables = [(source, _table(generator.integers(0, 1 << 63, (50, 2)))) for source in (0, 0, 1)]
    documents = _documents(tmp_path, [(source, _in_order(table)) for source, table in tables], 0.1)
    plan = documents.plan(300)
    found: dict[tuple[str, int], list[int]] = {}
    for shard in plan:
        own = [
            int(random_order(np.load(tmp_path / part)["hash"])[n])
            for part, ns in shard.document_range.documents(tmp_path)
            for n in ns
        ]
        assert len(own) == shard.totals["documents"] == shard.totals["tokens"] / 20 <= 15
        earlier = found.setdefault((shard.split, shard.source), [])
        assert not earlier or max(earlier) < min(own)
        earlier += own
    assert sum(map(len, found.values())) == 150
    assert {split for split, _ in found} == {"train", "validation"}
    assert len(plan) < 150 / 10


@pytest.mark.parametrize("shard_tokens", [1000, 10**8])
def test_documents_are_shuffled_once_whatever_they_were_cut_into(tmp_path: Path, shard_tokens: int) -> None:
    """The order is that of the documents' hashes: sources that lie one after another are mixed."""
    lines = [
        json.dumps({"text": f"{'early' if n < 300 else 'late'} number {n} is a text. It ends."}) for n in range(600)
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = SourceConfig(kind="jsonl", path=str(tmp_path / "a.jsonl"))
    changes = {"sources": (source,), "shard_tokens": shard_tokens, "min_document_words": 0, "validation_fraction": 0.0}
    prepare(config(tmp_path, tmp_path / "c", **changes), quiet=True)
    entries = (tmp_path / "c" / "vocab.txt").read_text().split("\n")
    late = [entries[ids[0]].startswith("la") for ids in document_tokens(open_shards(tmp_path / "c", "train"))]
    assert len(late) == 600
    for begin in range(0, 600, 100):
        assert 25 < sum(late[begin : begin + 100]) < 75

"""Corpora that are read from an object store while training goes on: the same samples as from a full copy."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from corpora import make_corpus
from numbered import JOINED, NEXT, ORDER, SINGLE

import pretrain
from pretrain.batches.blocks import blocks_of
from pretrain.batches.sampler import Sampler
from pretrain.common.addresses import CACHE_VARIABLE
from pretrain.common.errors import InputError, MachineError
from pretrain.common.worker import TrainingRequest, Worker
from pretrain.config import CorpusConfig, PairsConfig, PretrainConfig
from pretrain.corpus import block_cache, stages
from pretrain.corpus.shards import TokenShards, open_shards
from pretrain.corpus.stored import fetch_corpus, is_streamed, open_corpus
from pretrain.planning.text import measured_phases, reading_lines
from pretrain.run import train
from pretrain.storage import folders
from pretrain.storage.objects import ObjectStore
from tests.distributed import run_workers
from tests.object_store import BUCKET, Fault, FaultyProxy
from tests.starts import Start, pretraining, records, starts

ADDRESS = f"s3://{BUCKET}/corpus"
BLOCK = 2000  # tokens
LENGTH = 64


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pretrain.corpus.blocks.BLOCK_TOKENS", BLOCK)
    monkeypatch.setattr("pretrain.batches.sampler.WINDOW_BLOCKS", 4)


def sampler(shards: TokenShards, pairs: dict[str, Any] = SINGLE) -> Sampler:
    return Sampler(shards, PairsConfig.model_validate(pairs), sequence_length=LENGTH, seed=0)


def total_bytes(shards: TokenShards) -> int:
    """Of all blocks at the address."""
    cache = shards.shards[0].cache
    assert cache is not None
    return cache.bytes_of(np.arange(*cache.global_indices(np.array([len(shards.shards)]), np.array([0]))))


def stored(tmp_path: Path, *kinds: dict[str, Any], **corpus: Any) -> tuple[TokenShards, CorpusConfig]:
    """A corpus here and at an address, with counts for `kinds` of pairs; (its shards here, how the other is read)."""
    folder = make_corpus(tmp_path / "here", **{"documents": 260, "vocabulary_size": 300, **corpus})
    here = open_shards(folder, "train")
    for pairs in kinds or (SINGLE,):
        sampler(here, pairs)
    folders.store(folder, ADDRESS)
    for path in (folder / ".samples").iterdir():
        ObjectStore().upload(path, f"{ADDRESS}/.samples/{path.name}")
    return here, CorpusConfig.model_validate({"dir": ADDRESS, "cache": "90KB"})


def streamed(corpus: CorpusConfig) -> TokenShards:
    fetch_corpus(corpus)
    return open_corpus(corpus, "train")


def same_samples(one: Sampler, other: Sampler, first: int = 0, stop: int = 0, batch: int = 50) -> bool:
    for begin in range(first, stop or 5 * one.samples_per_epoch // 4, batch):
        samples = np.arange(begin, begin + batch)
        rows = [made.gather(made.plan(samples)) for made in (one, other)]
        if not all(np.array_equal(x, y) for x, y in zip(*(vars(row).values() for row in rows), strict=True)):
            return False
    return True


@pytest.mark.parametrize("pairs", [SINGLE, JOINED, NEXT, ORDER], ids=["single", "joined", "nsp", "sop"])
def test_samples_are_those_of_a_full_copy_and_the_cache_keeps_its_size(proxy, tmp_path, monkeypatch, pairs):
    fetched, read_range = [], ObjectStore.read_range

    def counting(store: ObjectStore, address: str, begin: int, end: int) -> bytes:
        fetched.append(end - begin)
        return read_range(store, address, begin, end)

    monkeypatch.setattr(ObjectStore, "read_range", counting)
    here, corpus = stored(tmp_path, pairs)
    there = streamed(corpus)
    assert there.source_fingerprint(0) == here.source_fingerprint(0)
    fetched.clear()
    assert same_samples(sampler(here, pairs), sampler(there, pairs))
    assert sum(fetched) > total_bytes(there) > 3 * corpus.cache  # blocks were evicted and fetched again
    folder = tmp_path / "cache/s3/bucket/corpus/.streamed"
    files = [path for path in folder.rglob("*") if path.name in ("tokens", "sentences", "documents")]
    assert len(files) == 3
    # Files of tiny blocks cannot be freed by less than a page.
    assert sum(512 * path.stat().st_blocks for path in files) < corpus.cache + 4096 * 40


LEFT = """
import os, sys
from pathlib import Path
import numpy as np
from pretrain.corpus.block_cache import BlockCache, Lease, StoredArray, StoredShard
from pretrain.corpus.blocks import BLOCK, ARRAYS
shard = StoredShard({name: StoredArray(name, 136, 128, 8) for name in ARRAYS}, np.zeros(1, BLOCK))
cache = BlockCache("s3://bucket/corpus", Path(sys.argv[1]), [shard], max_bytes=1000)
os.kept, np.kept = (Lease(cache, np.array([0])) for _ in range(2))  # in modules that are cleared later
"""


def test_a_lease_that_is_left_when_python_exits_is_silent(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEFT, str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


READER = """
import sys
import numpy as np
import pretrain.batches.sampler, pretrain.corpus.blocks
from pretrain.config import CorpusConfig, PairsConfig
from pretrain.corpus.stored import fetch_corpus, open_corpus
pretrain.batches.sampler.WINDOW_BLOCKS = 4
corpus = CorpusConfig.model_validate({"dir": sys.argv[1], "cache": sys.argv[2]})
fetch_corpus(corpus)
made = pretrain.batches.sampler.Sampler(
    open_corpus(corpus, "train"), PairsConfig(objective="none"), sequence_length=64, seed=0
)
for first in range(0, made.samples_per_epoch, 50):
    ids = made.gather(made.plan(np.arange(first, first + 50))).input_ids
    print(first, int((ids * np.arange(1, len(ids) + 1)).sum()), flush=True)
"""


def read(size: str) -> subprocess.Popen[str]:
    """A process that reads an epoch and prints (first sample, a digest of its tokens) of each batch."""
    return subprocess.Popen([sys.executable, "-c", READER, ADDRESS, size], stdout=subprocess.PIPE, text=True)


def digests(made: Sampler) -> list[str]:
    lines = []
    for first in range(0, made.samples_per_epoch, 50):
        ids = made.gather(made.plan(np.arange(first, first + 50))).input_ids
        lines.append(f"{first} {int((ids * np.arange(1, len(ids) + 1)).sum())}")
    return lines


def reads_of_text(proxy: FaultyProxy) -> list[str]:
    return [one for one in proxy.requests if "/train-" in one and one.startswith("GET") and "blocks" not in one]


def test_processes_of_a_machine_fetch_a_block_once(proxy, tmp_path):
    here, _ = stored(tmp_path, documents=100)
    blocks = sum(len(shard.blocks) for shard in here.shards if shard.blocks is not None)
    processes = [read("50MB") for _ in range(2)]
    outputs = [process.communicate()[0].splitlines() for process in processes]
    assert outputs == 2 * [digests(sampler(here))]
    assert len(reads_of_text(proxy)) == 3 * blocks


def test_a_process_that_is_killed_leaves_a_cache_that_others_use(proxy, tmp_path):
    here, _ = stored(tmp_path, documents=100)
    proxy.plan = [Fault("slow", "train-.*tokens", 1000)]
    wanted = digests(sampler(here))
    for lines in (1, 6):
        process = read("80KB")
        assert process.stdout is not None
        assert [process.stdout.readline().strip() for _ in range(lines)] == wanted[:lines]
        process.kill()
        process.wait()
        process.stdout.close()
    proxy.plan = []
    assert read("80KB").communicate()[0].splitlines() == wanted


def test_a_cache_that_is_removed_or_damaged_changes_no_sample(proxy, tmp_path):
    here, corpus = stored(tmp_path)
    folder = tmp_path / "cache/s3/bucket/corpus/.streamed"
    shards = streamed(corpus)
    there = sampler(shards)
    assert same_samples(sampler(here), there, stop=300)
    shutil.rmtree(folder)
    assert same_samples(sampler(here), there, 300, 900)
    assert not list(folder.rglob("tokens"))  # the files are gone, but open
    again = sampler(streamed(corpus))
    assert same_samples(sampler(here), again, stop=300)
    del again, there, shards
    for path in folder.rglob("tokens"):
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
    for table in folder.rglob("blocks.npy"):
        half = table.read_bytes()[: table.stat().st_size // 2]
        table.unlink()  # what others have mapped stays
        table.write_bytes(half)
    assert same_samples(sampler(here), sampler(streamed(corpus)), stop=300)


def test_tables_of_blocks_are_in_one_file_that_processes_share(proxy, tmp_path):
    here, corpus = stored(tmp_path, sources=2, documents=60)
    shards = streamed(corpus).shards
    tables = [shard.blocks for shard in shards if shard.blocks is not None]
    assert len(tables) == 4
    for table, shard in zip(tables, here.shards, strict=True):
        assert shard.blocks is not None
        assert np.array_equal(table, shard.blocks)
    assert np.shares_memory(blocks_of(shards, [1, 2]).table, tables[1])
    assert np.array_equal(blocks_of(shards, [1, 2]).table, np.concatenate(tables[1:3]))
    apart = blocks_of(shards, [0, 2]).table
    assert not np.shares_memory(apart, tables[0])
    assert np.array_equal(apart["last"], np.concatenate([tables[0]["last"], tables[2]["last"]]))


def test_a_disk_that_is_full_before_the_cache_is_keeps_what_is_needed(proxy, tmp_path, monkeypatch, caplog):
    here, corpus = stored(tmp_path)
    shards = streamed(corpus.model_copy(update={"cache": 10**8}))
    folder = next((tmp_path / "cache/s3/bucket/corpus/.streamed").glob("*/tokens")).parent
    write, files = os.pwrite, [folder / name for name in ("documents", "sentences", "tokens")]

    def pwrite(*given: Any) -> int:
        if sum(512 * path.stat().st_blocks for path in files) > 250_000:
            raise OSError(errno.ENOSPC, "no space left")
        return write(*given)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert same_samples(sampler(here), sampler(shards))
    assert "disk full" in caplog.text
    assert total_bytes(shards) > 350_000


def test_text_that_is_not_as_it_was_prepared_is_refused(proxy, tmp_path, monkeypatch):
    stored(tmp_path, documents=60)
    name = f"{ADDRESS}/train-00000.tokens.npy"
    content = ObjectStore().read(name)
    assert content is not None
    ObjectStore().write(name, content[:-50] + bytes(50))
    made = sampler(streamed(CorpusConfig.model_validate({"dir": ADDRESS, "cache": "50MB"})))
    with pytest.raises(MachineError, match=r"train-00000.tokens.npy: the checksum of its block \d+ is wrong"):
        made.plan(np.arange(made.samples_per_epoch))
    ObjectStore().delete(name)
    made = sampler(streamed(CorpusConfig.model_validate({"dir": ADDRESS, "cache": "50MB"})))
    with pytest.raises(MachineError, match=r"train-00000.tokens.npy: not found. Run `prepare` on a machine with"):
        made.plan(np.arange(made.samples_per_epoch))
    ObjectStore().write(name, content[:-5000])  # the manifest says more
    monkeypatch.setattr("pretrain.storage.objects.RETRY_SECONDS", 0.5)
    made = sampler(streamed(CorpusConfig.model_validate({"dir": ADDRESS, "cache": "50MB"})))
    with pytest.raises(MachineError, match=r"train-00000.tokens.npy: cannot be read"):
        made.plan(np.arange(made.samples_per_epoch))


def test_what_a_user_can_do_wrong_is_one_line(proxy, tmp_path, monkeypatch):
    here, corpus = stored(tmp_path)
    made = sampler(streamed(corpus))
    made.check_cache("phases.0")
    small = sampler(streamed(corpus.model_copy(update={"cache": 20_000})))
    with pytest.raises(InputError, match=r"corpus.cache: 0.02 MB, but phases.0 needs at least 0.\d+ MB"):
        small.check_cache("phases.0")
    proxy.plan = [Fault("403", "GET.*train-.*tokens", 1000)]
    with pytest.raises(InputError, match="Check the credentials"):
        sampler(streamed(corpus)).plan(np.arange(2000))
    proxy.plan = []

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(MachineError, match="disk full"):
        sampler(streamed(corpus.model_copy(update={"cache": 90_000}))).plan(np.arange(here.shards[0].tokens.size // 80))


def text_of_three(folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """A config, its corpus at an address without sources, and three sources."""
    for name, words in (("a", "green hills and"), ("b", "old ships at"), ("c", "red cats in many")):
        lines = (json.dumps({"text": f"{name}{n} {words * (n % 40 + 1)}. It ends with {n}."}) for n in range(120))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    phase = {"sequence_length": LENGTH, "global_sequences": 8, "steps": 5, "peak_learning_rate": 1e-3}
    config = {"name": "x", "pairs": SINGLE, "phases": [phase], "run_dir": str(folder / "run")}
    corpus = {"dir": ADDRESS, "cache": "1MB", "vocabulary": {"size": 200}, "min_document_words": 0, "processes": 1}
    return config, corpus, [{"kind": "jsonl", "name": name, "path": f"{name}.jsonl"} for name in ("a", "b", "c")]


def test_machines_that_add_sources_at_once_lose_none(proxy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, corpus, (a, b, c) = text_of_three(tmp_path)
    other = tmp_path / "other"
    pretrain.prepare({**config, "corpus": {**corpus, "sources": [a]}})
    for sources in ([a], [a, b]):  # the same corpus on another machine, which adds a source
        pretrain.prepare({**config, "corpus": {**corpus, "sources": sources, "dir": str(other), "cache": 0}})
    write_shard = stages.write_shard

    def while_other_stores(*arguments: Any) -> Any:
        folders.store(other, ADDRESS)
        return write_shard(*arguments)

    grown = {**config, "corpus": {**corpus, "sources": [a, c]}}
    with monkeypatch.context() as patch:
        patch.setattr(stages, "write_shard", while_other_stores)
        with pytest.raises(MachineError, match="another machine stored a corpus there in the meantime"):
            pretrain.prepare(grown)
    folders.fetch(ADDRESS, folder=tmp_path / "reader")  # verifies each file
    pretrain.prepare(grown)
    folders.fetch(ADDRESS, folder=tmp_path / "reader")
    assert [one["name"] for one in open_shards(tmp_path / "reader", "train").sources] == ["a", "b", "c"]


def test_a_refused_preparation_leaves_no_corpus_without_text(proxy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, corpus, sources = text_of_three(tmp_path)
    pretrain.prepare({**config, "corpus": {**corpus, "sources": sources[:1]}})
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(InputError, match=r"corpus.vocabulary.size: was 200, is 250"):
        pretrain.prepare({**config, "corpus": {**corpus, "sources": sources[:1], "vocabulary": {"size": 250}}})
    assert is_streamed(CorpusConfig.model_validate(corpus))


def test_a_dry_run_reads_nothing_of_a_source_that_is_held_out(proxy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, corpus, (a, b, c) = text_of_three(tmp_path)
    config = {**config, "phases": config["phases"] * 2}
    pretrain.prepare({**config, "corpus": {**corpus, "sources": [a, b, {**c, "held_out": True}]}})
    shutil.rmtree(tmp_path / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lines = reading_lines(PretrainConfig.model_validate({**config, "corpus": corpus}))[1:]
    assert [re.findall(r"(\w) [\d.]+% of the tokens, 0\.\d+ epochs", line) for line in lines] == [["a", "b"]] * 2
    config["phases"] = [{**one, "max_epochs": 1e-4} for one in config["phases"]]
    (line,) = reading_lines(PretrainConfig.model_validate({**config, "corpus": corpus}))[1:]
    assert "with these mean lengths, the run would be rejected: phases.0.max_epochs (0.0001): the phase reads" in line


def test_what_prepare_stores_is_streamed_also_after_it_has_grown(proxy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, corpus, sources = text_of_three(tmp_path)
    (phase,) = config["phases"]
    here = {**{name: value for name, value in corpus.items() if name != "cache"}, "dir": "here"}
    for known in (1, 2):  # each on another machine, as far as the cache goes
        for one in (corpus, here):
            pretrain.prepare({**config, "corpus": {**one, "sources": sources[:known]}})
        shutil.rmtree(tmp_path / "cache")
        shards = streamed(CorpusConfig.model_validate(corpus))
        assert same_samples(sampler(open_shards(Path("here"), "train")), sampler(shards))
        assert [source["name"] for source in shards.sources] == ["a", "b"][:known]
        made = sampler(shards)
        plan = made.plan(np.arange(made.samples_per_epoch))
        assert plan.content_length.sum() == sum(len(shard.tokens) for shard in shards.shards)
        planned = PretrainConfig.model_validate({**config, "corpus": corpus})
        assert [one.mean_length for one in measured_phases(planned)] == [pytest.approx(plan.lengths.mean(), rel=0.02)]
        assert re.match(rf"length {LENGTH}: an epoch reads a token 1.000 times", reading_lines(planned)[0])
        longer = {**config, "corpus": corpus, "phases": [{**phase, "sequence_length": 2 * LENGTH}]}
        assert measured_phases(PretrainConfig.model_validate(longer)) == ()
        weighed = {**config, "corpus": corpus, "phases": [{**phase, "weights": {"c": 1}}]}
        with pytest.raises(InputError, match=r"^phases.0.weights: 'c' is not one of a"):
            measured_phases(PretrainConfig.model_validate(weighed))
        del made, shards


@pytest.mark.parametrize("pairs", [NEXT, JOINED], ids=["nsp", "joined"])
def test_what_nobody_counted_is_counted_from_where_documents_begin(proxy, tmp_path, pairs):
    here, corpus = stored(tmp_path, SINGLE, documents=100)
    counts = [source.order.counts for source in sampler(here, pairs).sources]
    proxy.requests = []
    there = sampler(streamed(corpus), pairs)
    assert all(np.array_equal(x.order.counts, y) for x, y in zip(there.sources, counts, strict=True))
    assert not any("tokens" in one for one in reads_of_text(proxy))
    assert same_samples(sampler(here, pairs), there, stop=200)


def train_alone_on_a_machine(values: dict[str, Any]) -> int:
    """Train as the only worker of a machine with a cache of its own; how many blocks are there afterward."""
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ[CACHE_VARIABLE] += f"-{rank}"
    train.main(TrainingRequest(values, resume=False), Worker(rank, size, 0, 1))
    (state,) = Path(os.environ[CACHE_VARIABLE]).rglob(".streamed/*/state")
    return int(np.count_nonzero(np.fromfile(state, block_cache.STATE)["state"]))


def test_machines_that_fetch_different_text_train_as_one_worker(proxy, tmp_path):
    here, _ = stored(tmp_path, SINGLE, documents=450)
    phases = [(LENGTH, 1024, 2)]
    more = {"pairs": SINGLE, "engine__micro_batch_tokens": 8192}
    alone = pretraining(tmp_path / "here", tmp_path / "alone", phases, **more)
    assert run_workers(1, starts, [Start(alone)]) == [[""]]
    together = pretraining(Path("x"), tmp_path / "together", phases, **more, corpus__dir=ADDRESS, corpus__cache="5MB")
    fetched = run_workers(2, train_alone_on_a_machine, together)
    blocks = sum(len(shard.blocks) for shard in here.shards if shard.blocks is not None)
    assert blocks >= 128  # two windows, the one that is read and the next one
    assert max(fetched) <= 0.52 * blocks
    losses = [[record["loss"] for record in records(tmp_path / name)] for name in ("alone", "together")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    tokens = [[record["tokens"] for record in records(tmp_path / name)] for name in ("alone", "together")]
    assert tokens[0] == tokens[1]

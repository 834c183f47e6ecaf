"""`prepare`: raw text to vocabulary, token shards and corpus card, in stages that each go on where they were.

    read        pieces of the sources -> part files
    vocabulary  counts of the words of the documents that stay -> WordPiece, unless one is taken over
    tokenise    part files of words -> part files of tokens, likewise
    shards      the documents that stay, in the order of the sources -> shard files
    card        figures; then the manifest, which makes the folder exist

Between runs the state is what lies in `<dir>/.work`: every file there is atomic and named after what it holds. The
coordinating process hands out jobs, to processes of this machine or to tasks of a Ray cluster. Text and tokens stay
with those who do them, whose memory does not grow with the corpus. The coordinating process's does, with the number of
documents: it keeps 41 bytes for each, and needs 64 for each while it sorts them (on a cluster 4 more). The corpus is
the same, byte by byte, for every number of processes, here or there, and after every interruption.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import json
import os
import shutil
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from tokenizers import Tokenizer

from pretrain.common.errors import InputError, StoppedError
from pretrain.common.files import MANIFEST, locked, put_manifest, read_manifest, sha256_file, write_json
from pretrain.config import CorpusConfig, PretrainConfig, SourceConfig
from pretrain.corpus import card, sources, stages
from pretrain.corpus.documents import Documents, PieceSummary, ShardPlan
from pretrain.corpus.inputs import Input, Piece, Problems
from pretrain.corpus.parallel import Pool, result_of
from pretrain.corpus.shards import FORMAT, token_dtype, verify_shards
from pretrain.corpus.vocabulary import (
    TOKENIZER_FILES,
    load_vocabulary,
    save_tokenizer,
    special_ids,
    train_vocabulary,
)

WORK = ".work"
_MAX_COUNTED_WORDS = 3_000_000  # distinct words counted for a vocabulary, about 0.5 GB; the rarest give way


def prepare(config: PretrainConfig, *, quiet: bool = False) -> str:
    """Prepare the corpus of `config` in its folder, going on where an earlier run stopped. Returns a summary line.

    Raises `InputError` (sources, vocabulary, unwritable folder, other settings than before), `MachineError` (disk full,
    a process killed) or `StoppedError` (Ctrl-C or SIGTERM).
    """
    return _Preparation(config, quiet=quiet).run()


def describe(config: PretrainConfig) -> dict[str, Any]:
    """What `prepare` would read, for --dry-run: dir, state, processes, bytes, and the files of every source."""
    corpus, folder = config.corpus, Path(config.corpus.dir)
    state = "finished" if (folder / MANIFEST).exists() else "begun" if (folder / WORK).exists() else "new"
    found = [
        {
            "name": _source_name(source),
            "kind": source.kind,
            "files": sum(len(item.paths) for item in inputs),
            "bytes": sum(item.bytes for item in inputs),
            "weight": source.weight,
        }
        for source, inputs in zip(corpus.sources, _find_inputs(corpus), strict=True)
    ]
    total = sum(source["bytes"] for source in found)
    return {
        "dir": str(folder),
        "state": state,
        "processes": _processes(config),
        "address": config.scheduling.address,
        "bytes": total,
        "sources": found,
    }


def _find_inputs(corpus: CorpusConfig) -> list[list[Input]]:
    return [sources.find_inputs(source, f"corpus.sources.{n}") for n, source in enumerate(corpus.sources)]


def _processes(config: PretrainConfig) -> int:
    """How many processes work; 0 on a cluster means as many as it has cores."""
    here = 0 if config.scheduling.address else len(os.sched_getaffinity(0))
    return config.corpus.processes or here


def _source_name(source: SourceConfig) -> str:
    stem = Path(source.path or source.dataset).name.split(".")[0].strip("*")
    return source.name or "-".join(filter(None, (source.kind, stem)))


class _Preparation:
    """One run of `prepare`."""

    def __init__(self, config: PretrainConfig, *, quiet: bool) -> None:
        self._corpus = config.corpus
        self._address = config.scheduling.address
        self._processes = _processes(config)
        self._folder = Path(config.corpus.dir)
        self._work = self._folder / WORK
        self._bar = _Bar(quiet=quiet)
        self._problems = Problems()

    def run(self) -> str:
        started = time.monotonic()
        finished = (self._folder / MANIFEST).exists()
        if not self._corpus.sources:
            if finished:
                return _summary(self._folder, "already prepared")
            raise InputError(f"corpus.sources: empty, and {self._folder} is not prepared. Name at least one source.")
        self._inputs = _find_inputs(self._corpus)
        given = self._corpus.vocabulary.path
        self._tokenizer = load_vocabulary(Path(given), lowercase=self._corpus.vocabulary.lowercase) if given else None
        if finished and not self._is_whole():
            (self._folder / MANIFEST).unlink()
            finished = False
        if finished:
            self._check_finished()
            shutil.rmtree(self._work, ignore_errors=True)
            return _summary(self._folder, "already prepared")
        # The pool comes first: forked processes would hold the lock, too, and catch signals meant for this one.
        pool = self._pool()
        with pool, self._locked_work(), _stoppable(self._folder), self._bar:
            self._stages(pool)
        shutil.rmtree(self._work, ignore_errors=True)
        return _summary(self._folder, f"prepared in {time.monotonic() - started:.1f} s")

    def _is_whole(self) -> bool:
        """Whether every file is as the manifest says; if not, the corpus is prepared again."""
        try:
            verify_shards(self._folder)
        except InputError as error:
            self._bar.say(f"{error} Preparing it again.")
            return False
        return True

    def _stages(self, pool: Pool) -> None:
        hashing = self._begin_hashing(pool)
        summaries = self._read(pool)
        hashes = self._end_hashing(hashing)
        tokenizer = self._tokenizer or self._vocabulary(pool, summaries)
        if self._tokenizer is None:
            self._tokenise(pool, summaries)
        documents = Documents.load(self._work, summaries, self._corpus.validation_fraction)
        plan = documents.plan(self._corpus.shard_tokens)
        results = self._write_shards(pool, documents, plan)
        pool.dismiss()
        self._finish(tokenizer, documents, plan, results, hashes)

    # ------------------------------------------------------------ settings

    def _pool(self) -> Pool:
        settings = stages.PreparationSettings(
            work=str(self._work),
            lowercase=self._corpus.vocabulary.lowercase,
            language=self._corpus.language,
            min_document_words=self._corpus.min_document_words,
            vocabulary_given=self._tokenizer is not None,
        )
        return Pool(self._processes, settings, self._tokenizer, self._address)

    @functools.cached_property
    def _settings(self) -> dict[str, Any]:
        """Everything that decides the tokens, under the names of the config."""
        corpus, vocabulary = self._corpus, self._corpus.vocabulary
        settings: dict[str, Any] = {"version": FORMAT}
        for key in ("language", "min_document_words", "validation_fraction", "shard_tokens"):
            settings[f"corpus.{key}"] = getattr(corpus, key)
        settings["corpus.vocabulary.lowercase"] = vocabulary.lowercase
        if self._tokenizer is not None:
            settings["corpus.vocabulary.path"] = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()
        else:
            for key in ("size", "min_frequency", "training_bytes"):
                settings[f"corpus.vocabulary.{key}"] = getattr(vocabulary, key)
        for number, (source, inputs) in enumerate(zip(corpus.sources, self._inputs, strict=True)):
            for key in ("kind", "subset", "split", "revision", "text_column"):
                settings[f"corpus.sources.{number}.{key}"] = getattr(source, key)
            settings[f"corpus.sources.{number}.path"] = _files_state(inputs)
        return settings

    def _check_finished(self) -> None:
        """Refuse a folder made with other settings. Names, weights and licences may change: they are renewed."""
        manifest = read_manifest(self._folder)
        before, now = manifest["settings"], self._settings
        for number, inputs in enumerate(self._inputs):
            key = f"corpus.sources.{number}.path"
            if number < len(manifest["sources"]) and before.get(key) != now[key]:
                # Copied or unpacked anew, the same files have new times: their content decides.
                hashes = {path: sha256_file(Path(path)) for item in inputs if not item.is_remote for path in item.paths}
                if _content_state(hashes) == manifest["sources"][number]["content"]:
                    before[key] = now[key]
        self._refuse_changes(before, now)
        for number, entry in enumerate(manifest["sources"]):
            entry |= self._source_facts(number)
        manifest["fingerprint"] = _fingerprint(manifest)
        if manifest != read_manifest(self._folder):
            put_manifest(self._folder, manifest)

    def _refuse_changes(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if not changed:
            return
        key = changed[0]
        if key.endswith(".path"):
            what = f"{key}: its files have changed"
        else:
            what = f"{key}: was {before.get(key)!r}, is {now.get(key)!r}"
        others = f" (and {len(changed) - 1} more)" if changed[1:] else ""
        raise InputError(
            f"{self._folder}: prepared with other settings. {what}{others}. "
            "Set them back, choose another corpus.dir, or delete this folder to prepare it anew."
        )

    def _source_facts(self, number: int) -> dict[str, Any]:
        source = self._corpus.sources[number]
        return {
            "name": _source_name(source),
            "kind": source.kind,
            "weight": source.weight,
            "licence": source.licence,
        }

    @contextlib.contextmanager
    def _locked_work(self) -> Iterator[None]:
        """The work folder, made or found, for this run alone."""
        refusal = f"{self._folder}: another prepare is at work there. Wait for it, or stop it."
        with locked(self._work / stages.LOCK, refusal):
            settings = self._work / "settings.json"
            if settings.exists():
                self._refuse_changes(json.loads(settings.read_text(encoding="utf-8")), self._settings)
            else:
                write_json(settings, self._settings)
            self._remove_leftovers()
            yield

    def _remove_leftovers(self) -> None:
        """Delete what processes that were killed left half-written."""
        for leftover in (*self._work.glob(".*.tmp"), *self._folder.glob(".*.tmp")):
            leftover.unlink(missing_ok=True)

    # ------------------------------------------------------------ stages

    def _read(self, pool: Pool) -> list[PieceSummary]:
        """Part files of all pieces; returns the pieces' summaries in the order of the corpus."""
        summaries = []
        total = sum(item.bytes for inputs in self._inputs for item in inputs)
        with self._bar.stage("reading", total) as advance:
            for (piece,), read in pool.run(stages.read, self._pieces(), self._known_summaries):
                for summary in read:
                    self._problems.extend(summary.pop("problems"))
                    summaries.append(PieceSummary(**summary))
                advance(piece.bytes)
        for number, source in enumerate(self._corpus.sources):
            if not any(summary.documents for summary in summaries if summary.source == number):
                self._problems.add(source.path or source.dataset, f"no document in this source of kind {source.kind}")
        return summaries

    def _pieces(self) -> Iterator[tuple[Piece]]:
        for number, (source, inputs) in enumerate(zip(self._corpus.sources, self._inputs, strict=True)):
            for input_number, item in enumerate(inputs):
                # Text goes through no cluster: there the task that prepares a stream reads it.
                for piece in sources.cut(source, number, input_number, item, streams=bool(self._address)):
                    yield (piece,)

    def _known_summaries(self, piece: Piece) -> list[dict[str, Any]] | None:
        summary = None if piece.is_stream else stages.known_summary(self._work, piece)
        return None if summary is None else [summary]

    def _begin_hashing(self, pool: Pool) -> list[tuple[int, Input, Any]]:
        """Hand out the hashing of every input file: (source, input, result to come). Nothing waits for it."""
        known = _read_json(self._work / "hashes.json") or [{} for _ in self._inputs]
        return [
            (number, item, pool.begin(stages.hash_files, (item.paths,)))
            for number, (inputs, hashes) in enumerate(zip(self._inputs, known, strict=True))
            for item in inputs
            if not item.is_remote and not hashes.keys() >= set(item.paths)
        ]

    def _end_hashing(self, hashing: list[tuple[int, Input, Any]]) -> list[dict[str, str]]:
        """SHA-256 of every input file, by source, in the order of the files."""
        hashes = _read_json(self._work / "hashes.json") or [{} for _ in self._inputs]
        with self._bar.stage("hashing the sources", sum(item.bytes for _, item, _ in hashing)) as advance:
            for number, item, result in hashing:
                hashes[number] |= dict(zip(item.paths, result_of(result), strict=True))
                advance(item.bytes)
        if hashing:
            write_json(self._work / "hashes.json", hashes)
        return hashes

    def _vocabulary(self, pool: Pool, summaries: list[PieceSummary]) -> Tokenizer:
        """Train on the documents that stay, at most training_bytes of them, those with the lowest hashes."""
        path = self._work / stages.TOKENIZER
        if path.exists():
            return Tokenizer.from_file(str(path))
        documents = Documents.load(self._work, summaries, self._corpus.validation_fraction)
        settings = self._corpus.vocabulary
        chosen = documents.sample(settings.training_bytes)
        work = list(zip(documents.parts, documents.by_part(chosen), strict=True))
        sizes = [int(part.sum()) for part in documents.by_part(documents.table["bytes"] * chosen.astype(np.int64))]
        counts: collections.Counter[bytes] = collections.Counter()
        with self._bar.stage("counting words", sum(sizes)) as advance:
            for size, (_, (words, numbers)) in zip(sizes, pool.run(stages.count_words, work), strict=True):
                for word, number in zip(words, numbers.tolist(), strict=True):
                    counts[word] += number
                _forget_rarest(counts)
                advance(size)
        with self._bar.stage("training the vocabulary", 0):
            tokenizer = train_vocabulary(
                counts, settings.size, lowercase=settings.lowercase, min_frequency=settings.min_frequency
            )
        save_tokenizer(self._work, tokenizer)
        return tokenizer

    def _tokenise(self, pool: Pool, summaries: list[PieceSummary]) -> None:
        """Part files of words become part files of tokens, under the new names in `summaries`."""
        work = []
        for summary in summaries:
            for number, words_part in enumerate(summary.parts):
                summary.parts[number] = words_part.replace(".words", ".tokens")
                work.append((summary.parts[number], words_part))

        def size(part: str) -> int:
            path = self._work / part
            return path.stat().st_size if path.exists() else 0

        sizes = [size(words_part) for _, words_part in work]
        with self._bar.stage("tokenising", sum(sizes)) as advance:
            results = pool.run(stages.tokenise_part, work, lambda part, _: (self._work / part).exists() or None)
            for amount, ((_, words_part), _done) in zip(sizes, results, strict=True):
                (self._work / words_part).unlink(missing_ok=True)
                advance(amount)

    def _write_shards(self, pool: Pool, documents: Documents, plan: list[ShardPlan]) -> list[dict[str, Any]]:
        work = ((p.name, documents.selections(p.documents), p.totals, str(self._folder)) for p in plan)
        results = []
        width = token_dtype(1 << 16).itemsize
        with self._bar.stage("writing shards", sum(p.totals["tokens"] * width for p in plan)) as advance:
            done = pool.run(stages.write_shard, work, lambda name, *_: _read_json(self._work / f"{name}.shard.json"))
            for shard, (_, result) in zip(plan, done, strict=True):
                results.append(result)
                advance(shard.totals["tokens"] * width)
        return results

    def _finish(
        self,
        tokenizer: Tokenizer,
        documents: Documents,
        plan: list[ShardPlan],
        results: list[dict[str, Any]],
        hashes: list[dict[str, str]],
    ) -> None:
        """Tokenizer files, card, and last the manifest."""
        self._remove_leftovers()  # a cluster goes on without the killed
        save_tokenizer(self._folder, tokenizer)
        figures = documents.figures(len(self._corpus.sources))
        entries = []
        for number, inputs in enumerate(self._inputs):
            mine = [result for shard, result in zip(plan, results, strict=True) if shard.source == number]
            entries.append(
                {
                    **self._source_facts(number),
                    "revision": self._corpus.sources[number].revision,
                    "content": _content_state(hashes[number]),
                    "input_bytes": sum(item.bytes for item in inputs),
                    **figures[number],
                    **card.shard_figures(mine),
                }
            )
        special = special_ids(tokenizer)
        size = tokenizer.get_vocab_size()
        shards = [{"name": s.name, "split": s.split, "source": s.source, **s.totals} for s in plan]
        card.write_card(
            self._folder,
            entries,
            hashes,
            self._problems.entries(),
            vocabulary_size=size,
            lowercase=self._corpus.vocabulary.lowercase,
            language=self._corpus.language,
            shards=shards,
        )
        known = {name: digest for result in results for name, digest in result["hashes"].items()}
        names = [*known, *TOKENIZER_FILES, *card.CARD_FILES]
        manifest = {
            "format": FORMAT,
            "fingerprint": "",
            "vocabulary_size": size,
            "dtype": token_dtype(size).name,
            "special_ids": special,
            "sources": entries,
            "shards": shards,
            "settings": self._settings,
            "files": {
                name: {
                    "bytes": (self._folder / name).stat().st_size,
                    "sha256": known.get(name) or sha256_file(self._folder / name),
                }
                for name in names
            },
        }
        manifest["fingerprint"] = _fingerprint(manifest)
        put_manifest(self._folder, manifest)


def _fingerprint(manifest: dict[str, Any]) -> str:
    """What decides the samples: vocabulary, token shards, and the weights of the sources (law 1)."""
    arrays = {name: entry["sha256"] for name, entry in manifest["files"].items() if name.endswith(".npy")}
    decisive = [
        FORMAT,
        manifest["special_ids"],
        manifest["files"]["vocab.txt"]["sha256"],
        manifest["shards"],
        sorted(arrays.items()),
        [source["weight"] for source in manifest["sources"]],
    ]
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _files_state(inputs: list[Input]) -> str:
    """A digest of names, sizes and times of the files. Folders may move."""
    digest = hashlib.sha256()
    for item in inputs:
        for path in item.paths:
            facts: list[Any] = [path]
            if not item.is_remote:
                stat = Path(path).stat()
                facts = [Path(path).name, stat.st_size, stat.st_mtime_ns]
            digest.update(json.dumps(facts).encode())
    return digest.hexdigest()


def _content_state(hashes: dict[str, str]) -> str:
    """A digest of the contents of a source's files, in their order."""
    return hashlib.sha256("\n".join(hashes.values()).encode()).hexdigest()


def _forget_rarest(counts: collections.Counter[bytes]) -> None:
    """Keep memory bounded: drop the words that came once, then twice, ... until there is room."""
    least = 1
    while len(counts) > _MAX_COUNTED_WORDS:
        for word in [word for word, count in counts.items() if count <= least]:
            del counts[word]
        least += 1


def _summary(folder: Path, what: str) -> str:
    """One line on a prepared corpus."""
    return card.summary_line(folder, what)


# ---------------------------------------------------------------- signals, progress


@contextlib.contextmanager
def _stoppable(folder: Path) -> Iterator[None]:
    """Ctrl-C and SIGTERM end in a `StoppedError`; what is done stays done."""

    def stop(signum: int, frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    previous = signal.signal(signal.SIGTERM, stop) if in_main else None
    try:
        yield
    except KeyboardInterrupt:
        raise StoppedError(f"{folder}: stopped. Run the same command again; it goes on where it was.") from None
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, previous)


class _Bar:
    """Progress of the stages with rate and time left, on stderr."""

    def __init__(self, *, quiet: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description:24}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=Console(stderr=True),
            disable=quiet,
        )

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._progress.console.print(text, highlight=False, markup=False)

    @contextlib.contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar over `total` bytes; yields what is called with the bytes done."""
        task = self._progress.add_task(name, total=total or None)
        yield lambda amount: self._progress.update(task, advance=amount)
        self._progress.update(task, total=max(total, 1), completed=max(total, 1))

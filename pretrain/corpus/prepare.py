"""`prepare`: raw text to vocabulary, token shards and corpus card, in stages that can each be resumed.

If the corpus already exists, only its new sources are prepared (`growth`).

    read        chunks of the sources -> part files of the filtered documents; optionally, find near-duplicates
    vocabulary  word counts of the kept documents -> a vocabulary, unless one is given
    tokenize    part files of words -> part files of tokens, unless a vocabulary is given
    shards      kept documents, source by source -> shard files; if `dir` is an address, they are uploaded immediately
    card        statistics; then the manifest, which completes the corpus

The state between runs is in `<dir>/.work`. Files there are written atomically, and part files are named after their
chunk, so that a later run finds them. Only the files of `documents` are written again in each run. The coordinating
process assigns calls of functions in `stages` to processes of this machine or to tasks of a Ray cluster. Text and
tokens stay in these processes. No process's memory grows with the corpus, except for a bit per document on a cluster,
where all calls are submitted at once. Neither the number of processes nor interruptions change the corpus.
"""

import collections
import contextlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pretrain.common.addresses import is_remote
from pretrain.common.errors import InputError
from pretrain.common.files import MANIFEST, locked, put_manifest, read_manifest, write_json
from pretrain.common.settings import import_named
from pretrain.config import PretrainConfig
from pretrain.corpus import card, sources, stages
from pretrain.corpus.byte_level import is_bertrain_byte_level, with_joined_lines
from pretrain.corpus.description import (
    WORK,
    check_line_breaks,
    check_weights,
    configured_tokenizer,
    process_count,
    read_tokenizer_config,
)
from pretrain.corpus.documents import ChunkSummary, Documents, ShardPlan
from pretrain.corpus.extension import check_extension, count_sampled_words, extend_vocabulary, saved_share
from pretrain.corpus.filters.evaluation_sets import TABLE, write_table
from pretrain.corpus.filters.near_duplicates import Precedence
from pretrain.corpus.finish import PreparedCorpus, ReadingCounter
from pretrain.corpus.formats import kind_warnings
from pretrain.corpus.growth import ExistingCorpus, check_repeatable, known_digests
from pretrain.corpus.inputs import CHUNK_BYTES, Chunk, Input, Problems, first_faults
from pretrain.corpus.manifest import (
    VOCABULARY_TRAINING_BYTES,
    changeable_source_fields,
    check_is_corpus_folder,
    check_same_tokenizer,
    check_unchanged,
    fingerprint,
    match_sources,
    prefix_settings,
    settings_affecting_tokens,
    source_name,
    split_by_source,
    try_read_manifest,
)
from pretrain.corpus.near_search import find_near_duplicates, load_near_duplicates
from pretrain.corpus.parallel import Pool, result_of, stoppable
from pretrain.corpus.released import encodes_whole_documents
from pretrain.corpus.shards import token_dtype, verify_shards
from pretrain.corpus.special_tokens import check_special_tokens, declared_settings, special_ids
from pretrain.corpus.stage_bar import StageBar
from pretrain.corpus.stored import sync_with_address
from pretrain.corpus.vocabulary import Fold, drop_rarest, fold_of, save_tokenizer, train
from pretrain.storage.folders import record_stored


def prepare(
    config: PretrainConfig,
    *,
    tokenizer: Tokenizer | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    quiet: bool = False,
    bar: StageBar | None = None,
    count_readings: ReadingCounter | None = None,
) -> str:
    """Prepare the corpus of `config` in its folder, or continue where an earlier run stopped. Return a summary line.

    Args:
        tokenizer: tokenizer of the checkpoint that a run starts from; replaces corpus.vocabulary, except for the number
            of words to add.
        tokenizer_config: the checkpoint's tokenizer_config.json, which names a released tokenizer's special tokens.
        quiet: whether to hide the progress.
        bar: progress bar; by default, a new one.
        count_readings: function that counts how often an epoch of the training text reads a token, for the card.

    Raises:
        InputError: the sources or the vocabulary are wrong, the folder is not writable, or settings have changed.
        MachineError: the disk is full, or a process was killed.
        StoppedError: Ctrl-C or SIGTERM was received.
    """
    import_named(config)
    check_weights(config)
    folder = config.corpus.folder
    with sync_with_address(config.corpus) as is_stored:
        if config.corpus.sources:
            bar = bar or StageBar(quiet=quiet)
            options = tokenizer, tokenizer_config or {}, count_readings
            return _Preparation(config, bar, *options, is_stored=is_stored).run()
        if (folder / MANIFEST).exists():
            return card.summary_line(folder, "already prepared")
    raise InputError(f"corpus.sources: empty, and {folder} is not prepared. Give at least one source.")


class _Preparation:
    """One call of `prepare`."""

    def __init__(
        self,
        config: PretrainConfig,
        bar: StageBar,
        tokenizer: Tokenizer | None,
        tokenizer_config: Mapping[str, Any],
        count_readings: ReadingCounter | None,
        *,
        is_stored: bool,
    ) -> None:
        self._count_readings, self._is_stored = count_readings, is_stored
        self._corpus = corpus = config.corpus
        self._address = config.scheduling.address
        self._processes = process_count(config)
        self._folder = corpus.folder
        self._work_dir = self._folder / WORK
        self._bar = bar
        self._problems = Problems()
        self._all_sources = tuple(corpus.sources)
        digests = known_digests(self._folder, self._all_sources) if is_stored else {}
        self._all_inputs = [
            [] if n in digests else sources.find_inputs(s, f"corpus.sources.{n}")
            for n, s in enumerate(self._all_sources)
        ]
        # The sources to prepare, by their index in the corpus; if the corpus exists, only new sources.
        self._sources, self._inputs = dict(enumerate(self._all_sources)), dict(enumerate(self._all_inputs))
        self._existing: ExistingCorpus | None = None  # the corpus to which the sources are added
        self._new_settings: dict[str, Any] = {}  # settings of the new sources
        self._checkpoint_tokenizer, added_words = tokenizer, corpus.vocabulary.added_words
        tokenizer = tokenizer or configured_tokenizer(corpus)
        if tokenizer is not None and added_words:
            check_extension(tokenizer, added_words)
        check_line_breaks(corpus, tokenizer)
        self._settings = settings_affecting_tokens(corpus, self._all_inputs, tokenizer, digests)
        self._encodes_whole_documents = tokenizer is not None and encodes_whole_documents(tokenizer)
        tokenizer = self._apply_line_breaks(tokenizer) if tokenizer else None
        self._tokenizer_config, self._unknown_id = {}, -1
        if tokenizer is not None and self._encodes_whole_documents:
            self._tokenizer_config = dict(
                tokenizer_config if self._checkpoint_tokenizer else read_tokenizer_config(corpus)
            )
            ids = special_ids(tokenizer, self._tokenizer_config)
            check_special_tokens(ids, config.start_from or corpus.vocabulary.path)
            self._unknown_id = ids.get("unk", -1)
        self._tokenizer, self._extension = tokenizer, {}

    def run(self) -> str:
        started = time.monotonic()
        check_is_corpus_folder(self._folder)
        manifest, outcome = self._manifest_bytes(), "already prepared"
        if self._is_finished():
            shutil.rmtree(self._work_dir, ignore_errors=True)
            if skipped := [problem for inputs in self._all_inputs for item in inputs for problem in item.problems]:
                self._bar.say(first_faults(skipped))  # the card lacks them, such as the corpus itself inside a source
        else:
            self._check_kinds()
            if self._corpus.vocabulary.added_words and not self._existing:
                with stoppable(self._folder), self._bar:
                    self._extend()
            # Start the pool first: forked processes would inherit the lock and the signal handlers.
            pool = self._make_pool()
            with pool, self._locked_work(), stoppable(self._folder), self._bar:
                # Another process may have finished the corpus in the meantime.
                if self._manifest_bytes() == manifest or not self._is_finished():
                    self._run_stages(pool)
                    names = " and ".join(source_name(source) for source in self._sources.values())
                    action = f"{names} added" if self._existing else "prepared"
                    outcome = f"{action} in {time.monotonic() - started:.1f} s"
                shutil.rmtree(self._work_dir, ignore_errors=True)  # while locked; later, another process may use it
        return card.summary_line(self._folder, outcome)

    def _manifest_bytes(self) -> bytes:
        path = self._folder / MANIFEST
        return path.read_bytes() if path.exists() else b""

    def _is_finished(self) -> bool:
        """Return whether the corpus is complete and intact. If it is damaged, it is prepared again as before.

        Names, weights and licenses of sources may change; the manifest is then updated. If the config has new sources,
        they are selected to be added. Raises `InputError` if the corpus was prepared with other settings.
        """
        if not (self._folder / MANIFEST).exists():
            return False
        requested = self._all_sources, self._all_inputs, self._settings
        try:
            if not self._is_stored:  # a stored corpus was verified when it was fetched, and its shards may not be local
                verify_shards(self._folder)
        except InputError as error:
            if manifest := try_read_manifest(self._folder):
                from_config = not self._checkpoint_tokenizer
                indices = match_sources(self._folder, manifest, *requested, compare_vocabulary=from_config)
                check_repeatable(manifest, indices, error)
            self._bar.say(f"{error} Preparing it again.")
            return False
        required_tokenizer = None if self._corpus.vocabulary.added_words else self._checkpoint_tokenizer
        manifest = read_manifest(self._folder)
        if required_tokenizer is not None:
            check_same_tokenizer(self._folder, required_tokenizer)
        indices = match_sources(self._folder, manifest, *requested, compare_vocabulary=required_tokenizer is None)
        stored_manifest = read_manifest(self._folder)
        for source, index in zip(self._all_sources, indices, strict=True):
            if index < len(manifest["sources"]):
                manifest["sources"][index] |= changeable_source_fields(source)
        manifest["fingerprint"] = fingerprint(manifest)
        if manifest != stored_manifest:
            put_manifest(self._folder, manifest)
        self._select_new(manifest, indices)
        return not self._sources

    def _select_new(self, manifest: dict[str, Any], corpus_indices: list[int]) -> None:
        """Select the new sources, given the result of `match_sources`, to prepare them with the corpus's vocabulary."""
        count = len(manifest["sources"])
        new = {corpus_index: index for index, corpus_index in enumerate(corpus_indices) if corpus_index >= count}
        self._sources = {corpus_index: self._all_sources[index] for corpus_index, index in new.items()}
        self._inputs = {corpus_index: self._all_inputs[index] for corpus_index, index in new.items()}
        if not new:
            return
        self._existing, self._new_settings = ExistingCorpus(self._folder, manifest), {}
        self._tokenizer = tokenizer = self._apply_line_breaks(Tokenizer.from_file(str(self._folder / "tokenizer.json")))
        self._encodes_whole_documents = encodes_whole_documents(tokenizer)
        self._tokenizer_config = declared_settings(self._folder) if self._encodes_whole_documents else {}
        if self._encodes_whole_documents:
            self._unknown_id = special_ids(tokenizer, self._tokenizer_config).get("unk", -1)
        settings = split_by_source(self._settings)[1]
        for corpus_index, index in new.items():
            self._new_settings |= prefix_settings(corpus_index, settings[index])

    def _run_stages(self, pool: Pool) -> None:
        contamination = self._corpus.filters.contamination
        evaluation_sizes = write_table(contamination, self._work_dir / TABLE) if contamination.sets else []
        hashing = self._start_hashing(pool)
        summaries = self._read(pool)
        if self._existing and self._corpus.filters.near_duplicates.enabled:
            self._existing.link_sketches(self._work_dir)
        training_hashes = self._existing.training_hash_files if self._existing else ()
        precedence = Precedence(tuple(self._held_out), self._corpus.validation_fraction, training_hashes)
        find_near_duplicates(pool, self._work_dir, self._corpus.filters.near_duplicates, precedence, self._bar)
        hashes = self._finish_hashing(hashing)
        tokenizer = self._tokenizer or self._train_vocabulary(pool, summaries)
        if self._tokenizer is None:
            self._tokenize(pool, summaries)
        documents = self._documents(summaries)
        plan = documents.plan(self._corpus.shard_tokens, self._existing and self._existing.first_shards)
        if not self._existing:
            (self._folder / MANIFEST).unlink(missing_ok=True)  # a damaged corpus remains readable until now
        results = self._write_shards(pool, documents, plan)
        pool.finish()
        self._remove_leftovers()  # files of processes that a cluster lost
        prepared = PreparedCorpus(
            self._corpus,
            self._work_dir,
            self._sources,
            self._inputs,
            self._existing.manifest["settings"] | self._new_settings if self._existing else self._settings,
            self._existing,
            tokenizer=tokenizer,
            tokenizer_config=self._tokenizer_config,
            extension=self._extension,
            documents=documents,
            plan=plan,
            results=results,
            hashes=hashes,
            problems=self._problems,
            evaluation_sizes=evaluation_sizes,
        )
        prepared.write(self._count_readings)

    def _extend(self) -> None:
        """Add words to the checkpoint's tokenizer, and measure the share of tokens that they save."""
        assert self._tokenizer is not None
        with self._bar.stage("choosing words", 0):
            counts, sample = count_sampled_words((self._all_sources[n], inputs) for n, inputs in self._inputs.items())
            extended, words = extend_vocabulary(self._tokenizer, counts, self._corpus.vocabulary.added_words)
            share = saved_share(self._tokenizer, extended, sample)
        self._extension = {"added": len(words), "saved_share": round(share, 6), "first_added": words[:20]}
        self._tokenizer = extended

    def _check_kinds(self) -> None:
        """Warn if another kind fits plain text; raise `InputError` if no training text would be left."""
        warnings, is_all_text = kind_warnings(self._sources, self._inputs, self._corpus.validation_fraction)
        if is_all_text and not self._existing:
            raise InputError(f"{' '.join(warnings)} Otherwise all documents are held out.")
        for warning in warnings:
            self._bar.say(warning)

    # ------------------------------------------------------------ settings

    def _apply_line_breaks(self, tokenizer: Tokenizer) -> Tokenizer:
        """If bertrain trained the tokenizer and the corpus does not keep line breaks, make it treat them as spaces."""
        return tokenizer if self._corpus.line_breaks == "keep" else with_joined_lines(tokenizer)

    def _make_pool(self) -> Pool:
        trains_bpe = self._tokenizer is None and self._corpus.vocabulary.kind == "byte_bpe"
        is_bertrain = trains_bpe or (self._tokenizer and is_bertrain_byte_level(json.loads(self._tokenizer.to_str())))
        settings = stages.PreparationSettings(
            work_dir=str(self._work_dir),
            lowercase=self._corpus.vocabulary.lowercase,
            fold=self._fold,
            language=self._corpus.language,
            min_document_words=self._corpus.min_document_words,
            vocabulary_given=self._tokenizer is not None,
            trains_byte_bpe=trains_bpe,
            encodes_whole_documents=self._encodes_whole_documents,
            joins_lines=bool(is_bertrain) and self._corpus.line_breaks != "keep",
            unknown_id=self._unknown_id,
            filters=self._corpus.filters,
            address=self._corpus.dir if is_remote(self._corpus.dir) else "",
        )
        return Pool(self._processes, settings, self._tokenizer, self._address)

    @property
    def _fold(self) -> Fold:
        return fold_of(self._corpus.vocabulary, self._tokenizer)

    @contextlib.contextmanager
    def _locked_work(self) -> Iterator[None]:
        """Lock the work folder for this run; create it if it is missing."""
        error_message = f"{self._folder}: another `prepare` is running in it. Wait for it, or stop it."
        with locked(self._work_dir / stages.LOCK, error_message):
            self._open_work()
            self._remove_leftovers()
            yield

    def _open_work(self) -> None:
        """Check that the work folder can be continued. Raises `InputError` if it was started with other settings."""
        file, existing = self._work_dir / "settings.json", self._existing
        # Part files are named after their chunk, so chunks must not change.
        requested = self._settings | {"piece_bytes": CHUNK_BYTES, "order": "random", "duplicates": "held-out first"}
        if self._fold:
            requested["duplicates"] += ", all letters folded"
        if self._corpus.vocabulary.added_words:
            requested["words_added"] = "first"
        if self._encodes_whole_documents or self._corpus.vocabulary.kind == "byte_bpe":
            requested["texts"] = "whole"
        if existing:
            requested = split_by_source(requested)[0] | self._new_settings | {"grows": existing.fingerprints}
        saved = _read_json(file)
        if saved is not None and existing and saved.get("grows") != requested["grows"]:
            # The files are left from preparing the existing corpus, or from adding other sources.
            for path in set(self._work_dir.iterdir()) - {self._work_dir / stages.LOCK}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            saved = None
        if saved is None:
            if existing:
                existing.save_old_card(self._work_dir)
            write_json(file, requested)
        else:
            check_unchanged(self._work_dir if existing else self._folder, saved, requested)

    def _remove_leftovers(self) -> None:
        """Delete the incomplete files of killed processes."""
        for leftover in (*self._work_dir.glob(".*.tmp"), *self._folder.glob(".*.tmp")):
            leftover.unlink(missing_ok=True)

    # ------------------------------------------------------------ stages

    def _read(self, pool: Pool) -> list[ChunkSummary]:
        """Write the part files of all chunks; return a summary of each chunk, in the order of the corpus."""
        summaries: list[ChunkSummary] = []
        example_counts: collections.Counter[tuple[str, str]] = collections.Counter()
        seen: set[int] = set()
        total = self._input_bytes()
        for inputs in self._inputs.values():
            for item in inputs:
                self._problems.extend(item.problems)
        with self._bar.stage("reading", total) as advance:
            for (chunk,), chunk_summaries in pool.run(stages.read, self._chunks(), self._load_summaries):
                for summary in chunk_summaries:
                    self._problems.extend(summary.pop("problems"))
                    summaries.append(ChunkSummary(**summary))
                    summaries[-1].drop_surplus(example_counts, seen)
                advance(chunk.bytes)
        for index, source in self._sources.items():
            if not any(summary.documents for summary in summaries if summary.source == index):
                self._problems.add(source.path or source.dataset, f"no document in this source of kind {source.kind}")
        return summaries

    def _input_bytes(self) -> int:
        return sum(item.bytes for inputs in self._inputs.values() for item in inputs)

    def _chunks(self) -> Iterator[tuple[Chunk]]:
        for index, source in self._sources.items():
            for input_index, item in enumerate(self._inputs[index]):
                # Do not send text to a cluster: the task that prepares a stream reads the file.
                for chunk in sources.cut(source, index, input_index, item, defer_streams=bool(self._address)):
                    yield (chunk,)

    def _load_summaries(self, chunk: Chunk) -> list[dict[str, Any]] | None:
        summary = None if chunk.is_stream else stages.load_summary(self._work_dir, chunk)
        return None if summary is None else [summary]

    def _start_hashing(self, pool: Pool) -> list[tuple[int, Input, Any]]:
        """Start hashing the input files in the background; return (position in `_inputs`, input, future result)."""
        known_hashes = _read_json(self._work_dir / "hashes.json") or [{} for _ in self._inputs]
        return [
            (index, item, pool.submit(stages.hash_files, (item.paths,)))
            for index, (inputs, hashes) in enumerate(zip(self._inputs.values(), known_hashes, strict=True))
            for item in inputs
            if not item.is_on_hub and not hashes.keys() >= set(item.paths)
        ]

    def _finish_hashing(self, hashing: list[tuple[int, Input, Any]]) -> list[dict[str, str]]:
        """Return {path: SHA-256} of the input files of each source, in order."""
        hashes = _read_json(self._work_dir / "hashes.json") or [{} for _ in self._inputs]
        with self._bar.stage("hashing the sources", sum(item.bytes for _, item, _ in hashing)) as advance:
            for index, item, result in hashing:
                hashes[index] |= dict(zip(item.paths, result_of(result), strict=True))
                advance(item.bytes)
        if hashing:
            write_json(self._work_dir / "hashes.json", hashes)
        return hashes

    def _train_vocabulary(self, pool: Pool, summaries: list[ChunkSummary]) -> Tokenizer:
        """Train a vocabulary on kept documents with the lowest hashes, at most VOCABULARY_TRAINING_BYTES of text."""
        path = self._work_dir / stages.TOKENIZER
        if path.exists():
            return Tokenizer.from_file(str(path))
        documents = self._documents(summaries)
        settings = self._corpus.vocabulary
        sizes: collections.deque[int] = collections.deque()

        def calls() -> Iterator[tuple[str, np.ndarray]]:
            for part, chosen, size in documents.sample(VOCABULARY_TRAINING_BYTES):
                sizes.append(size)
                yield part, np.packbits(chosen)

        counts: collections.Counter[bytes] = collections.Counter()
        with self._bar.stage("counting words", min(VOCABULARY_TRAINING_BYTES, self._input_bytes())) as advance:
            for _, (words, word_counts) in pool.run(stages.count_words, calls()):
                for word, count in zip(words, word_counts.tolist(), strict=True):
                    counts[word] += count
                drop_rarest(counts)
                advance(sizes.popleft())
        with self._bar.stage("training the vocabulary", 0):
            tokenizer = self._apply_line_breaks(train(counts, settings))
        save_tokenizer(self._work_dir, tokenizer)
        return tokenizer

    @property
    def _held_out(self) -> dict[int, str]:
        return {index: source_name(source) for index, source in self._sources.items() if source.held_out}

    def _documents(self, summaries: list[ChunkSummary]) -> Documents:
        near = load_near_duplicates(self._work_dir, self._corpus.filters.near_duplicates)
        fraction, faults = self._corpus.validation_fraction, self._problems.entries()
        known = self._existing.hash_files if self._existing else ()
        try:
            return Documents.load(self._work_dir, summaries, fraction, self._held_out, near, faults, known)
        except InputError:
            shutil.rmtree(self._work_dir, ignore_errors=True)  # useless: other settings or sources are needed
            raise

    def _tokenize(self, pool: Pool, summaries: list[ChunkSummary]) -> None:
        """Convert part files of words to part files of tokens, and rename them in `summaries`."""
        calls = []
        for summary in summaries:
            for index, words_part in enumerate(summary.parts):
                summary.parts[index] = words_part.replace(".words", ".tokens")
                calls.append((summary.parts[index], words_part))
        paths = [self._work_dir / words_part for _, words_part in calls]
        sizes = [path.stat().st_size if path.exists() else 0 for path in paths]
        with self._bar.stage("tokenizing", sum(sizes)) as advance:
            results = pool.run(stages.tokenize_part, calls, lambda part, _: (self._work_dir / part).exists() or None)
            for path, size, _ in zip(paths, sizes, results, strict=True):
                path.unlink(missing_ok=True)
                advance(size)

    def _write_shards(self, pool: Pool, documents: Documents, plan: list[ShardPlan]) -> list[dict[str, Any]]:
        calls = ((shard.name, shard.document_range, shard.totals, str(self._folder)) for shard in plan)
        results = []
        token_bytes = token_dtype(1 << 16).itemsize
        with self._bar.stage("writing shards", sum(shard.totals["tokens"] * token_bytes for shard in plan)) as advance:
            written = pool.run(stages.write_shard, calls, lambda n, *_: _read_json(self._work_dir / f"{n}.shard.json"))
            for shard, (_, result) in zip(plan, written, strict=True):
                results.append(result)
                advance(shard.totals["tokens"] * token_bytes)
        if stored := {name: digest for row in results if row.get("stored") for name, digest in row["hashes"].items()}:
            record_stored(self._folder, self._corpus.dir, stored)
        return results


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

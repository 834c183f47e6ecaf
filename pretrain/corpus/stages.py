"""The functions that preparation processes execute: read a chunk, count words, tokenize, write a shard, hash files.

Stages pass documents on in part files (`parts`). A process keeps its table of words between calls.
"""

import gc
import json
import os
import signal
import threading
import types
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pretrain.common.addresses import join
from pretrain.common.errors import MachineError
from pretrain.common.files import sha256_file, write_json
from pretrain.common.memory import hold_freed_memory
from pretrain.config import FiltersConfig
from pretrain.corpus import samples
from pretrain.corpus.byte_level import join_lines
from pretrain.corpus.documents import DocumentRange
from pretrain.corpus.filters import Filters, near_duplicates
from pretrain.corpus.filters.near_duplicates import Sketches
from pretrain.corpus.filters.report import Report
from pretrain.corpus.inputs import Chunk, Problems
from pretrain.corpus.parts import DOCUMENT, Part, random_order
from pretrain.corpus.sentences import SentenceSplitter, batches_of, locate_sentences, splitter_for
from pretrain.corpus.shards import ShardWriter, token_dtype
from pretrain.corpus.sources import cut_stream, documents, reader
from pretrain.corpus.special_tokens import special_ids
from pretrain.corpus.splitters import Gpt2Splitter
from pretrain.corpus.tokenize import MAX_TABLE_WORDS, BytePairs, CutWords, WordPieces, WordTable, WordTokens, cut_words
from pretrain.corpus.vocabulary import Fold, vocabulary_size
from pretrain.corpus.whole_documents import DocumentEncoder, document_records
from pretrain.storage.folders import file_entries, read_stored_manifest
from pretrain.storage.objects import AccessError, ObjectStore

LOCK = "lock"  # file in the work folder, locked by the coordinating process
TOKENIZER = "tokenizer.json"  # file in the work folder
HISTOGRAM_BINS = 33  # bin b counts lengths of b bits: 1, 2-3, 4-7, ...
_PART_BYTES = 32 << 20  # maximum text per part file


@dataclass(frozen=True)
class PreparationSettings:
    """The settings of a preparation process. If no vocabulary is given, words are tokenized in a later stage."""

    work_dir: str  # folder of the part files and of the trained tokenizer
    lowercase: bool
    language: str
    min_document_words: int
    vocabulary_given: bool
    trains_byte_bpe: bool = False  # whether a byte-level BPE is trained
    encodes_whole_documents: bool = False  # whether the given vocabulary encodes whole documents, not single words
    fold: Fold = Fold.NOTHING  # differences that are ignored when documents are compared
    joins_lines: bool = False  # whether line breaks in whole documents become spaces
    unknown_id: int = -1  # id of the unknown token in the given vocabulary
    filters: FiltersConfig = field(default_factory=FiltersConfig)
    address: str = ""  # address at which each shard is stored as soon as it is written; "" for none


# ---------------------------------------------------------------- the process


class _ProcessState:
    """The state of this process: settings, tokenizer, and the words seen so far."""

    def __init__(self, settings: PreparationSettings, tokenizer: Tokenizer | None) -> None:
        self.settings = settings
        self.work_dir = Path(settings.work_dir)
        self.filters = Filters(settings.filters, self.work_dir)
        self.table = WordTable()
        self.dtype = np.dtype(np.uint16)
        self.unknown_id = -1
        self.is_on_cluster = False  # whether this is a task on a cluster, which may not see the coordinator's files
        self._tokenizer = tokenizer
        self._word_tokens: WordTokens | None = None
        self._document_encoder: DocumentEncoder | None = None
        if tokenizer is not None:
            self.load_tokenizer()  # early, while the coordinating process is still busy

    def load_tokenizer(self) -> None:
        """Load the tokenizer; later calls do nothing."""
        if self.settings.encodes_whole_documents:
            self.document_encoder()
        else:
            self.word_tokens()

    def word_tokens(self) -> WordTokens:
        """Return the tokens of the words in `table`."""
        if self._word_tokens is None:
            tokenizer = self._read_tokenizer()
            self.unknown_id = special_ids(tokenizer)["unk"]
            tokens_class = BytePairs if self.settings.trains_byte_bpe else WordPieces
            self._word_tokens = tokens_class(tokenizer, self.table)
        return self._word_tokens

    def document_encoder(self) -> DocumentEncoder:
        """Return the encoder of whole documents."""
        if self._document_encoder is None:
            self.unknown_id = self.settings.unknown_id
            self._document_encoder = DocumentEncoder(self._read_tokenizer(), self.table)
        return self._document_encoder

    def _read_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str(self.work_dir / TOKENIZER))
        self.dtype = token_dtype(vocabulary_size(self._tokenizer))
        return self._tokenizer

    def limit_table(self) -> None:
        """Start a new table of words if the current one is too large."""
        if self.table.size > MAX_TABLE_WORDS:
            self.table, self._word_tokens, self._document_encoder = WordTable(), None, None


_process: _ProcessState | None = None


# Signal that interrupts the running call of a child process. The child stays alive: if it were killed, it could leave a
# partial result in the pipe to the pool, which would wait for the rest. It is not SIGTERM, because the executor sends
# SIGTERM to all children if one was killed.
STOP = signal.SIGUSR1
_is_running = _is_stopped = False


def run_interruptible(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a child process. STOP interrupts this call and all later ones; no file is left incomplete."""
    global _is_running
    _is_running = True
    try:
        if _is_stopped:
            raise KeyboardInterrupt
        return function(*arguments)
    finally:
        _is_running = False


def _stop(signum: int, frame: types.FrameType | None) -> None:
    global _is_stopped
    _is_stopped = True
    if _is_running:
        raise KeyboardInterrupt


def start_process(settings: PreparationSettings, tokenizer: Tokenizer | None, *, child: bool = True) -> None:
    """Initialize this process for calls, with the tokenizer if the vocabulary is given.

    A child ignores Ctrl-C, since its parent sends STOP, and exits when its parent dies.
    """
    global _process
    if child:
        gc.freeze()  # exclude the parent's objects from garbage collection
        _disable_threads()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(STOP, _stop)
        threading.Thread(target=_exit_with_parent, daemon=True).start()
    _process = _ProcessState(settings, tokenizer)


def start_task(settings: PreparationSettings, tokenizer: Tokenizer | None) -> None:
    """Initialize a worker process of a Ray cluster for calls; Ray handles its signals and its exit.

    Raises `MachineError` if the work folder is not visible, so that no files are written to a different folder.
    """
    global _process
    _disable_threads()
    _process = _ProcessState(settings, tokenizer)
    _process.is_on_cluster = True
    _check_visible([str(_process.work_dir / LOCK)])


def _disable_threads() -> None:
    hold_freed_memory(max_bytes=256 << 20)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core already has a process
    os.environ["RAYON_NUM_THREADS"] = "1"


def _check_visible(paths: Sequence[str]) -> None:
    """Raise `MachineError` if this machine does not see a file of the coordinating process."""
    if not _state().is_on_cluster:
        return
    for path in paths:
        if not path.startswith("hub:") and not Path(path).exists():
            raise MachineError(
                f"{path}: missing on the machine {os.uname().nodename} of the cluster. "
                "All its nodes must see the same files under the same paths."
            )


def _exit_with_parent() -> None:
    import multiprocessing
    from multiprocessing.connection import wait

    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _state() -> _ProcessState:
    """Return the state of this process."""
    if _process is None:
        raise RuntimeError("start_process has not been called")
    return _process


# ---------------------------------------------------------------- calls


def read(chunk: Chunk) -> list[dict[str, Any]]:
    """Prepare a chunk, or all unprepared chunks of a stream; return dicts with the fields of their `ChunkSummary`."""
    _check_visible(chunk.paths)
    if not chunk.is_stream:
        return [_read_chunk(chunk)]
    work_dir = _state().work_dir
    return [load_summary(work_dir, inner) or _read_chunk(inner) for inner in cut_stream(chunk)]


def load_summary(work_dir: Path, chunk: Chunk) -> dict[str, Any] | None:
    """Return the summary of a chunk; None if the chunk is not prepared yet."""
    path = work_dir / f"{chunk.name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _read_chunk(chunk: Chunk) -> dict[str, Any]:
    """Read, split and (with a vocabulary) tokenize one chunk into part files; the summary is written last."""
    state = _state()
    problems, report = Problems(), Report()
    splitter = splitter_for(state.settings.language, by_lines=reader(chunk.config).lines_are_sentences)
    names: list[str] = []
    batches: list[Part] = []
    sample: list[tuple[np.ndarray, str]] = []
    document_count = size = 0

    def flush() -> None:
        nonlocal size
        part = _join_batches(batches, state)
        if len(part.documents):
            names.append(f"{chunk.name}-{len(names):04d}.{'tokens' if state.settings.vocabulary_given else 'words'}")
            path = state.work_dir / names[-1]
            samples.save(path, part, sample)
            part.reorder(np.argsort(random_order(part.documents["hash"]), kind="stable")).save(path)
            if part.sketches:  # in the order of the input: the first of two near-duplicates is kept
                part.sketches.save(path.with_suffix(near_duplicates.SUFFIX), part.documents["hash"])
        batches.clear()
        size = 0
        state.limit_table()

    for texts in batches_of(documents(chunk, problems)):
        document_count += len(texts)
        texts, sketches = state.filters.keep(texts, report)
        if not texts:
            continue
        part, texts = _convert(texts, sketches, state, splitter)
        if not batches:
            sample = [(part.documents["hash"][index], texts[index]) for index in samples.choose(texts)]
        batches.append(part)
        size += sum(map(len, texts))
        if size >= _PART_BYTES:
            flush()
    if batches:
        flush()
    summary = {
        "source": chunk.source,
        "documents": document_count,
        "parts": names,
        "problems": problems.entries(),
        "filtered": report.entries(),
        "seen": sorted(report.seen),
        "left_out": problems.skip_counts,
    }
    write_json(state.work_dir / f"{chunk.name}.json", summary)
    return summary


def count_words(part: str, keep: np.ndarray) -> tuple[list[bytes], np.ndarray]:
    """Count the words of the documents that the packed bits `keep` select; return distinct words and their counts."""
    chosen = _load_documents(part, keep)
    counts = np.bincount(chosen.items, minlength=len(chosen.distinct_words))
    used = np.flatnonzero(counts)
    return [chosen.distinct_words[n] for n in used], counts[used]


def tokenize_part(part: str, words_part: str) -> None:
    """Convert the part file `words_part`, of word indices, to the part file `part`, of token ids."""
    state = _state()
    if (state.work_dir / part).exists():
        return  # a cluster may repeat a call after its input was deleted
    state.limit_table()
    words = Part.load(state.work_dir / words_part)
    indices = state.table.intern_words(words.distinct_words)[words.items]
    _tokenize(indices, words, state)[0].save(state.work_dir / part)


def write_shard(name: str, document_range: DocumentRange, totals: dict[str, int], folder: str) -> dict[str, Any]:
    """Write a shard with the documents in a range of part files, in random order.

    Return file hashes, the address at which the files were stored, the number of unknown tokens, sampled documents, and
    histograms of tokens per document and sentence. The result is also saved in the work folder to mark the shard done.
    """
    state = _state()
    state.load_tokenizer()
    part, sampled = _load_range(document_range)
    lengths = {"document": _histogram(part.documents["items"]), "sentence": _histogram(part.sentence_items)}
    unknown = int(np.count_nonzero(part.items == state.unknown_id))
    with ShardWriter(Path(folder), name, dtype=state.dtype, **totals) as writer:
        writer.add(part.items, part.sentence_items, part.documents["sentences"])
    stored = _store(Path(folder), writer.hashes, state)
    result = {
        "hashes": writer.hashes,
        "stored": stored,
        "unknown": unknown,
        "samples": samples.limit_sample(sampled, part),
        "lengths": {k: v.tolist() for k, v in lengths.items()},
    }
    write_json(state.work_dir / f"{name}.shard.json", result)
    return result


def _store(folder: Path, names: Collection[str], state: _ProcessState) -> str:
    """Store the files of a shard at the configured address; return the address, or "" if they were not stored."""
    address, objects = state.settings.address, ObjectStore()
    try:
        # Do not overwrite the files of a corpus that another machine has stored in the meantime.
        if not address or not file_entries(read_stored_manifest(address, objects)).keys().isdisjoint(names):
            return ""
        for name in names:
            objects.upload(folder / name, join(address, name))
    except AccessError:
        if not state.is_on_cluster:
            raise
        return ""  # the coordinating process has access, and stores the shard at the end
    return address


def _load_range(document_range: DocumentRange) -> tuple[Part, list[tuple[str, np.ndarray]]]:
    """Return a range of documents, read from part files, in random order, and the sampled documents among them."""
    work_dir = _state().work_dir
    parts: list[Part] = []
    sampled: list[tuple[str, np.ndarray]] = []
    for part_index, (name, indices) in enumerate(document_range.documents(work_dir)):
        if len(indices):
            parts.append(Part.load_selected(work_dir / name, indices))
            sampled += samples.load(work_dir / name, parts[-1]) if part_index < samples.MAX_PARTS else []
    joined = Part(
        np.concatenate([part.items for part in parts]),
        np.concatenate([part.sentence_items for part in parts]),
        np.concatenate([part.documents for part in parts]),
        [],
    )
    return joined.reorder(np.argsort(random_order(joined.documents["hash"]), kind="stable")), sampled


def _load_documents(name: str, bits: np.ndarray) -> Part:
    """Load the documents of a part file that are selected by packed `bits`."""
    part = Part.load(_state().work_dir / name)
    return part.select(np.unpackbits(bits, count=len(part.documents)).astype(bool))


def find_pairs(
    name: str, band: int, partition: int, partition_count: int, precedence: near_duplicates.Precedence
) -> None:
    """Call `near_duplicates.find_pairs`; write the result to the file `name` in the work folder."""
    state = _state()
    out, threshold = state.work_dir / name, state.settings.filters.near_duplicates.threshold
    near_duplicates.find_pairs(state.work_dir, out, band, partition, partition_count, threshold, precedence)


def hash_files(paths: Sequence[str]) -> list[str]:
    """Return the SHA-256 of each file; '' for a file that cannot be read."""
    _check_visible(paths)
    return [sha256_file(Path(path)) if os.access(path, os.R_OK) else "" for path in paths]


def _histogram(lengths: np.ndarray) -> np.ndarray:
    """Count the lengths by their number of bits, int64 [HISTOGRAM_BINS]."""
    bits = np.frexp(lengths.astype(np.float64))[1]
    return np.bincount(bits, minlength=HISTOGRAM_BINS)


# ---------------------------------------------------------------- documents to parts


def _convert(
    texts: list[str], sketches: Sketches | None, state: _ProcessState, splitter: SentenceSplitter
) -> tuple[Part, list[str]]:
    """Drop short documents; return the others as a part, tokenized if there is a vocabulary, and as strings."""
    settings = state.settings
    if settings.encodes_whole_documents or settings.trains_byte_bpe:
        return _convert_whole(texts, sketches, state, splitter)
    lines = ["\n".join(splitter.split(text)) for text in texts]
    cut = cut_words(lines, state.table, lowercase=settings.lowercase, fold=settings.fold)
    part = replace(_part_of_words(cut), sketches=sketches)
    long_enough = part.documents["words"] >= settings.min_document_words
    return _select(part, texts, long_enough & (part.documents["sentences"] > 0), state)


def _select(part: Part, texts: list[str], keep: np.ndarray, state: _ProcessState) -> tuple[Part, list[str]]:
    """Select the documents where `keep` is true; if there is a vocabulary, tokenize them and drop empty documents."""
    part, texts = part.select(keep), [texts[index] for index in np.flatnonzero(keep)]
    if not state.settings.vocabulary_given or state.settings.encodes_whole_documents:
        return part, texts
    tokenized, is_kept = _tokenize(part.items, part, state)
    return tokenized, [texts[index] for index in np.flatnonzero(is_kept)]


def _convert_whole(
    texts: list[str], sketches: Sketches | None, state: _ProcessState, splitter: SentenceSplitter
) -> tuple[Part, list[str]]:
    """Drop short documents; return the others as a part, encoded whole if there is a vocabulary, and as strings."""
    settings = state.settings
    records = document_records(texts, fold=settings.fold)
    if settings.joins_lines:
        joined = list(map(join_lines, texts))
        pairs = zip(texts, joined, strict=True)
        starts = [locate_sentences(splitter.split(text), joined_text) for text, joined_text in pairs]
    else:
        joined, starts = texts, list(map(splitter.starts, texts))
    long_enough = records["words"] >= settings.min_document_words
    kept = [index for index, sentences in enumerate(starts) if sentences and long_enough[index]]
    texts, joined = [texts[index] for index in kept], [joined[index] for index in kept]
    starts = [starts[index] for index in kept]
    sketches = sketches.select(np.array(kept, np.int64)) if sketches else None
    if settings.encodes_whole_documents:
        part = state.document_encoder().encode(joined, starts, records[kept], state.dtype)
    else:
        part = _part_of_pieces(joined, starts, records[kept], state.table)
    # Documents that consist of control characters have no tokens.
    return _select(replace(part, sketches=sketches), texts, part.documents["sentences"] > 0, state)


def _part_of_pieces(texts: list[str], starts: list[list[int]], records: np.ndarray, table: WordTable) -> Part:
    """Cut documents, each after a space, into pieces whose counts a byte-level vocabulary is trained on."""
    if not texts:
        return Part(np.zeros(0, np.int32), np.zeros(0, np.uint32), records, [])
    cut = Gpt2Splitter.for_bertrain(None).cut(texts, starts, table)
    records = records.copy()
    records["sentences"] = np.diff(cut.documents)
    records["items"] = np.diff(cut.sentences[cut.documents])
    return Part(cut.pieces, np.diff(cut.sentences).astype(np.uint32), records, [])


def _join_batches(batches: list[Part], state: _ProcessState) -> Part:
    sketches = [batch.sketches for batch in batches if batch.sketches]
    part = Part(
        np.concatenate([batch.items for batch in batches]),
        np.concatenate([batch.sentence_items for batch in batches]),
        np.concatenate([batch.documents for batch in batches]),
        [],
        Sketches.concatenate(sketches) if sketches else None,
    )
    return part if state.settings.vocabulary_given else _renumber(part, state.table)


def _part_of_words(cut: CutWords) -> Part:
    """Convert cut words to a part whose items are word indices in the process's table."""
    records = np.zeros(len(cut.hashes), DOCUMENT)
    records["hash"] = cut.hashes
    records["sentences"] = np.diff(cut.documents)
    records["items"] = np.diff(cut.sentences[cut.documents])
    records["words"], records["bytes"] = cut.document_words, cut.document_bytes
    return Part(cut.words, np.diff(cut.sentences).astype(np.uint32), records, [])


def _renumber(part: Part, table: WordTable) -> Part:
    """Convert the items of a part from indices in the process's table to indices of the part's distinct words."""
    used = np.zeros(table.size, bool)
    used[part.items] = True
    new_index = (np.cumsum(used) - 1).astype(np.uint32)
    return replace(part, items=new_index[part.items], distinct_words=table.words(np.flatnonzero(used)))


def _tokenize(word_indices: np.ndarray, words: Part, state: _ProcessState) -> tuple[Part, np.ndarray]:
    """Tokenize the part `words`; `word_indices` has the index of each item in the process's table of words.

    Sentences and documents without tokens, which have only control characters, are dropped. Return the part of tokens,
    and which documents are kept, bool [D].
    """
    word_tokens = state.word_tokens()
    offsets = np.concatenate([[0], np.cumsum(words.sentence_items, dtype=np.int64)])
    tokens, token_offsets = word_tokens.tokens(word_indices, offsets, state.dtype)
    sentence_tokens = np.diff(token_offsets).astype(np.uint32)
    records = words.documents.copy()
    sentences_before = np.concatenate([[0], np.cumsum(records["sentences"], dtype=np.int64)])
    kept_before = np.concatenate([[0], np.cumsum(sentence_tokens > 0)])  # kept sentences before each sentence
    records["sentences"] = np.diff(kept_before[sentences_before])
    records["items"] = np.diff(token_offsets[sentences_before])
    is_kept = records["sentences"] > 0
    sketches = words.sketches.select(is_kept) if words.sketches else None
    part = Part(tokens, sentence_tokens[sentence_tokens > 0], records[is_kept], [], sketches)
    return part, is_kept

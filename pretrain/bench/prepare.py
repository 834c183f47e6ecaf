"""`bench prepare`: raw text to token shards by ours, by tokenizers and by datasets, in turn, on all cores.

Two comparisons over the same WikiExtractor file, and the same vocabulary for all:

- The whole way, in MB/s of the raw file. Ours is `prepare`, from the file to the manifest, with the start of its
  processes. The peer is what run_mlm of transformers does: `datasets.map` of its fast tokenizer, then of group_texts,
  caching off. It begins with documents that are already extracted and in Arrow, and makes no sentences, no duplicate
  check and no hashes.
- Tokenising alone, in MB/s of sentences that are already split and in memory. Ours begins each time with an empty
  table of words. The peer is `tokenizers.Tokenizer.encode_batch_fast`; its ids are not even copied out.

Beside them stands what no preparation can be faster than: reading the file from the page cache on all cores.

With --check-ids and --memory these are checked and measured instead: every sentence's ids against transformers'
BertTokenizer, and the peak memory of `prepare` on once, twice and four times the file.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer

from pretrain.commands import local_path
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import MANIFEST, read_manifest
from pretrain.config import PretrainConfig, SourceConfig
from pretrain.corpus import prepare, sources, stages
from pretrain.corpus.inputs import Problems
from pretrain.corpus.sentences import split_sentences
from pretrain.corpus.sources import docstrings
from pretrain.corpus.stage_bar import StageBar
from pretrain.corpus.tokenize import MAX_TABLE_WORDS, WordPieces, WordTable, columns
from pretrain.corpus.vocabulary import load_vocabulary

SEQUENCE_LENGTH = 512  # what group_texts cuts to
PEER_BATCH = 10_000  # sentences per encode_batch_fast
COPIES = (1, 2, 4)  # of the file, for --memory
LANGUAGE = "en"
_DOCSTRINGS_MB = 16  # of the default file, unless --limit-mb says otherwise
_POLL_SECONDS = 0.02
_READ_BYTES = 1 << 20
_SHOWN_MISMATCHES = 5
_UNLIMITED = 10**9  # tokens, so that transformers does not warn of long documents

Contestant = Callable[[Path], int]  # works into an empty folder, returns the number of tokens


def main(argv: list[str]) -> int:
    """Run the comparison, or the checks asked for, and print a table, or JSON with `--json`."""
    options = _parser().parse_args(argv)
    if options.repeats < 1:
        raise InputError(f"--repeats: is {options.repeats}, must be at least 1.")
    speed = not (options.check_ids or options.memory)
    if speed or options.check_ids:
        _need_transformers()
    result: dict[str, Any] = {"cores": _cores(), "versions": _versions()}
    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as folder:
        scratch = Path(folder)
        file = _file(options, scratch)
        vocabulary = Vocabulary.of(options.vocabulary or _train_vocabulary(file, scratch))
        result["file"] = {"path": str(options.file or "docstrings"), "megabytes": file.stat().st_size / 1e6}
        if options.check_ids:
            result["ids"] = check_ids(file, vocabulary)
        if options.memory:
            result["memory"] = measure_memory(file, vocabulary, scratch)
        if speed:
            result |= compare(file, vocabulary, scratch, options.repeats)
    print(json.dumps(result) if options.json else "\n".join(_lines(result)))
    return 1 if options.check_ids and result["ids"]["mismatches"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="./launch.sh bench prepare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--file", type=local_path, help="WikiExtractor file (default: the installed docstrings)")
    parser.add_argument("--limit-mb", type=float, default=0, help="only the first MB of it; 0 takes all")
    parser.add_argument(
        "--vocabulary",
        type=local_path,
        help="folder with a tokenizer.json (default: one trained on the file)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="alternations; the median is reported")
    parser.add_argument("--check-ids", action="store_true", help="compare every sentence's ids instead")
    parser.add_argument("--memory", action="store_true", help="measure the peak memory of ours instead")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _versions() -> dict[str, str]:
    names = ("tokenizers", "datasets", "transformers")
    return {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)}


def _need_transformers() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise MachineError(
            "bench prepare: transformers, with which it compares, is not installed. "
            "Install it with: pip install 'bertrain[bench]'"
        )


# ---------------------------------------------------------------- file and vocabulary


def _file(options: argparse.Namespace, scratch: Path) -> Path:
    """The WikiExtractor file to work on: the given one, its beginning, or one made of docstrings."""
    limit = int(options.limit_mb * 1e6)
    if options.file is None:
        return _write_docstrings(scratch / "docstrings.txt", limit or int(_DOCSTRINGS_MB * 1e6))
    if not options.file.is_file():
        raise InputError(f"--file: {options.file}: not found, or not a file.")
    if not limit or options.file.stat().st_size <= limit:
        return options.file
    with options.file.open("rb") as file:
        text = file.read(limit)
    end = text.rfind(b"</doc>\n")
    if end < 0:
        raise InputError(f"--file: {options.file}: no article ends in its first {options.limit_mb:g} MB.")
    path = scratch / "beginning.txt"
    path.write_bytes(text[: end + len(b"</doc>\n")])
    return path


def _write_docstrings(path: Path, limit: int) -> Path:
    """About `limit` bytes of the docstrings that every Python installation has, as WikiExtractor would write them."""
    modules = tuple(docstrings.find_modules(""))
    with path.open("wb") as file:
        for number, text in enumerate(docstrings.documents(modules, lambda *_: None)):
            title = f"Module {number}"
            body = html.escape(text, quote=False).replace("\n", "\n\n")
            file.write(f'<doc id="{number}" url="" title="{title}">\n{title}\n\n{body}\n\n</doc>\n'.encode())
            if file.tell() >= limit:
                break
    return path


@dataclass(frozen=True)
class Vocabulary:
    """A folder with a BERT tokenizer.json, and whether it lower-cases."""

    folder: Path
    lowercase: bool

    @classmethod
    def of(cls, folder: Path) -> Vocabulary:
        """Raises `InputError` if it is missing or not BERT's."""
        path = folder / "tokenizer.json"
        try:
            lowercase = bool(json.loads(path.read_text(encoding="utf-8"))["normalizer"]["lowercase"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"--vocabulary: {path}: not a BERT tokenizer.json ({type(error).__name__}). "
                "Give a prepared corpus or a folder with a released BERT's tokenizer.json."
            ) from None
        vocabulary = cls(folder, lowercase)
        vocabulary.tokenizer()
        return vocabulary

    def tokenizer(self) -> Tokenizer:
        """As our preparation has it."""
        return load_vocabulary(self.folder, lowercase=self.lowercase)

    def transformers_tokenizer(self) -> Any:
        """As transformers has it. Special tokens written out in a text are ordinary characters, as for us."""
        import transformers

        transformers.logging.set_verbosity_error()
        return transformers.BertTokenizer.from_pretrained(
            self.folder, split_special_tokens=True, model_max_length=_UNLIMITED
        )


def _train_vocabulary(file: Path, scratch: Path) -> Path:
    folder = scratch / "trained"
    prepare.prepare(PretrainConfig.model_validate(_settings(file, folder)), quiet=True)
    return folder


def _settings(file: Path, folder: Path, vocabulary: Vocabulary | None = None) -> dict[str, Any]:
    """A run's settings that prepare `file` in `folder`; a vocabulary is trained unless given."""
    given = {"path": str(vocabulary.folder), "lowercase": vocabulary.lowercase} if vocabulary else {}
    source = {"kind": "wikiextractor", "path": str(file)}
    corpus = {"dir": str(folder), "sources": [source], "vocabulary": given, "language": LANGUAGE}
    phase = {
        "sequence_length": SEQUENCE_LENGTH,
        "global_sequences": 1,
        "steps": 1,
        "peak_learning_rate": 1e-4,
    }
    return {"name": "bench", "corpus": corpus, "phases": [phase]}


def read_documents(file: Path) -> Iterator[list[str]]:
    """The sentences of each document of a WikiExtractor file, as our preparation splits them."""
    source, problems = SourceConfig(kind="wikiextractor", path=str(file)), Problems()
    for number, item in enumerate(sources.find_inputs(source, "--file")):
        for piece in sources.cut(source, 0, number, item):
            for text in sources.documents(piece, problems):
                lines = "\n".join(split_sentences(text, LANGUAGE)).split("\n")
                yield [line for line in lines if line.strip(" \t\r")]


# ---------------------------------------------------------------- speed


def compare(file: Path, vocabulary: Vocabulary, scratch: Path, repeats: int) -> dict[str, Any]:
    """All four in turn: MB/s with ranges, the ratios of each pair, and the stages of our preparation."""
    documents = list(read_documents(file))
    sentences = list(itertools.chain.from_iterable(documents))
    if not sentences:
        raise InputError(f"--file: {file}: no sentence. Is it a WikiExtractor file?")
    raw, text = file.stat().st_size / 1e6, sum(len(sentence.encode()) for sentence in sentences) / 1e6
    with (
        _Preparation(file, vocabulary) as preparation,
        _Tokenisers(documents, vocabulary) as tokenisers,
        _DatasetsMap(documents, vocabulary, scratch / "documents") as datasets_map,
    ):
        contestants: dict[str, Contestant] = {
            "prepare": preparation,
            "datasets": datasets_map,
            "tokenise": tokenisers,
            "tokenizers": _EncodeBatch(sentences, vocabulary),
        }
        seconds, tokens = _alternate(contestants, scratch / "output", repeats)
    megabytes = {"prepare": raw, "datasets": raw, "tokenise": text, "tokenizers": text}
    return {
        "sentences": len(sentences),
        "repeats": repeats,
        "speed": {
            name: {
                "megabytes": megabytes[name],
                "tokens": tokens[name],
                "seconds": statistics.median(values),
                "mb_per_second": megabytes[name] / statistics.median(values),
                "spread": [megabytes[name] / max(values), megabytes[name] / min(values)],
            }
            for name, values in seconds.items()
        },
        "ratios": {
            f"{ours} / {peer}": _ratio(seconds[ours], seconds[peer])
            for ours, peer in (("prepare", "datasets"), ("prepare", "tokenizers"), ("tokenise", "tokenizers"))
        },
        "stage_seconds": preparation.stage_seconds(),
        "read_mb_per_second": raw / _reading_seconds(file, repeats),
    }


def _reading_seconds(file: Path, repeats: int) -> float:
    """Seconds in which all cores together read the file, which must be in the page cache; the median."""
    size = file.stat().st_size
    stripe = -(-size // _cores())

    def read(first: int) -> None:
        piece, end = bytearray(_READ_BYTES), min(first + stripe, size)
        for offset in range(first, end, _READ_BYTES):
            os.preadv(descriptor, [memoryview(piece)[: end - offset]], offset)

    seconds = []
    with file.open("rb") as opened, ThreadPoolExecutor(_cores()) as threads:
        descriptor = opened.fileno()
        for _ in range(repeats + 1):
            began = time.perf_counter()
            list(threads.map(read, range(0, size, stripe)))
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])  # the first one starts the threads


def _alternate(
    contestants: dict[str, Contestant], output: Path, repeats: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of every repeat and tokens of each contestant. The first round warms up and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    tokens: dict[str, int] = {}
    for number in range(repeats + 1):
        for name, run in contestants.items():
            output.mkdir()
            began = time.perf_counter()
            tokens[name] = run(output)
            if number:
                seconds[name].append(time.perf_counter() - began)
            shutil.rmtree(output)
    return seconds, tokens


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """How many times as fast ours is, repeat by repeat."""
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {"median": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}


class _StageClock(StageBar):
    """No progress bar but the seconds of every stage."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        began = time.perf_counter()
        with super().stage(name, total) as advance:
            yield advance
        self.seconds[name] = time.perf_counter() - began


class _Processes:
    """Processes of one contestant, which are made ready once and then wait for their turns."""

    def __init__(self) -> None:
        self._executors: list[ProcessPoolExecutor] = []

    def start(self, make_ready: Callable[..., object], *arguments: Any) -> None:
        """Another process; `make_ready(*arguments)` runs in it first."""
        context = multiprocessing.get_context("spawn")
        self._executors.append(ProcessPoolExecutor(1, context, make_ready, arguments))

    def run(self, job: Callable[..., int], *arguments: Any) -> int:
        """Run `job` in every process; returns the sum of the results."""
        waiting = [executor.submit(job, *arguments) for executor in self._executors]
        return sum(future.result() for future in waiting)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        for executor in self._executors:
            executor.shutdown(cancel_futures=True)


class _Preparation(_Processes):
    """Our whole preparation, with the vocabulary given.

    In a process that has, as that of the command line, no threads and none of the peers' libraries, so that it forks.
    """

    def __init__(self, file: Path, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._file, self._vocabulary = file, vocabulary
        self._runs: list[dict[str, float]] = []
        self.start(int)

    def __call__(self, folder: Path) -> int:
        settings = _settings(self._file, folder, self._vocabulary)
        self._runs.append(self._executors[0].submit(_prepare, settings).result())
        return sum(shard["tokens"] for shard in read_manifest(folder)["shards"])

    def stage_seconds(self) -> dict[str, float]:
        """Medians over the runs but the first."""
        return {name: statistics.median(run[name] for run in self._runs[1:]) for name in self._runs[0]}


class _Tokenisers(_Processes):
    """Our tokenising stage: one process per core, each with its share of the documents in memory."""

    def __init__(self, documents: list[list[str]], vocabulary: Vocabulary) -> None:
        super().__init__()
        for number in range(_cores()):
            self.start(_hold, documents[number :: _cores()], vocabulary)

    def __call__(self, folder: Path) -> int:
        return self.run(_tokenise)


class _EncodeBatch:
    """`tokenizers` on all cores: its threads share the sentences of this process."""

    def __init__(self, sentences: list[str], vocabulary: Vocabulary) -> None:
        self._sentences = sentences
        self._tokenizer = Tokenizer.from_file(str(vocabulary.folder / "tokenizer.json"))
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def __call__(self, folder: Path) -> int:
        tokens = 0
        for start in range(0, len(self._sentences), PEER_BATCH):
            batch = self._sentences[start : start + PEER_BATCH]
            tokens += sum(map(len, self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)))
        return tokens


class _DatasetsMap(_Processes):
    """run_mlm's preprocessing, from documents in an Arrow file to sequences in Arrow files."""

    def __init__(self, documents: list[list[str]], vocabulary: Vocabulary, folder: Path) -> None:
        import datasets

        super().__init__()
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"text": ["\n".join(lines) for lines in documents]}).save_to_disk(folder)
        self.start(_load_dataset, folder, vocabulary)

    def __call__(self, folder: Path) -> int:
        return self.run(_map_dataset, folder)


# ---------------------------------------------------------------- what the contestants' processes do

_held: Any = None  # what this process was made ready with


def _prepare(settings: dict[str, Any]) -> dict[str, float]:
    """Prepare a corpus; returns the seconds of every stage."""
    clock = _StageClock()
    began = time.perf_counter()
    prepare.prepare(PretrainConfig.model_validate(settings), bar=clock)
    whole = time.perf_counter() - began
    return clock.seconds | {"everything else": whole - sum(clock.seconds.values())}


def _hold(documents: list[list[str]], vocabulary: Vocabulary) -> None:
    global _held
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _held = documents, vocabulary.tokenizer(), vocabulary.lowercase


def _tokenise() -> int:
    """Tokenise the held documents, beginning without any word known; returns the number of tokens."""
    documents, tokenizer, lowercase = _held
    texts = ("\n".join(lines) for lines in documents)
    return sum(len(tokens) for _, tokens, _ in token_batches(texts, tokenizer, lowercase=lowercase))


def token_batches(
    texts: Iterator[str], tokenizer: Tokenizer, *, lowercase: bool
) -> Iterator[tuple[list[str], np.ndarray, np.ndarray]]:
    """(texts, tokens, token offset of each sentence) of our preparation's batches; one line is one sentence."""
    table = WordTable()
    pieces = WordPieces(tokenizer, table)
    dtype = stages.token_dtype(tokenizer.get_vocab_size())
    for batch in stages._chunks(texts):
        if table.size > MAX_TABLE_WORDS:
            table = WordTable()
            pieces = WordPieces(tokenizer, table)
        cut = columns(batch, table, lowercase=lowercase)
        tokens, offsets = pieces.tokens(cut.words, cut.sentences, dtype)
        yield batch, tokens, offsets


def _load_dataset(folder: Path, vocabulary: Vocabulary) -> None:
    global _held
    import datasets

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # num_proc is the parallelism; threads beside it only hinder
    datasets.disable_progress_bars()
    datasets.disable_caching()
    _held = datasets.load_from_disk(folder), vocabulary.transformers_tokenizer()


def _map_dataset(folder: Path) -> int:
    """Tokenise and group the held dataset into files in `folder`; returns the number of tokens."""
    dataset, tokenizer = _held

    def tokenize(examples: dict[str, list[str]]) -> Any:
        return tokenizer(examples["text"], return_special_tokens_mask=True)

    settings = {
        "batched": True,
        "num_proc": _cores() if _cores() > 1 else None,
        "load_from_cache_file": False,
    }
    tokenised = dataset.map(tokenize, remove_columns=["text"], cache_file_name=str(folder / "tokens.arrow"), **settings)
    grouped = tokenised.map(group_texts, cache_file_name=str(folder / "sequences.arrow"), **settings)
    return len(grouped) * SEQUENCE_LENGTH


def group_texts(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """run_mlm's own: all documents of a batch end to end, cut to full sequences; the rest is dropped."""
    joined = {name: list(itertools.chain(*rows)) for name, rows in examples.items()}
    total = len(joined["input_ids"]) // SEQUENCE_LENGTH * SEQUENCE_LENGTH
    return {
        name: [row[start : start + SEQUENCE_LENGTH] for start in range(0, total, SEQUENCE_LENGTH)]
        for name, row in joined.items()
    }


# ---------------------------------------------------------------- ids


def check_ids(file: Path, vocabulary: Vocabulary) -> dict[str, Any]:
    """Our ids of every sentence against transformers' BertTokenizer: counts, and the first mismatches."""
    theirs = vocabulary.transformers_tokenizer()
    texts = ("\n".join(lines) for lines in read_documents(file) if lines)
    checked, mismatches, examples = 0, 0, []
    for batch, tokens, offsets in token_batches(texts, vocabulary.tokenizer(), lowercase=vocabulary.lowercase):
        sentences = "\n".join(batch).split("\n")
        encoded = theirs(sentences, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)
        bounds = itertools.pairwise(offsets.tolist())
        for sentence, wanted, (begin, end) in zip(sentences, encoded["input_ids"], bounds, strict=True):
            ours = tokens[begin:end].tolist()
            if ours != wanted:
                mismatches += 1
                if len(examples) < _SHOWN_MISMATCHES:
                    examples.append({"sentence": sentence, "ours": ours, "transformers": wanted})
        checked += len(sentences)
    if not checked:
        raise InputError(f"--file: {file}: no sentence. Is it a WikiExtractor file?")
    return {"sentences": checked, "mismatches": mismatches, "examples": examples}


# ---------------------------------------------------------------- memory


def measure_memory(file: Path, vocabulary: Vocabulary, scratch: Path) -> list[dict[str, Any]]:
    """Peak memory of `prepare` in processes of its own, by size of the file, with a given and a trained vocabulary."""
    rows = []
    for count in COPIES:
        copies = _write_copies(file, scratch / "copies.txt", count)
        for kind, given in (("given", vocabulary), ("trained", None)):
            folder = scratch / "prepared"
            config = scratch / "prepare.yaml"  # JSON is YAML
            config.write_text(json.dumps(_settings(copies, folder, given)), encoding="utf-8")
            peak = _peak_memory([sys.executable, "-m", "pretrain", "prepare", str(config)], scratch / "prepare.log")
            source = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sources"][0]
            figures = {name: source[name] for name in ("documents", "duplicates")}
            rows.append(
                {"copies": count, "megabytes": copies.stat().st_size / 1e6, "vocabulary": kind} | peak | figures
            )
            shutil.rmtree(folder)
    return rows


def _write_copies(file: Path, path: Path, count: int) -> Path:
    """The file `count` times; a number before the text of each article, below its title, makes them distinct."""
    text_begins = re.compile(rb"(?m)(^<doc [^\n]*>\n[^\n]*\n\n?)(?!\n|</doc>)")
    with path.open("wb") as copies:
        for number in range(count):
            with file.open("rb") as original:
                article = bytearray()
                for line in original:
                    article += line
                    if line == b"</doc>\n":
                        copies.write(text_begins.sub(rb"\g<1>%d " % number, article) if number else article)
                        article.clear()
                copies.write(article)
    return path


def _peak_memory(command: list[str], log: Path) -> dict[str, float]:
    """MB at the highest of a command and its children: resident, and without pages that belong to files."""
    resident = private = most_processes = 0
    with log.open("w") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        root = psutil.Process(child.pid)
        while child.poll() is None:
            memory = _tree_memory(root)
            resident = max(resident, sum(m.rss for m in memory))
            private = max(private, sum(m.rss - m.shared for m in memory))
            most_processes = max(most_processes, len(memory))
            time.sleep(_POLL_SECONDS)
    if child.returncode:
        last = (log.read_text(encoding="utf-8").strip().splitlines() or ["no output"])[-1]
        raise MachineError(f"bench prepare: {' '.join(command)} ended with {child.returncode}: {last}")
    return {"resident_mb": resident / 1e6, "private_mb": private / 1e6, "processes": most_processes}


def _tree_memory(root: psutil.Process) -> list[Any]:
    """Memory of a process and its children; those that have just ended are left out."""
    found = []
    with contextlib.suppress(psutil.Error):
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                found.append(process.memory_info())
    return found


# ---------------------------------------------------------------- printing


def _lines(result: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    file = result["file"]
    yield f"{file['path']}: {file['megabytes']:.1f} MB, {result['cores']} cores, {versions}"
    if "speed" in result:
        yield from _speed_lines(result)
    if "ids" in result:
        yield from _id_lines(result["ids"])
    for row in result.get("memory", ()):
        yield (
            f"peak memory, {row['copies']} x file ({row['megabytes']:.0f} MB), vocabulary {row['vocabulary']:7}: "
            f"{row['resident_mb']:.0f} MB, of which {row['private_mb']:.0f} MB not pages of files; "
            f"{row['documents']:,} documents, {row['duplicates']:,} duplicates"
        )


def _speed_lines(result: dict[str, Any]) -> Iterator[str]:
    names = {
        "prepare": "ours: prepare, raw file to shards",
        "datasets": "datasets: map of tokenizer and group_texts",
        "tokenise": "ours: tokenising alone",
        "tokenizers": "tokenizers: encode_batch_fast alone",
    }
    yield f"{'':44}{'MB/s':>8}{'spread':>16}{'seconds':>9}{'of MB':>8}{'tokens':>13}"
    for name, row in result["speed"].items():
        low, high = row["spread"]
        yield (
            f"{names[name]:44}{row['mb_per_second']:8.1f}{f'({low:.1f}-{high:.1f})':>16}{row['seconds']:9.2f}"
            f"{row['megabytes']:8.1f}{row['tokens']:13,}"
        )
    for pair, ratio in result["ratios"].items():
        low, high = ratio["spread"]
        yield f"{pair}: {ratio['median']:.1f} times ({low:.1f}-{high:.1f})"
    stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in result["stage_seconds"].items())
    yield f"stages of prepare: {stages}"
    yield f"reading the file from the page cache: {result['read_mb_per_second']:,.0f} MB/s"


def _id_lines(ids: dict[str, Any]) -> Iterator[str]:
    yield f"ids against BertTokenizer: {ids['sentences']:,} sentences, {ids['mismatches']:,} mismatches"
    for example in ids["examples"]:
        yield f"  {example['sentence']!r}: ours {example['ours']}, transformers {example['transformers']}"

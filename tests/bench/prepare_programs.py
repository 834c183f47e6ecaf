"""What `bench prepare` compares: ours, `tokenizers` and `datasets` on all cores each; text and vocabulary for them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pretrain.common.files import read_manifest
from pretrain.config import PretrainConfig, SourceConfig
from pretrain.corpus import prepare, sources
from pretrain.corpus.inputs import Problems
from pretrain.corpus.sentences import batches_of, split_sentences
from pretrain.corpus.shards import token_dtype
from pretrain.corpus.tokenize import MAX_TABLE_WORDS, WordPieces, WordTable, columns
from pretrain.corpus.tokenizer_files import load_vocabulary

SEQUENCE_LENGTH = 512  # what group_texts cuts to
_LANGUAGE = "en"
_UNLIMITED = 10**9  # tokens, so that transformers does not warn of long documents
_BATCH_SENTENCES = 10_000  # for encode_batch_fast

Program = Callable[[Path], int]  # works into an empty folder, returns the number of tokens


@dataclass(frozen=True)
class Vocabulary:
    """That of a prepared corpus, uncased."""

    folder: Path

    @classmethod
    def trained(cls, file: Path, scratch: Path) -> Vocabulary:
        """One that preparing `file` trains, in a folder below `scratch`."""
        prepare.prepare(PretrainConfig.model_validate(settings_for(file, scratch / "trained")), quiet=True)
        return cls(scratch / "trained")

    def tokenizer(self) -> Tokenizer:
        """As our preparation has it."""
        return load_vocabulary(self.folder, lowercase=True)

    def transformers_tokenizer(self) -> Any:
        """As transformers has it. Special tokens written out in a text are ordinary characters, as for us."""
        import transformers

        transformers.logging.set_verbosity_error()
        return transformers.BertTokenizer.from_pretrained(
            self.folder, split_special_tokens=True, model_max_length=_UNLIMITED
        )


def settings_for(file: Path, folder: Path, vocabulary: Vocabulary | None = None) -> dict[str, Any]:
    """A run's settings that prepare `file` in `folder`; a vocabulary is trained unless given."""
    given = {"path": str(vocabulary.folder)} if vocabulary else {}
    source = {"kind": "wikiextractor", "path": str(file)}
    corpus = {"dir": str(folder), "sources": [source], "vocabulary": given, "language": _LANGUAGE}
    phase = {"sequence_length": SEQUENCE_LENGTH, "global_sequences": 1, "steps": 1, "peak_learning_rate": 1e-4}
    return {"name": "bench", "corpus": corpus, "phases": [phase]}


def read_documents(file: Path) -> Iterator[list[str]]:
    """The sentences of each document of a WikiExtractor file, as our preparation splits them."""
    source, problems = SourceConfig(kind="wikiextractor", path=str(file)), Problems()
    for number, item in enumerate(sources.find_inputs(source, "--file")):
        for chunk in sources.cut(source, 0, number, item):
            for text in sources.documents(chunk, problems):
                lines = "\n".join(split_sentences(text, _LANGUAGE)).split("\n")
                yield [line for line in lines if line.strip(" \t\r")]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class _Processes:
    """Processes of one program, which are made ready once and then wait for the next round."""

    def __init__(self) -> None:
        self._executors: list[ProcessPoolExecutor] = []

    def start(self, make_ready: Callable[..., object], *arguments: Any) -> None:
        """Another process; `make_ready(*arguments)` runs in it first."""
        context = multiprocessing.get_context("spawn")
        self._executors.append(ProcessPoolExecutor(1, context, make_ready, arguments))

    def run(self, function: Callable[..., int], *arguments: Any) -> int:
        """Run `function` in every process; returns the sum of the results."""
        waiting = [executor.submit(function, *arguments) for executor in self._executors]
        return sum(future.result() for future in waiting)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        for executor in self._executors:
            executor.shutdown(cancel_futures=True)


class Preparation(_Processes):
    """Our whole preparation, with the vocabulary given.

    Its process has no threads and none of the baselines' libraries, like that of the command line, so that it forks.
    """

    def __init__(self, file: Path, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._file, self._vocabulary = file, vocabulary
        self.start(int)

    def __call__(self, folder: Path) -> int:
        settings = settings_for(self._file, folder, self._vocabulary)
        self._executors[0].submit(_prepare, settings).result()
        return sum(shard["tokens"] for shard in read_manifest(folder)["shards"])


class OwnTokenizers(_Processes):
    """Our tokenizing stage: one process per core, each with its share of the documents in memory."""

    def __init__(self, documents: list[list[str]], vocabulary: Vocabulary) -> None:
        super().__init__()
        for number in range(cores()):
            self.start(_hold, documents[number :: cores()], vocabulary)

    def __call__(self, folder: Path) -> int:
        return self.run(_tokenize)


class EncodeBatch:
    """`tokenizers` on all cores: its threads share the sentences of this process."""

    def __init__(self, sentences: list[str], vocabulary: Vocabulary) -> None:
        self._sentences = sentences
        self._tokenizer = Tokenizer.from_file(str(vocabulary.folder / "tokenizer.json"))
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def __call__(self, folder: Path) -> int:
        tokens = 0
        for start in range(0, len(self._sentences), _BATCH_SENTENCES):
            batch = self._sentences[start : start + _BATCH_SENTENCES]
            tokens += sum(map(len, self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)))
        return tokens


class DatasetsMap(_Processes):
    """run_mlm's preprocessing, from documents in an Arrow file to sequences in Arrow files."""

    def __init__(self, documents: list[list[str]], vocabulary: Vocabulary, folder: Path) -> None:
        import datasets

        super().__init__()
        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"text": ["\n".join(lines) for lines in documents]}).save_to_disk(folder)
        self.start(_load_dataset, folder, vocabulary)

    def __call__(self, folder: Path) -> int:
        return self.run(_map_dataset, folder)


_held: Any = None  # what this process was made ready with


def _prepare(settings: dict[str, Any]) -> None:
    prepare.prepare(PretrainConfig.model_validate(settings), quiet=True)


def _hold(documents: list[list[str]], vocabulary: Vocabulary) -> None:
    global _held
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _held = documents, vocabulary.tokenizer()


def _tokenize() -> int:
    """Tokenize the held documents, starting without any known word; returns the number of tokens."""
    documents, tokenizer = _held
    texts = ("\n".join(lines) for lines in documents)
    return sum(len(tokens) for _, tokens, _ in token_batches(texts, tokenizer))


def token_batches(texts: Iterator[str], tokenizer: Tokenizer) -> Iterator[tuple[list[str], np.ndarray, np.ndarray]]:
    """(texts, tokens, token offset of each sentence) of our preparation's batches; one line is one sentence."""
    table = WordTable()
    pieces = WordPieces(tokenizer, table)
    dtype = token_dtype(tokenizer.get_vocab_size())
    for batch in batches_of(texts):
        if table.size > MAX_TABLE_WORDS:
            table = WordTable()
            pieces = WordPieces(tokenizer, table)
        cut = columns(batch, table, lowercase=True)
        tokens, offsets = pieces.tokens(cut.words, cut.sentences, dtype)
        yield batch, tokens, offsets


def _load_dataset(folder: Path, vocabulary: Vocabulary) -> None:
    global _held
    import datasets

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # num_proc is the parallelism; further threads would slow it down
    datasets.disable_progress_bars()
    datasets.disable_caching()
    _held = datasets.load_from_disk(folder), vocabulary.transformers_tokenizer()


def _map_dataset(folder: Path) -> int:
    """Tokenize and group the held dataset into files in `folder`; returns the number of tokens."""
    dataset, tokenizer = _held

    def tokenize(examples: dict[str, list[str]]) -> Any:
        return tokenizer(examples["text"], return_special_tokens_mask=True)

    settings = {"batched": True, "num_proc": cores() if cores() > 1 else None, "load_from_cache_file": False}
    tokenized = dataset.map(tokenize, remove_columns=["text"], cache_file_name=str(folder / "tokens.arrow"), **settings)
    grouped = tokenized.map(group_texts, cache_file_name=str(folder / "sequences.arrow"), **settings)
    return len(grouped) * SEQUENCE_LENGTH


def group_texts(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """run_mlm's own: all documents of a batch end to end, cut to full sequences; the rest is dropped."""
    joined = {name: list(itertools.chain(*rows)) for name, rows in examples.items()}
    total = len(joined["input_ids"]) // SEQUENCE_LENGTH * SEQUENCE_LENGTH
    return {
        name: [row[start : start + SEQUENCE_LENGTH] for start in range(0, total, SEQUENCE_LENGTH)]
        for name, row in joined.items()
    }

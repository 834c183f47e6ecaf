"""`bench prepare`: raw text to token shards with bertrain, datasets and tokenizers, alternating, on all cores.

All programs use the same WikiExtractor file and vocabulary, and are measured in MB/s of the raw file:

- prepare: the command `prepare`, from the file to the manifest, including the start of its processes.
- datasets: run_mlm of transformers: `datasets.map` of its fast tokenizer, then of group_texts, without caching. It
  starts from documents that are extracted and in Arrow, and does no sentence splitting, deduplication or hashing.
- tokenizers: only `tokenizers.Tokenizer.encode_batch_fast`, on sentences that are already split and in memory. The ids
  are not copied.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pretrain.common.commands import parse_path, positive_int, program
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import read_manifest
from pretrain.config import PretrainConfig, SourceConfig
from pretrain.corpus import prepare, sources
from pretrain.corpus.inputs import Problems
from pretrain.corpus.sentences import split_sentences

SEQUENCE_LENGTH = 512  # length of the sequences that group_texts makes
_LANGUAGE = "en"
_UNLIMITED = 10**9  # maximum number of tokens, so that transformers does not warn of long documents
_BATCH_SENTENCES = 10_000  # number of sentences per call of encode_batch_fast
_BASELINES = ("tokenizers", "datasets", "transformers")


def main(argv: list[str]) -> int:
    """Run the comparison and print a table, or JSON with `--json`."""
    options = _parser().parse_args(argv)
    if importlib.util.find_spec("transformers") is None:
        raise MachineError("bench prepare: transformers is not installed. Install the extra: pip install -e .[bench].")
    file: Path = options.file
    if not file.is_file():
        raise InputError(f"--file: {file}: not found, or not a file.")
    versions = {name: importlib.metadata.version(name) for name in _BASELINES}
    result: dict[str, Any] = {"cores": cores(), "versions": versions}
    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as folder:
        result |= compare(file, Path(folder), options.repeats)
    print(json.dumps(result) if options.json else "\n".join(_lines(result)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{program()} bench prepare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--file", type=parse_path, required=True, help="WikiExtractor file")
    parser.add_argument("--repeats", type=positive_int, default=5, help="number of repetitions; the median is reported")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser


def compare(file: Path, scratch: Path, repeats: int) -> dict[str, Any]:
    """Measure all three programs, alternating; return MB/s with ranges, and the ratios of our speed to the others."""
    vocabulary, documents = scratch / "trained", scratch / "documents"
    _prepare(settings_for(file, vocabulary))
    texts = list(read_documents(file))
    sentences = list(itertools.chain.from_iterable(texts))
    _write_dataset(texts, documents)
    megabytes = file.stat().st_size / 1e6
    # Like the command line, our process has no threads and no libraries of the baselines, so that it can fork.
    with _process(int) as ours, _process(_load_dataset, documents, vocabulary) as theirs:
        compared: dict[str, Callable[[Path], int]] = {
            "prepare": lambda folder: ours.submit(_prepare, settings_for(file, folder, vocabulary)).result(),
            "datasets": lambda folder: theirs.submit(_map_dataset, folder).result(),
            "tokenizers": functools.partial(_encode, _tokenizer(vocabulary), sentences),
        }
        seconds, tokens = _alternate(compared, scratch / "output", repeats)
    return {
        "file": str(file),
        "megabytes": megabytes,
        "sentences": len(sentences),
        "repeats": repeats,
        "speed": {
            name: {
                "tokens": tokens[name],
                "seconds": statistics.median(values),
                "mb_per_second": megabytes / statistics.median(values),
                "spread": [megabytes / max(values), megabytes / min(values)],
            }
            for name, values in seconds.items()
        },
        "ratios": {
            f"prepare / {baseline}": _ratio(seconds["prepare"], seconds[baseline])
            for baseline in ("datasets", "tokenizers")
        },
    }


def _alternate(
    compared: dict[str, Callable[[Path], int]], output: Path, repeats: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Run the programs in turn; return the seconds of every repetition, and the number of tokens of each program.

    Each run writes into an empty folder. The first round is a warm-up, which does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    tokens: dict[str, int] = {}
    for number in range(repeats + 1):
        for name, run in compared.items():
            output.mkdir()
            start_time = time.perf_counter()
            tokens[name] = run(output)
            if number:
                seconds[name].append(time.perf_counter() - start_time)
            shutil.rmtree(output)
    return seconds, tokens


def _ratio(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Return median and range of the ratio of our speed to the baseline's, over the repetitions."""
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {"median": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}


def _lines(result: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    yield f"{result['file']}: {result['megabytes']:.1f} MB, {result['cores']} cores, {versions}"
    names = {
        "prepare": "ours: prepare, raw file to shards",
        "datasets": "datasets: map of tokenizer and group_texts",
        "tokenizers": "tokenizers: encode_batch_fast only",
    }
    yield f"{'':44}{'MB/s':>8}{'spread':>16}{'seconds':>9}{'tokens':>13}"
    for name, row in result["speed"].items():
        low, high = row["spread"]
        yield (
            f"{names[name]:44}{row['mb_per_second']:8.1f}{f'({low:.1f}-{high:.1f})':>16}{row['seconds']:9.2f}"
            f"{row['tokens']:13,}"
        )
    for pair, ratio in result["ratios"].items():
        low, high = ratio["spread"]
        yield f"{pair}: {ratio['median']:.1f} times ({low:.1f}-{high:.1f})"


def settings_for(file: Path, folder: Path, vocabulary: Path | None = None) -> dict[str, Any]:
    """Return a config to prepare `file` in `folder`; without `vocabulary`, one is trained."""
    vocabulary_settings = {"path": str(vocabulary)} if vocabulary else {}
    source = {"kind": "wikiextractor", "path": str(file)}
    corpus = {"dir": str(folder), "sources": [source], "vocabulary": vocabulary_settings, "language": _LANGUAGE}
    phase = {"sequence_length": SEQUENCE_LENGTH, "global_sequences": 1, "steps": 1, "peak_learning_rate": 1e-4}
    return {"name": "bench", "corpus": corpus, "phases": [phase]}


def read_documents(file: Path) -> Iterator[list[str]]:
    """Yield the sentences of each document of a WikiExtractor file, split as in `prepare`."""
    source, problems = SourceConfig(kind="wikiextractor", path=str(file)), Problems()
    for number, item in enumerate(sources.find_inputs(source, "--file")):
        for chunk in sources.cut(source, 0, number, item):
            for text in sources.documents(chunk, problems):
                lines = "\n".join(split_sentences(text, _LANGUAGE)).split("\n")
                yield [line for line in lines if line.strip(" \t\r")]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _process(initializer: Callable[..., object], *arguments: Any) -> ProcessPoolExecutor:
    """Return a process that calls `initializer` once, and then waits for work."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer, arguments)


def _prepare(settings: dict[str, Any]) -> int:
    """Run the complete `prepare`, and return the number of tokens."""
    config = PretrainConfig.model_validate(settings)
    prepare.prepare(config, quiet=True)
    return sum(shard["tokens"] for shard in read_manifest(config.corpus.folder)["shards"])


def _tokenizer(vocabulary: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(vocabulary / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encode(tokenizer: Tokenizer, sentences: list[str], _: Path) -> int:
    """Tokenize the sentences on all cores, with threads of `tokenizers`; return the number of tokens."""
    batches = (sentences[start : start + _BATCH_SENTENCES] for start in range(0, len(sentences), _BATCH_SENTENCES))
    return sum(len(one) for batch in batches for one in tokenizer.encode_batch_fast(batch, add_special_tokens=False))


def _write_dataset(texts: list[list[str]], folder: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": ["\n".join(lines) for lines in texts]}).save_to_disk(folder)


_held: Any = None  # (dataset, tokenizer) with which this process was initialized


def _load_dataset(folder: Path, vocabulary: Path) -> None:
    """Initialize run_mlm's preprocessing. Special tokens in the text are tokenized like words, as in `prepare`."""
    global _held
    import datasets
    import transformers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # num_proc sets the parallelism; threads would slow it down
    datasets.disable_progress_bars()
    datasets.disable_caching()
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.BertTokenizer.from_pretrained(
        vocabulary, split_special_tokens=True, model_max_length=_UNLIMITED
    )
    _held = datasets.load_from_disk(folder), tokenizer


def _map_dataset(folder: Path) -> int:
    """Tokenize and group the dataset into files in `folder`; return the number of tokens."""
    dataset, tokenizer = _held

    def tokenize(examples: dict[str, list[str]]) -> Any:
        return tokenizer(examples["text"], return_special_tokens_mask=True)

    settings = {"batched": True, "num_proc": cores() if cores() > 1 else None, "load_from_cache_file": False}
    tokenized = dataset.map(tokenize, remove_columns=["text"], cache_file_name=str(folder / "tokens.arrow"), **settings)
    grouped = tokenized.map(group_texts, cache_file_name=str(folder / "sequences.arrow"), **settings)
    return len(grouped) * SEQUENCE_LENGTH


def group_texts(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
    """Concatenate the documents of a batch and split them into full sequences, without the remainder, like run_mlm."""
    joined = {name: list(itertools.chain(*rows)) for name, rows in examples.items()}
    total = len(joined["input_ids"]) // SEQUENCE_LENGTH * SEQUENCE_LENGTH
    return {
        name: [row[start : start + SEQUENCE_LENGTH] for start in range(0, total, SEQUENCE_LENGTH)]
        for name, row in joined.items()
    }

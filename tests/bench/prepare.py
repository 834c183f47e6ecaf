"""`bench prepare`: raw text to token shards with ours, tokenizers and datasets, alternating, on all cores.

Two comparisons over the same WikiExtractor file, with the same vocabulary for all:

- The whole preparation, in MB/s of the raw file. Ours is `prepare`, from the file to the manifest, with the start of
  its processes. The baseline is run_mlm of transformers: `datasets.map` of its fast tokenizer, then of group_texts,
  caching off. It starts from documents that are already extracted and in Arrow, and makes no sentences, no duplicate
  check and no hashes.
- Tokenizing only, in MB/s of sentences that are already split and in memory. Ours starts each time with an empty
  table of words. The baseline is `tokenizers.Tokenizer.encode_batch_fast`; its ids are not even copied out.

--check-ids compares every sentence's ids with transformers' BertTokenizer instead.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.common.commands import local_path, positive_int, program
from pretrain.common.errors import InputError, MachineError
from tests.bench import prepare_programs as programs

_SHOWN_MISMATCHES = 5


def main(argv: list[str]) -> int:
    """Run the comparison, or the requested checks, and print a table, or JSON with `--json`."""
    options = _parser().parse_args(argv)
    if importlib.util.find_spec("transformers") is None:
        raise MachineError("bench prepare: transformers is not installed. Install the extra: pip install -e .[bench].")
    result: dict[str, Any] = {"cores": programs.cores(), "versions": _versions()}
    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as folder:
        scratch = Path(folder)
        file = options.file
        if not file.is_file():
            raise InputError(f"--file: {file}: not found, or not a file.")
        result["file"] = {"path": str(file), "megabytes": file.stat().st_size / 1e6}
        vocabulary = programs.Vocabulary.trained(file, scratch)
        if options.check_ids:
            result["ids"] = check_ids(file, vocabulary)
        else:
            result |= compare(file, vocabulary, scratch, options.repeats)
    print(json.dumps(result) if options.json else "\n".join(_lines(result)))
    return 1 if options.check_ids and result["ids"]["mismatches"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"{program()} bench prepare", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--file", type=local_path, required=True, help="WikiExtractor file")
    parser.add_argument("--repeats", type=positive_int, default=5, help="repetitions; the median is reported")
    parser.add_argument("--check-ids", action="store_true", help="compare every sentence's ids instead")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    return parser


def _versions() -> dict[str, str]:
    names = ("tokenizers", "datasets", "transformers")
    return {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)}


def check_ids(file: Path, vocabulary: programs.Vocabulary) -> dict[str, Any]:
    """Our ids of every sentence against transformers' BertTokenizer: counts, and the first mismatches."""
    theirs = vocabulary.transformers_tokenizer()
    texts = ("\n".join(lines) for lines in programs.read_documents(file) if lines)
    checked, mismatches, examples = 0, 0, []
    for batch, tokens, offsets in programs.token_batches(texts, vocabulary.tokenizer()):
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
    return {"sentences": checked, "mismatches": mismatches, "examples": examples}


def compare(file: Path, vocabulary: programs.Vocabulary, scratch: Path, repeats: int) -> dict[str, Any]:
    """All four, alternating: MB/s with ranges, and the ratios of each pair."""
    documents = list(programs.read_documents(file))
    sentences = list(itertools.chain.from_iterable(documents))
    raw, text = file.stat().st_size / 1e6, sum(len(sentence.encode()) for sentence in sentences) / 1e6
    with (
        programs.Preparation(file, vocabulary) as preparation,
        programs.OwnTokenizers(documents, vocabulary) as own_tokenizers,
        programs.DatasetsMap(documents, vocabulary, scratch / "documents") as datasets_map,
    ):
        compared: dict[str, programs.Program] = {
            "prepare": preparation,
            "datasets": datasets_map,
            "tokenize": own_tokenizers,
            "tokenizers": programs.EncodeBatch(sentences, vocabulary),
        }
        seconds, tokens = _alternate(compared, scratch / "output", repeats)
    megabytes = {"prepare": raw, "datasets": raw, "tokenize": text, "tokenizers": text}
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
            f"{ours} / {baseline}": _ratio(seconds[ours], seconds[baseline])
            for ours, baseline in (("prepare", "datasets"), ("prepare", "tokenizers"), ("tokenize", "tokenizers"))
        },
    }


def _alternate(
    compared: dict[str, programs.Program], output: Path, repeats: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of every repetition and tokens of each program. The first round warms up and does not count."""
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
    """Ratio of our speed to the baseline's, for each repetition."""
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    return {"median": statistics.median(ratios), "spread": [min(ratios), max(ratios)]}


def _lines(result: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    file = result["file"]
    yield f"{file['path']}: {file['megabytes']:.1f} MB, {result['cores']} cores, {versions}"
    if "speed" in result:
        yield from _speed_lines(result)
    if "ids" in result:
        yield from _id_lines(result["ids"])


def _speed_lines(result: dict[str, Any]) -> Iterator[str]:
    names = {
        "prepare": "ours: prepare, raw file to shards",
        "datasets": "datasets: map of tokenizer and group_texts",
        "tokenize": "ours: tokenizing only",
        "tokenizers": "tokenizers: encode_batch_fast only",
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


def _id_lines(ids: dict[str, Any]) -> Iterator[str]:
    yield f"ids against BertTokenizer: {ids['sentences']:,} sentences, {ids['mismatches']:,} mismatches"
    for example in ids["examples"]:
        yield f"  {example['sentence']!r}: ours {example['ours']}, transformers {example['transformers']}"

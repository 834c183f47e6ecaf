"""`bench loader`: batches from our loader and transformers' DataCollatorForLanguageModeling, alternating, on one core.

Our loader makes everything from the shards: sentence pairs, NSP labels, masks, unpadded micro-batches. The baseline
starts from sequences that are tokenized, cut to full length and held in memory with their special-token masks (what
run_mlm's group_texts returns), shuffled by torch's DataLoader in this process. It only stacks and masks, without pairs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from pretrain.batches.loader import BatchMaker
from pretrain.common.commands import local_path, positive_int, program
from pretrain.common.errors import InputError
from pretrain.common.setting_errors import first_problem
from pretrain.config import CorpusConfig, PhaseConfig, PretrainConfig
from pretrain.corpus.shards import TokenShards, open_shards
from pretrain.corpus.vocabulary import read_vocabulary
from tests.bench.synthetic import SPECIALS, synthetic_corpus


def main(argv: list[str]) -> int:
    """Run the comparison and print a table, or JSON with `--json`."""
    parser = argparse.ArgumentParser(prog=f"{program()} bench loader", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--corpus", type=local_path, help="prepared corpus folder (default: a synthetic one)")
    parser.add_argument("--lengths", type=positive_int, nargs="+", default=[128, 512], help="sequence lengths")
    parser.add_argument("--sequences", type=positive_int, default=256, help="sequences per batch")
    parser.add_argument("--repeats", type=positive_int, default=5, help="repetitions; the median is reported")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = parser.parse_args(argv)
    for length in options.lengths:
        _config(length, options.sequences)  # refused before anything is measured
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        shards = open_shards(options.corpus, "train") if options.corpus else synthetic_corpus(Path(scratch))
        results = [compare(shards, length, options.sequences, options.repeats) for length in options.lengths]
    print(
        json.dumps({"loader": results, "torch": torch.__version__}) if options.json else "\n".join(map(_row, results))
    )
    return 0


def compare(shards: TokenShards, length: int, sequences: int, repeats: int) -> dict[str, Any]:
    """Sequences per core-second of both at one sequence length: medians and ranges over alternations."""
    loaders = {"ours": _ours(shards, length, sequences), "transformers": _baseline(shards, length, sequences)}
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(repeats + 1):
        for name, make in loaders.items():
            # Processor time: both work only in this thread, and other programs may share the machine.
            start = time.process_time()
            made = 0
            while (seconds := time.process_time() - start) < 0.5:
                make()
                made += sequences
            if number:  # the first round warms up
                rates[name].append(made / seconds)
    ratios = [a / b for a, b in zip(rates["ours"], rates["transformers"], strict=True)]
    return {
        "length": length,
        "sequences_per_batch": sequences,
        "sequences_per_second": {name: statistics.median(values) for name, values in rates.items()},
        "spread": {name: [min(values), max(values)] for name, values in rates.items()},
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
    }


def _ours(shards: TokenShards, length: int, sequences: int) -> Callable[[], object]:
    maker = BatchMaker(shards, _config(length, sequences), 0, seed=0, rank=0, world_size=1)
    first = itertools.count(step=sequences)
    return lambda: maker.make(next(first), sequences)


def _baseline(shards: TokenShards, length: int, sequences: int) -> Callable[[], object]:
    from tokenizers import Tokenizer, models
    from torch.utils.data import DataLoader
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    entries = read_vocabulary(shards.folder / "vocab.txt")
    words = models.WordPiece({entry: number for number, entry in enumerate(entries)}, unk_token="[UNK]")
    names = {f"{special[1:-1].lower()}_token": special for special in SPECIALS}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **names)
    collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=True, mlm_probability=0.15)
    tokens, capacity = shards.shards[0].tokens, length - 2
    cls_id, sep_id = shards.special_ids["cls"], shards.special_ids["sep"]
    held = [
        {
            "input_ids": [cls_id, *tokens[begin : begin + capacity].tolist(), sep_id],
            "special_tokens_mask": [1, *[0] * capacity, 1],
        }
        for begin in range(0, min(len(tokens), 8192 * capacity) - capacity, capacity)
    ]
    if len(held) < sequences:  # else the loader would be empty, and `batches` never give one
        raise InputError(
            f"--corpus: {shards.folder}: its first shard fills {len(held)} sequences of {length}, less than a "
            f"batch of {sequences}. Use a larger corpus, or fewer --sequences."
        )
    loader = DataLoader(held, batch_size=sequences, shuffle=True, collate_fn=collator, drop_last=True)  # type: ignore[arg-type]
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    return lambda: next(batches)


def _config(length: int, sequences: int) -> PretrainConfig:
    try:
        phase = PhaseConfig(sequence_length=length, global_sequences=sequences, steps=10**9, peak_learning_rate=1e-4)
        return PretrainConfig(name="bench", corpus=CorpusConfig(dir="nowhere"), phases=(phase,))
    except ValidationError as error:
        raise InputError(f"bench: {first_problem(error)}.") from None


def _row(result: dict[str, Any]) -> str:
    rate, spread = result["sequences_per_second"], result["spread"]
    sides = ", ".join(
        f"{name} {rate[name]:,.0f} ({spread[name][0]:,.0f}-{spread[name][1]:,.0f})" for name in ("ours", "transformers")
    )
    low, high = result["ratio_spread"]
    ratio = f"{result['ratio']:.1f} ({low:.1f}-{high:.1f})"
    return f"length {result['length']}: sequences per core-second: {sides}; ratio {ratio}"

"""`bench finetune CONFIG --features`: compares the speed of feature creation for span questions with run_qa.py.

The baseline is run_qa.py of transformers (examples/pytorch/question-answering, prepare_train_features): the fast
tokenizer on batches of questions with `only_second` truncation, stride and offsets, and a Python loop for the answer
positions, in `Dataset.map` with one process per core. Files and tokenizers are loaded before timing starts.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.tasks.questions import QuestionsSettings
from finetune.training.config import FinetuneConfig
from pretrain.common.errors import InputError

OURS, BASELINE = "ours", "run_qa"


def compare(config: FinetuneConfig, repeats: int) -> dict[str, Any]:
    """{"ours": [examples/s, ...], "run_qa": [...], "windows": {...}}, alternating, after one warm-up."""
    import torch

    from finetune.tasks.datasets.text import TextEncoder
    from finetune.tasks.registry import make_task
    from pretrain.checkpoint.tokenizer import read_tokenizer

    if not isinstance(config.task_settings, QuestionsSettings):
        raise InputError("bench finetune: --features needs a config of the task questions.")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    task = make_task(config.task_settings)
    examples = task.read_train()
    encoder = TextEncoder(read_tokenizer(Path(config.start_from)), config.max_length)
    candidates: dict[str, Callable[[], int]] = {
        OURS: lambda: len(task.windows(examples, encoder, training=True)),
        BASELINE: _baseline(config, examples),
    }
    rates: dict[str, list[float]] = {OURS: [], BASELINE: []}
    windows: dict[str, int] = {}
    for repeat in range(repeats + 1):
        for name, make_features in candidates.items():
            began = time.perf_counter()
            windows[name] = make_features()
            if repeat:
                rates[name].append(len(examples) / (time.perf_counter() - began))
        logging.disable(logging.WARNING)  # truncated questions are reported once
    logging.disable(logging.NOTSET)
    return {**rates, "examples": len(examples), "windows": windows}


def summary(result: dict[str, Any]) -> str:
    """One line per candidate, and one for the ratio."""
    lines = [
        f"{name:<8} {statistics.median(result[name]):,.0f} examples/s "
        f"({min(result[name]):,.0f}-{max(result[name]):,.0f}), "
        f"{result['windows'][name]:,} windows of {result['examples']:,} questions"
        for name in (OURS, BASELINE)
    ]
    ratios = [mine / theirs for mine, theirs in zip(result[OURS], result[BASELINE], strict=True)]
    lines.append(f"ratio    {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
    return "\n".join(lines)


def _baseline(config: FinetuneConfig, examples: list[Any]) -> Callable[[], int]:
    import datasets
    import transformers

    datasets.disable_progress_bars()
    datasets.disable_caching()
    tokenizer = transformers.AutoTokenizer.from_pretrained(config.start_from)
    assert isinstance(config.task_settings, QuestionsSettings)
    stride = config.task_settings.stride
    rows = datasets.Dataset.from_list(
        [
            {
                "question": one.text,
                "context": one.context,
                "starts": [a.start for a in one.answers or ()],
                "texts": [a.text for a in one.answers or ()],
            }
            for one in examples
        ]
    )

    def prepare(batch: dict[str, list[Any]]) -> dict[str, Any]:
        return _prepare_train_features(batch, tokenizer, config.max_length, stride)

    def run() -> int:
        mapped = rows.map(
            prepare,
            batched=True,
            num_proc=len(os.sched_getaffinity(0)),
            remove_columns=rows.column_names,
            load_from_cache_file=False,
        )
        return len(mapped)

    return run


def _prepare_train_features(
    batch: dict[str, list[Any]], tokenizer: Any, max_length: int, stride: int
) -> dict[str, Any]:
    made = tokenizer(
        [question.lstrip() for question in batch["question"]],
        batch["context"],
        truncation="only_second",
        max_length=max_length,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        padding=False,
    )
    samples, offsets = made.pop("overflow_to_sample_mapping"), made.pop("offset_mapping")
    starts, ends = [], []
    for number, places in enumerate(offsets):
        ids, of = made["input_ids"][number], made.sequence_ids(number)
        cls = ids.index(tokenizer.cls_token_id)
        texts, begins = batch["texts"][samples[number]], batch["starts"][samples[number]]
        first = 0
        while of[first] != 1:
            first += 1
        last = len(ids) - 1
        while of[last] != 1:
            last -= 1
        begin, end = (begins[0], begins[0] + len(texts[0])) if begins else (0, 0)
        if not begins or not (places[first][0] <= begin and places[last][1] >= end):
            starts.append(cls)
            ends.append(cls)
            continue
        while first < len(places) and places[first][0] <= begin:
            first += 1
        starts.append(first - 1)
        while places[last][1] >= end:
            last -= 1
        ends.append(last + 1)
    made["start_positions"], made["end_positions"] = starts, ends
    return dict(made)

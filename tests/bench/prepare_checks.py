"""The checks of `bench prepare`: ids against transformers' BertTokenizer, and the peak memory of our preparation."""

from __future__ import annotations

import contextlib
import html
import itertools
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import MANIFEST
from tests.bench.prepare_data import Vocabulary, read_documents, settings_for
from tests.bench.prepare_programs import token_batches

# Of `--filters`; those of language and contamination keep nothing of a document.
_FILTERS = {"repair_mojibake": True, "quality": {"enabled": True}, "near_duplicates": {"enabled": True}}
_MULTIPLES = (1, 2, 4)  # of the file's size, unless `--memory` has sizes
_PARAGRAPH = 5  # sentences
_POLL_SECONDS = 0.02
_SHOWN_MISMATCHES = 5


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


def measure_memory(
    file: Path, vocabulary: Vocabulary | None, scratch: Path, sizes: Sequence[float], *, filters: bool
) -> list[dict[str, Any]]:
    """Peak memory and seconds of `prepare`, in processes of its own.

    Args:
        file: whose sentences the texts are made of.
        vocabulary: the given one; None trains one of each text.
        scratch: holds one text and its corpus at a time.
        sizes: of the texts, MB; if empty, once, twice and four times the file's.
        filters: whether those of `--filters` are on.
    """
    rows = []
    documents = [sentences for sentences in read_documents(file) if sentences]
    if not documents:
        raise InputError(f"--file: {file}: no sentence. Is it a WikiExtractor file?")
    folder, config = scratch / "prepared", scratch / "prepare.yaml"  # JSON is YAML
    for size in sizes or [count * file.stat().st_size / 1e6 for count in _MULTIPLES]:
        text = write_recombined(documents, scratch / "recombined.txt", int(size * 1e6))
        settings = settings_for(text, folder, vocabulary)
        settings["corpus"] |= {"filters": _FILTERS} if filters else {}
        config.write_text(json.dumps(settings), encoding="utf-8")
        began = time.perf_counter()
        peak = _peak_memory([sys.executable, "-m", "finetune.cli", "prepare", str(config)], scratch / "prepare.log")
        row = {"megabytes": text.stat().st_size / 1e6, "seconds": time.perf_counter() - began, **peak}
        source = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sources"][0]
        rows.append(row | {name: source[name] for name in ("documents", "duplicates")})
        shutil.rmtree(folder)
    return rows


def write_recombined(documents: Sequence[Sequence[str]], path: Path, size: int) -> Path:
    """About `size` bytes of articles, each of as many sentences as one of `documents`, drawn from all of them."""
    sentences = [html.escape(sentence, quote=False) for document in documents for sentence in document]
    counts = np.array([len(document) for document in documents])
    draw = np.random.default_rng(0)
    with path.open("wb") as file:
        for number in itertools.count():
            length = int(draw.choice(counts))
            lines = [sentences[one] for one in draw.integers(len(sentences), size=length)]
            body = "\n".join(" ".join(lines[i : i + _PARAGRAPH]) for i in range(0, length, _PARAGRAPH))
            title = f"Article {number}"
            file.write(f'<doc id="{number}" url="" title="{title}">\n{title}\n\n{body}\n\n</doc>\n'.encode())
            if file.tell() >= size:
                break
    return path


def _peak_memory(command: list[str], log: Path) -> dict[str, float]:
    """MB at the highest of a command and its children: resident, and without pages that belong to files."""
    resident = private = most_processes = 0
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as child:
        root = psutil.Process(child.pid)
        try:
            while child.poll() is None:
                memory = _tree_memory(root)
                resident = max(resident, sum(m.rss for m in memory))
                private = max(private, sum(m.rss - m.shared for m in memory))
                most_processes = max(most_processes, len(memory))
                time.sleep(_POLL_SECONDS)
        finally:
            child.terminate()  # does nothing to one that has exited
    if child.returncode:
        last = (log.read_text(encoding="utf-8").strip().splitlines() or ["no output"])[-1]
        raise MachineError(f"bench prepare: {' '.join(command)} exited with code {child.returncode}: {last}")
    return {"resident_mb": resident / 1e6, "private_mb": private / 1e6, "processes": most_processes}


def _tree_memory(root: psutil.Process) -> list[Any]:
    """Memory of a process and its children; those that have just exited are left out."""
    memory = []
    with contextlib.suppress(psutil.Error):
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                memory.append(process.memory_info())
    return memory

"""The checks of `bench prepare`: ids against transformers' BertTokenizer, and the peak memory of our preparation."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from pretrain.bench.prepare_data import Vocabulary, read_documents, settings_for
from pretrain.bench.prepare_programs import token_batches
from pretrain.common.errors import InputError, MachineError
from pretrain.common.files import MANIFEST

COPIES = (1, 2, 4)  # of the file, for --memory
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


def measure_memory(file: Path, vocabulary: Vocabulary, scratch: Path) -> list[dict[str, Any]]:
    """Peak memory of `prepare` in processes of its own, by size of the file, with a given and a trained vocabulary."""
    rows = []
    for count in COPIES:
        copies = _write_copies(file, scratch / "copies.txt", count)
        for kind, given in (("given", vocabulary), ("trained", None)):
            folder = scratch / "prepared"
            config = scratch / "prepare.yaml"  # JSON is YAML
            config.write_text(json.dumps(settings_for(copies, folder, given)), encoding="utf-8")
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

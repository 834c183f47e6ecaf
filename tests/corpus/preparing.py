"""Configs of small preparations, and what is in the corpora that they make."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from pretrain.config import CorpusConfig, PhaseConfig, PretrainConfig, SchedulingConfig, SourceConfig
from pretrain.corpus.byte_words import entry_decoder, entry_strings, word_boundaries
from pretrain.corpus.sentences import sentence_starts
from pretrain.corpus.shards import TokenShards
from pretrain.corpus.tokenize import WordTable
from pretrain.corpus.vocabulary import entries_of
from pretrain.corpus.whole_documents import DocumentEncoder, document_records


def preparation(
    corpus_dir: Path | str, sources: Sequence[SourceConfig], *, address: str = "", **corpus: Any
) -> PretrainConfig:
    """A run that prepares the sources in one process with a small vocabulary; `address` is that of a Ray cluster."""
    settings: dict[str, Any] = {
        "dir": str(corpus_dir),
        "sources": tuple(sources),
        "vocabulary": {"size": 200, "min_frequency": 1},
        "min_document_words": 10,
        "validation_fraction": 0.1,
        "shard_tokens": 4000,
        "processes": 1,
        **corpus,
    }
    phase = PhaseConfig(sequence_length=32, global_sequences=8, steps=1, peak_learning_rate=1e-3)
    scheduling = SchedulingConfig(address=address)
    return PretrainConfig(name="trial", corpus=CorpusConfig(**settings), phases=(phase,), scheduling=scheduling)


def document_tokens(shards: TokenShards, source: int | None = None) -> list[tuple[int, ...]]:
    """The tokens of each document, of one source or of all."""
    return [
        tuple(shard.tokens[begin:end].tolist())
        for shard in shards.shards
        if source in (None, shard.source)
        for begin, end in itertools.pairwise(shard.documents[:, 1].astype(int).tolist())
    ]


def encoded(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of each text as whole documents have them; sentences divide the documents, and none is empty."""
    starts = [sentence_starts(text, "en") for text in texts]
    part = DocumentEncoder(tokenizer, WordTable()).encode(texts, starts, document_records(texts), np.dtype(np.uint16))
    ends = np.cumsum(part.documents["items"])
    sentence_ends = np.append(0, np.cumsum(part.sentence_items))[np.cumsum(part.documents["sentences"])]
    assert sentence_ends.tolist() == ends.tolist()
    assert part.sentence_items.min() > 0
    return [tokens.tolist() for tokens in np.split(part.items, ends[:-1])]


def masked_words(tokenizer: Tokenizer, text: str) -> list[str]:
    """The words that the masking schemes see in `text`."""
    ids, entries = tokenizer.encode(text, add_special_tokens=False).ids, entries_of(tokenizer)
    decode, pieces = entry_decoder(entries), [entries[number] for number in ids]
    texts = entry_strings(pieces, decode) if decode else [piece.removeprefix("##") for piece in pieces]
    words: list[str] = []
    for begins, shown in zip(word_boundaries(entries, decode).word_starts(np.array(ids)), texts, strict=True):
        words += [""] * bool(begins or not words)
        words[-1] += shown
    return words


def card(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "card.json").read_text())


def content(folder: Path) -> dict[str, bytes]:
    """All files; of the manifest only what describes the text (its settings contain the folder's paths)."""
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name[0] != "."}
    found["manifest.json"] = json.loads(found["manifest.json"])["fingerprint"].encode()
    return found
